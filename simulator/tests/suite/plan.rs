//! Plans: unrolled they are what their builders make, and their checker agrees with the one of schedules.

use std::collections::BTreeSet;

use crate::common::{Draws, problem, shared, side_by_side};

use rayon::prelude::*;
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Format, Heads, Mask, Problem, ProblemFields, Run, Sequence,
    SharedKeys, Sharing, Side, Sink, Softmax,
};
use seamproof_simulator::check::plan::{PlanFault, Unproved, is_plan, prove_plan};
use seamproof_simulator::check::{CheckError, check};
use seamproof_simulator::faults::catalogue;
use seamproof_simulator::schedule::plan::{
    Act, Extent, Launch, Loan, Op, Own, Plan, PlanError, Programs, Way,
};
use seamproof_simulator::schedule::{FillValue, Layer, MergeOrder, Schedule, build_with};

/// Every balance, stripes of some widths.
const BALANCES: [Balance; 5] = [
    Balance::Contiguous,
    Balance::DualChunk,
    Balance::Striped { stripe: 1 },
    Balance::Striped { stripe: 2 },
    Balance::Striped { stripe: 3 },
];

/// Returns the algorithms over `cp` ranks of which some have plans.
fn algorithms(cp: usize) -> Vec<Algorithm> {
    let divisors = (1..=cp).filter(|members| cp.is_multiple_of(*members));
    let hierarchical = divisors.map(|all_to_all| Algorithm::Hierarchical { all_to_all });
    [Algorithm::Ring, Algorithm::AllToAll, Algorithm::AllGather].into_iter().chain(hierarchical).collect()
}

/// Calls `each` for drawn problems, most of which have plans, over up to `most` ranks.
fn drawn(draws: &mut Draws, most: usize, times: usize, mut each: impl FnMut(&Problem, MergeOrder)) {
    for cp in 1..=most {
        for algorithm in algorithms(cp) {
            for balance in BALANCES {
                for order in MergeOrder::ALL {
                    for _ in 0..times {
                        let packed = problem(draws, algorithm, balance, cp);
                        let beside = side_by_side(draws, &packed);
                        for problem in [packed, beside] {
                            let problem = if draws.below(3) == 0 { in_codes(problem) } else { problem };
                            each(&problem, order);
                            in_region(&problem, draws).iter().for_each(|inside| each(inside, order));
                            shared(&problem, draws).iter().for_each(|shared| each(shared, order));
                        }
                    }
                }
            }
        }
    }
}

/// Returns a problem with results in FP8.
fn in_codes(problem: Problem) -> Problem {
    let mut fields = ProblemFields::from(problem);
    (fields.precision.out, fields.precision.gradients) = (Format::E4m3.into(), Format::E5m2.into());
    Problem::new(fields).unwrap()
}

/// Returns a problem, perhaps with keys that sequences share, inside regions. KV heads are split, or one is replicated.
fn in_region(problem: &Problem, draws: &mut Draws) -> Option<Problem> {
    let ranks = 2 + draws.below(2);
    let mut fields = ProblemFields::from(shared(problem, draws).unwrap_or_else(|| problem.clone()));
    let Heads { q, kv } = fields.heads;
    fields.heads = Heads { q: q * ranks, kv: if draws.below(2) == 0 { kv * ranks } else { 1 } };
    fields.parallel.region = ranks;
    Problem::new(fields).ok().filter(|_| problem.parallel.size() < 5)
}

