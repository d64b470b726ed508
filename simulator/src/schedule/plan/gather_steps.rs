//! The plan of an all-gather in steps. It has the same operations as [`super::super::all_gather_steps`], which says why they
//! are right.
//!
//! Each step has a section. Two steps may write the same buffer at once, of which each has rows of its own: the checker of
//! plans takes these for parts.

use seamproof_oracle::{Format, Run, Side};

use super::act::{Act, Extent, Launch, Launches, Mark, Op, Own};
use super::gather::{COMPUTE, GatherLaunches, GatherPlan, GatherShape, MARKS, Scattered, push_scatter};
use super::{Core, Plan, own};
use crate::schedule::all_gather;
use crate::schedule::build::{self, Builder, Local, LocalBackward};
use crate::schedule::program::{Region, RowPair};
use crate::schedule::tables::{self, Told};
use crate::schedule::{BufferId, FillValue, KeySource, SegmentSource};
use crate::{AttentionCall, RowPolicy};

/// The other stream of steps.
const BESIDE: u8 = 1;

/// Buffers of steps, with one of a kind for each stream that has a step.
#[derive(Debug)]
pub(super) struct GatherSteps {
    /// The table, where launches read one.
    table: Option<Own>,
    outs: Vec<Own>,
    backward: Option<StepsBackward>,
}

/// Buffers of the backward.
#[derive(Debug)]
struct StepsBackward {
    dout: Own,
    dq: Own,
    dsink: Option<Own>,
    /// The table of residues, where queries lie apart and launches read one.
    residues: Option<Own>,
    /// dq, dk and dv of a step.
    of_streams: [Vec<Own>; 3],
    /// The buffer in which steps add up dq, where queries lie apart. It may be the result.
    dq_sum: Option<Own>,
    scattered: [Scattered; 2],
}

/// Returns a buffer like another, in a format, for each stream of some steps.
fn of_streams(
    builder: &mut Builder,
    steps: usize,
    (model, format): (BufferId, Format),
    name: &str,
) -> Vec<Own> {
    let mut one = |stream| own(builder.like(model, &format!("{name} of a step, stream {stream}"), format));
    (0..2.min(steps)).map(&mut one).collect()
}

impl GatherSteps {
    /// Makes the buffers in the order in which the builder makes them.
    pub(super) fn new(builder: &mut Builder, local: &Local, shape: &GatherShape<'_>) -> GatherSteps {
        let table = shape.told.map(|from| own(tables::buffer(builder, 0, "segments of all steps", from)));
        let steps = if let GatherLaunches::Parts(parts) = shape.launches { parts } else { 1 };
        let of_out = (local.out, builder.describe(local.out).format);
        let outs = of_streams(builder, steps.into(), of_out, "out");
        let backward = local.backward.map(|to| StepsBackward::new(builder, local, &to, shape));
        GatherSteps { table, outs, backward }
    }
}

impl StepsBackward {
    fn new(
        builder: &mut Builder,
        local: &Local,
        to: &LocalBackward,
        shape: &GatherShape<'_>,
    ) -> StepsBackward {
        let is_apart = matches!(shape.launches, GatherLaunches::Residues(_));
        let residues = shape.told.filter(|_| is_apart).map(|from| {
            let from = SegmentSource { keys: KeySource::Residues, ..from.clone() };
            own(tables::buffer(builder, 0, "segments of all residues", &from))
        });
        let steps = shape.launches.count().into();
        let [(dk_sum, dk), (dv_sum, dv)] =
            [(local.k, to.dk, "dk"), (local.v, to.dv, "dv")].map(|(of, to, name)| {
                let format = builder.describe(to).format;
                let name_of_sum = format!("{name} of all steps");
                let sum = shape.full(builder, of, &name_of_sum, build::gathered(format));
                (sum, of_streams(builder, steps, (sum, format), name))
            });
        let of_dq = (to.dq, builder.describe(to.dq).format);
        let dq = of_streams(builder, steps, of_dq, "dq");
        let dq_sum = is_apart.then(|| own(builder.sum_of(to.dq, ("dq of all steps", build::NOMINAL))));
        let scattered = [(dk_sum, to.dk), (dv_sum, to.dv)]
            .map(|(sum, to)| Scattered::new(builder, sum, to, shape.shares));
        let (dout, dsink) = (own(to.dout), to.dsink.map(own));
        StepsBackward { dout, dq: own(to.dq), dsink, residues, of_streams: [dq, dk, dv], dq_sum, scattered }
    }
}

