//! `seamproof judge-recording`: judges a run that was recorded.

use std::path::PathBuf;

use super::exit::Exit;
use super::output::print_line;
use super::replay::Tally;
use super::{CliError, tell_if_long};
use crate::recording::{self, Sample};
use seamproof_judge::prose::{self, counted};
use seamproof_judge::verdict::Verdict;

const EXAMPLES: &str = "\
Examples:
  seamproof judge-recording run                   what a recorder or `seamproof record` wrote
  seamproof judge-recording run --rows 512        some rows of a long recording";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The recording
    dir: PathBuf,
    /// Judge this many drawn rows of q and of k, and all at borders of sequences and ranks, in place of every row
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ROWS_MAX))]
    rows: Option<u64>,
    /// Seed of the draw of rows
    #[arg(long, value_name = "SEED", requires = "rows", default_value_t = 0)]
    seed: u64,
}

/// Largest number of rows that can be asked for: as many as a tensor can have.
const ROWS_MAX: u64 = seamproof_oracle::limits::ROWS_MAX as u64;

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let recording = recording::read(&args.dir)?;
    let (manifest, problem) = (&recording.manifest, &recording.problem);
    let sample = args.rows.map(|rows| Sample { rows, seed: args.seed });
    if sample.is_none() {
        tell_if_long(&args.dir, problem);
    }
    let (subject, ranks) = (&manifest.subject.name, counted(manifest.ranks.len() as u64, "rank"));
    print_line(&format_args!("subject  {subject} · {ranks} · run {}", manifest.run));
    let verdict = recording::judge(&recording, sample)?;
    if let Verdict::TooLarge(what) = verdict {
        return Err(CliError::TooLarge { file: args.dir.display().to_string(), what });
    }
    let mut tally = Tally::default();
    print_line(&tally.line(&args.dir.display(), &prose::describe_recorded(problem), &verdict));
    if let Verdict::Pass(margin) = &verdict {
        print_line(&format_args!("asked    {}", recording::asked(&recording, sample, margin)));
    }
    print_line(&format_args!("left out {}", recording::NOT_ASKED));
    Ok(tally.exit())
}
