//! `seamproof serve`: a campaign whose subject is in the process that started this program (`docs/protocol.md`, "Turned
//! round").

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::CliError;
use super::exit::Exit;
use super::options::{positive_duration, random_seed, seed};
use super::output::note;
use super::run::stopped_by_signals;
use crate::backends::{Called, WronglyCalled};
use crate::campaign::{
    self, Canary, Control, Distinct, Event, Logs, Observer, Plan, Shard, Sinks, Start, Summary, Tone,
};
use crate::record::{RunDir, write_whole};
use crate::replay::run_earlier;
use crate::worker::{Caller, Deadlines, is_abandoned};
use seamproof_judge::case::{Case, Found};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::finding::Finding;
use seamproof_judge::generate::Profile;
use seamproof_judge::prose::{self, counted};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;

/// Time of a campaign that neither cases nor a budget limit.
const DEFAULT_TIME: Duration = Duration::from_secs(60);
/// Version of the summary's form.
const SUMMARY_VERSION: u32 = 1;
/// Time of a phase that nobody limits.
const NO_LIMIT: Duration = Duration::MAX;

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    /// Name of the subject in stored cases and reports
    #[arg(long, value_name = "NAME", default_value = "called")]
    name: String,
    /// No case begins after this long [default: 60s, without --cases]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    budget: Option<Duration>,
    /// End after this many cases
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    cases: Option<u64>,
    /// Seed of all cases [default: random]
    #[arg(long, value_name = "S", value_parser = seed)]
    seed: Option<u64>,
    /// Sizes of the cases
    #[arg(long, value_name = "quick|seams|large", default_value = "quick")]
    profile: Profile,
    /// Directory of findings [default: none is kept]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Judge this stored case instead of drawing any
    #[arg(long, value_name = "FILE", conflicts_with_all = ["budget", "cases", "seed", "profile", "out"])]
    replay: Vec<PathBuf>,
    /// File of the summary
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
    /// File of the text for people [default: standard error]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Longest time for each phase of a run [default: none]
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    deadline: Option<Duration>,
}

