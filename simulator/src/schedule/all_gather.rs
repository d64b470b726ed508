//! All-gather: every rank sees all keys and values and attends with its own queries.
//!
//! K and V are gathered in *rank order* and reordered into *sequence order* (see [`crate::shard`]). A piece of a rank's
//! queries is one segment for each block of the mask, against the *visible prefix* of its sequence: the real keys up to
//! the last one that the piece's last real query sees. The band follows from the piece's first position, for each
//! sequence by itself (TransformerEngine shifts a window by one number for the whole batch and attends to wrong keys).
//! A query meets all its keys in one launch, so nothing is merged and the kernel applies the sink itself.
//!
//! In the backward, a launch overwrites dK and dV of the keys that it names, and may therefore name a key only once.
//! The pieces of one sequence go to different launches. Their dK and dV are added up in f32, and the sums over ranks
//! are reduce-scattered. Queries whose positions lie apart (stripes of 1) have a band only against keys that lie
//! equally far apart. Forward, each such query is a one-row segment. Backward, there is one launch for each residue of
//! the key's position, and dQ is added up too.
//!
//! Keys that sequences share are spread once they are gathered, and their gradients gathered before they are scattered
//! ([`super::shared`]).
//!
//! That is one launch. In TransformerEngine's shipped order ([`MergeOrder::Deferred`]), the pieces of a rank's queries
//! are *steps* on two streams; [`super::all_gather_steps`] has them.
//!
//! | refused | why |
//! |---|---|
//! | [`BuildError::Shard`] | a span that the balance cannot cut, rows that lie apart and not side by side |

use seamproof_oracle::sharding::{Piece, PlacedRun, held};
use seamproof_oracle::{Format, Mask, Problem, Run, Side};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards, Unseeing};
use super::collect::{COMMUNICATION, COMPUTE, all, every_head, inverse, part, rank_order};
use super::program::{
    Attend, AttendBackward, BufferId, FillValue, MergeOrder, Reduction, RowPair, Schedule, Step, Work,
};
use super::shared::SharedRows;
use crate::{AttentionCall, RowPolicy, Segment};

/// Returns the all-gather schedule. The module's text says which problems are refused.
pub fn all_gather(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    let shards = Shards::new(problem)?;
    let ranks = problem.parallel.size();
    let mut builder = Builder::new(ranks);
    let pairs = rank_order(&shards.kv, 0..ranks);
    let shared = SharedRows::of(problem, |sequence| shards.kv.gathered(sequence));
    let shared = shared.as_ref();
    let mut gathered = Vec::new();
    for rank in 0..ranks {
        let local = build::local(&mut builder, problem, &shards, rank);
        let mut program =
            Rank { problem, shards: &shards, pairs: &pairs, shared, rank, local, builder: &mut builder };
        let kv = program.gather();
        let table = match order {
            MergeOrder::Deferred => program.forward_in_steps(kv),
            MergeOrder::Running | MergeOrder::Difference => program.forward(kv),
        };
        gathered.extend(local.backward.map(|to| (local, to, kv, table)));
    }
    if !gathered.is_empty() {
        builder.begin_backward();
    }
    for (rank, (local, to, kv, table)) in gathered.into_iter().enumerate() {
        let mut program =
            Rank { problem, shards: &shards, pairs: &pairs, shared, rank, local, builder: &mut builder };
        match order {
            MergeOrder::Deferred => program.backward_in_steps(&to, kv, table),
            MergeOrder::Running | MergeOrder::Difference => program.backward(&to, kv),
        }
    }
    Ok(builder.finish())
}

/// The communicator of all ranks.
const GROUP: usize = 0;

/// One rank's program in the making.
pub(super) struct Rank<'a> {
    pub(super) problem: &'a Problem,
    pub(super) shards: &'a Shards,
    /// Row pairs that take the keys from rank order to sequence order.
    pairs: &'a [RowPair],
    /// The rows in sequence order of keys that sequences share.
    shared: Option<&'a SharedRows>,
    pub(super) rank: usize,
    pub(super) local: Local,
    pub(super) builder: &'a mut Builder,
}

