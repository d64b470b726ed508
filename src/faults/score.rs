//! Scores of each fault, and of all faults together.

use std::collections::BTreeSet;
use std::time::Instant;

use rayon::prelude::*;
use seamproof_oracle::{Problem, TensorName};
use seamproof_simulator::faults::{Catcher, Fault};

use super::suspect::Suspect;
use super::{DRAWN_MAX, by_checker, by_resources, planted, rejection};
use crate::backends::BackendError;
use crate::campaign::SHRINK_EVALUATIONS_MAX;
use seamproof_judge::evaluate::{evaluate, findings};
use seamproof_judge::failure::same_failure;
use seamproof_judge::finding::Finding;
use seamproof_judge::ladder::Judge;
use seamproof_judge::ladder::faults::JudgeScore;
use seamproof_judge::shrink;
use seamproof_judge::subject::{Backend, Refusal};
use seamproof_judge::verdict::Verdict;

/// Largest median over all faults of the cases to the first finding.
pub const MEDIAN_CASES_MAX: usize = 20;
/// Largest number of cases of a fault and a seed on which a subject may be wrong by itself before it counts as
/// useless here. It is as large as the number of cases that a fault may have to its first finding.
const FLAWED_MAX: usize = MEDIAN_CASES_MAX;

/// The first case that something caught.
#[derive(Clone, Debug)]
pub struct First {
    /// Rung that caught it.
    pub by: Catcher,
    /// Tensor that was wrong, where one was.
    pub tensor: Option<TensorName>,
    /// Words of the finding.
    pub what: String,
    /// Number of cases up to this one.
    pub cases: usize,
    /// Seconds up to this case, including the time for drawing cases.
    pub seconds: f64,
    /// Problem of the case.
    pub problem: Problem,
    /// Number of earlier cases on which the subject is wrong even without the fault. These do not show the fault.
    pub flawed: usize,
}

impl First {
    /// Returns in words what caught the case, and on which tensor.
    pub fn by(&self) -> String {
        let tensor = self.tensor.map(|tensor| format!(" {tensor}")).unwrap_or_default();
        format!("{}{tensor}", self.by.name())
    }
}

/// Size of a repro.
#[derive(Clone, Copy, Debug)]
pub struct Repro {
    /// Number of sequences.
    pub sequences: usize,
    /// Number of real queries.
    pub tokens: usize,
    /// Number of ranks.
    pub cp: usize,
}

/// Reason why a fault was tried on no case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRun {
    /// A fault that shows on problems that the subject's table refuses, and on none that it takes. There is nothing
    /// to find.
    #[error("excluded by the table: the subject takes no problem on which it shows; the first one: {0}")]
    Excluded(Refusal),
    /// A subject that cannot be run or is too often wrong by itself, or a fault that shows on no problem at all.
    #[error("{0}")]
    Failed(String),
}

/// Effort that is made for each fault.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Number of streams on which the fault is tried.
    pub seeds: u64,
    /// Number of first cases of these streams that every rung examines.
    pub examined: usize,
    /// Whether the repro is shrunk.
    pub shrinks: bool,
}

impl Effort {
    /// Effort that tells whether each fault is caught, and by which rungs on one case.
    pub const QUICK: Effort = Effort { seeds: 1, examined: 1, shrinks: false };

    /// Returns the effort of the whole score over some seeds.
    pub fn whole(seeds: u64) -> Effort {
        Effort { seeds, examined: 3, shrinks: true }
    }
}

/// Returns every rung of the judge that condemns a subject on a case. The judge stops at a structural fault. A judge
/// without the structure check says which other rungs would have seen the fault.
fn seen_by(subject: &dyn Backend, problem: &Problem) -> BTreeSet<Catcher> {
    let seen =
        |judge: &Judge| findings(judge, subject, problem).into_iter().map(|found| found.check.catcher());
    let mut rungs: BTreeSet<Catcher> = seen(&Judge::default()).collect();
    if rungs.contains(&Catcher::Structure) {
        rungs.extend(seen(&Judge { structure: |_, _, _, _| None, ..Judge::default() }));
    }
    rungs
}

/// Score of one fault.
#[derive(Clone, Debug)]
pub struct Score {
    /// Fault that is scored.
    pub suspect: Suspect,
    /// First rejections of the edited schedule, of each kind one for each seed that had one.
    pub schedule: Vec<First>,
    /// First findings of the judge, one for each seed that had one.
    pub campaign: Vec<First>,
    /// Rungs that saw the fault on the examined cases.
    pub rungs: BTreeSet<Catcher>,
    /// Shrunk repro of the first seed: the campaign's, or the schedule's where the campaign has none.
    pub repro: Option<Repro>,
    /// Reason why the fault was tried on no seed. Such a fault was not missed.
    pub not_run: Option<NotRun>,
}

impl Score {
    /// Whether a rung that the fault names caught it.
    pub fn caught(&self) -> bool {
        let record = self.suspect.record();
        self.schedule.iter().chain(&self.campaign).any(|first| record.is_caught_by(first.by))
    }