impl Args {
    fn plan(&self) -> Plan {
        Plan {
            seed: self.seed.unwrap_or_else(random_seed),
            profile: self.profile,
            cases: self.cases,
            time: self.budget.or(self.cases.is_none().then_some(DEFAULT_TIME)),
            shard: Shard::WHOLE,
            // The runs are made one after the other. While one is, other threads judge those before it.
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Summary as it is written.
#[derive(Debug, Serialize)]
struct Told {
    version: u32,
    outcome: &'static str,
    exit: u8,
    seed: String,
    #[serde(flatten)]
    found: Outcome,
    ended: Option<String>,
    declared: Value,
    versions: BTreeMap<String, String>,
    text: String,
}

/// One failure, with its smallest case.
#[derive(Debug, Serialize)]
struct ToldFinding {
    what: String,
    problem: String,
    key: String,
    seen: u64,
    minimal: bool,
    file: Option<PathBuf>,
    replay: Option<String>,
    case: Value,
}

/// Everything that a campaign or a replay found out.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    #[serde(skip)]
    exit: Option<Exit>,
    #[serde(skip)]
    seed: u64,
    cases: u64,
    held: u64,
    refused: BTreeMap<String, u64>,
    malformed: u64,
    failed: u64,
    findings: Vec<ToldFinding>,
    missed: Vec<String>,
    trouble: Vec<String>,
    #[serde(skip)]
    lines: Vec<String>,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    // What cannot be read or written is told before the caller is asked anything.
    let cases = args.replay.iter().map(|file| Case::load(file)).collect::<Result<Vec<_>, _>>()?;
    let control = stopped_by_signals()?;
    let deadlines = match args.deadline {
        Some(time) => Deadlines::new(time, time),
        None => Deadlines::new(NO_LIMIT, NO_LIMIT),
    };
    let caller = Caller::connect(deadlines).map_err(CliError::Pipes)?;
    let stop = Arc::clone(&control);
    let called = match Called::open(&args.name, caller, Box::new(move || stop.stop())) {
        Ok(called) => called,
        Err(what) => {
            return tell(args, None, Outcome { exit: Some(Exit::Input), ..Outcome::of_error(&what) });
        }
    };
    let outcome = match cases.is_empty() {
        true => drawn(args, &called, &control)?,
        false => replayed(args, &called, &cases),
    };
    // The pipe ends with the subject, after the summary is there.
    tell(args, Some(&called), outcome)
}

/// Runs a campaign.
fn drawn(args: &Args, called: &Called, control: &Control) -> Result<Outcome, CliError> {
    let plan = args.plan();
    let place = match &args.out {
        Some(_) => None,
        None => Some(tempfile::tempdir().map_err(CliError::Pipes)?),
    };
    let dir = match (&args.out, &place) {
        (Some(out), _) => RunDir::create(out)?,
        (None, Some(place)) => RunDir::create(&place.path().join("run"))?,
        (None, None) => return Err(CliError::Usage("there is no place for findings".into())),
    };
    let start = Start::of(&plan, &args.name, &BTreeMap::new());
    let logs = Logs::new(vec![dir.events()?], control);
    logs.event(&Event::Start(&start));
    let (findings, canaries) = (dir.findings()?, dir.canary()?);
    let wrong = campaign::wrong_call(&plan, &called)?.map(|call| WronglyCalled::of(called, call));
    let begun = Instant::now();
    let found = wrong.map(|wrong| campaign::canary(&plan, &wrong, &canaries, &control.sibling()));
    let canary = found.unwrap_or_default();
    logs.event(&Event::Canary(&canary));
    if let (Some(_), Some(own)) = (called.ended(), canary.own.last()) {
        // Nothing is left to run the campaign on. What ended the process is all that is known of it.
        let findings = vec![of_distinct(args, own, &|name| canaries.path(name))];
        let lines = vec![canary.to_string()];
        let exit = if own.key.check.is_end() { Exit::Crash } else { Exit::Finding };
        return Ok(Outcome {
            exit: Some(exit),
            seed: plan.seed,
            failed: 1,
            findings,
            lines,
            ..Outcome::default()
        });
    }
    let sinks = Sinks { findings: &findings, observer: &logs, control };
    let plan = plan.after_search(begun.elapsed(), !canary.own.is_empty());
    let mut summary = canary.permits().then(|| campaign::run(&plan, &called, &sinks));
    summary.iter_mut().for_each(|summary| summary.heed(&canary));
    let written = campaign::conclude(&dir, &start, &canary, summary.as_ref(), &logs);
    let mut outcome = match &summary {
        Some(summary) => of_summary(args, summary, &|name| findings.path(name)),
        None => of_canary(&canary, control.stopped()),
    };
    let own = summary.iter().flat_map(|summary| &summary.own);
    outcome.findings.extend(own.map(|own| of_distinct(args, own, &|name| canaries.path(name))));
    outcome.seed = plan.seed;
    outcome.lines.insert(0, canary.to_string());
    outcome.trouble.extend(written.err().map(|error| error.to_string()));
    Ok(outcome)
}

fn of_summary(args: &Args, summary: &Summary, path: &dyn Fn(&str) -> PathBuf) -> Outcome {
    Outcome {
        exit: Some(Exit::of(summary)),
        cases: summary.cases,
        held: summary.held,
        refused: summary.refused.clone(),
        malformed: summary.malformed.values().sum(),
        failed: summary.failed_count(),
        findings: summary.distinct.iter().map(|distinct| of_distinct(args, distinct, path)).collect(),
        missed: summary.missed.clone(),
        trouble: summary.infrastructure.iter().chain(&summary.void).cloned().collect(),
        lines: told_lines(args, summary),
        ..Outcome::default()
    }
}

/// Whether a shell can judge a stored case of the subject again.
fn replays(args: &Args) -> bool {
    args.out.is_some() && SubjectName::from(args.name.as_str()).is_outside()
}

/// Returns the report's lines, without commands that would not find the subject or the case.
fn told_lines(args: &Args, summary: &Summary) -> Vec<String> {
    let lines = summary.lines().into_iter().filter(|line| line.tone != Tone::Command || replays(args));
    lines.map(|line| line.text).collect()
}

fn of_distinct(args: &Args, distinct: &Distinct, path: &dyn Fn(&str) -> PathBuf) -> ToldFinding {
    let file = distinct.name.as_deref().map(path);
    let case = file.as_deref().and_then(read);
    let kept = file.filter(|_| args.out.is_some());
    ToldFinding {
        what: distinct.found.to_string(),
        problem: distinct.problem.clone(),
        key: distinct.key.to_string(),
        seen: distinct.cases(),
        minimal: distinct.found.minimal,
        replay: (replays(args) && distinct.found.unconfirmed.is_none()).then(|| distinct.replay.clone()),
        file: kept,
        case: case.unwrap_or(Value::Null),
    }
}

/// Returns a stored case as JSON.
fn read(path: &Path) -> Option<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()
}

fn of_canary(canary: &Canary, was_stopped: bool) -> Outcome {
    let exit = match canary.infrastructure.is_empty() {
        // What a run that nobody waits for says is no fault.
        false if was_stopped && is_abandoned() => Exit::TooLittle,
        false => Exit::Internal,
        true if was_stopped => Exit::TooLittle,
        true => Exit::CanaryMissed,
    };
    let missed =
        if was_stopped { vec!["interrupted before the canary was found".to_owned()] } else { Vec::new() };
    Outcome { exit: Some(exit), missed, trouble: canary.infrastructure.clone(), ..Outcome::default() }
}

/// Judges stored cases.
fn replayed(args: &Args, called: &Called, cases: &[Case]) -> Outcome {
    let mut outcome = Outcome::default();
    for (file, case) in args.replay.iter().zip(cases) {
        case.before.iter().for_each(|earlier| run_earlier(called, &earlier.problem));
        outcome.cases += 1;
        let words = prose::describe(&case.problem);
        let verdict = evaluate(called, &case.problem);
        outcome.lines.push(format!("{} · {verdict} · {words}", file.display()));
        match verdict {
            Verdict::Pass(_) => outcome.held += 1,
            Verdict::Refused(refusal) => *outcome.refused.entry(refusal.row().to_owned()).or_default() += 1,
            Verdict::Finding(finding) => outcome.found(args, file, case, *finding),
            Verdict::RefusedMalformed(rule) => outcome.trouble.push(format!("refused as malformed: {rule}")),
            Verdict::TooLarge(what) | Verdict::Infrastructure(what) => outcome.trouble.push(what),
        }
    }
    outcome.exit = outcome.exit.or(Some(match (outcome.trouble.is_empty(), outcome.held) {
        (false, _) => Exit::Internal,
        (true, 0) => Exit::TooLittle,
        _ => Exit::Held,
    }));
    outcome
}

impl Outcome {
    /// Returns what is told of an error before anything was run.
    fn of_error(what: &str) -> Outcome {
        Outcome { trouble: vec![what.to_owned()], lines: vec![what.to_owned()], ..Outcome::default() }
    }

