//! `seamproof report`: shows what a campaign, a night or a recording found, as a page to look at.

use std::path::PathBuf;

use super::exit::Exit;
use super::open::open_page;
use super::output::{print_line, print_report, print_to_stdout};
use super::{CliError, tell_if_long};
use crate::look::report_page;
use crate::record::{is_stdout, write_whole};
use crate::recording::{self, ROWS_MAX, Sample};
use crate::report::{self, Report};

const EXAMPLES: &str = "\
Examples:
  seamproof report seamproof.out --html report.html       what the last campaign found
  seamproof report nights/night-0002 --html night.html    a night: what is new first, and the trend over nights
  seamproof report merged --html report.html              shards that `seamproof merge` joined
  seamproof report seamproof.out --html report.html --open
                                                          the same in a browser
  seamproof report recording --html run.html              a recorded run, which is judged first
  seamproof report seamproof.out                          the same as text";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Folder of a campaign, of a merge, of a night, or of a recording
    dir: PathBuf,
    /// Write a page to a file, or to standard output (-)
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Open the page in a browser
    #[arg(long, requires = "html")]
    open: bool,
    /// Of a recording: judge this many drawn rows of q and of k, and all at borders, in place of every row
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ROWS_MAX))]
    rows: Option<u64>,
    /// Seed of the draw of rows
    #[arg(long, value_name = "SEED", requires = "rows", default_value_t = 0)]
    seed: u64,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    let report = if report::is_recording(&args.dir) { recorded(args)? } else { report::read(&args.dir)? };
    if report.kind != report::Kind::Recording && args.rows.is_some() {
        return Err(CliError::Usage(format!("--rows: {} is no recording; leave it out", args.dir.display())));
    }
    match &args.html {
        Some(out) if is_stdout(out) => print_to_stdout(&report_page(&report)),
        Some(out) => {
            write_whole(out, &report_page(&report))?;
            print_report(&report.heads());
            print_line(&format_args!("page      {}", out.display()));
            if args.open {
                open_page(out);
            }
        }
        None => print_report(&report.lines()),
    }
    Ok(Exit::Held)
}

/// Judges a recording.
fn recorded(args: &Args) -> Result<Report, CliError> {
    let recording = recording::read(&args.dir)?;
    let sample = args.rows.map(|rows| Sample { rows, seed: args.seed });
    if sample.is_none() {
        tell_if_long(&args.dir, &recording.problem);
    }
    let verdict = recording::judge(&recording, sample, None)?;
    Ok(report::of_recording(&args.dir, &recording, sample, &verdict))
}
