//! The parts that every builder uses. They make buffers, events and operations, place inputs and results, and turn a
//! mask into the bounds of a segment.

use std::ops::Range;

use seamproof_oracle::sharding::{Piece, PlacedRun, ShardingError, held};
#[cfg(test)]
use seamproof_oracle::{Alignment, Blocks};
use seamproof_oracle::{Band, Format, Mask, Problem, Run, Side, TensorName};

use super::program::{
    Axes, Buffer, BufferId, EventId, FillValue, Operation, Placement, RankProgram, Role, RowPair, Schedule,
    Work,
};
use crate::Segment;
use crate::shard::ShardedSide;

/// Reason why a problem has no schedule: rows or heads that cannot be dealt evenly, or a problem that the builder of
/// its algorithm does not support.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum BuildError {
    /// A side that cannot be cut.
    #[error(transparent)]
    Shard(#[from] ShardingError),
    /// Query heads that cannot be dealt to ranks.
    #[error("{heads} query heads cannot be dealt to {ranks} ranks; use a multiple")]
    QueryHeads {
        /// Number of query heads.
        heads: usize,
        /// Number of ranks in the all-to-all or in the sequence-parallel region.
        ranks: usize,
    },
    /// More ranks and sequences than a schedule that names every row may have.
    #[error(
        "a schedule of {ranks} ranks is too large to be written out (sequences: {sequences}); use fewer: 250 ranks with \
         a few sequences, or 64 with 900"
    )]
    TooLarge {
        /// Number of ranks, those of regions among them.
        ranks: usize,
        /// Number of sequences.
        sequences: usize,
    },
    /// KV heads that can neither be dealt to ranks nor replicated on them.
    #[error(
        "{heads} kv heads can neither be dealt to {ranks} ranks nor replicated on them; use a multiple or a divisor"
    )]
    KvHeads {
        /// Number of KV heads.
        heads: usize,
        /// Number of ranks in the all-to-all or in the sequence-parallel region.
        ranks: usize,
    },
}

/// Largest size of a schedule: its steps, of each rank with each, times what a step has in them. Some 3 GB of memory.
const SIZE_MAX: usize = 1 << 22;
/// What a step has beside a segment for each sequence, in such segments.
const STEP_SIZE: usize = 64;

/// Refuses a problem whose schedule would take all memory before anybody could look at it.
pub fn check_size(problem: &Problem) -> Result<(), BuildError> {
    let (size, sequences) = (problem.parallel.size(), problem.sequences.len());
    let ranks = size.saturating_mul(problem.parallel.region.max(1));
    let steps = if size > 1 { ranks.saturating_mul(size) } else { ranks };
    match size > 1 && steps.saturating_mul(STEP_SIZE + sequences) > SIZE_MAX {
        true => Err(BuildError::TooLarge { ranks, sequences }),
        false => Ok(()),
    }
}

/// A schedule in the making.
#[derive(Debug)]
pub(super) struct Builder {
    schedule: Schedule,
    events: usize,
    groups: usize,
}

impl Builder {
    /// Returns an empty schedule of `ranks` ranks, a group that is its own world. Communicator 0 is the whole group.
    pub(super) fn new(ranks: usize) -> Builder {
        let schedule = Schedule {
            buffers: Vec::new(),
            ranks: vec![RankProgram::default(); ranks],
            members: (0..ranks).collect(),
            communicators: vec![(0..ranks).collect()],
            placements: Vec::new(),
            sequence_parallel: None,
        };
        Builder { schedule, events: 0, groups: 0 }
    }

    /// Keeps the first `events` event numbers from being given to new events.
    pub(super) fn reserve_events(&mut self, events: usize) {
        self.events = self.events.max(events);
    }

    /// Returns the number of buffers.
    pub(super) fn buffers(&self) -> usize {
        self.schedule.buffers.len()
    }

    pub(super) fn finish(self) -> Schedule {
        self.schedule
    }

