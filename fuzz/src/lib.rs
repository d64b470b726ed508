//! What every target shares and the library must not choose for others: the allocator.

/// A case allocates thousands of small buffers: an eighth of its time with the system's allocator. A sanitizer that watches
/// the heap wants that one: `--no-default-features`.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
