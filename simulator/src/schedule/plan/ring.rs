//! The plan of a ring. It has the same steps as [`super::super::ring`], which says why they are right.
//!
//! In the deferred order, each launch has an out and an LSE of its own. A rank has these for the launches that it makes,
//! and the plan for all that any rank could make.

use std::ops::Range;

use seamproof_oracle::{Format, Side, Sink};

use super::act::{Act, Extent, Launch, Launches, Mark, Op, Own};
use super::pairs::PieceId;
use super::{Plan, own};
use crate::schedule::build::{self, Builder, Local};
use crate::schedule::tables;
use crate::schedule::{BufferId, FillValue, MergeOrder, MergeStyle, SegmentSource};

const MAIN: u8 = 0;
const COMMUNICATION: u8 = 2;

/// Buffers of a ring's member, with those of its inputs and results.
#[derive(Debug)]
pub(super) struct RingPlan {
    /// Number of steps.
    steps: usize,
    q: Own,
    sink: Option<Own>,
    out: Own,
    lse: Own,
    max_logit: Own,
    /// K and V of step 0.
    kv: [Own; 2],
    running: Own,
    /// The buffer through which the final out goes to its codes.
    through: Option<Own>,
    partials: Partials,
    /// The table of a step, for each compute stream; none where launches read no table.
    tables: Vec<Own>,
    /// K and V of later steps, in turn.
    slots: Vec<[Own; 2]>,
    backward: Option<BackwardPlan>,
}

/// Buffers to which launches of the forward write out and LSE.
#[derive(Debug)]
enum Partials {
    /// Those of a step, for each compute stream, and the manner of their merges.
    Reused(Vec<[Own; 2]>, MergeStyle),
    /// Those of each launch, by step and part of the keys, and the manner in which outs are added at last.
    Kept(Vec<Vec<[Own; 2]>>, MergeStyle),
}

impl Partials {
    /// Returns the out and LSE of a launch.
    fn of(&self, step: usize, keys: usize) -> [Own; 2] {
        match self {
            Partials::Reused(partial, _) => partial[step % 2],
            Partials::Kept(kept, _) => kept[step][keys],
        }
    }

    /// Returns the manner of the merge right behind a launch.
    fn style(&self) -> MergeStyle {
        match self {
            Partials::Reused(_, style) => *style,
            Partials::Kept(..) => MergeStyle::Statistics,
        }
    }
}

/// What all buffers of a ring are made for.
pub(super) struct RingShape<'a> {
    pub(super) steps: usize,
    /// Number of parts of an owner's keys.
    pub(super) key_parts: usize,
    pub(super) order: MergeOrder,
    /// What tables are made from, where launches read them.
    pub(super) told: Option<&'a SegmentSource>,
}

impl RingShape<'_> {
    /// Makes the tables of a pass.
    fn tables(&self, builder: &mut Builder) -> Vec<Own> {
        let table = |stream: usize| {
            let name = format!("segments, stream {stream}");
            self.told.map(|from| own(tables::buffer(builder, 0, &name, from)))
        };
        (0..2.min(self.steps)).filter_map(table).collect()
    }

    /// Makes the out and LSE of every launch.
    fn kept(&self, builder: &mut Builder, local: &Local) -> Vec<Vec<[Own; 2]>> {
        let mut launch = |step: usize, keys: usize| {
            [(local.out, "out"), (local.lse, "lse")].map(|(of, name)| {
                let format = builder.describe(of).format;
                own(builder.like(of, &format!("{name} of step {step}, part {keys}"), format))
            })
        };
        let mut step = |step| (0..self.key_parts).map(|keys| launch(step, keys)).collect();
        (0..self.steps).map(&mut step).collect()
    }
}

/// Buffers of the backward.
#[derive(Debug)]
struct BackwardPlan {
    dout: Own,
    /// dq, dk and dv.
    results: [Own; 3],
    dsink: Option<Own>,
    running: Own,
    /// The buffers through which the sums of dq, dk and dv go to their codes.
    through: [Option<Own>; 3],
    /// The travelling dk and dv, in turn.
    travelling: Vec<[Own; 2]>,
    /// dq, dk and dv of a step, for each compute stream.
    partial: Vec<[Own; 3]>,
    tables: Vec<Own>,
    slots: Vec<[Own; 2]>,
}