impl GatherLaunches {
    /// Returns the number of launches of the backward, those that see nothing among them.
    fn count(self) -> u16 {
        let (GatherLaunches::Parts(count) | GatherLaunches::Residues(count)) = self;
        count
    }
}

impl GatherPlan {
    /// Returns the number of sections of a pass: the steps, and what is before and behind them.
    pub(super) fn sections(&self) -> usize {
        if self.steps.is_some() { usize::from(self.launches.count()) + 2 } else { 1 }
    }

    /// Whether there may be a second step.
    pub(super) fn is_long(&self) -> bool {
        self.steps.is_some() && self.launches.count() > 1
    }

    pub(super) fn marks(&self) -> usize {
        let of_steps = if self.steps.is_some() { 2 * (1 + usize::from(self.launches.count())) } else { 0 };
        MARKS as usize + of_steps
    }

    /// Returns the mark at which the second stream begins.
    fn begun(is_backward: bool) -> Mark {
        Mark(MARKS + u32::from(is_backward))
    }

    /// Returns the mark of the end of a step.
    fn ended(&self, is_backward: bool, step: usize) -> Mark {
        let first = if is_backward { u32::from(self.launches.count()) } else { 0 };
        Mark(MARKS + 2 + first + step as u32)
    }

    /// Returns the tables of the steps of both passes, where they read one.
    pub(super) fn tables(&self) -> [Option<Own>; 2] {
        let table = self.steps.as_ref().and_then(|steps| steps.table);
        let backward = self.steps.as_ref().and_then(|steps| steps.backward.as_ref());
        [table, if self.is_apart() { backward.and_then(|backward| backward.residues) } else { table }]
    }

    /// Returns the buffers that a rank has for steps that it makes.
    pub(super) fn of_steps(&self) -> impl Iterator<Item = Own> {
        let steps = self.steps.iter();
        steps.flat_map(|steps| {
            let backward = steps.backward.iter().flat_map(|backward| backward.of_streams.iter().flatten());
            steps.outs.iter().chain(backward).copied()
        })
    }
}

