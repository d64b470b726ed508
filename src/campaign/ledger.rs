//! Adds cases up, in their order, and shrinks the failing ones.
//!
//! Not every failing case is shrunk: a subject that fails one case in three would spend the campaign on shrinking one
//! fault. Each symptom is shrunk a bounded number of times, always its first cases, and of one [`FailureKey`] only the
//! smallest case stays on disk. A further case is only counted if it has every feature that a known failure of its
//! symptom needs; one that has not may be another fault, and is shrunk, or stays on disk as it was drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};
use std::time::Duration;

use super::event::{CASE_EVENTS_MAX, CaseEvent, Event};
use super::failure::{FailureKey, Symptom, features};
use super::minimise::{minimise, shrink_budget};
use super::summary::{Distinct, Summary};
use super::{Plan, Sinks, Subjects, storable};
use crate::case::Case;
use crate::census::Census;
use crate::prose;
use crate::record::RecordError;
use crate::shrink;
use crate::verdict::{Check, Cost, Finding, Margin};

/// Failing cases of one symptom that are shrunk although they may be a known failure.
pub const SHRINKS_PER_SYMPTOM_MAX: usize = 8;
/// The same where the subject hangs.
pub const HANG_SHRINKS_MAX: usize = 1;
/// Different failures that are kept, and cases of one symptom that are shrunk at most.
pub const DISTINCT_MAX: usize = 64;
/// Failing cases that stay on disk as they were drawn.
pub const KEPT_MAX: u64 = 1024;

/// Features of a problem.
type Features = BTreeSet<&'static str>;

/// What became of one case.
pub(super) struct Outcome {
    pub(super) index: u64,
    pub(super) tokens: u64,
    pub(super) products: u64,
    /// Elements of the results.
    pub(super) elements: u64,
    pub(super) cost: Cost,
    pub(super) judged: Judged,
}

pub(super) enum Judged {
    Held(Box<Margin>),
    /// By a row of the capability table.
    Refused(&'static str),
    /// A malformed problem, refused by the rule that it breaks.
    Malformed(&'static str),
    /// A malformed problem that was not refused by its rule.
    Accepted(&'static str, Box<Finding>),
    Failed(Box<Failed>),
    Infrastructure(String),
}

/// A failing case, on disk as it was drawn.
pub(super) struct Failed {
    pub(super) name: String,
    pub(super) case: Case,
    pub(super) finding: Finding,
    pub(super) recorded: Result<(), RecordError>,
}

impl Outcome {
    /// A case that no subject computed anything for.
    pub(super) fn untouched(index: u64, judged: Judged) -> Outcome {
        Outcome { index, tokens: 0, products: 0, elements: 0, cost: Cost::default(), judged }
    }

    fn event(&self) -> CaseEvent<'_> {
        let event = CaseEvent { index: self.index, ..CaseEvent::default() };
        let finding = |finding: &Finding| CaseEvent {
            verdict: "finding",
            check: Some(finding.check),
            tensor: finding.tensor,
            ..event
        };
        match &self.judged {
            Judged::Held(margin) => CaseEvent { verdict: "held", margin: Some(margin.worst()), ..event },
            Judged::Refused(row) => CaseEvent { verdict: "refused", reason: Some(row), ..event },
            Judged::Malformed(rule) => CaseEvent { verdict: "malformed", reason: Some(rule), ..event },
            Judged::Infrastructure(what) => {
                CaseEvent { verdict: "infrastructure", reason: Some(what), ..event }
            }
            Judged::Accepted(_, broken) => finding(broken),
            Judged::Failed(failed) => finding(&failed.finding),
        }
    }
}

impl Judged {
    pub(super) fn internal(what: &impl ToString) -> Judged {
        Judged::Infrastructure(what.to_string())
    }
}

pub(super) struct Ledger<'a> {
    plan: &'a Plan,
    subjects: &'a dyn Subjects,
    sinks: &'a Sinks<'a>,
    summary: Summary,
    distinct: BTreeMap<FailureKey, Distinct>,
    shrinks: BTreeMap<Symptom, usize>,
    /// What each known failure needs: features of its smallest case that all cases had which came to it. The others
    /// were brought in by the shrinker (an empty sequence is simpler than a short one).
    needs: BTreeMap<FailureKey, (Symptom, Features)>,
}

impl<'a> Ledger<'a> {
    pub(super) fn new(plan: &'a Plan, subjects: &'a dyn Subjects, sinks: &'a Sinks<'a>) -> Ledger<'a> {
        let (distinct, shrinks, needs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Ledger { plan, subjects, sinks, summary: Summary::default(), distinct, shrinks, needs }
    }

