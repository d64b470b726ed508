//! The plan of sequence-parallel regions, around the plan of a rank's heads. It has the same operations as
//! [`super::super::sequence_parallel`], which says why they are right.

use seamproof_oracle::{Heads, Side, TensorName};

use super::act::{Act, Extent, Mark, Op, Own};
use super::barrier::Barrier;
use super::{Around, own};
use crate::schedule::build::Builder;
use crate::schedule::exchange::HeadDeal;
use crate::schedule::program::{Buffer, BufferId, Layer, Role};
use crate::schedule::sequence_parallel::{hidden, rotates};

const COMPUTE: u8 = 0;
const COMMUNICATION: u8 = 2;

/// A tensor whose rows are hidden outside a region.
#[derive(Clone, Copy, Debug)]
struct Hidden {
    name: TensorName,
    /// The buffer of the rank's heads.
    inside: Own,
    /// The rank's shard: of an input where it lies, of a result where it lands.
    shard: Own,
    /// The rows of all shards.
    whole: Own,
    /// The shard of a result.
    result: Option<Own>,
    marks: [Mark; 2],
}

/// Regions around a plan.
#[derive(Debug)]
pub(super) struct RegionPlan {
    /// Number of ranks of a region.
    pub(super) ranks: usize,
    /// Heads of the members of a region.
    pub(super) deal: HeadDeal,
    /// Tensors that enter the forward and leave it, and those of the backward.
    passes: [[Vec<Hidden>; 2]; 2],
    barriers: [Barrier; 2],
}

/// Returns the names of tensors that enter a pass, and of those that leave it.
fn names(is_backward: bool) -> [&'static [TensorName]; 2] {
    use TensorName::{Dk, Dout, Dq, Dv, K, Out, Q, V};
    if is_backward { [&[Dout], &[Dq, Dk, Dv]] } else { [&[Q, K, V], &[Out]] }
}

impl RegionPlan {
    /// Makes the buffers in the order in which the builder makes them. `tensors` are the inputs and results of the plan
    /// inside, and `events` and `streams` its marks and streams.
    pub(super) fn new(
        builder: &mut Builder,
        (ranks, deal, heads): (usize, HeadDeal, Heads),
        tensors: &[(TensorName, BufferId)],
        (events, streams): (usize, &[u8]),
    ) -> RegionPlan {
        for (_, inside) in tensors.iter().filter(|(name, _)| hidden(*name).is_some()) {
            let buffer = builder.describe_mut(*inside);
            (buffer.role, buffer.name) = (Role::Scratch, format!("{} of own heads", buffer.name).into());
        }
        let mut making = Making { builder, ranks, heads, tensors, next: events as u32 };
        let passes = [false, true].map(|is_backward| {
            let [enter, leave] = names(is_backward);
            [making.enter(enter), making.leave(leave)]
        });
        let mut next = making.next;
        let barriers = [0, 1].map(|_| Barrier::new(&mut next, streams));
        RegionPlan { ranks, deal, passes, barriers }
    }

    /// Returns the number of marks, those of the plan inside among them.
    pub(super) fn events(&self) -> usize {
        self.barriers[1].end as usize
    }

    /// Returns the inputs and results of a rank in the order of their placements.
    pub(super) fn placed(&self) -> impl Iterator<Item = (TensorName, Own)> {
        let all = self.passes.iter().flatten().flatten();
        all.map(|tensor| (tensor.name, tensor.result.unwrap_or(tensor.shard)))
    }
}

impl Around for RegionPlan {
    /// Gathers hidden rows and makes the rank's heads of them.
    fn before(&self, is_backward: bool, ops: &mut Vec<Op>) {
        let pass = usize::from(is_backward);
        for Hidden { shard, whole, marks: [arrived, _], .. } in &self.passes[pass][0] {
            push(ops, COMMUNICATION, Act::GatherHidden { from: *shard, to: *whole });
            push(ops, COMMUNICATION, Act::Record(*arrived));
        }
        for Hidden { name, inside, whole, marks: [arrived, _], .. } in &self.passes[pass][0] {
            let side = name.side();
            push(ops, COMPUTE, Act::Wait(*arrived));
            push(ops, COMPUTE, Act::Linear { layer: Layer::Column, side, from: *whole, to: *inside });
            if rotates(*name) {
                push(ops, COMPUTE, Act::Rotate { buffer: *inside, side, inverse: false });
            }
        }
        self.barriers[pass].begin(ops);
    }

