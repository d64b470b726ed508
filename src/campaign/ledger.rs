//! Adds cases up, in their order, and shrinks the failing ones.
//!
//! Not every failing case is shrunk: a subject that fails one case in three would spend the campaign on shrinking one
//! fault. Each symptom is shrunk a bounded number of times, always its first cases, and of one [`FailureKey`] only the
//! smallest case stays on disk. A further case is only counted if it has every feature that a known failure of its
//! symptom needs; one that has not may be another fault, and is shrunk, or stays on disk as it was drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::confirm::{self, Confirmation};
use super::event::{CASE_EVENTS_MAX, CaseEvent, Event, Shrunk, ShrunkEvent};
use super::minimise::{minimise, shrink_budget};
use super::outcome::{Failed, Judged, Outcome, Recorded};
use super::plan::{Deadline, Term};
use super::summary::{Distinct, Summary, Sums};
use super::{DRAWN, Plan, Sinks, Subjects, declared};
use crate::paste::try_command;
use crate::record::RecordError;
use crate::worker::is_abandoned;
use seamproof_judge::campaign::OWN_FAILURES_MAX;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::census::{Census, Floors};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::failure::{FailureKey, Symptom, features, ratio, same_failure};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::prose;
use seamproof_judge::shrink;
use seamproof_judge::subject::{Backend, Recall};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::Problem;

/// Failing cases of one symptom that are shrunk although they may be a known failure.
pub const SHRINKS_PER_SYMPTOM_MAX: usize = 8;
/// Failing cases of one symptom that are shrunk where the subject's process ends: each candidate costs a process.
pub const ENDED_SHRINKS_MAX: usize = 1;
/// Part of a campaign's time in which cases are shrunk that end the subject's process. Each takes half of what is left.
const ENDED_SHRINKING: u32 = 2;
/// Different failures that are kept, and cases of one symptom that are shrunk at most.
pub const DISTINCT_MAX: usize = 64;
/// Failing cases that stay on disk as they were drawn.
pub const KEPT_MAX: u64 = 1024;
/// Time between two moments at which the observer hears how far the campaign is.
const REACHED_EVERY: Duration = Duration::from_secs(2);

/// Features of a problem.
type Features = BTreeSet<&'static str>;

/// Result of a second look at a case that a part of the campaign judged.
enum Again {
    Fails(Box<Finding>),
    Holds,
    /// It could not be judged, for this reason.
    NotLooked(String),
}

pub(super) struct Ledger<'a> {
    pub(super) plan: &'a Plan,
    pub(super) subjects: &'a dyn Subjects,
    pub(super) sinks: &'a Sinks<'a>,
    summary: Summary,
    begun: Instant,
    /// Time that the campaign took before it was cut off.
    before: Duration,
    /// The last time that the observer heard how far the campaign is.
    reached: Instant,
    distinct: BTreeMap<FailureKey, Distinct>,
    /// The smallest case of each, as it is on disk.
    smallest: BTreeMap<FailureKey, Case>,
    shrinks: BTreeMap<Symptom, usize>,
    /// What each known failure needs: features of its smallest case that all cases had which came to it. The others
    /// were brought in by the shrinker (an empty sequence is simpler than a short one).
    needs: BTreeMap<FailureKey, (Symptom, Features)>,
    /// The failure for which each known one of the list counts, by its name there.
    listed: BTreeMap<String, FailureKey>,
    /// Way of the last shrink.
    steps: Vec<Problem>,
    /// The end of all shrinking.
    shrinking: Arc<Term>,
    /// Time left for shrinking cases that end the subject's process; `None` where there is no limit.
    ended_shrinking: Option<Duration>,
    /// Longest time of one shrink in a search for the canary; `None` in a campaign.
    search: Option<Duration>,
}

