//! Plans: unrolled they are what their builders make, and their checker agrees with the one of schedules.

use std::collections::BTreeSet;

use crate::common::{Draws, problem, side_by_side};

use rayon::prelude::*;
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields, Run, Sequence, Side, Sink,
    Softmax,
};
use seamproof_simulator::check::check;
use seamproof_simulator::check::plan::{PlanFault, Unproved, is_plan, prove_plan};
use seamproof_simulator::faults::catalogue;
use seamproof_simulator::schedule::plan::{Act, Extent, Launch, Op, Own, Plan, PlanError, Programs, Way};
use seamproof_simulator::schedule::{FillValue, MergeOrder, Schedule, build_with};

/// Balances of which there are plans.
const BALANCES: [Balance; 3] = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }];

/// Returns the algorithms over `cp` ranks of which there are plans.
fn algorithms(cp: usize) -> Vec<Algorithm> {
    let divisors = (1..=cp).filter(|members| cp.is_multiple_of(*members));
    let hierarchical = divisors.map(|all_to_all| Algorithm::Hierarchical { all_to_all });
    [Algorithm::Ring, Algorithm::AllToAll, Algorithm::AllGather].into_iter().chain(hierarchical).collect()
}

/// Calls `each` for drawn problems of which there are plans, over up to `most` ranks.
fn drawn(draws: &mut Draws, most: usize, times: usize, mut each: impl FnMut(&Problem, MergeOrder)) {
    for cp in 1..=most {
        for algorithm in algorithms(cp) {
            for balance in BALANCES {
                for order in [MergeOrder::Running, MergeOrder::Difference] {
                    for _ in 0..times {
                        let packed = problem(draws, algorithm, balance, cp);
                        each(&packed, order);
                        each(&side_by_side(draws, &packed), order);
                    }
                }
            }
        }
    }
}

#[test]
fn a_plan_that_is_unrolled_is_what_its_builder_makes() {
    let mut count = 0;
    drawn(&mut Draws(3), 6, 4, |problem, order| {
        let built = build_with(problem, order);
        let plan = match Plan::new(problem, order) {
            Err(PlanError::Build(error)) => return assert_eq!(built, Err(error)),
            Err(PlanError::None(what)) if what.starts_with("an all-gather") => return,
            other => other.unwrap_or_else(|error| panic!("{error}: {problem:?}")),
        };
        let built = built.unwrap();
        is_plan(&plan, &plan, &built).unwrap_or_else(|error| panic!("{error}: {problem:?}"));
        let proof = prove_plan(&plan, &plan).unwrap_or_else(|error| panic!("{error}: {problem:?}"));
        let unrolled = check(problem, &plan.unroll(&plan)).unwrap_or_else(|errors| panic!("{errors:?}"));
        assert_eq!((proof.operations, proof.pairs), (unrolled.operations, unrolled.pairs));
        count += 1;
    });
    assert!(count > 400, "{count}");
}

/// Programs of a plan of which one rank's have an edited section.
struct Edited<'p> {
    plan: &'p Plan<'p>,
    rank: usize,
    index: usize,
    ops: Vec<Op>,
}

impl Programs for Edited<'_> {
    fn sections(&self) -> usize {
        self.plan.sections()
    }

    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
        match (rank, index) == (self.rank, self.index) {
            true => to.extend(&self.ops),
            false => self.plan.section(rank, index, to),
        }
    }
}

/// Returns every section that differs from one by one edit of one operation: it is lost, doubled, exchanged with the
/// next one or on another stream, or names another buffer, mark, rank, piece, side or extent of rows.
fn edits(plan: &Plan<'_>, ops: &[Op]) -> Vec<Vec<Op>> {
    let mut all = Vec::new();
    for index in 0..ops.len() {
        let mut edited = |edit: &dyn Fn(&mut Vec<Op>)| {
            let mut other = ops.to_vec();
            edit(&mut other);
            all.extend((other != ops).then_some(other));
        };
        edited(&|ops| {
            ops.remove(index);
        });
        edited(&|ops| ops.insert(index, ops[index]));
        edited(&|ops| {
            if index + 1 < ops.len() {
                ops.swap(index, index + 1);
            }
        });
        for stream in 0..=3 {
            edited(&|ops| ops[index].stream = stream);
        }
        for act in others(plan, &ops[index].act) {
            edited(&|ops| ops[index].act = act);
        }
    }
    all
}

