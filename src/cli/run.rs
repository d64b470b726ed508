//! `seamproof run`: a campaign.

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::exit::Exit;
use super::open::open_page;
use super::options::{BesideOptions, positive_duration, random_seed, seed};
use super::output::{complain, leave_stdout, note, print_line, print_report};
use super::{CliError, junit, progress, worker};
use crate::backends::Identity;
use crate::campaign::{
    self, Canary, Control, Event, Line, Logs, MergeError, Observer, Part, Plan, Registered, Shard, Silent,
    Sinks, Start, Subjects, Summary, Tone,
};
use crate::look::report_page;
use crate::paste::{report_command, typed};
use crate::record::{DEFAULT_DIR, EVENTS, EventLog, RecordError, RunDir, clash, write_whole};
use crate::report;
use crate::worker::{abandon_all, is_abandoned};
use seamproof_judge::evaluate::caught;
use seamproof_judge::generate::Profile;
use seamproof_judge::prose::counted;

/// Time of a campaign that neither cases nor time limit.
const DEFAULT_TIME: Duration = Duration::from_secs(60);
/// Time after the first signal in which workers may finish what they run.
const IN_FLIGHT: Duration = Duration::from_secs(3);
/// Most threads that may be asked for.
const JOBS_MAX: u32 = 1024;

const EXAMPLES: &str = "\
Examples:
  seamproof run                                   a minute of small cases
  seamproof run --cases 20000 --seed 0x2a         the same 20000 cases, always
  seamproof run --profile seams --time 10m        lengths around chunk and tile edges
  seamproof run --seed $(git rev-parse HEAD) --cases 20000 --shard 0/4
                                                  a quarter of a campaign that a commit names
  seamproof run --json events.jsonl --junit junit.xml
                                                  for machines (docs/events.md)";

#[derive(clap::Args, Debug, Default)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The subject [default: emulated]. NAME:OPTION=VALUE,… fixes options that are otherwise drawn for each case
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    #[command(flatten)]
    beside: BesideOptions,
    /// End after this many cases (of all shards together). A thousand meet the floors of the census with any
    /// seed; fewer may not, and then the exit code is 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    cases: Option<u64>,
    /// End after this long, the search for the canary included [default: 60s, without --cases]. Cases in flight
    /// are finished, and none begins that the time left clearly cannot hold. Ends early where each of the first
    /// 200 judged cases failed, the last 100 of them in no new way. Shrinking what was found may go on for as long
    /// as the cases had (10s to 2m), and scripts of findings in a Python file come behind that (up to 3m)
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    time: Option<Duration>,
    /// Seed of all cases: a number, 0x and hex digits, or a whole commit hash [default: random]
    #[arg(long, value_name = "S", value_parser = seed)]
    seed: Option<u64>,
    /// Run only the cases whose index is I modulo N. Floors of the census that a share may miss by chance are left to
    /// `seamproof merge`
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Sizes of the cases [default: quick]
    #[arg(long, value_name = "quick|seams|large")]
    profile: Option<Profile>,
    /// Write events as JSON lines; - is standard output, and text for people then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a JUnit report at the end; - is standard output, as with --json
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Directory of findings [default: seamproof.out]. That of an earlier campaign is renamed to DIR.1, DIR.2, …
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with this same campaign where it was cut off in the directory; else begin it. It is an error if the
    /// subject or this program is not what it was
    #[arg(long, requires_all = ["cases", "seed"], conflicts_with = "time")]
    resume: bool,
    /// Most findings of a subject in a Python file for which a script is written, after the last case
    #[arg(long, value_name = "N", default_value_t = campaign::SCRIPTS_MAX)]
    scripts: usize,
    /// Show how many cases of each class of problems were drawn
    #[arg(long)]
    census: bool,
    /// Open the report in a browser where something was found
    #[arg(long)]
    open: bool,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(JOBS_MAX)))]
    jobs: Option<u32>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

