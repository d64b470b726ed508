//! The ring (P2P): every member keeps its queries, and keys and values travel round.
//!
//! *Step* i of the forward works on the KV of the member i places before. Meanwhile this KV goes on to the next member,
//! and the previous member's KV comes in, into one of two slots in turn. The backward runs the ring the other way
//! round. The gradients of a KV travel with it, and are complete and at home after the last step.
//!
//! A *part* is a piece of the owner's slot: dual-chunk has two, the other balances have one, and the stripes of one row
//! in a hierarchy's ring one for each rank of an all-to-all. Forward, a step is one
//! launch for each part, because a segment has one band and a query row is in one segment of a launch. Backward, a
//! launch also overwrites the gradients of its keys, and a step is one launch for each part of the queries and part of
//! the keys. Segments without a visible pair are skipped. TransformerEngine's sections are the rest: *lower* keeps the
//! owner's first part, *upper* keeps the second part of the queries.
//!
//! Stripes of several rows have other parts: a band of all rows, and *edges* where a bound of the mask cuts stripes
//! ([`super::stripes`]). Each is one launch in both passes.
//!
//! Streams 0 and 1 compute in turn, and a step's launch overlaps the merge of the step before. Stream 2 communicates.
//! Running results are in f32 and rounded once, and scratch does not grow with the number of members.
//! [`MergeOrder::Deferred`] instead keeps every launch's out until the LSE is final. A sum in f32 is there rounded to
//! bf16 before it becomes codes in FP8.
//!
//! In that order, launches also read their segments in a table of the step, where one can say them
//! ([`super::tables`]). It is made right before the step, on the stream of the step, which has one buffer for all its
//! tables. A step is then the same launches, on whole blocks of the table: a piece of queries that sees no key of a
//! piece is left out where no sequence's does, and padding is never written.
//!
//! | problem | answer |
//! |---|---|
//! | a span that the balance does not divide | [`ShardingError::Span`](seamproof_oracle::sharding::ShardingError::Span) |
//! | rows that lie apart, and not side by side | [`ShardingError::Strided`](seamproof_oracle::sharding::ShardingError::Strided) |
//! | any other: every mask, alignment, sink, soft cap, length and head count | a schedule |

mod steps;

use std::cmp::Ordering;
use std::ops::Range;

use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Balance, Format, Mask, Pass, Problem, Run, Sink, Softmax};

use super::build::{self, BuildError, Builder, Local, LocalBackward, Shards, Unseeing};
use super::collect::{self, COMMUNICATION, all};
use super::program::{
    BufferId, EventId, FillValue, KeySource, MergeOrder, Reduction, Region, RowPair, Schedule, Section,
    SegmentSource, Step, Work,
};
use super::stripes;
use super::tables::{self, Told};
use crate::{AttentionCall, RowPolicy, Segment};
use steps::{BackwardStep, ForwardStep, Travelling};

/// The streams that compute in turn. A ring begins and ends on the first one.
const COMPUTE: [usize; 2] = [MAIN, 1];
const MAIN: usize = collect::COMPUTE;

/// Returns the ring schedule. The module's text says which problems are refused.
pub fn ring(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    let shards = Shards::new(problem)?;
    let size = problem.parallel.size();
    let mut builder = Builder::new(size);
    let members: Vec<Member> = (0..size)
        .map(|rank| Member { rank, local: build::local(&mut builder, problem, &shards, rank) })
        .collect();
    let (mask, softmax) = (problem.mask, problem.softmax);
    let shards = shards.of_ring();
    let core = RingCore { mask, softmax, shards: &shards, members: &members, communicator: 0, order };
    core.forward(&mut builder);
    if problem.pass == Pass::Backward {
        builder.begin_backward();
        core.backward(&mut builder);
    }
    Ok(builder.finish())
}

/// One member of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Rank of the member, by its place in the group.
    pub(super) rank: usize,
    /// Buffers with which the member attends and to which its results go. Their rows are cut by the ring's shards; they
    /// may have any heads. The heads of q are a multiple of those of k and v, and sink and max_logit have the heads of
    /// q.
    pub(super) local: Local,
}

