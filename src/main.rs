//! The command line. Everything is in [`seamproof::cli`].

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// Allocator of the program. A case allocates thousands of small buffers, which take an eighth of a campaign's time
/// with the system's allocator.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Option `mi_option_purge_delay` of mimalloc, which the crate does not name. In the library's header it stands
/// before this one.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = libmimalloc_sys::mi_option_use_numa_nodes - 1;

/// Keeps freed memory with the program. The next proof or case needs as much again, and the system would clear every
/// page of it (an eighth of a large proof's time).
fn keep_memory() {
    #[allow(unsafe_code, reason = "the allocator is a C library")]
    // SAFETY: the option exists, and no other thread runs yet.
    unsafe {
        libmimalloc_sys::mi_option_set(PURGE_DELAY, -1);
    }
}

fn main() -> ExitCode {
    keep_memory();
    seamproof::cli::main()
}
