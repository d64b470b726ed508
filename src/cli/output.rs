//! Everything that the command line prints.
//!
//! Nothing is coloured, so `NO_COLOR` and pipes need no care; a reader that goes away is no error.

use std::fmt::Display;
use std::io::{self, Write};

/// Prints to stdout.
pub(super) fn print(text: &(impl Display + ?Sized)) {
    ignore(write!(io::stdout(), "{text}").and_then(|()| io::stdout().flush()));
}

/// Prints a line to stdout.
pub(super) fn print_line(text: &(impl Display + ?Sized)) {
    print(&format_args!("{text}\n"));
}

/// Prints a line to stderr.
pub(super) fn note(text: &(impl Display + ?Sized)) {
    ignore(writeln!(io::stderr(), "{text}"));
}

/// Prints an error, on one line.
pub(super) fn complain(error: &(impl Display + ?Sized)) {
    note(&format_args!("error: {}", error.to_string().replace(['\n', '\r'], " ")));
}

/// There is nobody left to tell: what was found is on disk, and the exit code says the rest.
fn ignore(_result: io::Result<()>) {}
