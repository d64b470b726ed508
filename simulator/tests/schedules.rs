//! Every schedule, run in f64, gives the exact answer: the logic of a context-parallel algorithm, without rounding.

mod common;
mod symbolic;

use common::{Draws, problem};
use ndarray::{Array1, Array3, Axis};
use seamproof_oracle::{
    Algorithm, Balance, Heads, Inputs, Pass, Problem, ProblemFields, Run, Saved, Sequence, TensorName, exact,
};
use seamproof_simulator::device::Cpu;
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::executor::{Phase, execute, load};
use seamproof_simulator::schedule::{
    Axes, BuildError, MergeOrder, Operation, Schedule, Work, build, build_with,
};

const TOLERANCE: f64 = 1e-10;

/// Multiples of 2^-6; every row that is not real holds NaN.
fn inputs(problem: &Problem, draws: &mut Draws) -> Inputs {
    let mut tensor = |shape: [usize; 3], side: fn(&Sequence) -> Run| {
        let mut array = Array3::from_elem(shape, f32::NAN);
        for row in problem.sequences.iter().flat_map(|sequence| side(sequence).real_rows()) {
            let mut rows = array.index_axis_mut(Axis(0), row);
            rows.mapv_inplace(|_| (draws.below(257) as f32 - 128.0) / 64.0);
        }
        array
    };
    let (q, k) = (tensor(problem.q_shape(), |s| s.q), tensor(problem.k_shape(), |s| s.kv));
    let (v, dout) = (tensor(problem.v_shape(), |s| s.kv), tensor(problem.out_shape(), |s| s.q));
    let sink = Array1::from_shape_fn(problem.learnable_sinks(), |head| head as f32 / 2.0 - 0.5);
    Inputs { q, k, v, dout, sink }
}

/// Runs the schedule in f64, in an order drawn from `draws`, and compares every placed row with the exact answer.
fn hold(problem: &Problem, schedule: &Schedule, draws: &mut Draws) {
    let inputs = inputs(problem, draws);
    let forward = exact::forward(problem, &inputs);
    let gradients = exact::backward(problem, &inputs, &Saved::from(&forward));
    let device =
        Cpu::<f64>::new(Tiles { q: 2, kv: 3 }, problem.precision.p.format, problem.precision.ds.format);
    let mut buffers = load::<f64>(schedule, problem, &inputs, f32::NAN);
    let counts = execute(schedule, Phase::Both, &device, &mut buffers, |ready| draws.below(ready))
        .unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_eq!(counts.host_reads, 0);
    assert_eq!(buffers.damage(), []);

    let mut owned = 0;
    let mut dsink = Array1::<f64>::zeros(problem.learnable_sinks());
    for placement in &schedule.placements {
        let check = |got: f64, right: f64, row: usize, head: usize| {
            let close = got == right || (got - right).abs() <= TOLERANCE * (1.0 + right.abs());
            let tensor = placement.tensor;
            assert!(close, "{tensor} row {row} head {head}: {got} against {right}\n{problem:?}");
        };
        let exact_rows = match placement.tensor {
            TensorName::Out => &forward.out,
            TensorName::Dq => &gradients.dq,
            TensorName::Dk => &gradients.dk,
            TensorName::Dv => &gradients.dv,
            _ => &inputs.q.mapv(f64::from),
        };
        for head in 0..placement.heads.len() {
            let of_problem = placement.heads.start + head;
            match placement.tensor {
                TensorName::MaxLogit => {
                    check(buffers.lane(placement.buffer, 0, head)[0], forward.max_logit[of_problem], 0, head);
                }
                TensorName::Dsink => dsink[of_problem] += buffers.lane(placement.buffer, 0, head)[0],
                _ => {}
            }
            for placed in &placement.rows {
                let sequence = problem.sequences[placed.sequence];
                let key_side = matches!(
                    placement.tensor,
                    TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv
                );
                let run = if key_side { sequence.kv } else { sequence.q };
                for i in 0..placed.local.span {
                    let position = placed.piece.start + i * placed.piece.step;
                    let (real, row) = (i < placed.local.len, run.row(position));
                    let lanes = buffers.lane(placement.buffer, placed.local.row(i), head);
                    match placement.tensor {
                        TensorName::Lse => {
                            let right = if real { forward.lse[[of_problem, row]] } else { f64::NEG_INFINITY };
                            check(lanes[0], right, row, head);
                        }
                        TensorName::Out | TensorName::Dq | TensorName::Dk | TensorName::Dv => {
                            for (lane, &got) in lanes.iter().enumerate() {
                                let right = if real { exact_rows[[row, of_problem, lane]] } else { 0.0 };
                                check(got, right, row, head);
                            }
                        }
                        _ => {}
                    }
                    owned += usize::from(placement.tensor == TensorName::Out && real);
                }
            }
        }
    }
    assert_eq!(owned, problem.tokens() * problem.heads.q, "each real row has one owner for each head");
    for (head, (got, right)) in dsink.iter().zip(&gradients.dsink).enumerate() {
        let held = problem.pass == Pass::Forward || (got - right).abs() <= TOLERANCE * (1.0 + right.abs());
        assert!(held, "dsink of head {head}: {got} against {right}\n{problem:?}");
    }
    unowned_rows_are_untouched(schedule, &buffers);
}

