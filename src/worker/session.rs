//! A [`Session`] is a started worker, which is asked one thing at a time.

use super::frame::{FrameError, Kind};
use super::message::{self, COMPILING_MAX, MessageError, NoOutputs, OpenRequest, Ready, Refused};
use super::peer::{End, Peer};
use super::process::Process;
use super::settings::{Deadlines, Launch};
use seamproof_judge::case::Subject;
use seamproof_judge::finding::Phase;
use seamproof_judge::finding::{Cause, Ending};
use seamproof_judge::subject::{Costs, Outputs, RunError};

/// The death of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Death {
    pub(super) ending: Ending,
    /// Last words of the worker: its answer, what was wrong with the answer, the end of its stderr.
    pub(super) said: String,
}

/// Reason why a worker cannot begin.
pub(super) type StartError = String;

#[derive(Debug)]
pub(super) struct Session {
    /// The worker; `None` once it has died.
    peer: Option<Box<dyn Peer>>,
    /// How the worker was started; `None` where it was not started from here.
    launch: Option<Launch>,
    deadlines: Deadlines,
    device: usize,
    sequence: u64,
    open: Option<Subject>,
    /// Whether the worker's last answer came past the deadline.
    is_spent: bool,
}

impl Session {
    /// Starts a worker for a device, without asking anything of it.
    pub(super) fn start(launch: &Launch, device: usize, deadlines: Deadlines) -> Result<Session, StartError> {
        let process = Process::spawn(launch)
            .map_err(|error| format!("the worker {} cannot be started: {error}", launch.program.display()))?;
        Ok(Session { launch: Some(launch.clone()), device, ..Session::over(Box::new(process), deadlines) })
    }

    /// Returns a session with a worker that is there already, on the first device.
    pub(super) fn over(mut peer: Box<dyn Peer>, deadlines: Deadlines) -> Session {
        peer.watch().arm(deadlines.start);
        let peer = Some(peer);
        Session { peer, launch: None, deadlines, device: 0, sequence: 0, open: None, is_spent: false }
    }

    /// Whether the worker was started in this way.
    pub(super) fn is_of(&self, launch: &Launch) -> bool {
        self.launch.as_ref() == Some(launch)
    }

    /// Whether the worker answered so late that it was killed meanwhile.
    pub(super) fn is_spent(&self) -> bool {
        self.is_spent
    }

    /// Returns the id of the process, while there is one.
    pub(super) fn id(&self) -> Option<u32> {
        self.peer.as_ref().and_then(|peer| peer.id())
    }

    /// Opens a subject, unless it is open. Returns the worker's answer about its devices where the subject was not
    /// open.
    pub(super) fn open(&mut self, subject: &Subject) -> Result<Option<Ready>, StartError> {
        if self.open.as_ref() == Some(subject) {
            return Ok(None);
        }
        let Subject { name, options } = subject.clone();
        let body = message::encode(&OpenRequest { name, options, device: self.device });
        let no_outputs: Decode<()> = |_| Err(MessageError("results of no run".into()));
        let (answer, _) = self.ask(Kind::Open, &body, no_outputs).map_err(|death| {
            let Death { ending: Ending { cause, .. }, said } = death;
            match cause {
                Cause::Hang => format!("the worker did not start in {:?}{said}", self.deadlines.start),
                cause => format!("the worker did not start: {cause}{said}"),
            }
        })?;
        match answer {
            Answer::Ready(ready) => {
                self.open = Some(subject.clone());
                Ok(Some(ready))
            }
            Answer::Failed(NoOutputs::Infrastructure(what) | NoOutputs::Raised(what)) => Err(what),
            _ => Err("the worker answered something else than that the subject is open".into()),
        }
    }

    /// Runs an encoded run on the subject that is open. The inner error is a refusal or a failure of the harness.
    pub(super) fn run(&mut self, body: &[u8]) -> Result<Result<Outputs, RunError>, Death> {
        let (outputs, costs) = self.answer(body, message::decode_outputs)?;
        Ok(outputs.map(|outputs| Outputs { costs, ..outputs }))
    }

    /// Sends an encoded request to the subject that is open. Returns the answer as `decode` reads it, or a refusal or a
    /// failure of the harness, and the costs.
    pub(super) fn answer<T>(
        &mut self,
        body: &[u8],
        decode: Decode<T>,
    ) -> Result<(Result<T, RunError>, Costs), Death> {
        let (answer, costs) = self.ask(Kind::Run, body, decode)?;
        let answer = match answer {
            Answer::Outputs(outputs) => Ok(outputs),
            Answer::Failed(NoOutputs::Refused(Refused::Refusal(refusal))) => Err(RunError::Refused(refusal)),
            Answer::Failed(NoOutputs::Refused(Refused::Row(row))) => Err(RunError::RefusedByName(row)),
            Answer::Failed(NoOutputs::Raised(what)) => Err(RunError::Crash(what)),
            Answer::Failed(failure) => Err(RunError::Infrastructure(failure.to_string())),
            Answer::Ready(_) => Err(RunError::Infrastructure("the worker opened what it was to run".into())),
        };
        Ok((answer, costs))
    }

