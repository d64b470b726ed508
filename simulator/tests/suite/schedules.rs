//! Every schedule gives the exact answer in f64. This tests the logic of a context-parallel algorithm without rounding.

use crate::common::hold::hold;
use crate::common::{Draws, problem, side_by_side};
use crate::symbolic;

use seamproof_oracle::{Algorithm, Balance, Heads, Problem, ProblemFields};
use seamproof_simulator::check::check;
use seamproof_simulator::schedule::{BuildError, MergeOrder, Operation, Work, build, build_with};

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
    every_balance(|_| Some(Algorithm::Ring), &ALL, 6, 60);
}

#[test]
fn hierarchical_is_exact() {
    for members in 1..=4 {
        let algorithm =
            |cp: usize| cp.is_multiple_of(members).then_some(Algorithm::Hierarchical { all_to_all: members });
        every_balance(algorithm, &ALL, 8, 15);
    }
}

/// Rows side by side (SBHD), which every rank has side by side too.
#[test]
fn rows_side_by_side_are_exact() {
    let mut draws = Draws(3);
    let algorithms = [
        Algorithm::Ring,
        Algorithm::AllGather,
        Algorithm::AllToAll,
        Algorithm::Hierarchical { all_to_all: 2 },
    ];
    let mut apart = 0;
    for (algorithm, balance) in algorithms.into_iter().flat_map(|algorithm| ALL.map(|cut| (algorithm, cut))) {
        for cp in [2, 4] {
            for _ in 0..12 {
                let problem = problem(&mut draws, algorithm, balance, cp);
                let problem = side_by_side(&mut draws, &problem);
                let Ok(schedule) = build(&problem) else { continue };
                apart += usize::from(problem.sequences.iter().any(|both| both.q.step.max(both.kv.step) > 1));
                symbolic::prove(&problem, &schedule).unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
                check(&problem, &schedule).unwrap_or_else(|errors| panic!("{}\n{problem:?}", errors[0]));
                hold(&problem, &schedule, &mut draws);
            }
        }
    }
    assert!(apart > 150, "{apart}");
}

/// An edit of operations that makes a schedule wrong. It returns whether it changed anything.
type Edit = fn(&mut Vec<Operation>) -> bool;

fn each_work(operations: &mut [Operation], mut edit: impl FnMut(&mut Work) -> bool) -> bool {
    operations.iter_mut().any(|operation| edit(&mut operation.work))
}

fn drop_first(operations: &mut Vec<Operation>, what: impl Fn(&Work) -> bool) -> bool {
    let found = operations.iter().position(|operation| what(&operation.work));
    found.map(|index| operations.remove(index)).is_some()
}

/// Edits by name. The flag says whether an edit may touch only rows to which nobody attends, and thus change nothing.
const EDITS: [(&str, bool, Edit); 8] = [
    ("a wait dropped", false, |all| drop_first(all, |work| matches!(work, Work::WaitEvent(_)))),
    ("a copy dropped", true, |all| drop_first(all, |work| matches!(work, Work::Copy { .. }))),
    ("a launch dropped", false, |all| drop_first(all, |work| matches!(work, Work::AttendBackward(_)))),
    ("a maximum not filled", false, |all| drop_first(all, |work| matches!(work, Work::Fill { .. }))),
    ("a band moved", false, |all| {
        each_work(all, |work| match work {
            Work::Attend(attend) => attend.call.segments.iter_mut().any(|segment| {
                let moved = segment.q.len > 0 && segment.hi.is_some_and(|hi| hi >= 0 && segment.keys() > 0);
                if moved {
                    (segment.hi, segment.prefix) = (segment.hi.map(|hi| hi - 1000), 0);
                }
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
    assert_eq!(heads(2, 1, groups, Balance::Striped { stripe: 2 }, 4), Ok(()));
    assert_eq!(heads(2, 1, groups, DUAL, 4), Ok(()));
}
