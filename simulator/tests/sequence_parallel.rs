//! Sequence-parallel regions: proved, run in f64, and refused where heads cannot be dealt.

mod common;

use common::hold::hold;
use common::{Draws, problem};
use seamproof_oracle::{Algorithm, Balance, Heads, Problem, ProblemFields};
use seamproof_simulator::check::check;
use seamproof_simulator::schedule::{BuildError, RegionError, sequence_parallel};

/// A random problem whose heads `ranks` ranks of a region can hold: KV heads are split, or one is replicated.
fn dealt(draws: &mut Draws, algorithm: Algorithm, balance: Balance, cp: usize, ranks: usize) -> Problem {
    let mut fields = ProblemFields::from(problem(draws, algorithm, balance, cp));
    let Heads { q, kv } = fields.heads;
    fields.heads = match draws.below(2) {
        0 => Heads { q: q * ranks, kv: kv * ranks },
        _ => Heads { q: q * ranks, kv: 1 },
    };
    Problem::new(fields).unwrap()
}

fn holds(algorithm: Algorithm, balances: &[Balance], cp: usize, cases: usize) {
    let mut draws = Draws(3);
    for ranks in 1..=4 {
        for &balance in balances {
            for _ in 0..cases {
                let problem = dealt(&mut draws, algorithm, balance, cp, ranks);
                let schedule = sequence_parallel(&problem, ranks).unwrap();
                assert_eq!(schedule.ranks.len(), cp * ranks);
                let proof = check(&problem, &schedule).unwrap_or_else(|errors| {
                    panic!(
                        "{ranks} ranks: {:#?}\n{problem:#?}",
                        errors.iter().map(ToString::to_string).collect::<Vec<_>>()
                    )
                });
                assert_eq!(proof.pairs, problem.pairs() * problem.heads.q as u64);
                hold(&problem, &schedule, &mut draws);
            }
        }
    }
}

const CUTS: [Balance; 4] =
    [Balance::DualChunk, Balance::Contiguous, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];

#[test]
fn a_region_around_one_rank_is_exact() {
    holds(Algorithm::Single, &CUTS[1..2], 1, 60);
}

#[test]
fn a_region_inside_a_ring_is_exact() {
    holds(Algorithm::Ring, &CUTS[..3], 2, 10);
}

#[test]
fn a_region_inside_an_all_gather_is_exact() {
    holds(Algorithm::AllGather, &CUTS, 3, 10);
}

#[test]
fn a_region_inside_an_all_to_all_is_exact() {
    holds(Algorithm::AllToAll, &CUTS, 2, 10);
}

#[test]
fn a_region_inside_a_hierarchy_is_exact() {
    holds(Algorithm::Hierarchical { all_to_all: 2 }, &CUTS[..2], 4, 5);
}

#[test]
fn what_a_region_cannot_hold_is_refused() {
    let heads = |q, kv, ranks| {
        let mut fields =
            ProblemFields::from(problem(&mut Draws(1), Algorithm::Single, Balance::Contiguous, 1));
        fields.heads = Heads { q, kv };
        sequence_parallel(&Problem::new(fields).unwrap(), ranks).map(|_| ())
    };
    assert_eq!(heads(6, 2, 4), Err(RegionError::Build(BuildError::QueryHeads { heads: 6, ranks: 4 })));
    assert_eq!(heads(12, 3, 4), Err(RegionError::Build(BuildError::KvHeads { heads: 3, ranks: 4 })));
    assert_eq!(heads(4, 2, 0), Err(RegionError::Ranks { got: 0, max: 1 << 12 }));
    assert!(matches!(heads(4, 2, usize::MAX), Err(RegionError::Ranks { .. })));
    assert_eq!(heads(4, 2, 4), Ok(()));
}