impl Args {
    fn plan(&self) -> Plan {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        Plan {
            seed: self.seed.unwrap_or_else(random_seed),
            profile: self.profile.unwrap_or(Profile::Quick),
            cases: self.cases,
            time: self.time.or(self.cases.is_none().then_some(DEFAULT_TIME)),
            shard: self.shard.unwrap_or(Shard::WHOLE),
            jobs: self.jobs.map_or_else(cores, |jobs| jobs as usize),
        }
    }
}

/// Runs the default campaign, and then the same on the GPU where there is one that this project's kernels run on.
pub(super) fn run_all() -> Result<Exit, CliError> {
    let control = stopped_by_signals()?;
    let exit = run_until(&Args::default(), &control)?;
    if control.stopped() {
        return Ok(exit);
    }
    print_line("");
    let on_gpu = Args {
        backend: Some(GPU_BACKEND.to_owned()),
        out: Some(format!("{DEFAULT_DIR}.{GPU_BACKEND}").into()),
        ..Args::default()
    };
    match run_until(&on_gpu, &control.sibling()) {
        Err(CliError::Start { what, .. }) => {
            print_line(&format_args!("gpu       not used: {what}"));
            Ok(exit)
        }
        second if exit == Exit::Held => second,
        second => {
            // What was found first stays found.
            if let Err(error) = second {
                complain(&error);
            }
            Ok(exit)
        }
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    leave_stdout(args.json.as_deref(), args.junit.as_deref())?;
    args.workers.configure();
    run_until(args, &*stopped_by_signals()?)
}

/// Time after which waiting for a subject is told.
const SILENCE: Duration = Duration::from_secs(5);

/// Waits for a subject, and says so where that takes long: a kernel that hangs in a worker's first run would be silent
/// for two deadlines.
fn told_if_slow<T>(ready: impl FnOnce() -> T) -> T {
    let (ended, end) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if end.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                note("waiting   for the subject's first run, in a worker: if it hangs, --deadline ends it, twice");
            }
        });
        let ready = ready();
        drop(ended);
        ready
    })
}

fn run_until(args: &Args, control: &Control) -> Result<Exit, CliError> {
    let subjects = Registered::new(args.backend.as_deref().unwrap_or(DEFAULT_BACKEND))?;
    let subjects = subjects.among(|options| args.beside.among(options))?;
    if let Err(what) = told_if_slow(|| subjects.ready()) {
        if control.stopped() {
            verdict(Tone::Doubt, "too little run: interrupted before the subject was ready");
            return Ok(Exit::TooLittle);
        }
        return Err(CliError::Start { name: subjects.name().to_owned(), what });
    }
    let plan = args.plan();
    let out = args.out.as_deref().unwrap_or(Path::new(DEFAULT_DIR));
    let (json, junit) = (args.json.as_deref(), args.junit.as_deref());
    apart(out, json, junit)?;
    let start = Start::of(&plan, subjects.name(), subjects.fixed());
    // What the clock has cut does not go on as if it had not been.
    let identity = if plan.time.is_none() { Some(subjects.identity()?) } else { None };
    let earlier = match identity.as_ref().filter(|_| args.resume) {
        Some(identity) => cut_off(out, &start, identity)?,
        None => None,
    };
    let (dir, part, logs, report) = match earlier {
        Some((dir, part)) => {
            let (logs, report) = opened_again(&dir, part.events, json, junit)?;
            (dir, Some(part), logs, report)
        }
        None => {
            let (dir, logs, report) = opened(out, json, junit)?;
            (dir, None, logs, report)
        }
    };
    let logs = Logs::new(logs, control);
    let logs = match &identity {
        Some(identity) => logs.checking_in(&dir, &start, identity),
        None => logs,
    };
    if part.is_none() {
        logs.event(&Event::Start(&start));
    }
    if let Some(error) = logs.trouble() {
        return Err(error.into());
    }
    announce(&start, &dir);
    let mut outcome = campaign(&plan, &subjects, &dir, &logs, (control, part.as_ref()))?;
    scripts(&mut outcome, &dir, &logs, control, args.scripts)?;
    let exit = conclude(&dir, &start, &outcome, &logs);
    tell_report(&dir, &outcome, args.open);
    if let Some(summary) = outcome.summary.as_ref().filter(|_| args.census) {
        print_line(&summary.census);
    }
    let written = report.map_or(Ok(()), |report| {
        report.write(subjects.name(), &outcome.canary, outcome.summary.as_ref(), &[])
    });
    Ok(recorded(exit, written))
}