/// Kinds of marks. Each has a number for every step.
#[derive(Clone, Copy)]
enum MarkKind {
    Start,
    /// The KV of a step has arrived.
    Arrived,
    /// A step's launches are done.
    Done,
    BackwardStart,
    BackwardArrived,
    BackwardDone,
    /// The gradients behind a step have arrived.
    Gradients,
    /// Those of exchanges.
    Other,
}

const MARK_KINDS: usize = 8;

impl RingPlan {
    /// Makes the buffers in the order in which the ring's builder makes them. Those of the backward are added by
    /// [`RingPlan::with_backward`].
    pub(super) fn forward(builder: &mut Builder, local: &Local, shape: &RingShape<'_>) -> RingPlan {
        let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
        let steps = shape.steps;
        let tables = shape.tables(builder);
        let reused = (shape.order != MergeOrder::Deferred).then(|| partials(builder, local, steps));
        let running = match reused {
            None => builder.sum_of(out, ("out, running", Format::F32)),
            Some(_) => builder.like(out, "out, running", Format::F32),
        };
        let through = if reused.is_none() { builder.nominal_of(out, "out").map(own) } else { None };
        let slots = slots(builder, [k, v], steps);
        let product_rounded = running == out;
        let partials = match reused {
            None => Partials::Kept(shape.kept(builder, local), MergeStyle::Weighted { product_rounded }),
            Some(reused) => Partials::Reused(reused, shape.order.style()),
        };
        let [q, out, lse, max_logit, running] = [q, out, lse, max_logit, running].map(own);
        let (kv, sink, backward) = ([k, v].map(own), sink.map(own), None);
        RingPlan {
            steps,
            q,
            sink,
            out,
            lse,
            max_logit,
            kv,
            running,
            through,
            partials,
            tables,
            slots,
            backward,
        }
    }

    /// Returns the out and LSE of each launch, in the order of the buffers; none where they are reused.
    pub(super) fn kept(&self) -> impl Iterator<Item = Own> {
        let kept = match &self.partials {
            Partials::Reused(..) => &[][..],
            Partials::Kept(kept, _) => kept,
        };
        kept.iter().flatten().flatten().copied()
    }

    /// Returns the tables of both passes.
    pub(super) fn tables(&self) -> impl Iterator<Item = Own> {
        let of_backward = self.backward.iter().flat_map(|backward| &backward.tables);
        self.tables.iter().chain(of_backward).copied()
    }

    /// Adds the buffers of the backward, if there is one.
    pub(super) fn with_backward(
        self,
        builder: &mut Builder,
        local: &Local,
        shape: &RingShape<'_>,
    ) -> RingPlan {
        let Some(to) = local.backward else { return self };
        let turns = 0..2.min(self.steps);
        let running = own(builder.like(to.dq, "dq, running", Format::F32));
        let all = [(to.dq, "dq"), (to.dk, "dk"), (to.dv, "dv")];
        let is_deferred = shape.order == MergeOrder::Deferred;
        let through = all.map(|(of, name)| {
            let of_codes = if is_deferred { builder.nominal_of(of, name) } else { None };
            of_codes.map(own)
        });
        let mut like = |of: BufferId, name: String| own(builder.like(of, &name, Format::F32));
        let travelling = turns.clone().map(|slot| {
            [(to.dk, "dk"), (to.dv, "dv")]
                .map(|(of, name)| like(of, format!("{name} travelling, slot {slot}")))
        });
        let travelling = travelling.collect();
        let partial = turns.map(|stream| {
            all.map(|(of, name)| {
                let format = build::partial(builder.describe(of).format);
                own(builder.like(of, &format!("{name} of a step, stream {stream}"), format))
            })
        });
        let partial = partial.collect();
        let tables = shape.tables(builder);
        let slots = slots(builder, [local.k, local.v], self.steps);
        let (dout, results, dsink) = (own(to.dout), [to.dq, to.dk, to.dv].map(own), to.dsink.map(own));
        let backward =
            BackwardPlan { dout, results, dsink, running, through, travelling, partial, tables, slots };
        RingPlan { backward: Some(backward), ..self }
    }

    /// Returns the number of sections of a pass: the steps, and what is before and behind them.
    pub(super) fn sections(&self) -> usize {
        self.steps + 2
    }