    /// Adds the next case; returns the number of different failures so far.
    pub(super) fn fold(&mut self, outcome: Outcome) -> usize {
        if self.summary.cases < CASE_EVENTS_MAX {
            self.sinks.observer.event(&Event::Case(outcome.event()));
        }
        self.summary.count(outcome.tokens, outcome.products);
        self.summary.spent(outcome.elements, outcome.cost);
        match outcome.judged {
            Judged::Held(margin) => self.summary.held(&margin),
            Judged::Refused(row) => *self.summary.refused.entry(row).or_default() += 1,
            Judged::Malformed(rule) => *self.summary.malformed.entry(rule).or_default() += 1,
            Judged::Infrastructure(what) => self.summary.infrastructure(what),
            Judged::Accepted(rule, finding) => self.accepted(outcome.index, rule, *finding),
            Judged::Failed(failed) => {
                if let Err(error) = self.failed(outcome.index, *failed) {
                    // Nothing more can be recorded: going on would lose findings.
                    self.summary.infrastructure(error.to_string());
                    self.sinks.control.stop();
                }
            }
        }
        self.distinct.len()
    }

    /// Forgets a case past the end of the campaign.
    pub(super) fn discard(&mut self, outcome: &Outcome) {
        if let Judged::Failed(failed) = &outcome.judged
            && let Err(error) = self.sinks.findings.remove(&failed.name)
        {
            self.summary.infrastructure(error.to_string());
        }
    }

    pub(super) fn finish(mut self, census: Census, lost: Vec<String>, elapsed: Duration) -> Summary {
        lost.into_iter().for_each(|what| self.summary.infrastructure(format!("given up: {what}")));
        self.summary.distinct = self.distinct.into_values().collect();
        self.summary.interrupted = self.sinks.control.stopped();
        self.summary.close(census, self.plan, elapsed);
        self.summary
    }

    fn accepted(&mut self, index: u64, rule: &'static str, finding: Finding) {
        self.summary.failed(&finding);
        let mut key = FailureKey::without_problem(&finding, self.subjects.name());
        key.features.insert(rule);
        let replay = format!("seamproof run {}", self.plan.options_of_case(index));
        let distinct = Distinct {
            key: key.clone(),
            seen: 1,
            first_case: index,
            finding: storable(finding),
            problem: format!("malformed: {rule}"),
            size: None,
            minimal: true,
            evaluations: 0,
            name: None,
            replay,
        };
        self.keep(key, distinct);
    }

    fn failed(&mut self, index: u64, failed: Failed) -> Result<(), RecordError> {
        self.summary.failed(&failed.finding);
        failed.recorded?;
        let symptom = Symptom::of(&failed.finding);
        let drawn = features(&failed.case.problem);
        let known = self.knows(symptom, &drawn);
        let shrinks = self.shrinks.entry(symptom).or_default();
        let most = match (known, failed.finding.check) {
            (true, Check::Timeout) => HANG_SHRINKS_MAX,
            (true, _) => SHRINKS_PER_SYMPTOM_MAX,
            (false, _) => DISTINCT_MAX,
        };
        if *shrinks >= most || self.distinct.len() >= DISTINCT_MAX {
            return self.count_only(known, &failed.name);
        }
        *shrinks += 1;
        let case = self.minimised(failed.case, &failed.finding);
        self.learn(symptom, &drawn, &case);
        self.replace(index, symptom, &failed.name, &case)
    }

