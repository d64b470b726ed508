//! Sequence parallelism: the gather and scatter of token rows around tensor-parallel linear layers, with a rotation by
//! position.
//!
//! A [region](seamproof_oracle::region) of T ranks holds the token rows of one context-parallel rank. Each rank has a
//! *shard* of the hidden rows: one of T equal parts. Inside the region, each rank has every row of its own heads. An
//! all-gather leads to the column-parallel layer, and a reduce-scatter away from the row-parallel one. The backward
//! gathers dout, and scatters dq, dk and dv. Gradients of the layers' weights are no part of the problem.
//!
//! Three lengths meet here, and none can replace another. *Rows* of the buffer, padding and slack included, size the
//! gather, the layers and the scatter. If T does not divide them, a shard's rows are rounded up, and no sequence owns
//! the added rows. *Padded offsets* say where a sequence's rows lie, in the shards too: the borders of shards may cut a
//! sequence. *Real lengths* bound the mask. A row is rotated by its position in its sequence. It is not its
//! row, and under context parallelism it is not its place in the rank's part.
//!
//! Attention is the schedule of the problem with a rank's heads, of any algorithm. Member c of the
//! problem's group becomes ranks `c·T … c·T + T − 1`, and member t of these runs the schedule with the t-th block of
//! heads. If there are fewer KV heads than ranks, they are replicated, and the reduce-scatter adds up dk and dv of the
//! replicas.
//!
//! | refused | why |
//! |---|---|
//! | [`BuildError::QueryHeads`] | query heads that are no multiple of T |
//! | [`BuildError::KvHeads`] | KV heads that are neither a multiple nor a divisor of T |
//! | any other | what the problem's own algorithm refuses of a rank's heads |

use std::ops::Range;
use std::sync::Arc;

use seamproof_oracle::sharding::{Piece, PlacedRun};
use seamproof_oracle::{ContextParallel, Heads, Pass, Problem, ProblemFields, Run, Side, TensorName};

use super::build::{BuildError, Builder};
use super::collect::{COMMUNICATION, COMPUTE, all, part};
use super::embed::{self, Embedding};
use super::exchange::HeadDeal;
use super::program::{Buffer, BufferId, Layer, Operation, Placement, Role, Rotated, RowPair, Schedule, Work};

/// Returns the problem's schedule inside its sequence-parallel regions, around the schedules of `attention` of a rank's
/// heads. Where the problem has no region, each has one rank. The module's text says which problems are refused.
pub fn sequence_parallel(
    problem: &Problem,
    attention: impl Fn(&Problem) -> Result<Schedule, BuildError>,
) -> Result<Schedule, BuildError> {
    let ranks = problem.parallel.region;
    let heads = HeadDeal::new(problem.heads, ranks)?;
    let inner: Result<Vec<Schedule>, BuildError> =
        (0..ranks).map(|member| attention(&of_member(problem, &heads, member)?)).collect();
    let inner = inner?;
    let mut builder = Builder::new(problem.parallel.size() * ranks);
    let regions = (0..problem.parallel.size()).map(|c| (c * ranks..(c + 1) * ranks).collect());
    let communicators: Vec<usize> = regions.map(|members| builder.communicator(members)).collect();
    let members: Vec<Member> = inner
        .iter()
        .enumerate()
        .map(|(member, schedule)| Member::embed(&mut builder, problem, &heads, schedule, member, ranks))
        .collect();
    let each = communicators.iter().enumerate().flat_map(|(rank, &communicator)| {
        members.iter().map(move |member| Inside { member, rank, communicator })
    });
    let inside: Vec<Inside<'_>> = each.collect();
    inside.iter().for_each(|rank| rank.forward(&mut builder));
    if problem.pass == Pass::Backward {
        builder.begin_backward();
        inside.iter().for_each(|rank| rank.backward(&mut builder));
    }
    let mut schedule = builder.finish();
    schedule.sequence_parallel = Some(ranks);
    Ok(schedule)
}