/// Steps of a rank's pass.
impl Plan<'_> {
    /// Returns the launch of a rank's step; `None` behind the last one. A table has the residues of which nothing is seen, too.
    fn step_launch(
        &self,
        gather: &GatherPlan,
        (rank, is_backward): (usize, bool),
        step: usize,
    ) -> Option<Launch> {
        let (of, at) = (Launch { owner: 0, queries: [0, 1], keys: 0 }, u16::try_from(step).ok()?);
        match (gather.launches, is_backward) {
            (GatherLaunches::Parts(parts), _) => (at < parts).then(|| Launch { queries: [at, at + 1], ..of }),
            (GatherLaunches::Residues(_), false) => (at == 0).then_some(of),
            (GatherLaunches::Residues(residues), true) if self.told.is_some() => {
                (at < residues).then_some(Launch { keys: at, ..of })
            }
            (GatherLaunches::Residues(residues), true) => {
                let all = Launches { owner: 0, queries: of.queries, keys: [0, residues] };
                self.each_launch(self.place(rank), &all).nth(step)
            }
        }
    }

    /// Returns the number of steps of a rank's pass.
    fn step_count(&self, gather: &GatherPlan, of: (usize, bool)) -> usize {
        let all = 0..usize::from(gather.launches.count());
        all.take_while(|step| self.step_launch(gather, of, *step).is_some()).count()
    }

    /// Appends barriers around a rank's pass, without those of a stream on which it has no step.
    pub(super) fn append_barriers(
        &self,
        (rank, is_backward): (usize, bool),
        mut from: Vec<Op>,
        to: &mut Vec<Op>,
    ) {
        let is_idle = match &self.core {
            Core::Gather(gather) if gather.is_long() => {
                self.step_launch(gather, (rank, is_backward), 1).is_none()
            }
            _ => false,
        };
        if is_idle {
            let marks: Vec<Mark> =
                from.iter().filter(|op| op.stream == BESIDE).filter_map(recorded).collect();
            let waits = |op: &Op| matches!(op.act, Act::Wait(mark) if marks.contains(&mark));
            from.retain(|op| op.stream != BESIDE && !waits(op));
        }
        to.append(&mut from);
    }

    /// Lets the second stream begin, if there is a step on it.
    fn begin_beside(&self, gather: &GatherPlan, (rank, is_backward): (usize, bool), to: &mut Vec<Op>) {
        if self.step_launch(gather, (rank, is_backward), 1).is_some() {
            let begun = GatherPlan::begun(is_backward);
            to.push(Op { stream: COMPUTE, act: Act::Record(begun) });
            to.push(Op { stream: BESIDE, act: Act::Wait(begun) });
        }
    }

    /// Appends a section of the forward: what is before the steps, one of them, or what is behind them.
    pub(super) fn forward_step_gathered(
        &self,
        gather: &GatherPlan,
        steps: &GatherSteps,
        (rank, index): (usize, usize),
        to: &mut Vec<Op>,
    ) {
        let [out, lse, max_logit] = gather.results;
        let Some(step) = index.checked_sub(1) else {
            gather.push_gather(to);
            let mut push = |act| to.push(Op { stream: COMPUTE, act });
            if let Some(to) = steps.table {
                push(Act::MakeSegments { to, owner: 0 });
            }
            let slots = Extent::Slots(Side::Q);
            push(Act::Fill { to: out, rows: slots, value: FillValue::Zero });
            push(Act::Fill { to: lse, rows: slots, value: FillValue::NegInfinity });
            push(Act::Fill { to: max_logit, rows: Extent::Values, value: FillValue::NegInfinity });
            return self.begin_beside(gather, (rank, false), to);
        };
        if let Some(launch) = self.step_launch(gather, (rank, false), step) {
            let (from, stream) = (steps.outs[step % 2], (step % 2) as u8);
            let mut push = |act| to.push(Op { stream, act });
            let (table, sink, [k, v]) = (steps.table, gather.sink, gather.read);
            let (inputs, results) = ([gather.q, k, v], [from, lse, max_logit]);
            push(Act::AttendStep { launch, table, inputs, sink, results });
            push(Act::CopyValid { launch, table, from, to: out });
            push(Act::Record(gather.ended(false, step)));
        } else if step == usize::from(gather.launches.count()) {
            let count = self.step_count(gather, (rank, false));
            if let Some(last) = last_beside(count) {
                to.push(Op { stream: COMPUTE, act: Act::Wait(gather.ended(false, last)) });
            }
            gather.push_largest(to);
        }
    }

    /// Appends a section of the backward.
    pub(super) fn backward_step_gathered(
        &self,
        gather: &GatherPlan,
        steps: &GatherSteps,
        (rank, index): (usize, usize),
        to: &mut Vec<Op>,
    ) {
        let Some(backward) = &steps.backward else { return };
        let Some(step) = index.checked_sub(1) else {
            backward.push_begin(gather, to);
            return self.begin_beside(gather, (rank, true), to);
        };
        if let Some(launch) = self.step_launch(gather, (rank, true), step) {
            backward.push_step(gather, (step, launch), to);
        } else if step == usize::from(gather.launches.count()) {
            let count = self.step_count(gather, (rank, true));
            let last = count.checked_sub(1).filter(|last| last % 2 == 1);
            backward.push_end(last.map(|last| gather.ended(true, last)), to);
        }
    }

    /// Returns the call of a step's launch, and the rows of its table that say it. A step on a residue is of a backward of
    /// queries that lie apart.
    pub(super) fn step_call(
        &self,
        rank: usize,
        launch: &Launch,
        (is_residue, table): (bool, Option<Own>),
    ) -> (AttentionCall, Option<Region>) {
        let index = usize::from(if is_residue { launch.keys } else { launch.queries[0] });
        let (whole, parts) = all_gather::calls(&self.own, &self.shards, self.member(rank));
        let is_whole = self.is_apart() && !is_residue;
        let keys = if is_residue { KeySource::Residues } else { KeySource::Gathered };
        if let Some(from) = self.source(rank, keys) {
            let told = Told::new(BufferId(table.map_or(0, |own| own.0.into())), &from);
            let pieces = if is_whole { 0..told.pieces() } else { index..index + 1 };
            let (segments, policy) = (told.segments(pieces.clone()), RowPolicy::Leave);
            return (AttentionCall { segments, policy, ..whole }, Some(told.region(pieces)));
        }
        let part = if is_whole { whole } else { all_gather::call_of((whole, parts), index) };
        (AttentionCall { policy: RowPolicy::Leave, ..part }, None)
    }

    /// Returns the real queries of a step.
    pub(super) fn valid(&self, rank: usize, launch: &Launch, is_residue: bool) -> Vec<RowPair> {
        let (call, _) = self.step_call(rank, launch, (is_residue, None));
        let real = call.segments.iter().map(|segment| Run { span: segment.q.len, ..segment.q });
        build::same_rows(&real.collect::<Vec<_>>())
    }
}

