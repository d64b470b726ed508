//! Faults in a kernel: the tiled kernel with one of its stages changed.

use super::fault::Fault;

mod backward;
mod entry;
mod forward;
mod geometry;

/// Returns every fault of a kernel.
pub(super) fn faults() -> impl Iterator<Item = Fault> {
    [geometry::FAULTS, forward::FAULTS, backward::FAULTS].into_iter().flatten().copied()
}
