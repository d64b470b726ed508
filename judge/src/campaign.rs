//! A campaign in memory: it draws problems, judges a subject on them, and shrinks the failures.
//!
//! It writes no files and starts no process: it serves the tests of a crate that has its own kernel. The same seed
//! and number of cases give the same summary on every machine, with any number of threads.
//!
//! The *canary* comes first. The subject itself is called wrongly (a window one key short, a key lost, …), and the
//! judge must see it, by a failure that the right call does not have. A campaign that misses its canary proves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::Problem;

use crate::asked::Asked;
use crate::case::{Case, Found, Subject};
use crate::census::{Census, Floors, MissedFloor};
use crate::evaluate::{evaluate, quiet_caught_panics};
use crate::exercise::Exercise;
use crate::failure::{FailureKey, Symptom, features, same_failure};
use crate::finding::{Finding, Relation};
use crate::generate::Profile;
use crate::prose::{counted, describe};
use crate::shrink;
use crate::subject::{Backend, Declaration};
use crate::subjects::{Borrowed, MISCALLS, Miscall, Miscalled};
use crate::values;
use crate::verdict::Verdict;

/// Number of cases that are judged in parallel before their failures are shrunk.
const BATCH: u64 = 64;
/// Largest number of failures of one symptom that are shrunk; further ones are only counted.
const SHRINKS_PER_SYMPTOM_MAX: usize = 8;
/// Largest number of problems that one shrink judges.
const EVALUATIONS_MAX: usize = 1000;
/// Number of drawn problems among which a wrong call must show and be found.
const CANARY_CASES_MAX: u64 = 200;
/// Number of cases that end a search for the canary where the subject fails by itself, or something beside it.
pub const OWN_FAILURES_MAX: u64 = 4;

/// Plan of a campaign.
///
/// ```
/// use seamproof_judge::prelude::*;
/// use seamproof_judge::subjects::{Emulated, Miscalled, miscall};
///
/// let wrong_call = miscall("call-last-key-lost").unwrap();
/// let summary = Campaign::quick(20).run(&Miscalled::new(Box::new(Emulated::default()), wrong_call));
/// assert!(!summary.failures.is_empty(), "{summary}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Campaign {
    /// Seed of all cases.
    pub seed: u64,
    /// Number of cases.
    pub cases: u64,
    /// Sizes of the cases.
    pub profile: Profile,
}

impl Campaign {
    /// Returns a campaign of `cases` cases in the quick profile, with seed 0.
    pub fn quick(cases: u64) -> Campaign {
        Campaign { seed: 0, cases, profile: Profile::Quick }
    }

    /// Judges the subject on every case. A panic of the subject is a finding, and is not printed; a crash takes this
    /// process with it.
    pub fn run(&self, subject: &dyn Backend) -> CampaignSummary {
        quiet_caught_panics();
        let mut summary = CampaignSummary::new(self, subject.declaration());
        summary.canary = self.canary(subject);
        for first in (0..self.cases).step_by(BATCH as usize) {
            let batch = first..self.cases.min(first + BATCH);
            let judged: Vec<Judged> =
                batch.into_par_iter().map(|index| self.judged(subject, index)).collect();
            judged.into_iter().for_each(|judged| summary.add(subject, judged));
        }
        summary
    }

    /// Returns what the subject is asked in place of draw `index`.
    fn asked(&self, subject: &dyn Backend, index: u64) -> Asked {
        Asked::drawn(self.seed, index, &self.profile.limits(), &subject.declaration())
    }

    fn judged(&self, subject: &dyn Backend, index: u64) -> Judged {
        let asked = self.asked(subject, index);
        let verdict = match &asked {
            Asked::Problem(problem) | Asked::Probe(problem) => Some(evaluate(subject, problem)),
            Asked::Malformed(_) => None,
        };
        Judged { asked, verdict }
    }

    /// Returns the result for the first wrong call that shows on the problems that the subject takes.
    fn canary(&self, subject: &dyn Backend) -> CanaryOutcome {
        let inside = |index| self.asked(subject, index).inside();
        let Some(call) = canary_call(subject, inside) else { return CanaryOutcome::Silent };
        let wrong = Miscalled::new(Box::new(Borrowed(subject)), call);
        let mut own = 0;
        for case in 0..CANARY_CASES_MAX {
            let Some(problem) = inside(case) else { continue };
            if !wrong.shows(&problem, &values::inputs(&problem)) {
                continue;
            }
            let Verdict::Finding(finding) = evaluate(&wrong, &problem) else { continue };
            if !fails_by_itself(subject, &problem, &finding) {
                return CanaryOutcome::Found { call: call.id, case };
            }
            own += 1;
            if own == OWN_FAILURES_MAX {
                break;
            }
        }
        match own {
            0 => CanaryOutcome::Missed { call: call.id },
            own => CanaryOutcome::NotTold { call: call.id, own },
        }
    }
}

