//! The worker's side: it reads requests and writes answers, one after the other.
//!
//! A driver's error is final: after an error of the runner the worker answers and ends, since a context that failed
//! once fails every later request. A *leash* keeps the worker from outliving its supervisor. It is a thread that
//! reads the requests. When they end, for any reason, it kills the worker's process group, whatever the main thread
//! waits for.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use rustix::process::{Signal, getpgrp, getpid, kill_process_group};
use rustix::stdio::{dup2_stdin, dup2_stdout};

use super::frame::{self, BODY_MAX, Frame, FrameError, Kind};
use super::message::{self, MessageError, NoOutputs, OpenRequest, Ready};
use super::runner::{Open, Opened, Runner};
use seamproof_judge::finding::Phase;
use seamproof_judge::subject::RunError;

/// Exit code of a worker that ended because its subject failed, or because its supervisor sent something that is no
/// request.
pub const EXIT_FAILED: u8 = 3;

/// Reason why a worker ends by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A failure of the subject, of which the supervisor was told.
    #[error("the subject failed: {0}")]
    Subject(NoOutputs),
    /// Bytes that are not a request.
    #[error("no request: {0}")]
    Request(#[from] MessageError),
    /// A failure of the pipes.
    #[error("{0}")]
    Pipe(#[from] FrameError),
}

impl From<io::Error> for ServeError {
    fn from(error: io::Error) -> ServeError {
        ServeError::Pipe(error.into())
    }
}

/// Takes the two ends of the pipes away from everybody else. Afterwards stdin is empty and stdout goes to stderr, so
/// that nothing a subject reads or prints can touch a frame.
pub fn pipes() -> io::Result<(File, File)> {
    let requests = io::stdin().as_fd().try_clone_to_owned()?.into();
    let answers = io::stdout().as_fd().try_clone_to_owned()?.into();
    dup2_stdin(OpenOptions::new().read(true).open("/dev/null")?)?;
    dup2_stdout(io::stderr())?;
    Ok((requests, answers))
}

/// Returns the requests, read by the thread that is the leash.
pub fn leashed(requests: impl Read + Send + 'static) -> Receiver<Frame> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || {
        let mut requests = BufReader::new(requests);
        let error = loop {
            match frame::read(&mut requests, BODY_MAX) {
                Ok(frame) => {
                    if sender.send(frame).is_err() {
                        break FrameError::Ended;
                    }
                }
                Err(error) => break error,
            }
        };
        // Where the pipe merely ended, nobody is left to read this.
        let _ = writeln!(io::stderr(), "the worker ends: {error}");
        end_group();
    });
    receiver
}

/// Kills this process and everything that it started. A process that was started by hand leads no group, and ends
/// alone.
fn end_group() {
    if getpgrp() == getpid() {
        let _ = kill_process_group(getpgrp(), Signal::KILL);
    }
    std::process::exit(EXIT_FAILED.into());
}

/// Returns the exit code of a worker's life. Its error goes to stderr, whose end the supervisor shows.
pub(super) fn end(life: Result<(), ServeError>) -> u8 {
    match life {
        Ok(()) => 0,
        // The supervisor has been told of this error.
        Err(ServeError::Subject(_)) => EXIT_FAILED,
        Err(error) => {
            let _ = writeln!(io::stderr(), "the worker ends: {error}");
            EXIT_FAILED
        }
    }
}

/// Answers requests until there are no more, or until the subject fails.
pub fn serve(
    requests: impl IntoIterator<Item = Frame>,
    answers: &mut dyn Write,
    open: Open,
) -> Result<(), ServeError> {
    let mut server = Server { answers, open, runner: None };
    requests.into_iter().try_for_each(|request| server.answer(&request))
}

struct Server<'a> {
    answers: &'a mut dyn Write,
    open: Open,
    runner: Option<Box<dyn Runner>>,
}

