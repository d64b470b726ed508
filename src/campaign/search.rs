//! The search for a canary: a sweep against a wrong subject, which ends with the first failure that the right one does
//! not have.
//!
//! A subject may fail by itself. Then the wrong call fails too, and says nothing about the judge. So a failing problem
//! is judged once more with the right subject, and a failure that the right subject has as well is the subject's *own*.
//! The end of a process, an error and a worker that went bad are its own without a second look: no wrong call asks for
//! them, since the kernel is asked for a legal problem all the same. So is a failure on a problem where the wrong call
//! asks for nothing else than the right one: a second look at a race may show nothing. Own failures are kept as they
//! were drawn. A few of them end the search, and the canary is *not told*. One that is looked for to the end is missed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use seamproof_oracle::Problem;

use super::event::Silent;
use super::ledger::Ledger;
use super::outcome::{Failed, Judged};
use super::plan::{CANARY_CASES_MAX, Control, Deadline, Plan};
use super::subjects::{Subjects, Wrong};
use super::summary::{Canary, Summary};
use super::{Sinks, case_of, sweep};
use crate::record::Findings;
use crate::worker::is_abandoned;
use seamproof_judge::campaign::OWN_FAILURES_MAX;
use seamproof_judge::case::Case;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::{Check, Finding, Relation};
use seamproof_judge::prose::counted;
use seamproof_judge::subjects::{Borrowed, Miscall, Miscalled};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;

/// Part of a campaign's time that the search takes where the subject fails by itself, and where it does not.
const SEARCHING: [u32; 2] = [5, 2];
/// Least time of the search.
const SEARCHING_MIN: Duration = Duration::from_secs(10);
/// Part of a campaign's time that the canary is shrunk for.
const SHRINKING: u32 = 5;
/// Least and most time that the canary is shrunk for. The most is that of a campaign without a limit of time.
const SHRINKING_TIMES: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(120)];

/// Looks for the fault of a subject's canary ([`Registered::canary`](super::Registered::canary)) with the plan's own
/// seed and sizes. In place of large cases, which take seconds each, it looks in quick ones: they go the same way
/// through this code.
pub fn canary(plan: &Plan, subjects: &Wrong, findings: &Findings, control: &Control) -> Canary {
    let Wrong { wrong, right, call } = subjects;
    let search = Search::new(plan, right.as_ref(), *call);
    let sinks = Sinks { findings, observer: &Silent, control };
    let plan = plan.of_canary();
    let summary = sweep(Ledger::new(&plan, wrong.as_ref(), &sinks), Some(&search));
    let not_told = search.not_told(&summary);
    Canary {
        cases: summary.cases,
        finding: summary.distinct.into_iter().next(),
        own: summary.own,
        not_told,
        infrastructure: summary.infrastructure,
    }
}

/// State of a search, which its threads share.
pub(super) struct Search<'a> {
    right: &'a dyn Subjects,
    /// Fault at the call of the wrong subject; `None` where its fault is in the kernel.
    call: Option<&'static Miscall>,
    /// Longest time that the canary is shrunk for.
    pub(super) shrinking: Duration,
    /// End of the search where the subject has failed by itself, and where it has not.
    ends: [Deadline; 2],
    /// Whether a case has failed that is not the subject's own failure.
    is_found: AtomicBool,
    /// Cases that count towards [`OWN_FAILURES_MAX`].
    failures: AtomicU64,
}

