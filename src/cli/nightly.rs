//! `seamproof nightly`: a night of campaigns, and one report.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quick_junit::{TestCase, TestSuite};

use super::exit::Exit;
use super::junit::{of_regressions, of_summary, suite_of, test, time_of, write_suites};
use super::options::{duration, random_seed, seed};
use super::output::{note, print_line};
use super::{CliError, progress, worker};
use crate::campaign::{Registered, met};
use crate::nightly::{
    Known, Night, NightOutcome, Orders, Regressed, Report, ReportedFailure, Watch, regressions_of,
};
use crate::worker::own_program;

/// Subjects that are looked for where none is named.
const SUBJECTS: [&str; 2] = ["emulated", "cuda"];

const EXAMPLES: &str = "\
Examples:
  seamproof nightly --budget 30m --out nights     every subject that is there; nights/night-0001/report.md
  seamproof nightly --budget 8h --out nights --backend cuda --workers 8
                                                  fails where there is no GPU

A night that was killed is gone on with by the next start with the same --out, build and subjects: with its own seed, and until
the budget of that start is spent, what was spent before included. Any other start begins the next night, whose report tells
what the killed one found. docs/nightly.md tells how to set one up.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Time of all campaigns together
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Duration,
    /// Directory of all nights
    #[arg(long, value_name = "DIR", default_value = "nights")]
    out: PathBuf,
    /// Subjects, which must be there; emulated, and cuda where there is a GPU, if not given
    #[arg(long, value_name = "NAME", value_delimiter = ';')]
    backend: Vec<String>,
    /// Directory of regressions/ and known.toml
    #[arg(long, value_name = "DIR", default_value = "corpus")]
    corpus: PathBuf,
    /// Seed of all cases: a number, 0x and hex digits, or a whole commit hash; random if not given
    #[arg(long, value_name = "S", value_parser = seed)]
    seed: Option<u64>,
    /// Threads; all cores if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    // Before anything is run or written.
    let regressions = regressions_of(&args.corpus)?;
    let known = Known::read(&args.corpus.join("known.toml")).map_err(crate::nightly::NightError::from)?;
    let Found { there: subjects, absent } = found(&args.backend)?;
    let orders = Orders {
        program: env!("CARGO_PKG_VERSION").to_owned(),
        build: build(),
        seed: args.seed.unwrap_or_else(random_seed),
        seconds: args.budget.as_secs_f64(),
        subjects,
        absent,
    };
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.map_or_else(cores, |jobs| jobs as usize);
    let (night, said) = Night::begin(&args.out, orders, jobs)?;
    let watch = Arc::new(Watch::default());
    stop_on_signal(&watch)?;
    print_line(&format_args!("{said}: seed {:#x}, {}", night.orders.seed, night.dir().display()));
    if let Some(seed) = args.seed.filter(|seed| *seed != night.orders.seed) {
        print_line(&format_args!(
            "--seed {seed:#x} is not taken: the night keeps the seed that it was begun with"
        ));
    }
    let outcome = progress::of_night(&watch, |say| night.run(&regressions, &watch, say))?;
    let Some(outcome) = outcome else {
        print_line("interrupted: the next start goes on with it");
        return Ok(Exit::TooLittle);
    };
    let report = night.report(&outcome, &known)?;
    write_suites(&night.dir().join("junit.xml"), suites(&outcome, &report))?;
    night.end(&report)?;
    print_line(&report);
    Ok(exit(&report))
}

/// The subjects that were looked for.
#[derive(Default)]
struct Found {
    there: Vec<String>,
    /// The others, and why.
    absent: Vec<(String, String)>,
}

