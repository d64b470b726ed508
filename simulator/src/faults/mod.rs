//! The catalogue of planted bugs. Each [`Fault`] is an edit of a right [`Schedule`], or a kernel with a wrong stage. It
//! imitates a public bug and names the checks that must catch it. No production code knows of faults.
//!
//! A fault *applies* to a problem whose schedule its edit changes. To any other problem it is *equivalent*: the real
//! bug would not show there either. Some edits build the schedule of another problem (a wrong mask, wrong lengths) in
//! the buffers of the right one, as a wrongly told builder would. A wrong kernel applies where it changes a result.
//! [`ABSENT`] says which entries of the list of real bugs are absent, and why.

mod absent;
mod backward;
mod edit;
mod exchange;
mod fault;
mod kernel;
mod mask;
mod merge;
mod metadata;
mod order;
mod padding;
mod region;
mod shipped;

use std::sync::LazyLock;

use seamproof_oracle::Problem;

use crate::schedule::{Schedule, build};

pub use absent::{ABSENT, Absent, PLANTABLE};
pub use fault::{Catcher, Edit, Fault, FaultRecord, Plant, find};
pub use mask::WINDOW_OFF_BY_ONE;

impl Fault {
    /// Returns the right schedule in which the fault is planted. A fault of sequence-parallel regions is planted in a
    /// schedule with regions, any other in the problem's own; `None` if there is no such schedule.
    pub fn schedule(&self, problem: &Problem) -> Option<Schedule> {
        match region::FAULTS.iter().any(|fault| fault.id == self.id) {
            true => region::schedule(problem),
            false => build(problem).ok(),
        }
    }
}

static CATALOGUE: LazyLock<Vec<Fault>> = LazyLock::new(|| {
    let classes = [
        metadata::FAULTS,
        padding::FAULTS,
        mask::FAULTS,
        exchange::FAULTS,
        merge::FAULTS,
        backward::FAULTS,
        order::FAULTS,
        region::FAULTS,
        shipped::FAULTS,
    ];
    let edits = classes.into_iter().flatten().map(|fault| fault.entry());
    edits.chain(kernel::faults()).collect()
});

/// Returns every fault, by class. Faults of the schedule come first.
pub fn catalogue() -> impl Iterator<Item = &'static Fault> {
    CATALOGUE.iter()
}

/// Returns the fault with this id.
pub fn by_id(id: &str) -> Option<&'static Fault> {
    find(catalogue(), id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

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
}
