//! The unfused path: it is right on what it takes, its memory is linear, and one that makes the full mask is found.

use seamproof_judge::campaign::Campaign;
use seamproof_judge::finding::{Check, Relation};
use seamproof_judge::generate::Profile;
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Emulated, Unfused};

fn unfused(makes_mask: bool) -> Unfused {
    Unfused { kernel: Emulated::default(), makes_mask }
}

#[test]
fn a_call_for_each_sequence_is_right() {
    let summary = Campaign { seed: 3, cases: 300, profile: Profile::Quick }.run(&unfused(false));
    assert!(summary.failures.is_empty() && summary.internal.is_empty(), "{summary}");
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
