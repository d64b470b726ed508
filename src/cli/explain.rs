//! `seamproof explain`: shows a case as text, as a page, or as one picture.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use seamproof_oracle::{Pass, Problem};

use super::exit::Exit;
use super::open::open_page;
use super::output::{note, print, print_line, print_to_stdout};
use super::{CliError, load, recorded_beside, tell_if_long};
use crate::explain::{self, OUTSIDE, Selection, explain, explain_outside, explain_recorded, is_outside};
use crate::look::{Look, Picture, Ran, Source};
use crate::paste::replay_command;
use crate::record::{is_stdout, write_whole};
use crate::recording::{self, Recording};
use crate::report::{self, Again};
use seamproof_judge::case::Case;
use seamproof_judge::subject::Backend;

const EXAMPLES: &str = "\
Examples:
  seamproof explain case.json                          layout, launches, which keys each query is asked to see, and where that is wrong
  seamproof explain case.json --rank 1 --pass backward
  seamproof explain case.json --operations             merges, messages, collectives and copies too
  seamproof explain case.json --run                    the case is run once more: which rows are wrong, which keys were seen
  seamproof explain case.json --html case.html         one page of pictures: layout, who sees whom, the schedule
  seamproof explain case.json --html case.html --run --open
                                                       the same with the pictures of a run, in a browser
  seamproof explain case.json --svg mask > mask.svg    one picture";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Case file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Show only this rank of the world
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
    /// Run the case once more: which rows are wrong, and which keys the queries saw
    #[arg(long)]
    run: bool,
    /// Open the page in a browser
    #[arg(long, requires = "html")]
    open: bool,
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
    let run = || if args.run { run_again(&args.file, &case, backend.as_ref()) } else { Ran::default() };
    let (problem, file) = (&case.problem, args.file.display());
    let schedule = (!is_outside(&case)).then(|| backend.schedule(problem));
    let source = match &schedule {
        None => Source::Outside,
        Some(Ok(schedule)) => Source::Schedule(schedule),
        Some(Err(error)) => Source::Unknown(error.to_string()),
    };
    if args.is_pictured() {
        return look(args, &case, source, run());
    }
    let options = selection(args, problem)?;
    let text = match &schedule {
        None => explain_outside(problem, checked_outside(args)?),
        Some(Ok(schedule)) => explain(problem, schedule, &options),
        Some(Err(error)) => return Err(CliError::Usage(format!("{file}: no schedule: {error}"))),
    };
    let head = explain::subject(&case, args.backend.is_some());
    let others = explain::other_runs(&case, backend.as_ref(), &options);
    let look = Look { case: &case, file: "", replay: "", source, run: run() };
    let map = if options == Selection::default() { map(&look) } else { String::new() };
    print(&(head + &text + &others + &look.ran() + &map));
    Ok(Exit::Held)
}

/// Returns what is to be shown of a problem's schedule.
fn selection(args: &Args, problem: &Problem) -> Result<Selection, CliError> {
    check_rank(args, problem)?;
    let pass = args.pass.map(|name| if name == PassName::Forward { Pass::Forward } else { Pass::Backward });
    if pass == Some(Pass::Backward) && problem.pass == Pass::Forward {
        let file = args.file.display();
        return Err(CliError::Usage(format!("{file}: --pass backward: the case has no backward pass")));
    }
    Ok(Selection { rank: args.rank, pass, operations: args.operations })
}

/// Returns the rank that is asked for of a subject from outside, unless launches are asked for too.
fn checked_outside(args: &Args) -> Result<Option<usize>, CliError> {
    let asked = [("--pass", args.pass.is_some()), ("--operations", args.operations)];
    match asked.into_iter().find(|(_, is_asked)| *is_asked) {
        Some((option, _)) => Err(CliError::Usage(format!("{option}: {OUTSIDE}"))),
        None => Ok(args.rank),
    }
}

/// Returns the small map of a case, where standard output takes its letters.
fn map(look: &Look) -> String {
    if takes_blocks() { look.map() } else { String::new() }
}

/// Whether the reader's locale has letters beyond ASCII. On Windows the console has.
fn takes_blocks() -> bool {
    let named = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(|name| std::env::var(name).ok());
    let locale = named.filter(|locale| !locale.is_empty()).map(|locale| locale.to_uppercase()).next();
    cfg!(windows) || locale.is_some_and(|locale| locale.contains("UTF-8") || locale.contains("UTF8"))
}

/// Runs a case again for its page.
fn run_again(file: &Path, case: &Case, backend: &dyn Backend) -> Ran {
    if case.found.as_ref().is_some_and(|found| found.finding.check.is_end()) {
        note(&format_args!("{}: not run: its finding is the end of the subject", file.display()));
        return Ran::default();
    }
    tell_if_long(file, &case.problem);
    let Again { errors, seen, read, untold, .. } = report::run(case, backend);
    if errors.is_empty() && seen.is_empty() {
        note(&format_args!("{}: its run left nothing to compare", file.display()));
    }
    Ran { errors, seen, read, untold }
}

/// Shows a recorded case, whose run is over and has no schedule here.
fn run_recorded(args: &Args, case: &Case, recording: &Recording) -> Result<Exit, CliError> {
    check_rank(args, &case.problem)?;
    let asked = [
        ("--pass", args.pass.is_some()),
        ("--operations", args.operations),
        ("--backend", args.backend.is_some()),
        ("--run", args.run),
    ];
    if let Some((option, _)) = asked.into_iter().find(|(_, is_asked)| *is_asked) {
        let file = args.file.display();
        return Err(CliError::Usage(format!(
            "{option}: {file} is a recording, which holds no launches; leave it out"
        )));
    }
    if args.is_pictured() {
        let run = Ran { errors: recording::error_maps(recording), ..Ran::default() };
        return look(args, case, Source::Recorded(recording.layouts()), run);
    }
    let source = Source::Recorded(recording.layouts());
    let look = Look { case, file: "", replay: "", source, run: Ran::default() };
    let map = if args.rank.is_none() { map(&look) } else { String::new() };
    print(&(explain_recorded(case, &recording.layouts(), args.rank) + &map));
    Ok(Exit::Held)
}

/// Writes the page, or prints the picture.
fn look(args: &Args, case: &Case, source: Source, run: Ran) -> Result<Exit, CliError> {
    let file = args.file.display().to_string();
    let replay = replay_command(&args.file, args.backend.as_deref());
    let look = Look { case, file: &file, replay: &replay, source, run };
    match (&args.html, args.svg) {
        (Some(out), _) if is_stdout(out) => print_to_stdout(&look.page()),
        (Some(out), _) => {
            write_whole(out, &look.page())?;
            print_line(&format_args!("page     {}", out.display()));
            if args.open {
                open_page(out);
            }
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
    let members: Vec<usize> = problem.parallel.world_ranks().collect();
    match args.rank.filter(|rank| !members.contains(rank)) {
        Some(rank) => {
            let members: Vec<String> = members.iter().map(ToString::to_string).collect();
            let members = members.join(", ");
            Err(CliError::Usage(format!(
                "--rank is {rank}; the group has these ranks of the world: {members}"
            )))
        }
        None => Ok(()),
    }
}
