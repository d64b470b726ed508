//! What is known of a failure only by running it again: the schedule of its subject, and how far off each row and head
//! lies.
//!
//! Only subjects of this process are run, and only small cases: a page is written in the blink of an eye. The limits
//! count work and no time, so that the same folder gives the same page.

use super::Entry;
use crate::backends::{BESIDE, BITS_OF, by_name, is_in_process};
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::evaluate::caught;
use seamproof_judge::ladder::{ErrorMap, Judge, products};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::SubjectName;
use seamproof_simulator::schedule::Schedule;

/// Products of visible pairs, heads and lanes of the largest case that is run again.
const CASE_WORK_MAX: u64 = 1 << 18;
/// The same of all cases together.
const WORK_MAX: u64 = 1 << 21;
/// Work that a case has at least: its schedule and its buffers.
const CASE_WORK_MIN: u64 = 1 << 12;

/// What running a case again tells; nothing of a case that was not run.
#[derive(Debug, Default)]
pub(crate) struct Again {
    /// Schedule of the subject.
    pub(crate) schedule: Option<Schedule>,
    /// Errors of the results, tensor by tensor.
    pub(crate) errors: Vec<ErrorMap>,
}

/// Runs the small cases of some failures again, in order, until the work is done that a page may take.
pub(crate) fn again(entries: &[Entry]) -> Vec<Again> {
    let mut left = WORK_MAX;
    let mut of_entry = |entry: &Entry| {
        let Some(case) = &entry.case else { return Again::default() };
        let work = products(&case.problem).max(CASE_WORK_MIN);
        if work > CASE_WORK_MAX.min(left) {
            return Again::default();
        }
        let Some(backend) = subject(case) else { return Again::default() };
        left -= work;
        run(case, backend.as_ref())
    };
    entries.iter().map(&mut of_entry).collect()
}

/// Returns the subject of a case; `None` where it is not of this process, or the case's values are recorded.
fn subject(case: &Case) -> Option<Box<dyn Backend>> {
    let is_beside = [BESIDE, BITS_OF].iter().any(|name| case.subject.options.contains_key(*name));
    let is_own = case.inputs == InputSource::Generated && is_in_process(&SubjectName::from(&case.subject));
    if is_beside || !is_own {
        return None;
    }
    by_name(&case.subject.name, &case.subject.options).ok()
}

fn run(case: &Case, backend: &dyn Backend) -> Again {
    let schedule = caught(|| backend.schedule(&case.problem).ok()).ok().flatten();
    let is_end = case.found.as_ref().is_some_and(|found| found.finding.check.is_end());
    let judged = || Judge::default().error_maps(backend, &case.problem).unwrap_or_default();
    let errors = if is_end { Vec::new() } else { caught(judged).unwrap_or_default() };
    Again { schedule, errors }
}
