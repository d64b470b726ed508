//! A worker that answers other questions than runs, one at a time. It is started afresh after its end, which is
//! confirmed as that of a run is: the same question, alone in a fresh worker.

use serde::Serialize;

use super::confirm::Bench;
use super::message;
use super::session::{Death, Decode, Session};
use seamproof_judge::case::Subject;
use seamproof_judge::finding::Cause;
use seamproof_judge::subject::{Ended, RunError};

/// A worker with a subject, and its successors.
pub struct Questions {
    bench: Bench,
    subject: Subject,
    session: Option<Session>,
}

/// Reason why a worker gave no answer.
enum Silence {
    NotStarted(String),
    Died(Death),
}

impl Questions {
    pub(super) fn new(bench: Bench, subject: Subject) -> Questions {
        Questions { bench, subject, session: None }
    }

    /// Starts a worker with the subject, unless there is one.
    pub fn start(&mut self) -> Result<(), String> {
        if self.session.is_none() {
            self.session = Some(self.bench.session(&self.subject)?);
        }
        Ok(())
    }

    /// Returns the answer to a question, as `decode` reads it.
    pub fn ask<T>(&mut self, question: &impl Serialize, decode: Decode<T>) -> Result<T, RunError> {
        let body = message::encode_question(question);
        let first = match self.once(&body, decode) {
            Ok(answer) => return answer,
            Err(Silence::NotStarted(what)) => return Err(RunError::Infrastructure(what)),
            Err(Silence::Died(death)) => death,
        };
        if first.ending.cause == Cause::OutOfMemory {
            return Err(RunError::OutOfMemory(first.said));
        }
        let ended = |death: &Death, how: &str| {
            let what = format!("{how}{}", death.said);
            Err(RunError::Ended(Box::new(Ended { ending: death.ending, what, before: Vec::new() })))
        };
        match self.once(&body, decode) {
            Err(Silence::Died(again)) => ended(&again, "and again alone in a fresh worker"),
            Err(Silence::NotStarted(what)) => ended(&first, &format!("could not be confirmed ({what})")),
            Ok(_) => ended(&first, "alone in a fresh worker it does not fail"),
        }
    }

    fn once<T>(&mut self, body: &[u8], decode: Decode<T>) -> Result<Result<T, RunError>, Silence> {
        let mut session = match self.session.take().filter(|session| !session.is_spent()) {
            Some(session) => session,
            None => self.bench.session(&self.subject).map_err(Silence::NotStarted)?,
        };
        let (answer, _) = session.answer(body, decode).map_err(Silence::Died)?;
        self.session = Some(session);
        Ok(answer)
    }
}
