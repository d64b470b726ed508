//! `seamproof merge`: joins the shards of a campaign.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::exit::Exit;
use super::output::{complain, leave_stdout, print_line};
use super::run::{RunOutcome, announce, conclude, opened, recorded, stopped_by_signals};
use super::{CliError, junit, worker};
use crate::campaign::{
    self, Control, Event, LeftFinding, Logs, MergeError, Observer, Part, Plan, Registered, Shard, Sinks,
    Start,
};
use crate::paste::{replay_command, typed};
use crate::record::{DEFAULT_DIR, EventLog, FINDINGS, RunDir, SUMS};
use seamproof_judge::prose::counted;

/// Findings of a shard that did not end are named up to this many times; the rest is counted.
const LEFT_SHOWN_MAX: usize = 8;

const EXAMPLES: &str = "\
Examples:
  seamproof merge shard-0 shard-1 shard-2 shard-3 --out whole --junit junit.xml
                                                  what `run --shard 0/4 --out shard-0` and its siblings left

The result is that of `run` without --shard, but for its times. A failing case that the whole campaign would have shrunk
and its shard did not is shrunk here, which needs the subject. A shard that did not end, or whose files are torn, is missing
(exit code 4); what it found is told, in the events and the JUnit report too, and is a finding (2, or 3).";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Directories of shards, as `run --out` wrote them
    #[arg(required = true, value_name = "DIR")]
    shards: Vec<PathBuf>,
    /// Directory of the whole, seamproof.out if not given; that of an earlier campaign is renamed to DIR.1, DIR.2, …
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
    let (parts, unended) = read(&args.shards);
    let left: Vec<LeftFinding> = unended.iter().flat_map(|shard| campaign::left_in(shard.dir)).collect();
    show(&left);
    match (merged(args, out, &parts, &unended, &left), exit_of(&left)) {
        // What proves nothing finds nothing: the canary stays before all else.
        (Ok(Exit::CanaryMissed), _) => Ok(Exit::CanaryMissed),
        (Ok(exit), left) => Ok(left.map_or(exit, |left| worse(exit, left))),
        // What was found stays found, whatever is in the way of joining the others.
        (Err(error), Some(exit)) => {
            complain(&error);
            Ok(exit)
        }
        (Err(error), None) => Err(error),
    }
}

/// Joins the parts into a directory, and tells what others found beside them.
fn merged(
    args: &Args,
    out: &Path,
    parts: &[Part],
    unended: &[Unended],
    left: &[LeftFinding],
) -> Result<Exit, CliError> {
    let Some((start, missing)) = campaign::campaign_of(parts)? else { return Err(none_ended(args, left)) };
    let subjects = Registered::with(start.backend.clone(), start.options.clone())?;
    let plan = plan_of(&start, &parts[0].dir)?;
    let (dir, logs, report) = opened(out, args.json.as_deref(), args.junit.as_deref())?;
    let control = stopped_by_signals()?;
    let logs = Logs::new(logs, &control);
    logs.event(&Event::Start(&start));
    left.iter().for_each(|left| logs.event(&Event::Left(left)));
    announce(&start, &dir);
    let joined = Joined { plan: &plan, subjects: &subjects, parts, missed: missed(&missing, unended, left) };
    let outcome = joined.outcome(&dir, &logs, &control)?;
    let exit = conclude(&dir, &start, &outcome, &logs);
    let written = report.map_or(Ok(()), |report| report.write(&start.backend, &outcome, left));
    Ok(recorded(exit, written))
}

