//! The catalogue of planted bugs: each [`Fault`] is an edit of a right [`Schedule`] or a kernel that is wrong in a stage,
//! imitates a bug that was public, and names what must catch it. No production code knows of them.
//!
//! A fault *applies* to a problem whose schedule its edit changes; to any other it is *equivalent*: the real bug would
//! not show there either. Some edits build the schedule of another problem (a wrong mask, wrong lengths) in the buffers
//! of the right one: what a builder does that was told the wrong thing. A wrong kernel applies where it changes a result.
//! [`ABSENT`] says which entries of the list of
//! real bugs are not here, and why.

mod absent;
mod backward;
mod edit;
mod exchange;
mod kernel;
mod mask;
mod merge;
mod metadata;
mod order;
mod padding;
mod shipped;

use std::sync::LazyLock;

use seamproof_oracle::Problem;

use crate::emulated::Variant;
use crate::schedule::Schedule;

pub use absent::{ABSENT, Absent, PLANTABLE};
pub use mask::WINDOW_OFF_BY_ONE;

/// What catches a fault: the symbolic checker, or a check of the judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Catcher {
    /// The proof of the schedule.
    Checker,
    /// The schedule does not run to its end.
    Crash,
    /// Unwritten rows, the padding contract, rows that nobody owns.
    Structure,
    /// Padding or slack reaches a real row.
    Poison,
    /// A result other than the one that exact inputs allow.
    Exact,
    /// Two runs that must agree do not.
    Identity,
    /// A value outside its bound.
    Envelope,
}

impl Catcher {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Catcher::Checker => "checker",
            Catcher::Crash => "crash",
            Catcher::Structure => "structure",
            Catcher::Poison => "poison",
            Catcher::Exact => "exact",
            Catcher::Identity => "identity",
            Catcher::Envelope => "envelope",
        }
    }
}

/// An edit of the right schedule of a problem; it leaves alone what it has no meaning for.
pub type Edit = fn(&Problem, &mut Schedule);

/// Where a fault is planted.
#[derive(Clone, Copy, Debug)]
pub enum Plant {
    /// In the schedule.
    Schedule(Edit),
    /// In the kernel: stages of which some are wrong.
    Kernel(&'static dyn Variant),
}

/// A planted bug.
#[derive(Clone, Copy, Debug)]
pub struct Fault<P = Plant> {
    /// Its name in reports.
    pub id: &'static str,
    /// What goes wrong.
    pub imitates: &'static str,
    /// Where that happened.
    pub source: &'static str,
    /// Its entries in the list of real bugs; none where the list has it as a defect of TransformerEngine, or not at all.
    pub entries: &'static [u16],
    /// Any of these may be the first to see it; at least one must.
    pub caught_by: &'static [Catcher],
    /// What is done to plant it.
    pub edit: P,
}

impl Fault<Edit> {
    /// The same as an entry of the catalogue.
    pub const fn entry(self) -> Fault {
        let Fault { id, imitates, source, entries, caught_by, edit } = self;
        Fault { id, imitates, source, entries, caught_by, edit: Plant::Schedule(edit) }
    }
}

impl Fault {
    /// Plants the fault in the right schedule of a problem; says whether that changed anything. What is wrong in the
    /// kernel changes no schedule.
    pub fn plant(&self, problem: &Problem, schedule: &mut Schedule) -> bool {
        let Plant::Schedule(edit) = self.edit else { return false };
        let right = schedule.clone();
        edit(problem, schedule);
        *schedule != right
    }

    /// Whether the fault names this catcher. Inputs of an exact mode ask what the envelope asks, without a tolerance: a
    /// fault that names the envelope may be met by them first.
    pub fn is_caught_by(&self, catcher: Catcher) -> bool {
        let sharper = catcher == Catcher::Exact && self.caught_by.contains(&Catcher::Envelope);
        sharper || self.caught_by.contains(&catcher)
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
        shipped::FAULTS,
    ];
    let edits = classes.into_iter().flatten().map(|fault| fault.entry());
    edits.chain(kernel::faults()).collect()
});

/// Every fault, by class; those of the schedule first.
pub fn catalogue() -> impl Iterator<Item = &'static Fault> {
    CATALOGUE.iter()
}

/// The fault of this id.
pub fn by_id(id: &str) -> Option<&'static Fault> {
    catalogue().find(|fault| fault.id == id)
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

    /// Pairs that edit alike: of two directions, or of two sides of one bound.
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
