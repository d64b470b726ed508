//! A campaign in memory: draw problems, judge a subject on them, shrink what fails.
//!
//! It writes no files and starts no process: it is for the tests of a crate that has a kernel of its own. The same seed and
//! number of cases give the same summary on every machine, with any number of threads.
//!
//! The *canary* comes first. The subject itself is called wrongly (a window one key short, a key lost, …), and the judge has
//! to see that. A campaign that misses its canary proves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::Problem;

use crate::case::{Case, Found, Subject};
use crate::census::{Census, MissedFloor};
use crate::evaluate::evaluate;
use crate::failure::{FailureKey, Symptom, features, same_failure};
use crate::finding::Finding;
use crate::generate::{self, Draw, Profile};
use crate::prose::{counted, describe};
use crate::shrink;
use crate::subject::Backend;
use crate::subjects::{Borrowed, MISCALLS, Miscall, Miscalled};
use crate::values;
use crate::verdict::Verdict;

/// Cases that are judged side by side before their failures are shrunk.
const BATCH: u64 = 64;
/// Most failures of one symptom that are shrunk; further ones are counted.
const SHRINKS_PER_SYMPTOM_MAX: usize = 8;
/// Most problems that one shrink judges.
const EVALUATIONS_MAX: usize = 1000;
/// Problems within which a wrong call must show and be found.
const CANARY_CASES_MAX: u64 = 200;

/// A campaign's plan.
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
    /// A campaign of so many cases of the quick profile, with seed 0.
    pub fn quick(cases: u64) -> Campaign {
        Campaign { seed: 0, cases, profile: Profile::Quick }
    }

    /// Judges the subject on every case. A panic of the subject is a finding; a crash takes this process with it.
    pub fn run(&self, subject: &dyn Backend) -> Summary {
        let mut summary = Summary { canary: self.canary(subject), ..Summary::new(self) };
        for first in (0..self.cases).step_by(BATCH as usize) {
            let batch = first..self.cases.min(first + BATCH);
            let judged: Vec<Judged> =
                batch.into_par_iter().map(|index| self.judged(subject, index)).collect();
            judged.into_iter().for_each(|judged| summary.add(subject, judged));
        }
        summary
    }

    /// Problem `index`, the nearest one that the subject takes; `None` where fields that make no problem were drawn.
    fn problem(&self, subject: &dyn Backend, index: u64) -> Option<Problem> {
        match generate::draw(self.seed, index, &self.profile.limits()) {
            Draw::Problem(problem) => Some(subject.fitted(problem)),
            Draw::Malformed(_) => None,
        }
    }

    fn judged(&self, subject: &dyn Backend, index: u64) -> Judged {
        let judged = self.problem(subject, index).map(|problem| (evaluate(subject, &problem), problem));
        judged.map_or(Judged::Malformed, |(verdict, problem)| Judged::Problem(Box::new(problem), verdict))
    }

    /// The first wrong call that shows on what the subject takes, and the case on which the judge saw it.
    fn canary(&self, subject: &dyn Backend) -> Canary {
        let calls = MISCALLS.iter().map(|call| self.wrong_call(subject, call));
        calls.into_iter().find(|canary| *canary != Canary::Silent).unwrap_or(Canary::Silent)
    }

    /// The first case on which a wrong call of the subject is found, or on which it shows and is not found.
    fn wrong_call(&self, subject: &dyn Backend, call: &'static Miscall) -> Canary {
        let wrong = Miscalled::new(Box::new(Borrowed(subject)), call);
        let mut shown = false;
        for index in 0..CANARY_CASES_MAX {
            let Some(problem) = self.problem(subject, index) else { continue };
            if subject.declaration().capabilities.refusal(&problem).is_some()
                || !wrong.shows(&problem, &values::inputs(&problem))
            {
                continue;
            }
            shown = true;
            if matches!(evaluate(&wrong, &problem), Verdict::Finding(_)) {
                return Canary::Found { call: call.id, case: index };
            }
        }
        if shown { Canary::Missed { call: call.id } } else { Canary::Silent }
    }
}

