//! Sizes of blocks of threads, as the sources name them.

/// The threads that run together.
pub(crate) const WARP: usize = 32;
/// The threads of an ordinary block: `THREADS` of the sources.
pub const THREADS: usize = 256;
/// The threads of a block that goes over a whole table: `SCAN_THREADS` and `PLANNERS` of the sources.
pub(crate) const SCAN_THREADS: usize = 1024;
