//! Sizes of blocks of threads, as the sources name them.

/// Threads that run together.
pub(crate) const WARP: usize = 32;
/// Threads of an ordinary block: `THREADS` of the sources.
pub const THREADS: usize = 256;
/// Threads of a block that goes over all of a table: `SCAN_THREADS` and `PLANNERS` of the sources.
pub(crate) const SCAN_THREADS: usize = 1024;