/// Returns the problem with only the heads of one member, on ranks that are no regions. Its group is its own world.
pub(super) fn of_member(problem: &Problem, deal: &HeadDeal, member: usize) -> Result<Problem, BuildError> {
    let heads = Heads { q: deal.of(Side::Q, member).len(), kv: deal.of(Side::Kv, member).len() };
    let ContextParallel { algorithm, balance, .. } = problem.parallel;
    let parallel = ContextParallel::over(problem.parallel.size(), algorithm, balance);
    let fields = ProblemFields { heads, parallel, ..ProblemFields::from(problem.clone()) };
    Problem::new(fields).map_err(|_| BuildError::KvHeads { heads: heads.kv, ranks: heads.q })
}

/// Returns the side of a tensor that is hidden outside a region; `None` for tensors that stay with their heads.
pub(crate) fn hidden(tensor: TensorName) -> Option<Side> {
    match tensor {
        TensorName::Q | TensorName::Out | TensorName::Dout | TensorName::Dq => Some(Side::Q),
        TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv => Some(Side::Kv),
        TensorName::Lse | TensorName::MaxLogit | TensorName::Sink | TensorName::Dsink => None,
    }
}

/// Whether a tensor is rotated inside a region, or is the gradient of one that is rotated.
pub(crate) fn rotates(tensor: TensorName) -> bool {
    matches!(tensor, TensorName::Q | TensorName::K | TensorName::Dq | TensorName::Dk)
}

/// One block of heads, with its schedule on every context-parallel rank.
struct Member<'a> {
    schedule: &'a Schedule,
    embedding: Embedding,
    /// Query heads and KV heads of the block.
    heads: [Range<usize>; 2],
    /// Heads of the whole problem.
    of_problem: Heads,
}

impl<'a> Member<'a> {
    /// Adds the member's buffers and communicators. Tensors that are hidden outside the region become scratch.
    fn embed(
        builder: &mut Builder,
        problem: &Problem,
        deal: &HeadDeal,
        schedule: &'a Schedule,
        member: usize,
        ranks: usize,
    ) -> Member<'a> {
        let buffers = builder.buffers();
        let embedding = Embedding { ranks, member, buffers, communicators: builder.communicators() };
        for members in &schedule.communicators {
            builder.communicator(members.iter().map(|&rank| embedding.rank(rank)).collect());
        }
        let heads = [Side::Q, Side::Kv].map(|side| deal.of(side, member));
        for buffer in &schedule.buffers {
            let inside = match buffer.role {
                Role::Input(tensor) | Role::Output(tensor) => hidden(tensor).is_some(),
                Role::Scratch => false,
            };
            let role = if inside { Role::Scratch } else { buffer.role };
            let own = || format!("{} of own heads", buffer.name).into();
            let name = if inside { own() } else { Arc::clone(&buffer.name) };
            builder.buffer(Buffer { name, role, rank: embedding.rank(buffer.rank), ..buffer.clone() });
        }
        for placement in schedule.placements.iter().filter(|placement| hidden(placement.tensor).is_none()) {
            let Range { start, end } = placement.heads;
            let heads = heads[0].start + start..heads[0].start + end;
            builder.place(Placement {
                buffer: embedding.buffer(placement.buffer),
                heads,
                ..placement.clone()
            });
        }
        builder.reserve_events(embed::events(schedule));
        Member { schedule, embedding, heads, of_problem: problem.heads }
    }
}

/// One rank of a region.
struct Inside<'a> {
    member: &'a Member<'a>,
    /// Rank in the member's own schedule.
    rank: usize,
    /// Communicator of the region.
    communicator: usize,
}

