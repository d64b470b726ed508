//! `seamproof explain`: shows a case as text.

use std::path::PathBuf;

use clap::ValueEnum;
use seamproof_oracle::Pass;

use super::exit::Exit;
use super::output::print;
use super::{CliError, load, recorded_beside};
use crate::explain::{self, Selection, explain};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::Emulated;

const EXAMPLES: &str = "\
Examples:
  seamproof explain case.json                          layout, launches, which keys each query is asked to see, and where that is wrong
  seamproof explain case.json --rank 1 --pass backward
  seamproof explain case.json --operations             merges, messages, collectives and copies too";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Case file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Show only this rank, counted by its place in the group
    #[arg(long, value_name = "R")]
    rank: Option<usize>,
    /// Show only this pass
    #[arg(long, value_name = "PASS")]
    pass: Option<PassName>,
    /// Show every operation, one line each
    #[arg(long)]
    operations: bool,
    /// Show the schedule of this subject instead of the case's own
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
}

/// Name of a pass on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PassName {
    Forward,
    Backward,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let (case, backend) = match recorded_beside(&args.file)? {
        // What ran is over, and this project's own schedule stands in for its.
        Some((case, _)) => (case, Box::new(Emulated::default()) as Box<dyn Backend>),
        None => load(&args.file, args.backend.as_deref())?,
    };
    let (problem, file) = (&case.problem, args.file.display());
    let ranks = problem.parallel.size();
    if let Some(rank) = args.rank.filter(|rank| *rank >= ranks) {
        return Err(CliError::Usage(format!("--rank is {rank}; the group has ranks 0 to {}", ranks - 1)));
    }
    let pass = args.pass.map(|name| if name == PassName::Forward { Pass::Forward } else { Pass::Backward });
    if pass == Some(Pass::Backward) && problem.pass == Pass::Forward {
        return Err(CliError::Usage(format!("{file}: --pass backward: the case has no backward pass")));
    }
    let schedule = backend.schedule(problem);
    let schedule = schedule.map_err(|error| CliError::Usage(format!("{file}: no schedule: {error}")))?;
    let options = Selection { rank: args.rank, pass, operations: args.operations };
    let head = explain::subject(&case, args.backend.is_some());
    let others = explain::other_runs(&case, backend.as_ref(), &options);
    print(&(head + &explain(problem, &schedule, &options) + &others));
    Ok(Exit::Held)
}
