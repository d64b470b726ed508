//! The plan of an all-gather. It has the same operations as [`super::super::all_gather`], which says why they are right.
//!
//! A *residue* is every n-th of the gathered keys, for n ranks. Stripes of one row have a launch of the backward for each,
//! which are parts of the keys.

use seamproof_oracle::{Format, Side};

use super::act::{Act, Extent, Launch, Launches, Mark, Op, Own};
use super::gather_steps::GatherSteps;
use super::{Plan, Way, own};
use crate::schedule::build::{self, Builder, Local, LocalBackward};
use crate::schedule::{BufferId, FillValue, SegmentSource};

pub(super) const COMPUTE: u8 = 0;
const COMMUNICATION: u8 = 2;

/// Buffers of a rank.
#[derive(Debug)]
pub(super) struct GatherPlan {
    pub(super) q: Own,
    /// K and V: the rank's own, all in rank order, and all in sequence order.
    kv: [[Own; 3]; 2],
    /// K and V as launches read them: spread where keys are shared.
    pub(super) read: [Own; 2],
    pub(super) sink: Option<Own>,
    /// Out, LSE and max_logit.
    pub(super) results: [Own; 3],
    backward: Option<BackwardPlan>,
    pub(super) launches: GatherLaunches,
    /// Buffers of steps on two streams; none where the forward is one launch.
    pub(super) steps: Option<GatherSteps>,
}

/// Launches of the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GatherLaunches {
    /// One for each part of the queries.
    Parts(u16),
    /// One for each residue of the keys, of which there are as many. All have all queries, which lie apart.
    Residues(u16),
}

/// What all buffers of an all-gather are made for.
pub(super) struct GatherShape<'a> {
    /// Rows of all ranks together.
    pub(super) rows: usize,
    pub(super) launches: GatherLaunches,
    /// Whether sequences share keys.
    pub(super) shares: bool,
    /// Whether launches are steps on two streams.
    pub(super) is_deferred: bool,
    /// What tables are made from, where steps read them.
    pub(super) told: Option<&'a SegmentSource>,
}

impl GatherShape<'_> {
    /// Makes a buffer with every rank's rows; heads and elements are those of a rank's own.
    pub(super) fn full(&self, builder: &mut Builder, of: BufferId, name: &str, format: Format) -> BufferId {
        let model = builder.describe(of);
        let shape = [self.rows, model.heads, model.dim];
        builder.scratch(0, name, shape, format)
    }
}

/// Buffers of the backward.
#[derive(Debug)]
struct BackwardPlan {
    dout: Own,
    dq: Own,
    /// dq of a launch and of all launches, where a query is in more than one.
    sums: Option<[Own; 2]>,
    dsink: Option<Own>,
    /// dk and dv of a launch.
    of_launch: [Own; 2],
    /// dk and dv of all launches.
    scattered: [Scattered; 2],
}

/// A gradient of all keys on its way to the ranks that own them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scattered {
    /// The sum over a rank's launches.
    pub(super) sum: Own,
    /// The same in the rows that sequences hold, where keys are shared.
    held: Option<Own>,
    /// The same in rank order.
    ordered: Own,
    /// The rank's part over all ranks.
    mine: Own,
    /// The result.
    to: Own,
}

impl Scattered {
    /// Makes the buffers behind a sum.
    pub(super) fn new(builder: &mut Builder, sum: BufferId, to: BufferId, shares: bool) -> Scattered {
        let held = shares.then(|| {
            let name = format!("{}, summed", builder.describe(sum).name);
            builder.like(sum, &name, Format::F32)
        });
        let format = builder.describe(held.unwrap_or(sum)).format;
        let ordered = own(builder.like(sum, "gradient in rank order", format));
        let mine = own(builder.like(to, "gradient of all ranks", format));
        Scattered { sum: own(sum), held: held.map(own), ordered, mine, to: own(to) }
    }
}

/// Numbers of marks.
const ARRIVED: [Mark; 2] = [Mark(0), Mark(1)];
const ATTENDED: Mark = Mark(2);
const SUMMED: [Mark; 2] = [Mark(3), Mark(4)];
const SCATTERED: [Mark; 2] = [Mark(5), Mark(6)];
pub(super) const MARKS: u32 = 7;

