//! The allocator that every target shares. The library must not choose it for others.

/// Allocator of the targets. A case allocates thousands of small buffers, which take an eighth of its time with the
/// system's allocator. A sanitizer that watches the heap needs the system's allocator: `--no-default-features`.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