    /// Adds a communicator and returns its index.
    pub(super) fn communicator(&mut self, members: Vec<usize>) -> usize {
        self.schedule.communicators.push(members);
        self.schedule.communicators.len() - 1
    }

    /// Returns the number of communicators.
    pub(super) fn communicators(&self) -> usize {
        self.schedule.communicators.len()
    }

    pub(super) fn buffer(&mut self, buffer: Buffer) -> BufferId {
        self.schedule.buffers.push(buffer);
        BufferId(self.schedule.buffers.len() - 1)
    }

    /// Adds a scratch buffer `[rows, heads, dim]`.
    pub(super) fn scratch(&mut self, rank: usize, name: &str, shape: [usize; 3], format: Format) -> BufferId {
        let [rows, heads, dim] = shape;
        let (axes, role) = (Axes::Rows, Role::Scratch);
        self.buffer(Buffer { name: name.into(), rank, axes, rows, heads, dim, format, role })
    }

    /// Adds a scratch buffer with the shape of another one, under a new name and format.
    pub(super) fn like(&mut self, buffer: BufferId, name: &str, format: Format) -> BufferId {
        let model = self.schedule.buffers[buffer.0].clone();
        self.buffer(Buffer { name: name.into(), format, role: Role::Scratch, ..model })
    }

    /// Returns the buffer in which the shipped orders add up a result: the result itself, and for codes in FP8 one of
    /// this name and format.
    pub(super) fn sum_of(&mut self, result: BufferId, (name, of_codes): (&str, Format)) -> BufferId {
        if self.is_coded(result) { self.like(result, name, of_codes) } else { result }
    }

    /// Returns the buffer through which the shipped orders bring the last sum of a result to the result: one in
    /// [`NOMINAL`] for codes in FP8, and none for another result.
    pub(super) fn nominal_of(&mut self, result: BufferId, name: &str) -> Option<BufferId> {
        self.is_coded(result).then(|| self.like(result, &format!("{name}, rounded"), NOMINAL))
    }

    /// Whether a buffer holds codes in FP8.
    pub(super) fn is_coded(&self, buffer: BufferId) -> bool {
        self.describe(buffer).format.saturates()
    }

    pub(super) fn describe(&self, buffer: BufferId) -> &Buffer {
        &self.schedule.buffers[buffer.0]
    }

    pub(super) fn describe_mut(&mut self, buffer: BufferId) -> &mut Buffer {
        &mut self.schedule.buffers[buffer.0]
    }

    pub(super) fn place(&mut self, placement: Placement) {
        self.schedule.placements.push(placement);
    }

    /// Marks the beginning of every rank's backward pass.
    pub(super) fn begin_backward(&mut self) {
        for program in &mut self.schedule.ranks {
            program.backward = Some(program.operations.len());
        }
    }

    /// Appends an operation to a rank's program.
    pub(super) fn push(&mut self, rank: usize, stream: usize, work: Work) {
        self.schedule.ranks[rank].operations.push(Operation { stream, work });
    }

    /// Returns a new event that is recorded on a stream.
    pub(super) fn record(&mut self, rank: usize, stream: usize) -> EventId {
        let event = EventId(self.events);
        self.events += 1;
        self.push(rank, stream, Work::RecordEvent(event));
        event
    }

    /// Returns the number of a new group of sends and receives.
    pub(super) fn group(&mut self) -> usize {
        self.groups += 1;
        self.groups - 1
    }

    pub(super) fn wait(&mut self, rank: usize, stream: usize, event: EventId) {
        self.push(rank, stream, Work::WaitEvent(event));
    }

    pub(super) fn fill(&mut self, rank: usize, stream: usize, to: BufferId, rows: &[Run], value: FillValue) {
        self.push(rank, stream, Work::Fill { to, rows: rows.to_vec(), value });
    }

    pub(super) fn copy(
        &mut self,
        rank: usize,
        stream: usize,
        from: BufferId,
        to: BufferId,
        rows: &[RowPair],
    ) {
        self.push(rank, stream, Work::Copy { from, to, rows: rows.to_vec() });
    }

