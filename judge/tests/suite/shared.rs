//! Keys that sequences share outside of pages: the right kernel holds, a wrong one is found, and a subject that does
//! not take them is asked without.

use std::collections::BTreeSet;

use ndarray::{Array3, Axis};
use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subjects::{Emulated, Planted};
use seamproof_judge::values;
use seamproof_oracle::Algorithm;
use seamproof_simulator::check::check;
use seamproof_simulator::faults;

/// Returns drawn problems whose sequences share keys.
fn drawn() -> impl Iterator<Item = Problem> {
    (0..6_000).filter_map(|index| match generate::draw(31, index, &Limits::seams()) {
        Draw::Problem(problem) => {
            Some(problem).filter(|p| !p.sharing.is_empty() && p.pairs() > 0 && is_legal(p))
        }
        _ => None,
    })
}

fn judged(subject: &dyn Backend, problem: &Problem) -> bool {
    matches!(evaluate(subject, problem), Verdict::Finding(_))
}

#[test]
fn the_right_kernel_holds_and_its_schedule_is_proved() {
    let (mut algorithms, mut regions, mut backward) = (BTreeSet::new(), 0, 0);
    for problem in drawn().take(150) {
        let hopper =
            Emulated { arithmetic: seamproof_judge::subjects::Arithmetic::Hopper, ..Emulated::default() };
        for subject in [Emulated::default(), hopper] {
            let verdict = evaluate(&subject, &problem);
            assert!(matches!(verdict, Verdict::Pass(_)), "{problem:?}: {verdict:?}");
        }
        let schedule = Emulated::default().schedule(&problem).expect("it shares keys");
        let proved = check(&problem, &schedule);
        assert!(proved.is_ok(), "{problem:?}: {proved:?}");
        algorithms.insert(problem.parallel.algorithm.name());
        regions += usize::from(problem.parallel.region > 1);
        backward += usize::from(problem.pass == Pass::Backward);
    }
    assert!(regions > 2 && backward > 20, "{regions} {backward}");
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
}

/// Test that lent rows have the gradients that all sequences add to keys of their own, and that nothing else changes.
#[test]
fn lent_rows_have_the_sums_of_unshared_gradients() {
    let ideal = Emulated::default();
    let mut summed = 0;
    let on_one_rank = |p: &Problem| p.pass == Pass::Backward && p.parallel.size() * p.parallel.region == 1;
    for problem in drawn().filter(on_one_rank).take(40) {
        let inputs = values::inputs(&problem);
        let [shared, apart] =
            [problem.clone(), problem.unshared()].map(|p| ideal.run(&p, &inputs).expect("it runs"));
        // Rows that nobody owns hold a NaN.
        let bits = |of: &Array3<f32>| of.mapv(f32::to_bits);
        assert_eq!(bits(&shared.ranks[0].out), bits(&apart.ranks[0].out));
        let [shared, apart] =
            [&shared, &apart].map(|outputs| outputs.ranks[0].gradients.as_ref().expect("gradients"));
        assert_eq!(bits(&shared.dq), bits(&apart.dq));
        for (lent, hole) in problem.shared_rows() {
            let others = problem.shared_rows().filter(|(other, _)| *other == lent).count();
            if others > 1 {
                continue;
            }
            for (got, own) in [(&shared.dk, &apart.dk), (&shared.dv, &apart.dv)] {
                let [got, lent, hole] =
                    [(got, lent), (own, lent), (own, hole)].map(|(of, row)| of.index_axis(Axis(0), row));
                let close = got
                    .iter()
                    .zip(lent.iter().zip(&hole))
                    .all(|(got, (a, b))| (got - (a + b)).abs() <= (a.abs() + b.abs()) / 32.0 + 1e-6);
                assert!(close, "{problem:?}: {got} against {lent} and {hole}");
                summed += 1;
            }
        }
    }
    assert!(summed > 50, "{summed}");
}

#[test]
fn a_wrong_sum_or_prefix_is_found_and_shrunk_to_two_sequences() {
    let ids = [
        "shared-gradient-of-the-last",
        "shared-gradient-counted-twice",
        "shared-gradient-of-the-lender-alone",
        "shared-prefix-causal-by-row",
        "shared-prefix-attended-twice",
        "last-lent-key-lost",
    ];
    for id in ids {
        let wrong = Planted::new(Emulated::default(), *faults::by_id(id).expect("a fault"));
        let found = drawn().find(|problem| judged(&wrong, problem)).expect(id);
        let small = shrink(&found, 3_000, |problem| judged(&wrong, problem)).problem;
        assert!(small.sequences.len() == 2 && small.sharing.0.len() == 1, "{id}: {small:?}");
        let lends = small.parallel.algorithm != Algorithm::Single;
        assert_eq!(lends, id == "last-lent-key-lost", "{id}: {small:?}");
        assert!(small.tokens() <= 3 && small.parallel.size() == 1, "{id}: {small:?}");
        assert!(!judged(&wrong, &small.unshared()), "{id}");
    }
}

#[test]
fn a_failure_that_needs_no_shared_keys_is_shrunk_to_none() {
    for problem in drawn().take(8) {
        let small = shrink(&problem, 2_000, |small| small.pairs() > 0).problem;
        assert!(small.sharing.is_empty(), "{small:?}");
    }
}

/// The emulated kernel, which reads every sequence's keys in its own rows.
struct ReadsHoles;

impl Backend for ReadsHoles {
    fn name(&self) -> &str {
        "reads-holes"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        Emulated::default().run(&problem.unshared(), inputs)
    }
}

#[test]
fn who_reads_a_hole_is_found() {
    for problem in drawn().filter(|p| p.parallel.size() == 1).take(10) {
        assert!(judged(&ReadsHoles, &problem), "{problem:?}");
    }
}

#[test]
fn a_subject_that_takes_no_shared_keys_is_asked_without() {
    let mut table = Table::widest();
    table.sharing = false;
    for problem in drawn().take(20) {
        assert_eq!(table.refusal(&problem), Some(Refusal::Sharing));
        assert_eq!(table.fitted(problem.clone()), problem.unshared());
    }
}
