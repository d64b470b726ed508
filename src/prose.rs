//! A problem in one line of words, for people who read findings.

use std::fmt::{Display, Write};
use std::path::Path;

use seamproof_oracle::{Alignment, Mask, Pass, Problem, Sequence, Sink};

use crate::backend::algorithm_name;

/// Sequences that are named one by one; more are counted.
pub const SEQUENCES_NAMED_MAX: usize = 8;

/// So many of something: `1 case`, `2 cases`.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, what: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// The command that judges a case, or what a folder holds, again; on another subject than the case's own if one is given. It
/// can be pasted into a POSIX shell as it is.
pub fn replay_command(path: &Path, subject: Option<&str>) -> String {
    let path = path.display().to_string();
    let path = if path.starts_with('-') { format!("./{path}") } else { path };
    let backend = subject.map_or(String::new(), |subject| format!(" --backend {}", quoted(subject)));
    format!("seamproof replay {}{backend}", quoted(&path))
}

/// A word as a POSIX shell takes it: in single quotes where it has anything but letters, digits and what no shell reads.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "_@%+=:,./-~".contains(letter);
    match !word.is_empty() && !word.starts_with('~') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A text as code in Markdown, between more backticks than any run of them that it has.
pub fn code(text: &str) -> String {
    let longest = text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    let edge = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{edge}{text}{edge}{fence}")
}

/// The problem in one line.
pub fn describe(problem: &Problem) -> String {
    let (heads, dims, softmax) = (problem.heads, problem.dims, problem.softmax);
    let mut text = format!(
        "{}; heads {}/{}; dims {}/{}; {}",
        describe_sequences(&problem.sequences),
        heads.q,
        heads.kv,
        dims.qk,
        dims.v,
        describe_mask(&problem.mask)
    );
    if let Some(cap) = softmax.softcap {
        let _ = write!(text, "; softcap {cap}");
    }
    if softmax.sink != Sink::None {
        let _ = write!(text, "; sink {}", word(&softmax.sink));
    }
    if problem.parallel.size() > 1 {
        let algorithm = algorithm_name(problem.parallel.algorithm);
        let _ = write!(text, "; {algorithm} over {} ranks", problem.parallel.size());
    }
    let pass = if problem.pass == Pass::Backward { "forward and backward" } else { "forward" };
    let _ = write!(text, "; {} {}; {pass}", problem.precision.q, word(&problem.mode));
    text
}

fn describe_sequences(sequences: &[Sequence]) -> String {
    let lengths = |run: seamproof_oracle::Run| {
        if run.len == run.span { run.len.to_string() } else { format!("{} of {}", run.len, run.span) }
    };
    let named: Vec<String> = sequences
        .iter()
        .take(SEQUENCES_NAMED_MAX)
        .map(|sequence| match (lengths(sequence.q), lengths(sequence.kv)) {
            (q, kv) if q == kv => q,
            (q, kv) => format!("{q} × {kv}"),
        })
        .collect();
    match (sequences.len(), named.join(", ")) {
        (0, _) => "no sequence".to_owned(),
        (1, named) => format!("1 sequence ({named})"),
        (count, named) if count <= SEQUENCES_NAMED_MAX => format!("{count} sequences ({named})"),
        (count, named) => format!("{count} sequences ({named}, …)"),
    }
}

fn describe_mask(mask: &Mask) -> String {
    let corner = match mask.align {
        Alignment::TopLeft => "top-left",
        Alignment::BottomRight => "bottom-right",
    };
    match (mask.left, mask.right) {
        (None, None) => "full".to_owned(),
        (None, Some(0)) => format!("causal {corner}"),
        (left, right) => {
            let side = |side: Option<u32>| side.map_or("∞".to_owned(), |keys| keys.to_string());
            format!("window ({}, {}) {corner}", side(left), side(right))
        }
    }
}

/// The name that a unit variant has in case files.
fn word(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The command comes out of a shell as it was meant.
    #[test]
    fn a_command_is_quoted_where_a_shell_needs_it() {
        let plain =
            replay_command(Path::new("nights/night-0001/a_b.json"), Some("emulated~reorder:q_tile=2,k=3"));
        assert_eq!(
            plain,
            "seamproof replay nights/night-0001/a_b.json --backend emulated~reorder:q_tile=2,k=3"
        );
        assert_eq!(quoted("größe/my nights"), "'größe/my nights'");
        assert_eq!(replay_command(Path::new("-x"), None), "seamproof replay ./-x");
        let words = [
            "a b",
            "it's",
            "`id`",
            "$HOME",
            "~",
            "",
            "a;b&c|d>e",
            "\\",
            "*?[x]{a,b}",
            "!\"#",
            "\u{3000}",
            "'",
        ];
        for word in words {
            let script = format!("printf %s {}", quoted(word));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        }
    }

    #[test]
    fn code_ends_where_it_should() {
        assert_eq!(code("a b"), "`a b`");
        assert_eq!(code("a`b``c"), "```a`b``c```");
        assert_eq!(code("`"), "`` ` ``");
    }
}
