//! `seamproof judge-recording`: judges a run that was recorded.

use std::fs;
use std::path::{Path, PathBuf};

use super::exit::Exit;
use super::output::print_line;
use super::replay::Tally;
use super::{CliError, tell_if_long};
use crate::backends::by_name;
use crate::paste;
use crate::record::write_whole;
use crate::recording::{self, Profiled, ROWS_MAX, Recording, RecordingError, Sample};
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;

const EXAMPLES: &str = "\
Examples:
  seamproof judge-recording run                   what a recorder or `seamproof record` wrote
  seamproof judge-recording run --rows 512        some rows of a long recording
  seamproof judge-recording run --out case.json   and a finding as a case, for replay and explain
  seamproof judge-recording run --profile cuda    of a run of this subject: its roundings too
  seamproof judge-recording run --live live.json  and its problem as a case that runs: replay, shrink";

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
    /// Store a finding as a case in this file, beside the recording, so that replay and explain take it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What ran, by the name of a subject here: its locked profile joins the judgement (tier R)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["rows", "out"])]
    profile: Option<String>,
    /// Store the recording's problem with drawn values, on the emulated kernel, as a case that can be run and shrunk
    #[arg(long, value_name = "FILE")]
    live: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    if let Some(out) = &args.out {
        check_beside(out, &args.dir)?;
    }
    let recording = recording::read(&args.dir)?;
    let (manifest, problem) = (&recording.manifest, &recording.problem);
    let sample = args.rows.map(|rows| Sample { rows, seed: args.seed });
    let profiled = args.profile.as_deref().map(|name| profiled(&recording, name)).transpose()?;
    if sample.is_none() {
        tell_if_long(&args.dir, problem);
    }
    let (subject, ranks) = (&manifest.subject.name, counted(manifest.ranks.len() as u64, "rank"));
    print_line(&format_args!("subject  {subject} · {ranks} · run {}", manifest.run));
    let verdict = recording::judge(&recording, sample, profiled.as_ref())?;
    if let Verdict::TooLarge(what) = verdict {
        return Err(CliError::TooLarge { file: args.dir.display().to_string(), what });
    }
    let mut tally = Tally::default();
    print_line(&tally.line(&args.dir.display(), &prose::describe_recorded(problem), &verdict));
    let margin = if let Verdict::Pass(margin) = &verdict { Some(margin.as_ref()) } else { None };
    if let Some(margin) = margin {
        print_line(&format_args!(
            "asked    {}",
            recording::asked(&recording, sample, profiled.as_ref(), margin)
        ));
    }
    print_line(&format_args!("left out {}", recording::left_out(&recording, sample, margin)));
    if args.live.is_some() || matches!(verdict, Verdict::Finding(_)) {
        print_line(&format_args!("live     {}", live(args, &recording)?));
    }
    if let (Some(out), Verdict::Finding(finding)) = (&args.out, &verdict) {
        let case = recording::case_of(&recording, sample, (**finding).clone())?;
        write_whole(out, &case.to_json()).map_err(RecordingError::from)?;
        print_line(&format_args!("case     {}", out.display()));
    }
    Ok(tally.exit())
}

/// Returns how the subject of this name computed a recording.
fn profiled(recording: &Recording, name: &str) -> Result<Profiled, CliError> {
    let wrong = |why: String| CliError::Usage(format!("--profile: {why}"));
    let named: SubjectName = name.parse().map_err(|why| wrong(format!("{why}")))?;
    let subject = by_name(&named.name(), &named.options).map_err(|why| wrong(why.to_string()))?;
    recording::profiled(recording, subject.as_ref()).map_err(|why| wrong(why.to_string()))
}

/// Stores the nearest live case where that was asked for. Returns how it is run, or why there is none, in words.
fn live(args: &Args, recording: &Recording) -> Result<String, CliError> {
    let case = match recording::live_case(recording) {
        Ok(case) => case,
        Err(why) => return Ok(format!("none: {why}")),
    };
    let command = match &args.live {
        Some(file) => {
            write_whole(file, &case.to_json()).map_err(RecordingError::from)?;
            paste::replay_command(file, None)
        }
        None => match paste::try_command(&case) {
            Some(command) => command,
            None => return Ok("the same problem with drawn values: --live FILE stores it as a case".into()),
        },
    };
    Ok(format!(
        "the same problem with drawn values; --backend names another subject: {}",
        paste::typed(&command)
    ))
}

/// Refuses a file that would not lie beside the recording. Inside of it a file would spoil the recording.
fn check_beside(out: &Path, dir: &Path) -> Result<(), CliError> {
    let Ok(dir) = fs::canonicalize(dir) else { return Ok(()) };
    let parent = out.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    if fs::canonicalize(parent).ok().as_deref() == dir.parent() {
        return Ok(());
    }
    let (out, dir) = (out.display(), dir.display());
    Err(CliError::Usage(format!("--out: {out} does not lie beside {dir}; a case names its recording there")))
}