impl Server<'_> {
    fn answer(&mut self, request: &Frame) -> Result<(), ServeError> {
        match request.kind {
            Kind::Open => self.open(request),
            Kind::Run => self.run(request),
            other => Err(FrameError::Garbage(format!("{other:?} is no request")).into()),
        }
    }

    fn open(&mut self, request: &Frame) -> Result<(), ServeError> {
        let OpenRequest { name, options, device } = message::decode(&request.body)?;
        // The open subject is closed first, since two may not fit on a device.
        self.runner = None;
        match (self.open)(&name, &options, device) {
            Ok(Opened { runner, devices, name }) => {
                self.runner = Some(runner);
                self.say(request, Kind::Ready, &message::encode(&Ready { devices, name, ..Ready::default() }))
            }
            Err(error) => {
                let failure = NoOutputs::Infrastructure(error.to_string());
                self.say(request, Kind::Failed, &message::encode(&failure))
            }
        }
    }

    fn run(&mut self, request: &Frame) -> Result<(), ServeError> {
        let (problem, inputs) = message::decode_run(&request.body)?;
        self.say(request, Kind::Phase, &message::encode_phase(Phase::Received))?;
        let Server { answers, runner, .. } = self;
        let mut broken = None;
        let mut reached = |phase: Phase| {
            let written = frame::write(answers, Kind::Phase, request.sequence, &message::encode_phase(phase));
            broken = broken.take().or(written.err());
        };
        let result = match runner {
            Some(runner) => runner.run(&problem, &inputs, &mut reached),
            None => Err(RunError::Infrastructure("nothing is open".into())),
        };
        if let Some(error) = broken {
            return Err(error.into());
        }
        match result {
            Ok(outputs) => self.say(request, Kind::Outputs, &message::encode_outputs(&outputs)),
            Err(error) => {
                let failure = NoOutputs::from(error);
                self.say(request, Kind::Failed, &message::encode(&failure))?;
                if failure.ends_worker() { Err(ServeError::Subject(failure)) } else { Ok(()) }
            }
        }
    }

    fn say(&mut self, request: &Frame, kind: Kind, body: &[u8]) -> Result<(), ServeError> {
        Ok(frame::write(self.answers, kind, request.sequence, body)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::worker::{OpenError, sentinel_problem};
    use seamproof_judge::subject::RunError;
    use seamproof_judge::subject::Table;
    use seamproof_judge::subjects::Emulated;
    use seamproof_judge::values;

    /// A runner that fails on every run.
    struct Failing;

    impl Runner for Failing {
        fn run(
            &mut self,
            _: &seamproof_oracle::Problem,
            _: &seamproof_oracle::Inputs,
            _: &mut dyn FnMut(Phase),
        ) -> Result<seamproof_judge::subject::Outputs, RunError> {
            Err(RunError::Crash("a driver's error".into()))
        }
    }

    fn open(name: &str, _: &BTreeMap<String, String>, _: usize) -> Result<Opened, OpenError> {
        match name {
            "failing" => Ok(Opened { runner: Box::new(Failing), devices: 3, name: "third".into() }),
            "emulated" => Ok(Opened::on_core(Box::new(Emulated::default()))),
            _ => Err(OpenError(format!("{name} is no subject"))),
        }
    }

    fn opening(name: &str) -> Frame {
        let request = OpenRequest { name: name.into(), options: BTreeMap::new(), device: 0 };
        Frame { kind: Kind::Open, sequence: 5, body: message::encode(&request) }
    }

    fn running() -> Frame {
        let problem = sentinel_problem(&Table::default()).expect("a problem");
        let body = message::encode_run(&problem, &values::inputs(&problem));
        Frame { kind: Kind::Run, sequence: 6, body }
    }

    /// Returns a worker's answers, and how it ended.
    fn answers(requests: Vec<Frame>) -> (Vec<Frame>, Result<(), ServeError>) {
        let mut bytes = Vec::new();
        let end = serve(requests, &mut bytes, open);
        let mut rest = &bytes[..];
        let frames = std::iter::from_fn(|| frame::read(&mut rest, BODY_MAX).ok());
        (frames.collect(), end)
    }

    #[test]
    fn a_run_is_answered_phase_by_phase() {
        let (frames, end) = answers(vec![opening("emulated"), running()]);
        assert!(end.is_ok());
        assert_eq!((frames[0].kind, frames[0].sequence), (Kind::Ready, 5));
        let phases = frames[1..].iter().filter(|frame| frame.kind == Kind::Phase);
        let phases: Vec<Phase> =
            phases.map(|frame| message::decode_phase(&frame.body).expect("a phase").0).collect();
        assert_eq!(
            phases,
            Phase::ALL.into_iter().filter(|phase| *phase != Phase::Compiling).collect::<Vec<_>>()
        );
        let last = frames.last().expect("an answer");
        assert_eq!((last.kind, last.sequence), (Kind::Outputs, 6));
    }

    #[test]
    fn the_error_of_a_subject_is_the_last_answer() {
        let (frames, end) = answers(vec![opening("failing"), running(), running()]);
        assert!(matches!(end, Err(ServeError::Subject(NoOutputs::Crash(_)))));
        let ready = Ready { devices: 3, name: "third".into(), ..Ready::default() };
        assert_eq!(message::decode(&frames[0].body), Ok(ready));
        let last = frames.last().expect("an answer");
        assert_eq!(message::decode(&last.body), Ok(NoOutputs::Crash("a driver's error".into())));
        assert_eq!(frames.iter().filter(|frame| frame.kind == Kind::Failed).count(), 1);
    }

    #[test]
    fn what_is_no_subject_and_no_request_is_answered_or_ends_it() {
        let (frames, end) = answers(vec![running(), opening("abacus")]);
        assert!(end.is_ok());
        assert!(frames.iter().filter(|frame| frame.kind == Kind::Failed).count() == 2);
        for (kind, body) in [(Kind::Run, vec![1, 2]), (Kind::Open, vec![b'{']), (Kind::Outputs, vec![])] {
            assert!(answers(vec![Frame { kind, sequence: 1, body }]).1.is_err());
        }
    }
}
