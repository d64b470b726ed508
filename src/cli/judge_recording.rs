//! `seamproof judge-recording`: judges a run that was recorded.

use std::path::PathBuf;

use super::exit::Exit;
use super::output::print_line;
use super::replay::Tally;
use super::{CliError, tell_if_long};
use crate::recording;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::verdict::Verdict;

const EXAMPLES: &str = "\
Examples:
  seamproof judge-recording run                   what a recorder or `seamproof record` wrote";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The recording
    dir: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let recording = recording::read(&args.dir)?;
    let (manifest, problem) = (&recording.manifest, &recording.problem);
    tell_if_long(&args.dir, problem);
    let (subject, ranks) = (&manifest.subject.name, counted(manifest.ranks.len() as u64, "rank"));
    print_line(&format_args!("subject  {subject} · {ranks} · run {}", manifest.run));
    let verdict = recording::judge(&recording);
    if let Verdict::TooLarge(what) = verdict {
        return Err(CliError::TooLarge { file: args.dir.display().to_string(), what });
    }
    let mut tally = Tally::default();
    print_line(&tally.line(&args.dir.display(), &prose::describe_recorded(problem), &verdict));
    if let Verdict::Pass(margin) = &verdict {
        print_line(&format_args!("asked    {}", recording::asked(&recording, margin)));
    }
    print_line(&format_args!("left out {}", recording::NOT_ASKED));
    Ok(tally.exit())
}
