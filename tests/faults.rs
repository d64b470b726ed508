//! The fault catalogue: every fault applies to something, something that it names catches it, and nothing is wrong with
//! the cases on which it is caught when it is not planted.

use std::collections::BTreeSet;

use rayon::prelude::*;
use seamproof::backends::{self, Emulated, MISCALLS};
use seamproof::faults::{
    TABLE_FAULTS, Tabled, by_campaign, by_checker, call_stream, miscalled, score_calls, stream,
};
use seamproof::generate::{self, Draw, Limits};
use seamproof::judge::judge;
use seamproof::verdict::{Check, Verdict};
use seamproof_oracle::Problem;
use seamproof_simulator::check::check;
use seamproof_simulator::faults::{ABSENT, Catcher, Fault, PLANTABLE, catalogue};
use seamproof_simulator::schedule::build;

/// The stream that the tests draw from.
const SEED: u64 = 1;

fn faults() -> Vec<&'static Fault> {
    catalogue().collect()
}

/// Without the fault the case holds: what was found is the fault.
fn holds(problem: &Problem) -> bool {
    let proved = build(problem).is_ok_and(|schedule| check(problem, &schedule).is_ok());
    proved && matches!(judge(&Emulated::default(), problem), Verdict::Pass(_))
}

#[test]
fn every_fault_that_the_checker_is_to_catch_is_rejected() {
    let missed: Vec<&str> = faults()
        .into_par_iter()
        .filter(|fault| fault.caught_by.contains(&Catcher::Checker))
        .filter(|fault| !by_checker(fault, SEED).is_some_and(|first| holds(&first.problem)))
        .map(|fault| fault.id)
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
}

#[test]
fn every_fault_that_a_check_of_the_judge_is_to_catch_is_found() {
    let missed: Vec<String> = faults()
        .into_par_iter()
        .filter(|fault| fault.caught_by != [Catcher::Checker])
        .filter_map(|fault| match by_campaign(fault, SEED) {
            Some((first, _)) if fault.is_caught_by(first.by) && holds(&first.problem) => None,
            other => Some(format!("{}: {other:?}", fault.id)),
        })
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_fault_applies_and_replays_by_name() {
    for fault in faults() {
        assert!(stream(fault, SEED).next().is_some(), "{} changes no schedule", fault.id);
        let name = format!("emulated+{}", fault.id);
        let backend = backends::by_name(&name, &backends::draw_options(&name, 3)).expect("a backend");
        assert_eq!(backend.name(), name);
    }
    assert!(backends::by_name("emulated+nothing", &Default::default()).is_err());
}

#[test]
fn a_capability_table_that_is_too_wide_or_too_narrow_is_found() {
    let limits = Limits::quick();
    for fault in TABLE_FAULTS {
        let subject = Tabled::new(fault);
        let found = (0..1_000).any(|index| match generate::draw(SEED, index, &limits) {
            Draw::Problem(problem) => {
                let verdict = judge(&subject, &problem);
                matches!(verdict, Verdict::Finding(finding) if finding.check == Check::Capability)
            }
            Draw::Malformed(_) => false,
        });
        assert!(found, "{}", fault.id);
    }
}

/// Every entry of the list of real bugs that can be planted without a GPU is planted, or absent for a reason, and not
/// both.
#[test]
fn every_plantable_entry_is_planted_or_absent() {
    let of_schedules = catalogue().flat_map(|fault| fault.entries);
    let planted: BTreeSet<u16> =
        of_schedules.chain(TABLE_FAULTS.iter().flat_map(|fault| fault.entries)).copied().collect();
    let absent: BTreeSet<u16> = ABSENT.iter().flat_map(|absent| absent.entries).copied().collect();
    let plantable: BTreeSet<u16> = PLANTABLE.iter().copied().collect();
    assert_eq!(plantable.len(), 131);
    assert_eq!(planted.intersection(&absent).collect::<Vec<_>>(), Vec::<&u16>::new());
    assert_eq!(planted.union(&absent).copied().collect::<BTreeSet<_>>(), plantable);
}

#[test]
fn every_fault_at_the_call_is_found_where_it_shows() {
    let missed: Vec<String> = score_calls(&MISCALLS, 1)
        .into_iter()
        .filter(|score| !score.caught() || !score.firsts.iter().all(|first| holds(&first.problem)))
        .map(|score| format!("{}: {:?}", score.miscall.id, score.firsts))
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_fault_at_the_call_replays_by_name() {
    for miscall in &MISCALLS {
        assert!(miscall.source.starts_with("https://") && miscall.imitates.len() > 20, "{}", miscall.id);
        let subject = miscalled(miscall, SEED);
        assert!(call_stream(&subject, SEED).next().is_some(), "{} changes nothing", miscall.id);
        let name = format!("emulated~{}", miscall.id);
        let backend = backends::by_name(&name, &backends::draw_options(&name, 3)).expect("a backend");
        assert_eq!(backend.name(), name);
    }
    assert!(backends::by_name("emulated~nothing", &Default::default()).is_err());
}