    /// Makes summands of hidden rows, and scatters their sums.
    fn behind(&self, is_backward: bool, ops: &mut Vec<Op>) {
        let pass = usize::from(is_backward);
        self.barriers[pass].end(ops);
        for Hidden { name, inside, whole, shard, marks: [ready, ended], .. } in &self.passes[pass][1] {
            let side = name.side();
            if rotates(*name) {
                push(ops, COMPUTE, Act::Rotate { buffer: *inside, side, inverse: true });
            }
            push(ops, COMPUTE, Act::Linear { layer: Layer::Row, side, from: *inside, to: *whole });
            push(ops, COMPUTE, Act::Record(*ready));
            push(ops, COMMUNICATION, Act::Wait(*ready));
            push(ops, COMMUNICATION, Act::ScatterHidden { from: *whole, to: *shard });
            push(ops, COMMUNICATION, Act::Record(*ended));
        }
        for Hidden { name, shard, result, marks: [_, ended], .. } in &self.passes[pass][1] {
            push(ops, COMPUTE, Act::Wait(*ended));
            let rows = Extent::Shard(name.side());
            result.iter().for_each(|to| push(ops, COMPUTE, Act::Copy { from: *shard, to: *to, rows }));
        }
    }
}

/// Buffers in the making.
struct Making<'a> {
    builder: &'a mut Builder,
    ranks: usize,
    heads: Heads,
    tensors: &'a [(TensorName, BufferId)],
    next: u32,
}

impl Making<'_> {
    fn enter(&mut self, names: &[TensorName]) -> Vec<Hidden> {
        let all = names.iter().filter_map(|name| {
            let inside = self.inside(*name)?;
            let shard = self.buffer(inside, *name, (Role::Input(*name), &name.to_string()), 1);
            let whole = self.buffer(inside, *name, (Role::Scratch, &format!("{name} hidden")), self.ranks);
            Some(self.hidden(*name, inside, [shard, whole]))
        });
        all.collect()
    }

    fn leave(&mut self, names: &[TensorName]) -> Vec<Hidden> {
        let all = names.iter().filter_map(|name| {
            let inside = self.inside(*name)?;
            let (partial, landing) = (format!("{name} hidden, partial"), format!("{name} landing"));
            let whole = self.buffer(inside, *name, (Role::Scratch, &partial), self.ranks);
            let shard = self.buffer(inside, *name, (Role::Scratch, &landing), 1);
            Some(self.hidden(*name, inside, [shard, whole]))
        });
        let mut all: Vec<Hidden> = all.collect();
        for tensor in &mut all {
            let (name, inside) = (tensor.name, BufferId(tensor.inside.0.into()));
            tensor.result = Some(self.buffer(inside, name, (Role::Output(name), &name.to_string()), 1));
        }
        all
    }

    fn inside(&self, name: TensorName) -> Option<BufferId> {
        self.tensors.iter().find(|(tensor, _)| *tensor == name).map(|(_, buffer)| *buffer)
    }

    /// Adds a buffer of some shards with every head.
    fn buffer(&mut self, inside: BufferId, of: TensorName, (role, name): (Role, &str), shards: usize) -> Own {
        let inside = self.builder.describe(inside).clone();
        let rows = inside.rows.div_ceil(self.ranks) * shards;
        let heads = if of.side() == Side::Q { self.heads.q } else { self.heads.kv };
        own(self.builder.buffer(Buffer { name: name.into(), role, rows, heads, ..inside }))
    }

    fn hidden(&mut self, name: TensorName, inside: BufferId, [shard, whole]: [Own; 2]) -> Hidden {
        let marks = [Mark(self.next), Mark(self.next + 1)];
        self.next += 2;
        Hidden { name, inside: own(inside), shard, whole, result: None, marks }
    }
}

fn push(ops: &mut Vec<Op>, stream: u8, act: Act) {
    ops.push(Op { stream, act });
}
