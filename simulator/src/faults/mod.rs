//! The catalogue of planted bugs. Each [`Fault`] is an edit of a right [`Schedule`], or a kernel with a wrong stage. It
//! imitates a public bug and names the checks that must catch it. No production code knows of faults.
//!
//! A fault *applies* to a problem whose schedule its edit changes. To any other problem it is *equivalent*: the real
//! bug would not show there either. Some edits build the schedule of another problem (a wrong mask, wrong lengths) in
//! the buffers of the right one, as a wrongly told builder would. A wrong kernel applies where it changes a result.
//! [`ABSENT`] says which entries of the list of real bugs are absent, and why.

mod absent;
mod backward;
mod convert;
mod dealing;
mod edit;
mod exchange;
mod fault;
mod kernel;
mod mask;
mod merge;
mod metadata;
mod order;
mod padding;
mod pages;
mod quantiser;
mod region;
mod resources;
mod shared;
mod shipped;
mod steps;
mod words;

use std::sync::LazyLock;

use seamproof_oracle::Problem;

use crate::schedule::{MergeOrder, Schedule, build_with};

pub use absent::{ABSENT, Absent, PLANTABLE};
pub use fault::{Catcher, Edit, Fault, FaultRecord, Plant, find};
pub use kernel::codes;
pub use mask::WINDOW_OFF_BY_ONE;
pub use quantiser::{FAULTS as QUANTISER_FAULTS, QuantiserFault};

impl Fault {
    /// Returns the problem that the fault is tried on in place of a drawn one. A fault of sequence-parallel regions is
    /// tried in a region where there can be one, one of what is dealt in a form that is dealt where it can be said, any
    /// other on the drawn problem itself.
    pub fn asked(&self, drawn: Problem) -> Problem {
        let is_of = |faults: &[Fault<Edit>]| faults.iter().any(|fault| fault.id == self.id);
        if is_of(region::FAULTS) {
            region::around(drawn)
        } else if is_of(dealing::FAULTS) {
            dealing::given(drawn)
        } else {
            drawn
        }
    }

    /// Returns the order in which a schedule merges for the fault to show: the default one, for which edits are
    /// written, but for faults of merges by a difference, of an all-gather's steps and of conversions.
    pub fn order(&self) -> MergeOrder {
        let shipped = steps::FAULTS.iter().chain(convert::FAULTS);
        match shipped.into_iter().any(|fault| fault.id == self.id) {
            true => MergeOrder::Deferred,
            false if kernel::is_of_differences(self) => MergeOrder::Difference,
            false => MergeOrder::default(),
        }
    }

    /// Returns the right schedule of a problem, in which the fault is planted; `None` if there is none.
    pub fn schedule(&self, problem: &Problem) -> Option<Schedule> {
        build_with(problem, self.order()).ok()
    }
}

static CATALOGUE: LazyLock<Vec<Fault>> = LazyLock::new(|| {
    let classes = [
        metadata::FAULTS,
        padding::FAULTS,
        words::FAULTS,
        dealing::FAULTS,
        pages::FAULTS,
        shared::FAULTS,
        mask::FAULTS,
        exchange::FAULTS,
        merge::FAULTS,
        backward::FAULTS,
        order::FAULTS,
        region::FAULTS,
        resources::FAULTS,
        shipped::FAULTS,
        steps::FAULTS,
        convert::FAULTS,
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
