//! One case, evaluated: the judge's verdict with every panic turned into a value.
//!
//! The judge takes a panic of the subject's run for its crash, which is a finding. A panic anywhere else is a fault of
//! this program ([`Verdict::Infrastructure`]): it must never be mistaken for a verdict on the subject. Subjects that can
//! take the whole process with them need a worker process; this module does not provide one.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};

use seamproof_oracle::Problem;

use crate::backend::Backend;
use crate::backends::{self, BackendError};
use crate::case::{Case, InputSource, Subject};
use crate::generate::Malformed;
use crate::judge;
use crate::verdict::{Cost, Verdict};

thread_local! {
    /// Whether a panic of this thread becomes a value here, so that the hook need not report it.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Why a stored case cannot be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The case's inputs are in a file.
    #[error("inputs: recorded inputs ({file}) are not supported yet; use \"generated\"")]
    Recorded {
        /// The file.
        file: String,
    },
    /// The subject cannot be made.
    #[error("subject: {0}")]
    Subject(#[from] BackendError),
}

/// Judges one problem on one subject.
pub fn evaluate(backend: &dyn Backend, problem: &Problem) -> Verdict {
    evaluate_timed(backend, problem).0
}

/// Judges one problem on one subject, and says where the time went; nothing is known of it after a panic.
pub fn evaluate_timed(backend: &dyn Backend, problem: &Problem) -> (Verdict, Cost) {
    let mut cost = Cost::default();
    let verdict = caught(|| {
        let examination = judge::examine(backend, problem);
        cost = examination.cost;
        examination.verdict
    });
    (verdict, cost)
}

/// Judges how this program takes a malformed problem.
pub fn evaluate_malformed(malformed: &Malformed) -> Verdict {
    caught(|| judge::judge_malformed(malformed))
}

/// The subject of a stored case, ready to run.
pub fn subject_of(case: &Case) -> Result<Box<dyn Backend>, ReplayError> {
    if let InputSource::Recorded { file, .. } = &case.inputs {
        return Err(ReplayError::Recorded { file: file.clone() });
    }
    let Subject { name, options } = &case.subject;
    Ok(backends::by_name(name, options)?)
}

/// Judges a stored case on its subject.
pub fn replay(case: &Case) -> Result<Verdict, ReplayError> {
    let backend = subject_of(case)?;
    Ok(evaluate(backend.as_ref(), &case.problem))
}

/// Keeps panics that become verdicts off the terminal; all others are reported as before. For a program's start.
pub fn quiet_caught_panics() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !CAUGHT.get() {
            report(info);
        }
    }));
}

fn caught(judge: impl FnOnce() -> Verdict) -> Verdict {
    let outer = CAUGHT.replace(true);
    let verdict = panic::catch_unwind(AssertUnwindSafe(judge)).unwrap_or_else(|payload| {
        Verdict::Infrastructure(format!("the judge panicked: {}", message(payload.as_ref())))
    });
    CAUGHT.set(outer);
    verdict
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let literal = payload.downcast_ref::<&str>().copied();
    literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
