//! Two subjects on one problem: right ones agree, and a path that differs is found, however small the difference.

use seamproof_judge::finding::{Check, Relation};
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Beside, Emulated, Planted, Unfused};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::faults;

fn drawn(count: usize) -> impl Iterator<Item = Problem> {
    let problems = (0..).filter_map(|index| match generate::draw(17, index, &Limits::quick()) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    });
    problems.take(count)
}

fn emulated(tile: usize) -> Box<dyn Backend> {
    Box::new(Emulated { tiles: Tiles { q: tile, kv: tile }, ..Emulated::default() })
}

fn wrong(id: &str) -> Box<dyn Backend> {
    Box::new(Miscalled::new(emulated(4), miscall(id).expect("a fault")))
}

/// Returns the findings of the identity alone.
fn findings(one: fn() -> Box<dyn Backend>, other: fn() -> Box<dyn Backend>, bits: bool) -> usize {
    let mut judge = Judge { identities: vec![Relation::Beside], ..Judge::default() };
    judge.rungs.retain(|rung| rung.check == Check::Identity);
    let subject = Beside::new(one(), other(), bits);
    let verdicts = drawn(120).map(|problem| judge.examine(&subject, &problem, Depth::First).verdict);
    let found = verdicts.filter_map(|verdict| match verdict {
        Verdict::Finding(finding) => Some(finding),
        _ => None,
    });
    let found: Vec<_> = found.collect();
    assert!(found.iter().all(|finding| finding.identity == Some(Relation::Beside)), "{found:?}");
    found.len()
}

#[test]
fn right_subjects_agree_within_the_bounds_of_both() {
    assert_eq!(findings(|| emulated(4), || emulated(16), false), 0);
    let hopper = || -> Box<dyn Backend> {
        Box::new(Emulated {
            arithmetic: seamproof_judge::subjects::Arithmetic::Hopper,
            ..Emulated::default()
        })
    };
    assert_eq!(findings(|| emulated(4), hopper, false), 0);
}

#[test]
fn the_same_path_has_the_same_bits_and_another_one_has_not() {
    assert_eq!(findings(|| emulated(4), || emulated(4), true), 0);
    // Other tiles are right, and round in another order.
    assert!(findings(|| emulated(4), || emulated(16), true) > 0);
}

#[test]
fn a_new_path_that_differs_from_the_older_one_is_found() {
    for bits in [false, true] {
        assert!(findings(|| wrong("call-window-narrower"), || emulated(4), bits) > 3);
        // Nor is it forgiven where the older path is the wrong one.
        assert!(findings(|| emulated(4), || wrong("call-window-narrower"), bits) > 3);
    }
}

/// Test of the path with a call for each sequence, the new one, beside one call for all of them: it agrees, and a call
/// that cuts keys at the queries, or drops the causal mask, does not.
#[test]
fn a_call_for_each_sequence_agrees_with_one_for_all() {
    let unfused = || -> Box<dyn Backend> { Box::new(Unfused::over(Emulated::default())) };
    assert_eq!(findings(unfused, || emulated(4), false), 0);
    fn wrong(id: &str) -> Box<dyn Backend> {
        let fault = *faults::by_id(id).expect("a fault");
        Box::new(Unfused::over(Planted::new(Emulated::default(), fault)))
    }
    assert!(findings(|| wrong("kv-sliced-by-q"), || emulated(4), false) > 3);
    assert!(findings(|| wrong("causal-dropped"), || emulated(4), false) > 3);
}

/// Test that the whole judge asks for the other subject in every case, and names it.
#[test]
fn the_judge_asks_the_other_subject_in_every_case() {
    let subject = Beside::new(emulated(4), wrong("call-last-key-lost"), false);
    let problem = Problem::new(ProblemFields::packed(&[(3, 4), (2, 2)], 8)).expect("two sequences");
    let Verdict::Finding(finding) = judge(&subject, &problem) else { panic!("the older path lost a key") };
    assert_eq!(finding.identity, Some(Relation::Beside), "{finding}");
    assert!(finding.what.contains("beside"), "{finding}");
}
