//! Text that goes into other texts: commands for a shell, code in Markdown.

use std::env;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use seamproof_judge::case::Case;
use seamproof_judge::prose::SEQUENCES_NAMED_MAX;
use seamproof_judge::subjects::SubjectName;

use crate::backends::python_named;
use crate::geometry::Geometry;
use crate::replay::is_foreign;

/// Name of this program in commands that are stored.
const NAME: &str = "seamproof";

/// Name of this program as it is typed here (see [`program_in`]).
static PROGRAM: LazyLock<String> = LazyLock::new(|| {
    let [running, home] = [env::current_exe().map(undeleted), env::current_dir()].map(Result::ok);
    let path = env::var_os("PATH").unwrap_or_default();
    let path: Vec<PathBuf> = env::split_paths(&path).collect();
    running.map_or(NAME.to_owned(), |running| program_in(&running, &path, home.as_deref()))
});

/// What is typed before a command that may start a subject in a Python file, with a space; nothing where the search path
/// leads to the right interpreter.
static INTERPRETER: LazyLock<String> = LazyLock::new(|| {
    let typed =
        |(name, program): (&str, PathBuf)| format!("{name}={} ", quoted(&program.display().to_string()));
    python_named().map(typed).unwrap_or_default()
});

/// Commands that start a subject.
const STARTING: [&str; 6] = ["explain", "large", "replay", "run", "shrink", "try"];

/// Returns a command that names this program `seamproof`, as files and events store it, with the program as it is
/// typed in the folder where it runs, and with the interpreter of Python subjects where one was named for this run. Any
/// other text comes back as it is.
pub fn typed(command: &str) -> String {
    match command.strip_prefix(NAME) {
        Some(rest) if rest.is_empty() || rest.starts_with(' ') => {
            let is_starting = rest.split_whitespace().next().is_some_and(|name| STARTING.contains(&name));
            format!("{}{}{rest}", if is_starting { &*INTERPRETER } else { "" }, *PROGRAM)
        }
        _ => command.to_owned(),
    }
}

/// Returns a program's path without the mark that Linux adds where another file took its place while it ran.
fn undeleted(running: PathBuf) -> PathBuf {
    match running.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
        Some(path) if !running.exists() => path.into(),
        _ => running,
    }
}

/// Returns what a shell in `home` runs as this program: its name, where the search path leads to it first, or else its
/// file, relative to `home` where it lies below.
fn program_in(running: &Path, path: &[PathBuf], home: Option<&Path>) -> String {
    let found = path.iter().map(|dir| dir.join(NAME)).find(|file| file.is_file());
    let is_running = |file: PathBuf| matches!((file.canonicalize(), running.canonicalize()), (Ok(one), Ok(other)) if one == other);
    if found.is_some_and(is_running) {
        return NAME.to_owned();
    }
    let below = home.and_then(|home| running.strip_prefix(home).ok());
    // A lone name would be searched for on the path.
    let file = below.map_or(running.to_owned(), |file| match file.components().count() {
        1 => Path::new(".").join(file),
        _ => file.to_owned(),
    });
    quoted(&file.display().to_string())
}

/// Returns the command that judges a case, or a folder of cases, again; on another subject than the case's own if one
/// is given. The command can be pasted into a POSIX shell as it is.
pub fn replay_command(path: &Path, subject: Option<&str>) -> String {
    let path = path.display().to_string();
    let path = if path.starts_with('-') { format!("./{path}") } else { path };
    let backend = subject.map_or(String::new(), |subject| format!(" --backend {}", quoted(subject)));
    format!("{NAME} replay {}{backend}", quoted(&path))
}

/// Returns the command that judges a stored quantisation again, on its own quantiser.
pub fn quantise_command(path: &Path) -> String {
    replay_command(path, None).replacen("replay", "quantise", 1)
}