#[test]
fn a_plan_that_is_unrolled_is_what_its_builder_makes() {
    let (mut count, mut in_steps) = (0, 0);
    drawn(&mut Draws(3), 6, 2, |problem, order| {
        let built = build_with(problem, order);
        let plan = match Plan::new(problem, order) {
            Err(PlanError::Build(error)) => return assert_eq!(built, Err(error)),
            Err(PlanError::None(_)) => return,
            other => other.unwrap_or_else(|error| panic!("{error}: {problem:?}")),
        };
        let built = built.unwrap();
        is_plan(&plan, &plan, &built).unwrap_or_else(|error| panic!("{error}: {problem:?}"));
        let proof = prove_plan(&plan, &plan).unwrap_or_else(|error| panic!("{error}: {problem:?}"));
        let unrolled = check(problem, &plan.unroll(&plan)).unwrap_or_else(|errors| panic!("{errors:?}"));
        assert_eq!((proof.operations, proof.pairs), (unrolled.operations, unrolled.pairs));
        count += 1;
        in_steps += usize::from(plan.has_steps());
    });
    assert!(count > 2000 && in_steps > 100, "{count}, {in_steps} of them gather in steps");
}

/// Programs of a plan of which a section is edited, on one rank or on all.
struct Edited<'p> {
    plan: &'p Plan<'p>,
    rank: Option<usize>,
    index: usize,
    edit: Edit,
}

impl Programs for Edited<'_> {
    fn sections(&self) -> usize {
        self.plan.sections()
    }

    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
        self.plan.section(rank, index, to);
        if index == self.index && self.rank.is_none_or(|edited| edited == rank) {
            (self.edit)(to);
        }
    }
}

/// An edit of a section, which leaves a section alone if it has no meaning there.
type Edit = Box<dyn Fn(&mut Vec<Op>) + Send + Sync>;

/// Returns edits of each operation of a section: it is lost, doubled, exchanged with the next one or on another stream,
/// or has another operand.
fn edits(plan: &Plan<'_>, ops: &[Op]) -> Vec<Edit> {
    let mut all: Vec<Edit> = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        all.push(Box::new(move |ops| drop(ops.splice(index.min(ops.len())..(index + 1).min(ops.len()), []))));
        all.push(Box::new(move |ops| {
            ops.extend_from_within(index.min(ops.len())..(index + 1).min(ops.len()));
        }));
        all.push(Box::new(move |ops| {
            if index + 1 < ops.len() {
                ops.swap(index, index + 1);
            }
        }));
        let streams = (0..=3).map(|stream| -> Edit {
            Box::new(move |ops| ops.iter_mut().skip(index).take(1).for_each(|op| op.stream = stream))
        });
        all.extend(streams);
        let others = others(plan, &op.act).into_iter().map(|edit| -> Edit {
            Box::new(move |ops| ops.iter_mut().skip(index).take(1).for_each(|op| edit(&mut op.act)))
        });
        all.extend(others);
    }
    all
}

/// An edit of an operation.
type ActEdit = Box<dyn Fn(&mut Act) + Send + Sync>;