/// What came of one case.
enum Judged {
    Malformed,
    Problem(Box<Problem>, Verdict),
}

/// What came of the canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canary {
    /// The judge saw a wrong call.
    Found {
        /// The wrong call, an id of [`MISCALLS`].
        call: &'static str,
        /// Index of the case that showed it.
        case: u64,
    },
    /// A wrong call changed the exact answer, and the judge saw nothing.
    Missed {
        /// The wrong call.
        call: &'static str,
    },
    /// No wrong call changed the exact answer of any problem that the subject takes.
    Silent,
}

/// A failure of the subject, shrunk.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What makes two failures the same.
    pub key: FailureKey,
    /// The minimal case, with its finding: [`Case::to_json`] stores it.
    pub case: Case,
    /// The problem as it was drawn.
    pub drawn: Problem,
    /// Later cases that came to the same failure, or have all that it needs.
    pub repeats: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", describe(&self.case.problem))?;
        self.case.found.iter().try_for_each(|found| write!(f, "\n    {found}"))
    }
}

/// A campaign's result.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The canary.
    pub canary: Canary,
    /// Cases that held.
    pub held: u64,
    /// Cases that the subject refused as its table says, by the row of the table.
    pub refused: BTreeMap<&'static str, u64>,
    /// Distinct failures, in the order of the cases that showed them.
    pub failures: Vec<Failure>,
    /// Failing cases of a symptom of which [`SHRINKS_PER_SYMPTOM_MAX`] others were shrunk.
    pub unshrunk: u64,
    /// Cases that could not be judged, in words: a fault of the judge or of the machine.
    pub internal: Vec<String>,
    /// What was drawn.
    pub census: Census,
    profile: Profile,
    shrinks: BTreeMap<Symptom, usize>,
}

impl Summary {
    fn new(campaign: &Campaign) -> Summary {
        Summary {
            canary: Canary::Silent,
            held: 0,
            refused: BTreeMap::new(),
            failures: Vec::new(),
            unshrunk: 0,
            internal: Vec::new(),
            census: Census::default(),
            profile: campaign.profile,
            shrinks: BTreeMap::new(),
        }
    }

    /// Whether nothing failed, everything could be judged, and the judge saw its canary.
    pub fn holds(&self) -> bool {
        let canary = matches!(self.canary, Canary::Found { .. });
        canary && self.held > 0 && self.failures.is_empty() && self.internal.is_empty()
    }

    /// Returns the classes of problems that were drawn less often than a campaign on every problem draws them: what the
    /// campaign says little of.
    pub fn missed(&self) -> Vec<MissedFloor> {
        self.census.missed(self.profile)
    }

    fn add(&mut self, subject: &dyn Backend, judged: Judged) {
        let Judged::Problem(problem, verdict) = judged else { return };
        self.census.add(&problem);
        match verdict {
            Verdict::Pass(_) => self.held += 1,
            Verdict::Refused(refusal) => *self.refused.entry(refusal.row()).or_default() += 1,
            Verdict::Finding(finding) => self.fail(subject, *problem, *finding),
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
        let shrunk = shrink::shrink(&drawn, EVALUATIONS_MAX, |candidate| {
            // The shrinker's step may leave what the subject takes; the nearest problem inside is another candidate's business.
            if subject.fitted(candidate.clone()) != *candidate {
                return false;
            }
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

    /// The features of the minimal case that the drawn one had too. The shrinker brought in the others: an empty sequence is
    /// simpler than a short one.
    fn needs(&self) -> BTreeSet<&'static str> {
        features(&self.drawn).intersection(&self.key.features).copied().collect()
    }
}

impl fmt::Display for Summary {
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
        self.internal.iter().try_for_each(|what| writeln!(f, "  not judged: {what}"))?;
        match self.canary {
            Canary::Found { call, case } => write!(f, "canary: {call} was found in case {case}"),
            Canary::Missed { call } => write!(f, "canary: {call} was missed: this campaign proves nothing"),
            Canary::Silent => write!(f, "canary: no wrong call shows on what the subject takes"),
        }
    }
}
