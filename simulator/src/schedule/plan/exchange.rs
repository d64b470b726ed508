//! The plan of exchanges around a ring, or around one launch. They are those of [`super::super::exchange`].

use seamproof_oracle::{Format, Side};

use super::act::{Act, Extent, Mark, Op, Own, Way};
use super::ring::RingPlan;
use super::{Around, Core, CoreShape, own};
use crate::schedule::BufferId;
use crate::schedule::build::{Builder, Local, LocalBackward, Shards};
use crate::schedule::exchange::{HeadDeal, resized};

const COMPUTE: u8 = 0;
const COMMUNICATION: u8 = 2;

/// An input on its way: its side, the rank's own buffer, the buffers in rank order and as collected, and the mark of its
/// arrival.
#[derive(Debug)]
struct Collected {
    side: Side,
    from: Own,
    ranked: Own,
    to: Own,
    arrived: Mark,
}

/// A result on its way: its side, the collected buffer, the one in rank order, the first landing and their number, the
/// result, and the marks of its leaving and arrival.
#[derive(Debug)]
struct Dealt {
    side: Side,
    from: Own,
    ranked: Own,
    landing: Own,
    landings: u16,
    to: Own,
    marks: [Mark; 2],
}

/// Exchanges before and behind each pass.
#[derive(Debug)]
pub(super) struct Exchanged {
    begin: Vec<Collected>,
    end: Vec<Dealt>,
    /// The block's statistic, the rank's, and the mark of the block's.
    max_logit: (Own, Own, Mark),
    begin_backward: Vec<Collected>,
    end_backward: Vec<Dealt>,
}

/// Buffers and marks in the making.
struct Making<'a> {
    builder: &'a mut Builder,
    shards: &'a Shards,
    members: usize,
    heads: HeadDeal,
    marks: usize,
}

impl Making<'_> {
    /// Returns a number of marks that are still free.
    fn marks<const N: usize>(&mut self, of: impl Fn(usize) -> Mark) -> [Mark; N] {
        let first = self.marks;
        self.marks += N;
        std::array::from_fn(|index| of(first + index))
    }

    /// Makes the buffers of inputs on their way. Returns the collected ones too.
    fn collect(
        &mut self,
        local: &[(Side, BufferId)],
        mark: impl Fn(usize) -> Mark,
    ) -> (Vec<Collected>, Vec<BufferId>) {
        let mut ranked = Vec::new();
        for &(side, from) in local {
            let shard = if side == Side::Q { &self.shards.q } else { &self.shards.kv };
            let name = format!("{} in rank order", self.builder.describe(from).name);
            let (rows, heads) = (shard.rows * self.members, self.heads.of(side, 0).len());
            ranked.push(resized(self.builder, from, &name, rows, heads));
        }
        let mut made = Vec::new();
        let all = local.iter().zip(ranked).map(|(&(side, from), ranked)| {
            let name = format!("{} collected", self.builder.describe(from).name);
            let to = self.builder.like(ranked, &name, self.builder.describe(ranked).format);
            made.push(to);
            let [arrived] = self.marks(&mark);
            Collected { side, from: own(from), ranked: own(ranked), to: own(to), arrived }
        });
        (all.collect(), made)
    }

    /// Makes the buffers of results on their way.
    fn deal(&mut self, results: &[(Side, BufferId, BufferId)], mark: impl Fn(usize) -> Mark) -> Vec<Dealt> {
        let dealt = results.iter().map(|&(side, collected, to)| {
            let format = self.builder.describe(collected).format;
            let name = self.builder.describe(to).name.clone();
            let ranked = self.builder.like(collected, &format!("{name} in rank order"), format);
            let landings = self.heads.replicas(side);
            let made: Vec<BufferId> =
                (0..landings).map(|_| self.builder.like(to, &format!("{name} landing"), format)).collect();
            let (from, ranked, to, landing) = (own(collected), own(ranked), own(to), own(made[0]));
            Dealt { side, from, ranked, landing, landings: landings as u16, to, marks: self.marks(&mark) }
        });
        dealt.collect()
    }
}