/// Whether a failure of a wrong call is the subject's own: an error, which no wrong call asks for, or one that the
/// right call has as well.
fn fails_by_itself(subject: &dyn Backend, problem: &Problem, finding: &Finding) -> bool {
    finding.check.is_end() || matches!(evaluate(subject, problem), Verdict::Finding(_))
}

/// Returns the first wrong call that shows on what a subject takes: it changes the exact answer of one of its first
/// problems, or may leave a row of it unwritten. `inside` returns these problems by their index.
pub fn canary_call(
    subject: &dyn Backend,
    inside: impl Fn(u64) -> Option<Problem>,
) -> Option<&'static Miscall> {
    MISCALLS.iter().find(|call| {
        let wrong = Miscalled::new(Box::new(Borrowed(subject)), call);
        let mut problems = (0..CANARY_CASES_MAX).filter_map(&inside);
        problems.any(|problem| wrong.shows(&problem, &values::inputs(&problem)))
    })
}

/// Result of one case.
struct Judged {
    asked: Asked,
    /// Verdict on the subject; none where no subject was asked.
    verdict: Option<Verdict>,
}

/// Result of the canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CanaryOutcome {
    /// A wrong call that the judge saw.
    Found {
        /// Id of the wrong call in [`MISCALLS`].
        call: &'static str,
        /// Index of the case that showed it.
        case: u64,
    },
    /// A wrong call that changed the exact answer, and that the judge did not see.
    Missed {
        /// Id of the wrong call in [`MISCALLS`].
        call: &'static str,
    },
    /// A wrong call of which nothing can be said, because the subject fails without it.
    NotTold {
        /// Id of the wrong call in [`MISCALLS`].
        call: &'static str,
        /// Number of problems on which the subject failed by itself.
        own: u64,
    },
    /// No wrong call: none changed the exact answer of any problem that the subject takes.
    Silent,
}

/// A shrunk failure of the subject.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Key that two failures share when they are the same.
    pub key: FailureKey,
    /// The minimal case with its finding. [`Case::to_json`] stores it.
    pub case: Case,
    /// The problem as it was drawn.
    pub drawn: Problem,
    /// Number of later cases that shrank to the same failure, or have all that it needs.
    pub repeats: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", describe(&self.case.problem))?;
        self.case.found.iter().try_for_each(|found| write!(f, "\n    {found}"))
    }
}

/// Result of a campaign.
#[derive(Clone, Debug)]
pub struct CampaignSummary {
    /// Result of the canary.
    pub canary: CanaryOutcome,
    /// Number of cases that held.
    pub held: u64,
    /// Number of cases that the subject refused as its table says, by the row of the table.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of cases that held without an identity, because its second problem lies outside the subject's table.
    pub not_asked: BTreeMap<Relation, u64>,
    /// Distinct failures, in the order of the cases that showed them.
    pub failures: Vec<Failure>,
    /// Number of failing cases left unshrunk because [`SHRINKS_PER_SYMPTOM_MAX`] others of their symptom had been
    /// shrunk.
    pub unshrunk: u64,
    /// Cases that could not be judged, in words: faults of the judge or of the machine.
    pub internal: Vec<String>,
    /// Counts of the problems drawn.
    pub census: Census,
    exercise: Exercise,
    declaration: Declaration,
    profile: Profile,
    shrinks: BTreeMap<Symptom, usize>,
}

impl CampaignSummary {
    fn new(campaign: &Campaign, declaration: Declaration) -> CampaignSummary {
        CampaignSummary {
            canary: CanaryOutcome::Silent,
            held: 0,
            refused: BTreeMap::new(),
            not_asked: BTreeMap::new(),
            failures: Vec::new(),
            unshrunk: 0,
            internal: Vec::new(),
            census: Census::default(),
            exercise: Exercise::default(),
            declaration,
            profile: campaign.profile,
            shrinks: BTreeMap::new(),
        }
    }

    /// Whether nothing failed, everything could be judged, some case held, the judge saw its canary, and nothing is
    /// wrong with the subject's adapter.
    pub fn holds(&self) -> bool {
        let canary = matches!(self.canary, CanaryOutcome::Found { .. });
        let right = self.failures.is_empty() && self.internal.is_empty() && self.adapter().is_empty();
        canary && self.held > 0 && right
    }

    /// Returns what is wrong with the subject's adapter, in words.
    pub fn adapter(&self) -> Vec<String> {
        self.exercise.faults(&self.declaration.table)
    }

    /// Returns the classes of problems that were asked less often than a campaign over the subject's table asks them.
    /// The campaign says little about these.
    pub fn missed(&self) -> Vec<MissedFloor> {
        self.census.below(&self.floors())
    }