/// Returns the directory of this campaign and the cases that it tells of, where it was cut off there. With another
/// subject of the same name it is an error: whoever asks to go on does not expect it to begin anew.
fn cut_off(out: &Path, start: &Start, identity: &Identity) -> Result<Option<(RunDir, Part)>, CliError> {
    let Some(dir) = RunDir::reopen(out)? else { return Ok(None) };
    match Part::cut_off(&dir, start, identity) {
        Ok(part) => {
            let cases = counted(part.stored.sums.cases, "case");
            note(&format_args!("{}: going on after {cases}", out.display()));
            Ok(Some((dir, part)))
        }
        Err(why @ MergeError::OtherSubject { .. }) => Err(why.into()),
        Err(why) => {
            note(&format_args!("{why}; the campaign begins anew"));
            Ok(None)
        }
    }
}

/// Opens the event logs of a campaign that goes on behind so many bytes of its log, and makes the report of its end. A
/// log in a second place tells of the earlier cases too. Where one of them cannot be made, nothing is cut.
fn opened_again(
    dir: &RunDir,
    events: u64,
    json: Option<&Path>,
    junit: Option<&Path>,
) -> Result<(Vec<EventLog>, Option<junit::JunitFile>), CliError> {
    let mut second = json.map(EventLog::create).transpose()?;
    let report = junit.map(junit::JunitFile::create).transpose()?;
    dir.cut(events)?;
    if let Some(log) = &mut second {
        log.copy(&dir.path().join(EVENTS))?;
    }
    Ok((iter::once(dir.further_events()?).chain(second).collect(), report))
}

/// Makes a campaign's directory, its event logs, and the report of its end. Where one of them cannot be made, an
/// earlier campaign's directory keeps its name.
pub(super) fn opened(
    out: &Path,
    json: Option<&Path>,
    junit: Option<&Path>,
) -> Result<(RunDir, Vec<EventLog>, Option<junit::JunitFile>), CliError> {
    let dir = RunDir::create(out)?;
    let files = || -> Result<_, CliError> {
        let logs = iter::once(dir.events()).chain(json.map(EventLog::create));
        Ok((logs.collect::<Result<_, _>>()?, junit.map(junit::JunitFile::create).transpose()?))
    };
    match files() {
        Ok((logs, report)) => Ok((dir, logs, report)),
        Err(error) => {
            dir.abandon();
            Err(error)
        }
    }
}

/// Refuses files that would overwrite each other, or one of the campaign's own.
pub(super) fn apart(dir: &Path, json: Option<&Path>, junit: Option<&Path>) -> Result<(), CliError> {
    match clash(dir, &[("--json", json), ("--junit", junit)]) {
        Some((option, of)) => Err(CliError::Usage(format!("{option} names {of}; name another file"))),
        None => Ok(()),
    }
}

/// Subject of a campaign that names none.
const DEFAULT_BACKEND: &str = "emulated";
/// Subject that needs a GPU.
const GPU_BACKEND: &str = "cuda";

/// Result of a campaign and its canary.
pub(super) struct RunOutcome {
    pub(super) canary: Canary,
    /// `None` where the canary was missed, or the search for it was stopped.
    pub(super) summary: Option<Summary>,
    pub(super) interrupted: bool,
}

