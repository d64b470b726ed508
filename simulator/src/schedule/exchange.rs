//! The *exchange*: the all-to-all that turns a rank's rows of every head into all members' rows of a block of heads.
//!
//! The *members* of an exchange are consecutive ranks of the group. Buffers in *rank order* hold the members' rows one
//! member after the other. *Collected* buffers hold them in the order in which attention wants them. *Collecting* is an
//! all-to-all and then a reorder. *Dealing* is a reorder and then an all-to-all. It lands in a scratch buffer, and only
//! the rows that a sequence owns are copied to the result: rows in no slot keep their values. A KV head that is
//! *replicated* on several members has a partial gradient on each. These land apart and are added in f32.
//!
//! A *block* is the attention problem of one member: a [`Local`] of collected buffers with the member's heads. The sink
//! and its gradient are the rank's own buffers, which hold only the heads of its block.

use std::ops::Range;

use seamproof_oracle::{Format, Heads, Problem, Side};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards};
use super::collect::{COMMUNICATION, COMPUTE, all, every_head, inverse, part};
use super::program::{Axes, Buffer, BufferId, EventId, Region, Role, RowPair, Work};
use crate::shard::ShardedSide;

/// Heads in equal blocks, each held by `replicas` consecutive members.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    heads: usize,
    replicas: usize,
}

impl Blocks {
    fn of(&self, member: usize) -> Range<usize> {
        let block = member / self.replicas;
        block * self.heads..(block + 1) * self.heads
    }
}

/// Assignment of heads to the members of an all-to-all. Query heads stay with the KV head that they read.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadDeal {
    q: Blocks,
    kv: Blocks,
}

impl HeadDeal {
    pub(super) fn new(heads: Heads, members: usize) -> Result<HeadDeal, BuildError> {
        if !heads.q.is_multiple_of(members) {
            return Err(BuildError::QueryHeads { heads: heads.q, ranks: members });
        }
        let q = Blocks { heads: heads.q / members, replicas: 1 };
        let kv = if heads.kv.is_multiple_of(members) {
            Blocks { heads: heads.kv / members, replicas: 1 }
        } else if members.is_multiple_of(heads.kv) {
            Blocks { heads: 1, replicas: members / heads.kv }
        } else {
            return Err(BuildError::KvHeads { heads: heads.kv, ranks: members });
        };
        Ok(HeadDeal { q, kv })
    }

    /// Returns a member's heads of one side.
    pub(super) fn of(&self, side: Side, member: usize) -> Range<usize> {
        match side {
            Side::Q => self.q.of(member),
            Side::Kv => self.kv.of(member),
        }
    }

    /// Returns the number of members that hold each head of one side.
    pub(super) fn replicas(&self, side: Side) -> usize {
        match side {
            Side::Q => self.q.replicas,
            Side::Kv => self.kv.replicas,
        }
    }

    /// Returns the learnable sinks of a member, which are those of its query heads.
    pub(super) fn sinks(&self, problem: &Problem, member: usize) -> Range<usize> {
        if problem.learnable_sinks() > 0 { self.q.of(member) } else { 0..0 }
    }
}

/// The members of an all-to-all and the order in which attention wants their rows.
pub(super) struct Exchange {
    communicator: usize,
    members: usize,
    heads: HeadDeal,
    q: SideOrder,
    kv: SideOrder,
}

/// Row orders of one side.
struct SideOrder {
    /// Rows of one member.
    rows: usize,
    /// Row pairs from rank order to collected order.
    collect: Vec<RowPair>,
    /// Row pairs from collected order to rank order.
    deal: Vec<RowPair>,
    /// Rows of a member that a sequence owns.
    slots: Vec<RowPair>,
}

impl SideOrder {
    fn new(shard: &ShardedSide, collect: Vec<RowPair>) -> SideOrder {
        let slots = build::same_rows(&build::slots(shard));
        SideOrder { rows: shard.rows, deal: inverse(&collect), collect, slots }
    }
}