    /// Copies a sum to its result, through the format of another buffer where there is one.
    pub(super) fn store(
        &mut self,
        (rank, stream): (usize, usize),
        sum: BufferId,
        through: Option<BufferId>,
        to: BufferId,
        rows: &[RowPair],
    ) {
        if let Some(through) = through {
            self.copy(rank, stream, sum, through, rows);
        }
        self.copy(rank, stream, through.unwrap_or(sum), to, rows);
    }
}

/// The rank-local buffers of a problem: its inputs and results, all of them placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) q: BufferId,
    pub(super) k: BufferId,
    pub(super) v: BufferId,
    /// The learnable sink, if there is one.
    pub(super) sink: Option<BufferId>,
    pub(super) out: BufferId,
    pub(super) lse: BufferId,
    pub(super) max_logit: BufferId,
    pub(super) backward: Option<LocalBackward>,
}

/// The rank-local buffers of the backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalBackward {
    pub(super) dout: BufferId,
    pub(super) dq: BufferId,
    pub(super) dk: BufferId,
    pub(super) dv: BufferId,
    pub(super) dsink: Option<BufferId>,
}

/// Both sides of a problem, cut over its group.
#[derive(Clone, Debug)]
pub(super) struct Shards {
    pub(super) q: ShardedSide,
    pub(super) kv: ShardedSide,
}

impl Shards {
    pub(super) fn new(problem: &Problem) -> Result<Shards, BuildError> {
        Ok(Shards { q: ShardedSide::new(problem, Side::Q)?, kv: ShardedSide::new(problem, Side::Kv)? })
    }

    pub(super) fn of(&self, side: Side) -> &ShardedSide {
        match side {
            Side::Q => &self.q,
            Side::Kv => &self.kv,
        }
    }

    /// Returns the same rows as a ring takes them.
    pub(super) fn of_ring(&self) -> Shards {
        Shards { q: self.q.in_ring(), kv: self.kv.in_ring() }
    }
}

/// Makes and places a rank's inputs and results with all their heads, cut by `shards`. Statistics of whole heads are on
/// every rank.
pub(super) fn local(builder: &mut Builder, problem: &Problem, shards: &Shards, rank: usize) -> Local {
    local_with_sinks(builder, problem, shards, rank, 0..problem.learnable_sinks())
}