/// Returns edits that give an operation like this one another operand.
fn others(plan: &Plan<'_>, act: &Act) -> Vec<ActEdit> {
    let (mut all, places, ranks, events): (Vec<ActEdit>, _, _, _) =
        (Vec::new(), plan.places() as u32, plan.ranks() as u32, plan.events() as u32);
    for number in 0..owns(&mut { *act }).len() {
        for own in 0..=plan.buffers().len() as u16 {
            all.push(Box::new(move |act| {
                owns(act).into_iter().skip(number).take(1).for_each(|of| *of = Own(own));
            }));
        }
    }
    for by in [1, 2, places - 1] {
        all.push(Box::new(move |act| {
            if let Some(owner) = owner(act) {
                *owner = (*owner + by) % places;
            }
        }));
        for (ahead, behind) in [(by, 0), (0, by), (by, ranks - by % ranks)] {
            all.push(Box::new(move |act| {
                if let Act::Exchange { to, from, .. } = act {
                    (*to, *from) = ((*to + ahead) % ranks, (*from + behind) % ranks);
                }
            }));
        }
        all.push(Box::new(move |act| {
            if let Act::Record(mark) | Act::Wait(mark) = act {
                mark.0 = (mark.0 + by) % events;
            }
        }));
    }
    for (queries, keys) in
        [([0, 1], 0), ([0, 1], 1), ([1, 2], 0), ([1, 2], 1), ([0, 2], 0), ([0, 2], 1), ([0, 1], 2)]
    {
        all.push(Box::new(move |act| {
            if let Some(launch) = launch(act) {
                (launch.queries, launch.keys) = (queries, keys);
            }
            if let Act::AttendBackwardEach { launches, .. } = act {
                (launches.queries, launches.keys) = (queries, [keys, launches.keys[1]]);
            }
        }));
        all.push(Box::new(move |act| {
            if let Act::AttendBackwardEach { launches, .. } = act {
                launches.keys = [keys, keys + queries[1]];
            }
        }));
    }
    for other in [Side::Q, Side::Kv] {
        all.push(Box::new(move |act| match act {
            Act::Accumulate { side, .. } | Act::Add { side, .. } => *side = other,
            Act::Reorder { side, .. } | Act::AllToAll { side, .. } => *side = other,
            Act::Linear { side, .. } | Act::Rotate { side, .. } => *side = other,
            _ => {}
        }));
        for extent in [
            Extent::Slots(other),
            Extent::LocalSlots(other),
            Extent::Held(other),
            Extent::Shard(other),
            Extent::All,
            Extent::Values,
        ] {
            all.push(Box::new(move |act| match act {
                Act::Fill { rows, .. } | Act::Copy { rows, .. } => *rows = extent,
                _ => {}
            }));
        }
    }
    for of in [FillValue::Zero, FillValue::NegInfinity] {
        all.push(Box::new(move |act| {
            if let Act::Fill { value, .. } = act {
                *value = of;
            }
        }));
    }
    for other in [Loan::Lent, Loan::Holes] {
        all.push(Box::new(move |act| {
            if let Act::Pack { loan, .. } | Act::Trade { loan, .. } = act {
                *loan = other;
            }
        }));
    }
    all.push(Box::new(|act| match act {
        Act::Rotate { inverse, .. } => *inverse = !*inverse,
        Act::Linear { layer, .. } => {
            *layer = if *layer == Layer::Row { Layer::Column } else { Layer::Row };
        }
        _ => {}
    }));
    for other in [Way::Collect, Way::Deal] {
        all.push(Box::new(move |act| {
            if let Act::Reorder { way, .. } | Act::AllToAll { way, .. } = act {
                *way = other;
            }
        }));
    }
    all
}

pub(crate) fn owner(act: &mut Act) -> Option<&mut u32> {
    match act {
        Act::MakeSegments { owner, .. } => Some(owner),
        Act::AttendBackwardEach { launches, .. } => Some(&mut launches.owner),
        _ => launch(act).map(|launch| &mut launch.owner),
    }
}

fn launch(act: &mut Act) -> Option<&mut Launch> {
    match act {
        Act::Attend { launch, .. }
        | Act::AttendStep { launch, .. }
        | Act::CopyValid { launch, .. }
        | Act::AttendBackward { launch, .. }
        | Act::AttendGathered { launch, .. } => Some(launch),
        Act::Merge { launch, .. } | Act::Accumulate { launch, .. } => Some(launch),
        _ => None,
    }
}

