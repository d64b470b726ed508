//! `seamproof merge`: joins the shards of a campaign.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::exit::Exit;
use super::output::{complain, leave_stdout, print_line};
use super::run::{
    RunOutcome, announce, apart, conclude, look_for_canary, opened, recorded, scripts, stopped_by_signals,
    tell_report,
};
use super::{CliError, junit, worker};
use crate::campaign::{
    self, Event, Left, Logs, MergeError, Observer, OnDisk, Part, Plan, Registered, Shard, Sinks, Start,
};
use crate::paste::typed;
use crate::record::{DEFAULT_DIR, EventLog, SUMS};
use seamproof_judge::prose::counted;

/// Missing shards that are named; the others are counted.
const MISSING_SHOWN_MAX: usize = 8;

const EXAMPLES: &str = "\
Examples:
  seamproof merge shard-0 shard-1 shard-2 shard-3 --out whole --junit junit.xml
                                                  what `run --shard 0/4 --out shard-0` and its siblings left

The result is that of `run` without --shard, apart from its times. A failing case that the whole campaign would have
shrunk, and its shard did not, is shrunk here, which needs the subject. A shard that did not end, or whose files are torn,
is missing (exit code 4). What it found is told, in the events and the JUnit report too, and counts as a finding (2 or 3).";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Directories of shards, as `run --out` wrote them
    #[arg(required = true, value_name = "DIR")]
    shards: Vec<PathBuf>,
    /// Directory of the whole [default: seamproof.out]. That of an earlier campaign is renamed to DIR.1, DIR.2, …
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write events as JSON lines; - is standard output, and text for people then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a JUnit report; - is standard output, as with --json
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    leave_stdout(args.json.as_deref(), args.junit.as_deref())?;
    args.workers.configure();
    let out = args.out.as_deref().unwrap_or(Path::new(DEFAULT_DIR));
    let same = |dir: &PathBuf| {
        dir == out || dir.canonicalize().ok() == out.canonicalize().ok().or(Some(PathBuf::new()))
    };
    if let Some(dir) = args.shards.iter().find(|dir| same(dir)) {
        return Err(CliError::Usage(format!(
            "{}: is a shard; choose another directory with --out",
            dir.display()
        )));
    }
    open_many();
    let Shards { parts, left, torn } = read(&args.shards);
    for left in &left {
        print_line(&format_args!("FAIL      {left}\n          replay: {}", typed(&left.replay)));
    }
    match (merged(args, out, &parts, &left, torn), exit_of(&left)) {
        // What proves nothing finds nothing: a missed canary outweighs all else.
        (Ok(Exit::CanaryMissed), _) => Ok(Exit::CanaryMissed),
        (Ok(exit), left) => Ok(left.map_or(exit, |left| worse(exit, left))),
        // What was found stays found, whatever keeps the others from being joined.
        (Err(error), Some(exit)) => {
            complain(&error);
            Ok(exit)
        }
        (Err(error), None) => Err(error),
    }
}

/// What the shards left.
#[derive(Default)]
struct Shards {
    parts: Vec<Part>,
    /// Findings of those that are not joined.
    left: Vec<Left>,
    /// What was wrong with those of them that did end.
    torn: Vec<String>,
}

/// Reads the shards, and says which of them are not joined.
fn read(dirs: &[PathBuf]) -> Shards {
    let (mut shards, mut seen, mut missing) = (Shards::default(), BTreeSet::new(), 0_usize);
    for dir in dirs {
        match Part::read(dir) {
            Ok(part) => shards.parts.push(part),
            // A machine that was lost leaves nothing at all.
            Err(why @ (MergeError::Missing { .. } | MergeError::NoDirectory { .. })) => {
                missing += 1;
                if missing <= MISSING_SHOWN_MAX {
                    complain(&format_args!("{why}; its shard is missing, unless another name was meant"));
                }
            }
            Err(why) => {
                let what = "nothing of it is counted, and what it found is told and stays there";
                complain(&format_args!("{why}; {what}"));
                if seen.insert(dir.canonicalize().unwrap_or_else(|_| dir.clone())) {
                    let mut found = OnDisk::default();
                    found.add(dir);
                    shards.left.extend(Left::of(dir, found));
                    let has_ended = !matches!(why, MergeError::NotEnded { .. });
                    shards.torn.extend(has_ended.then(|| format!("not counted: {why}")));
                }
            }
        }
    }
    if let Some(more @ 1..) = missing.checked_sub(MISSING_SHOWN_MAX) {
        complain(&format_args!("… and {} missing", counted(more, "more shard")));
    }
    shards
}

/// Lets this process have as many files open as it may: the log of each shard is one.
fn open_many() {
    #[cfg(unix)]
    {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
    }
}

