//! `seamproof prove`: checks schedules symbolically.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Instant;

use super::CliError;
use super::exit::Exit;
use super::options::seed;
use super::output::print_line;
use crate::prove::{Proved, prove, sweep};
use seamproof_judge::case::Case;
use seamproof_judge::prose::{self, counted};
use seamproof_oracle::{Problem, ProblemError, ProblemFields};
use seamproof_simulator::schedule::{BuildError, MergeOrder};

/// Default number of problems in a sweep.
const PROBLEMS: u64 = 30_400;

const EXAMPLES: &str = "\
Examples:
  seamproof prove case.json                       the schedule of a stored case
  seamproof prove corpus/regressions/*.json
  seamproof prove --region 4 case.json            the same inside a sequence-parallel region of 4 ranks
  seamproof prove --sweep                         every algorithm, cut and group size up to 16, regions and sub-groups
  seamproof prove --sweep --problems 3040 --seed 7";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Case files
    #[arg(value_name = "FILE", required_unless_present = "sweep", conflicts_with = "sweep")]
    files: Vec<PathBuf>,
    /// Ranks of a sequence-parallel region to put each rank of a case in, in place of the case's own
    #[arg(long, value_name = "RANKS", conflicts_with = "sweep")]
    region: Option<usize>,
    /// Prove every algorithm and cut over 1 to 16 ranks, on packs of the generator
    #[arg(long)]
    sweep: bool,
    /// Number of problems in the sweep
    #[arg(long, value_name = "N", default_value_t = PROBLEMS, requires = "sweep")]
    problems: u64,
    /// Seed of the sweep's packs
    #[arg(long, value_name = "S", value_parser = seed, default_value = "0", requires = "sweep")]
    seed: u64,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    if args.sweep { Ok(run_sweep(args.seed, args.problems)) } else { run_files(&args.files, args.region) }
}

fn run_files(files: &[PathBuf], region: Option<usize>) -> Result<Exit, CliError> {
    let mut exit = Exit::Held;
    for file in files {
        let case = Case::load(file)?;
        let problem = inside(&case.problem, region)
            .map_err(|error| CliError::Usage(format!("{}: --region: {error}", file.display())))?;
        let orders = MergeOrder::of(problem.parallel.algorithm);
        for &order in orders {
            let merges =
                if orders.len() > 1 { format!("{} merges · ", order.name()) } else { String::new() };
            let described = format!("{merges}{}", prose::describe(&problem));
            let proved = prove(&problem, order);
            if !print_proved(&file.display(), &proved, &described) {
                exit = Exit::Finding;
            } else if exit == Exit::Held && matches!(proved, Proved::Refused(BuildError::TooLarge { .. })) {
                exit = Exit::TooLittle;
            }
        }
    }
    Ok(exit)
}

/// Returns the problem in the region that is asked for, in the plain form and in one call.
fn inside(problem: &Problem, region: Option<usize>) -> Result<Problem, ProblemError> {
    let mut fields = ProblemFields::from(problem.clone());
    fields.parallel.region = region.unwrap_or(fields.parallel.region);
    Problem::new(fields.sayable())
}

/// Prints a case's line. Returns whether nothing is wrong with its schedule.
fn print_proved(name: &dyn Display, proved: &Proved, described: &str) -> bool {
    match proved {
        Proved::Held(proof) => {
            let (operations, pairs) = (counted(proof.operations, "operation"), counted(proof.pairs, "pair"));
            print_line(&format_args!("proved   {name} · {operations}, {pairs} · {described}"));
        }
        Proved::Planned(Ok(proof)) => {
            let (operations, pairs) = (counted(proof.operations, "operation"), counted(proof.pairs, "pair"));
            print_line(&format_args!("proved   {name} · as a plan · {operations}, {pairs} · {described}"));
        }
        Proved::Planned(Err(error)) => {
            print_line(&format_args!("WRONG    {name} · as a plan · {error} · {described}"));
        }
        Proved::Refused(error) => print_line(&format_args!("refused  {name} · {error} · {described}")),
        Proved::Wrong(errors) => {
            print_line(&format_args!("WRONG    {name} · {} · {described}", counted(errors.len(), "error")));
            errors.iter().for_each(|error| print_line(&format_args!("         {error}")));
        }
    }
    !matches!(proved, Proved::Wrong(_) | Proved::Planned(Err(_)))
}

fn run_sweep(seed: u64, problems: u64) -> Exit {
    let start = Instant::now();
    let sweep = sweep(seed, problems);
    for (problem, errors) in &sweep.wrong {
        let errors_told = counted(errors.len(), "error");
        print_line(&format_args!("WRONG    {errors_told} · {}", prose::describe(problem)));
        errors.iter().for_each(|error| print_line(&format_args!("         {error}")));
    }
    for (problem, error) in &sweep.unplanned {
        print_line(&format_args!("UNLIKE   its plan: {error} · {}", prose::describe(problem)));
    }
    let (proved, refused, seconds) = (sweep.proved, sweep.refused, start.elapsed().as_secs_f64());
    print_line(&format_args!(
        "sweep    seed {seed:#x} · proved {proved} ({} in regions, {} in sub-groups, {} beside another group; {} as plans too) · refused {refused} · wrong {} · {} operations · {} pairs · {seconds:.1} s",
        sweep.regions,
        sweep.sub_groups,
        sweep.beside,
        sweep.planned,
        sweep.wrong.len() + sweep.unplanned.len(),
        sweep.operations,
        sweep.pairs
    ));
    match (sweep.wrong.is_empty() && sweep.unplanned.is_empty(), proved) {
        (false, _) => Exit::Finding,
        (true, 0) => Exit::TooLittle,
        (true, _) => Exit::Held,
    }
}