impl Exchanged {
    /// Makes the buffers of a rank in the order in which its builder makes them, those of the core among them.
    pub(super) fn new(
        builder: &mut Builder,
        local: &Local,
        shards: &Shards,
        members: usize,
        heads: HeadDeal,
        shape: &CoreShape<'_>,
    ) -> (Exchanged, Core) {
        let (q, kv) = (Side::Q, Side::Kv);
        let other = |number: usize| RingPlan::other(shape.steps(), number);
        let mut making = Making { builder, shards, members, heads, marks: 0 };
        let inputs = [(q, local.q), (kv, local.k), (kv, local.v)];
        let (begin, made) = making.collect(&inputs, other);
        let mut block = Local { q: made[0], k: made[1], v: made[2], backward: None, ..*local };
        let (rows, of_block) = {
            let q = making.builder.describe(block.q);
            (q.rows, q.heads)
        };
        let mut resize = |model, name| resized(making.builder, model, name, rows, of_block);
        block.out = resize(local.out, "out collected");
        block.lse = resize(local.lse, "lse collected");
        block.max_logit = resize(local.max_logit, "max_logit of the block");
        let core = shape.forward(making.builder, &block);
        let end = making.deal(&[(q, block.out, local.out), (q, block.lse, local.lse)], other);
        let [gathered] = making.marks(other);
        let max_logit = (own(block.max_logit), own(local.max_logit), gathered);
        let Some(to) = local.backward else {
            let exchanged =
                Exchanged { begin, end, max_logit, begin_backward: Vec::new(), end_backward: Vec::new() };
            return (exchanged, core);
        };
        let (begin_backward, made) = making.collect(&[(q, to.dout)], other);
        let gradient = making.builder.describe(to.dq).format;
        let of_keys = if heads.replicas(kv) > 1 { Format::F32 } else { gradient };
        let collected = LocalBackward {
            dout: made[0],
            dq: making.builder.like(block.q, "dq collected", gradient),
            dk: making.builder.like(block.k, "dk collected", of_keys),
            dv: making.builder.like(block.v, "dv collected", of_keys),
            dsink: to.dsink,
        };
        block.backward = Some(collected);
        let core = shape.with_backward(core, making.builder, &block);
        let results = [(q, collected.dq, to.dq), (kv, collected.dk, to.dk), (kv, collected.dv, to.dv)];
        let end_backward = making.deal(&results, other);
        (Exchanged { begin, end, max_logit, begin_backward, end_backward }, core)
    }
}

impl Around for Exchanged {
    /// Collects the rows of all members, of a part of the heads.
    fn before(&self, is_backward: bool, to: &mut Vec<Op>) {
        collect(if is_backward { &self.begin_backward } else { &self.begin }, to);
    }

    /// Deals them back.
    fn behind(&self, is_backward: bool, to: &mut Vec<Op>) {
        if is_backward {
            return deal(&self.end_backward, to);
        }
        deal(&self.end, to);
        let (from, all, mark) = self.max_logit;
        push(to, COMPUTE, Act::Record(mark));
        push(to, COMMUNICATION, Act::Wait(mark));
        push(to, COMMUNICATION, Act::GatherHeads { from, to: all });
    }
}

fn push(to: &mut Vec<Op>, stream: u8, act: Act) {
    to.push(Op { stream, act });
}

fn collect(inputs: &[Collected], ops: &mut Vec<Op>) {
    for &Collected { side, from, ranked, arrived, .. } in inputs {
        let act = Act::AllToAll { side, way: Way::Collect, from, to: ranked, landings: 1 };
        push(ops, COMMUNICATION, act);
        push(ops, COMMUNICATION, Act::Record(arrived));
    }
    for &Collected { side, ranked, to, arrived, .. } in inputs {
        push(ops, COMPUTE, Act::Wait(arrived));
        push(ops, COMPUTE, Act::Reorder { from: ranked, to, side, way: Way::Collect });
    }
}

fn deal(results: &[Dealt], ops: &mut Vec<Op>) {
    for &Dealt { side, from, ranked, landing, landings, marks: [left, arrived], .. } in results {
        push(ops, COMPUTE, Act::Reorder { from, to: ranked, side, way: Way::Deal });
        push(ops, COMPUTE, Act::Record(left));
        push(ops, COMMUNICATION, Act::Wait(left));
        push(ops, COMMUNICATION, Act::AllToAll { side, way: Way::Deal, from: ranked, to: landing, landings });
        push(ops, COMMUNICATION, Act::Record(arrived));
    }
    for &Dealt { side, landing, landings, to, marks: [_, arrived], .. } in results {
        push(ops, COMPUTE, Act::Wait(arrived));
        for replica in 1..landings {
            push(ops, COMPUTE, Act::Add { side, from: Own(landing.0 + replica), to: landing });
        }
        push(ops, COMPUTE, Act::Copy { from: landing, to, rows: Extent::LocalSlots(side) });
    }
}