/// Makes and places a rank's buffers like [`local`]. The rank sees only the learnable sinks in `sinks`: its sink and
/// dsink hold these heads.
pub(super) fn local_with_sinks(
    builder: &mut Builder,
    problem: &Problem,
    shards: &Shards,
    rank: usize,
    sinks: Range<usize>,
) -> Local {
    let q_rows = shards.q.placed(rank);
    let kv_rows = held(problem, Side::Kv, shards.kv.placed(rank).into_iter());
    let heads = problem.heads;
    let precision = problem.precision;
    let input = |tensor: TensorName| Role::Input(tensor);
    let output = |tensor: TensorName| Role::Output(tensor);
    let mut make = |tensor: TensorName,
                    role: Role,
                    axes: Axes,
                    rows: usize,
                    heads: usize,
                    dim: usize,
                    format: Format| {
        let name = tensor.name().into();
        let id = builder.buffer(Buffer { name, rank, axes, rows, heads, dim, format, role });
        let rows = match (axes, tensor) {
            (Axes::Heads, _) => Vec::new(),
            (_, TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv) => kv_rows.clone(),
            _ => q_rows.clone(),
        };
        let heads = match tensor {
            TensorName::Sink | TensorName::Dsink => sinks.clone(),
            _ => 0..heads,
        };
        builder.place(Placement { tensor, buffer: id, heads, rows });
        id
    };
    let (tq, tkv) = (shards.q.rows, shards.kv.rows);
    let (dqk, dv) = (problem.dims.qk, problem.dims.v);
    let f32 = Format::F32;
    let learnable = (problem.learnable_sinks() > 0).then_some(sinks.len());
    let q = make(TensorName::Q, input(TensorName::Q), Axes::Rows, tq, heads.q, dqk, precision.q.format);
    let k = make(TensorName::K, input(TensorName::K), Axes::Rows, tkv, heads.kv, dqk, precision.k.format);
    let v = make(TensorName::V, input(TensorName::V), Axes::Rows, tkv, heads.kv, dv, precision.v.format);
    let sink =
        learnable.map(|sinks| make(TensorName::Sink, input(TensorName::Sink), Axes::Heads, 0, sinks, 1, f32));
    let out =
        make(TensorName::Out, output(TensorName::Out), Axes::Rows, tq, heads.q, dv, precision.out.format);
    let lse = make(TensorName::Lse, output(TensorName::Lse), Axes::Statistic, tq, heads.q, 1, f32);
    let max_logit = make(TensorName::MaxLogit, output(TensorName::MaxLogit), Axes::Heads, 0, heads.q, 1, f32);
    let backward = (problem.pass == seamproof_oracle::Pass::Backward).then(|| {
        let format = precision.gradients.format;
        LocalBackward {
            dout: make(
                TensorName::Dout,
                input(TensorName::Dout),
                Axes::Rows,
                tq,
                heads.q,
                dv,
                precision.dout.format,
            ),
            dq: make(TensorName::Dq, output(TensorName::Dq), Axes::Rows, tq, heads.q, dqk, format),
            dk: make(TensorName::Dk, output(TensorName::Dk), Axes::Rows, tkv, heads.kv, dqk, format),
            dv: make(TensorName::Dv, output(TensorName::Dv), Axes::Rows, tkv, heads.kv, dv, format),
            dsink: learnable.map(|sinks| {
                make(TensorName::Dsink, output(TensorName::Dsink), Axes::Heads, 0, sinks, 1, f32)
            }),
        }
    });
    Local { q, k, v, sink, out, lse, max_logit, backward }
}

/// Returns the rows of every slot of a rank's tensor. Padding is included and counted as rows (`len = span`).
pub(super) fn slots(shard: &ShardedSide) -> Vec<Run> {
    (0..shard.slots.len()).map(|sequence| shard.slot(sequence)).filter(|slot| slot.span > 0).collect()
}

/// The nominal format of tensors in FP8 in TransformerEngine: that in which a tensor is where it is not in FP8.
pub(super) const NOMINAL: Format = Format::Bf16;

/// Returns the format of the shipped orders' sums over launches of an all-gather: the result's own, and [`NOMINAL`] for
/// codes in FP8.
pub(super) fn gathered(result: Format) -> Format {
    if result.saturates() { NOMINAL } else { result }
}

/// Returns the format of a launch's partial result that is added in f32: f32, and codes for a result in FP8. A launch
/// that is given a scale makes codes of whatever it stores.
pub(super) fn partial(result: Format) -> Format {
    if result.saturates() { result } else { Format::F32 }
}

/// Returns pairs in which both sides are equal.
pub(super) fn same_rows(rows: &[Run]) -> Vec<RowPair> {
    rows.iter().map(|&run| (run, run)).collect()
}

/// Returns a band of positions as the band of a piece of queries and a piece of keys.
///
/// Query i of the piece has position `q.start + q.step·i`, and key j has `kv.start + kv.step·j`. With equal steps a,
/// the rule `lo ≤ key − query ≤ hi` becomes `⌈(lo + c)/a⌉ ≤ j − i ≤ ⌊(hi + c)/a⌋`, where `c = q.start − kv.start`.
/// Pieces of different steps have no such band: the result is `None`. A piece of one row fits any step.
pub(crate) fn band(Band { lo, hi }: Band, q: &Piece, kv: &Piece) -> Option<Band> {
    let step = match (q.span, kv.span) {
        _ if q.step == kv.step => q.step,
        (0 | 1, _) => kv.step,
        (_, 0 | 1) => q.step,
        _ => return None,
    } as i64;
    let c = q.start as i64 - kv.start as i64;
    Some(Band { lo: lo.map(|lo| -(-(lo + c)).div_euclid(step)), hi: hi.map(|hi| (hi + c).div_euclid(step)) })
}

