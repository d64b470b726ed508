//! `seamproof shrink`: minimises a failing case.

use std::path::PathBuf;

use seamproof_oracle::Problem;

use super::exit::Exit;
use super::output::print_line;
use super::run::stopped_by_signals;
use super::{CliError, load, tell_if_long, worker};
use crate::campaign::{Minimised, SHRINK_EVALUATIONS_MAX, minimise};
use crate::paste::{replay_command, try_command, typed};
use crate::record::write_whole;
use crate::replay::replay_as;
use crate::script::{self, SCRIPT_LIMIT, is_python};
use seamproof_judge::prose::{self, counted};
use seamproof_judge::verdict::Verdict;

const EXAMPLES: &str = "\
Examples:
  seamproof shrink case.json                      writes case.min.json, if anything gets smaller
  seamproof shrink case.json --out small.json";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The failing case
    file: PathBuf,
    /// Where the minimal case goes [default: FILE with .min.json at its end, and nowhere if FILE cannot be made
    /// smaller]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Judge this subject instead of the case's own
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Most evaluations
    #[arg(long, value_name = "N", default_value_t = SHRINK_EVALUATIONS_MAX)]
    budget: usize,
    #[command(flatten)]
    workers: worker::WorkerOptions,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    args.workers.configure();
    let (mut case, backend) = load(&args.file, args.backend.as_deref())?;
    // What the file says was wrong before shrinking is about its own subject.
    if args.backend.is_some() {
        case.found = None;
    }
    tell_if_long(&args.file, &case.problem);
    let verdict = replay_as(&case, backend.as_ref(), &case.problem)
        .map_err(|source| CliError::Replay { file: args.file.display().to_string(), source })?;
    let start = match verdict {
        Verdict::Finding(finding) => *finding,
        verdict => return nothing_to_do(args, &verdict),
    };
    let control = stopped_by_signals()?;
    print_line(&format_args!("from     {}: {start}", prose::describe(&case.problem)));

    let mut last = prose::describe(&case.problem);
    // Steps that only move values or rows have the same words.
    let step = |candidate: &Problem| {
        let words = prose::describe(candidate);
        if words != last {
            print_line(&format_args!("step     {words}"));
            last = words;
        }
    };
    let small = minimise(&case, &start, backend.as_ref(), args.budget, &|| control.stopped(), step);
    save(args, &small)?;
    if let Some(out) = written_to(args, &small).filter(|_| is_python(&small.case)) {
        print_line(&format_args!("script:  {}", script::write(&out, SCRIPT_LIMIT, &|| control.stopped())));
    }
    Ok(if start.check.is_end() { Exit::Crash } else { Exit::Finding })
}

fn nothing_to_do(args: &Args, verdict: &Verdict) -> Result<Exit, CliError> {
    let file = args.file.display();
    match verdict {
        Verdict::Refused(reason) => {
            print_line(&format_args!("{file} is refused ({reason}): nothing to shrink"));
        }
        Verdict::Infrastructure(what) => {
            print_line(&format_args!("internal {file}: {what}"));
            return Ok(Exit::Internal);
        }
        Verdict::TooLarge(what) => {
            return Err(CliError::TooLarge { file: file.to_string(), what: what.clone() });
        }
        Verdict::Pass(_) | Verdict::RefusedMalformed(_) | Verdict::Finding(_) => {
            print_line(&format_args!("{file} holds: nothing to shrink"));
        }
    }
    Ok(Exit::Held)
}

/// Returns the file of the smaller case. A second file of the same case would count as a second case wherever a folder
/// is replayed.
fn written_to(args: &Args, small: &Minimised) -> Option<PathBuf> {
    args.out.clone().or_else(|| (small.accepted > 0).then(|| args.file.with_extension("min.json")))
}

fn save(args: &Args, small: &Minimised) -> Result<(), CliError> {
    let (out, Minimised { case, accepted, .. }) = (written_to(args, small), small);
    if let Some(out) = &out {
        write_whole(out, &case.to_json())?;
    }
    print_line(&format_args!("to       {}", prose::describe(&case.problem)));
    if let Some(found) = &case.found {
        let state = if found.minimal { "minimal" } else { "not minimal yet" };
        print_line(&format_args!("         {found}"));
        let (steps, evaluations) = (counted(*accepted, "step"), counted(found.evaluations, "evaluation"));
        print_line(&format_args!("         {state} after {steps} and {evaluations}"));
    }
    let replay = match &out {
        Some(out) => replay_command(out, None),
        None => {
            print_line("         nothing got smaller: no file is written");
            replay_command(&args.file, args.backend.as_deref())
        }
    };
    print_line(&format_args!("replay:  {}", typed(&replay)));
    if let Some(command) = try_command(case) {
        print_line(&format_args!("try:     {}", typed(&command)));
    }
    Ok(())
}