/// The subjects that are there, and why others are not. One that was named must be.
fn found(named: &[String]) -> Result<Found, CliError> {
    let mut found = Found::default();
    let wanted: Vec<&str> = match named {
        [] => SUBJECTS.to_vec(),
        named => named.iter().map(String::as_str).collect(),
    };
    let is_twice = |(at, name): &(usize, &&str)| wanted[..*at].contains(name);
    if let Some((_, twice)) = wanted.iter().enumerate().find(is_twice) {
        return Err(CliError::Usage(format!("--backend names {twice} twice")));
    }
    for name in wanted {
        match Registered::new(name)?.ready() {
            Ok(()) => found.there.push(name.to_owned()),
            Err(what) if !named.is_empty() => {
                return Err(CliError::Start { name: name.to_owned(), what });
            }
            Err(what) => found.absent.push((name.to_owned(), what.replace('\n', "; "))),
        }
    }
    Ok(found)
}

/// What tells this program from every other build; empty where it cannot read itself.
fn build() -> String {
    let program = std::fs::read(own_program());
    program.map_or(String::new(), |bytes| blake3::hash(&bytes).to_hex()[..16].to_owned())
}

/// Ends the night after the cases in flight at the first signal, and the program at the second.
fn stop_on_signal(watch: &Arc<Watch>) -> Result<(), CliError> {
    let watch = Arc::clone(watch);
    Ok(ctrlc::set_handler(move || {
        if watch.stop() {
            std::process::exit(Exit::Internal.code().into());
        }
        note("stopping after the cases in flight; once more to stop at once");
    })?)
}

/// A suite for the night, one for the regressions of each subject, one for each campaign.
fn suites(outcome: &NightOutcome, report: &Report) -> Vec<TestSuite> {
    let missed = outcome.canary.finding.is_none().then(|| ("missed", outcome.canary.to_string()));
    let mut night = vec![test("canary", missed, String::new())];
    let stale: Vec<String> = report.stale().map(|(key, what)| format!("{key}: {what}")).collect();
    let outdated = (!stale.is_empty()).then(|| ("stale", stale.join("; ")));
    night.push(test("known failures are true", outdated, String::new()));
    let news = |failure: &&ReportedFailure| failure.known.is_none();
    night.extend(report.failures.iter().filter(news).map(|failure| of_failure(&failure.key, failure)));
    let is_known = |key: &str| report.lists(key);
    for left in &report.left {
        let name = |key: &str| format!("night {}, left behind: {key}", left.night);
        night.extend(
            left.findings.iter().filter(news).map(|failure| of_failure(&name(&failure.key), failure)),
        );
        for Regressed { file, key, finding, replay, .. } in
            left.regressions.iter().filter(|r| !is_known(&r.key))
        {
            let details = format!("{key}\nreplay: {replay}");
            night.push(test(&name(file), Some(("finding", finding.clone())), details));
        }
    }
    let regressions = outcome.regressions.iter().map(|all| {
        let name = format!("{} regressions", all.subject);
        suite_of(&name, of_regressions(all, &is_known), Duration::ZERO)
    });
    let campaigns = outcome.campaigns.iter().map(|campaign| {
        let name = format!("{} {}", campaign.subject, campaign.profile);
        suite_of(
            &name,
            of_summary(&campaign.summary, &|key| is_known(&key.to_string())),
            time_of(&campaign.summary),
        )
    });
    std::iter::once(suite_of("night", night, Duration::ZERO)).chain(regressions).chain(campaigns).collect()
}

/// A failure as a test case.
fn of_failure(name: &str, failure: &ReportedFailure) -> TestCase {
    let ReportedFailure { problem, finding, replay, .. } = failure;
    let met = met(failure.cases, failure.shrunk);
    let details = format!("{met}\n{problem}\n{finding}\nreplay: {replay}");
    test(name, Some(("finding", finding.clone())), details)
}

/// News before everything, then what makes a night doubtful. Known failures are none of it.
fn exit(report: &Report) -> Exit {
    if report.canary.is_none() {
        Exit::CanaryMissed
    } else if report.has_news(false) {
        Exit::Finding
    } else if report.has_news(true) {
        Exit::Crash
    } else if report.stale().next().is_some() {
        Exit::Input
    } else if !report.internal.is_empty() {
        Exit::Internal
    } else if report.missed.is_empty() {
        Exit::Held
    } else {
        Exit::TooLittle
    }
}