impl<'a> Search<'a> {
    fn new(plan: &Plan, right: &'a dyn Subjects, call: Option<&'static Miscall>) -> Search<'a> {
        let [least, most] = SHRINKING_TIMES;
        let share = |part: u32| plan.time.map(|time| (time / part).max(SEARCHING_MIN));
        Search {
            right,
            call,
            shrinking: plan.time.map_or(most, |time| (time / SHRINKING).clamp(least, most)),
            ends: SEARCHING.map(|part| Deadline::after(share(part))),
            is_found: AtomicBool::default(),
            failures: AtomicU64::default(),
        }
    }

    /// Whether no further case is drawn. The cases that were drawn hold the one that ends the search: they are drawn in
    /// order, and each is finished.
    pub(super) fn is_over(&self) -> bool {
        self.is_found.load(Ordering::Relaxed)
            || self.failures.load(Ordering::Relaxed) >= OWN_FAILURES_MAX
            || self.is_late()
    }

    /// Whether the time of the search is over.
    fn is_late(&self) -> bool {
        let has_failed = self.failures.load(Ordering::Relaxed) > 0;
        self.ends[usize::from(!has_failed)].passed()
    }

    /// Notes what became of a case.
    pub(super) fn met(&self, judged: &Judged) {
        match judged {
            Judged::Failed(_) => self.is_found.store(true, Ordering::Relaxed),
            Judged::Own(_) | Judged::Infrastructure(_) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
            // No subject is asked a malformed problem, also where it is accepted.
            Judged::Accepted(..)
            | Judged::Held(_)
            | Judged::Refused(_)
            | Judged::Malformed(_)
            | Judged::Abandoned => {}
        }
    }

    /// Returns what becomes of a case that failed with the wrong subject. `record` puts the subject's own failure on
    /// disk.
    pub(super) fn judged(
        &self,
        plan: &Plan,
        index: u64,
        failed: Case,
        finding: Finding,
        record: impl FnOnce(Case, Finding) -> Failed,
    ) -> Judged {
        if is_own(&finding) {
            return Judged::Own(Box::new(record(failed, finding)));
        }
        let looked = self.judged_rightly(plan, index, failed.problem.clone());
        let (case, verdict) = match looked {
            Ok((_, Verdict::Infrastructure(_))) if is_abandoned() => return Judged::Abandoned,
            Ok((_, Verdict::Infrastructure(what))) | Err(what) => return Judged::Infrastructure(what),
            Ok(looked) => looked,
        };
        match (verdict, self.shows(&case)) {
            (Verdict::Finding(own), _) => Judged::Own(Box::new(record(case, *own))),
            (_, Err(what)) => Judged::Infrastructure(what),
            (_, Ok(true)) => Judged::Failed(Box::new(record(failed, finding))),
            // The fault may show on the second problem of an identity alone, and a wrong call's exact answer may be right while
            // its launches round otherwise than the right call's. Then nothing is to be said.
            (_, Ok(false)) if asks_another_problem(&finding) || finding.is_of_replay() => {
                Judged::Held(Box::default())
            }
            (_, Ok(false)) => Judged::Own(Box::new(record(case, finding))),
        }
    }

    /// Whether the fault at the call changes the exact answer of a case.
    fn shows(&self, case: &Case) -> Result<bool, String> {
        let Some(call) = self.call else { return Ok(true) };
        let backend = self.right.backend(&case.subject.options).map_err(|error| error.to_string())?;
        let wrong = Miscalled::new(Box::new(Borrowed(backend.as_ref())), call);
        Ok(wrong.shows(&case.problem, &values::inputs(&case.problem)))
    }

    fn judged_rightly(&self, plan: &Plan, index: u64, problem: Problem) -> Result<(Case, Verdict), String> {
        let case = case_of(plan, self.right, index, problem);
        let backend = self.right.backend(&case.subject.options).map_err(|error| error.to_string())?;
        let verdict = evaluate(backend.as_ref(), &case.problem);
        Ok((case, verdict))
    }

    /// Returns why the canary is not told, in words; `None` where it was found, or missed.
    fn not_told(&self, summary: &Summary) -> Option<String> {
        let (cases, own) = (counted(summary.cases, "case"), summary.own.len() as u64);
        let faults = summary.infrastructure_count;
        let is_cut = summary.cases < CANARY_CASES_MAX && (self.is_late() || summary.interrupted);
        let ended_early = is_cut || own + faults >= OWN_FAILURES_MAX;
        match (own, faults) {
            _ if !summary.distinct.is_empty() || !ended_early => None,
            // Nothing is left to run on, or somebody stopped it.
            (0, _) if summary.interrupted => None,
            (0, 0) => Some(format!("its time was over after {cases}")),
            (0, _) => Some(format!("faults of this program or of a device: {faults} of {cases}")),
            _ => Some(format!("the subject fails by itself: {own} of {cases}")),
        }
    }
}

/// Whether a finding compares the results of a problem with those of another one.
fn asks_another_problem(finding: &Finding) -> bool {
    finding.identity.is_some_and(|identity| !matches!(identity, Relation::Rerun | Relation::History))
}

/// Whether no wrong call explains a failure.
fn is_own(finding: &Finding) -> bool {
    finding.check.is_end() || finding.check == Check::Sentinel
}
