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
use crate::case::{Case, Earlier, InputSource, Subject};
use crate::generate::Malformed;
use crate::judge::{self, Depth, Judge};
use crate::values;
use crate::verdict::{Cost, Finding, Verdict};

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
    match caught(|| judge::examine(backend, problem)) {
        Ok(examination) => (examination.verdict, examination.cost),
        Err(what) => (Verdict::Infrastructure(what), Cost::default()),
    }
}

/// What each rung of a judge finds on one problem, whatever the rungs before it found; nothing where the judge panics.
pub fn findings(judge: &Judge, backend: &dyn Backend, problem: &Problem) -> Vec<Finding> {
    let Ok(examination) = caught(|| judge.examine(backend, problem, Depth::All)) else { return Vec::new() };
    let first = match examination.verdict {
        Verdict::Finding(finding) => Some(*finding),
        _ => None,
    };
    first.into_iter().chain(examination.further).collect()
}

/// Judges how this program takes a malformed problem.
pub fn evaluate_malformed(malformed: &Malformed) -> Verdict {
    caught(|| judge::judge_malformed(malformed)).unwrap_or_else(Verdict::Infrastructure)
}

/// The subject of a stored case, ready to run.
pub fn subject_of(case: &Case) -> Result<Box<dyn Backend>, ReplayError> {
    if let InputSource::Recorded { file, .. } = &case.inputs {
        return Err(ReplayError::Recorded { file: file.clone() });
    }
    let Subject { name, options } = &case.subject;
    Ok(backends::by_name(name, options)?)
}

/// Whether this program cannot make the subject of a stored case, which then is another crate's: that alone can judge the
/// case on it.
pub fn is_foreign(case: &Case) -> bool {
    use BackendError::{Fault, Unknown};
    matches!(subject_of(case), Err(ReplayError::Subject(Unknown { .. } | Fault { .. })))
}

/// Judges a stored case on its subject, after the runs that it needs before it.
pub fn replay(case: &Case) -> Result<Verdict, ReplayError> {
    replay_as(case, subject_of(case)?.as_ref(), &case.problem)
}

/// Judges a problem in a case's place, on this subject: after the runs that the case needs before it.
pub fn replay_as(case: &Case, backend: &dyn Backend, problem: &Problem) -> Result<Verdict, ReplayError> {
    run_before(case)?;
    Ok(evaluate(backend, problem))
}

/// Makes the runs that a case needs before it, on its subject. A thread goes back to the worker that it had, so that the
/// case meets what they left behind; what comes of themselves is nobody's question. Of a subject with a fault at its call
/// they are the calls as they were made, wrong already.
fn run_before(case: &Case) -> Result<(), ReplayError> {
    for Earlier { options, problem } in &case.before {
        let backend = backends::by_name(backends::called(&case.subject.name), options)?;
        let _ = caught(|| backend.run(problem, &values::inputs(problem)));
    }
    Ok(())
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

/// What the judge says, or how it panicked.
fn caught<T>(judge: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CAUGHT.replace(true);
    let said = panic::catch_unwind(AssertUnwindSafe(judge))
        .map_err(|payload| format!("the judge panicked: {}", message(payload.as_ref())));
    CAUGHT.set(outer);
    said
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let literal = payload.downcast_ref::<&str>().copied();
    literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