impl<'a> Ledger<'a> {
    pub(super) fn new(plan: &'a Plan, subjects: &'a dyn Subjects, sinks: &'a Sinks<'a>) -> Ledger<'a> {
        Ledger {
            plan,
            subjects,
            sinks,
            summary: Summary::default(),
            begun: Instant::now(),
            before: Duration::ZERO,
            reached: Instant::now(),
            distinct: BTreeMap::new(),
            smallest: BTreeMap::new(),
            shrinks: BTreeMap::new(),
            needs: BTreeMap::new(),
            listed: BTreeMap::new(),
            steps: Vec::new(),
            shrinking: Arc::default(),
            ended_shrinking: None,
            search: None,
        }
    }

    /// Makes it that of a search for the canary. The first failure is taken as it was seen, and shrunk for this long.
    pub(super) fn of_search(self, shrinking: Duration) -> Ledger<'a> {
        Ledger { search: Some(shrinking), ..self }
    }

    /// Leaves most of a campaign's time to its cases, whatever the failures cost.
    pub(super) fn sharing(self, time: Option<Duration>) -> Ledger<'a> {
        Ledger { ended_shrinking: time.map(|time| time / ENDED_SHRINKING), ..self }
    }

    /// Shrinks nothing further once this end has come.
    pub(super) fn shrinking_until(self, shrinking: Arc<Term>) -> Ledger<'a> {
        Ledger { shrinking, ..self }
    }

    /// Adds the next case; returns whether it ends a search.
    pub(super) fn fold(&mut self, outcome: Outcome) -> bool {
        if matches!(outcome.judged, Judged::Abandoned) {
            let what = format!("case {} was in flight at the interruption and had not ended", outcome.index);
            self.missed(what);
            return false;
        }
        self.note(outcome.event());
        self.summary.count(outcome.tokens, outcome.products);
        self.summary.spent(outcome.elements, outcome.cost);
        self.summary.ways.merge(&outcome.ways);
        self.summary.groups.merge(&outcome.groups);
        self.summary.exercise.merge(&outcome.exercise);
        match outcome.judged {
            Judged::Held(margin) => self.summary.held(&margin),
            Judged::Refused(row) => *self.summary.refused.entry(row.to_owned()).or_default() += 1,
            Judged::Malformed(rule) => *self.summary.malformed.entry(rule.to_owned()).or_default() += 1,
            other => self.settle(outcome.index, other),
        }
        if self.reached.elapsed() >= REACHED_EVERY {
            self.tell_reached();
        }
        let failures = self.summary.own.len() as u64 + self.summary.infrastructure_count;
        self.search.is_some() && (!self.distinct.is_empty() || failures >= OWN_FAILURES_MAX)
    }

    /// Tells of a case.
    pub(super) fn note(&self, event: CaseEvent) {
        if event.index < CASE_EVENTS_MAX || !event.is_passed() {
            self.sinks.observer.event(&Event::Case(event));
        }
    }

    /// Tells how far the campaign is. What was shrunk in haste, as somebody asked to stop, is not told of: whoever goes
    /// on from there shrinks it at leisure.
    fn tell_reached(&mut self) {
        if !self.sinks.control.stopped() {
            let seconds = self.elapsed().as_secs_f64();
            self.sinks.observer.reached(&Sums { seconds, ..self.summary.sums() });
        }
        self.reached = Instant::now();
    }

    /// Returns the number of cases so far.
    pub(super) fn cases(&self) -> u64 {
        self.summary.cases
    }

    /// Returns the time of the campaign.
    fn elapsed(&self) -> Duration {
        self.before + self.begun.elapsed()
    }

    /// Returns the number of cases that failed.
    pub(super) fn failures(&self) -> u64 {
        self.summary.failed_count()
    }

    /// Removes the findings that no failure here has: a campaign that is asked to stop shrinks in haste and writes what
    /// it came to. Drawn cases stay: they are found again, under the same names.
    pub(super) fn tidy(&self) -> Result<(), RecordError> {
        let found = self.distinct.values();
        let named: BTreeSet<&str> = found.filter_map(|distinct| distinct.name.as_deref()).collect();
        self.sinks.findings.retain(|name| name.starts_with(DRAWN) || named.contains(name))
    }

    /// Goes on with a campaign whose first cases, of these sums, were noted and settled before.
    pub(super) fn go_on(self, sums: &Sums, sinks: &'a Sinks<'a>) -> Ledger<'a> {
        let before = Duration::try_from_secs_f64(sums.seconds).unwrap_or_default();
        let mut ledger = Ledger { sinks, before, begun: Instant::now(), ..self };
        ledger.add(sums);
        ledger
    }

    /// Adds the sums of a part of the campaign, whose cases are noted and settled one by one.
    pub(super) fn add(&mut self, sums: &Sums) {
        self.summary.add(sums);
        sums.beside.iter().for_each(|what| self.summary.trouble(what.clone()));
        self.summary.interrupted |= sums.interrupted;
    }

    /// A fault that is no case's.
    pub(super) fn trouble(&mut self, what: String) {
        self.summary.trouble(what);
    }

    /// Too little was run.
    pub(super) fn missed(&mut self, what: String) {
        self.summary.missed.push(what);
    }

    /// Adds the next case that did not hold.
    pub(super) fn settle(&mut self, index: u64, judged: Judged) {
        match judged {
            Judged::Held(_) | Judged::Refused(_) | Judged::Malformed(_) | Judged::Abandoned => {}
            Judged::Infrastructure(what) => self.summary.infrastructure(what),
            Judged::Accepted(rule, finding) => self.accepted(index, rule, *finding),
            Judged::Failed(failed) => {
                let recorded = self.failed(index, *failed);
                self.told(recorded);
            }
            Judged::Own(failed) => {
                let recorded = self.own(index, *failed);
                self.told(recorded);
            }
        }
    }

    /// Ends the campaign where nothing more can be recorded: going on would lose findings.
    fn told(&mut self, recorded: Result<(), RecordError>) {
        if let Err(error) = recorded {
            self.summary.trouble(error.to_string());
            self.sinks.control.stop();
        }
    }

    /// Forgets a case past the end of the campaign.
    pub(super) fn discard(&mut self, outcome: &Outcome) {
        if let Judged::Failed(failed) | Judged::Own(failed) = &outcome.judged
            && let Err(error) = self.sinks.findings.remove(&failed.name)
        {
            self.summary.trouble(error.to_string());
        }
    }

    /// Ends the campaign that was run here.
    pub(super) fn end(mut self, census: Census, lost: Vec<String>) -> Summary {
        self.tell_reached();
        let elapsed = self.elapsed();
        self.finish(census, lost, elapsed)
    }

    pub(super) fn finish(mut self, census: Census, lost: Vec<String>, elapsed: Duration) -> Summary {
        lost.into_iter().for_each(|what| self.summary.trouble(format!("given up: {what}")));
        self.summary.distinct = self.distinct.into_values().collect();
        self.summary.distinct.sort_by_key(Distinct::reading_order);
        self.summary.interrupted |= self.sinks.control.stopped();
        let declaration = self.subjects.declaration(&self.subjects.options(0)).ok();
        let floors = declaration.as_ref().map(|first| {
            let of_case = |index| declared(self.plan, self.subjects, index);
            Floors::of_each(self.plan.profile, |index| of_case(index).unwrap_or_else(|_| first.clone()))
        });
        self.summary.close(census, self.plan, (declaration.as_ref(), floors), elapsed);
        self.summary
    }

    fn accepted(&mut self, index: u64, rule: &'static str, finding: Finding) {
        // A search leaves it to the campaign: no subject was asked, so it is no failure of the subject's own.
        if self.search.is_some() {
            return;
        }
        self.summary.failed(&finding);
        let mut key = FailureKey::without_problem(&finding, self.subjects.name());
        key.features.insert(rule);
        let replay = format!("seamproof run {}", self.plan.options_of_case(index));
        let distinct = Distinct {
            key: key.clone(),
            seen: 1,
            counted: 0,
            first_case: index,
            worst: ratio(&finding),
            smallest: None,
            found: Found { minimal: true, ..Found::drawn(finding.storable()) },
            problem: format!("malformed: {rule}"),
            size: None,
            name: None,
            replay,
            try_command: None,
            script: None,
        };
        self.keep(key, distinct);
    }

    /// Keeps a failure of the subject's own, as it was drawn.
    fn own(&mut self, index: u64, failed: Failed) -> Result<(), RecordError> {
        let Failed { name, case, recorded, .. } = failed;
        if let Recorded::Now(recorded) = recorded {
            recorded?;
        }
        self.sinks.findings.explain(&name, &case)?;
        let distinct = case.found.as_ref().map(|found| self.distinct_of(index, name, &case, found));
        self.summary.own.extend(distinct);
        Ok(())
    }

    fn failed(&mut self, index: u64, failed: Failed) -> Result<(), RecordError> {
        self.summary.failed(&failed.finding);
        let Failed { name, case, mut finding, recall, recorded } = failed;
        let (earlier, is_here) = match recorded {
            Recorded::Now(recorded) => recorded.map(|()| (None, true))?,
            Recorded::Earlier(shrunk) => (Some(shrunk), false),
            Recorded::Before(shrunk) => (Some(shrunk), true),
        };
        if let Some(listed) = self.subjects.known(&finding, &case.problem).map(str::to_owned) {
            return self.count_known(index, listed, &name, case, &finding);
        }
        let (symptom, worst) = (Symptom::of(&finding), ratio(&finding));
        let drawn = features(&case.problem);
        let known = self.known(symptom, &drawn);
        let shrinks = self.shrinks.entry(symptom).or_default();
        let most = match (&known, finding.ending) {
            (Some(_), Some(_)) => ENDED_SHRINKS_MAX,
            (Some(_), None) => SHRINKS_PER_SYMPTOM_MAX,
            (None, _) => DISTINCT_MAX,
        };
        if *shrinks >= most || self.distinct.len() >= DISTINCT_MAX {
            let kept = self.count_only(known.as_ref(), &name, worst)?;
            return if kept && !is_here { self.keep_drawn(&name, case, finding) } else { Ok(()) };
        }
        *shrinks += 1;
        self.steps = Vec::new();
        let case = match earlier {
            Some(Some(shrunk)) => {
                self.steps = shrunk.steps;
                shrunk.case
            }
            Some(None) => match self.judged_again(&case, symptom) {
                Again::Fails(again) => {
                    finding = *again;
                    self.minimised(case, &finding)
                }
                Again::Holds => return Ok(()),
                Again::NotLooked(why) => {
                    let kept = self.count_only(None, &name, worst)?;
                    return if kept { self.keep_unseen(&name, case, finding, why) } else { Ok(()) };
                }
            },
            None => self.confirmed(case, finding, recall, known.is_some()),
        };
        // What was shrunk in vain stays as it was drawn.
        let is_shrunk = self.steps.last() == Some(&case.problem);
        let steps = if is_shrunk { &self.steps[..] } else { &[] };
        self.sinks.observer.event(&Event::Shrunk(ShrunkEvent { index, case: &case, steps }));
        self.learn(symptom, &drawn, &case);
        self.replace(index, (symptom, worst), &name, case)
    }

    /// Counts a case that shows a known failure of the list as it was drawn. The first stands for all of them.
    fn count_known(
        &mut self,
        index: u64,
        listed: String,
        drawn: &str,
        case: Case,
        finding: &Finding,
    ) -> Result<(), RecordError> {
        let key = match self.listed.get(&listed) {
            Some(key) => key.clone(),
            None => {
                let key = FailureKey::of(finding, self.subjects.name(), &case.problem);
                self.listed.insert(listed, key.clone());
                self.replace(index, (Symptom::of(finding), ratio(finding)), drawn, case)?;
                // It was not shrunk, and is counted with the others.
                self.distinct.entry(key.clone()).and_modify(|distinct| distinct.seen -= 1);
                key
            }
        };
        self.count_only(Some(&key), drawn, ratio(finding)).map(|_| ())
    }

    /// The known failure of this symptom that needs nothing that a problem of these features lacks; of several the one
    /// that needs most.
    fn known(&self, symptom: Symptom, drawn: &Features) -> Option<FailureKey> {
        let fits =
            self.needs.iter().filter(|(_, (known, needs))| *known == symptom && needs.is_subset(drawn));
        fits.max_by_key(|(_, (_, needs))| needs.len()).map(|(key, _)| key.clone())
    }

    fn learn(&mut self, symptom: Symptom, drawn: &Features, case: &Case) {
        let Some(found) = &case.found else { return };
        let key = FailureKey::of(&found.finding, self.subjects.name(), &case.problem);
        let (_, needs) = self.needs.entry(key.clone()).or_insert((symptom, key.features));
        needs.retain(|feature| drawn.contains(feature));
    }

    /// Judges a case once more that a part of the campaign judged. It is a fault if it does not fail so any more, or if
    /// it cannot be judged.
    fn judged_again(&mut self, case: &Case, symptom: Symptom) -> Again {
        let verdict =
            self.subjects.backend(&case.subject.options).map(|b| evaluate(b.as_ref(), &case.problem));
        let problem = prose::describe(&case.problem);
        match verdict {
            Ok(Verdict::Finding(finding)) if Symptom::of(&finding) == symptom => Again::Fails(finding),
            Ok(Verdict::Infrastructure(_)) if is_abandoned() => {
                self.missed(format!(
                    "{problem}: failed in its part of the campaign and was not looked at again"
                ));
                Again::NotLooked("the program was asked to end".to_owned())
            }
            Ok(Verdict::Infrastructure(what)) => {
                self.summary.trouble(format!("{problem}: not looked at again: {what}"));
                Again::NotLooked(what)
            }
            Ok(_) => {
                let what = "failed in its part of the campaign and does not fail here";
                self.summary.trouble(format!("{problem}: {what}"));
                Again::Holds
            }
            Err(error) => {
                self.summary.trouble(error.to_string());
                Again::NotLooked(error.to_string())
            }
        }
    }

    /// Puts a case of a part on disk, as it was drawn.
    fn keep_drawn(&mut self, name: &str, case: Case, mut finding: Finding) -> Result<(), RecordError> {
        match self.judged_again(&case, Symptom::of(&finding)) {
            Again::Fails(again) => finding = *again,
            Again::Holds => return Ok(()),
            Again::NotLooked(why) => return self.keep_unseen(name, case, finding, why),
        }
        self.put(name, case, &finding)
    }

    /// Puts a case of a part on disk that could not be looked at again.
    fn keep_unseen(
        &mut self,
        name: &str,
        case: Case,
        finding: Finding,
        why: String,
    ) -> Result<(), RecordError> {
        let what = format!("failed in its part of the campaign; not looked at again ({why})");
        self.put(name, case, &Finding { what, ..finding })
    }

    fn put(&self, name: &str, case: Case, finding: &Finding) -> Result<(), RecordError> {
        self.sinks.findings.record(name, &case.as_drawn(finding))
    }

    /// A failing case that is not shrunk; it stays on disk where no known failure explains it. Whether it does.
    fn count_only(
        &mut self,
        known: Option<&FailureKey>,
        name: &str,
        worst: f64,
    ) -> Result<bool, RecordError> {
        let kept = known.is_none() && self.summary.kept < KEPT_MAX;
        let count = match (known, kept) {
            (Some(_), _) => &mut self.summary.not_shrunk,
            (None, true) => &mut self.summary.kept,
            (None, false) => &mut self.summary.dropped,
        };
        *count += 1;
        if let Some(distinct) = known.and_then(|key| self.distinct.get_mut(key)) {
            distinct.counted += 1;
            distinct.worst = distinct.worst.max(worst);
        }
        if !kept {
            self.sinks.findings.remove(name)?;
        }
        Ok(kept)
    }

    /// The smallest case that shows the same failure, once the failure was seen again; otherwise the case as it was
    /// drawn, with the words for that. The end of a process was looked at again when it came. Of a failure that
    /// `is_known` the smallest case alone is looked at, unless it shows nothing.
    fn confirmed(
        &mut self,
        case: Case,
        mut finding: Finding,
        recall: Option<Recall>,
        is_known: bool,
    ) -> Case {
        let is_over = self.sinks.control.stopped() || self.shrinking.passed();
        if self.search.is_some() || finding.ending.is_some() || finding.check == Check::Sentinel || is_over {
            return self.minimised(case, &finding);
        }
        let subjects = self.subjects;
        if is_known {
            let small = self.minimised(case.clone(), &finding);
            if small.found.as_ref().is_some_and(|found| confirm::stays(subjects, &small, &found.finding)) {
                return small;
            }
        }
        let look = || confirm::confirmed(subjects, &case, &finding, recall);
        let confirmation = panic::catch_unwind(AssertUnwindSafe(look)).unwrap_or(Confirmation::Alone);
        if is_abandoned() {
            // A look that was broken off has shown nothing.
            return case;
        }
        match confirmation {
            Confirmation::Alone => {
                let small = self.minimised(case.clone(), &finding);
                let shown = small.found.as_ref().map_or(&finding, |found| &found.finding);
                // The worker that shrank the case may have been spoilt on the way.
                if small.problem == case.problem || confirm::stays(subjects, &small, shown) {
                    small
                } else {
                    case
                }
            }
            Confirmation::After(before, how) => {
                finding.what = format!("{}; {how}", finding.what);
                Case { before, found: Some(Found::drawn(finding.storable())), ..case }
            }
            Confirmation::Never(how) => {
                finding.what = format!("{}; {how}", finding.what);
                let found = Found { unconfirmed: Some(how), ..Found::drawn(finding.storable()) };
                Case { found: Some(found), ..case }
            }
        }
    }

    /// The smallest case that shows the same failure, within the budget; the case itself where shrinking fails.
    fn minimised(&mut self, case: Case, start: &Finding) -> Case {
        let begun = Instant::now();
        let has_ended = start.ending.is_some();
        let most = self.search.or(self.ended_shrinking.filter(|_| has_ended).map(|left| left / 2));
        let end = Deadline::after(most);
        let attempt = panic::catch_unwind(AssertUnwindSafe(|| self.shrunk(&case, start, end)));
        if has_ended {
            let left = |left: Duration| left.saturating_sub(begun.elapsed());
            self.ended_shrinking = self.ended_shrinking.map(left);
        }
        let shrunk = attempt.unwrap_or_else(|_| Err("the shrinker panicked".to_owned()));
        match shrunk {
            Ok(Shrunk { case, steps }) => {
                self.steps = steps;
                case
            }
            Err(what) => {
                self.summary.trouble(what);
                case
            }
        }
    }

    /// The smallest case until this time, or the end of all shrinking. Candidates that may end the subject's process
    /// are run in one of their own, beside the campaign's cases, and none is confirmed but the smallest. It takes the
    /// drawn case's place only where it fails alone, in a fresh process.
    fn shrunk(&self, case: &Case, start: &Finding, end: Deadline) -> Result<Shrunk, String> {
        let (options, control) = (&case.subject.options, self.sinks.control);
        let is_over = || control.stopped() || end.passed() || self.shrinking.passed();
        let within = |backend: &dyn Backend| {
            let small = minimise(case, start, backend, shrink_budget(start.check), &is_over, |_| {});
            Shrunk { case: small.case, steps: small.steps }
        };
        let backend = self.subjects.backend(options).map_err(|error| error.to_string())?;
        let is_alone = start.ending.is_some() && case.before.is_empty();
        let Some(fresh) = self.subjects.fresh().filter(|_| is_alone) else {
            return Ok(within(backend.as_ref()));
        };
        let beside = fresh.hasty();
        let small = within(beside.backend(options).map_err(|error| error.to_string())?.as_ref());
        let Shrunk { case: small, steps } = small;
        let unshrunk = |case| Shrunk { case, steps: Vec::new() };
        if small.problem == case.problem {
            return Ok(unshrunk(found_again(small, start.clone())));
        }
        if control.stopped() {
            return Ok(unshrunk(case.clone()));
        }
        // The process may have been spoilt on the way.
        let again = same_failure(start, evaluate(backend.as_ref(), &small.problem));
        let alone = again
            .filter(|finding| finding.before.is_empty() && confirm::stays(self.subjects, &small, finding));
        let is_alone = alone.map(|finding| Shrunk { case: found_again(small, finding), steps });
        Ok(is_alone.unwrap_or_else(|| unshrunk(case.clone())))
    }

    /// Puts the minimal case in the place of the drawn one, unless a smaller case of the same failure is there. `worst`
    /// is the ratio of the drawn one.
    fn replace(
        &mut self,
        index: u64,
        (symptom, worst): (Symptom, f64),
        drawn: &str,
        new: Case,
    ) -> Result<(), RecordError> {
        let Some(found) = &new.found else { return Ok(()) };
        let findings = self.sinks.findings;
        let key = FailureKey::of(&found.finding, self.subjects.name(), &new.problem);
        let worst = worst.max(ratio(&found.finding));
        let known = self.smallest.get(&key);
        let case = known.map_or_else(|| new.clone(), |known| smaller(known, &new));
        let Some(found) = &case.found else { return Ok(()) };
        let named = |case: &Case| format!("{}-{}", symptom.name(), case.id());
        let name = named(&case);
        if known != Some(&case) {
            findings.record(&name, &case)?;
            findings.explain(&name, &case)?;
            if let Some(beaten) = known.map(named).filter(|beaten| *beaten != name) {
                findings.remove(&beaten)?;
            }
        }
        let distinct = Distinct { worst, ..self.distinct_of(index, name, &case, found) };
        self.smallest.insert(key.clone(), case);
        self.keep(key, distinct);
        findings.remove(drawn)
    }

    /// The failure that a case of this name shows.
    fn distinct_of(&self, index: u64, name: String, case: &Case, found: &Found) -> Distinct {
        Distinct {
            key: FailureKey::of(&found.finding, &case.subject.name, &case.problem),
            seen: 1,
            counted: 0,
            first_case: index,
            found: found.clone(),
            worst: ratio(&found.finding),
            smallest: Some(Box::new(case.problem.clone())),
            problem: prose::describe(&case.problem),
            size: Some(shrink::size(&case.problem)),
            replay: match &found.unconfirmed {
                Some(how) => format!("none, as it was not seen to fail again: {how}"),
                None => self.sinks.findings.replay(&name, case),
            },
            name: Some(name),
            try_command: try_command(case).filter(|_| found.unconfirmed.is_none()),
            script: None,
        }
    }

    fn keep(&mut self, key: FailureKey, mut new: Distinct) {
        if let Some(known) = self.distinct.get_mut(&key) {
            known.seen += 1;
            known.worst = known.worst.max(new.worst);
            if known.size <= new.size && known.found.unshrunk == new.found.unshrunk {
                return;
            }
            (new.seen, new.counted, new.first_case) = (known.seen, known.counted, known.first_case);
            new.worst = known.worst;
        }
        self.sinks.observer.event(&Event::Finding(&new));
        self.distinct.insert(key, new);
    }
}

/// A case that was shrunk, with its failure as it was seen again.
fn found_again(small: Case, finding: Finding) -> Case {
    let found = small.found.map(|found| {
        let mut again = Found { finding: finding.storable(), unshrunk: None, ..found };
        found.unshrunk.iter().for_each(|before| again.remember(before));
        again
    });
    Case { found, ..small }
}

/// The smaller of two cases of a failure; what was wrong before shrinking may be known of the other one alone.
fn smaller(known: &Case, new: &Case) -> Case {
    let is_new = shrink::size(&new.problem) < shrink::size(&known.problem);
    let (case, other) = if is_new { (new, known) } else { (known, new) };
    let mut case = case.clone();
    let unshrunk = other.found.as_ref().and_then(|found| found.unshrunk.as_deref());
    if let (Some(found), Some(unshrunk)) = (&mut case.found, unshrunk) {
        found.remember(unshrunk);
    }
    case
}