/// Returns the last of some steps that is on the second stream.
fn last_beside(count: usize) -> Option<usize> {
    (0..count).rev().take(2).find(|step| step % 2 == 1)
}

/// Returns the mark that an operation records.
fn recorded(op: &Op) -> Option<Mark> {
    if let Act::Record(mark) = op.act { Some(mark) } else { None }
}

impl StepsBackward {
    fn push_begin(&self, gather: &GatherPlan, ops: &mut Vec<Op>) {
        gather.push_sink_gradient(self.dout, self.dsink, ops);
        let mut push = |act| ops.push(Op { stream: COMPUTE, act });
        let (slots, value) = (Extent::Slots(Side::Q), FillValue::Zero);
        push(Act::Fill { to: self.dq, rows: slots, value });
        if let Some(to) = self.residues {
            push(Act::MakeSegments { to, owner: 0 });
        }
        for Scattered { sum, .. } in self.scattered {
            push(Act::Fill { to: sum, rows: Extent::All, value });
        }
        if let Some(to) = self.dq_sum.filter(|sum| *sum != self.dq) {
            push(Act::Fill { to, rows: slots, value });
        }
    }

    fn push_step(&self, gather: &GatherPlan, (step, launch): (usize, Launch), ops: &mut Vec<Op>) {
        let stream = (step % 2) as u8;
        let mut push = |act| ops.push(Op { stream, act });
        let [dq, dk, dv] = [0, 1, 2].map(|of| self.of_streams[of][step % 2]);
        for to in [dk, dv] {
            push(Act::Fill { to, rows: Extent::All, value: FillValue::Zero });
        }
        let ([_, table], [k, v], [out, lse, _]) = (gather.tables(), gather.read, gather.results);
        let inputs = [gather.q, k, v, self.dout, out, lse];
        push(Act::AttendBackward { launch, table, inputs, results: [dq, dk, dv] });
        if self.dq_sum.is_none() {
            push(Act::CopyValid { launch, table, from: dq, to: self.dq });
        }
        if let Some(before) = step.checked_sub(1) {
            push(Act::Wait(gather.ended(true, before)));
        }
        let [of_k, of_v] = self.scattered.map(|of| (Side::Kv, of.sum));
        let sums = [(dk, of_k), (dv, of_v)].into_iter();
        for (from, (side, to)) in sums.chain(self.dq_sum.map(|to| (dq, (Side::Q, to)))) {
            push(Act::Accumulate { launch, side, from, to });
        }
        push(Act::Record(gather.ended(true, step)));
    }

    /// Ends the backward behind the last step, whose mark is given if it is on the second stream.
    fn push_end(&self, last: Option<Mark>, ops: &mut Vec<Op>) {
        let mut push = |act| ops.push(Op { stream: COMPUTE, act });
        if let Some(last) = last {
            push(Act::Wait(last));
        }
        if let Some(from) = self.dq_sum.filter(|sum| *sum != self.dq) {
            push(Act::Copy { from, to: self.dq, rows: Extent::Slots(Side::Q) });
        }
        push_scatter(&self.scattered, ops);
    }
}