    /// Sends a request and waits for its answer, phase by phase.
    fn ask<T>(&mut self, kind: Kind, body: &[u8], decode: Decode<T>) -> Result<(Answer<T>, Costs), Death> {
        self.sequence += 1;
        let mut progress = Progress::default();
        let answer = self.exchange((kind, body), decode, &mut progress);
        let after = progress.after;
        match answer {
            Ok(Answer::Failed(failure)) if failure.ends_worker() => Err(self.dismissed(after, failure)),
            Ok(answer) => Ok((answer, progress.costs)),
            Err(error) => Err(self.died(after, &error)),
        }
    }

    fn exchange<T>(
        &mut self,
        (kind, body): (Kind, &[u8]),
        decode: Decode<T>,
        progress: &mut Progress,
    ) -> Result<Answer<T>, FrameError> {
        let peer = self.peer.as_mut().ok_or(FrameError::Ended)?;
        let time =
            |after| if kind == Kind::Open { self.deadlines.start } else { self.deadlines.after(after) };
        peer.watch().arm(time(None));
        peer.write(kind, self.sequence, body)?;
        loop {
            let frame = peer.read()?;
            if frame.sequence != self.sequence {
                let (got, expected) = (frame.sequence, self.sequence);
                return Err(FrameError::Garbage(format!("an answer to request {got} instead of {expected}")));
            }
            let garbage = |error: MessageError| FrameError::Garbage(error.to_string());
            // A whole answer counts, however late. A further request to a late worker would only meet its death.
            if frame.kind != Kind::Phase && peer.watch().rest() {
                self.is_spent = true;
            }
            match frame.kind {
                Kind::Phase => {
                    let (phase, costs) = message::decode_phase(&frame.body).map_err(garbage)?;
                    progress.reach(phase, costs)?;
                    peer.watch().arm(time(progress.after));
                }
                Kind::Outputs => {
                    return decode(&frame.body).map(Answer::Outputs).map_err(garbage);
                }
                Kind::Failed => {
                    return message::decode_failed(&frame.body).map(Answer::Failed).map_err(garbage);
                }
                Kind::Ready => {
                    return message::decode_ready(&frame.body).map(Answer::Ready).map_err(garbage);
                }
                Kind::Open | Kind::Run => return Err(FrameError::Garbage("a request for an answer".into())),
            }
        }
    }

    /// Returns the death of a worker that said why it ends.
    fn dismissed(&mut self, after: Option<Phase>, failure: NoOutputs) -> Death {
        let stderr = self.peer.take().map(Peer::dismiss).unwrap_or_default();
        let (cause, what) = match failure {
            NoOutputs::OutOfMemory(what) => (Cause::OutOfMemory, what),
            other => (Cause::Failed, other.to_string()),
        };
        Death { ending: Ending { cause, after }, said: said(&what, &stderr) }
    }

    fn died(&mut self, after: Option<Phase>, error: &FrameError) -> Death {
        let Some(peer) = self.peer.take() else {
            return Death { ending: Ending { cause: Cause::Garbage, after }, said: "; it was dead".into() };
        };
        let End { cause, said: stderr } = peer.end(error);
        let what = match (cause, error) {
            (Cause::Hang, _) => format!("no sign of life for {:?}", self.deadlines.after(after)),
            (_, FrameError::Garbage(what)) => what.clone(),
            (_, FrameError::Version(_)) => error.to_string(),
            _ => String::new(),
        };
        Death { ending: Ending { cause, after }, said: said(&what, &stderr) }
    }
}

/// Progress of a run.
#[derive(Debug, Default)]
struct Progress {
    after: Option<Phase>,
    /// Number of kernels that were built.
    compiled: u32,
    costs: Costs,
}

impl Progress {
    /// Notes a phase. Phases come in order and once each, but for that of building a kernel.
    fn reach(&mut self, phase: Phase, costs: Costs) -> Result<(), FrameError> {
        let again = phase == Phase::Compiling && self.after == Some(phase);
        if self.after.is_some_and(|last| phase <= last) && !again {
            return Err(FrameError::Garbage(format!("phase {phase} too late, or a second time")));
        }
        self.compiled += u32::from(phase == Phase::Compiling);
        if self.compiled > COMPILING_MAX {
            return Err(FrameError::Garbage(format!("phase {phase} more than {COMPILING_MAX} times")));
        }
        (self.after, self.costs) = (Some(phase), costs);
        Ok(())
    }
}

/// Function that reads the results in an answer.
pub(super) type Decode<T> = fn(&[u8]) -> Result<T, MessageError>;

/// Answer of a worker.
enum Answer<T> {
    Ready(Ready),
    Outputs(T),
    Failed(NoOutputs),
}

fn said(what: &str, stderr: &str) -> String {
    let what = if what.is_empty() { String::new() } else { format!("; {what}") };
    if stderr.is_empty() { what } else { format!("{what}; its stderr ends: {stderr}") }
}