/// Returns operations like one, each with one other operand.
fn others(plan: &Plan<'_>, act: &Act) -> Vec<Act> {
    let mut all = Vec::new();
    let mut edited = |edit: &dyn Fn(&mut Act)| {
        let mut other = *act;
        edit(&mut other);
        all.push(other);
    };
    for number in 0..owns(&mut { *act }).len() {
        for own in 0..=plan.buffers().len() as u16 {
            edited(&|act| *owns(act)[number] = Own(own));
        }
    }
    for by in [1, 2, plan.places() as u32 - 1] {
        edited(&|act| {
            if let Some(launch) = launch(act) {
                launch.owner = (launch.owner + by) % plan.places() as u32;
            }
        });
        edited(&|act| {
            if let Act::Exchange { to, .. } = act {
                *to = (*to + by) % plan.ranks() as u32;
            }
        });
        edited(&|act| {
            if let Act::Exchange { from, .. } = act {
                *from = (*from + by) % plan.ranks() as u32;
            }
        });
        edited(&|act| {
            if let Act::Record(mark) | Act::Wait(mark) = act {
                mark.0 = (mark.0 + by) % plan.events() as u32;
            }
        });
    }
    for (queries, keys) in [([0, 1], 0), ([0, 1], 1), ([1, 2], 0), ([1, 2], 1), ([0, 2], 0), ([0, 2], 1)] {
        edited(&|act| {
            if let Some(launch) = launch(act) {
                (launch.queries, launch.keys) = (queries, keys);
            }
        });
    }
    for other in [Side::Q, Side::Kv] {
        edited(&|act| match act {
            Act::Accumulate { side, .. } | Act::Add { side, .. } => *side = other,
            Act::Reorder { side, .. } | Act::AllToAll { side, .. } => *side = other,
            _ => {}
        });
        for extent in [Extent::Slots(other), Extent::LocalSlots(other), Extent::All, Extent::Values] {
            edited(&|act| match act {
                Act::Fill { rows, .. } | Act::Copy { rows, .. } => *rows = extent,
                _ => {}
            });
        }
    }
    for value in [FillValue::Zero, FillValue::NegInfinity] {
        edited(&|act| {
            if let Act::Fill { value: of, .. } = act {
                *of = value;
            }
        });
    }
    for other in [Way::Collect, Way::Deal] {
        edited(&|act| {
            if let Act::Reorder { way, .. } | Act::AllToAll { way, .. } = act {
                *way = other;
            }
        });
    }
    all
}

fn launch(act: &mut Act) -> Option<&mut Launch> {
    match act {
        Act::Attend { launch, .. }
        | Act::AttendBackward { launch, .. }
        | Act::AttendGathered { launch, .. } => Some(launch),
        Act::Merge { launch, .. } | Act::Accumulate { launch, .. } => Some(launch),
        _ => None,
    }
}

/// Returns every buffer that an operation names.
fn owns(act: &mut Act) -> Vec<&mut Own> {
    match act {
        Act::Attend { inputs, results, .. } => inputs.iter_mut().chain(results).collect(),
        Act::AttendWhole { inputs, sink, results } => inputs.iter_mut().chain(sink).chain(results).collect(),
        Act::AttendBackward { inputs, results, .. } | Act::AttendGathered { inputs, results, .. } => {
            inputs.iter_mut().chain(results).collect()
        }
        Act::AttendBackwardWhole { inputs, sink, results } => {
            inputs.iter_mut().chain(sink.iter_mut().flatten()).chain(results).collect()
        }
        Act::Merge { step, running, .. } => step.iter_mut().chain(running).collect(),
        Act::Accumulate { from, to, .. }
        | Act::Add { from, to, .. }
        | Act::Copy { from, to, .. }
        | Act::Reorder { from, to, .. }
        | Act::GatherHeads { from, to }
        | Act::AllGather { from, to }
        | Act::ReduceScatter { from, to }
        | Act::AllToAll { from, to, .. } => vec![from, to],
        Act::ApplySink { sink, results } => sink.iter_mut().chain(results).collect(),
        Act::SinkGradient { inputs, dsink } => inputs.iter_mut().chain([dsink]).collect(),
        Act::Fill { to, .. } => vec![to],
        Act::Exchange { sent, received, .. } => sent.iter_mut().chain(received).collect(),
        Act::AllReduce { buffer } => vec![buffer],
        Act::Record(_) | Act::Wait(_) => Vec::new(),
    }
}

