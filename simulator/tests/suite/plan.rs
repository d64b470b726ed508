//! Plans: unrolled they are what their builders make, and their checker agrees with the one of schedules.

use crate::common::{Draws, problem, side_by_side};

use seamproof_oracle::{Algorithm, Balance, Problem};
use seamproof_simulator::check::check;
use seamproof_simulator::check::plan::{is_plan, prove_plan};
use seamproof_simulator::schedule::plan::{Plan, PlanError};
use seamproof_simulator::schedule::{MergeOrder, build_with};

/// Balances of which there are plans.
const BALANCES: [Balance; 3] = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }];

/// Returns the algorithms over `cp` ranks of which there are plans.
fn algorithms(cp: usize) -> Vec<Algorithm> {
    let divisors = (1..=cp).filter(|members| cp.is_multiple_of(*members));
    let hierarchical = divisors.map(|all_to_all| Algorithm::Hierarchical { all_to_all });
    [Algorithm::Ring].into_iter().chain(hierarchical).collect()
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