/// Returns every buffer that an operation names.
pub(crate) fn owns(act: &mut Act) -> Vec<&mut Own> {
    match act {
        Act::Attend { table, inputs, results, .. } => table.iter_mut().chain(inputs).chain(results).collect(),
        Act::AttendWhole { table, inputs, sink, results }
        | Act::AttendStep { table, inputs, sink, results, .. } => {
            table.iter_mut().chain(inputs).chain(sink).chain(results).collect()
        }
        Act::AttendBackward { table, inputs, results, .. } => {
            table.iter_mut().chain(inputs).chain(results).collect()
        }
        Act::AttendBackwardEach { table, inputs, results, sums, .. } => {
            table.iter_mut().chain(inputs).chain(results).chain(sums).collect()
        }
        Act::AttendGathered { inputs, results, .. } => inputs.iter_mut().chain(results).collect(),
        Act::AttendBackwardWhole { table, inputs, sink, results } => {
            table.iter_mut().chain(inputs).chain(sink.iter_mut().flatten()).chain(results).collect()
        }
        Act::CopyValid { table, from, to, .. } => table.iter_mut().chain([from, to]).collect(),
        Act::Merge { step, running, .. } => step.iter_mut().chain(running).collect(),
        Act::Pack { from, to, .. }
        | Act::Trade { from, to, .. }
        | Act::Unpack { from, to }
        | Act::Repay { from, to }
        | Act::Spread { from, to }
        | Act::GatherHidden { from, to }
        | Act::ScatterHidden { from, to }
        | Act::Linear { from, to, .. }
        | Act::Unspread { from, to }
        | Act::Accumulate { from, to, .. }
        | Act::Add { from, to, .. }
        | Act::Copy { from, to, .. }
        | Act::Reorder { from, to, .. }
        | Act::GatherHeads { from, to }
        | Act::AllGather { from, to }
        | Act::ReduceScatter { from, to }
        | Act::AllToAll { from, to, .. } => vec![from, to],
        Act::ApplySink { sink, results } => sink.iter_mut().chain(results).collect(),
        Act::SinkGradient { inputs, dsink } => inputs.iter_mut().chain([dsink]).collect(),
        Act::Fill { to, .. } | Act::MakeSegments { to, .. } => vec![to],
        Act::Exchange { sent, received, .. } => sent.iter_mut().chain(received).collect(),
        Act::AllReduce { buffer } | Act::Rotate { buffer, .. } => vec![buffer],
        Act::Record(_) | Act::Wait(_) => Vec::new(),
    }
}

