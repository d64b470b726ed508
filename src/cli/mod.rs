//! The command line.
//!
//! One module for each command; [`exit`] holds the exit codes, [`output`] everything that is printed. Results go to
//! stdout, progress and errors to stderr; an error is one line. A reader that goes away (a broken pipe) is no error. A
//! file that grows past the limit of its size (`ulimit -f`) is one: the write fails, and no signal ends the program.

mod bench;
mod calibrate;
mod census;
mod exit;
mod explain;
mod faults;
mod forwards;
mod inputs;
mod judge_recording;
mod junit;
mod kernels;
mod large;
mod merge;
mod nightly;
mod open;
mod options;
mod output;
mod progress;
mod prove;
mod quantise;
mod record;
mod replay;
mod report;
mod run;
mod serve;
mod shrink;
mod tried;
mod values;
mod worker;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use seamproof_oracle::Problem;

use crate::backends::BackendError;
use crate::nightly::found_by;
use crate::record::{RecordError, findings_of};
use crate::recording::{self, Recording};
use crate::replay::{ReplayError, subject_of};
use crate::worker as worker_processes;
use exit::Exit;
use options::BesideOptions;
use output::{complain, note, print};
use seamproof_judge::case::{Case, CaseError};
use seamproof_judge::evaluate::quiet_caught_panics;
use seamproof_judge::files;
use seamproof_judge::ladder::products;
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::SubjectName;

#[derive(Parser)]
#[command(name = "seamproof", version, about, arg_required_else_help = false, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run a campaign; without arguments the default one, which takes about a minute
    Run(run::Args),
    /// Join the shards of a campaign into the result that it would have had as a whole
    Merge(merge::Args),
    /// Run a night of campaigns over all subjects that are there, and report it
    Nightly(nightly::Args),
    /// Judge stored cases again
    Replay(replay::Args),
    /// Run a stored case once, and record what every rank got and gave
    Record(record::Args),
    /// Judge a run that was recorded
    JudgeRecording(judge_recording::Args),
    /// Show what a campaign, a night or a recording found, as a page to look at
    Report(report::Args),
    /// Judge packs of tens of thousands of tokens, forward and backward
    Large(large::Args),
    /// Judge one case that the options describe
    Try(Box<tried::Args>),
    /// Minimise a failing case
    Shrink(shrink::Args),
    /// Check schedules symbolically, without arithmetic
    Prove(prove::Args),
    /// Show a case: layout, launches, which queries are asked to see which keys, and where that is wrong
    Explain(explain::Args),
    /// Judge a quantiser: codes, scales and amax of FP8, bit for bit
    Quantise(quantise::Args),
    /// Plant the catalogue's faults and report what catches them
    Faults(faults::Args),
    /// Show what the generator produces, without running anything
    Census(census::Args),
    /// Turn stored cases and bytes of choices into values of a fuzzer's corpus
    Values(values::Args),
    /// Find a subject's numeric profile, and lock it or hold it to the locked one
    Calibrate(calibrate::Args),
    /// Measure
    Bench(bench::Args),
    /// Compile the GPU kernels, compare them with what must give the same, and judge large packs
    Kernels(kernels::Args),
    /// The subject's process; not for people
    #[command(hide = true)]
    Worker(worker::Args),
    /// A campaign whose subject is in the process that starts this program; not for people
    #[command(hide = true)]
    Serve(serve::Args),
    /// The numbers of a stored case, as a worker gets them; not for people
    #[command(hide = true)]
    Inputs(inputs::Args),
}

