//! `seamproof bench`: measures, with the ratio to a peer or limit in the same run.

use std::io::{self, ErrorKind};
use std::time::Instant;

use clap::Subcommand;

use super::CliError;
use super::exit::Exit;
use super::output::{complain, note};
use crate::bench;
use crate::power::{self, Plan};
use seamproof_kernels::Gpu;
use seamproof_kernels::bench::{self as gpu_bench, BenchError};
use seamproof_kernels::cache::Cache;

/// Lengths of the sequences that the oracle is measured on.
const LENGTHS: [usize; 4] = [1024, 2048, 4096, 8192];

#[derive(clap::Args, Debug)]
#[command(arg_required_else_help = false)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

const EXAMPLES: &str = "\
Examples, in a release build:
  seamproof bench oracle
  seamproof bench prove
  seamproof bench power
  seamproof bench power --cases 100 --seed 2
  seamproof bench thd";

#[derive(Debug, Subcommand)]
enum What {
    /// The oracle, against the rate of its GEMM and against a naive reference
    #[command(after_help = EXAMPLES)]
    Oracle,
    /// The checker, on a pack of a million tokens over up to 64 ranks
    #[command(after_help = EXAMPLES)]
    Prove,
    /// The judge, against the acceptance rules of the field: which subtle faults each catches
    #[command(after_help = EXAMPLES)]
    Power {
        /// Cases of each pool that draws are made from
        #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=10_000))]
        cases: u16,
        /// Draws the cases
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// The packed-sequence kernels on a GPU, against device copies of the same bytes
    #[command(after_help = EXAMPLES)]
    Thd {
        /// Which GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let measured = match args.what {
        What::Oracle => bench::oracle(&LENGTHS, &mut io::stdout()).map(|()| true),
        What::Prove => bench::prove(&mut io::stdout()).map(|()| true),
        What::Power { cases, seed } => power(&Plan { cases: cases.into(), seed }),
        What::Thd { gpu } => thd(gpu)?.map(|()| true),
    };
    Ok(match measured {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(&error);
            Exit::Internal
        }
        Ok(false) => Exit::Finding,
        _ => Exit::Held,
    })
}

/// The table; whether the judge caught all that is wrong, and nothing else.
fn power(plan: &Plan) -> io::Result<bool> {
    let start = Instant::now();
    let held = power::table(plan, &mut io::stdout(), |row| {
        note(&format_args!("{:.0} s: measuring: {row}", start.elapsed().as_secs_f64()));
    })?;
    note(&format_args!("{:.0} s", start.elapsed().as_secs_f64()));
    Ok(held)
}

fn thd(gpu: usize) -> Result<io::Result<()>, CliError> {
    let gpu = Gpu::open(gpu, &Cache::of_user())?;
    match gpu_bench::thd(&gpu, &mut io::stdout()) {
        Ok(()) => Ok(Ok(())),
        Err(BenchError::Io(error)) => Ok(Err(error)),
        Err(BenchError::Kernel(error)) => Err(error.into()),
    }
}
