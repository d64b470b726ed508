//! `seamproof merge`: joins the shards of a campaign.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::exit::Exit;
use super::output::{complain, print_line};
use super::run::{Outcome, announce, conclude, stop_on_signal};
use super::{CliError, junit, worker};
use crate::campaign::{
    self, Control, Event, Logs, MergeError, Observer, Part, Plan, Registered, Shard, Sinks, Start,
};
use crate::case::Case;
use crate::files;
use crate::prose::{self, counted, replay_command};
use crate::record::{DEFAULT_DIR, EventLog, FINDINGS, RunDir};

/// Findings of a shard that did not end are named up to this many times; the rest is counted.
const LEFT_SHOWN_MAX: usize = 8;

const EXAMPLES: &str = "\
Examples:
  seamproof merge shard-0 shard-1 shard-2 shard-3 --out whole --junit junit.xml
                                                  what `run --shard 0/4 --out shard-0` and its siblings left

The result is that of `run` without --shard, but for its times. A failing case that the whole campaign would have shrunk
and its shard did not is shrunk here, which needs the subject.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Directories of shards, as `run --out` wrote them
    #[arg(required = true, value_name = "DIR")]
    shards: Vec<PathBuf>,
    /// Directory of the whole, seamproof.out if not given; that of an earlier campaign is renamed to DIR.1, DIR.2, …
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write events as JSON lines
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    workers: worker::Options,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
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
    let (parts, unfinished) = read(&args.shards)?;
    let left = unfinished.iter().map(|dir| left_in(dir)).fold(None, worse);
    let Some((start, missing)) = campaign::campaign_of(&parts)? else {
        if let Some(exit) = left {
            return Ok(exit);
        }
        let names: Vec<String> = args.shards.iter().map(|dir| dir.display().to_string()).collect();
        return Err(CliError::Usage(format!("{}: no shard has ended, nothing to merge", names.join(", "))));
    };
    let subjects = Registered::with(start.backend.clone(), start.options.clone())?;
    let plan = plan_of(&start)?;
    let dir = RunDir::create(out)?;
    let logs = [Some(dir.events()?), args.json.as_deref().map(EventLog::create).transpose()?];
    let report = args.junit.as_deref().map(junit::Report::create).transpose()?;
    let control = Arc::new(Control::default());
    stop_on_signal(&control)?;
    let logs = Logs::new(logs.into_iter().flatten().collect(), &control);
    logs.event(&Event::Start(&start));
    announce(&start, &dir);
    let joined = Joined { plan: &plan, subjects: &subjects, parts: &parts, missing: &missing };
    let outcome = joined.outcome(&dir, &logs, &control)?;
    let exit = conclude(&dir, &start, &outcome, &logs);
    if let Some(report) = report {
        report.write(&start.backend, &outcome)?;
    }
    // What proves nothing finds nothing: the canary stays before all else.
    Ok(if exit == Exit::CanaryMissed { exit } else { worse(Some(exit), left).unwrap_or(exit) })
}

/// The one of two ends that outweighs the other: a finding, a crash, whatever there is.
fn worse(one: Option<Exit>, other: Option<Exit>) -> Option<Exit> {
    let weight = |exit: &Option<Exit>| match exit {
        Some(Exit::Finding) => 3,
        Some(Exit::Crash) => 2,
        Some(_) => 1,
        None => 0,
    };
    if weight(&other) > weight(&one) { other } else { one }
}

/// Names what a shard found that did not end, of which no sum tells; how that ends the program, if there is anything.
fn left_in(dir: &Path) -> Option<Exit> {
    let findings = match files::list(&dir.join(FINDINGS)) {
        Ok(findings) => findings,
        Err(error) => {
            complain(&format_args!("{}: cannot be read: {error}", dir.join(FINDINGS).display()));
            return Some(Exit::Finding);
        }
    };
    let cases: Vec<PathBuf> = findings.into_iter().filter(|path| files::is_json(path)).collect();
    // Whatever is no crash for sure is a finding.
    let mut exit = (!cases.is_empty()).then_some(Exit::Crash);
    for (number, path) in cases.iter().enumerate() {
        let case = Case::load(path);
        let found = case.as_ref().ok().and_then(|case| case.found.as_ref());
        if !found.is_some_and(|found| found.finding.check.is_end()) {
            exit = Some(Exit::Finding);
        }
        if number >= LEFT_SHOWN_MAX {
            continue;
        }
        match &case {
            Ok(Case { problem, .. }) => {
                let finding = found.map(|found| found.finding.to_string()).unwrap_or_default();
                print_line(&format_args!("FAIL      {}: {finding}", prose::describe(problem)));
            }
            Err(error) => print_line(&format_args!("FAIL      {error}")),
        }
        print_line(&format_args!("          replay: {}", replay_command(path, None)));
    }
    if cases.len() > LEFT_SHOWN_MAX {
        let (others, replay) = (cases.len() - LEFT_SHOWN_MAX, replay_command(dir, None));
        print_line(&format_args!("          and {}: {replay}", counted(others as u64, "other finding")));
    }
    exit
}

/// The parts that have ended, and the directories of others that are there; what has not ended is said, and is missing.
fn read(dirs: &[PathBuf]) -> Result<(Vec<Part>, Vec<&Path>), CliError> {
    let (mut parts, mut unfinished) = (Vec::new(), Vec::new());
    for dir in dirs {
        match Part::read(dir) {
            Ok(part) => parts.push(part),
            Err(error @ MergeError::NotEnded { .. }) => {
                complain(&format_args!(
                    "{error}; nothing of it is counted but its findings, which stay there"
                ));
                unfinished.push(dir.as_path());
            }
            // A machine that was lost leaves nothing at all.
            Err(error @ MergeError::Missing { .. }) => {
                complain(&format_args!("{error}; its shard is missing, unless another name was meant"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok((parts, unfinished))
}

/// The plan of the whole.
fn plan_of(start: &Start) -> Result<Plan, CliError> {
    let wrong = |what: String| CliError::Usage(format!("sums.json: {what}"));
    Ok(Plan {
        seed: super::options::seed(&start.seed).map_err(wrong)?,
        profile: start.profile.parse().map_err(|error| wrong(format!("{error}")))?,
        first: start.first,
        cases: start.cases,
        time: start.seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        shard: Shard::WHOLE,
        jobs: start.jobs,
    })
}

/// A campaign in parts.
struct Joined<'a> {
    plan: &'a Plan,
    subjects: &'a Registered,
    parts: &'a [Part],
    missing: &'a [Shard],
}

impl Joined<'_> {
    /// The canary is looked for again: it is the same for every part, and says that this program is theirs.
    fn outcome(&self, dir: &RunDir, logs: &Logs, control: &Control) -> Result<Outcome, CliError> {
        let canary = campaign::canary(self.plan, &dir.canary()?, control);
        logs.event(&Event::Canary(&canary));
        print_line(&canary);
        if canary.finding.is_none() {
            return Ok(Outcome { canary, summary: None, interrupted: control.stopped() });
        }
        let seconds = self.parts.iter().map(|part| part.stored.sums.seconds).fold(0.0, f64::max);
        let elapsed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let missed = self.missing.iter().map(|shard| format!("shard {shard} is missing")).collect();
        let findings = dir.findings()?;
        let sinks = Sinks { findings: &findings, observer: logs, control };
        let summary = campaign::merge(self.plan, self.subjects, self.parts, (elapsed, missed), &sinks)?;
        Ok(Outcome { canary, summary: Some(summary), interrupted: control.stopped() })
    }
}
