//! `seamproof merge`: joins the shards of a campaign.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::exit::Exit;
use super::output::complain;
use super::run::{Outcome, announce, conclude, stop_on_signal};
use super::{CliError, junit, worker};
use crate::campaign::{
    self, Control, Event, Logs, MergeError, Observer, Part, Plan, Registered, Shard, Sinks, Start,
};
use crate::record::{DEFAULT_DIR, EventLog, RunDir};

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
    let parts = read(&args.shards)?;
    let Some((start, missing)) = campaign::campaign_of(&parts)? else {
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
    Ok(exit)
}

/// The parts that have ended; what has not is said, and is missing.
fn read(dirs: &[PathBuf]) -> Result<Vec<Part>, CliError> {
    let mut parts = Vec::new();
    for dir in dirs {
        match Part::read(dir) {
            Ok(part) => parts.push(part),
            Err(error @ MergeError::NotEnded { .. }) => {
                complain(&format_args!("{error}; nothing of it is counted, its findings stay there"));
            }
            // A machine that was lost leaves nothing at all.
            Err(error @ MergeError::Missing { .. }) => {
                complain(&format_args!("{error}; its shard is missing, unless another name was meant"));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(parts)
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
        super::output::print_line(&canary);
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