fn unowned_rows_are_untouched(schedule: &Schedule, buffers: &seamproof_simulator::device::Buffers<f64>) {
    use seamproof_simulator::{Real, schedule::Role};
    for placement in &schedule.placements {
        let buffer = &schedule.buffers[placement.buffer.0];
        if !matches!(buffer.role, Role::Output(_)) || buffer.axes == Axes::Heads {
            continue;
        }
        let mut owned = vec![false; buffer.rows];
        for placed in &placement.rows {
            (0..placed.local.span).for_each(|i| owned[placed.local.row(i)] = true);
        }
        for row in (0..buffer.rows).filter(|&row| !owned[row]) {
            for head in 0..buffer.heads {
                let lanes = buffers.lane(placement.buffer, row, head);
                let untouched = lanes.iter().all(|value| value.bits() == f64::UNWRITTEN.bits());
                assert!(untouched, "{} row {row}, which no sequence owns, was written", buffer.name);
            }
        }
    }
}

fn every_balance(
    algorithm: impl Fn(usize) -> Option<Algorithm>,
    balances: &[Balance],
    cp_max: usize,
    cases: usize,
) {
    let mut draws = Draws(1);
    for cp in 1..=cp_max {
        let Some(algorithm) = algorithm(cp) else { continue };
        for &balance in balances {
            for _ in 0..cases {
                let problem = problem(&mut draws, algorithm, balance, cp);
                for &order in MergeOrder::of(algorithm) {
                    let schedule =
                        build_with(&problem, order).unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
                    symbolic::prove(&problem, &schedule)
                        .unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
                    hold(&problem, &schedule, &mut draws);
                }
            }
        }
    }
}

const DUAL: Balance = Balance::DualChunk;
const STRIPES: Balance = Balance::Striped { stripe: 1 };

#[test]
fn single_is_exact() {
    every_balance(|cp| (cp == 1).then_some(Algorithm::Single), &[Balance::Contiguous], 1, 300);
}

const ALL: [Balance; 5] =
    [Balance::Contiguous, DUAL, STRIPES, Balance::Striped { stripe: 2 }, Balance::Striped { stripe: 3 }];

#[test]
fn all_gather_is_exact() {
    every_balance(|_| Some(Algorithm::AllGather), &ALL, 5, 60);
}

#[test]
fn all_to_all_is_exact() {
    every_balance(|_| Some(Algorithm::AllToAll), &ALL, 5, 60);
}

#[test]
fn the_ring_is_exact() {
    every_balance(|_| Some(Algorithm::Ring), &[Balance::Contiguous, DUAL, STRIPES], 6, 60);
}

#[test]
fn hierarchical_is_exact() {
    for members in 1..=4 {
        let algorithm =
            |cp: usize| cp.is_multiple_of(members).then_some(Algorithm::Hierarchical { all_to_all: members });
        every_balance(algorithm, &[Balance::Contiguous, DUAL], 8, 15);
    }
}

/// Edits of operations that make a schedule wrong; each says whether it changed anything.
type Edit = fn(&mut Vec<Operation>) -> bool;

fn each_work(operations: &mut [Operation], mut edit: impl FnMut(&mut Work) -> bool) -> bool {
    operations.iter_mut().any(|operation| edit(&mut operation.work))
}

fn drop_first(operations: &mut Vec<Operation>, what: impl Fn(&Work) -> bool) -> bool {
    let found = operations.iter().position(|operation| what(&operation.work));
    found.map(|index| operations.remove(index)).is_some()
}