    /// Returns the rung that was the first to catch the fault on the first seed.
    pub fn first(&self) -> Option<Catcher> {
        let firsts = self.schedule.first().into_iter().chain(self.campaign.first());
        firsts.min_by_key(|first| first.cases).map(|first| first.by)
    }

    /// Whether the subject's table excludes the fault.
    pub fn is_excluded(&self) -> bool {
        matches!(self.not_run, Some(NotRun::Excluded(_)))
    }

    /// Returns the rung that alone saw the fault.
    pub fn only(&self) -> Option<Catcher> {
        self.rungs.first().copied().filter(|_| self.rungs.len() == 1)
    }

    /// Returns the cases and the seconds to the first finding, each as the median over seeds.
    pub fn median(firsts: &[First]) -> Option<(usize, f64)> {
        let cases = median(firsts.iter().map(|first| first.cases).collect(), usize::cmp)?;
        let seconds = median(firsts.iter().map(|first| first.seconds).collect(), f64::total_cmp)?;
        Some((cases, seconds))
    }

    /// Returns the median over seeds of the cases to the first finding, of the schedule or of the judge, whichever is
    /// smaller.
    pub fn cases(&self) -> Option<usize> {
        let both = [&self.schedule, &self.campaign].into_iter().filter_map(|firsts| Score::median(firsts));
        both.map(|(cases, _)| cases).min()
    }
}

fn median<T: Copy>(mut values: Vec<T>, order: fn(&T, &T) -> std::cmp::Ordering) -> Option<T> {
    values.sort_unstable_by(order);
    values.get(values.len() / 2).copied()
}

/// Scores of a whole catalogue.
pub struct Scored {
    /// Scores of the faults in subjects.
    pub subjects: Vec<Score>,
    /// Scores of the faults in the judge.
    pub judge: Vec<JudgeScore>,
}

impl Scored {
    /// Returns the faults that no rung caught which they name.
    pub fn missed(&self) -> Vec<&'static str> {
        let missed = |score: &&Score| !score.caught() && score.not_run.is_none();
        self.subjects
            .iter()
            .filter(missed)
            .map(|score| score.suspect.id())
            .chain(self.judge.iter().filter(|score| !score.caught()).map(|score| score.fault.id))
            .collect()
    }

    /// Returns the faults whose subjects could not be run.
    pub fn not_run(&self) -> Vec<&'static str> {
        self.ids(|score| matches!(score.not_run, Some(NotRun::Failed(_))))
    }

    /// Returns the faults that a subject's table excludes.
    pub fn excluded(&self) -> Vec<&'static str> {
        self.ids(Score::is_excluded)
    }

    fn ids(&self, of: impl Fn(&Score) -> bool) -> Vec<&'static str> {
        self.subjects.iter().filter(|score| of(score)).map(|score| score.suspect.id()).collect()
    }

    /// Returns the median of the cases to the first finding, over the faults in subjects that were found.
    pub fn median_cases(&self) -> Option<usize> {
        median(self.subjects.iter().filter_map(Score::cases).collect(), usize::cmp)
    }

    /// Whether every fault that the subjects' tables do not exclude is caught by a rung that it names, and soon
    /// enough.
    pub fn holds(&self) -> bool {
        let soon =
            self.subjects.is_empty() || self.median_cases().is_some_and(|cases| cases <= MEDIAN_CASES_MAX);
        soon && self.missed().is_empty() && self.not_run().is_empty()
    }
}

/// Returns the first problem of a seed's stream on which the judge finds the subject wrong because of the fault, with
/// the finding. Returns an error where nothing was found and the subject cannot be run, is too often wrong by itself,
/// or has no problem on which the fault shows.
pub fn by_campaign(fault: impl Into<Suspect>, seed: u64) -> Result<Option<(First, Finding)>, NotRun> {
    let (start, suspect) = (Instant::now(), fault.into());
    let made = |error: BackendError| NotRun::Failed(error.to_string());
    let subject = suspect.subject(seed).map_err(made)?;
    let right = suspect.right(seed).map_err(made)?;
    let own = |problem: &Problem| match right.as_deref().map(|right| evaluate(right, problem)) {
        Some(Verdict::Finding(own)) => Ok(Some(own)),
        // A device that is gone says nothing about the fault.
        Some(Verdict::Infrastructure(why)) => Err(NotRun::Failed(why)),
        _ => Ok(None),
    };
    let (mut looked, mut flawed) = (0, 0);
    for problem in suspect.stream(seed).map_err(made)? {
        looked += 1;
        let finding = match evaluate(subject.as_ref(), &problem) {
            Verdict::Finding(finding) => *finding,
            Verdict::Infrastructure(why) => return Err(NotRun::Failed(why)),
            _ => continue,
        };
        if let Some(own) = own(&problem)? {
            flawed += 1;
            if flawed == FLAWED_MAX {
                return Err(NotRun::Failed(format!(
                    "the subject is wrong without the fault, too, on {flawed} of {looked} cases: {own}"
                )));
            }
            continue;
        }
        let (by, what) = (finding.check.catcher(), finding.to_string());
        let (cases, seconds) = (looked - flawed, start.elapsed().as_secs_f64());
        let first = First { by, tensor: finding.tensor, what, cases, seconds, problem, flawed };
        return Ok(Some((first, finding)));
    }
    if looked > 0 {
        return Ok(None);
    }
    match suspect.excluded(seed).map_err(made)? {
        Some(refusal) => Err(NotRun::Excluded(refusal)),
        None => Err(NotRun::Failed(format!("it shows on none of {DRAWN_MAX} problems"))),
    }
}

