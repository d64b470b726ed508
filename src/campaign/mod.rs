//! A campaign: draw a case, judge it, record and shrink what fails, count everything.
//!
//! The claim: a [`Plan`] decides its cases and their verdicts. Threads take cases in order and finish them in any; the
//! [`ledger`] folds them in order, so that a summary of a fixed number of cases depends on neither threads nor time.
//! A failing case is on disk, as drawn, before its thread takes the next one; only then does shrinking begin.
//!
//! Time ends a campaign in three ways: no case begins after the plan's time, none begins that the time left clearly
//! cannot hold, and shrinking ends some time later. With a limit of time a campaign also ends where all cases fail and
//! say nothing new ([`streak`]). A campaign that is limited by its cases alone knows none of these.
//!
//! The canary is a small campaign of its own, against a subject with a planted fault, through the same code: the
//! emulated kernel with a window that is off by one, or any other subject, called wrongly in the first way that shows
//! on what it takes. A campaign that misses its canary proves nothing and is not begun. One whose subject fails by
//! itself too often to tell is run for what it finds ([`search`]).

mod confirm;
mod event;
mod groups;
mod histogram;
mod ledger;
mod left;
mod logs;
mod merge;
mod minimise;
mod outcome;
mod plan;
mod queue;
mod report;
mod scripts;
mod search;
mod streak;
mod subjects;
mod summary;
mod ways;

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use seamproof_oracle::{Pass, Problem};

pub(crate) use event::Shrunk;
pub use event::{CASE_EVENTS_MAX, CaseEvent, Event, Observer, ShrunkEvent, Silent, Start};
pub use groups::{Groups, Judgements};
pub use histogram::{ABOVE_MIN, Bar, Histogram, Quantiles, tells};
pub use ledger::{DISTINCT_MAX, ENDED_SHRINKS_MAX, KEPT_MAX, SHRINKS_PER_SYMPTOM_MAX};
pub use left::{Left, OnDisk};
pub use logs::{Logs, conclude};
pub use merge::{MergeError, Part, Stored, campaign_of, merge};
pub use minimise::{
    HANG_EVALUATIONS_MAX, Minimised, SHRINK_EVALUATIONS_MAX, STEPS_MAX, minimise, shrink_budget,
};
pub use plan::{CANARY_CASES_MAX, Control, Plan, SHARDS_MAX, Shard, ShardError};
pub use queue::RUN_AHEAD_MAX;
pub(crate) use report::{Ended, FailureLines, common_lines, met};
pub use report::{LABEL_COLUMNS, Line, Tone};
pub use scripts::{SCRIPTS_MAX, write_scripts};
pub use search::canary;
pub use streak::{ALIKE_MIN, FAILING_MIN};
pub use subjects::{Fresh, Options, PlantedSubjects, Registered, Subjects, Wrong, wrong_call};
pub(crate) use summary::total;
pub use summary::{
    Canary, Distinct, Early, INFRASTRUCTURE_MESSAGES_MAX, JUDGED_SHARE_MIN, Summary, SummaryEvent, Sums,
};
pub use ways::{Share, Ways};

use crate::backends::BackendError;
use crate::record::Findings;
use crate::worker::is_abandoned;
use ledger::Ledger;
use outcome::{Failed, Judged, Outcome, Recorded};
use plan::{Budget, Deadline, Term, shrinking_after};
use queue::Queue;
use seamproof_judge::asked::Asked;
pub use seamproof_judge::campaign::OWN_FAILURES_MAX;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::census::Census;
use seamproof_judge::evaluate::{evaluate_malformed, evaluate_timed};
use seamproof_judge::exercise::Exercise;
use seamproof_judge::failure::Symptom;
use seamproof_judge::finding::Finding;
use seamproof_judge::generate::Malformed;
use seamproof_judge::subject::{Declaration, Host};
use seamproof_judge::verdict::Verdict;
use search::Search;
use streak::Streak;

/// Share of a campaign's time after which it has had all of it.
const FULL: f64 = 0.95;
/// Work of an element, in products.
const ELEMENT_WORK: u64 = 16;

/// Destinations of a campaign's results.
pub struct Sinks<'a> {
    /// Folder of findings on disk.
    pub findings: &'a Findings,
    /// Receiver of events, which come in the order of cases.
    pub observer: &'a dyn Observer,
    /// Counts of the running campaign, and the request to stop.
    pub control: &'a Control,
}

/// Runs the plan's cases against one kind of subject.
pub fn run(plan: &Plan, subjects: &dyn Subjects, sinks: &Sinks) -> Summary {
    sweep(Ledger::new(plan, subjects, sinks), None)
}

