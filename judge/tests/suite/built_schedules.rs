//! Schedules that are built once and kept.

use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::simulator::schedule::{MergeOrder, build_with};
use seamproof_judge::subjects::built;

/// Test that the answer is the builder's, whatever was asked before.
#[test]
fn the_schedule_is_always_the_problems_own() {
    for index in 0..200 {
        let Draw::Problem(problem) = generate::draw(11, index, &Limits::fuzz()) else { continue };
        use MergeOrder::{Deferred, Running};
        for order in [Running, Deferred, Deferred, Running, Deferred, Running, Running] {
            let got = built(&problem, order).map(|schedule| (*schedule).clone());
            assert_eq!(got, build_with(&problem, order));
        }
    }
}