/// A ring over given buffers, which hold the whole problem or some of its heads.
///
/// [`RingCore::forward`] and [`RingCore::backward`] take their inputs on stream 0 and leave their results on stream 0:
/// later work there needs no event. Between the two, the caller may issue any work.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingCore<'a> {
    /// The mask, in positions of whole sequences.
    pub(super) mask: Mask,
    /// The softmax. Its sink enters once, after the last merge.
    pub(super) softmax: Softmax,
    /// Both sides, cut over the members: `cp` is the number of members. The steps of all parts are equal.
    pub(super) shards: &'a Shards,
    /// The members in order of the ring.
    pub(super) members: &'a [Member],
    /// The members' communicator.
    pub(super) communicator: usize,
    /// Order in which steps are merged.
    pub(super) order: MergeOrder,
}

impl RingCore<'_> {
    /// Fills out, lse and max_logit of every member. Rows in no slot are not touched, and padding rows become 0 and −∞.
    pub(super) fn forward(&self, builder: &mut Builder) {
        for place in 0..self.members.len() {
            let step = ForwardStep::new(builder, self, place);
            self.forward_of(builder, place, step);
        }
    }

    /// Fills the gradients of every member that has buffers for them, from its dout, out and lse.
    pub(super) fn backward(&self, builder: &mut Builder) {
        for (place, member) in self.members.iter().enumerate() {
            if let Some(gradients) = member.local.backward {
                let step = BackwardStep::new(builder, self, place, gradients);
                self.backward_of(builder, place, &step);
                self.sink_gradient(builder, place, gradients);
            }
        }
    }

    fn forward_of(&self, builder: &mut Builder, place: usize, mut work: ForwardStep) {
        let Member { rank, local } = self.members[place];
        let (size, steps) = (self.members.len(), self.steps());
        let rows = build::slots(&self.shards.q);
        builder.fill(rank, MAIN, work.out, &rows, FillValue::Zero);
        builder.fill(rank, MAIN, local.lse, &rows, FillValue::NegInfinity);
        builder.fill(rank, MAIN, local.max_logit, &[], FillValue::NegInfinity);
        fork(builder, rank, steps);
        let kv = Travelling::new(builder, &local, steps);
        let (next, previous) = (self.rank(place + 1), self.rank(place + size - 1));
        let (mut done, mut arrived) = (Vec::new(), None);
        for step in 0..steps {
            let arriving = (step + 1 < steps).then(|| {
                // The step before read the slot, and its send is earlier on this stream. Step 0 read no slot.
                if step > 1 {
                    builder.wait(rank, COMMUNICATION, done[step - 1]);
                }
                exchange(builder, rank, (next, kv.at(step)), (previous, kv.at(step + 1)))
            });
            let stream = COMPUTE[step % 2];
            wait(builder, rank, stream, arrived);
            let owner = (place + size - step) % size;
            work.push(builder, self, (place, owner), step, kv.at(step), done.last().copied());
            done.push(builder.record(rank, stream));
            arrived = arriving;
        }
        // Every step waited for the step before and for its KV: this wait joins all streams.
        wait(builder, rank, MAIN, done.last().copied());
        work.add_kept(builder);
        self.finish_forward(builder, place, (work.out, work.through));
    }

    /// Pushes the sink, the last rounding of out, and the maximum over the ring.
    fn finish_forward(
        &self,
        builder: &mut Builder,
        place: usize,
        (out, through): (BufferId, Option<BufferId>),
    ) {
        let Member { rank, local } = self.members[place];
        if self.softmax.sink != Sink::None {
            let rows = self.real_queries(place);
            builder.push(rank, MAIN, Work::ApplySink { sink: local.sink, out, lse: local.lse, rows });
        }
        if out != local.out {
            let rows = build::same_rows(&build::slots(&self.shards.q));
            builder.store((rank, MAIN), out, through, local.out, &rows);
        }
        if self.members.len() > 1 {
            let region = all(builder, local.max_logit);
            let (communicator, reduction) = (self.communicator, Reduction::Max);
            builder.push(rank, MAIN, Work::AllReduce { communicator, region, reduction });
        }
    }

    fn backward_of(&self, builder: &mut Builder, place: usize, work: &BackwardStep) {
        let Member { rank, local } = self.members[place];
        let (size, steps) = (self.members.len(), self.steps());
        let q_rows = build::slots(&self.shards.q);
        builder.fill(rank, MAIN, work.dq, &q_rows, FillValue::Zero);
        for buffer in work.dkv_at_first() {
            // Every row is filled because every row travels.
            let rows = all(builder, buffer).rows;
            builder.fill(rank, MAIN, buffer, &[rows], FillValue::Zero);
        }
        fork(builder, rank, steps);
        let kv = Travelling::new(builder, &local, steps);
        let (next, previous) = (self.rank(place + size - 1), self.rank(place + 1));
        let (mut arrived, mut gradients_arrived) = (None, None);
        for step in 0..steps {
            // The step before read the slot. The last exchange of gradients on this stream has waited for that step;
            // where there is none, the stream waits here.
            let arriving = (step + 1 < steps).then(|| {
                if work.keeps {
                    wait(builder, rank, COMMUNICATION, gradients_arrived);
                }
                exchange(builder, rank, (next, kv.at(step)), (previous, kv.at(step + 1)))
            });
            let stream = COMPUTE[step % 2];
            wait(builder, rank, stream, arrived);
            let owner = (place + step) % size;
            work.push(builder, self, (place, owner), step, kv.at(step), gradients_arrived);
            gradients_arrived = (steps > 1).then(|| {
                let done = builder.record(rank, stream);
                if work.keeps {
                    return done;
                }
                builder.wait(rank, COMMUNICATION, done);
                exchange(builder, rank, (next, work.dkv_at(step)), (previous, work.dkv_at(step + 1)))
            });
            arrived = arriving;
        }
        // The last exchange waited for the last step, and that step waited for the exchange before: this wait joins all
        // streams. Steps that keep their gradients wait for each other.
        wait(builder, rank, MAIN, gradients_arrived);
        let [dk, dv] = if work.keeps { self.bring_home(builder, place, work) } else { work.dkv_at(steps) };
        let [q_rows, kv_rows] = [q_rows, build::slots(&self.shards.kv)].map(|rows| build::same_rows(&rows));
        let (results, [of_dq, of_dk, of_dv]) = (work.results, work.through);
        builder.store((rank, MAIN), work.dq, of_dq, results.dq, &q_rows);
        builder.store((rank, MAIN), dk, of_dk, results.dk, &kv_rows);
        builder.store((rank, MAIN), dv, of_dv, results.dv, &kv_rows);
    }

    /// Sends the kept dk and dv of each step to the owner of its keys, in the results' format and in one exchange, and
    /// adds up those that arrive. Returns the sums.
    fn bring_home(&self, builder: &mut Builder, place: usize, work: &BackwardStep) -> [BufferId; 2] {
        let (rank, size) = (self.members[place].rank, self.members.len());
        let names = ["dk", "dv"];
        let whole = |builder: &Builder, buffer: BufferId| build::same_rows(&[all(builder, buffer).rows]);
        let sent: Vec<[BufferId; 2]> = (0..size)
            .map(|owner| {
                let sums = work.dkv_at((owner + size - place) % size);
                [0, 1].map(|of| {
                    let format = builder.describe([work.results.dk, work.results.dv][of]).format;
                    let code = builder.like(sums[of], &format!("{} for member {owner}", names[of]), format);
                    let rows = whole(builder, sums[of]);
                    builder.copy(rank, MAIN, sums[of], code, &rows);
                    code
                })
            })
            .collect();
        let ready = builder.record(rank, MAIN);
        builder.wait(rank, COMMUNICATION, ready);
        let landed = [0, 1].map(|of| {
            let mut landing = |from: usize| {
                let code = sent[from][of];
                let format = builder.describe(code).format;
                builder.like(code, &format!("{} of member {from}", names[of]), format)
            };
            let landings: Vec<BufferId> = (0..size).map(&mut landing).collect();
            let send = sent.iter().map(|codes| all(builder, codes[of])).collect();
            let recv = landings.iter().map(|landing| all(builder, *landing)).collect();
            let work = Work::AllToAll { communicator: self.communicator, send, recv };
            builder.push(rank, COMMUNICATION, work);
            landings
        });
        let arrived = builder.record(rank, COMMUNICATION);
        builder.wait(rank, MAIN, arrived);
        [0, 1].map(|of| {
            let sum = builder.like(landed[of][0], &format!("{} of all members", names[of]), Format::F32);
            let rows = build::slots(&self.shards.kv);
            builder.fill(rank, MAIN, sum, &rows, FillValue::Zero);
            for &from in &landed[of] {
                let rows = build::same_rows(&rows);
                builder.push(rank, MAIN, Work::Accumulate { from, to: sum, rows });
            }
            sum
        })
    }

    fn sink_gradient(&self, builder: &mut Builder, place: usize, gradients: LocalBackward) {
        let Member { rank, local } = self.members[place];
        if let Some((sink, dsink)) = local.sink.zip(gradients.dsink) {
            let (Local { out, lse, .. }, dout) = (local, gradients.dout);
            let rows = self.real_queries(place);
            let work = Work::SinkGradient { sink, dout, out, lse, dsink, rows, descales: Vec::new() };
            builder.push(rank, MAIN, work);
        }
    }

    /// Returns the group's rank at a place of the ring, counted round.
    fn rank(&self, place: usize) -> usize {
        self.members[place % self.members.len()].rank
    }

    /// Returns the number of steps: one for each member. If there is no key, no KV travels and one step is enough.
    fn steps(&self) -> usize {
        if build::slots(&self.shards.kv).is_empty() { 1 } else { self.members.len() }
    }

    /// Returns the number of parts of a slot, or of a step between stripes of several rows.
    fn parts(&self) -> usize {
        self.shards.q.parts().unwrap_or(stripes::PARTS)
    }

    /// Returns the launches of a forward step: parts of the queries, and a part of the keys.
    fn forward_parts(&self) -> Vec<(Range<usize>, usize)> {
        (0..self.parts()).map(|part| (0..self.parts(), part)).collect()
    }

    /// Returns the launches of a backward step like [`RingCore::forward_parts`]. No launch has two parts that share
    /// keys.
    fn backward_parts(&self) -> Vec<(Range<usize>, usize)> {
        match self.shards.q.parts() {
            Some(parts) => (0..parts).flat_map(|q| (0..parts).map(move |kv| (q..q + 1, kv))).collect(),
            None => self.forward_parts(),
        }
    }

    pub(super) fn real_queries(&self, place: usize) -> Vec<Run> {
        let runs = self.shards.q.placed(place).into_iter().map(|placed| placed.local);
        runs.filter(|run| run.len > 0).map(|run| Run { span: run.len, ..run }).collect()
    }

    /// Returns the step to which a launch on part `part` of an owner's keys belongs.
    fn step(&self, (place, owner): (usize, usize), index: usize, part: usize) -> Step {
        let section = match (self.shards.q.balance, self.mask.is_causal(), owner.cmp(&place)) {
            (Balance::Striped { stripe: 2.. }, ..) if part > 0 => Section::Edge,
            (Balance::Striped { .. }, ..) | (_, false, _) => Section::Full,
            (_, true, Ordering::Less) => Section::Lower,
            (_, true, Ordering::Equal) => Section::Diagonal,
            (_, true, Ordering::Greater) => Section::Upper,
        };
        Step::Ring { index, of: self.steps(), owner, section, part: (part, self.parts()) }
    }

    /// Returns the launch of some parts of a member's queries against one part of an owner's keys; `None` if the mask
    /// shows nothing.
    fn call(&self, ends: (usize, usize), q: Range<usize>, kv: usize) -> Option<Launch> {
        let segments = self.all_segments(ends, q, kv);
        (!segments.is_empty()).then(|| Launch { call: self.partial(segments), table: None })
    }

    /// Returns the segments of such a launch.
    pub(super) fn all_segments(&self, ends: (usize, usize), q: Range<usize>, kv: usize) -> Vec<Segment> {
        let sequences = 0..self.shards.q.slots.len();
        sequences.flat_map(|sequence| self.segments(sequence, ends, q.clone(), kv)).collect()
    }

    /// Returns the call of a launch that says its own segments.
    pub(super) fn partial(&self, segments: Vec<Segment>) -> AttentionCall {
        self.launch(segments, RowPolicy::Overwrite, None).call
    }

    /// Returns the same launch as a table tells it, without the first and last pieces of queries that see nothing.
    fn told_call(&self, told: &Told, q: Range<usize>, kv: usize) -> Option<Launch> {
        let pieces = self.told_pieces(told, q, kv);
        let sees = |piece: &usize| told.segments(*piece..*piece + 1).iter().any(Segment::sees);
        let (first, last) = (pieces.clone().find(sees)?, pieces.rev().find(|piece| sees(piece))?);
        Some(self.launch_told(told, first..last + 1))
    }

    /// Returns the launch of some pieces of a table.
    fn launch_told(&self, told: &Told, pieces: Range<usize>) -> Launch {
        let (segments, rows) = (told.segments(pieces.clone()), told.region(pieces));
        self.launch(segments, RowPolicy::Leave, Some(rows))
    }

    /// Returns the call of a launch on these parts as a table tells it, and the rows of the table. Of stripes of several
    /// rows, pieces that see nothing are left out at both ends.
    pub(super) fn told_launch(&self, told: &Told, q: Range<usize>, kv: usize) -> (AttentionCall, Region) {
        let all = self.told_pieces(told, q.clone(), kv);
        let trimmed = if self.shards.q.parts().is_none() { self.told_call(told, q, kv) } else { None };
        let Launch { call, table } = trimmed.unwrap_or_else(|| self.launch_told(told, all.clone()));
        (call, table.unwrap_or_else(|| told.region(all)))
    }

    /// Returns the pieces of a table that are a launch. Of stripes of several rows, the first piece is the band, and
    /// each edge has as many of the others.
    fn told_pieces(&self, told: &Told, q: Range<usize>, kv: usize) -> Range<usize> {
        match (self.shards.q.parts(), kv) {
            (Some(parts), _) => kv * parts + q.start..kv * parts + q.end,
            (None, 0) => 0..1,
            (None, edge @ (1 | 2)) => {
                let stripes = told.pieces() / 2;
                1 + (edge - 1) * stripes..1 + edge * stripes
            }
            // The mask of a table is a band, which has no other edges.
            (None, _) => 0..0,
        }
    }

    fn launch(&self, segments: Vec<Segment>, policy: RowPolicy, table: Option<Region>) -> Launch {
        // Partial results contain no sink.
        let softmax = Softmax { sink: Sink::None, ..self.softmax };
        Launch { call: AttentionCall { segments, softmax, policy }, table }
    }

    /// Returns the launches of a step on these parts of the queries and of the keys, with the part of the keys. A table
    /// that they read is made first, on the stream of the step.
    fn launches(
        &self,
        builder: &mut Builder,
        (rank, stream): (usize, usize),
        (place, owner): (usize, usize),
        tables: Option<&Tables>,
        parts: Vec<(Range<usize>, usize)>,
    ) -> Vec<(usize, Launch)> {
        let parts = parts.into_iter();
        let Some(Tables { of, buffers }) = tables else {
            return parts.filter_map(|(q, kv)| Some((kv, self.call((place, owner), q, kv)?))).collect();
        };
        let source = SegmentSource { place, keys: KeySource::Of(owner), ..of.clone() };
        let told = Told::new(buffers[stream], &source);
        let launches: Vec<_> =
            parts.filter_map(|(q, kv)| Some((kv, self.told_call(&told, q, kv)?))).collect();
        if !launches.is_empty() {
            tables::make(builder, (rank, stream), buffers[stream], source);
        }
        launches
    }

    fn segments(
        &self,
        sequence: usize,
        (place, owner): (usize, usize),
        q_parts: Range<usize>,
        kv_part: usize,
    ) -> Vec<Segment> {
        let Shards { q, kv } = self.shards;
        if let Balance::Striped { stripe: width @ 2.. } = q.balance {
            return stripes::segments(&self.mask, [q, kv], sequence, [place, owner], (width, kv_part));
        }
        let Some(keys) = kv.pieces(sequence, owner).nth(kv_part) else { return Vec::new() };
        let kv_rows = kv.local(sequence, &keys);
        let lengths = (q.slots[sequence].len, kv.slots[sequence].len);
        let queries = q.pieces(sequence, place).skip(q_parts.start).take(q_parts.len());
        let segments = |piece| {
            let queries = PlacedRun { sequence, piece, local: q.local(sequence, &piece) };
            build::segments(&self.mask, lengths, &queries, (&keys, kv_rows), Unseeing::Dropped)
        };
        queries.flat_map(segments).collect()
    }
}

