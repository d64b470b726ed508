//! Everything that the command line prints.
//!
//! Nothing is coloured, so `NO_COLOR` and pipes need no care; a reader that goes away is no error.

use std::fmt::Display;
use std::io::{self, Write};
use std::ops::RangeInclusive;

/// Prints to stdout.
pub(super) fn print(text: &(impl Display + ?Sized)) {
    let text = visible(&text.to_string(), true);
    ignore(write!(io::stdout(), "{text}").and_then(|()| io::stdout().flush()));
}

/// Prints a line to stdout.
pub(super) fn print_line(text: &(impl Display + ?Sized)) {
    print(&format_args!("{text}\n"));
}

/// Prints a line to stderr.
pub(super) fn note(text: &(impl Display + ?Sized)) {
    ignore(writeln!(io::stderr(), "{}", visible(&text.to_string(), false)));
}

/// Prints an error, on one line.
pub(super) fn complain(error: &(impl Display + ?Sized)) {
    note(&format_args!("error: {error}"));
}

/// The text with everything escaped that moves a terminal's cursor, colours it or turns the order of letters around:
/// names from a case file may hold anything.
fn visible(text: &str, lines: bool) -> String {
    let hidden = |letter: char| {
        (letter.is_control() && !(lines && letter == '\n'))
            || TURNING.iter().any(|range| range.contains(&letter))
    };
    let mut visible = String::with_capacity(text.len());
    for letter in text.chars() {
        if hidden(letter) { visible.extend(letter.escape_default()) } else { visible.push(letter) }
    }
    visible
}

/// Unicode's separators of lines and marks of direction.
const TURNING: [RangeInclusive<char>; 5] = [
    '\u{61c}'..='\u{61c}',
    '\u{200e}'..='\u{200f}',
    '\u{2028}'..='\u{202e}',
    '\u{2066}'..='\u{2069}',
    '\u{feff}'..='\u{feff}',
];

/// There is nobody left to tell: what was found is on disk, and the exit code says the rest.
fn ignore(_result: io::Result<()>) {}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        assert_eq!(visible("\u{1b}[2J\u{202e}x\ny", true), "\\u{1b}[2J\\u{202e}x\ny");
        assert_eq!(visible("a\nerror: b\r", false), "a\\nerror: b\\r");
        assert_eq!(visible("± 2 · größer", false), "± 2 · größer");
    }
}
