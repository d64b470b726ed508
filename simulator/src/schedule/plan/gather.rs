//! The plan of an all-gather. It has the same operations as [`super::super::all_gather`], which says why they are right.
//!
//! A *residue* is every n-th of the gathered keys, for n ranks. Stripes of one row have a launch of the backward for each,
//! which are parts of the keys.

use seamproof_oracle::{Format, Side};

use super::act::{Act, Extent, Launch, Launches, Mark, Op, Own};
use super::{Way, own};
use crate::schedule::FillValue;
use crate::schedule::build::{Builder, Local};

const COMPUTE: u8 = 0;
const COMMUNICATION: u8 = 2;

/// Buffers of a rank.
#[derive(Debug)]
pub(super) struct GatherPlan {
    q: Own,
    /// K and V: the rank's own, all in rank order, and all in sequence order.
    kv: [[Own; 3]; 2],
    /// K and V as launches read them: spread where keys are shared.
    read: [Own; 2],
    sink: Option<Own>,
    /// Out, LSE and max_logit.
    results: [Own; 3],
    backward: Option<BackwardPlan>,
    launches: GatherLaunches,
}

/// Launches of the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GatherLaunches {
    /// One for each part of the queries.
    Parts(u16),
    /// One for each residue of the keys, of which there are as many. All have all queries, which lie apart.
    Residues(u16),
}

/// Buffers of the backward.
#[derive(Debug)]
struct BackwardPlan {
    dout: Own,
    dq: Own,
    /// dq of a launch and of all launches, where a query is in more than one.
    sums: Option<[Own; 2]>,
    dsink: Option<Own>,
    /// dk and dv: of a launch, of all launches, the same in rank order, the rank's part over all ranks, and the result.
    dkv: [[Own; 5]; 2],
    /// dk and dv of all launches in the rows that sequences hold, where keys are shared.
    held: Option<[Own; 2]>,
}

/// Numbers of marks.
const ARRIVED: [Mark; 2] = [Mark(0), Mark(1)];
const ATTENDED: Mark = Mark(2);
const SUMMED: [Mark; 2] = [Mark(3), Mark(4)];
const SCATTERED: [Mark; 2] = [Mark(5), Mark(6)];
pub(super) const MARKS: usize = 7;