impl Inside<'_> {
    fn forward(&self, builder: &mut Builder) {
        self.enter(builder, &[TensorName::Q, TensorName::K, TensorName::V]);
        self.attend(builder, self.member.schedule.ranks[self.rank].passes()[0]);
        self.leave(builder, &[TensorName::Out]);
    }

    fn backward(&self, builder: &mut Builder) {
        self.enter(builder, &[TensorName::Dout]);
        self.attend(builder, self.member.schedule.ranks[self.rank].passes()[1]);
        self.leave(builder, &[TensorName::Dq, TensorName::Dk, TensorName::Dv]);
    }

    /// Returns the rank in the larger schedule.
    fn place(&self) -> usize {
        self.member.embedding.rank(self.rank)
    }

    /// Adds the member's operations.
    fn attend(&self, builder: &mut Builder, operations: &[Operation]) {
        let embedding = &self.member.embedding;
        let embedded = |Operation { stream, work }: &Operation| Operation {
            stream: *stream,
            work: embedding.work(work),
        };
        embed::run(builder, self.place(), operations.iter().map(embedded));
    }

    /// Gathers hidden rows and makes the rank's heads of them.
    fn enter(&self, builder: &mut Builder, tensors: &[TensorName]) {
        let rank = self.place();
        let gathers = self.tensors(tensors).map(|tensor| {
            let from = tensor.shard(builder, Role::Input(tensor.name), &tensor.name.to_string());
            let to = tensor.whole(builder, &format!("{} hidden", tensor.name));
            let to_regions = (0..tensor.ranks).map(|i| part(builder, to, i, tensor.rows)).collect();
            let work =
                Work::AllGather { communicator: self.communicator, from: all(builder, from), to: to_regions };
            builder.push(rank, COMMUNICATION, work);
            (tensor, to, builder.record(rank, COMMUNICATION))
        });
        for (tensor, from, event) in gathers.collect::<Vec<_>>() {
            builder.wait(rank, COMPUTE, event);
            let (to, heads, rows) = (tensor.inside, tensor.heads.clone(), tensor.rows_inside(builder));
            builder.push(rank, COMPUTE, Work::Linear { layer: Layer::Column, heads, from, to, rows });
            tensor.rotate(builder, false);
        }
    }

    /// Makes summands of hidden rows from the rank's heads, and scatters their sums.
    fn leave(&self, builder: &mut Builder, tensors: &[TensorName]) {
        let rank = self.place();
        let scatters = self.tensors(tensors).map(|tensor| {
            tensor.rotate(builder, true);
            let from = tensor.whole(builder, &format!("{} hidden, partial", tensor.name));
            let (heads, rows) = (tensor.heads.clone(), tensor.rows_inside(builder));
            let work = Work::Linear { layer: Layer::Row, heads, from: tensor.inside, to: from, rows };
            builder.push(rank, COMPUTE, work);
            let ready = builder.record(rank, COMPUTE);
            builder.wait(rank, COMMUNICATION, ready);
            let landing = tensor.shard(builder, Role::Scratch, &format!("{} landing", tensor.name));
            let parts = (0..tensor.ranks).map(|i| part(builder, from, i, tensor.rows)).collect();
            let (communicator, to) = (self.communicator, all(builder, landing));
            builder.push(rank, COMMUNICATION, Work::ReduceScatter { communicator, from: parts, to });
            (tensor, landing, builder.record(rank, COMMUNICATION))
        });
        for (tensor, from, event) in scatters.collect::<Vec<_>>() {
            builder.wait(rank, COMPUTE, event);
            let to = tensor.shard(builder, Role::Output(tensor.name), &tensor.name.to_string());
            // Rows that no sequence owns stay as they were.
            let owned = tensor.cut().into_iter().map(|placed| Run { len: placed.local.span, ..placed.local });
            let rows: Vec<RowPair> = owned.map(|run| (run, run)).collect();
            builder.copy(rank, COMPUTE, from, to, &rows);
        }
    }

    fn tensors(&self, names: &[TensorName]) -> impl Iterator<Item = Hidden<'_>> {
        let Member { schedule, embedding, heads, of_problem } = self.member;
        let mine = |placement: &&Placement| schedule.buffers[placement.buffer.0].rank == self.rank;
        let placements = names.iter().filter_map(move |name| {
            schedule.placements.iter().filter(mine).find(|placement| placement.tensor == *name)
        });
        placements.filter_map(move |placement| {
            let (heads, of_problem) = match hidden(placement.tensor)? {
                Side::Q => (heads[0].clone(), of_problem.q),
                Side::Kv => (heads[1].clone(), of_problem.kv),
            };
            Some(Hidden {
                name: placement.tensor,
                inside: embedding.buffer(placement.buffer),
                placed: &placement.rows,
                heads,
                of_problem,
                ranks: embedding.ranks,
                member: embedding.member,
                rows: schedule.buffers[placement.buffer.0].rows.div_ceil(embedding.ranks),
            })
        })
    }
}

