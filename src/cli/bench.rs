//! `seamproof bench`: measures, with the ratio to a peer or limit in the same run.

use clap::Subcommand;

use super::CliError;
use super::exit::Exit;
use crate::bench;

/// Lengths of the sequences that the oracle is measured on.
const LENGTHS: [usize; 4] = [1024, 2048, 4096, 8192];

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

const EXAMPLES: &str = "\
Example:
  seamproof bench oracle    (in a release build)";

#[derive(Debug, Subcommand)]
enum What {
    /// The oracle, against the rate of its GEMM and against a naive reference
    #[command(after_help = EXAMPLES)]
    Oracle,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    match args.what {
        // A reader that goes away is no error: see `output`.
        What::Oracle => drop(bench::oracle(&LENGTHS, &mut std::io::stdout())),
    }
    Ok(Exit::Held)
}
