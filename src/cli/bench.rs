//! `seamproof bench`: measures, with the ratio to a peer or limit in the same run.

use std::io::{self, ErrorKind, Write};
use std::time::Instant;

use clap::Subcommand;

use super::CliError;
use super::exit::Exit;
use super::output::{complain, note};
use crate::accuracy::{self, AccuracyPlan};
use crate::bench::{self, MergeBenchError};
use crate::power::{self, PowerPlan, PowerTable};
use seamproof_kernels::Gpu;
use seamproof_kernels::cache::Cache;
use seamproof_kernels::forward::{AttentionKernels, TileShape};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_lab::bench::{self as gpu_bench, AttentionBench, BenchError, BenchedPass};

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
  seamproof bench merge
  seamproof bench power
  seamproof bench power --cases 100 --seed 2
  seamproof bench power --precision fp8
  seamproof bench accuracy
  seamproof bench thd
  seamproof bench quantise
  seamproof bench decode
  seamproof bench mixed
  seamproof bench attention --tracks short128,tiny1024x64
  seamproof bench steadiness --tracks short128 --columns mha-d128
  seamproof bench attention --peer 'python3 kernels/lab/bench/fa4.py SITE'
  seamproof bench attention --pass backward --peer 'python3 kernels/lab/bench/fa4.py SITE'";

