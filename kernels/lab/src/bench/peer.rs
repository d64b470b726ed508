//! Another implementation, measured in the same run on the same machine. It is a program that is asked for one cell
//! after the other, so that both work under the same conditions.
//!
//! A request is one JSON line on its standard input ([`Request`]). The answer is one JSON line on its standard
//! output: `{"ms": 1.23}`, for a backward `{"ms": 1.23, "difference": 0.004}`, or `{"error": "why not"}`. Lines that
//! do not begin with a brace are skipped, because libraries print what they like. The difference is the largest of
//! any sequence, head and gradient: the norm of theirs less ours, divided by the norm of ours.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::timing::Timing;
use super::tracks::BenchCell;

/// A request for a pass over a pack of bf16 sequences, timed as ours is.
#[derive(Serialize)]
struct Request<'a> {
    track: &'a str,
    column: &'a str,
    /// The real rows of each sequence, and the rows that it owns.
    lengths: Vec<usize>,
    padded: Vec<usize>,
    /// The query heads and the KV heads.
    heads: [usize; 2],
    dim: usize,
    causal: bool,
    /// The keys to the left of the diagonal. If absent, all of them.
    window: Option<u32>,
    /// The sets of tensors that launches take in turn, the launches of a repetition, and how long to repeat it: first
    /// unmeasured, then measured, at least once each. The answer is the mean.
    sets: usize,
    launches: usize,
    warm_up_ms: u64,
    measured_ms: u64,
    /// The backward to run. If absent, the forward.
    backward: Option<&'a BackwardRequest>,
}

/// A request for a backward.
#[derive(Debug, Serialize)]
pub(super) struct BackwardRequest {
    /// Whether it must give the same bits each time.
    pub(super) deterministic: bool,
    /// A file of bf16 numbers in four blocks of one length, which q, k, v and dout repeat, one each.
    pub(super) numbers: PathBuf,
    /// A file of our dq, dk and dv in bf16: the first `rows` rows of each, or all if those are fewer.
    pub(super) gradients: PathBuf,
    pub(super) rows: usize,
}

/// The peer's answer for a cell.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(super) struct PeerFigure {
    /// The milliseconds of a launch.
    pub(super) ms: f64,
    /// The difference of a backward's gradients from ours.
    pub(super) difference: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Time(PeerFigure),
    Error { error: String },
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

    /// Returns the peer's answer for a cell, or why there is none.
    pub(super) fn time(
        &mut self,
        cell: &BenchCell,
        timing: Timing,
        backward: Option<&BackwardRequest>,
    ) -> Result<PeerFigure, String> {
        let request = request(cell, timing, backward);
        let line = serde_json::to_string(&request).map_err(|error| error.to_string())?;
        let requests = self.requests.as_mut().ok_or("the process has ended")?;
        let asked = writeln!(requests, "{line}").and_then(|()| requests.flush());
        asked.map_err(|error| self.ended(&error))?;
        loop {
            let mut answer = String::new();
            match self.answers.read_line(&mut answer) {
                Ok(0) => return Err(self.ended(&"no answer")),
                Err(error) => return Err(error.to_string()),
                Ok(_) if !answer.starts_with('{') => {}
                Ok(_) => return read(&answer, backward.is_some()),
            }
        }
    }

    /// Returns the message about a process that does not answer.
    fn ended(&mut self, what: &dyn std::fmt::Display) -> String {
        self.requests = None;
        match self.process.wait() {
            Ok(status) => format!("{what}: the process ended with {status}"),
            Err(error) => format!("{what}: {error}"),
        }
    }
}

impl Drop for Peer {
    /// Ends the process by ending its input.
    fn drop(&mut self) {
        self.requests = None;
        // Nobody could act on a failure, and the process is no longer needed.
        let _ = self.process.wait();
    }
}

fn read(answer: &str, backward: bool) -> Result<PeerFigure, String> {
    match serde_json::from_str(answer) {
        Ok(Answer::Time(PeerFigure { ms, .. })) if ms <= 0.0 => Err(format!("{ms} ms is no time")),
        Ok(Answer::Time(PeerFigure { difference: None, .. })) if backward => {
            Err("a time and no difference to our gradients".to_owned())
        }
        Ok(Answer::Time(measured)) => Ok(measured),
        Ok(Answer::Error { error }) => Err(error),
        Err(_) => Err(format!("neither a time nor an error: {}", answer.trim())),
    }
}

fn request<'a>(cell: &'a BenchCell, timing: Timing, backward: Option<&'a BackwardRequest>) -> Request<'a> {
    let BenchCell { track, column, problem } = cell;
    let Timing { sets, launches, warm_up, measured } = timing;
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
        warm_up_ms: warm_up.as_millis() as u64,
        measured_ms: measured.as_millis() as u64,
        backward,
    }
}

#[cfg(test)]
mod tests {
    use super::super::timing::TIMING;
    use super::super::tracks::{cells, tracks};
    use super::*;

    fn ask(command: &str) -> Result<PeerFigure, String> {
        let tracks = tracks().unwrap();
        let cell = cells(&tracks, [&[], &[]]).unwrap().remove(0);
        Peer::start(command)?.time(&cell, TIMING, None)
    }

    #[test]
    fn a_peer_is_asked_and_answers() {
        let script = r#"read line; case "$line" in *'"padded":[4096,4096,4096,4096]'*) echo; echo '{"ms": 1.5}';; esac"#;
        assert_eq!(ask(script), Ok(PeerFigure { ms: 1.5, difference: None }));
    }

    /// In Python a second function of one name replaces the first. Without a GPU nothing runs the script.
    #[test]
    fn functions_of_a_peer_have_names_of_their_own() {
        let shared = include_str!("../../bench/timed.py");
        for script in [include_str!("../../bench/fa4.py"), include_str!("../../bench/fa3_fp8.py")] {
            let lines = script.lines().chain(shared.lines());
            let mut names: Vec<&str> =
                lines.filter_map(|line| line.strip_prefix("def ")?.split('(').next()).collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert!(all > 9 && names.len() == all, "{all} functions of the names {names:?}");
        }
    }

    #[test]
    fn a_peer_is_told_how_a_figure_is_taken() {
        let asked = r#"*'"sets":2,"launches":8,"warm_up_ms":1500,"measured_ms":2400,'*"#;
        let script = format!("read line; case \"$line\" in {asked}) echo '{{\"ms\": 1.5}}';; esac");
        assert_eq!(ask(&script), Ok(PeerFigure { ms: 1.5, difference: None }));
    }

    #[test]
    fn a_backward_is_asked_for_with_a_comparison() {
        let tracks = tracks().unwrap();
        let cell = cells(&tracks, [&[], &[]]).unwrap().remove(0);
        let [numbers, gradients] = ["n", "g"].map(PathBuf::from);
        let backward = BackwardRequest { deterministic: true, numbers, gradients, rows: 5 };
        let ask = |answer: &str| {
            let asked = r#"*'"backward":{"deterministic":true,"numbers":"n","gradients":"g","rows":5}'*"#;
            let script = format!("read line; case \"$line\" in {asked}) echo '{answer}';; esac");
            Peer::start(&script).unwrap().time(&cell, TIMING, Some(&backward))
        };
        let measured = ask(r#"{"ms": 1.5, "difference": 0.25}"#);
        assert_eq!(measured, Ok(PeerFigure { ms: 1.5, difference: Some(0.25) }));
        assert!(ask(r#"{"ms": 1.5}"#).unwrap_err().contains("no difference"));
        assert!(ask(r#"{"ms": 1.5, "difference": NaN}"#).unwrap_err().contains("neither"));
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
