//! `seamproof kernels judge`: the packs of `bench attention`, run on the kernels and judged by the reference on the GPU.

use std::time::Instant;

use seamproof_kernels::Gpu;
use seamproof_kernels::bench;
use seamproof_kernels::cache::Cache;
use seamproof_oracle::Problem;
use seamproof_oracle::envelope::Model;

use super::CliError;
use super::exit::Exit;
use super::output::print_line;
use crate::backend::Backend;
use crate::backends::{Cuda, CudaRunner};
use crate::judge::large::{self, Judged, Rows};
use crate::values::{self, Poison};

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Tracks of kernels/bench/tracks.json; all if not given
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    tracks: Vec<String>,
    /// Columns of `seamproof bench attention`; all if not given
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    columns: Vec<String>,
    /// Drawn rows of each head that are judged, besides those at the ends of sequences and masks
    #[arg(long, default_value_t = 256)]
    sample: usize,
    /// Judge every row
    #[arg(long)]
    all: bool,
    /// Draws the rows
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Which GPU
    #[arg(long, default_value_t = 0)]
    gpu: usize,
}

pub(super) fn judge(args: &Args) -> Result<Exit, CliError> {
    let rows = match args.all {
        true => Rows::All,
        false => Rows::Sample { count: args.sample, seed: args.seed },
    };
    let mut runner = CudaRunner::open(args.gpu)?;
    let gpu = Gpu::open(args.gpu, &Cache::of_user())?;
    let mut held = true;
    for (name, problem) in bench::problems(&args.tracks, &args.columns)? {
        let start = Instant::now();
        let judged = judge_one(&mut runner, &gpu, &problem, rows)?;
        held &= judged.finding.is_none();
        let margin = judged.margin.worst_case;
        print_line(&format_args!(
            "{name:<26} {:>8} rows: lse {:.3}, out {:.3} of the bounds, {} unbounded; reference {:.2} ms ({:.1} s in all)",
            judged.rows,
            margin.lse,
            margin.out,
            judged.unbounded,
            judged.reference_ms,
            start.elapsed().as_secs_f64()
        ));
        judged.finding.iter().for_each(print_line);
    }
    Ok(if held { Exit::Held } else { Exit::Finding })
}

fn judge_one(runner: &mut CudaRunner, gpu: &Gpu, problem: &Problem, rows: Rows) -> Result<Judged, CliError> {
    let subject = Cuda::default();
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    let outputs = runner.run(&subject, problem, &inputs, &mut |_| {}).map_err(CliError::Twins)?;
    let nobody = || seamproof_kernels::KernelError::Shape("no rank answered".into());
    let got = outputs.ranks.first().ok_or_else(nobody)?;
    let model = Model::new(problem, subject.accumulation(), subject.partition(problem));
    Ok(large::forward(gpu, &large::Forward { problem, inputs: &inputs, got, model: &model }, rows)?)
}