/// Edits, and whether they may touch rows alone that nobody attends to and so change nothing.
const EDITS: [(&str, bool, Edit); 8] = [
    ("a wait dropped", false, |all| drop_first(all, |work| matches!(work, Work::WaitEvent(_)))),
    ("a copy dropped", true, |all| drop_first(all, |work| matches!(work, Work::Copy { .. }))),
    ("a launch dropped", false, |all| drop_first(all, |work| matches!(work, Work::AttendBackward(_)))),
    ("a maximum not filled", false, |all| drop_first(all, |work| matches!(work, Work::Fill { .. }))),
    ("a band moved", false, |all| {
        each_work(all, |work| match work {
            Work::Attend(attend) => attend.call.segments.iter_mut().any(|segment| {
                let moved = segment.q.len > 0 && segment.hi.is_some_and(|hi| hi >= 0 && segment.keys() > 0);
                segment.hi = segment.hi.map(|hi| hi - i64::from(moved) * 1000);
                moved
            }),
            _ => false,
        })
    }),
    ("rows copied elsewhere", true, |all| {
        each_work(all, |work| match work {
            Work::Copy { rows, .. }
                if rows.len() > 1 && rows[0].1.len == rows[1].1.len && rows[0].1.len > 0 =>
            {
                let first = rows[0].1;
                (rows[0].1, rows[1].1) = (rows[1].1, first);
                true
            }
            _ => false,
        })
    }),
    ("members' regions exchanged", true, |all| {
        each_work(all, |work| match work {
            Work::AllGather { to: regions, .. } | Work::AllToAll { recv: regions, .. } => {
                regions.swap(0, 1);
                true
            }
            _ => false,
        })
    }),
    ("a head left out of the maximum", false, |all| {
        each_work(all, |work| match work {
            Work::AllReduce { region, .. } => {
                region.heads.end -= 1;
                true
            }
            _ => false,
        })
    }),
];

#[test]
fn wrong_schedules_are_rejected() {
    let mut draws = Draws(5);
    for (name, may_be_harmless, edit) in EDITS {
        let mut found = 0;
        for algorithm in [Algorithm::AllGather, Algorithm::AllToAll] {
            let (mut edited, mut rejected) = (0, 0);
            for _ in 0..40 {
                let problem = problem(&mut draws, algorithm, DUAL, 2);
                if problem.pairs() == 0 {
                    continue;
                }
                let mut schedule = build(&problem).unwrap();
                if edit(&mut schedule.ranks[1].operations) {
                    edited += 1;
                    rejected += usize::from(symbolic::prove(&problem, &schedule).is_err());
                }
            }
            assert!(rejected == edited || may_be_harmless, "{algorithm:?}, {name}: {rejected} of {edited}");
            found += rejected;
        }
        assert!(found > 10, "{name}: {found}");
    }
}

#[test]
fn what_cannot_be_dealt_is_refused() {
    let heads = |q, kv, algorithm, balance, cp| {
        let mut fields = ProblemFields::from(problem(&mut Draws(1), Algorithm::AllGather, balance, cp));
        fields.heads = Heads { q, kv };
        fields.parallel.algorithm = algorithm;
        build(&Problem::new(fields).unwrap()).map(|_| ())
    };
    let (whole, groups) = (Algorithm::AllToAll, Algorithm::Hierarchical { all_to_all: 2 });
    assert_eq!(heads(6, 2, whole, DUAL, 4), Err(BuildError::QueryHeads { heads: 6, ranks: 4 }));
    assert_eq!(heads(12, 3, whole, DUAL, 4), Err(BuildError::KvHeads { heads: 3, ranks: 4 }));
    assert_eq!(heads(12, 6, whole, DUAL, 4), Err(BuildError::KvHeads { heads: 6, ranks: 4 }));
    assert_eq!(heads(4, 1, whole, DUAL, 4), Ok(()));
    assert_eq!(heads(4, 2, whole, STRIPES, 4), Ok(()));
    assert_eq!(heads(3, 1, groups, DUAL, 4), Err(BuildError::QueryHeads { heads: 3, ranks: 2 }));
    assert_eq!(heads(6, 3, groups, DUAL, 4), Err(BuildError::KvHeads { heads: 3, ranks: 2 }));
    assert_eq!(heads(2, 1, groups, STRIPES, 4), Err(BuildError::HierarchicalBalance));
    assert_eq!(heads(2, 1, groups, DUAL, 4), Ok(()));
}
