//! Faults in a kernel: stages of the tiled kernel with one of them changed.

use super::fault::Fault;

mod backward;
mod entry;
mod forward;
mod geometry;

/// Every fault of a kernel.
pub(super) fn faults() -> impl Iterator<Item = Fault> {
    [geometry::FAULTS, forward::FAULTS, backward::FAULTS].into_iter().flatten().copied()
}
