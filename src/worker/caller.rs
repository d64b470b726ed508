//! The protocol turned round: the worker is the process that started this program.
//!
//! There is one such process, and nothing can be started in its place. Whatever ends it, or makes it useless, is the
//! end of the campaign.

use std::fs::File;
use std::io;
use std::sync::Mutex;

use rustix::io::ioctl_fionbio;
use seamproof_oracle::{Inputs, Problem};

use super::frame::{self, BODY_MAX, Frame, FrameError, Kind};
use super::lock;
use super::message::{self, Ready};
use super::peer::{End, Peer, Watch, Watched, broken};
use super::serve::pipes;
use super::session::{Death, Session};
use super::settings::Deadlines;
use seamproof_judge::case::Subject;
use seamproof_judge::finding::Cause;
use seamproof_judge::subject::{Ended, Outputs, RunError};

/// Pipes to the process that started this one.
#[derive(Debug)]
struct Calling {
    answers: File,
    requests: File,
    watch: Watch,
}

impl Peer for Calling {
    fn id(&self) -> Option<u32> {
        None
    }

    fn watch(&mut self) -> &mut Watch {
        &mut self.watch
    }

    fn write(&mut self, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()> {
        frame::write(&mut Watched { pipe: &mut self.requests, watch: &mut self.watch }, kind, sequence, body)
    }

    fn read(&mut self) -> Result<Frame, FrameError> {
        frame::read(&mut Watched { pipe: &mut self.answers, watch: &mut self.watch }, BODY_MAX)
    }

    fn end(self: Box<Self>, error: &FrameError) -> End {
        let known = if self.watch.has_fired() { Some(Cause::Hang) } else { broken(error) };
        // Its exit code and its stderr are its own starter's to see.
        let said = if known.is_none() { "the calling process went away" } else { "" };
        End { cause: known.unwrap_or(Cause::Failed), said: said.to_owned() }
    }

    fn dismiss(self: Box<Self>) -> String {
        String::new()
    }
}

/// The worker that started this process.
#[derive(Debug)]
pub struct Caller {
    session: Mutex<Session>,
    ended: Mutex<Option<String>>,
}

impl Caller {
    /// Takes stdin and stdout for the frames. Afterwards what is printed to stdout goes to stderr.
    pub fn connect(deadlines: Deadlines) -> io::Result<Caller> {
        // Here the answers come in, and the requests go out.
        let (answers, requests) = pipes()?;
        // Without this, writing more than the pipe has room for would wait for the worker, whatever the deadline.
        ioctl_fionbio(&requests, true)?;
        let session =
            Session::over(Box::new(Calling { answers, requests, watch: Watch::default() }), deadlines);
        Ok(Caller { session: Mutex::new(session), ended: Mutex::new(None) })
    }

    /// Asks the worker to open its subject, under this name.
    pub fn open(&self, name: &str) -> Result<Ready, String> {
        let subject = Subject { name: name.to_owned(), options: Default::default() };
        let opened = lock(&self.session).open(&subject);
        let ready = opened.inspect_err(|what| *lock(&self.ended) = Some(what.clone()))?;
        Ok(ready.unwrap_or_default())
    }

    /// Runs a problem on the worker. Its first end is the result of the run that it came in; later runs fail as
    /// nothing of the subject's.
    pub fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let body = message::encode_run(problem, inputs);
        let mut session = lock(&self.session);
        if let Some(how) = self.ended() {
            return Err(RunError::Infrastructure(format!("the calling process has ended: {how}")));
        }
        let death = match session.run(&body) {
            Ok(answer) if !session.is_spent() => return answer,
            Ok(answer) => {
                *lock(&self.ended) = Some("an answer came past its deadline".to_owned());
                return answer;
            }
            Err(death) => death,
        };
        *lock(&self.ended) = Some(format!("{}{}", death.ending, death.said));
        Err(error_of(death))
    }

    /// Returns how the worker ended, once it has.
    pub fn ended(&self) -> Option<String> {
        lock(&self.ended).clone()
    }
}

/// Returns what the worker's end means for the run that it came in.
fn error_of(Death { ending, said }: Death) -> RunError {
    match ending.cause {
        // The device ran out of memory. A subject is not at fault for memory that others hold.
        Cause::OutOfMemory => RunError::OutOfMemory(said),
        // It did not even begin with the run.
        Cause::Failed if ending.after.is_none() => {
            RunError::Infrastructure(format!("between two runs{said}"))
        }
        _ => {
            let what = format!("and not tried again: there is no other process with this subject{said}");
            RunError::Ended(Box::new(Ended { ending, what, before: Vec::new() }))
        }
    }
}
