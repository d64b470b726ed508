//! Evaluation of one case: the judge's verdict, with every panic turned into a value.
//!
//! A panic in the subject's run counts as its crash, which is a finding. A panic anywhere else is a fault of this
//! program ([`Verdict::Infrastructure`]) and must never be mistaken for a verdict on the subject. A subject that can
//! take the whole process with it needs a worker process, which this module does not provide.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use seamproof_oracle::Problem;

use crate::subject::Backend;

use crate::generate::Malformed;
use crate::ladder::{self, Depth, Judge};

use crate::finding::Finding;
use crate::verdict::{Cost, Verdict};

thread_local! {
    /// Whether a panic of this thread becomes a value here. The hook then need not report it.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Judges one problem on one subject.
pub fn evaluate(backend: &dyn Backend, problem: &Problem) -> Verdict {
    evaluate_timed(backend, problem).0
}

/// Judges one problem on one subject, and returns the time spent in each part as well. After a panic the times are
/// zero.
pub fn evaluate_timed(backend: &dyn Backend, problem: &Problem) -> (Verdict, Cost) {
    match caught(|| ladder::examine(backend, problem)) {
        Ok(examination) => (examination.verdict, examination.cost),
        Err(what) => (Verdict::Infrastructure(what), Cost::default()),
    }
}

/// Returns the findings of every rung of a judge on one problem, whatever the rungs before it found; none where the
/// judge panics.
pub fn findings(judge: &Judge, backend: &dyn Backend, problem: &Problem) -> Vec<Finding> {
    let Ok(examination) = caught(|| judge.examine(backend, problem, Depth::All)) else { return Vec::new() };
    let first = match examination.verdict {
        Verdict::Finding(finding) => Some(*finding),
        _ => None,
    };
    first.into_iter().chain(examination.further).collect()
}

/// Judges how this program treats a malformed problem.
pub fn evaluate_malformed(malformed: &Malformed) -> Verdict {
    caught(|| ladder::judge_malformed(malformed)).unwrap_or_else(Verdict::Infrastructure)
}

/// Keeps panics that become verdicts off the terminal; all others are reported as before. A program calls this at its
/// start, and a campaign in memory at its own. It wraps the process's panic hook once.
pub fn quiet_caught_panics() {
    static WRAPPED: Once = Once::new();
    WRAPPED.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                report(info);
            }
        }));
    });
}

/// Returns the judge's answer, or the message of its panic.
pub fn caught<T>(judge: impl FnOnce() -> T) -> Result<T, String> {
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