/// Returns the command that shows what a folder holds as a page beside the folder.
pub fn report_command(dir: &Path) -> String {
    let dir = dir.display().to_string();
    let dir = if dir.starts_with('-') { format!("./{dir}") } else { dir };
    let page = format!("{}.html", dir.trim_end_matches('/'));
    format!("{NAME} report {} --html {}", quoted(&dir), quoted(&page))
}

/// Returns the command that judges a case from options alone, without its file. There is none for a subject that this
/// program cannot make, for a case that needs runs before it, and for more sequences than a person reads.
pub fn try_command(case: &Case) -> Option<String> {
    let is_short = case.problem.sequences.len() <= SEQUENCES_NAMED_MAX && case.before.is_empty();
    let subject = SubjectName::from(&case.subject).to_string();
    let backend = format!(" --backend {}", quoted(&subject));
    let seed = match case.schedule_seed {
        0 => String::new(),
        seed => format!(" --schedule-seed {seed}"),
    };
    let options = || format!("{NAME} try {}{backend}{seed}", Geometry::of(&case.problem));
    (is_short && !is_foreign(case)).then(options)
}

/// Returns a word as a POSIX shell takes it: in single quotes where it has anything but letters, digits and harmless
/// signs.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "_@%+=:,./-~".contains(letter);
    match !word.is_empty() && !word.starts_with('~') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Returns a text as code in Markdown, between more backticks than any run of them in the text.
pub fn code(text: &str) -> String {
    let longest = text.split(|letter| letter != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    let edge = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{edge}{text}{edge}{fence}")
}

/// Returns the text with everything escaped that moves a terminal's cursor, colours it or turns the order of letters
/// around, or that no XML may hold: names from a case file may hold anything.
pub(crate) fn visible(text: &str, lines: bool) -> String {
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

/// Unicode's separators of lines, marks of direction, and codes that are no letters.
const TURNING: [RangeInclusive<char>; 6] = [
    '\u{61c}'..='\u{61c}',
    '\u{200e}'..='\u{200f}',
    '\u{2028}'..='\u{202e}',
    '\u{2066}'..='\u{2069}',
    '\u{feff}'..='\u{feff}',
    '\u{fffe}'..='\u{ffff}',
];

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Test that the command comes out of a shell as it was meant.
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
    fn the_program_is_named_as_a_shell_finds_it() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let [bin, other] = ["bin", "other bin"].map(|name| place.join(name));
        for dir in [&bin, &other] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join(NAME), "").unwrap();
        }
        let named = |dir: &Path, path: &[&PathBuf], home: &Path| {
            let path: Vec<PathBuf> = path.iter().map(|dir| dir.to_path_buf()).collect();
            program_in(&dir.join(NAME), &path, Some(home))
        };
        let elsewhere = Path::new("/");
        assert_eq!(named(&bin, &[&bin, &other], elsewhere), "seamproof");
        assert_eq!(named(&bin, &[&other, &bin], &place), "bin/seamproof");
        assert_eq!(named(&bin, &[], &bin), "./seamproof");
        assert_eq!(named(&other, &[], &place), "'other bin/seamproof'");
        assert_eq!(named(&bin, &[], &other), bin.join(NAME).display().to_string());
    }

    #[test]
    fn a_stored_command_is_typed_and_other_words_stay() {
        assert_eq!(typed("seamproof replay x.json"), format!("{}{} replay x.json", *INTERPRETER, *PROGRAM));
        assert_eq!(typed("seamproof faults"), format!("{} faults", *PROGRAM));
        assert_eq!(typed("seamproofs are many"), "seamproofs are many");
        assert_eq!(typed("paste the test x.rs"), "paste the test x.rs");
    }

    #[test]
    fn code_ends_where_it_should() {
        assert_eq!(code("a b"), "`a b`");
        assert_eq!(code("a`b``c"), "```a`b``c```");
        assert_eq!(code("`"), "`` ` ``");
    }
}