/// Returns a problem of two sequences of unlike lengths, also of queries and keys.
pub(crate) fn packed(algorithm: Algorithm, balance: Balance, (ranks, sink): (usize, Sink)) -> Problem {
    let unit = span_multiple(balance, ranks);
    let mut first = [0; 2];
    let mut run = |side: usize, len: usize| {
        let run = Run::packed(first[side], len, len.next_multiple_of(unit));
        first[side] += run.span;
        run
    };
    let lengths = [(2 * unit - 1, 3 * unit - 1), (unit, unit)].into_iter().enumerate();
    let sequences = lengths.map(|(id, (q, kv))| Sequence { id: id as u32, q: run(0, q), kv: run(1, kv) });
    let sequences = sequences.collect();
    Problem::new(ProblemFields {
        heads: Heads { q: 4, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax { sink, ..Softmax::scaled(0.5) },
        parallel: ContextParallel::over(ranks, algorithm, balance),
        ..ProblemFields::of(sequences, 2)
    })
    .unwrap()
}

/// A pack on which faults are planted.
pub(crate) struct Pack {
    algorithm: Algorithm,
    balance: Balance,
    ranks: usize,
    sink: Sink,
    pub(crate) order: MergeOrder,
    /// Whether the second sequence borrows keys of the first one.
    shares: bool,
    /// Number of ranks of a sequence-parallel region around each rank.
    region: usize,
    /// Whether out is in FP8.
    codes: bool,
}

impl Pack {
    pub(crate) fn problem(&self) -> Problem {
        let problem = packed(self.algorithm, self.balance, (self.ranks, self.sink));
        let keys = problem.sequences[1].kv.len - 1;
        let sharing = Sharing(vec![SharedKeys { sequence: 1, with: 0, keys }]);
        let sharing = if self.shares { sharing } else { Sharing::default() };
        let mut fields = ProblemFields { sharing, ..problem.into() };
        fields.parallel.region = self.region;
        fields.precision.out = if self.codes { Format::E4m3.into() } else { fields.precision.out };
        Problem::new(fields).unwrap()
    }
}

/// Packs on which faults are planted.
pub(crate) const PACKS: [Pack; 34] = {
    use MergeOrder::{Deferred, Running};
    const fn pack(
        algorithm: Algorithm,
        balance: Balance,
        ranks: usize,
        sink: Sink,
        order: MergeOrder,
    ) -> Pack {
        Pack { algorithm, balance, ranks, sink, order, shares: false, region: 1, codes: false }
    }
    const fn shared(algorithm: Algorithm, balance: Balance, ranks: usize, order: MergeOrder) -> Pack {
        Pack { shares: true, ..pack(algorithm, balance, ranks, Sink::Learnable, order) }
    }
    const fn inside(pack: Pack, region: usize) -> Pack {
        Pack { region, ..pack }
    }
    const fn coded(pack: Pack) -> Pack {
        Pack { codes: true, ..pack }
    }
    const PAIRED: Algorithm = Algorithm::Hierarchical { all_to_all: 2 };
    const SINGLES: Balance = Balance::Striped { stripe: 1 };
    const DOUBLES: Balance = Balance::Striped { stripe: 2 };
    [
        pack(Algorithm::Ring, DOUBLES, 3, Sink::None, Running),
        pack(Algorithm::AllGather, Balance::DualChunk, 3, Sink::Learnable, Running),
        pack(Algorithm::AllToAll, Balance::DualChunk, 4, Sink::Learnable, Running),
        pack(Algorithm::Ring, Balance::DualChunk, 3, Sink::Learnable, Running),
        pack(Algorithm::Ring, Balance::Contiguous, 4, Sink::None, Running),
        pack(Algorithm::Ring, SINGLES, 2, Sink::OffByOne, Running),
        pack(PAIRED, Balance::DualChunk, 4, Sink::Learnable, Running),
        pack(Algorithm::Hierarchical { all_to_all: 4 }, Balance::Contiguous, 4, Sink::None, Running),
        pack(PAIRED, SINGLES, 4, Sink::None, Running),
        pack(Algorithm::AllGather, SINGLES, 3, Sink::Learnable, Running),
        pack(Algorithm::AllGather, DOUBLES, 3, Sink::None, Running),
        pack(Algorithm::Ring, Balance::DualChunk, 3, Sink::Learnable, Deferred),
        pack(Algorithm::Ring, DOUBLES, 3, Sink::OffByOne, Deferred),
        pack(Algorithm::Ring, Balance::Contiguous, 3, Sink::None, Deferred),
        pack(PAIRED, SINGLES, 4, Sink::None, Deferred),
        pack(Algorithm::AllToAll, Balance::Contiguous, 2, Sink::Learnable, Deferred),
        pack(Algorithm::AllGather, Balance::DualChunk, 3, Sink::Learnable, Deferred),
        pack(Algorithm::AllGather, SINGLES, 3, Sink::OffByOne, Deferred),
        pack(Algorithm::AllGather, DOUBLES, 2, Sink::None, Deferred),
        shared(Algorithm::Ring, Balance::DualChunk, 3, Running),
        shared(Algorithm::AllGather, Balance::DualChunk, 3, Running),
        shared(Algorithm::AllGather, SINGLES, 2, Running),
        shared(Algorithm::AllGather, Balance::DualChunk, 2, Deferred),
        shared(Algorithm::AllToAll, Balance::Contiguous, 2, Deferred),
        shared(PAIRED, SINGLES, 4, Running),
        inside(pack(Algorithm::Ring, Balance::DualChunk, 2, Sink::Learnable, Running), 2),
        inside(pack(Algorithm::Ring, Balance::Contiguous, 2, Sink::OffByOne, Deferred), 4),
        inside(pack(Algorithm::AllGather, DOUBLES, 2, Sink::None, Running), 2),
        inside(pack(Algorithm::AllGather, SINGLES, 2, Sink::Learnable, Deferred), 2),
        inside(pack(Algorithm::AllGather, Balance::Contiguous, 2, Sink::None, Deferred), 2),
        inside(pack(PAIRED, Balance::DualChunk, 4, Sink::Learnable, Running), 2),
        inside(shared(Algorithm::Ring, SINGLES, 2, Running), 2),
        coded(pack(Algorithm::Ring, Balance::DualChunk, 3, Sink::Learnable, Deferred)),
        coded(pack(PAIRED, Balance::Contiguous, 4, Sink::None, Deferred)),
    ]
};

/// Of how many edits one is tried. Operations have numbers of edits that are no multiples of it, so that all kinds are.
const TRIED: usize = 3;

#[test]
fn a_wrong_operation_on_one_rank_or_on_all_is_refused_as_its_schedule_is() {
    let [mut refused, mut held, mut stricter] = [0; 3];
    for pack in PACKS {
        let (problem, order) = (pack.problem(), pack.order);
        let plan = Plan::new(&problem, order).unwrap();
        let one = plan.ranks() / 2;
        let places = (0..plan.sections()).flat_map(|index| [Some(one), None].map(|rank| (rank, index)));
        for (rank, index) in places {
            let mut ops = Vec::new();
            plan.section(one, index, &mut ops);
            let first = (index + usize::from(rank.is_none())) % TRIED;
            let tried: Vec<Edit> = edits(&plan, &ops).into_iter().skip(first).step_by(TRIED).collect();
            let tried = tried.into_par_iter().filter_map(|edit| {
                let programs = Edited { plan: &plan, rank, index, edit };
                let mut edited = Vec::new();
                programs.section(one, index, &mut edited);
                if edited == ops { None } else { Some((verdicts(&plan, &programs)?, edited)) }
            });
            for ((is_proved, errors), edited) in tried.collect::<Vec<_>>() {
                match (is_proved, errors.is_empty()) {
                    (true, true) => held += 1,
                    (false, false) => refused += 1,
                    (false, true) => stricter += 1,
                    (true, false) => {
                        panic!(
                            "{rank:?}: section {index} is proved: {edited:#?} instead of {ops:#?}; {errors:?}; {problem:?}"
                        )
                    }
                }
            }
        }
    }
    assert!(refused > 20_000 && held > 1000, "{refused} refused, {held} held");
    assert!(stricter < held + refused / 10, "{stricter} refused of which the schedules hold");
}

/// Returns whether a plan with edited programs is proved, and why its schedule is not; `None` for what cannot be unrolled,
/// since it names what there is not.
fn verdicts(plan: &Plan<'_>, programs: &Edited<'_>) -> Option<(bool, Vec<CheckError>)> {
    let proved = prove_plan(plan, programs);
    if let Err(Unproved::Operation { fault: PlanFault::Shape(_) | PlanFault::Pieces(_), .. }) = proved {
        return None;
    }
    Some((proved.is_ok(), check(plan.problem(), &plan.unroll(programs)).err().unwrap_or_default()))
}

#[test]
fn a_planted_fault_is_no_plan_on_any_single_rank() {
    let mut refused = BTreeSet::new();
    for pack in PACKS {
        let (problem, order) = (pack.problem(), pack.order);
        let plan = Plan::new(&problem, order).unwrap();
        let right = build_with(&problem, order).unwrap();
        assert_eq!(is_plan(&plan, &plan, &right), Ok(()));
        for fault in catalogue() {
            let mut wrong = right.clone();
            if !fault.plant(&problem, &mut wrong) {
                continue;
            }
            for schedule in on_single_ranks(&right, &wrong) {
                assert!(is_plan(&plan, &plan, &schedule).is_err(), "{} is a plan", fault.id);
                if check(&problem, &schedule).is_err() {
                    refused.insert(fault.id);
                }
            }
        }
    }
    assert!(refused.len() > 60, "{} {refused:?}", refused.len());
}

/// Returns the right schedule with the program of each single rank of the wrong one. A wrong one that has more that is
/// wrong than programs is returned as it is.
fn on_single_ranks(right: &Schedule, wrong: &Schedule) -> Vec<Schedule> {
    if (Schedule { ranks: right.ranks.clone(), ..wrong.clone() }) != *right {
        return vec![wrong.clone()];
    }
    let on_one = |rank: usize| {
        let mut schedule = right.clone();
        schedule.ranks[rank] = wrong.ranks[rank].clone();
        schedule
    };
    (0..right.ranks.len()).map(on_one).filter(|schedule| schedule != right).collect()
}