impl GatherPlan {
    /// Makes the buffers in the order in which the builder makes them.
    pub(super) fn new(builder: &mut Builder, local: &Local, shape: &GatherShape<'_>) -> GatherPlan {
        let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
        let named = [(k, "k"), (v, "v")];
        let mut full = |of, name: String| {
            let format = builder.describe(of).format;
            shape.full(builder, of, &name, format)
        };
        let ranked = named.map(|(of, name)| full(of, format!("{name} in rank order")));
        let gathered = named.map(|(of, name)| {
            let gathered = full(of, format!("{name} gathered"));
            let spread = shape.shares.then(|| full(of, format!("{name} gathered of every sequence")));
            [gathered, spread.unwrap_or(gathered)]
        });
        let (read, gathered) = (gathered.map(|[_, read]| own(read)), gathered.map(|[gathered, _]| gathered));
        let kv = std::array::from_fn(|index| [[k, v][index], ranked[index], gathered[index]].map(own));
        let steps = shape.is_deferred.then(|| GatherSteps::new(builder, local, shape));
        let whole = local.backward.filter(|_| !shape.is_deferred);
        let backward = whole.map(|to| BackwardPlan::new(builder, local, &to, shape));
        let results = [out, lse, max_logit].map(own);
        let launches = shape.launches;
        GatherPlan { q: own(q), kv, read, sink: sink.map(own), results, backward, launches, steps }
    }

    /// Returns the number of launches on parts of the queries.
    fn parts(&self) -> u16 {
        if let GatherLaunches::Parts(parts) = self.launches { parts } else { 0 }
    }

    /// Returns the number of launches on residues of the keys.
    fn residues(&self) -> u16 {
        if let GatherLaunches::Residues(residues) = self.launches { residues } else { 0 }
    }

    /// Whether queries lie apart.
    pub(super) fn is_apart(&self) -> bool {
        self.residues() > 0
    }

    /// Gathers keys and values.
    pub(super) fn push_gather(&self, to: &mut Vec<Op>) {
        let mut push = |stream, act| to.push(Op { stream, act });
        for ([from, ranked, _], arrived) in self.kv.into_iter().zip(ARRIVED) {
            push(COMMUNICATION, Act::AllGather { from, to: ranked });
            push(COMMUNICATION, Act::Record(arrived));
        }
        for (([_, from, to], arrived), read) in self.kv.into_iter().zip(ARRIVED).zip(self.read) {
            push(COMPUTE, Act::Wait(arrived));
            push(COMPUTE, Act::Reorder { from, to, side: Side::Kv, way: Way::Collect });
            if read != to {
                push(COMPUTE, Act::Spread { from: to, to: read });
            }
        }
    }

    /// Takes the largest logits over all ranks.
    pub(super) fn push_largest(&self, to: &mut Vec<Op>) {
        let mut push = |stream, act| to.push(Op { stream, act });
        push(COMPUTE, Act::Record(ATTENDED));
        push(COMMUNICATION, Act::Wait(ATTENDED));
        push(COMMUNICATION, Act::AllReduce { buffer: self.results[2] });
    }

    fn push_forward(&self, to: &mut Vec<Op>) {
        self.push_gather(to);
        let mut push = |act| to.push(Op { stream: COMPUTE, act });
        let [k, v] = self.read;
        let value = FillValue::NegInfinity;
        push(Act::Fill { to: self.results[2], rows: Extent::Values, value });
        let (inputs, sink, results) = ([self.q, k, v], self.sink, self.results);
        push(Act::AttendWhole { table: None, inputs, sink, results });
        self.push_largest(to);
    }

    /// Writes the gradient of a learnable sink.
    pub(super) fn push_sink_gradient(&self, dout: Own, dsink: Option<Own>, ops: &mut Vec<Op>) {
        let [out, lse, _] = self.results;
        if let Some((sink, dsink)) = self.sink.zip(dsink) {
            let act = Act::SinkGradient { inputs: [sink, dout, out, lse], dsink };
            ops.push(Op { stream: COMPUTE, act });
        }
    }

