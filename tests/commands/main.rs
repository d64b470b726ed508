//! The program from outside: exit codes, texts, files, worker processes. Most of these tests wait for a process, so
//! they are one program: while one waits, another computes.

mod arguments;
mod campaigns;
mod cases;
mod faults;
mod large;
mod look;
mod merge;
#[cfg(unix)]
mod mocking;
mod nightly;
#[cfg(unix)]
mod outside;
#[cfg(unix)]
mod pages;
mod quantise;
mod recorded_programs;
mod recordings;
mod report;
#[cfg(unix)]
mod worker;
#[cfg(unix)]
mod worker_commands;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

/// The program under test.
#[cfg(unix)]
const PROGRAM: &str = env!("CARGO_BIN_EXE_seamproof");
/// Exit codes of a campaign without findings. A small campaign may be too short to meet every floor of the census.
const NOTHING_FOUND: [i32; 2] = [0, 4];

/// Number of items at a time in [`at_once`].
#[cfg(unix)]
const AT_ONCE: usize = 4;

/// Does independent work for each item, some at a time: it mostly waits for processes and deadlines.
#[cfg(unix)]
fn at_once<T: Send, Items: IntoIterator<Item = T>>(items: Items, work: impl Fn(T) + Sync)
where
    Items::IntoIter: Send,
{
    let items = std::sync::Mutex::new(items.into_iter());
    let next = || items.lock().expect("no thread panics with the lock").next();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(item) = next() {
                    work(item);
                }
            });
        }
    });
}

fn place() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn seamproof(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("seamproof").expect("the program is built");
    command.current_dir(dir).args(arguments).output().expect("the program runs")
}

/// Returns a command of the program as it is printed: with the path of its file, which no search path leads to.
fn typed(arguments: &str) -> String {
    format!("{} {arguments}", assert_cmd::cargo::cargo_bin("seamproof").display())
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("the program was not killed")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is text")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is text")
}

/// Checks for an input error: exit code 1, and one line on stderr that holds each of these texts.
fn refuses(dir: &Path, arguments: &[&str], texts: &[&str]) {
    let output = seamproof(dir, arguments);
    let said = stderr(&output);
    assert_eq!(code(&output), 1, "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    for text in texts {
        assert!(said.contains(text), "{arguments:?}: '{text}' is not in: {said}");
    }
}

/// Runs a campaign of 200 cases, and returns its events without what depends on the clock.
fn campaign(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = seamproof(dir, &[&["run", "--seed", "1", "--cases", "200"], arguments].concat());
    assert!(NOTHING_FOUND.contains(&code(&output)), "{}{}", stdout(&output), stderr(&output));
    events(&dir.join("seamproof.out/events.jsonl"))
}

fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("events are written");
    let event = |line: &str| {
        let mut event: Value = serde_json::from_str(line).expect("an event is JSON");
        event.as_object_mut().expect("an event is an object").remove("times");
        event
    };
    text.lines().map(event).collect()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

/// Returns a legal case, as a campaign stores it: the canary's finding.
fn stored_case(dir: &Path) -> String {
    campaign(dir, &["--shard", "0/200"]);
    fs::read_to_string(case_in(&dir.join("seamproof.out/canary"))).expect("the canary is stored")
}

fn case_in(dir: &Path) -> PathBuf {
    let entries = fs::read_dir(dir).expect("the directory is there");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    paths.find(|path| path.extension().is_some_and(|extension| extension == "json")).expect("a case is there")
}
