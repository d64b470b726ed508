//! Faults in a kernel: the tiled kernel with one of its stages changed.

use super::fault::Fault;

mod backward;
pub mod codes;
mod difference;
mod entry;
mod forward;
mod geometry;

/// Returns every fault of a kernel.
pub(super) fn faults() -> impl Iterator<Item = Fault> {
    let classes = [geometry::FAULTS, forward::FAULTS, backward::FAULTS, difference::FAULTS];
    classes.into_iter().flatten().copied()
}

/// Whether a fault is one of merges by a difference.
pub(super) fn is_of_differences(fault: &Fault) -> bool {
    difference::FAULTS.contains(fault)
}
