//! `seamproof explain`: shows a case as text, as a page, or as one picture.

use std::path::PathBuf;

use clap::ValueEnum;
use seamproof_oracle::{Pass, Problem};

use super::exit::Exit;
use super::output::{print, print_line, print_to_stdout};
use super::{CliError, load, recorded_beside};
use crate::explain::{self, Selection, explain, explain_recorded};
use crate::look::{Look, Picture, Source};
use crate::paste::replay_command;
use crate::record::{is_stdout, write_whole};
use crate::recording::Recording;
use seamproof_judge::case::Case;

const EXAMPLES: &str = "\
Examples:
  seamproof explain case.json                          layout, launches, which keys each query is asked to see, and where that is wrong
  seamproof explain case.json --rank 1 --pass backward
  seamproof explain case.json --operations             merges, messages, collectives and copies too
  seamproof explain case.json --html case.html         one page of pictures: layout, who sees whom, the schedule
  seamproof explain case.json --svg mask > mask.svg    one picture";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Case file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Show only this rank, counted by its place in the group
    #[arg(long, value_name = "R")]
    rank: Option<usize>,
    /// Show only this pass
    #[arg(long, value_name = "PASS")]
    pass: Option<PassName>,
    /// Show every operation, one line each
    #[arg(long)]
    operations: bool,
    /// Show the schedule of this subject instead of the case's own
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Write a page of pictures instead, to a file or to standard output (-)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rank", "pass", "operations", "svg"])]
    html: Option<PathBuf>,
    /// Print one picture instead
    #[arg(long, value_name = "PICTURE", conflicts_with_all = ["rank", "pass", "operations"])]
    svg: Option<PictureName>,
}

/// Name of a picture on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PictureName {
    Layout,
    Mask,
    Schedule,
}

impl PictureName {
    fn picture(self) -> Picture {
        match self {
            PictureName::Layout => Picture::Layout,
            PictureName::Mask => Picture::Mask,
            PictureName::Schedule => Picture::Schedule,
        }
    }
}

impl Args {
    /// Whether a page or a picture is asked for, and no text.
    fn is_pictured(&self) -> bool {
        self.html.is_some() || self.svg.is_some()
    }
}

/// Name of a pass on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PassName {
    Forward,
    Backward,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    if let Some((case, recording)) = recorded_beside(&args.file)? {
        return run_recorded(args, &case, &recording);
    }
    let (case, backend) = load(&args.file, args.backend.as_deref())?;
    if args.is_pictured() {
        let source = match backend.schedule(&case.problem) {
            Ok(schedule) => return look(args, &case, Source::Schedule(&schedule)),
            Err(error) => Source::Unknown(error.to_string()),
        };
        return look(args, &case, source);
    }
    let (problem, file) = (&case.problem, args.file.display());
    check_rank(args, problem)?;
    let pass = args.pass.map(|name| if name == PassName::Forward { Pass::Forward } else { Pass::Backward });
    if pass == Some(Pass::Backward) && problem.pass == Pass::Forward {
        return Err(CliError::Usage(format!("{file}: --pass backward: the case has no backward pass")));
    }
    let schedule = backend.schedule(problem);
    let schedule = schedule.map_err(|error| CliError::Usage(format!("{file}: no schedule: {error}")))?;
    let options = Selection { rank: args.rank, pass, operations: args.operations };
    let head = explain::subject(&case, args.backend.is_some());
    let others = explain::other_runs(&case, backend.as_ref(), &options);
    print(&(head + &explain(problem, &schedule, &options) + &others));
    Ok(Exit::Held)
}

/// Shows a recorded case, whose run is over and has no schedule here.
fn run_recorded(args: &Args, case: &Case, recording: &Recording) -> Result<Exit, CliError> {
    check_rank(args, &case.problem)?;
    let asked = [
        ("--pass", args.pass.is_some()),
        ("--operations", args.operations),
        ("--backend", args.backend.is_some()),
    ];
    if let Some((option, _)) = asked.into_iter().find(|(_, is_asked)| *is_asked) {
        let file = args.file.display();
        return Err(CliError::Usage(format!(
            "{option}: {file} is a recording, which holds no launches; leave it out"
        )));
    }
    if args.is_pictured() {
        return look(args, case, Source::Recorded(recording.layouts()));
    }
    print(&explain_recorded(case, &recording.layouts(), args.rank));
    Ok(Exit::Held)
}

/// Writes the page, or prints the picture.
fn look(args: &Args, case: &Case, source: Source) -> Result<Exit, CliError> {
    let file = args.file.display().to_string();
    let replay = replay_command(&args.file, args.backend.as_deref());
    let look = Look { case, file: &file, replay: &replay, source };
    match (&args.html, args.svg) {
        (Some(out), _) if is_stdout(out) => print_to_stdout(&look.page()),
        (Some(out), _) => {
            write_whole(out, &look.page())?;
            print_line(&format_args!("page     {}", out.display()));
        }
        (None, Some(name)) => {
            let drawn = look.picture(name.picture());
            print_to_stdout(&drawn.map_err(|why| CliError::Usage(format!("{file}: --svg: {why}")))?);
        }
        (None, None) => {}
    }
    Ok(Exit::Held)
}

fn check_rank(args: &Args, problem: &Problem) -> Result<(), CliError> {
    let ranks = problem.parallel.all_ranks();
    match args.rank.filter(|rank| *rank >= ranks) {
        Some(rank) => {
            Err(CliError::Usage(format!("--rank is {rank}; the group has ranks 0 to {}", ranks - 1)))
        }
        None => Ok(()),
    }
}
