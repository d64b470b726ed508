//! Shrinks a failing case, as a campaign and `seamproof shrink` do.
//!
//! A finding's words may name the fault (which key a query lost, which head it read), and a minimal case is often too
//! small for that: in one lane any key may be the lost one. So what was wrong before shrinking stays with what was
//! found.

use seamproof_oracle::Problem;

use crate::replay::replay_as;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::{Symptom, same_failure};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::shrink;
use seamproof_judge::subject::Backend;

/// Most evaluations of one shrink.
pub const SHRINK_EVALUATIONS_MAX: usize = 1000;

/// Most evaluations of one shrink where the subject hangs: each candidate that still does takes a deadline, twice.
pub const HANG_EVALUATIONS_MAX: usize = 32;

/// Largest number of problems that are kept of the way to a smaller case, both ends included.
pub const STEPS_MAX: usize = 8;

/// Returns the most evaluations that the shrink of a failure of this check takes.
pub fn shrink_budget(check: Check) -> usize {
    if check == Check::Timeout { HANG_EVALUATIONS_MAX } else { SHRINK_EVALUATIONS_MAX }
}

/// A smaller case and the way to it.
#[derive(Clone, Debug)]
pub struct Minimised {
    /// The case, with what was found in it.
    pub case: Case,
    /// Number of accepted steps.
    pub accepted: usize,
    /// Problems on the way, from the one before shrinking to the smallest, evenly spaced: at most [`STEPS_MAX`].
    pub steps: Vec<Problem>,
}

/// Returns the smallest case that shows the failure `start` of `case`, within `budget` evaluations. `step` sees each
/// case on the way. A case inside the subject's table stays inside. Runs that the case needs before it are made before
/// each candidate. Once `is_over` says so, the smallest case so far is returned.
///
/// A story tells of the case as the field reported it, so that a smaller case has none.
pub fn minimise(
    case: &Case,
    start: &Finding,
    backend: &dyn Backend,
    budget: usize,
    is_over: &dyn Fn() -> bool,
    mut step: impl FnMut(&Problem),
) -> Minimised {
    let mut last = start.clone();
    let mut ended = false;
    let mut way = vec![case.problem.clone()];
    let fails = |candidate: &Problem| {
        // At the end nothing more is accepted, so that the shrinker's passes run dry.
        ended |= is_over();
        let verdict = (!ended).then(|| replay_as(case, backend, candidate));
        let finding = verdict.and_then(Result::ok).and_then(|verdict| same_failure(start, verdict));
        let Some(finding) = finding else { return false };
        step(candidate);
        way.push(candidate.clone());
        last = finding;
        true
    };
    let shrunk = shrink::shrink_within(backend.declaration().table, &case.problem, budget, fails);
    let minimal = shrunk.complete && !ended;
    let mut found = Found { minimal, evaluations: shrunk.evaluations, ..Found::drawn(last.storable()) };
    found.remember(unshrunk(case, start));
    let story = case.story.clone().filter(|_| shrunk.problem == case.problem);
    Minimised {
        case: Case { problem: shrunk.problem, story, found: Some(found), ..case.clone() },
        accepted: shrunk.accepted.iter().map(|(_, steps)| steps).sum(),
        steps: thinned(way),
    }
}

/// Returns at most [`STEPS_MAX`] of these, evenly spaced, with the first and the last.
fn thinned(way: Vec<Problem>) -> Vec<Problem> {
    let last = way.len() - 1;
    let kept = STEPS_MAX.min(way.len());
    let places: Vec<usize> = (0..kept).map(|at| at * last / (kept - 1).max(1)).collect();
    way.into_iter().enumerate().filter(|(at, _)| places.contains(at)).map(|(_, step)| step).collect()
}

/// Returns what was wrong in a case before it was first shrunk, which may be long ago, for the same symptom.
fn unshrunk<'a>(case: &'a Case, start: &'a Finding) -> &'a str {
    let found = case.found.as_ref().filter(|found| Symptom::of(&found.finding) == Symptom::of(start));
    found.and_then(|found| found.unshrunk.as_deref()).unwrap_or(&start.what)
}
