//! Shrinks a failing case, as a campaign and `seamproof shrink` do.
//!
//! A finding's words may name the fault (which key a query lost, which head it read), and a minimal case is often too small for
//! that: in one lane any key may be the lost one. So what was wrong before shrinking stays with what was found.

use seamproof_oracle::Problem;

use super::plan::Control;

use crate::replay::replay_as;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::{Symptom, same_failure};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::shrink;
use seamproof_judge::subject::Backend;

/// Evaluations that one shrink may use.
pub const SHRINK_EVALUATIONS_MAX: usize = 1000;

/// The same for a subject that hangs: each candidate that still does takes a deadline, twice.
pub const HANG_EVALUATIONS_MAX: usize = 32;

/// Evaluations that the shrink of this failure may use.
pub fn shrink_budget(check: Check) -> usize {
    if check == Check::Timeout { HANG_EVALUATIONS_MAX } else { SHRINK_EVALUATIONS_MAX }
}

/// A smaller case and the way to it.
#[derive(Clone, Debug)]
pub struct Minimised {
    /// The case, with what was found in it.
    pub case: Case,
    /// Steps that were accepted.
    pub accepted: usize,
}

/// The smallest case that shows the failure `start` of `case`, within `budget` evaluations; `step` sees each one on the
/// way. Where the case needs runs before it, so does each candidate, and they are made before each. A request to stop ends it early, with the smallest case so far.
pub fn minimise(
    case: &Case,
    start: &Finding,
    backend: &dyn Backend,
    budget: usize,
    control: &Control,
    mut step: impl FnMut(&Problem),
) -> Minimised {
    let mut last = start.clone();
    let fails = |candidate: &Problem| {
        // Once somebody asked to stop nothing is accepted, so that the shrinker's passes run dry.
        let verdict = (!control.stopped()).then(|| replay_as(case, backend, candidate));
        let finding = verdict.and_then(Result::ok).and_then(|verdict| same_failure(start, verdict));
        let Some(finding) = finding else { return false };
        step(candidate);
        last = finding;
        true
    };
    let shrunk = shrink::shrink(&case.problem, budget, fails);
    let minimal = shrunk.complete && !control.stopped();
    let mut found = Found { minimal, evaluations: shrunk.evaluations, ..Found::drawn(last.storable()) };
    found.remember(unshrunk(case, start));
    Minimised {
        case: Case { problem: shrunk.problem, found: Some(found), ..case.clone() },
        accepted: shrunk.accepted.iter().map(|(_, steps)| steps).sum(),
    }
}

/// What was wrong in a case before anybody shrunk it: it may have been shrunk already, for the same symptom.
fn unshrunk<'a>(case: &'a Case, start: &'a Finding) -> &'a str {
    let found = case.found.as_ref().filter(|found| Symptom::of(&found.finding) == Symptom::of(start));
    found.and_then(|found| found.unshrunk.as_deref()).unwrap_or(&start.what)
}
