//! The unfused path: it is right on what it takes, its memory is linear, and one that makes the full mask is found.

use seamproof_judge::campaign::Campaign;
use seamproof_judge::finding::{Check, Relation};
use seamproof_judge::generate::Profile;
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Emulated, Planted, Unfused};
use seamproof_simulator::faults;

fn unfused(makes_mask: bool) -> Unfused {
    let kernel = Emulated::default();
    if makes_mask { Unfused::with_full_mask(kernel) } else { Unfused::over(kernel) }
}

#[test]
fn a_call_for_each_sequence_is_right() {
    let summary = Campaign { seed: 3, cases: 300, profile: Profile::Quick }.run(&unfused(false));
    assert!(summary.failures.is_empty() && summary.internal.is_empty(), "{summary}");
}

/// Faults of the call for one sequence.
const OF_THE_CALL: [&str; 3] = ["kv-sliced-by-q", "scale-of-the-module", "causal-dropped"];
/// Faults of what is taken out of a pack, of what goes back into it, and of what it is told.
const AROUND_THE_LOOP: [&str; 3] =
    ["call-k-rows-of-two-sequences-swapped", "call-out-rows-swapped", "call-scale-of-head-dim"];

/// Returns the number of failures of a campaign, all of them under this name.
fn failures(subject: &dyn Backend, name: &str) -> usize {
    let summary = Campaign { seed: 3, cases: 60, profile: Profile::Quick }.run(subject);
    assert!(summary.internal.is_empty(), "{summary}");
    assert!(summary.failures.iter().all(|failure| failure.key.backend == name), "{summary}");
    summary.failures.len()
}

#[test]
fn a_wrong_call_for_each_sequence_is_found() {
    for id in OF_THE_CALL {
        let wrong = Planted::new(Emulated::default(), *faults::by_id(id).expect("a fault"));
        assert!(failures(&Unfused::over(wrong), &format!("unfused+{id}")) > 0, "{id}");
    }
    for id in AROUND_THE_LOOP {
        let wrong = Miscalled::new(Box::new(unfused(false)), miscall(id).expect("a fault"));
        assert!(failures(&wrong, &format!("unfused~{id}")) > 0, "{id}");
    }
}

/// Test that the full mask leaves every result right, and that the law of memory alone finds it.
#[test]
fn the_path_that_makes_the_full_mask_is_found_by_its_memory() {
    let fields = ProblemFields { mask: Mask::CAUSAL, ..ProblemFields::padded(&[(5, 8), (3, 4)], 8) };
    let problem = Problem::new(fields).expect("a padded pack");
    let of_memory = Judge { identities: vec![Relation::Memory], ..Judge::default() };
    let verdict = |makes_mask| of_memory.examine(&unfused(makes_mask), &problem, Depth::All).verdict;
    assert!(matches!(verdict(false), Verdict::Pass(_)), "{}", verdict(false));
    let Verdict::Finding(finding) = verdict(true) else { panic!("{}", verdict(true)) };
    assert_eq!((finding.check, finding.identity), (Check::Identity, Some(Relation::Memory)), "{finding}");
    assert!(finding.what.contains("grow faster than tokens do: ["), "{finding}");
    // Without the law nothing is wrong.
    let others = Relation::ALL.into_iter().filter(|relation| *relation != Relation::Memory).collect();
    let without = Judge { identities: others, ..Judge::default() };
    let verdict = without.examine(&unfused(true), &problem, Depth::All).verdict;
    assert!(matches!(verdict, Verdict::Pass(_)), "{verdict}");
}

/// Test that a campaign asks for the law, though not in every case.
#[test]
fn a_campaign_finds_the_full_mask() {
    let summary = Campaign { seed: 3, cases: 100, profile: Profile::Quick }.run(&unfused(true));
    let found: Vec<_> = summary.failures.iter().map(|failure| failure.key.check).collect();
    assert!(found.contains(&Check::Identity), "{summary}");
}