/// Returns every rung that sees the fault on a case: the rungs that condemn the subject, and do not condemn it
/// without the fault. A campaign draws identities of a case. All identities are asked here, and a further one may
/// fail for the subject itself.
fn seen_of(suspect: &Suspect, seed: u64, problem: &Problem) -> BTreeSet<Catcher> {
    let Ok(subject) = suspect.subject(seed) else { return BTreeSet::new() };
    let own = match suspect.right(seed) {
        Ok(Some(right)) => seen_by(right.as_ref(), problem),
        _ => BTreeSet::new(),
    };
    &seen_by(subject.as_ref(), problem) - &own
}

/// Returns the repro of the first seed.
fn repro(suspect: &Suspect, campaign: Option<&(First, Finding)>, schedule: Option<&First>) -> Option<Repro> {
    let table = suspect.subject(0).ok()?.declaration().table;
    let small = |problem: &Problem, fails: &mut dyn FnMut(&Problem) -> bool| {
        let small = shrink::shrink_within(table.clone(), problem, SHRINK_EVALUATIONS_MAX, fails).problem;
        Repro { sequences: small.sequences.len(), tokens: small.tokens(), cp: small.parallel.size() }
    };
    if let Some((first, start)) = campaign {
        let (subject, right) = (suspect.subject(0).ok()?, suspect.right(0).ok()?);
        let fails_as = |subject: &dyn Backend, candidate: &Problem| {
            same_failure(start, evaluate(subject, candidate)).is_some()
        };
        // A case that fails in the same way without the fault is no repro of it.
        let mut fails = |candidate: &Problem| {
            fails_as(subject.as_ref(), candidate)
                && !right.as_deref().is_some_and(|right| fails_as(right, candidate))
        };
        return Some(small(&first.problem, &mut fails));
    }
    let (first, fault) = (schedule?, suspect.edited()?);
    let mut fails = |candidate: &Problem| {
        let schedule = planted(fault, candidate);
        schedule.is_some_and(|schedule| rejection(first.by, fault, candidate, &schedule).is_some())
    };
    Some(small(&first.problem, &mut fails))
}

/// Returns the first rejections of a fault's schedules, of each kind one for each seed that has one. Where a fault
/// names its resources alone, its schedules are right and only dear: the checker would prove whole streams in vain.
fn rejected(fault: &Fault, seeds: u64) -> impl Iterator<Item = First> {
    let proved =
        !fault.caught_by.contains(&Catcher::Resources) || fault.caught_by.contains(&Catcher::Checker);
    (0..seeds).flat_map(move |seed| {
        let checker = if proved { by_checker(fault, seed) } else { None };
        [checker, by_resources(fault, seed)].into_iter().flatten()
    })
}

/// Scores a fault.
pub fn score(suspect: Suspect, effort: Effort) -> Score {
    let seeds = 0..effort.seeds;
    let edited = suspect.edited();
    let schedule: Vec<First> = edited.into_iter().flat_map(|fault| rejected(fault, effort.seeds)).collect();
    let judged = seeds.filter(|_| suspect.runs());
    let (mut campaign, mut not_run, mut ran) = (Vec::new(), None, false);
    for seed in judged {
        match by_campaign(suspect.clone(), seed) {
            Ok(found) => {
                ran = true;
                campaign.extend(found.map(|found| (seed, found)));
            }
            // A subject that fails on one seed is worse than a fault that shows on no problem of another seed.
            Err(_) if matches!(not_run, Some(NotRun::Failed(_))) => {}
            Err(why) => not_run = Some(why),
        }
    }
    let not_run = not_run.filter(|_| !ran);
    let examined = campaign.iter().take(effort.examined);
    let mut rungs: BTreeSet<Catcher> =
        examined.flat_map(|(seed, (first, _))| seen_of(&suspect, *seed, &first.problem)).collect();
    rungs.extend(schedule.iter().map(|first| first.by));
    rungs.extend(campaign.iter().map(|(_, (first, _))| first.by));
    let start = campaign.first().map(|(_, found)| found);
    let repro = effort.shrinks.then(|| repro(&suspect, start, schedule.first())).flatten();
    let campaign = campaign.into_iter().map(|(_, (first, _))| first).collect();
    Score { suspect, schedule, campaign, rungs, repro, not_run }
}

/// Scores faults, several in parallel.
pub fn score_all(suspects: &[Suspect], effort: Effort) -> Vec<Score> {
    suspects.par_iter().map(|suspect| score(suspect.clone(), effort)).collect()
}
