//! What is known of a failure only by running it again: the schedule of its subject and what the checker says against
//! it, how far off each row and head lies, and which keys each query saw.
//!
//! Only subjects of this process are run, and only small cases: a page is written in the blink of an eye. The limits
//! count work and no time, so that the same folder gives the same page.

use super::Entry;
use crate::backends::{BESIDE, BITS_OF, by_name, is_in_process};
use seamproof_judge::case::{Case, InputSource};
use seamproof_judge::evaluate::caught;
use seamproof_judge::ladder::{ErrorMap, Judge, ReadRow, SeenRow, products, undecodable};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::TensorName;
use seamproof_simulator::check::{CheckError, check};
use seamproof_simulator::schedule::Schedule;

/// Products of visible pairs, heads and lanes of the largest case that is run again.
const CASE_WORK_MAX: u64 = 1 << 18;
/// The same of all cases together.
const WORK_MAX: u64 = 1 << 21;
/// Work that a case has at least: its schedule and its buffers.
const CASE_WORK_MIN: u64 = 1 << 12;

/// What a run on other inputs tells.
const KEYS: &str = "Which keys each query saw";
const VALUES: &str = "Whose values were read";

/// What running a problem again tells; nothing of one that was not run.
#[derive(Debug, Default)]
pub(crate) struct Again {
    /// Schedule of the subject.
    pub(crate) schedule: Option<Schedule>,
    /// What the checker says against the schedule.
    pub(crate) checked: Vec<CheckError>,
    /// Errors of the results, tensor by tensor.
    pub(crate) errors: Vec<ErrorMap>,
    /// Keys that the queries saw, decoded.
    pub(crate) seen: Vec<SeenRow>,
    /// Queries that read other values than their own, where the results say that values are wrong.
    pub(crate) read: Vec<ReadRow>,
    /// Reasons, in words, why keys or values are not told.
    pub(crate) untold: Vec<String>,
}

/// What running a failure again tells.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// Of its smallest case.
    pub(crate) small: Again,
    /// Of its case as it was drawn, where that is another.
    pub(crate) drawn: Option<(Box<Case>, Again)>,
}

/// Runs the small cases of some failures again, in order, until the work is done that a page may take. Drawn cases come
/// after all smallest ones.
pub(crate) fn again(entries: &[Entry]) -> Vec<Runs> {
    let mut left = WORK_MAX;
    let mut runs: Vec<Runs> =
        entries.iter().map(|entry| Runs { small: small(entry, &mut left), drawn: None }).collect();
    for (entry, runs) in entries.iter().zip(&mut runs) {
        runs.drawn = drawn(entry).and_then(|case| {
            let again = within(&case, &mut left)?;
            Some((case, again))
        });
    }
    runs
}

fn small(entry: &Entry, left: &mut u64) -> Again {
    let again = entry.case.as_ref().and_then(|case| within(case, left)).unwrap_or_default();
    match entry.errors.is_empty() {
        true => again,
        false => Again { errors: entry.errors.clone(), ..again },
    }
}

/// Returns the case of a failure as it was drawn, without the finding, which is another's.
fn drawn(entry: &Entry) -> Option<Box<Case>> {
    let (case, first) = (entry.case.as_ref()?, entry.way.first()?);
    let is_other = *first.of != case.problem;
    is_other.then(|| Box::new(Case { problem: (*first.of).clone(), found: None, ..(**case).clone() }))
}

/// Runs a case again; `None` where it takes more than is left, or cannot be run here.
fn within(case: &Case, left: &mut u64) -> Option<Again> {
    let work = products(&case.problem).max(CASE_WORK_MIN);
    if work > CASE_WORK_MAX.min(*left) {
        return None;
    }
    let backend = subject(case)?;
    *left -= work;
    Some(run(case, backend.as_ref()))
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

/// Runs a case again. A subject that does not end well has a schedule and nothing else.
pub(crate) fn run(case: &Case, backend: &dyn Backend) -> Again {
    let problem = &case.problem;
    let schedule = caught(|| backend.schedule(problem).ok()).ok().flatten();
    let checked =
        schedule.as_ref().map(|schedule| caught(|| check(problem, schedule).err().unwrap_or_default()));
    let checked = checked.and_then(Result::ok).unwrap_or_default();
    if case.found.as_ref().is_some_and(|found| found.finding.check.is_end()) {
        return Again { schedule, checked, ..Again::default() };
    }
    let judge = Judge::default();
    let errors = caught(|| judge.error_maps(backend, problem).unwrap_or_default()).unwrap_or_default();
    let why = undecodable(problem).map(|why| format!("{KEYS} cannot be told: {why}"));
    let mut untold: Vec<String> = why.into_iter().collect();
    let seen = told(|| judge.seen(backend, problem), KEYS, &mut untold);
    let asks = ErrorMap::is_past(&errors, TensorName::Out) && !ErrorMap::is_past(&errors, TensorName::Lse);
    let read = if asks { told(|| judge.read(backend, problem), VALUES, &mut untold) } else { Vec::new() };
    Again { schedule, checked, errors, seen, read, untold }
}

/// Returns what a run tells; where it fails, nothing, and the reason is added.
fn told<T>(run: impl FnOnce() -> Result<Vec<T>, Verdict>, what: &str, untold: &mut Vec<String>) -> Vec<T> {
    let why = match caught(run) {
        Ok(Ok(told)) => return told,
        Ok(Err(verdict)) => verdict.to_string(),
        Err(panic) => panic,
    };
    untold.push(format!("{what} cannot be told: a run on inputs that show it ended so: {why}"));
    Vec::new()
}