/// Treatment of segments in which no query sees a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unseeing {
    /// Such segments are made, and every row of both sides is in one.
    Kept,
    /// Such segments are made where they have queries, and every query is in one.
    Queries,
    /// Such segments are not made. In long rings, most pairs of pieces are of this kind.
    Dropped,
}

/// Returns the segments of a placed piece of queries against the rows of a piece of keys: one for each
/// [tile](seamproof_oracle::Tile) of the mask. The last one takes the padding. There is none if the pieces have no
/// common band.
pub(crate) fn segments(
    mask: &Mask,
    (lq, lk): (usize, usize),
    q: &PlacedRun,
    (kv, kv_rows): (&Piece, Run),
    unseeing: Unseeing,
) -> Vec<Segment> {
    let sight = mask.sight(lq, lk);
    let Some(Band { lo, hi }) = band(sight.bounds(), &q.piece, kv) else { return Vec::new() };
    let queries = positions(&q.piece, q.local.len);
    let keys = if unseeing == Unseeing::Kept { positions(kv, kv_rows.len) } else { 0..0 };
    let (mut made, mut ends) = (Vec::new(), [0; 2]);
    for tile in sight.tiles(queries, keys) {
        let own = indices(&q.piece, q.local.len, &tile.queries);
        let of = indices(kv, kv_rows.len, &tile.keys);
        let moved = |bound: i64| bound + own.start as i64 - of.start as i64;
        let segment = Segment {
            q: part(q.local, &own),
            kv: vec![part(kv_rows, &of)],
            lo: lo.map(moved),
            hi: hi.map(moved),
            prefix: indices(kv, kv_rows.len, &(tile.keys.start..tile.prefix)).len(),
            sink_tokens: indices(kv, kv_rows.len, &(tile.keys.start..tile.sink_tokens)).len(),
        };
        if unseeing != Unseeing::Dropped || segment.sees() {
            ends = [own.end, of.end];
            made.push(segment);
        }
    }
    if made.is_empty() && unseeing != Unseeing::Dropped {
        let (q, kv) = (part(q.local, &(0..0)), vec![part(kv_rows, &(0..0))]);
        made.push(Segment { q, kv, lo, hi, prefix: 0, sink_tokens: 0 });
    }
    if let Some(Segment { q: own, kv: of, .. }) = made.last_mut() {
        pad(own, q.local, ends[0]);
        of.iter_mut().for_each(|run| pad(run, kv_rows, ends[1]));
    }
    made
}

/// Returns the positions from a piece's first row to the last of `len` rows.
fn positions(piece: &Piece, len: usize) -> Range<usize> {
    len.checked_sub(1).map_or(0..0, |last| piece.start..piece.start + piece.step * last + 1)
}

/// Returns the rows of a piece, of `len` rows, whose positions lie in a range.
fn indices(piece: &Piece, len: usize, positions: &Range<usize>) -> Range<usize> {
    let first = |position: usize| position.saturating_sub(piece.start).div_ceil(piece.step).min(len);
    first(positions.start)..first(positions.end)
}

/// Returns some real rows of a run, without padding. No rows lie at its first row.
pub(crate) fn part(run: Run, rows: &Range<usize>) -> Run {
    let offset = if rows.is_empty() { run.offset } else { run.row(rows.start) };
    Run { offset, step: run.step, len: rows.len(), span: rows.len() }
}

/// Adds the padding of a run to a part of it, if the part ends where the padding begins.
pub(crate) fn pad(part: &mut Run, run: Run, end: usize) {
    if end == run.len && run.span > run.len {
        part.offset = if part.len == 0 { run.row(run.len) } else { part.offset };
        part.span += run.span - run.len;
    }
}