    /// Whether there is more than one step.
    pub(super) fn is_long(&self) -> bool {
        self.steps > 1
    }

    pub(super) fn events(&self) -> usize {
        MARK_KINDS * (self.steps + 1).max(OTHERS)
    }

    /// Returns a mark of the work around a ring of some steps, by a number below [`OTHERS`].
    pub(super) fn other(steps: usize, number: usize) -> Mark {
        mark(steps, MarkKind::Other, number)
    }
}

fn mark(steps: usize, kind: MarkKind, step: usize) -> Mark {
    Mark((kind as usize * (steps + 1).max(OTHERS) + step) as u32)
}

/// Number of marks of the work around a ring.
pub(super) const OTHERS: usize = 24;

/// Makes out and LSE of a step, for each compute stream.
fn partials(builder: &mut Builder, local: &Local, steps: usize) -> Vec<[Own; 2]> {
    let mut partial = |stream: usize| {
        let like = [(local.out, "out"), (local.lse, "lse")];
        like.map(|(of, name)| {
            let format = build::partial(builder.describe(of).format);
            own(builder.like(of, &format!("{name} of a step, stream {stream}"), format))
        })
    };
    (0..2.min(steps)).map(&mut partial).collect()
}

/// Makes the slots of KV that is received.
fn slots(builder: &mut Builder, kv: [BufferId; 2], steps: usize) -> Vec<[Own; 2]> {
    let mut receive = |index: usize| {
        [(kv[0], "k"), (kv[1], "v")].map(|(of, name)| {
            let format = builder.describe(of).format;
            own(builder.like(of, &format!("{name} received, slot {index}"), format))
        })
    };
    (0..2.min(steps - 1)).map(&mut receive).collect()
}

/// Operations of a section in the making.
struct Section<'a> {
    ring: &'a RingPlan,
    to: &'a mut Vec<Op>,
}

impl Section<'_> {
    fn push(&mut self, stream: u8, act: Act) {
        self.to.push(Op { stream, act });
    }

    fn record(&mut self, stream: u8, kind: MarkKind, step: usize) {
        let mark = mark(self.ring.steps, kind, step);
        self.push(stream, Act::Record(mark));
    }

    fn wait(&mut self, stream: u8, kind: MarkKind, step: usize) {
        let mark = mark(self.ring.steps, kind, step);
        self.push(stream, Act::Wait(mark));
    }

    fn fill(&mut self, to: Own, rows: Extent, value: FillValue) {
        self.push(MAIN, Act::Fill { to, rows, value });
    }

    fn copy(&mut self, from: Own, to: Own, side: Side) {
        self.push(MAIN, Act::Copy { from, to, rows: Extent::Slots(side) });
    }

    /// Copies a sum to its result, through the format of another buffer where there is one.
    fn store(&mut self, sum: Own, through: Option<Own>, to: Own, side: Side) {
        if let Some(through) = through {
            self.copy(sum, through, side);
        }
        self.copy(through.unwrap_or(sum), to, side);
    }

    /// Makes a table that is not made yet.
    fn make(&mut self, stream: u8, unmade: &mut Option<Own>, owner: u32) {
        if let Some(to) = unmade.take() {
            self.push(stream, Act::MakeSegments { to, owner });
        }
    }

    fn fork(&mut self, kind: MarkKind) {
        if self.ring.steps > 1 {
            self.record(MAIN, kind, 0);
            self.wait(COMMUNICATION, kind, 0);
        }
    }
}