    /// Whether a known failure of this symptom needs nothing that a problem of these features lacks.
    fn knows(&self, symptom: Symptom, drawn: &Features) -> bool {
        self.needs.values().any(|(known, needs)| *known == symptom && needs.is_subset(drawn))
    }

    fn learn(&mut self, symptom: Symptom, drawn: &Features, case: &Case) {
        let Some(found) = &case.found else { return };
        let key = FailureKey::of(&found.finding, self.subjects.name(), &case.problem);
        let (_, needs) = self.needs.entry(key.clone()).or_insert((symptom, key.features));
        needs.retain(|feature| drawn.contains(feature));
    }

    /// A failing case that is not shrunk; it stays on disk where nothing known explains it.
    fn count_only(&mut self, known: bool, name: &str) -> Result<(), RecordError> {
        let kept = !known && self.summary.kept < KEPT_MAX;
        let count = match (known, kept) {
            (true, _) => &mut self.summary.not_shrunk,
            (false, true) => &mut self.summary.kept,
            (false, false) => &mut self.summary.dropped,
        };
        *count += 1;
        if kept { Ok(()) } else { self.sinks.findings.remove(name) }
    }

    /// The smallest case that shows the same failure, within the budget; the case itself where shrinking fails.
    fn minimised(&mut self, case: Case, start: &Finding) -> Case {
        let (subjects, control) = (self.subjects, self.sinks.control);
        let attempt = panic::catch_unwind(AssertUnwindSafe(|| {
            let backend = subjects.backend(&case.subject.options).map_err(|error| error.to_string())?;
            let budget = shrink_budget(start.check);
            Ok(minimise(&case, start, backend.as_ref(), budget, control, |_| {}).case)
        }));
        attempt.unwrap_or_else(|_| Err("the shrinker panicked".to_owned())).unwrap_or_else(|what| {
            self.summary.infrastructure(what);
            case
        })
    }

    /// Puts the minimal case in the place of the drawn one, unless a smaller case of the same failure is there.
    fn replace(&mut self, index: u64, symptom: Symptom, drawn: &str, case: &Case) -> Result<(), RecordError> {
        let Some(found) = &case.found else { return Ok(()) };
        let findings = self.sinks.findings;
        let key = FailureKey::of(&found.finding, self.subjects.name(), &case.problem);
        let name = format!("{}-{}", symptom.name(), case.id());
        let distinct = Distinct {
            key: key.clone(),
            seen: 1,
            first_case: index,
            finding: found.finding.clone(),
            problem: prose::describe(&case.problem),
            size: Some(shrink::size(&case.problem)),
            minimal: found.minimal,
            evaluations: found.evaluations,
            name: Some(name.clone()),
            replay: findings.replay_command(&name),
        };
        let known = self.distinct.get(&key);
        if known.is_none_or(|known| distinct.size < known.size) {
            let beaten = known.and_then(|known| known.name.clone());
            findings.record(&name, case)?;
            findings.explain(&name, case)?;
            if let Some(beaten) = beaten.filter(|beaten| *beaten != name) {
                findings.remove(&beaten)?;
            }
        }
        self.keep(key, distinct);
        findings.remove(drawn)
    }

    fn keep(&mut self, key: FailureKey, mut new: Distinct) {
        if let Some(known) = self.distinct.get_mut(&key) {
            known.seen += 1;
            if known.size <= new.size {
                return;
            }
            (new.seen, new.first_case) = (known.seen, known.first_case);
        }
        self.sinks.observer.event(&Event::Finding(&new));
        self.distinct.insert(key, new);
    }
}