    fn push_backward(&self, ops: &mut Vec<Op>) {
        let Some(BackwardPlan { dout, dq, sums, dsink, of_launch, scattered }) = &self.backward else {
            return;
        };
        self.push_sink_gradient(*dout, *dsink, ops);
        let mut push = |act| ops.push(Op { stream: COMPUTE, act });
        let ([out, lse, _], [k, v], [dk, dv]) = (self.results, self.read, *of_launch);
        let dkv_sums = scattered.map(|of| of.sum);
        for to in dkv_sums {
            push(Act::Fill { to, rows: Extent::All, value: FillValue::Zero });
        }
        let inputs = [self.q, k, v, *dout, out, lse];
        if let Some([of_launch, sum]) = *sums {
            push(Act::Fill { to: sum, rows: Extent::Slots(Side::Q), value: FillValue::Zero });
            let launches = Launches { owner: 0, queries: [0, 1], keys: [0, self.residues()] };
            let (results, sums) = ([of_launch, dk, dv], [sum, dkv_sums[0], dkv_sums[1]]);
            push(Act::AttendBackwardEach { launches, table: None, inputs, results, sums });
            push(Act::Copy { from: sum, to: *dq, rows: Extent::Slots(Side::Q) });
        }
        for part in 0..self.parts() {
            let launch = Launch { owner: 0, queries: [part, part + 1], keys: 0 };
            push(Act::AttendGathered { launch, inputs, results: [*dq, dk, dv] });
            for (from, to) in [dk, dv].into_iter().zip(dkv_sums) {
                push(Act::Accumulate { launch, side: Side::Kv, from, to });
            }
        }
        push_scatter(scattered, ops);
    }
}

impl BackwardPlan {
    fn new(
        builder: &mut Builder,
        local: &Local,
        to: &LocalBackward,
        shape: &GatherShape<'_>,
    ) -> BackwardPlan {
        let sums = [(local.k, "dk"), (local.v, "dv")].map(|(of, name)| {
            let partial = build::partial(builder.describe(to.dk).format);
            let mut full = |name: String, format| shape.full(builder, of, &name, format);
            [
                full(format!("{name} of a launch"), partial),
                full(format!("{name} of all launches"), Format::F32),
            ]
        });
        let is_apart = matches!(shape.launches, GatherLaunches::Residues(_));
        let queries = is_apart.then(|| {
            let partial = build::partial(builder.describe(to.dq).format);
            [("dq of a launch", partial), ("dq of all launches", Format::F32)]
                .map(|(name, format)| own(builder.like(to.dq, name, format)))
        });
        let scattered = [(sums[0][1], to.dk), (sums[1][1], to.dv)]
            .map(|(sum, to)| Scattered::new(builder, sum, to, shape.shares));
        BackwardPlan {
            dout: own(to.dout),
            dq: own(to.dq),
            sums: queries,
            dsink: to.dsink.map(own),
            of_launch: sums.map(|[of_launch, _]| own(of_launch)),
            scattered,
        }
    }
}

/// Sums gradients of all keys over all ranks, and brings each rank its part.
pub(super) fn push_scatter(scattered: &[Scattered; 2], ops: &mut Vec<Op>) {
    let mut push = |stream, act| ops.push(Op { stream, act });
    for (index, of) in scattered.iter().enumerate() {
        let Scattered { sum, held, ordered, mine, .. } = *of;
        if let Some(to) = held {
            push(COMPUTE, Act::Unspread { from: sum, to });
        }
        let (side, way) = (Side::Kv, Way::Deal);
        push(COMPUTE, Act::Reorder { from: held.unwrap_or(sum), to: ordered, side, way });
        push(COMPUTE, Act::Record(SUMMED[index]));
        push(COMMUNICATION, Act::Wait(SUMMED[index]));
        push(COMMUNICATION, Act::ReduceScatter { from: ordered, to: mine });
        push(COMMUNICATION, Act::Record(SCATTERED[index]));
    }
    for (of, arrived) in scattered.iter().zip(SCATTERED) {
        let Scattered { held, mine, to, .. } = *of;
        push(COMPUTE, Act::Wait(arrived));
        let rows = if held.is_some() { Extent::Held(Side::Kv) } else { Extent::LocalSlots(Side::Kv) };
        push(COMPUTE, Act::Copy { from: mine, to, rows });
    }
}

impl Plan<'_> {
    pub(super) fn forward_gathered(&self, gather: &GatherPlan, rank: usize, index: usize, to: &mut Vec<Op>) {
        match &gather.steps {
            Some(steps) => self.forward_step_gathered(gather, steps, (rank, index), to),
            None => gather.push_forward(to),
        }
    }

    pub(super) fn backward_gathered(&self, gather: &GatherPlan, rank: usize, index: usize, to: &mut Vec<Op>) {
        match &gather.steps {
            Some(steps) => self.backward_step_gathered(gather, steps, (rank, index), to),
            None => gather.push_backward(to),
        }
    }
}