/// Where no shard has ended there is nothing to join, which is an error; what was found is told to whoever asked for it.
fn none_ended(args: &Args, left: &[LeftFinding]) -> CliError {
    let names: Vec<String> = args.shards.iter().map(|dir| dir.display().to_string()).collect();
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

/// How findings that no sum counts end the program. Whatever is no crash for sure is a finding.
fn exit_of(left: &[LeftFinding]) -> Option<Exit> {
    let exit = |left: &LeftFinding| if left.is_end() { Exit::Crash } else { Exit::Finding };
    left.iter().map(exit).reduce(worse)
}

/// The one of two ends that outweighs the other: a finding, a crash, whatever there is.
fn worse(one: Exit, other: Exit) -> Exit {
    let weight = |exit: Exit| match exit {
        Exit::Finding => 2,
        Exit::Crash => 1,
        _ => 0,
    };
    if weight(other) > weight(one) { other } else { one }
}

/// Names what shards found that did not end, of each the first ones.
fn show(left: &[LeftFinding]) {
    for of_shard in left.chunk_by(|one, other| one.shard == other.shard) {
        of_shard.iter().take(LEFT_SHOWN_MAX).for_each(print_line);
        if let Some(others) = of_shard.len().checked_sub(LEFT_SHOWN_MAX).filter(|&others| others > 0) {
            let replay = typed(&replay_command(&Path::new(&of_shard[0].shard).join(FINDINGS), None));
            print_line(&format_args!("          and {}: {replay}", counted(others as u64, "other finding")));
        }
    }
}

/// The directory of a shard that is not joined, and why.
struct Unended<'a> {
    dir: &'a Path,
    why: MergeError,
}

/// The parts that have ended, and others that are there, each once; what has not ended, or cannot be read, is said.
fn read(dirs: &[PathBuf]) -> (Vec<Part>, Vec<Unended<'_>>) {
    let (mut parts, mut unended, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
    for dir in dirs {
        match Part::read_whole(dir) {
            Ok(part) => parts.push(part),
            // A machine that was lost leaves nothing at all.
            Err(why @ (MergeError::Missing { .. } | MergeError::NoDirectory { .. })) => {
                complain(&format_args!("{why}; its shard is missing, unless another name was meant"));
            }
            Err(why) => {
                complain(&format_args!(
                    "{why}; nothing of {} is counted, what it found is told and stays there",
                    dir.display()
                ));
                if seen.insert(dir.canonicalize().unwrap_or_else(|_| dir.clone())) {
                    unended.push(Unended { dir, why });
                }
            }
        }
    }
    (parts, unended)
}

/// What of the campaign is not there, in words.
fn missed(missing: &[Shard], unended: &[Unended], left: &[LeftFinding]) -> Vec<String> {
    let missing = missing.iter().map(|shard| format!("shard {shard} is missing"));
    let is_torn = |shard: &&Unended| !matches!(shard.why, MergeError::NotEnded { .. });
    let torn = unended.iter().filter(is_torn).map(|shard| format!("not counted: {}", shard.why));
    let told = counted(left.len() as u64, "finding");
    let left = (!left.is_empty()).then(|| format!("not counted: {told} of shards that did not end"));
    missing.chain(torn).chain(left).collect()
}

/// The plan of the whole as one of its parts has it, with the threads of this machine.
fn plan_of(start: &Start, part: &Path) -> Result<Plan, CliError> {
    let wrong = |what: String| CliError::Usage(format!("{}: {what}", part.join(SUMS).display()));
    Ok(Plan {
        seed: super::options::seed(&start.seed).map_err(wrong)?,
        profile: start.profile.parse().map_err(|error| wrong(format!("{error}")))?,
        first: start.first,
        cases: start.cases,
        time: start.seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        shard: Shard::WHOLE,
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
    })
}

/// A campaign in parts.
struct Joined<'a> {
    plan: &'a Plan,
    subjects: &'a Registered,
    parts: &'a [Part],
    /// What of it is not there.
    missed: Vec<String>,
}

impl Joined<'_> {
    /// The canary is looked for again: it is the same for every part, and says that this program is theirs.
    fn outcome(self, dir: &RunDir, logs: &Logs, control: &Control) -> Result<RunOutcome, CliError> {
        let canary = campaign::canary(self.plan, &dir.canary()?, control);
        logs.event(&Event::Canary(&canary));
        print_line(&canary);
        if canary.finding.is_none() {
            return Ok(RunOutcome { canary, summary: None, interrupted: control.stopped() });
        }
        let seconds = self.parts.iter().map(|part| part.stored.sums.seconds).fold(0.0, f64::max);
        let elapsed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let findings = dir.findings()?;
        let sinks = Sinks { findings: &findings, observer: logs, control };
        let summary = campaign::merge(self.plan, self.subjects, self.parts, (elapsed, self.missed), &sinks)?;
        Ok(RunOutcome { canary, summary: Some(summary), interrupted: control.stopped() })
    }
}
