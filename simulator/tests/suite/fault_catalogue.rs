//! The catalogue of planted faults.

use seamproof_simulator::faults::{ABSENT, by_id, catalogue};
use std::collections::BTreeSet;

#[test]
fn ids_are_unique_and_every_source_is_an_address() {
    let ids: BTreeSet<&str> = catalogue().map(|fault| fault.id).collect();
    assert_eq!(ids.len(), catalogue().count());
    assert!(ids.len() >= 80, "{}", ids.len());
    for fault in catalogue() {
        assert!(fault.source.starts_with("https://"), "{}", fault.id);
        assert!(!fault.caught_by.is_empty() && fault.imitates.len() > 20, "{}", fault.id);
    }
}

/// Pairs of faults that edit alike: they are two directions, or two sides of one bound.
const ALIKE: [(&str, &str); 8] = [
    ("window-off-by-one", "window-one-too-wide"),
    ("bottom-right-for-top-left", "top-left-for-bottom-right"),
    ("batch-wide-window-shift", "adjusted-window-at-top-left"),
    ("offsets-from-lengths", "all-gather-real-offsets"),
    ("reorder-writes-rows-twice", "reorder-loses-rows"),
    ("output-padding-unwritten", "gradient-padding-unwritten"),
    ("softcap-missing", "softcap-missing-in-backward"),
    ("scale-of-the-module", "scale-missing-in-backward"),
];

#[test]
fn enough_faults_edit_differently() {
    assert!(ALIKE.iter().flat_map(|(a, b)| [a, b]).all(|id| by_id(id).is_some()));
    assert!(catalogue().count() - ALIKE.len() >= 45, "{}", catalogue().count());
}

#[test]
fn the_defects_of_transformer_engine_are_here() {
    for defect in ["(D1)", "(D2)", "(D3)", "(D4)", "(D5)", "(D8)", "(D9)", "(D10)"] {
        assert_eq!(catalogue().filter(|fault| fault.imitates.ends_with(defect)).count(), 1, "{defect}");
    }
}

#[test]
fn an_absent_entry_has_one_reason() {
    let mut entries: Vec<u16> = ABSENT.iter().flat_map(|absent| absent.entries).copied().collect();
    let count = entries.len();
    entries.sort_unstable();
    entries.dedup();
    assert_eq!(entries.len(), count);
}
