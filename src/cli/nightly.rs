//! `seamproof nightly`: a night of campaigns, and one report.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quick_junit::TestSuite;
use rayon::prelude::*;

use super::exit::Exit;
use super::junit::{
    of_canary, of_failure, of_left, of_regressions, of_summary, suite_of, test, time_of, write_suites,
};
use super::options::{duration, random_seed, seed};
use super::output::print_line;
use super::run::stop_or_end;
use super::{CliError, progress, worker};
use crate::campaign::Registered;
use crate::nightly::{Known, Night, Orders, Report, Watch, outside_of, regressions_of};
use crate::worker::{is_lacking, shared};

/// Subjects that a night looks for where none is named.
const SUBJECTS: [&str; 2] = ["emulated", "cuda"];

const EXAMPLES: &str = "\
Examples:
  seamproof nightly --budget 30m --out nights     every subject that is there; nights/night-0001/report.md
  seamproof nightly --budget 8h --out nights --backend cuda --workers 8
                                                  fails where there is no GPU

Every start begins the next night. Its report also names what nights that were killed found. A budget of four minutes
or more for each subject has room for large cases. docs/nightly.md tells how to set up nights.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Time of all campaigns together; the canary and the stored cases come on top
    #[arg(long, value_name = "TIME", value_parser = duration)]
    budget: Duration,
    /// Directory of all nights
    #[arg(long, value_name = "DIR", default_value = "nights")]
    out: PathBuf,
    /// Subjects, which must be there [default: emulated, and cuda where there is a GPU]
    #[arg(long, value_name = "NAME", value_delimiter = ';')]
    backend: Vec<String>,
    /// Looks for the kernels of others too that outside.toml of the corpus lists, and skips those that are not
    /// installed
    #[arg(long, conflicts_with = "backend")]
    outside: bool,
    /// Directory of regressions/, known.toml and outside.toml
    #[arg(long, value_name = "DIR", default_value = "corpus")]
    corpus: PathBuf,
    /// Seed of all cases: a number, 0x and hex digits, or a whole commit hash [default: random]
    #[arg(long, value_name = "S", value_parser = seed)]
    seed: Option<u64>,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    // Everything that is read is read before anything is run or written.
    let stored = regressions_of(&args.corpus)?;
    let known = Known::read(&args.corpus.join("known.toml"))?;
    let others = if args.outside { outside_of(&args.corpus.join("outside.toml"))? } else { Vec::new() };
    let (subjects, absent) = subjects(&args.backend, &others)?;
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let orders = Orders {
        seed: args.seed.unwrap_or_else(random_seed),
        seconds: args.budget.as_secs_f64(),
        subjects,
        absent,
        jobs: args.jobs.map_or_else(cores, |jobs| jobs as usize),
    };
    let seed = orders.seed;
    let night = Night::begin(&args.out, orders)?;
    let watch = Arc::new(Watch::default());
    stop_on_signal(&watch)?;
    print_line(&format_args!("{}: seed {seed:#x}", night.dir().display()));
    let report = progress::of_night(&watch, |say| night.run(&stored, &known, &watch, say))?;
    let Some(mut report) = report else {
        print_line("too little run: interrupted before the canary was found");
        return Ok(Exit::TooLittle);
    };
    night.tell(&mut report)?;
    write_suites(&night.dir().join("junit.xml"), suites(&report))?;
    night.end(&report)?;
    print_line(&report);
    Ok(exit(&report))
}

/// Subjects, each with a reason.
type Absent = Vec<(String, String)>;

/// Returns the subjects that are there, and why others are not. One that was named must be. Where none was, `others`
/// are looked for beside this project's own.
fn subjects(named: &[String], others: &[String]) -> Result<(Vec<String>, Absent), CliError> {
    let wanted: Vec<&str> = match named {
        [] => SUBJECTS.into_iter().chain(others.iter().map(String::as_str)).collect(),
        named => named.iter().map(String::as_str).collect(),
    };
    if let Some(name) =
        wanted.iter().enumerate().find_map(|(at, name)| wanted[..at].contains(name).then_some(name))
    {
        return Err(CliError::Usage(format!("{name} is named twice")));
    }
    let (mut there, mut absent) = (Vec::new(), Vec::new());
    for (name, opens) in wanted.iter().copied().zip(opened(&wanted)) {
        if opens {
            there.push(name.to_owned());
            continue;
        }
        let ready = match Registered::new(name) {
            Err(error) if !named.is_empty() => return Err(error.into()),
            subject => subject.map_err(|error| error.to_string()).and_then(|subject| subject.ready()),
        };
        // An adapter with a fault is no library that is not installed.
        let may_lack = |what: &str| named.is_empty() && (SUBJECTS.contains(&name) || is_lacking(what));
        match ready {
            Ok(()) => there.push(name.to_owned()),
            Err(what) if !may_lack(&what) => {
                return Err(CliError::Start { name: name.to_owned(), what });
            }
            Err(what) => {
                absent.push((name.to_owned(), what.replace('\n', "; ")));
                // It has used up the seats of the next subject's workers.
                shared().restore();
            }
        }
    }
    Ok((there, absent))
}

/// Returns of each subject whether it opens. Several are tried at a time, as each takes seconds. One that does not open
/// may take a worker's place from another one, so that those which fail are to be asked again, one by one.
fn opened(subjects: &[&str]) -> Vec<bool> {
    let opens = |name: &&str| Registered::new(name).is_ok_and(|subject| subject.ready().is_ok());
    let opened = subjects.par_iter().map(opens).collect();
    shared().restore();
    opened
}

/// Ends the night after the cases in flight at the first signal, and the program at the second.
fn stop_on_signal(watch: &Arc<Watch>) -> Result<(), CliError> {
    let watch = Arc::clone(watch);
    Ok(ctrlc::set_handler(move || {
        let was_stopped = watch.stop();
        stop_or_end(was_stopped, || ());
    })?)
}

/// Returns a suite for the night, one for the regressions of each subject, and one for each campaign.
fn suites(report: &Report) -> Vec<TestSuite> {
    let stale = report.stale();
    let stale = (!stale.is_empty()).then(|| ("stale", stale.join("; ")));
    let mut night = vec![of_canary(&report.canary), test("known failures are true", stale, String::new())];
    let news = report.failures.iter().filter(|failure| failure.known.is_none());
    night.extend(news.map(|failure| of_failure(&failure.key, failure)));
    night.extend(report.left.iter().map(of_left));
    let regressions = report
        .regressions
        .iter()
        .map(|all| suite_of(&format!("{} regressions", all.subject), of_regressions(all), Duration::ZERO));
    let campaigns = report.campaigns.iter().map(|campaign| {
        let tests = of_summary(&campaign.summary, &|distinct| report.is_known(distinct));
        let name = format!("{} {}", campaign.subject, campaign.profile);
        suite_of(&name, tests, time_of(&campaign.summary))
    });
    std::iter::once(suite_of("night", night, Duration::ZERO)).chain(regressions).chain(campaigns).collect()
}

/// Returns how the program ends: news before everything, then what makes a night doubtful. Known failures are neither.
fn exit(report: &Report) -> Exit {
    if !report.canary.permits() {
        Exit::CanaryMissed
    } else if report.has_news(false) {
        Exit::Finding
    } else if report.has_news(true) {
        Exit::Crash
    } else if !report.stale().is_empty() {
        Exit::Input
    } else if !report.internal.is_empty() {
        Exit::Internal
    } else if report.canary.finding.is_none() {
        Exit::CanaryMissed
    } else if report.missed.is_empty() {
        Exit::Held
    } else {
        Exit::TooLittle
    }
}