impl GatherPlan {
    /// Makes the buffers in the order in which the builder makes them. `rows` are those of all ranks together.
    pub(super) fn new(
        builder: &mut Builder,
        local: &Local,
        rows: usize,
        (launches, shares): (GatherLaunches, bool),
    ) -> GatherPlan {
        let Local { q, k, v, sink, out, lse, max_logit, .. } = *local;
        let named = [(k, "k"), (v, "v")];
        let full = |builder: &mut Builder, of, name: String, format: Option<Format>| {
            let model = builder.describe(of);
            let (shape, own_format) = ([rows, model.heads, model.dim], model.format);
            builder.scratch(0, &name, shape, format.unwrap_or(own_format))
        };
        let ranked = named.map(|(of, name)| full(builder, of, format!("{name} in rank order"), None));
        let gathered = named.map(|(of, name)| {
            let gathered = full(builder, of, format!("{name} gathered"), None);
            let spread =
                shares.then(|| full(builder, of, format!("{name} gathered of every sequence"), None));
            [gathered, spread.unwrap_or(gathered)]
        });
        let (read, gathered) = (gathered.map(|[_, read]| own(read)), gathered.map(|[gathered, _]| gathered));
        let kv = std::array::from_fn(|index| [[k, v][index], ranked[index], gathered[index]].map(own));
        let backward = local.backward.map(|to| {
            let f32 = Some(Format::F32);
            let sums = named.map(|(of, name)| {
                let step = full(builder, of, format!("d{name} of a launch"), f32);
                [step, full(builder, of, format!("d{name} of all launches"), f32)]
            });
            let queries = matches!(launches, GatherLaunches::Residues(_)).then(|| {
                ["dq of a launch", "dq of all launches"]
                    .map(|name| own(builder.like(to.dq, name, Format::F32)))
            });
            let mut held = Vec::new();
            let scattered = [(sums[0][1], to.dk), (sums[1][1], to.dv)].map(|(sum, to)| {
                if shares {
                    let name = format!("{}, summed", builder.describe(sum).name);
                    held.push(own(builder.like(sum, &name, Format::F32)));
                }
                let ordered = builder.like(sum, "gradient in rank order", Format::F32);
                [ordered, builder.like(to, "gradient of all ranks", Format::F32), to]
            });
            let dkv = std::array::from_fn(|index| {
                let ([step, sum], [ordered, mine, to]) = (sums[index], scattered[index]);
                [step, sum, ordered, mine, to].map(own)
            });
            let (dout, dq, dsink) = (own(to.dout), own(to.dq), to.dsink.map(own));
            let held = <[Own; 2]>::try_from(held).ok();
            BackwardPlan { dout, dq, sums: queries, dsink, dkv, held }
        });
        let results = [out, lse, max_logit].map(own);
        GatherPlan { q: own(q), kv, read, sink: sink.map(own), results, backward, launches }
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

    pub(super) fn push_forward(&self, to: &mut Vec<Op>) {
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
        let [k, v] = self.read;
        let max_logit = self.results[2];
        let value = FillValue::NegInfinity;
        push(COMPUTE, Act::Fill { to: max_logit, rows: Extent::Values, value });
        let (inputs, sink, results) = ([self.q, k, v], self.sink, self.results);
        push(COMPUTE, Act::AttendWhole { table: None, inputs, sink, results });
        push(COMPUTE, Act::Record(ATTENDED));
        push(COMMUNICATION, Act::Wait(ATTENDED));
        push(COMMUNICATION, Act::AllReduce { buffer: max_logit });
    }

    pub(super) fn push_backward(&self, ops: &mut Vec<Op>) {
        let Some(BackwardPlan { dout, dq, sums, dsink, dkv, held }) = &self.backward else { return };
        let mut push = |stream, act| ops.push(Op { stream, act });
        let [out, lse, _] = self.results;
        if let Some((sink, dsink)) = self.sink.zip(*dsink) {
            push(COMPUTE, Act::SinkGradient { inputs: [sink, *dout, out, lse], dsink });
        }
        for [_, to, ..] in *dkv {
            push(COMPUTE, Act::Fill { to, rows: Extent::All, value: FillValue::Zero });
        }
        let [k, v] = self.read;
        let inputs = [self.q, k, v, *dout, out, lse];
        if let Some([of_launch, sum]) = *sums {
            push(COMPUTE, Act::Fill { to: sum, rows: Extent::Slots(Side::Q), value: FillValue::Zero });
            let launches = Launches { owner: 0, queries: [0, 1], keys: [0, self.residues()] };
            let (results, sums) = ([of_launch, dkv[0][0], dkv[1][0]], [sum, dkv[0][1], dkv[1][1]]);
            push(COMPUTE, Act::AttendBackwardEach { launches, table: None, inputs, results, sums });
            push(COMPUTE, Act::Copy { from: sum, to: *dq, rows: Extent::Slots(Side::Q) });
        }
        for part in 0..self.parts() {
            let launch = Launch { owner: 0, queries: [part, part + 1], keys: 0 };
            let results = [*dq, dkv[0][0], dkv[1][0]];
            push(COMPUTE, Act::AttendGathered { launch, inputs, results });
            for [from, to, ..] in *dkv {
                push(COMPUTE, Act::Accumulate { launch, side: Side::Kv, from, to });
            }
        }
        for (index, ([_, sum, ordered, mine, _], summed)) in dkv.iter().zip(SUMMED).enumerate() {
            let (side, way, scattered) = (Side::Kv, Way::Deal, SCATTERED[index]);
            let of_held = held.map(|held| held[index]);
            if let Some(to) = of_held {
                push(COMPUTE, Act::Unspread { from: *sum, to });
            }
            push(COMPUTE, Act::Reorder { from: of_held.unwrap_or(*sum), to: *ordered, side, way });
            push(COMPUTE, Act::Record(summed));
            push(COMMUNICATION, Act::Wait(summed));
            push(COMMUNICATION, Act::ReduceScatter { from: *ordered, to: *mine });
            push(COMMUNICATION, Act::Record(scattered));
        }
        for ([.., mine, to], scattered) in dkv.iter().zip(SCATTERED) {
            push(COMPUTE, Act::Wait(scattered));
            let rows = if held.is_some() { Extent::Held(Side::Kv) } else { Extent::LocalSlots(Side::Kv) };
            push(COMPUTE, Act::Copy { from: *mine, to: *to, rows });
        }
    }
}