impl Rank<'_> {
    /// Gathers K and V of all ranks and returns them in sequence order, spread where keys are shared. K is reordered
    /// while V is on its way.
    fn gather(&mut self) -> [BufferId; 2] {
        let gathered = [(self.local.k, "k"), (self.local.v, "v")].map(|(local, name)| {
            let format = self.builder.describe(local).format;
            let to = self.full(local, &format!("{name} in rank order"), format);
            let rows = self.shards.kv.rows;
            let regions = (0..self.shards.kv.cp).map(|member| part(self.builder, to, member, rows));
            let work = Work::AllGather {
                communicator: GROUP,
                to: regions.collect(),
                from: all(self.builder, local),
            };
            self.builder.push(self.rank, COMMUNICATION, work);
            (to, format, self.builder.record(self.rank, COMMUNICATION), name)
        });
        gathered.map(|(from, format, arrived, name)| {
            self.builder.wait(self.rank, COMPUTE, arrived);
            let to = self.builder.like(from, &format!("{name} gathered"), format);
            self.builder.copy(self.rank, COMPUTE, from, to, self.pairs);
            self.shared.map_or(to, |shared| shared.spread(self.builder, (self.rank, COMPUTE), to))
        })
    }

    /// Attends to everything at once. No table is made.
    fn forward(&mut self, [k, v]: [BufferId; 2]) -> Option<BufferId> {
        let Local { q, sink, out, lse, max_logit, .. } = self.local;
        self.builder.fill(self.rank, COMPUTE, max_logit, &[], FillValue::NegInfinity);
        let call = self.call(self.forward_segments());
        let attend = Attend {
            step: Step::Only,
            call,
            table: None,
            descales: Vec::new(),
            q,
            k,
            v,
            sink,
            out,
            lse,
            max_logit,
        };
        self.builder.push(self.rank, COMPUTE, Work::Attend(attend));
        self.reduce_max_logit();
        None
    }

    /// Takes the largest logits over all ranks, behind the work on the main stream.
    pub(super) fn reduce_max_logit(&mut self) {
        let max_logit = self.local.max_logit;
        let attended = self.builder.record(self.rank, COMPUTE);
        self.builder.wait(self.rank, COMMUNICATION, attended);
        let region = every_head(self.builder, max_logit);
        let work = Work::AllReduce { communicator: GROUP, region, reduction: Reduction::Max };
        self.builder.push(self.rank, COMMUNICATION, work);
    }

    fn backward(&mut self, to: &LocalBackward, kv: [BufferId; 2]) {
        self.sink_gradient(to);
        let launches = self.backward_launches();
        let everything = [Run::packed(0, self.order_rows(), self.order_rows())];
        let sums = [(self.local.k, "dk"), (self.local.v, "dv")].map(|(local, name)| {
            let format = build::partial(self.builder.describe(to.dk).format);
            let step = self.full(local, &format!("{name} of a launch"), format);
            let sum = self.full(local, &format!("{name} of all launches"), Format::F32);
            self.builder.fill(self.rank, COMPUTE, sum, &everything, FillValue::Zero);
            (step, sum)
        });
        let dq = self.dq(to);
        let of = launches.len();
        for (index, segments) in launches.into_iter().enumerate() {
            let step = Step::Launch { index, of };
            self.launch(step, to, segments, kv, dq, sums);
        }
        let slots = build::same_rows(&build::slots(&self.shards.q));
        if let Some(sum) = dq.1 {
            self.builder.copy(self.rank, COMPUTE, sum, to.dq, &slots);
        }
        self.scatter([(sums[0].1, to.dk), (sums[1].1, to.dv)]);
    }

    pub(super) fn sink_gradient(&mut self, to: &LocalBackward) {
        let Local { sink, out, lse, .. } = self.local;
        if let Some((sink, dsink)) = sink.zip(to.dsink) {
            let real = |placed: PlacedRun| Run { span: placed.local.len, ..placed.local };
            let rows = self.placed().into_iter().map(real).filter(|run| run.len > 0).collect();
            let work =
                Work::SinkGradient { sink, dout: to.dout, out, lse, dsink, rows, descales: Vec::new() };
            self.builder.push(self.rank, COMPUTE, work);
        }
    }

    /// Returns the buffer to which a launch writes dQ, and the sum over launches if a query is in more than one.
    fn dq(&mut self, to: &LocalBackward) -> (BufferId, Option<BufferId>) {
        if !self.apart() {
            return (to.dq, None);
        }
        let format = build::partial(self.builder.describe(to.dq).format);
        let step = self.builder.like(to.dq, "dq of a launch", format);
        let sum = self.builder.like(to.dq, "dq of all launches", Format::F32);
        self.builder.fill(self.rank, COMPUTE, sum, &build::slots(&self.shards.q), FillValue::Zero);
        (step, Some(sum))
    }

    /// Pushes one backward launch and adds its results to the sums.
    fn launch(
        &mut self,
        step: Step,
        to: &LocalBackward,
        segments: Vec<Segment>,
        [k, v]: [BufferId; 2],
        (dq, dq_sum): (BufferId, Option<BufferId>),
        [(dk, dk_sum), (dv, dv_sum)]: [(BufferId, BufferId); 2],
    ) {
        let Local { q, out, lse, .. } = self.local;
        let keys = segments.iter().flat_map(|s| s.kv.iter().copied()).filter(|run| run.len > 0);
        let keys = build::same_rows(&keys.collect::<Vec<_>>());
        let queries: Vec<Run> = segments.iter().map(|s| Run { len: s.q.span, ..s.q }).collect();
        let call = self.call(segments);
        let dout = to.dout;
        let work = AttendBackward {
            step,
            call,
            table: None,
            descales: Vec::new(),
            q,
            k,
            v,
            dout,
            out,
            lse,
            sink: None,
            dq,
            dk,
            dv,
        };
        self.builder.push(self.rank, COMPUTE, Work::AttendBackward(work));
        for (from, to) in [(dk, dk_sum), (dv, dv_sum)] {
            let rows = keys.clone();
            self.builder.push(self.rank, COMPUTE, Work::Accumulate { from, to, rows });
        }
        if let Some(to) = dq_sum {
            let rows = build::same_rows(&queries);
            self.builder.push(self.rank, COMPUTE, Work::Accumulate { from: dq, to, rows });
        }
    }

    /// Reduce-scatters the gradients: takes them from sequence order to rank order, sums each rank's part over all
    /// ranks, and rounds the sums into the results.
    pub(super) fn scatter(&mut self, pairs: [(BufferId, BufferId); 2]) {
        let back = inverse(self.pairs);
        let rows = self.shards.kv.rows;
        let arrived = pairs.map(|(sum, to)| {
            let sum =
                self.shared.map_or(sum, |shared| shared.gather(self.builder, (self.rank, COMPUTE), sum));
            let format = self.builder.describe(sum).format;
            let ordered = self.builder.like(sum, "gradient in rank order", format);
            self.builder.copy(self.rank, COMPUTE, sum, ordered, &back);
            let ready = self.builder.record(self.rank, COMPUTE);
            self.builder.wait(self.rank, COMMUNICATION, ready);
            let mine = self.builder.like(to, "gradient of all ranks", format);
            let from =
                (0..self.shards.kv.cp).map(|member| part(self.builder, ordered, member, rows)).collect();
            let work = Work::ReduceScatter { communicator: GROUP, from, to: all(self.builder, mine) };
            self.builder.push(self.rank, COMMUNICATION, work);
            (mine, to, self.builder.record(self.rank, COMMUNICATION))
        });
        let rows = self.held_rows();
        for (mine, to, event) in arrived {
            self.builder.wait(self.rank, COMPUTE, event);
            self.builder.copy(self.rank, COMPUTE, mine, to, &rows);
        }
    }

    /// Returns the rows of the rank's keys that are in results, padding included.
    fn held_rows(&self) -> Vec<RowPair> {
        if self.shared.is_none() {
            return build::same_rows(&build::slots(&self.shards.kv));
        }
        let held = held(self.problem, Side::Kv, self.shards.kv.placed(self.rank).into_iter());
        let rows: Vec<Run> =
            held.into_iter().map(|PlacedRun { local, .. }| Run { len: local.span, ..local }).collect();
        build::same_rows(&rows)
    }

    /// Makes a buffer with every rank's rows; heads and dim are those of the local one.
    pub(super) fn full(&mut self, local: BufferId, name: &str, format: Format) -> BufferId {
        let model = self.builder.describe(local);
        let shape = [self.order_rows(), model.heads, model.dim];
        self.builder.scratch(self.rank, name, shape, format)
    }

    pub(super) fn order_rows(&self) -> usize {
        self.shards.kv.rows * self.shards.kv.cp
    }

    pub(super) fn call(&self, segments: Vec<Segment>) -> AttentionCall {
        AttentionCall { segments, softmax: self.problem.softmax, policy: RowPolicy::Overwrite }
    }

    /// Whether the positions of some piece lie apart.
    pub(super) fn apart(&self) -> bool {
        self.placed().iter().any(|placed| placed.piece.step > 1)
    }

    fn placed(&self) -> Vec<PlacedRun> {
        self.shards.q.placed(self.rank)
    }

    pub(super) fn forward_segments(&self) -> Vec<Segment> {
        let rows = self.placed().into_iter().flat_map(|placed| match placed.piece.step {
            1 => vec![placed],
            _ => one_by_one(&placed),
        });
        rows.flat_map(|placed| self.segments(&placed, (0, 1), Unseeing::Queries)).collect()
    }

    /// Returns the segments of each backward launch. No launch names a key twice. Without a zero-filled sum for dQ,
    /// every row must be in a launch, even a row that sees no key.
    pub(super) fn backward_launches(&self) -> Vec<Vec<Segment>> {
        let placed = self.placed();
        let ranks = self.shards.kv.cp;
        if self.apart() {
            let launches = (0..ranks).map(|residue| self.residue(residue));
            return launches.filter(|segments| !segments.is_empty()).collect();
        }
        let mut launches: Vec<Vec<Segment>> = Vec::new();
        let (mut sequence, mut index) = (None, 0);
        for placed in &placed {
            index = if sequence == Some(placed.sequence) { index + 1 } else { 0 };
            sequence = Some(placed.sequence);
            if index == launches.len() {
                launches.push(Vec::new());
            }
            launches[index].extend(self.segments(placed, (0, 1), Unseeing::Queries));
        }
        launches
    }

    /// Returns the segments of queries that lie apart against the keys of a residue.
    fn residue(&self, residue: usize) -> Vec<Segment> {
        let keys = (residue, self.shards.kv.cp);
        let segments = |placed: PlacedRun| self.segments(&placed, keys, Unseeing::Dropped);
        self.placed().into_iter().flat_map(segments).collect()
    }

    /// Returns the segments of a piece of queries against the keys `first, first + step, …` of the visible prefix. The
    /// step is the piece's own.
    fn segments(&self, q: &PlacedRun, (first, step): (usize, usize), unseeing: Unseeing) -> Vec<Segment> {
        let sequence = &self.problem.sequences[q.sequence];
        let lengths = (sequence.q.len, sequence.kv.len);
        let gathered = self.shards.kv.gathered(q.sequence);
        prefix_segments(&self.problem.mask, lengths, q, (gathered, first, step), unseeing)
    }
}