fn campaign(
    plan: &Plan,
    subjects: &Registered,
    dir: &RunDir,
    logs: &Logs,
    (control, earlier): (&Control, Option<&Part>),
) -> Result<RunOutcome, CliError> {
    let begun = Instant::now();
    // Of a campaign that goes on the log has told how the search ended.
    let told: &dyn Observer = if earlier.is_some() { &Silent } else { logs };
    let canary = look_for_canary(plan, subjects, dir, told, control)?;
    let findings = dir.findings()?;
    let sinks = Sinks { findings: &findings, observer: logs, control };
    let plan = plan.after_search(begun.elapsed(), !canary.own.is_empty());
    let run = || match earlier {
        Some(earlier) => campaign::go_on(&plan, subjects, &sinks, earlier),
        None => Ok(campaign::run(&plan, subjects, &sinks)),
    };
    let shown = || progress::shown(&plan, control, run);
    let mut summary = canary.permits().then(shown).transpose()?;
    summary.iter_mut().for_each(|summary| summary.heed(&canary));
    Ok(RunOutcome { canary, summary, interrupted: control.stopped() })
}

/// Writes the scripts of a campaign's findings.
pub(super) fn scripts(
    outcome: &mut RunOutcome,
    dir: &RunDir,
    logs: &Logs,
    control: &Control,
    most: usize,
) -> Result<(), CliError> {
    let Some(summary) = &mut outcome.summary else { return Ok(()) };
    let findings = dir.findings()?;
    let sinks = Sinks { findings: &findings, observer: logs, control };
    campaign::write_scripts(summary, &sinks, most, &|_| true, &|number, of| {
        note(&format_args!("progress scripts of findings: {number} of {of}"));
    });
    Ok(())
}

/// Looks for the planted fault, and tells everybody who listens how that ended.
pub(super) fn look_for_canary(
    plan: &Plan,
    subjects: &Registered,
    dir: &RunDir,
    observer: &dyn Observer,
    control: &Control,
) -> Result<Canary, CliError> {
    let begun = Instant::now();
    // Its cases are not the campaign's.
    let looking = control.sibling();
    let found_in = dir.canary()?;
    let canary = progress::of_canary(&looking, || -> Result<Canary, CliError> {
        let wrong = subjects.canary(plan)?;
        let found = wrong.map(|wrong| campaign::canary(plan, &wrong, &found_in, &looking));
        Ok(found.unwrap_or_default())
    })?;
    observer.event(&Event::Canary(&canary));
    let tone = match (&canary.finding, &canary.not_told) {
        (Some(_), _) => Tone::Plain,
        (None, Some(_)) => Tone::Doubt,
        (None, None) => Tone::Bad,
    };
    // Whoever stops the search has not shown that there is nothing to find.
    if canary.permits() || !control.stopped() {
        let text = format!("{canary} · {:.1} s", begun.elapsed().as_secs_f64());
        print_report(&[Line { tone, text }]);
    }
    Ok(canary)
}

/// Tells everybody who listens how the campaign ended.
pub(super) fn conclude(dir: &RunDir, start: &Start, outcome: &RunOutcome, logs: &Logs) -> Exit {
    let written = campaign::conclude(dir, start, &outcome.canary, outcome.summary.as_ref(), logs);
    // What a run that nobody waits for says is no fault.
    let is_cut_off = outcome.interrupted && is_abandoned();
    let exit = match &outcome.summary {
        Some(summary) => {
            print_report(&summary.lines());
            Exit::of(summary)
        }
        None if !is_cut_off && !outcome.canary.infrastructure.is_empty() => {
            outcome.canary.infrastructure.iter().for_each(complain);
            verdict(Tone::Doubt, "a fault of this program: the canary could not be looked for");
            Exit::Internal
        }
        None if outcome.interrupted => {
            verdict(Tone::Doubt, "too little run: interrupted before the canary was found");
            Exit::TooLittle
        }
        None => {
            verdict(Tone::Bad, "canary missed: the campaign was not begun, as it would prove nothing");
            Exit::CanaryMissed
        }
    };
    recorded(exit, written)
}