impl Plan<'_> {
    /// Returns the rank at another place of a rank's ring, counted round.
    fn neighbour(&self, rank: usize, ahead: usize) -> u32 {
        let place = (self.place(rank) + ahead) % self.places();
        let of_place = self.members * self.region_ranks();
        (place * of_place + rank % of_place) as u32
    }

    fn sees(&self, place: usize, queries: Range<usize>, owner: usize, keys: usize) -> bool {
        let of = PieceId { member: owner, part: keys };
        queries.into_iter().any(|part| self.pairs(false).sees(PieceId { member: place, part }, of))
    }

    pub(super) fn forward(&self, ring: &RingPlan, rank: usize, index: usize, to: &mut Vec<Op>) {
        let mut section = Section { ring, to };
        match index.checked_sub(1) {
            None => {
                section.fill(ring.running, Extent::Slots(Side::Q), FillValue::Zero);
                section.fill(ring.lse, Extent::Slots(Side::Q), FillValue::NegInfinity);
                section.fill(ring.max_logit, Extent::Values, FillValue::NegInfinity);
                section.fork(MarkKind::Start);
            }
            Some(step) if step < ring.steps => self.forward_step(rank, step, &mut section),
            Some(_) => {
                section.wait(MAIN, MarkKind::Done, ring.steps - 1);
                self.add_kept(rank, &mut section);
                if self.problem.softmax.sink != Sink::None {
                    section.push(MAIN, Act::ApplySink { sink: ring.sink, results: [ring.running, ring.lse] });
                }
                if ring.running != ring.out {
                    section.store(ring.running, ring.through, ring.out, Side::Q);
                }
                if self.places() > 1 {
                    section.push(MAIN, Act::AllReduce { buffer: ring.max_logit });
                }
            }
        }
    }

    /// Returns the launches of a forward step, one for each part of the keys of which some query sees a key. Those that
    /// a table tells leave out the first and last parts of the queries that see nothing.
    fn forward_launches(&self, rank: usize, step: usize) -> impl Iterator<Item = Launch> {
        let (place, size, [q_parts, kv_parts]) = (self.place(rank), self.places(), self.parts());
        let owner = (place + size - step) % size;
        let all = 0..q_parts;
        (0..kv_parts).filter_map(move |keys| {
            let sees = |part: &usize| self.sees(place, *part..*part + 1, owner, keys);
            let first = all.clone().find(sees)?;
            let queries = match self.told {
                None => [0, q_parts as u16],
                Some(_) => [first as u16, 1 + all.clone().rfind(sees)? as u16],
            };
            Some(Launch { owner: owner as u32, queries, keys: keys as u16 })
        })
    }

    /// Adds the outs that were kept, in order of steps, once the LSE is final.
    fn add_kept(&self, rank: usize, section: &mut Section<'_>) {
        let ring = section.ring;
        let Partials::Kept(kept, style) = &ring.partials else { return };
        for (index, of_step) in kept.iter().enumerate() {
            for launch in self.forward_launches(rank, index) {
                let (step, running) = (of_step[usize::from(launch.keys)], [ring.running, ring.lse]);
                section.push(MAIN, Act::Merge { style: *style, launch, step, running });
            }
        }
    }

    fn forward_step(&self, rank: usize, step: usize, section: &mut Section<'_>) {
        let (ring, size) = (section.ring, self.places());
        let kv = |step: usize| if step == 0 { ring.kv } else { ring.slots[(step - 1) % 2] };
        if step + 1 < ring.steps {
            if step > 1 {
                section.wait(COMMUNICATION, MarkKind::Done, step - 1);
            }
            let (to, from) = (self.neighbour(rank, 1), self.neighbour(rank, size - 1));
            section.push(COMMUNICATION, Act::Exchange { to, sent: kv(step), from, received: kv(step + 1) });
            section.record(COMMUNICATION, MarkKind::Arrived, step + 1);
        }
        let stream = (step % 2) as u8;
        if step > 0 {
            section.wait(stream, MarkKind::Arrived, step);
        }
        let (mut turn, [k, v]) = (step.checked_sub(1), kv(step));
        let table = ring.tables.get(step % 2).copied();
        let mut unmade = table;
        for launch in self.forward_launches(rank, step) {
            section.make(stream, &mut unmade, launch.owner);
            let [out, lse] = ring.partials.of(step, launch.keys.into());
            let (inputs, results) = ([ring.q, k, v], [out, lse, ring.max_logit]);
            section.push(stream, Act::Attend { launch, table, inputs, results });
            if let Some(before) = turn.take() {
                section.wait(stream, MarkKind::Done, before);
            }
            let (style, running) = (ring.partials.style(), [ring.running, ring.lse]);
            section.push(stream, Act::Merge { style, launch, step: [out, lse], running });
        }
        if let Some(before) = turn {
            section.wait(stream, MarkKind::Done, before);
        }
        section.record(stream, MarkKind::Done, step);
    }

    pub(super) fn backward(&self, ring: &RingPlan, rank: usize, index: usize, to: &mut Vec<Op>) {
        let Some(back) = &ring.backward else { return };
        let mut section = Section { ring, to };
        match index.checked_sub(1) {
            None => {
                section.fill(back.running, Extent::Slots(Side::Q), FillValue::Zero);
                for to in back.travelling[0] {
                    section.fill(to, Extent::All, FillValue::Zero);
                }
                section.fork(MarkKind::BackwardStart);
            }
            Some(step) if step < ring.steps => self.backward_step(rank, step, back, &mut section),
            Some(_) => {
                if ring.steps > 1 {
                    section.wait(MAIN, MarkKind::Gradients, ring.steps);
                }
                let ([dq, dk, dv], [of_dq, of_dk, of_dv]) = (back.results, back.through);
                let home = back.travelling[ring.steps % back.travelling.len()];
                section.store(back.running, of_dq, dq, Side::Q);
                section.store(home[0], of_dk, dk, Side::Kv);
                section.store(home[1], of_dv, dv, Side::Kv);
                if let Some((sink, dsink)) = ring.sink.zip(back.dsink) {
                    let inputs = [sink, back.dout, ring.out, ring.lse];
                    section.push(MAIN, Act::SinkGradient { inputs, dsink });
                }
            }
        }
    }

    fn backward_step(&self, rank: usize, step: usize, back: &BackwardPlan, section: &mut Section<'_>) {
        let (ring, size, [q_parts, kv_parts]) = (section.ring, self.places(), self.parts());
        let kv = |step: usize| if step == 0 { ring.kv } else { back.slots[(step - 1) % 2] };
        let travelling = |step: usize| back.travelling[step % back.travelling.len()];
        let (to, from) = (self.neighbour(rank, size - 1), self.neighbour(rank, 1));
        if step + 1 < ring.steps {
            section.push(COMMUNICATION, Act::Exchange { to, sent: kv(step), from, received: kv(step + 1) });
            section.record(COMMUNICATION, MarkKind::BackwardArrived, step + 1);
        }
        let (stream, place) = ((step % 2) as u8, self.place(rank));
        if step > 0 {
            section.wait(stream, MarkKind::BackwardArrived, step);
        }
        let mut turn = (step > 0).then_some(step);
        let (owner, [k, v], results) = ((place + step) % size, kv(step), back.partial[step % 2]);
        let table = back.tables.get(step % 2).copied();
        let mut unmade = table;
        let inputs = [ring.q, k, v, back.dout, ring.out, ring.lse];
        let ([dq, dk, dv], [to_dk, to_dv]) = (results, travelling(step));
        let sums = [back.running, to_dk, to_dv];
        let all = Launches { owner: owner as u32, queries: [0, q_parts as u16], keys: [0, kv_parts as u16] };
        if let Some(launch) = self.first_launch(place, &all) {
            section.make(stream, &mut unmade, launch.owner);
            section.push(stream, Act::AttendBackward { launch, table, inputs, results });
            if let Some(before) = turn.take() {
                section.wait(stream, MarkKind::Gradients, before);
            }
            let gradients = [(Side::Q, dq), (Side::Kv, dk), (Side::Kv, dv)].into_iter().zip(sums);
            for ((side, from), to) in gradients {
                section.push(stream, Act::Accumulate { launch, side, from, to });
            }
            let (q, keys) = (launch.queries[0], launch.keys);
            let beside = Launches { queries: [q, q + 1], keys: [keys + 1, all.keys[1]], ..all };
            let below = Launches { queries: [q + 1, all.queries[1]], ..all };
            for launches in
                [beside, below].into_iter().filter(|rest| self.first_launch(place, rest).is_some())
            {
                section.push(stream, Act::AttendBackwardEach { launches, table, inputs, results, sums });
            }
        }
        if let Some(before) = turn {
            section.wait(stream, MarkKind::Gradients, before);
        }
        if ring.steps > 1 {
            section.record(stream, MarkKind::BackwardDone, step);
            section.wait(COMMUNICATION, MarkKind::BackwardDone, step);
            let (sent, received) = (travelling(step), travelling(step + 1));
            section.push(COMMUNICATION, Act::Exchange { to, sent, from, received });
            section.record(COMMUNICATION, MarkKind::Gradients, step + 1);
        }
    }
}
