//! `seamproof try`: judges one case that the options describe.

use std::path::PathBuf;

use super::exit::Exit;
use super::output::{note, print_line};
use super::replay::Tally;
use super::{CliError, tell_if_long, worker};
use crate::backends::BackendError;
use crate::geometry::Geometry;
use crate::record::write_whole;
use crate::replay::{replay_as, subject_of};
use seamproof_judge::case::Case;
use seamproof_judge::prose;
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;

/// Name of a case that is in no file.
const UNSAVED: &str = "this case";

const EXAMPLES: &str = "\
Examples:
  seamproof try --lengths 17,0,300 --padded 32,16,304 --heads 8/2 --dim 128 --window 3,0 --cp ring:4
  seamproof try --lengths 1x4096 --causal --bottom-right --backend window-off-by-one --out case.json
  seamproof try --lengths 3,5 --offsets 4,16 --rows 32 --format fp16 --forward";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    geometry: Geometry,
    /// Subject to judge
    #[arg(long, value_name = "NAME", default_value = "emulated")]
    backend: String,
    /// Seed of what a schedule leaves open
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    schedule_seed: u64,
    /// Store the case, so that shrink, explain and replay take it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    let subject: SubjectName = args.backend.parse().map_err(BackendError::from)?;
    let problem_of =
        |geometry: &Geometry| geometry.problem().map_err(|error| CliError::Usage(error.to_string()));
    // Wrong options are told before a worker starts.
    let mut case = Case::new(subject.into(), args.schedule_seed, problem_of(&args.geometry)?);
    let file = args.out.as_ref().map_or(UNSAVED.into(), |path| path.display().to_string());
    let failed = |source| CliError::Replay { file: file.clone(), source };
    let backend = subject_of(&case).map_err(failed)?;
    case.problem = problem_of(&args.geometry.for_table(&backend.declaration().table))?;
    if let Some(path) = &args.out {
        write_whole(path, &case.to_json())?;
    }
    tell_if_long(file.as_ref(), &case.problem);
    let verdict = replay_as(&case, backend.as_ref(), &case.problem).map_err(failed)?;
    if let Verdict::TooLarge(what) = verdict {
        return Err(CliError::TooLarge { file, what });
    }
    let mut tally = Tally::default();
    print_line(&tally.line(&file, &prose::describe(&case.problem), &verdict));
    if let (Verdict::Finding(_), None) = (&verdict, &args.out) {
        note(&"store it with --out FILE to shrink and explain it");
    }
    Ok(tally.exit())
}
