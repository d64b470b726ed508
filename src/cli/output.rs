//! Everything that the command line prints.
//!
//! Text for people goes to stdout, or to stderr where `--json -` or `--junit -` takes stdout. Reports are wrapped to
//! the terminal, and coloured where it shows colours; `NO_COLOR` turns them off. A progress bar steps aside for each
//! line. A reader that goes away is no error. Anything else that keeps stdout from taking what it is given is told at the end
//! ([`lost`]).

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use console::{Style, Term};
use indicatif::ProgressBar;

use super::CliError;
use crate::campaign::{LABEL_COLUMNS, Line, Tone};
use crate::paste::{typed, visible};
use crate::record::is_stdout;

/// Columns of a report that no terminal shows.
const COLUMNS: usize = 100;
/// Fewest columns to which a report is wrapped.
const COLUMNS_MIN: usize = 40;

/// Whether text for people goes to stderr.
static ASIDE: AtomicBool = AtomicBool::new(false);
/// The progress bar on the terminal, if there is one.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// The first error of stdout, whose reader is still there.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// Returns why stdout lacks something that was printed, if it does.
pub(super) fn lost() -> Option<io::Error> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Leaves stdout to the one of these files that is `-`. Both cannot be.
pub(super) fn leave_stdout(json: Option<&Path>, junit: Option<&Path>) -> Result<(), CliError> {
    let [json, junit] = [json, junit].map(|file| file.is_some_and(is_stdout));
    if json && junit {
        let why = "--json - and --junit - cannot both go to standard output; name a file for one of them";
        return Err(CliError::Usage(why.to_owned()));
    }
    ASIDE.store(json || junit, Ordering::Relaxed);
    Ok(())
}

/// Shows a progress bar, or none any more.
pub(super) fn show_bar(bar: Option<ProgressBar>) {
    *BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar;
}

/// Prints text for people.
pub(super) fn print(text: &(impl Display + ?Sized)) {
    put(&visible(&text.to_string(), true));
}

/// Prints a line for people.
pub(super) fn print_line(text: &(impl Display + ?Sized)) {
    print(&format_args!("{text}\n"));
}

/// Prints text for machines to stdout, as it is.
pub(super) fn print_to_stdout(text: &str) {
    beside_bar(|| to_stdout(text));
}

/// Prints the lines of a report, wrapped and coloured as the terminal allows. A command is never wrapped, since it is
/// there to be pasted.
pub(super) fn print_report(lines: &[Line]) {
    let width = columns();
    for Line { tone, text } in lines {
        let text = visible(text, false);
        let told = match tone {
            Tone::Command => as_typed(&text),
            _ => wrapped(&text, width),
        };
        put(&format!("{}\n", style(*tone).apply_to(told)));
    }
}

/// Prints a line to stderr.
pub(super) fn note(text: &(impl Display + ?Sized)) {
    let line = visible(&text.to_string(), false);
    beside_bar(|| writeln!(io::stderr(), "{line}"));
}

/// Prints an error, on one line.
pub(super) fn complain(error: &(impl Display + ?Sized)) {
    note(&format_args!("error: {error}"));
}

/// Writes text that is ready.
fn put(text: &str) {
    beside_bar(|| match ASIDE.load(Ordering::Relaxed) {
        true => write!(io::stderr(), "{text}"),
        false => to_stdout(text),
    });
}

/// Writes to stdout. An error is kept for [`lost`], unless the reader went away.
fn to_stdout(text: &str) -> io::Result<()> {
    let written = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    if let Err(error) = &written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get_or_insert_with(|| io::Error::new(error.kind(), error.to_string()));
    }
    written
}

/// Writes while the progress bar is out of the way.
fn beside_bar(write: impl FnOnce() -> io::Result<()>) {
    let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner);
    ignore(match &*bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    });
}

/// Returns the columns to which a report is wrapped: those of the terminal, where there is one.
fn columns() -> usize {
    let term = if ASIDE.load(Ordering::Relaxed) { Term::stderr() } else { Term::stdout() };
    let size = term.is_term().then(|| term.size_checked()).flatten();
    size.map_or(COLUMNS, |(_, columns)| usize::from(columns).max(COLUMNS_MIN))
}

fn style(tone: Tone) -> Style {
    let style = if ASIDE.load(Ordering::Relaxed) { Style::new().for_stderr() } else { Style::new() };
    match tone {
        Tone::Good => style.green(),
        Tone::Bad => style.red(),
        Tone::Doubt => style.yellow(),
        Tone::Plain | Tone::Command => style,
    }
}

/// Returns a line `LABEL: COMMAND` with the command as it is typed here.
fn as_typed(line: &str) -> String {
    match line.split_once(": ") {
        Some((label, command)) => format!("{label}: {}", typed(command)),
        None => line.to_owned(),
    }
}

/// Returns a line in lines of at most `width` columns, broken at spaces. Those after the first begin under the text,
/// behind the label. A longer word is cut.
fn wrapped(line: &str, width: usize) -> String {
    let mut lines = Vec::new();
    let mut rest: Vec<char> = line.trim_end().chars().collect();
    while rest.len() > width {
        let space = (LABEL_COLUMNS + 1..=width).rev().find(|&at| rest[at] == ' ');
        let at = space.unwrap_or(width);
        let behind = rest.split_off(at);
        lines.push(String::from_iter(rest));
        let text = behind.iter().skip_while(|&&letter| letter == ' ');
        rest = std::iter::repeat_n(' ', LABEL_COLUMNS).chain(text.copied()).collect();
    }
    lines.push(String::from_iter(rest));
    let lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    lines.join("\n")
}

/// Drops an error: nobody is left to tell, what was found is on disk, and the exit code says the rest.
fn ignore(_result: io::Result<()>) {}

#[cfg(test)]
mod tests {
    use super::wrapped;
    use crate::paste::visible;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        assert_eq!(visible("\u{1b}[2J\u{202e}x\ny", true), "\\u{1b}[2J\\u{202e}x\ny");
        assert_eq!(visible("a\nerror: b\r", false), "a\\nerror: b\\r");
        assert_eq!(visible("± 2 · größer", false), "± 2 · größer");
    }

    #[test]
    fn a_long_line_is_broken_at_spaces_and_goes_on_behind_its_label() {
        assert_eq!(wrapped("FAIL      short", 20), "FAIL      short");
        let told = "FAIL      one two\n          three\n          four";
        assert_eq!(wrapped("FAIL      one two three four", 18), told);
        // A word without spaces is cut, and nothing of it is lost.
        assert_eq!(wrapped(&"x".repeat(45), 40), format!("{}\n          {}", "x".repeat(40), "x".repeat(5)));
        let long = format!("verdict   {}", "± 2.5 · ".repeat(50));
        assert!(wrapped(&long, 100).lines().all(|line| line.chars().count() <= 100));
    }
}