/// Returns the segments of a piece of queries against the keys `first, first + step, …` of the visible prefix of a sequence
/// whose gathered rows are given.
pub(super) fn prefix_segments(
    mask: &Mask,
    lengths: (usize, usize),
    q: &PlacedRun,
    (gathered, first, step): (Run, usize, usize),
    unseeing: Unseeing,
) -> Vec<Segment> {
    let keys = visible_prefix(mask, lengths, q).saturating_sub(first).div_ceil(step);
    // An empty run lies at the sequence's first row, whatever `first` is.
    let offset = gathered.offset + if keys > 0 { gathered.step * first } else { 0 };
    let rows = Run { offset, step: gathered.step * step, len: keys, span: keys };
    let kv = Piece { start: first, step, span: keys, at: 0 };
    build::segments(mask, lengths, q, (&kv, rows), unseeing)
}

/// Returns the number of the sequence's keys up to the last one that the piece's last real query sees; 0 for a piece of
/// padding.
fn visible_prefix(mask: &Mask, (lq, lk): (usize, usize), q: &PlacedRun) -> usize {
    let Some(last) = q.local.len.checked_sub(1) else { return 0 };
    mask.sight(lq, lk).end(q.piece.start + last * q.piece.step)
}

/// Returns the calls of a rank's launches: of the forward, and of each launch of the backward. Of queries that lie apart,
/// these are all residues, also those without a segment.
pub(super) fn calls(problem: &Problem, shards: &Shards, rank: usize) -> (AttentionCall, Vec<AttentionCall>) {
    let mut builder = Builder::new(1);
    let local = build::local(&mut builder, problem, shards, rank);
    let program = Rank { problem, shards, pairs: &[], shared: None, rank, local, builder: &mut builder };
    let launches = match program.apart() {
        true => (0..shards.kv.cp).map(|residue| program.residue(residue)).collect(),
        false => program.backward_launches(),
    };
    let backward = launches.into_iter().map(|segments| program.call(segments));
    (program.call(program.forward_segments()), backward.collect())
}

/// Returns the call of one of some launches. One that is not there attends nothing: the checker of plans refuses it.
pub(super) fn call_of((whole, parts): (AttentionCall, Vec<AttentionCall>), index: usize) -> AttentionCall {
    let nothing = AttentionCall { segments: Vec::new(), ..whole };
    parts.into_iter().nth(index).unwrap_or(nothing)
}

/// Returns each real row as a piece of its own, and the padding as one piece.
pub(super) fn one_by_one(placed: &PlacedRun) -> Vec<PlacedRun> {
    let PlacedRun { sequence, piece, local } = *placed;
    let cut = |index: usize, len: usize, span: usize| PlacedRun {
        sequence,
        piece: Piece { start: piece.start + index * piece.step, step: 1, span, at: piece.at + index },
        local: Run { offset: local.offset + local.step * index, step: local.step, len, span },
    };
    let padding = (local.span > local.len).then(|| cut(local.len, 0, local.span - local.len));
    (0..local.len).map(|index| cut(index, 1, 1)).chain(padding).collect()
}