/// Goes on with a campaign that was cut off after these cases, as if it had not been. The plan has no limit of time.
/// The earlier cases are drawn again, for the census, but not run.
pub fn go_on(
    plan: &Plan,
    subjects: &dyn Subjects,
    sinks: &Sinks,
    earlier: &Part,
) -> Result<Summary, MergeError> {
    let quiet = Sinks { observer: &Silent, ..*sinks };
    let ledger = merge::gone_on(plan, subjects, earlier, sinks, &quiet)?;
    sinks.control.failed.fetch_add(ledger.failures(), Ordering::Relaxed);
    Ok(sweep(ledger, None))
}

/// Runs the cases behind those of the ledger, until its plan ends, somebody asks to stop, or a search is over.
fn sweep(ledger: Ledger, search: Option<&Search>) -> Summary {
    let start = Instant::now();
    let (plan, subjects, sinks, earlier) = (ledger.plan, ledger.subjects, ledger.sinks, ledger.cases());
    let shrinking = Arc::new(Term::new(Deadline::after(plan.shrinking())));
    let ledger = ledger.shrinking_until(Arc::clone(&shrinking));
    let ledger = match search {
        Some(search) => ledger.of_search(search.shrinking),
        None => ledger.sharing(plan.time),
    };
    let queue = Queue::new(ledger, earlier);
    let (budget, turns) = (Budget::begin(plan.time), Mutex::default());
    let streak = Mutex::default();
    let worker = Worker { plan, subjects, sinks, search, earlier, start, budget, turns, streak, shrinking };
    let census = match rayon::ThreadPoolBuilder::new().num_threads(plan.jobs).build() {
        Ok(pool) => merged(&pool.broadcast(|_| worker.work(&queue))),
        // A machine without room for threads still has this one.
        Err(_) => worker.work(&queue),
    };
    // A device that was lost on the way is told, although others have done its work.
    let last = subjects.backend(&subjects.options(0)).ok();
    let host = last.as_ref().and_then(|backend| backend.host());
    let (lost, devices) = host.map(|host| (host.lost(), host.devices())).unwrap_or_default();
    let mut summary = queue.close().end(census, lost);
    summary.devices = devices;
    // With a moment left it has had its time.
    let is_early = |time: Duration| start.elapsed() < time.mul_f64(FULL);
    let ended = worker.turns().ended;
    summary.ended_early =
        ended.filter(|early| *early == Early::NothingNew || plan.time.is_some_and(is_early));
    summary
}

fn merged(parts: &[Census]) -> Census {
    parts.iter().fold(Census::default(), |mut all, part| {
        all.merge(part);
        all
    })
}

/// Everything that the threads of a campaign share.
struct Worker<'a> {
    plan: &'a Plan,
    subjects: &'a dyn Subjects,
    sinks: &'a Sinks<'a>,
    search: Option<&'a Search<'a>>,
    /// Number of turns that were run before the campaign was cut off.
    earlier: u64,
    start: Instant,
    budget: Budget,
    turns: Mutex<Turns>,
    streak: Mutex<Streak>,
    /// The end of all shrinking.
    shrinking: Arc<Term>,
}

/// Turns that were taken.
#[derive(Debug, Default)]
struct Turns {
    next: u64,
    /// Reason why the next one was turned away.
    ended: Option<Early>,
}