/// One tensor on one rank of a region.
struct Hidden<'a> {
    name: TensorName,
    /// Buffer inside the region, with the rank's heads.
    inside: BufferId,
    /// Placed rows of the buffer inside.
    placed: &'a [PlacedRun],
    /// The rank's heads among all heads.
    heads: Range<usize>,
    /// Number of all heads.
    of_problem: usize,
    /// Number of ranks of the region.
    ranks: usize,
    /// Index of the rank in the region.
    member: usize,
    /// Rows of a shard: the rows of the buffer inside ÷ ranks, rounded up.
    rows: usize,
}

impl Hidden<'_> {
    /// Adds a buffer of `rows` rows with every head.
    fn buffer(&self, builder: &mut Builder, role: Role, name: &str, rows: usize) -> BufferId {
        let inside = builder.describe(self.inside).clone();
        builder.buffer(Buffer { name: name.into(), role, rows, heads: self.of_problem, ..inside })
    }

    /// Adds the rank's shard. An input or a result is placed.
    fn shard(&self, builder: &mut Builder, role: Role, name: &str) -> BufferId {
        let buffer = self.buffer(builder, role, name, self.rows);
        if role != Role::Scratch {
            let (tensor, heads, rows) = (self.name, 0..self.of_problem, self.cut());
            builder.place(Placement { tensor, buffer, heads, rows });
        }
        buffer
    }

    /// Adds a buffer of every rank's rows.
    fn whole(&self, builder: &mut Builder, name: &str) -> BufferId {
        self.buffer(builder, Role::Scratch, name, self.rows * self.ranks)
    }

    /// Returns every row inside the region, padding and slack included: a layer does not tell them apart.
    fn rows_inside(&self, builder: &Builder) -> Vec<RowPair> {
        let rows = builder.describe(self.inside).rows;
        let all = Run::packed(0, rows, rows);
        vec![(all, all)]
    }

    /// Returns the placed rows that lie in the rank's shard.
    fn cut(&self) -> Vec<PlacedRun> {
        let shard = self.member * self.rows..(self.member + 1) * self.rows;
        self.placed.iter().filter_map(|placed| cut(placed, &shard)).collect()
    }

    /// Rotates the rows of every sequence by their positions in it. Padding rows are rotated too, as the field's
    /// kernels do.
    fn rotate(&self, builder: &mut Builder, inverse: bool) {
        if !rotates(self.name) {
            return;
        }
        let work = Work::Rotate { buffer: self.inside, rows: rotated(self.placed), inverse };
        let rank = builder.describe(self.inside).rank;
        builder.push(rank, COMPUTE, work);
    }
}

/// Returns the rotation of placed rows by their positions.
pub(crate) fn rotated(placed: &[PlacedRun]) -> Vec<Rotated> {
    let owned = placed.iter().filter(|placed| placed.local.span > 0);
    let rotated = owned.map(|PlacedRun { piece, local, .. }| {
        let rows = Run { len: local.span, ..*local };
        Rotated { rows, position: piece.start, step: piece.step }
    });
    rotated.collect()
}

/// Returns the part of a run that lies in rows `shard`, counted from the shard's first row.
pub(super) fn cut(placed: &PlacedRun, shard: &Range<usize>) -> Option<PlacedRun> {
    let PlacedRun { sequence, piece, local } = *placed;
    let index = |row: usize| row.saturating_sub(local.offset).div_ceil(local.step).min(local.span);
    let (first, end) = (index(shard.start), index(shard.end));
    let span = end.checked_sub(first).filter(|&span| span > 0)?;
    let len = local.len.clamp(first, end) - first;
    let offset = local.offset + local.step * first - shard.start;
    let piece = Piece { start: piece.start + piece.step * first, span, at: piece.at + first, ..piece };
    Some(PlacedRun { sequence, piece, local: Run { offset, step: local.step, len, span } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_knows_rows_not_sequences() {
        let piece = Piece { start: 10, step: 2, span: 7, at: 0 };
        let placed = PlacedRun { sequence: 3, piece, local: Run::packed(5, 4, 7) };
        let shards = [0..4, 4..8, 8..12, 12..16].map(|shard| {
            cut(&placed, &shard).map(|cut| (cut.piece.start, cut.local.offset, cut.local.len, cut.local.span))
        });
        assert_eq!(shards, [None, Some((10, 1, 3, 3)), Some((16, 0, 1, 4)), None]);
    }
}