/// A tensor on its way back: its side, the collected buffer on this rank, and the local result.
type Dealt = (Side, BufferId, BufferId);

impl Exchange {
    /// Returns the exchange between `members` members over `communicator`. The pairs lead from rank order to the
    /// collected order of q and of kv.
    pub(super) fn new(
        communicator: usize,
        members: usize,
        heads: HeadDeal,
        shards: &Shards,
        [q, kv]: [Vec<RowPair>; 2],
    ) -> Exchange {
        let (q, kv) = (SideOrder::new(&shards.q, q), SideOrder::new(&shards.kv, kv));
        Exchange { communicator, members, heads, q, kv }
    }

    fn side(&self, side: Side) -> (&SideOrder, &Blocks) {
        match side {
            Side::Q => (&self.q, &self.heads.q),
            Side::Kv => (&self.kv, &self.heads.kv),
        }
    }

    /// Collects a rank's inputs and returns its block, with room for the results.
    pub(super) fn begin(&self, builder: &mut Builder, rank: usize, local: &Local) -> Local {
        let inputs = [(Side::Q, local.q), (Side::Kv, local.k), (Side::Kv, local.v)];
        let [q, k, v] = self.collect(builder, rank, inputs);
        let (rows, heads) = (builder.describe(q).rows, builder.describe(q).heads);
        let out = resized(builder, local.out, "out collected", rows, heads);
        let lse = resized(builder, local.lse, "lse collected", rows, heads);
        let max_logit = resized(builder, local.max_logit, "max_logit of the block", rows, heads);
        Local { q, k, v, sink: local.sink, out, lse, max_logit, backward: None }
    }

    /// Brings a block's forward results to the ranks that own them.
    pub(super) fn end(&self, builder: &mut Builder, rank: usize, block: &Local, local: &Local) {
        self.deal(builder, rank, [(Side::Q, block.out, local.out), (Side::Q, block.lse, local.lse)]);
        self.gather_heads(builder, rank, block.max_logit, local.max_logit);
    }

    /// Collects dout and returns the backward buffers of a block, with room for the gradients.
    pub(super) fn begin_backward(
        &self,
        builder: &mut Builder,
        rank: usize,
        block: &Local,
        to: &LocalBackward,
    ) -> LocalBackward {
        let [dout] = self.collect(builder, rank, [(Side::Q, to.dout)]);
        let format = builder.describe(to.dq).format;
        let dq = builder.like(block.q, "dq collected", format);
        // Partial gradients are rounded once, after they are added.
        let format = if self.heads.kv.replicas > 1 { Format::F32 } else { format };
        let dk = builder.like(block.k, "dk collected", format);
        let dv = builder.like(block.v, "dv collected", format);
        LocalBackward { dout, dq, dk, dv, dsink: to.dsink }
    }

    /// Brings a block's gradients to the ranks that own them.
    pub(super) fn end_backward(
        &self,
        builder: &mut Builder,
        rank: usize,
        block: &LocalBackward,
        to: &LocalBackward,
    ) {
        let (q, kv) = (Side::Q, Side::Kv);
        self.deal(builder, rank, [(q, block.dq, to.dq), (kv, block.dk, to.dk), (kv, block.dv, to.dv)]);
    }