/// Returns a problem of two sequences of unlike lengths.
fn packed(algorithm: Algorithm, balance: Balance, (ranks, sink): (usize, Sink)) -> Problem {
    let unit = span_multiple(balance, ranks);
    let lengths = [2 * unit - 1, unit];
    let mut first = 0;
    let sequences = lengths.into_iter().enumerate().map(|(id, len)| {
        let run = Run::packed(first, len, len.next_multiple_of(unit));
        first += run.span;
        Sequence { id: id as u32, q: run, kv: run }
    });
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

/// Packs on which faults are planted.
const PACKS: [(Algorithm, Balance, (usize, Sink)); 7] = [
    (Algorithm::AllGather, Balance::DualChunk, (3, Sink::Learnable)),
    (Algorithm::AllToAll, Balance::DualChunk, (4, Sink::Learnable)),
    (Algorithm::Ring, Balance::DualChunk, (3, Sink::Learnable)),
    (Algorithm::Ring, Balance::Contiguous, (4, Sink::None)),
    (Algorithm::Ring, Balance::Striped { stripe: 1 }, (2, Sink::OffByOne)),
    (Algorithm::Hierarchical { all_to_all: 2 }, Balance::DualChunk, (4, Sink::Learnable)),
    (Algorithm::Hierarchical { all_to_all: 4 }, Balance::Contiguous, (4, Sink::None)),
];

/// Of how many edits one is tried. Their number is no multiple of it, so that all kinds are.
const TRIED: usize = 3;

#[test]
fn one_wrong_operation_on_one_rank_is_refused_as_its_schedule_is() {
    let [mut refused, mut held, mut stricter] = [0; 3];
    for (algorithm, balance, of) in PACKS {
        let problem = packed(algorithm, balance, of);
        let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
        let rank = plan.ranks() / 2;
        for index in 0..plan.sections() {
            let mut ops = Vec::new();
            plan.section(rank, index, &mut ops);
            let tried = edits(&plan, &ops).into_par_iter().skip(index % TRIED).step_by(TRIED);
            let verdicts: Vec<_> = tried.filter_map(|ops| verdicts(&plan, (rank, index), ops)).collect();
            for both in verdicts {
                match both {
                    (true, true) => held += 1,
                    (false, false) => refused += 1,
                    (false, true) => stricter += 1,
                    (true, false) => panic!("a wrong section {index} is proved: {problem:?}"),
                }
            }
        }
    }
    assert!(refused > 4000 && held > 150, "{refused} refused, {held} held");
    assert!(stricter < held + refused / 10, "{stricter} refused of which the schedules hold");
}

/// Returns whether a plan with an edited section is proved, and whether its schedule is; `None` for what cannot be
/// unrolled, since it names what there is not.
fn verdicts(plan: &Plan<'_>, (rank, index): (usize, usize), ops: Vec<Op>) -> Option<(bool, bool)> {
    let programs = Edited { plan, rank, index, ops };
    let proved = prove_plan(plan, &programs);
    if let Err(Unproved::Operation { fault: PlanFault::Shape(_) | PlanFault::Pieces(_), .. }) = proved {
        return None;
    }
    Some((proved.is_ok(), check(plan.problem(), &plan.unroll(&programs)).is_ok()))
}

#[test]
fn a_planted_fault_is_no_plan_on_any_single_rank() {
    let mut refused = BTreeSet::new();
    for (algorithm, balance, of) in PACKS {
        let problem = packed(algorithm, balance, of);
        let plan = Plan::new(&problem, MergeOrder::Running).unwrap();
        let right = build_with(&problem, MergeOrder::Running).unwrap();
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
