//! The command line; everything is in [`seamproof::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    seamproof::cli::main()
}
