//! The command line; everything is in [`seamproof::cli`].

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// A case allocates thousands of small buffers: an eighth of a campaign's time with the system's allocator.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    seamproof::cli::main()
}
