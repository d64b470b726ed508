//! Another implementation, measured in the same run on the same machine: a program that is asked for one cell after the
//! other, so that both work under the same conditions.
//!
//! A request is one JSON line on its standard input ([`Request`]), the answer one on its standard output, `{"ms": 1.23}`
//! or `{"error": "why not"}`. Lines that do not begin with a brace are skipped: libraries print what they like.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::tracks::Cell;

/// What is asked for: the forward of a pack of bf16 sequences, timed as ours is.
#[derive(Serialize)]
struct Request<'a> {
    track: &'a str,
    column: &'a str,
    /// Real rows of each sequence, and the rows that it owns.
    lengths: Vec<usize>,
    padded: Vec<usize>,
    /// Query heads and KV heads.
    heads: [usize; 2],
    dim: usize,
    causal: bool,
    /// Keys to the left of the diagonal; absent means all.
    window: Option<u32>,
    /// Sets of tensors in turn, launches between two looks at the clock, and how often to look, after a warm-up.
    sets: usize,
    launches: usize,
    warm_up: usize,
    repetitions: usize,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Time { ms: f64 },
    Error { error: String },
}

/// How a figure is taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Sets of tensors that launches take in turn.
    pub(super) sets: usize,
    /// Launches of a repetition.
    pub(super) launches: usize,
    /// Repetitions that do not count.
    pub(super) warm_up: usize,
    /// Repetitions, whose median counts.
    pub(super) repetitions: usize,
}

/// A peer's process.
pub(super) struct Peer {
    process: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a command of the shell.
    pub(super) fn start(command: &str) -> Result<Peer, String> {
        let failed = |what: &dyn std::fmt::Display| format!("`{command}` cannot be started: {what}");
        let mut process = Command::new("sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error))?;
        let (requests, answers) = (process.stdin.take(), process.stdout.take());
        let answers = answers.ok_or_else(|| failed(&"it has no output"))?;
        Ok(Peer { process, requests, answers: BufReader::new(answers) })
    }

    /// Milliseconds of a cell, or why there are none.
    pub(super) fn time(&mut self, cell: &Cell, timing: Timing) -> Result<f64, String> {
        let line = serde_json::to_string(&request(cell, timing)).map_err(|error| error.to_string())?;
        let requests = self.requests.as_mut().ok_or("the process has ended")?;
        let asked = writeln!(requests, "{line}").and_then(|()| requests.flush());
        asked.map_err(|error| self.ended(&error))?;
        loop {
            let mut answer = String::new();
            match self.answers.read_line(&mut answer) {
                Ok(0) => return Err(self.ended(&"no answer")),
                Err(error) => return Err(error.to_string()),
                Ok(_) if !answer.starts_with('{') => {}
                Ok(_) => return read(&answer),
            }
        }
    }

    /// What to say of a process that does not answer.
    fn ended(&mut self, what: &dyn std::fmt::Display) -> String {
        self.requests = None;
        match self.process.wait() {
            Ok(status) => format!("{what}: the process ended with {status}"),
            Err(error) => format!("{what}: {error}"),
        }
    }
}

impl Drop for Peer {
    /// The end of its input tells it to end.
    fn drop(&mut self) {
        self.requests = None;
        // There is nobody to tell of a failure, and the process is no longer needed.
        let _ = self.process.wait();
    }
}

fn read(answer: &str) -> Result<f64, String> {
    match serde_json::from_str(answer) {
        Ok(Answer::Time { ms }) if ms > 0.0 => Ok(ms),
        Ok(Answer::Time { ms }) => Err(format!("{ms} ms is no time")),
        Ok(Answer::Error { error }) => Err(error),
        Err(_) => Err(format!("neither a time nor an error: {}", answer.trim())),
    }
}

fn request(cell: &Cell, timing: Timing) -> Request<'_> {
    let Cell { track, column, problem } = cell;
    let Timing { sets, launches, warm_up, repetitions } = timing;
    Request {
        track,
        column: column.name,
        lengths: problem.sequences.iter().map(|sequence| sequence.q.len).collect(),
        padded: problem.sequences.iter().map(|sequence| sequence.q.span).collect(),
        heads: [column.heads.q, column.heads.kv],
        dim: column.dim,
        causal: column.mask.right == Some(0),
        window: column.mask.left,
        sets,
        launches,
        warm_up,
        repetitions,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tracks::{cells, tracks};
    use super::*;

    const TIMING: Timing = Timing { sets: 2, launches: 8, warm_up: 3, repetitions: 21 };

    fn ask(command: &str) -> Result<f64, String> {
        let tracks = tracks().unwrap();
        let cell = cells(&tracks, [&[], &[]]).unwrap().remove(0);
        Peer::start(command)?.time(&cell, TIMING)
    }

    #[test]
    fn a_peer_is_asked_and_answers() {
        let script = r#"read line; case "$line" in *'"padded":[4096,4096,4096,4096]'*) echo; echo '{"ms": 1.5}';; esac"#;
        assert_eq!(ask(script), Ok(1.5));
    }

    #[test]
    fn a_peer_that_fails_is_said_so() {
        let said = |command: &str| ask(command).unwrap_err();
        assert_eq!(said(r#"read line; echo '{"error": "no GPU"}'"#), "no GPU");
        assert!(said("read line; exit 3").contains("exit status: 3"));
        assert!(said("no-such-peer-program").contains("exit status: 127"));
        assert!(said("read line; echo '{}'").contains("neither"));
        assert!(said(r#"read line; echo '{"ms": 0}'"#).contains("no time"));
    }
}