/// Reason why a command could not do its work. Each is one line.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Case(#[from] CaseError),
    #[error("{file}: {source}")]
    Replay { file: String, source: ReplayError },
    #[error(
        "{file}: subject: {source}; name one of these with --backend, or judge the case in the crate that has its own \
             subject: the NAME.rs that a campaign leaves beside NAME.json is a test for that"
    )]
    Foreign { file: String, source: BackendError },
    #[error("{file}: {what}")]
    TooLarge { file: String, what: String },
    #[error("{file}: nothing was recorded: {what}")]
    NotRecorded { file: String, what: String },
    #[error("{file}: nothing was recorded: the subject refuses the problem: {what}")]
    Refused { file: String, what: String },
    #[error(transparent)]
    Recording(#[from] crate::recording::RecordingError),
    #[error("--backend: {0}")]
    Backend(#[from] BackendError),
    #[error("--backend: {0}")]
    Quantiser(#[from] crate::backends::QuantiserError),
    #[error("{option}: there is no {kind} '{id}'{like}; {known}")]
    NoFault { option: &'static str, kind: &'static str, id: String, like: String, known: String },
    #[error("backend {name} cannot be started: {what}")]
    Start { name: String, what: String },
    #[error(transparent)]
    Identity(#[from] crate::backends::IdentityError),
    #[error(transparent)]
    Night(#[from] crate::nightly::NightError),
    #[error(transparent)]
    Report(#[from] crate::report::ReportError),
    #[error(transparent)]
    Merge(#[from] crate::campaign::MergeError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("{file}: the profile cannot be written: {source}")]
    Lock { file: String, source: std::io::Error },
    #[error(transparent)]
    Kernel(#[from] seamproof_kernels::KernelError),
    #[error(transparent)]
    Bench(#[from] seamproof_lab::bench::BenchError),
    #[error("the subject or its twin: {0}")]
    Twins(seamproof_judge::subject::RunError),
    #[error("the pipes to the calling process: {0}")]
    Pipes(std::io::Error),
    #[error("signals cannot be handled: {0}")]
    Signals(#[from] ctrlc::Error),
}

impl CliError {
    /// Returns the lines that stand below the error's own: where in a file a subject outside of this program failed to
    /// load.
    fn detail(&self) -> &str {
        use BackendError::Outside;
        match self {
            CliError::Backend(Outside(error)) => &error.detail,
            CliError::Replay { source: ReplayError::Subject(Outside(error)), .. } => &error.detail,
            _ => "",
        }
    }
}

/// Runs the program and gives its exit code.
pub fn main() -> ExitCode {
    quiet_caught_panics();
    fail_writes_past_the_limit();
    let ran = std::panic::catch_unwind(|| match Cli::try_parse() {
        Ok(cli) => dispatch(cli),
        Err(error) => usage(&error),
    });
    worker_processes::abandon_all();
    let mut exit = ran.unwrap_or(Exit::Internal);
    if let Some(error) = output::lost() {
        output::complain(&format_args!("standard output: cannot be written: {error}"));
        exit = if exit == Exit::Held { Exit::Input } else { exit };
    }
    ExitCode::from(exit.code())
}

/// Blocks SIGXFSZ, in this thread and in all that it starts, so that a write past the limit of a file's size fails
/// with an error. A worker process blocks it for itself.
fn fail_writes_past_the_limit() {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigSet, Signal};
        // Where it cannot be blocked, the signal ends the program as it would have anyway.
        let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
    }
}

fn dispatch(cli: Cli) -> Exit {
    let result = match cli.command {
        None => run::run_all(),
        Some(Command::Run(args)) => run::run(&args),
        Some(Command::Merge(args)) => merge::run(&args),
        Some(Command::Nightly(args)) => nightly::run(&args),
        Some(Command::Replay(args)) => replay::run(&args),
        Some(Command::Record(args)) => record::run(&args),
        Some(Command::JudgeRecording(args)) => judge_recording::run(&args),
        Some(Command::Report(args)) => report::run(&args),
        Some(Command::Large(args)) => large::run(&args),
        Some(Command::Try(args)) => tried::run(&args),
        Some(Command::Shrink(args)) => shrink::run(&args),
        Some(Command::Prove(args)) => prove::run(&args),
        Some(Command::Explain(args)) => explain::run(&args),
        Some(Command::Quantise(args)) => quantise::run(&args),
        Some(Command::Faults(args)) => faults::run(&args),
        Some(Command::Census(args)) => census::run(&args),
        Some(Command::Values(args)) => values::run(&args),
        Some(Command::Calibrate(args)) => calibrate::run(&args),
        Some(Command::Bench(args)) => bench::run(&args),
        Some(Command::Kernels(args)) => kernels::run(&args),
        Some(Command::Worker(args)) => return worker::run(&args),
        Some(Command::Serve(args)) => serve::run(&args),
        Some(Command::Inputs(args)) => inputs::run(&args),
    };
    result.unwrap_or_else(|error| {
        complain(&error);
        error.detail().lines().for_each(|line| note(&format_args!("  {line}")));
        Exit::Input
    })
}

/// Products of a case's pairs, heads and lanes above which a core judges it for minutes.
const LONG_PRODUCTS: u64 = 1 << 32;

/// Says that a case takes long to judge, so that nobody believes it hangs.
fn tell_if_long(file: &Path, problem: &Problem) {
    let count = products(problem);
    if count > LONG_PRODUCTS {
        let file = file.display();
        note(&format_args!(
            "{file}: {count:.1e} products of pairs, heads and lanes: this takes minutes, or hours"
        ));
    }
}

/// Loads a stored case and makes its subject. A subject that `backend` names, with options, takes the place of its own.
fn load(file: &Path, backend: Option<&str>) -> Result<(Case, Box<dyn Backend>), CliError> {
    load_beside(file, backend, &BesideOptions::default())
}

/// Loads a stored case as [`load`] does, with another subject beside its own.
fn load_beside(
    file: &Path,
    backend: Option<&str>,
    beside: &BesideOptions,
) -> Result<(Case, Box<dyn Backend>), CliError> {
    if file.is_dir() {
        return Err(CliError::Usage(format!("{}: is a directory; {}", file.display(), case_below(file))));
    }
    let mut case = Case::load(file)?;
    if let Some(text) = backend {
        case.subject = text.parse::<SubjectName>().map_err(BackendError::from)?.into();
    }
    case.subject.options = beside.among(case.subject.options);
    let file = file.display().to_string();
    match subject_of(&case) {
        Ok(backend) => Ok((case, backend)),
        Err(ReplayError::Subject(source @ BackendError::Unknown { .. })) if backend.is_none() => {
            Err(CliError::Foreign { file, source })
        }
        Err(source) => Err(CliError::Replay { file, source }),
    }
}

/// Returns a stored case whose values are recorded, and the recording beside it; `None` for any other file.
fn recorded_beside(file: &Path) -> Result<Option<(Case, Recording)>, CliError> {
    let Ok(case) = Case::load(file) else { return Ok(None) };
    Ok(recording::read_beside(file, &case)?.map(|recording| (case, recording)))
}

/// Returns what to name in the place of a directory.
fn case_below(dir: &Path) -> String {
    let listed = || files::list(&findings_of(dir).unwrap_or_else(|| dir.to_owned())).unwrap_or_default();
    let cases = found_by(dir).map_or_else(listed, |found| found.cases);
    match cases.iter().find(|path| files::is_json(path)) {
        Some(case) => format!("name a case file, such as {}", case.display()),
        None => "name a case file".to_owned(),
    }
}

/// Prints what clap says. Help and version are answers; anything else is an error, put on one line.
fn usage(error: &clap::Error) -> Exit {
    let text = error.render().to_string();
    if !error.use_stderr() {
        print(&text);
        return Exit::Held;
    }
    let said = text.split("\nUsage:").next().unwrap_or_default();
    // Where clap shows no usage, it says where help is. The line below does that for all errors.
    let useful = |line: &&str| !line.is_empty() && !line.starts_with("For more information");
    let lines: Vec<&str> = said.lines().map(str::trim).filter(useful).collect();
    let line = lines.join("; ").replace(":; ", ": ");
    complain(&format!("{}; see --help", line.trim_start_matches("error: ")));
    Exit::Input
}