/// Call of a launch, and the rows of a table that say its segments.
struct Launch {
    call: AttentionCall,
    table: Option<Region>,
}

/// Tables of a member's steps: what they are made from, and a buffer for each compute stream.
struct Tables {
    of: SegmentSource,
    buffers: Vec<BufferId>,
}

impl Tables {
    /// Returns the tables of a pass; `None` where launches read none.
    fn new(builder: &mut Builder, core: &RingCore, place: usize) -> Option<Tables> {
        let keys = KeySource::Of(place);
        let of = SegmentSource::told(core.mask, core.shards, place, keys)
            .filter(|_| core.order == MergeOrder::Deferred)?;
        let rank = core.members[place].rank;
        let buffer = |stream| tables::buffer(builder, rank, &format!("segments, stream {stream}"), &of);
        let buffers = (0..2.min(core.steps())).map(buffer).collect();
        Some(Tables { of, buffers })
    }
}

/// Sends buffers to a rank and receives others from another rank, in one group. Returns the event of their end.
fn exchange(
    builder: &mut Builder,
    rank: usize,
    (to, sent): (usize, [BufferId; 2]),
    (from, received): (usize, [BufferId; 2]),
) -> EventId {
    let group = Some(builder.group());
    let regions = sent.map(|buffer| all(builder, buffer)).to_vec();
    builder.push(rank, COMMUNICATION, Work::Send { to, group, regions });
    let regions = received.map(|buffer| all(builder, buffer)).to_vec();
    builder.push(rank, COMMUNICATION, Work::Recv { from, group, regions });
    builder.record(rank, COMMUNICATION)
}

/// Orders earlier work of the main stream before all communication. The other compute stream follows too, because its
/// first step waits for a KV that has arrived.
fn fork(builder: &mut Builder, rank: usize, steps: usize) {
    if steps > 1 {
        let start = builder.record(rank, MAIN);
        builder.wait(rank, COMMUNICATION, start);
    }
}

fn wait(builder: &mut Builder, rank: usize, stream: usize, event: Option<EventId>) {
    if let Some(event) = event {
        builder.wait(rank, stream, event);
    }
}

/// Returns the rows that runs own, padding included, paired with the same rows of another buffer. Adjacent runs are
/// joined.
pub(super) fn owned(runs: impl Iterator<Item = Run>) -> Vec<RowPair> {
    let mut runs: Vec<Run> = runs.map(|run| Run { len: run.span, ..run }).collect();
    runs.sort_by_key(|run| run.offset);
    runs.dedup_by(|later, earlier| {
        let packed = earlier.step == 1 && later.step == 1;
        let adjacent = packed && earlier.offset + earlier.span == later.offset;
        if adjacent {
            *earlier = Run::packed(earlier.offset, earlier.len + later.len, earlier.span + later.span);
        }
        adjacent
    });
    build::same_rows(&runs)
}