/// Returns every mask of these bounds on each side, these blocks, and these counts of a prefix and of sink tokens, in both
/// alignments.
#[cfg(test)]
pub(super) fn masks_of<const S: usize, const B: usize, const C: usize>(
    sides: [Option<u32>; S],
    blocks: [Option<Blocks>; B],
    counts: [(u32, u32); C],
) -> impl Iterator<Item = Mask> {
    let bounds = sides.into_iter().flat_map(move |left| sides.map(|right| (left, right)));
    bounds.flat_map(move |(left, right)| {
        let cut = move |align| blocks.map(|blocks| counts.map(|counts| (align, blocks, counts)));
        let all = [Alignment::TopLeft, Alignment::BottomRight].into_iter().flat_map(cut).flatten();
        all.map(move |(align, blocks, (prefix, sink_tokens))| Mask {
            left,
            right,
            align,
            blocks,
            prefix,
            sink_tokens,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use seamproof_oracle::{Blocks, Borders};

    fn masks() -> impl Iterator<Item = Mask> {
        let sides = [None, Some(0), Some(1), Some(3)];
        let documents = Borders::new(&[2, 3, 6]).ok().map(Blocks::Documents);
        let blocks =
            [None, documents, NonZeroU32::new(1).map(Blocks::Chunks), NonZeroU32::new(3).map(Blocks::Chunks)];
        masks_of(sides, blocks, [(0, 0), (2, 0), (0, 2), (1, 3), (3, 1)])
    }

    /// Returns the pairs of rows that segments show, and the rows of queries that they own, sorted.
    fn shown(segments: &[Segment]) -> (Vec<(usize, usize)>, Vec<usize>) {
        let pairs = segments.iter().flat_map(|segment| {
            let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
            let rows = segment.q.real_rows().enumerate();
            rows.flat_map(move |(i, row)| segment.visible(i).map(|j| (row, keys[j])).collect::<Vec<_>>())
        });
        let owned = segments.iter().flat_map(|segment| segment.q.real_rows().chain(segment.q.padding_rows()));
        let (mut pairs, mut owned): (Vec<_>, Vec<_>) = (pairs.collect(), owned.collect());
        pairs.sort_unstable();
        owned.sort_unstable();
        (pairs, owned)
    }

    #[test]
    fn segments_are_the_mask_for_every_small_pair_of_pieces() {
        let (lq, lk) = (9_usize, 7_usize);
        for mask in masks() {
            for (step, qs, ks) in
                (1..4).flat_map(|s| (0..4).flat_map(move |q| (0..4).map(move |k| (s, q, k))))
            {
                let [q_len, k_len] = [(lq - qs).div_ceil(step), (lk - ks).div_ceil(step)];
                let piece = |start, span| Piece { start, step, span, at: 0 };
                let local = Run { offset: 3, step: 2, len: q_len, span: q_len + 2 };
                let q = PlacedRun { sequence: 0, piece: piece(qs, q_len + 2), local };
                let keys = Run { offset: 5, step: 1, len: k_len, span: k_len + 1 };
                let rule = (0..q_len).flat_map(|i| (0..k_len).map(move |j| (i, j)));
                let sees =
                    |&(i, j): &(usize, usize)| mask.visible(qs + step * i, lq, lk).contains(&(ks + step * j));
                let pairs: Vec<_> = rule.filter(sees).map(|(i, j)| (3 + 2 * i, 5 + j)).collect();
                let all: Vec<usize> = (0..q_len + 2).map(|i| 3 + 2 * i).collect();
                for unseeing in [Unseeing::Kept, Unseeing::Queries, Unseeing::Dropped] {
                    let made = segments(&mask, (lq, lk), &q, (&piece(ks, k_len), keys), unseeing);
                    let (got, owned) = shown(&made);
                    assert_eq!(got, pairs, "{mask:?} step {step} from {qs} and {ks}");
                    assert!(unseeing == Unseeing::Dropped || owned == all, "{mask:?}: {owned:?}");
                    let named =
                        made.iter().flat_map(|segment| &segment.kv).map(|run| run.span).sum::<usize>();
                    assert!(unseeing != Unseeing::Kept || named == k_len + 1, "{mask:?}: {made:?}");
                    assert!(!mask.is_band() || made.len() <= 1);
                }
            }
        }
    }
}
