//! Confirmation of a wrong result of a subject that runs in worker processes, before it is shrunk.
//!
//! A worker may have been spoilt by what it ran before: then the result is wrong there and right everywhere else, and a
//! replay shows nothing. So the case is judged *alone*, in a fresh worker. If it does not fail there, it is judged
//! after the runs that its worker had made, which are cut down to the few that the failure needs. Those are stored with
//! the case. A failure that shows in neither way is told as such, with how often it was seen, and is not shrunk.
//!
//! In a process of its own nothing can be fresh. There the case is judged a second time.

use seamproof_judge::case::{Case, EARLIER_MAX};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::{Earlier, Finding};
use seamproof_judge::prose::counted;
use seamproof_judge::subject::Recall;

use super::subjects::{Fresh, Subjects};
use crate::replay::run_earlier;
use crate::worker::smallest;

/// Number of fresh workers in which a failure that does not show at once is looked for, in either way.
const TRIES: usize = 3;
/// Largest number of fresh workers that one search for the needed runs may use.
const SEARCH_MAX: usize = 32;

/// What a second look at a failing case showed.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Confirmation {
    /// It fails by itself.
    Alone,
    /// It fails after these runs, and not by itself; with the words for that.
    After(Vec<Earlier>, String),
    /// It was not seen to fail again, in words.
    Never(String),
}

/// Looks at a failing case a second time.
pub(super) fn confirmed(
    subjects: &dyn Subjects,
    case: &Case,
    finding: &Finding,
    recall: Option<Recall>,
) -> Confirmation {
    let Some(fresh) = subjects.fresh() else { return in_this_process(subjects, case, finding) };
    let fails = |before: &[Earlier]| fails(&fresh, case, finding, before);
    if fails(&[]) {
        return Confirmation::Alone;
    }
    let history = recall.map(|recall| recall()).unwrap_or_default();
    let count = counted(history.len(), "run");
    if !history.is_empty() && (0..TRIES).any(|_| fails(&history)) {
        let needed = smallest(&history, SEARCH_MAX, fails);
        let again = (0..TRIES).filter(|_| fails(&needed)).count();
        let how = format!(
            "alone in a fresh worker it is right; it fails after {} of the {count} before it, {again} of {TRIES} times",
            needed.len()
        );
        // A case holds few runs, and one that does not fail every time with them would not replay.
        if needed.len() <= EARLIER_MAX && again > 0 {
            return Confirmation::After(needed, how);
        }
        return Confirmation::Never(how);
    }
    let alone = (1..TRIES).filter(|_| fails(&[])).count();
    if alone > 0 {
        return Confirmation::Alone;
    }
    let after = if history.is_empty() { String::new() } else { format!(", nor after the {count} before it") };
    let tries = if history.is_empty() { TRIES } else { 2 * TRIES };
    Confirmation::Never(format!(
        "not reproducible alone: it does not fail in a fresh worker{after}; seen 1 of {} times in all",
        tries + 1
    ))
}

/// Whether a case that fails by itself still does so in a fresh worker, where its subject has any.
pub(super) fn stays(subjects: &dyn Subjects, case: &Case, finding: &Finding) -> bool {
    subjects.fresh().is_none_or(|fresh| fails(&fresh, case, finding, &[]))
}

fn in_this_process(subjects: &dyn Subjects, case: &Case, finding: &Finding) -> Confirmation {
    let Ok(backend) = subjects.backend(&case.subject.options) else { return Confirmation::Alone };
    // A process that is gone shows nothing more.
    if backend.ready().is_err() || same_failure(finding, evaluate(backend.as_ref(), &case.problem)).is_some()
    {
        return Confirmation::Alone;
    }
    Confirmation::Never(
        "not seen again: a second look in this process shows nothing; seen 1 of 2 times in all".into(),
    )
}

/// Whether a case fails in a fresh worker after these runs.
fn fails(fresh: &Fresh, case: &Case, finding: &Finding, before: &[Earlier]) -> bool {
    // One worker makes all of the runs.
    let alone = fresh.process();
    for Earlier { options, problem } in before {
        let Ok(called) = alone.called(options) else { return false };
        run_earlier(called.as_ref(), problem);
    }
    let Ok(backend) = alone.backend(&case.subject.options) else { return false };
    same_failure(finding, evaluate(backend.as_ref(), &case.problem)).is_some()
}