impl Worker<'_> {
    /// Runs one thread's part: takes the next case until there is none. Whatever is taken is finished, so that the
    /// cases of an interrupted campaign are the first ones of the whole.
    fn work(&self, queue: &Queue) -> Census {
        let mut census = Census::default();
        // Of all of them, whoever asks to stop: sums and census tell of the same cases.
        while let Some(index) = self.take_earlier() {
            self.count_again(index, &mut census);
        }
        while !self.sinks.control.stopped() && !self.budget.is_over() {
            let Some((turn, index)) = self.take() else { break };
            if !queue.begin(turn) {
                break;
            }
            let begun = Instant::now();
            let outcome = self.case(index, &mut census);
            self.count(&outcome, begun.elapsed());
            queue.finish(turn, outcome);
        }
        census
    }

    /// Counts a case that was run before the campaign was cut off.
    fn count_again(&self, index: u64, census: &mut Census) {
        let asked = panic::catch_unwind(AssertUnwindSafe(|| asked(self.plan, self.subjects, index)));
        if let Ok(Ok(asked)) = asked {
            census.add_asked(&asked);
        }
        self.sinks.control.cases.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a case for whoever watches, and for the times of those to come.
    fn count(&self, outcome: &Outcome, took: Duration) {
        self.search.inspect(|search| search.met(&outcome.judged));
        self.sinks.control.cases.fetch_add(1, Ordering::Relaxed);
        let failed = match &outcome.judged {
            Judged::Failed(failed) | Judged::Own(failed) => Some(failed),
            _ => None,
        };
        self.sinks.control.failed.fetch_add(u64::from(failed.is_some()), Ordering::Relaxed);
        // What a deadline and fresh workers took of a case says nothing about the next one.
        if failed.is_none_or(|failed| failed.finding.ending.is_none()) {
            self.budget.add(outcome.work, took);
        }
        self.add_to_streak(outcome);
    }

    fn add_to_streak(&self, outcome: &Outcome) {
        match &outcome.judged {
            // Where no query sees a key, any subject holds that writes zeros.
            Judged::Held(_) if outcome.products == 0 => {}
            Judged::Held(_) => self.streak().end(),
            Judged::Failed(failed) if self.is_known(failed) => self.streak().end(),
            Judged::Failed(failed) => self.streak().add(Symptom::of(&failed.finding)),
            // The subject was not asked, or it cannot be said what it did.
            Judged::Refused(_)
            | Judged::Malformed(_)
            | Judged::Accepted(..)
            | Judged::Own(_)
            | Judged::Infrastructure(_)
            | Judged::Abandoned => {}
        }
    }

    fn is_known(&self, failed: &Failed) -> bool {
        self.subjects.known(&failed.finding, &failed.case.problem).is_some()
    }

    /// Takes the next of the turns that were run before the campaign was cut off, and returns the index of its case.
    fn take_earlier(&self) -> Option<u64> {
        let mut turns = self.turns();
        if turns.next >= self.earlier {
            return None;
        }
        turns.next += 1;
        self.plan.case(turns.next - 1)
    }

    /// Takes the next turn, and returns it with the index of its case; `None` where the plan has no further case, the
    /// search is over, the time left cannot hold it, or it would say nothing new. No later turn is taken then, so that
    /// no case is left out.
    fn take(&self) -> Option<(u64, u64)> {
        let mut turns = self.turns();
        if self.search.is_some_and(Search::is_over) {
            return None;
        }
        if turns.ended.is_some() {
            return None;
        }
        let turn = turns.next;
        let index = self.plan.case(turn)?;
        turns.ended = self.early_end(turn, index);
        if turns.ended == Some(Early::NothingNew) {
            let limit = Some(shrinking_after(self.start.elapsed()));
            self.shrinking.bring_forward(Deadline::after(limit));
        }
        turns.next += u64::from(turns.ended.is_none());
        turns.ended.is_none().then_some((turn, index))
    }

    /// Returns why a case is not begun, if it is not.
    fn early_end(&self, turn: u64, index: u64) -> Option<Early> {
        if self.plan.time.is_some() && self.streak().is_long() {
            return Some(Early::NothingNew);
        }
        let is_too_long = turn > 0 && self.budget.is_tight() && !self.fits(index);
        is_too_long.then_some(Early::NoTimeLeft)
    }

    /// Whether the time left may hold the case of this index. What cannot be drawn is for [`Worker::case`] to tell.
    fn fits(&self, index: u64) -> bool {
        let asked = panic::catch_unwind(AssertUnwindSafe(|| asked(self.plan, self.subjects, index)));
        match asked {
            Ok(Ok(Asked::Problem(problem) | Asked::Probe(problem))) => self.budget.holds(work(&problem)),
            Ok(Ok(Asked::Malformed(_)) | Err(_)) | Err(_) => true,
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streak(&self) -> MutexGuard<'_, Streak> {
        self.streak.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one case. A panic that the judge does not turn into a verdict is this program's fault, and is counted as
    /// such instead of ending the campaign.
    fn case(&self, index: u64, census: &mut Census) -> Outcome {
        let attempt = panic::catch_unwind(AssertUnwindSafe(|| {
            let asked = match asked(self.plan, self.subjects, index) {
                Ok(asked) => asked,
                Err(error) => return Outcome::untouched(index, Judged::internal(&error)),
            };
            census.add_asked(&asked);
            match asked {
                Asked::Problem(problem) | Asked::Probe(problem) => self.problem(index, problem),
                Asked::Malformed(malformed) => self.malformed(index, &malformed),
            }
        }));
        attempt.unwrap_or_else(|_| Outcome::untouched(index, Judged::internal(&"the case's thread panicked")))
    }

    fn problem(&self, index: u64, problem: Problem) -> Outcome {
        let options = self.subjects.options(self.plan.draw(index, "options"));
        let backend = match self.subjects.backend(&options) {
            Ok(backend) => backend,
            Err(error) => return Outcome::untouched(index, Judged::internal(&error)),
        };
        let (tokens, products) = (problem.tokens() as u64, products(&problem));
        let (elements, work) = (result_elements(&problem), work(&problem));
        let (verdict, cost) = evaluate_timed(backend.as_ref(), &problem);
        let mut exercise = Exercise::default();
        exercise.add(&backend.declaration().table, &problem, &verdict);
        let (mut ways, mut groups) = (Ways::default(), Groups::default());
        if matches!(verdict, Verdict::Pass(_) | Verdict::Finding(_)) {
            ways.add(&problem, &backend.ways(&problem));
            groups.add(&problem, matches!(verdict, Verdict::Finding(_)));
        }
        let judged = match verdict {
            Verdict::Refused(refusal) => return Outcome::untouched(index, Judged::Refused(refusal.row())),
            Verdict::Pass(margin) => Judged::Held(margin),
            // The generator's limits are far below the judge's: a larger case is this program's fault.
            Verdict::TooLarge(what) | Verdict::Infrastructure(what) => {
                // Without anything left to run them on, no further cases are begun.
                if is_abandoned() {
                    return Outcome::untouched(index, Judged::Abandoned);
                }
                if backend.ready().is_err() {
                    self.sinks.control.stop();
                }
                Judged::Infrastructure(what)
            }
            Verdict::RefusedMalformed(rule) => {
                Judged::internal(&format!("a legal problem was refused as malformed: {rule}"))
            }
            Verdict::Finding(finding) => {
                let case = case_of(self.plan, self.subjects, index, problem);
                let recall = backend.host().and_then(Host::recall);
                let record = |case, finding| Failed { recall, ..self.record(index, case, finding) };
                match self.search {
                    Some(search) => search.judged(self.plan, index, case, *finding, record),
                    None => Judged::Failed(Box::new(record(case, *finding))),
                }
            }
        };
        Outcome { index, tokens, products, elements, work, cost, ways, groups, exercise, judged }
    }

    fn malformed(&self, index: u64, malformed: &Malformed) -> Outcome {
        let rule = malformed.rule;
        let judged = match evaluate_malformed(malformed) {
            Verdict::Finding(finding) => Judged::Accepted(rule, finding),
            Verdict::Infrastructure(what) => Judged::Infrastructure(what),
            Verdict::RefusedMalformed(rule) => Judged::Malformed(rule),
            other => Judged::internal(&format!("a malformed problem was judged as a legal one: {other}")),
        };
        Outcome::untouched(index, judged)
    }

    /// Puts a failing case on disk, as it was drawn.
    fn record(&self, index: u64, case: Case, finding: Finding) -> Failed {
        let (name, case) = (name_of(index), case.as_drawn(&finding));
        let recorded = self.sinks.findings.record(&name, &case);
        Failed { name, case, finding, recall: None, recorded: Recorded::Now(recorded) }
    }
}

/// Returns the declaration of the subject with the options of the case of this index.
fn declared(plan: &Plan, subjects: &dyn Subjects, index: u64) -> Result<Declaration, BackendError> {
    subjects.declaration(&subjects.options(plan.draw(index, "options")))
}

/// Returns what the subject is asked in the case of this index.
fn asked(plan: &Plan, subjects: &dyn Subjects, index: u64) -> Result<Asked, BackendError> {
    let declaration = declared(plan, subjects, index)?;
    Ok(Asked::drawn(plan.seed, index, &plan.profile.limits(), &declaration))
}

/// Returns the case that a campaign makes of the problem of this index.
fn case_of(plan: &Plan, subjects: &dyn Subjects, index: u64, problem: Problem) -> Case {
    let options = subjects.options(plan.draw(index, "options"));
    let subject = Subject { name: subjects.name().to_owned(), options };
    Case::new(subject, plan.draw(index, "schedule"), problem)
}

/// Beginning of the name of a failing case, as it was drawn.
const DRAWN: &str = "case-";

/// Returns the name of the file of a failing case, as it was drawn.
fn name_of(index: u64) -> String {
    format!("{DRAWN}{index:08}")
}

/// Returns the number of elements of all results: out and lse, and dq, dk and dv of a backward.
fn result_elements(problem: &Problem) -> u64 {
    let size = |shape: &[usize]| shape.iter().product::<usize>() as u64;
    let forward = size(&problem.out_shape()) + size(&problem.lse_shape());
    match problem.pass {
        Pass::Forward => forward,
        Pass::Backward => {
            forward
                + [problem.q_shape(), problem.k_shape(), problem.v_shape()]
                    .iter()
                    .map(|s| size(s))
                    .sum::<u64>()
        }
    }
}

/// Returns the work of a case, by which a [`Budget`] foretells its time: products, of which a backward has about three
/// times as many, and elements, which are drawn, compared and moved.
fn work(problem: &Problem) -> u64 {
    let passes = if problem.pass == Pass::Backward { 3 } else { 1 };
    let products = products(problem).saturating_mul(passes);
    products.saturating_add(result_elements(problem).saturating_mul(ELEMENT_WORK))
}

/// Returns visible pairs · query heads · head dimension, the size of one of the products of a case.
fn products(problem: &Problem) -> u64 {
    problem.pairs().saturating_mul(problem.heads.q as u64).saturating_mul(problem.dims.qk as u64)
}