/// Name of the page of what a campaign found, in its folder.
const PAGE: &str = "report.html";

/// Writes the page of what was found into the campaign's folder, prints its path, and opens it where that is asked.
/// Where it cannot be written, the command that shows it is printed: what was found stays found.
pub(super) fn tell_report(dir: &RunDir, outcome: &RunOutcome, opens: bool) {
    if outcome.summary.as_ref().is_none_or(|summary| summary.distinct.is_empty()) {
        return;
    }
    let path = dir.path().join(PAGE);
    let page = || Ok(write_whole(&path, &report_page(&report::read(dir.path())?))?);
    match caught(page).unwrap_or_else(|what| Err(CliError::Usage(what))) {
        Ok(()) => {
            print_line(&format_args!("report    {}", path.display()));
            if opens {
                open_page(&path);
            }
        }
        Err(why) => {
            note(&format_args!("the report is not written: {why}"));
            print_line(&format_args!("report    {}", typed(&report_command(dir.path()))));
        }
    }
}

/// Prints the verdict of a campaign that did not begin.
fn verdict(tone: Tone, text: &str) {
    print_report(&[Line::new(tone, "verdict", text)]);
}

/// Returns how the program ends where something may not have been recorded: what was found stays found.
pub(super) fn recorded(exit: Exit, written: Result<(), RecordError>) -> Exit {
    let Err(error) = written else { return exit };
    complain(&error);
    if matches!(exit, Exit::Finding | Exit::Crash) { exit } else { Exit::Input }
}

/// Says what is about to be run.
pub(super) fn announce(start: &Start, dir: &RunDir) {
    let cases = start.cases.map_or("no limit".to_owned(), |cases| cases.to_string());
    let seconds = start.seconds.map_or("no limit".to_owned(), |seconds| format!("{seconds} s"));
    let lines = [
        ("seed", start.seed.clone()),
        ("backend", format!("{} · profile {}", start.subject(), start.profile)),
        ("limits", format!("cases {cases} · time {seconds} · shard {}", start.shard)),
        ("threads", format!("{} · findings go to {}", start.jobs, dir.path().display())),
    ];
    print_report(&lines.map(|(label, text)| Line::new(Tone::Plain, label, text)));
}

/// Returns a control that ends a campaign with its summary at the first signal, and the program at the second, since a
/// subject may hang.
pub(super) fn stopped_by_signals() -> Result<Arc<Control>, CliError> {
    let control = Arc::new(Control::default());
    let told = Arc::clone(&control);
    ctrlc::set_handler(move || stop_or_end(told.stopped(), || told.stop()))?;
    Ok(control)
}

/// Has the program stop at the first signal, and ends it at the second.
pub(super) fn stop_or_end(is_second: bool, stop: impl FnOnce()) {
    if is_second {
        abandon_all();
        std::process::exit(Exit::Internal.code().into());
    }
    stop();
    note("stopping after the cases in flight; once more to stop at once");
    std::thread::spawn(|| {
        std::thread::sleep(IN_FLIGHT);
        abandon_all();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test that a full disk, or a report that cannot be written, does not turn a finding into an input error.
    #[test]
    fn what_cannot_be_recorded_hides_no_finding() {
        let full = || RecordError::TooManyEarlier { path: "out".into() };
        for (exit, expected) in [
            (Exit::Finding, Exit::Finding),
            (Exit::Crash, Exit::Crash),
            (Exit::Held, Exit::Input),
            (Exit::TooLittle, Exit::Input),
        ] {
            assert_eq!(recorded(exit, Err(full())), expected);
            assert_eq!(recorded(exit, Ok(())), exit);
        }
    }
}