    /// Returns the classes of problems that the subject's table keeps out, or makes too rare. The campaign says
    /// nothing about these.
    pub fn kept_out(&self) -> Vec<&'static str> {
        self.floors().kept_out(self.profile)
    }

    fn floors(&self) -> Floors {
        Floors::of(&self.declaration, self.profile)
    }

    fn add(&mut self, subject: &dyn Backend, judged: Judged) {
        self.census.add_asked(&judged.asked);
        let (Asked::Problem(problem) | Asked::Probe(problem), Some(verdict)) = (judged.asked, judged.verdict)
        else {
            return;
        };
        self.exercise.add(&self.declaration.table, &problem, &verdict);
        match verdict {
            Verdict::Pass(margin) => {
                self.held += 1;
                for relation in margin.not_asked.iter() {
                    *self.not_asked.entry(relation).or_default() += 1;
                }
            }
            Verdict::Refused(refusal) => *self.refused.entry(refusal.row()).or_default() += 1,
            Verdict::Finding(finding) => self.fail(subject, problem, *finding),
            other => self.internal.push(other.to_string()),
        }
    }

    /// Shrinks a failure, unless a known one explains it.
    fn fail(&mut self, subject: &dyn Backend, drawn: Problem, finding: Finding) {
        let key = FailureKey::of(&finding, subject.name(), &drawn);
        if let Some(known) = self.failures.iter_mut().find(|known| known.explains(&key)) {
            known.repeats += 1;
            return;
        }
        let shrinks = self.shrinks.entry(Symptom::of(&finding)).or_default();
        if *shrinks == SHRINKS_PER_SYMPTOM_MAX {
            self.unshrunk += 1;
            return;
        }
        *shrinks += 1;
        let failure = Failure::shrunk(subject, drawn, &finding);
        match self.failures.iter_mut().find(|known| known.key == failure.key) {
            Some(known) => known.repeats += 1,
            None => self.failures.push(failure),
        }
    }
}

impl Failure {
    fn shrunk(subject: &dyn Backend, drawn: Problem, start: &Finding) -> Failure {
        let mut last = start.clone();
        let table = subject.declaration().table;
        let shrunk = shrink::shrink_within(table, &drawn, EVALUATIONS_MAX, |candidate| {
            let same = same_failure(start, evaluate(subject, candidate));
            same.map(|finding| last = finding).is_some()
        });
        let key = FailureKey::of(&last, subject.name(), &shrunk.problem);
        let mut found = Found {
            minimal: shrunk.complete,
            evaluations: shrunk.evaluations,
            ..Found::drawn(last.storable())
        };
        found.remember(&start.what);
        let name = subject.name().to_owned();
        let mut case = Case::new(Subject { name, options: BTreeMap::new() }, 0, shrunk.problem);
        case.found = Some(found);
        Failure { key, case, drawn, repeats: 0 }
    }

    /// Whether a failing case, as it was drawn, has all that this failure needs.
    fn explains(&self, drawn: &FailureKey) -> bool {
        self.key.without_features() == drawn.without_features() && self.needs().is_subset(&drawn.features)
    }

    /// Returns the features of the minimal case that the drawn one had too. The shrinker brought in the others: an
    /// empty sequence is simpler than a short one.
    fn needs(&self) -> BTreeSet<&'static str> {
        features(&self.drawn).intersection(&self.key.features).copied().collect()
    }
}

impl fmt::Display for CampaignSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused: u64 = self.refused.values().sum();
        match self.failures.len() as u64 {
            0 => write!(f, "nothing failed")?,
            count => write!(f, "{}", counted(count, "failure"))?,
        }
        writeln!(f, ": {} held, {refused} refused as the table says", counted(self.held, "case"))?;
        for failure in &self.failures {
            writeln!(f, "  {failure}")?;
            writeln!(f, "    {} came to the same", counted(failure.repeats, "later case"))?;
        }
        if let Some(not_asked) = crate::prose::not_asked(&self.not_asked) {
            writeln!(f, "  {not_asked}")?;
        }
        self.adapter().iter().try_for_each(|what| writeln!(f, "  adapter: {what}"))?;
        self.internal.iter().try_for_each(|what| writeln!(f, "  not judged: {what}"))?;
        match self.canary {
            CanaryOutcome::Found { call, case } => write!(f, "canary: {call} was found in case {case}"),
            CanaryOutcome::Missed { call } => {
                write!(f, "canary: {call} was missed: this campaign proves nothing")
            }
            CanaryOutcome::NotTold { call, own } => {
                let own = counted(own, "problem");
                write!(f, "canary: {call} was inconclusive, as the subject fails by itself on {own}")
            }
            CanaryOutcome::Silent => write!(f, "canary: no wrong call shows on what the subject takes"),
        }
    }
}