#[derive(Debug, Subcommand)]
enum What {
    /// The oracle, against the rate of its GEMM and against a naive reference
    #[command(after_help = EXAMPLES)]
    Oracle,
    /// The checker, on a pack of a million tokens over up to 64 ranks
    #[command(after_help = EXAMPLES)]
    Prove,
    /// Joining 64 shards of campaigns of 100,000 to 10,000,000 cases that found the same
    #[command(after_help = EXAMPLES)]
    Merge,
    /// The judge against the acceptance rules of the field: which subtle faults each of them catches
    #[command(after_help = EXAMPLES)]
    Power {
        /// Number of cases in each pool that draws are made from
        #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=10_000))]
        cases: u16,
        /// Seed of the cases
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Precision of the kernel: bf16 or fp8
        #[arg(long, value_name = "PRECISION", default_value = "bf16", value_parser = power_table)]
        precision: PowerTable,
    },
    /// Choices of a kernel in FP8: the error that each brings, beside bf16 on the same values, and whether the judge sees it
    #[command(after_help = EXAMPLES)]
    Accuracy {
        /// Number of problems for each figure
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1_000))]
        cases: u16,
        /// Seed of the problems
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Attention on packs of sequences on a GPU, against a peer: TFLOP/s on visible pairs of real tokens
    #[command(after_help = EXAMPLES)]
    Attention {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
        /// Pass: forward, forward-fp8, backward or backward-fp8
        #[arg(long, value_name = "PASS", default_value = "forward", value_parser = pass)]
        pass: Pass,
        /// Kernels of the forward: tuned, long, paired, middle, short, split, mixed or simple, and in FP8 tuned, long or short [default: tuned]
        #[arg(long, value_parser = AttentionKernels::by_name)]
        kernel: Option<AttentionKernels>,
        /// Tracks of kernels/lab/bench/tracks.json [default: all]
        #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
        tracks: Vec<String>,
        /// Heads, head dim and mask: mha-d128, gqa-d128, mha-d64, full-d128, window-d128, and mha-d256 but for backward-fp8, and latent-d576 for a forward without a peer [default: the first five]
        #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
        columns: Vec<String>,
        /// Shell command that times a peer on the same machine; it is asked for one cell after the other
        #[arg(long, value_name = "COMMAND")]
        peer: Option<String>,
    },
    /// Times of single launches of attention on a GPU: median and 99th percentile, and the time to the first launch
    #[command(after_help = EXAMPLES)]
    Steadiness {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
        /// Number of launches of each pass
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
        launches: u32,
        /// Tracks of kernels/lab/bench/tracks.json [default: all]
        #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
        tracks: Vec<String>,
        /// Heads, head dim and mask: mha-d128, gqa-d128, mha-d64, full-d128, window-d128 [default: all]
        #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
        columns: Vec<String>,
    },
    /// Magnitudes, codes and turned copies of FP8 on a GPU, against device copies of the same bytes
    #[command(after_help = EXAMPLES)]
    Quantise {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
    /// One query row a sequence against many keys on a GPU, against device copies of as many bytes as K and V have
    #[command(after_help = EXAMPLES)]
    Decode {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
    /// A pack that mixes one long sequence with many short ones on a GPU, against the sum of the times of its parts
    #[command(after_help = EXAMPLES)]
    Mixed {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
        /// Heads, head dim and mask: mha-d128, gqa-d128, mha-d64, full-d128, window-d128 [default: all]
        #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
        columns: Vec<String>,
    },
    /// The packed-sequence kernels on a GPU, against device copies of the same bytes
    #[command(after_help = EXAMPLES)]
    Thd {
        /// Number of the GPU
        #[arg(long, default_value_t = 0)]
        gpu: usize,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let measured = match &args.what {
        What::Oracle => bench::oracle(&LENGTHS, &mut io::stdout()).map(|()| true),
        What::Prove => bench::prove(&mut io::stdout()).map(|()| true),
        What::Merge => merge()?,
        What::Power { cases, seed, precision } => {
            power(precision, &PowerPlan { cases: (*cases).into(), seed: *seed })
        }
        What::Accuracy { cases, seed } => {
            accuracy(&AccuracyPlan { cases: (*cases).into(), seed: *seed }).map(|()| true)
        }
        What::Steadiness { gpu, launches, tracks, columns } => {
            let (opened, plan) = (Instant::now(), (*launches as usize, [&tracks[..], columns]));
            on_gpu(*gpu, |gpu, to| gpu_bench::steadiness(gpu, opened, plan, to))?.map(|()| true)
        }
        What::Quantise { gpu } => on_gpu(*gpu, gpu_bench::quantise)?.map(|()| true),
        What::Decode { gpu } => on_gpu(*gpu, gpu_bench::decode)?.map(|()| true),
        What::Mixed { gpu, columns } => {
            on_gpu(*gpu, |gpu, to| gpu_bench::mixed(gpu, columns, to))?.map(|()| true)
        }
        What::Thd { gpu } => on_gpu(*gpu, gpu_bench::thd)?.map(|()| true),
        What::Attention { gpu, pass, kernel, tracks, columns, peer } => {
            let plan = AttentionBench::new(subject(*pass, *kernel)?, [tracks, columns], peer.as_deref())?;
            on_gpu(*gpu, |gpu, to| gpu_bench::attention(gpu, &plan, to))?.map(|()| true)
        }
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

/// Prints what it takes to join shards. Returns whether it is within the limits.
fn merge() -> Result<io::Result<bool>, CliError> {
    match bench::merge(&mut io::stdout()) {
        Ok(holds) => Ok(Ok(holds)),
        Err(MergeBenchError::Io(error)) => Ok(Err(error)),
        Err(error) => Err(CliError::Usage(error.to_string())),
    }
}

/// Prints the table. Returns whether the judge caught everything that is wrong, and nothing else.
fn power(table: &PowerTable, plan: &PowerPlan) -> io::Result<bool> {
    timed(|begin| power::print(table, plan, &mut io::stdout(), begin))
}

/// Prints what the choices of FP8 cost.
fn accuracy(plan: &AccuracyPlan) -> io::Result<()> {
    timed(|begin| accuracy::print(plan, &mut io::stdout(), begin))
}

/// Says on standard error when each row of a table begins, and how long all took.
fn timed<T>(print: impl FnOnce(&mut dyn FnMut(&str)) -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    let printed = print(&mut |row| {
        note(&format_args!("{:.0} s: measuring: {row}", start.elapsed().as_secs_f64()));
    })?;
    note(&format_args!("{:.0} s", start.elapsed().as_secs_f64()));
    Ok(printed)
}

/// Reads the name of a precision.
fn power_table(name: &str) -> Result<PowerTable, String> {
    match name {
        "bf16" => Ok(power::BF16),
        "fp8" => Ok(power::FP8),
        _ => Err("no such precision; use bf16 or fp8".to_owned()),
    }
}

/// A pass that `bench attention` measures.
#[derive(Clone, Copy, Debug)]
enum Pass {
    /// The forward in bf16.
    Forward,
    /// The forward in FP8.
    ForwardFp8,
    /// The backward in bf16.
    Backward,
    /// The backward in FP8.
    BackwardFp8,
}

/// Returns what `bench attention` measures.
fn subject(pass: Pass, kernel: Option<AttentionKernels>) -> Result<BenchedPass, CliError> {
    match (pass, kernel) {
        (Pass::Forward, kernel) => Ok(BenchedPass::Forward(kernel.unwrap_or(AttentionKernels::Tuned))),
        (Pass::ForwardFp8, kernel) => shape_on_codes(kernel).map(BenchedPass::ForwardFp8),
        (Pass::Backward, None) => Ok(BenchedPass::Backward),
        (Pass::BackwardFp8, None) => Ok(BenchedPass::BackwardFp8),
        (Pass::Backward | Pass::BackwardFp8, Some(_)) => {
            let what = "--kernel is that of a forward; drop it for a backward";
            Err(CliError::Usage(what.to_owned()))
        }
    }
}

/// Returns the shape of forwards in FP8; `None` for the one that fits each cell.
fn shape_on_codes(kernel: Option<AttentionKernels>) -> Result<Option<Fp8Shape>, CliError> {
    match kernel {
        None | Some(AttentionKernels::Tuned) => Ok(None),
        Some(AttentionKernels::Of(TileShape::Long)) => Ok(Some(Fp8Shape::Long)),
        Some(AttentionKernels::Of(TileShape::Short)) => Ok(Some(Fp8Shape::Short)),
        Some(other) => {
            let what = format!("--kernel {}: a forward in FP8 is tuned, long or short", other.name());
            Err(CliError::Usage(what))
        }
    }
}

/// Reads the name of a pass.
fn pass(name: &str) -> Result<Pass, String> {
    match name {
        "forward" => Ok(Pass::Forward),
        "forward-fp8" => Ok(Pass::ForwardFp8),
        "backward" => Ok(Pass::Backward),
        "backward-fp8" => Ok(Pass::BackwardFp8),
        _ => Err("no such pass; use forward, forward-fp8, backward or backward-fp8".to_owned()),
    }
}

fn on_gpu(
    gpu: usize,
    bench: impl FnOnce(&Gpu, &mut dyn Write) -> Result<(), BenchError>,
) -> Result<io::Result<()>, CliError> {
    let gpu = Gpu::open(gpu, &Cache::of_user())?;
    match bench(&gpu, &mut io::stdout()) {
        Ok(()) => Ok(Ok(())),
        Err(BenchError::Io(error)) => Ok(Err(error)),
        Err(error) => Err(error.into()),
    }
}