    /// Adds the finding in a stored case.
    fn found(&mut self, args: &Args, file: &Path, case: &Case, finding: Finding) {
        self.failed += 1;
        let is_end = finding.check.is_end();
        self.exit = if is_end { self.exit.or(Some(Exit::Crash)) } else { Some(Exit::Finding) };
        let key = FailureKey::of(&finding, &args.name, &case.problem).to_string();
        let found = Found::drawn(finding.storable());
        let told = Case { found: Some(found.clone()), ..case.clone() };
        self.findings.push(ToldFinding {
            what: found.to_string(),
            problem: prose::describe(&case.problem),
            key,
            seen: 1,
            minimal: case.found.as_ref().is_some_and(|found| found.minimal),
            file: Some(file.to_owned()),
            replay: None,
            case: serde_json::from_str(&told.to_json()).unwrap_or(Value::Null),
        });
    }
}

/// Writes the summary and the text for people.
fn tell(args: &Args, called: Option<&Called>, mut outcome: Outcome) -> Result<Exit, CliError> {
    let exit = outcome.exit.unwrap_or(Exit::Internal);
    let ended = called.and_then(Called::ended);
    let mut lines = std::mem::take(&mut outcome.lines);
    lines.extend(ended.iter().map(|how| format!("the calling process ended the campaign: {how}")));
    lines.push(format!("{}: {} after {}", args.name, outcome_of(exit), counted(outcome.cases, "case")));
    let text = lines.join("\n") + "\n";
    let ready = called.map(Called::ready).cloned().unwrap_or_default();
    let told = Told {
        version: SUMMARY_VERSION,
        outcome: outcome_of(exit),
        exit: exit.code(),
        seed: format!("{:#x}", outcome.seed),
        found: outcome,
        ended,
        declared: called
            .map_or(Value::Null, |called| serde_json::to_value(called.declaration()).unwrap_or(Value::Null)),
        versions: ready.versions,
        text: text.clone(),
    };
    let json = serde_json::to_string_pretty(&told).map_err(|error| CliError::Pipes(error.into()))?;
    match &args.text {
        Some(file) => write_whole(file, &text)?,
        None => lines.iter().for_each(note),
    }
    write_whole(&args.json, &(json + "\n"))?;
    Ok(exit)
}

/// Returns the word for an exit code.
fn outcome_of(exit: Exit) -> &'static str {
    match exit {
        Exit::Held => "held",
        Exit::Input => "input",
        Exit::Finding => "finding",
        Exit::Crash => "crash",
        Exit::TooLittle => "too-little-run",
        Exit::CanaryMissed => "canary-missed",
        Exit::Internal | Exit::Worker(_) => "internal",
    }
}