    /// Collects every member's rows of this rank's heads, for each local buffer. A reorder overlaps the next exchange.
    fn collect<const N: usize>(
        &self,
        builder: &mut Builder,
        rank: usize,
        local: [(Side, BufferId); N],
    ) -> [BufferId; N] {
        let arrived = local.map(|(side, from)| {
            let (order, blocks) = self.side(side);
            let name = format!("{} in rank order", builder.describe(from).name);
            let to = resized(builder, from, &name, order.rows * self.members, blocks.heads);
            let whole = all(builder, from);
            let send = (0..self.members).map(|j| Region { heads: blocks.of(j), ..whole.clone() }).collect();
            let recv = (0..self.members).map(|i| part(builder, to, i, order.rows)).collect();
            let work = Work::AllToAll { communicator: self.communicator, send, recv };
            builder.push(rank, COMMUNICATION, work);
            (order, from, to, builder.record(rank, COMMUNICATION))
        });
        arrived.map(|(order, local, from, event)| {
            builder.wait(rank, COMPUTE, event);
            let name = format!("{} collected", builder.describe(local).name);
            let to = builder.like(from, &name, builder.describe(from).format);
            builder.copy(rank, COMPUTE, from, to, &order.collect);
            to
        })
    }

    /// Brings collected results back to the ranks that own their rows, with all heads.
    fn deal<const N: usize>(&self, builder: &mut Builder, rank: usize, results: [Dealt; N]) {
        let arrived = results.map(|(side, collected, to)| {
            let (order, _) = self.side(side);
            let format = builder.describe(collected).format;
            let name = format!("{} in rank order", builder.describe(to).name);
            let from = builder.like(collected, &name, format);
            builder.copy(rank, COMPUTE, collected, from, &order.deal);
            let ready = builder.record(rank, COMPUTE);
            builder.wait(rank, COMMUNICATION, ready);
            let (landings, event) = self.send_back(builder, rank, side, from, to, format);
            (order, landings, to, event)
        });
        for (order, landings, to, event) in arrived {
            builder.wait(rank, COMPUTE, event);
            let (sum, others) = (landings[0], &landings[1..]);
            for &from in others {
                let rows = order.slots.clone();
                builder.push(rank, COMPUTE, Work::Accumulate { from, to: sum, rows });
            }
            builder.copy(rank, COMPUTE, sum, to, &order.slots);
        }
    }

    /// Pushes the all-to-all of [`Exchange::deal`]. Returns one landing buffer for each replica, and the event of its
    /// end.
    fn send_back(
        &self,
        builder: &mut Builder,
        rank: usize,
        side: Side,
        from: BufferId,
        to: BufferId,
        format: Format,
    ) -> (Vec<BufferId>, EventId) {
        let (order, blocks) = self.side(side);
        let name = format!("{} landing", builder.describe(to).name);
        let landings: Vec<BufferId> = (0..blocks.replicas).map(|_| builder.like(to, &name, format)).collect();
        let send = (0..self.members).map(|i| part(builder, from, i, order.rows)).collect();
        let landing =
            |j: usize| Region { heads: blocks.of(j), ..all(builder, landings[j % blocks.replicas]) };
        let recv = (0..self.members).map(landing).collect();
        let work = Work::AllToAll { communicator: self.communicator, send, recv };
        builder.push(rank, COMMUNICATION, work);
        (landings, builder.record(rank, COMMUNICATION))
    }

    /// Gathers a statistic of the rank's query heads into one of all heads on every member.
    fn gather_heads(&self, builder: &mut Builder, rank: usize, from: BufferId, to: BufferId) {
        let ready = builder.record(rank, COMPUTE);
        builder.wait(rank, COMMUNICATION, ready);
        let whole = every_head(builder, to);
        let regions =
            (0..self.members).map(|member| Region { heads: self.heads.q.of(member), ..whole.clone() });
        let work = Work::AllGather {
            communicator: self.communicator,
            to: regions.collect(),
            from: every_head(builder, from),
        };
        builder.push(rank, COMMUNICATION, work);
    }
}

/// Makes a scratch buffer like `model`, with other rows and heads.
pub(super) fn resized(
    builder: &mut Builder,
    model: BufferId,
    name: &str,
    rows: usize,
    heads: usize,
) -> BufferId {
    let model = builder.describe(model).clone();
    let rows = if model.axes == Axes::Heads { model.rows } else { rows };
    builder.buffer(Buffer { name: name.into(), role: Role::Scratch, rows, heads, ..model })
}