/// Joins the parts into a directory, and tells what others found beside them.
fn merged(
    args: &Args,
    out: &Path,
    parts: &[Part],
    left: &[Left],
    torn: Vec<String>,
) -> Result<Exit, CliError> {
    let Some((start, missing)) = campaign::campaign_of(parts)? else { return Err(none_ended(args, left)) };
    let subjects = Registered::with(start.backend.clone(), start.options.clone())?;
    let plan = plan_of(&start, &parts[0].dir)?;
    apart(out, args.json.as_deref(), args.junit.as_deref())?;
    let (dir, logs, report) = opened(out, args.json.as_deref(), args.junit.as_deref())?;
    let control = stopped_by_signals()?;
    let logs = Logs::new(logs, &control);
    logs.event(&Event::Start(&start));
    left.iter().for_each(|left| logs.event(&Event::Left(left)));
    announce(&start, &dir);
    // The canary is looked for again. It is the same for every part, and says that this program is theirs. The parts'
    // time is over, so no limit of theirs ends the search.
    let unlimited = Plan { time: None, ..plan.clone() };
    let canary = look_for_canary(&unlimited, &subjects, &dir, &logs, &control)?;
    let findings = dir.findings()?;
    let sinks = Sinks { findings: &findings, observer: &logs, control: &control };
    let missed = missing.iter().map(|shard| format!("shard {shard} is missing")).chain(torn);
    let told = counted(left.iter().map(Left::count).sum::<usize>() as u64, "finding");
    let told = (!left.is_empty()).then(|| format!("not counted: {told} of shards that did not end"));
    let missed = missed.chain(told).collect();
    let merge = || campaign::merge(&plan, &subjects, parts, missed, &sinks);
    let mut summary = canary.permits().then(merge).transpose()?;
    summary.iter_mut().for_each(|summary| summary.heed(&canary));
    let mut outcome = RunOutcome { canary, summary, interrupted: control.stopped() };
    scripts(&mut outcome, &dir, &logs, &control, campaign::SCRIPTS_MAX)?;
    let exit = conclude(&dir, &start, &outcome, &logs);
    tell_report(&dir, &outcome, false);
    let RunOutcome { canary, summary, .. } = &outcome;
    let written =
        report.map_or(Ok(()), |report| report.write(&start.backend, canary, summary.as_ref(), left));
    Ok(recorded(exit, written))
}

/// Returns the error of shards of which none has ended, after telling whoever asked what was found.
fn none_ended(args: &Args, left: &[Left]) -> CliError {
    let named = args.shards.iter().take(MISSING_SHOWN_MAX).map(|dir| dir.display().to_string());
    let mut names: Vec<String> = named.collect();
    if let Some(more @ 1..) = args.shards.len().checked_sub(MISSING_SHOWN_MAX) {
        names.push(format!("… and {}", counted(more, "other")));
    }
    let why = format!("{}: no shard has ended, nothing to merge", names.join(", "));
    let log = |path: &PathBuf| {
        let mut log = EventLog::create(path)?;
        left.iter().try_for_each(|left| log.write(&Event::Left(left)))
    };
    let report = |path: &PathBuf| junit::JunitFile::create(path)?.write_left(&why, left);
    let logged = args.json.as_ref().map_or(Ok(()), log);
    let reported = args.junit.as_ref().map_or(Ok(()), report);
    logged.and(reported).map_or_else(CliError::from, |()| CliError::Usage(why.clone()))
}

/// Returns how findings that no sum counts end the program. Whatever is not surely a crash is a finding.
fn exit_of(left: &[Left]) -> Option<Exit> {
    let exit = |left: &Left| if left.is_end() { Exit::Crash } else { Exit::Finding };
    left.iter().map(exit).reduce(worse)
}

/// Returns the one of two ends that outweighs the other: a finding, then a crash, then the first.
fn worse(one: Exit, other: Exit) -> Exit {
    let weight = |exit: Exit| match exit {
        Exit::Finding => 2,
        Exit::Crash => 1,
        _ => 0,
    };
    if weight(other) > weight(one) { other } else { one }
}

/// Returns the plan of the whole, as one of its parts has it, with the threads of this machine.
fn plan_of(start: &Start, part: &Path) -> Result<Plan, CliError> {
    let wrong = |what: String| CliError::Usage(format!("{}: {what}", part.join(SUMS).display()));
    Ok(Plan {
        seed: super::options::seed(&start.seed).map_err(wrong)?,
        profile: start.profile.parse().map_err(|error| wrong(format!("{error}")))?,
        cases: start.cases,
        time: start.seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        shard: Shard::WHOLE,
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
    })
}
