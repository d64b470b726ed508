//! Calibration: it finds a subject's numeric profile.
//!
//! The subject runs cases whose inputs are dithered, so that roundings differ from weight to weight. Each candidate
//! profile is replayed on each case, and scored by the largest error ÷ bound of tier R over all cases. The subject's
//! own profile stays at 1 or below; a wrong one is off by orders of magnitude. If exactly one candidate explains
//! everything, it is a profile worth locking. If none does, the subject is judged by tiers W and T alone. Where the
//! cases show why no profile is possible, the outcome says so ([`Unlockable`]).
//!
//! The way of merging partial results changes bounds alone, and the bounds of the merge orders are nested. Several
//! candidates may explain everything and differ in their merges alone. The profile is then the tightest of them:
//! merges kept in f32, then what the subject declares, then merges rounded to the result's format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::envelope::{KeyOrder, Merges, NumericProfile};
use seamproof_oracle::{InputMode, Pass, Problem};
use seamproof_simulator::schedule::MergeOrder;

use crate::generate::{self, Draw, Limits};
use crate::ladder::Trial;
use crate::profile::{LOCK_VERSION, Lock};
use crate::subject::{Backend, RunError};

/// Default number of cases.
pub const CASES: u64 = 200;
/// Tile sizes that are tried besides the one that an instance declares.
const KV_TILES: [usize; 4] = [16, 32, 64, 128];
/// Largest number of draws of the generator for each dithered case.
const DRAWS_MAX: u64 = 100;

/// Smallest share of dithered cases that condemn a wrong candidate. Of 139 cases of the emulated kernel, 62 condemn
/// the wrong candidate that survives most often (scaled queries, which differ only where the scale is no power of
/// two). If the true share were a third, that count would have a chance of one in 300.
const CONDEMNING_SHARE: f64 = 1.0 / 3.0;
/// Largest chance of locking a profile that is not the subject's.
const WRONG_LOCK_CHANCE: f64 = 1e-6;

/// Properties of a profile that the forward shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForwardFacts {
    /// Whether weights are rounded, [`NumericProfile::rounds_weights`].
    pub rounds_weights: bool,
    /// Whether queries are scaled and rounded before the product, [`NumericProfile::scales_queries`].
    pub scales_queries: bool,
    /// Keys of a tile, [`Lock::kv_tile`]; `None` for the tile that an instance declares.
    pub kv_tile: Option<usize>,
    /// Whether tiles are taken from the last to the first.
    pub descending: bool,
    /// Order of merging, [`Lock::merge`]; `None` for what the subject declares.
    pub merge: Option<MergeOrder>,
}

/// Properties of a profile that the backward shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackwardFacts {
    /// Whether weights are rounded, [`NumericProfile::rounds_weights`].
    pub rounds_weights: bool,
    /// Whether logit gradients are scaled before they are rounded, [`NumericProfile::scales_logit_gradients`].
    pub scales_logit_gradients: bool,
}

/// Scores of all candidates, each the largest error ÷ bound.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// Number of cases that were judged.
    pub cases: u64,
    /// Number of cases that the subject's table refuses.
    pub refused: u64,
    /// Number of cases whose launches the subject does not tell, or for which it gave no whole result.
    pub untold: u64,
    /// Score of each forward candidate, from out.
    pub forward: BTreeMap<ForwardFacts, f64>,
    /// Orders of merging that differ in some case from what the subject declares.
    pub other_orders: BTreeSet<MergeOrder>,
    /// Score of each backward candidate, from dq, dk and dv; empty where the subject shows no LSE.
    pub backward: BTreeMap<BackwardFacts, f64>,
}

impl ForwardFacts {
    /// Returns every candidate that merges as declared. Weights that are not rounded tell nothing about tiles and
    /// their order, so they get one candidate for all of these.
    fn all() -> impl Iterator<Item = ForwardFacts> {
        let tiles = [None].into_iter().chain(KV_TILES.map(Some));
        let all = tiles.flat_map(|kv_tile| {
            (0..8u32).map(move |bits| ForwardFacts {
                rounds_weights: bits & 1 == 0,
                scales_queries: bits & 2 != 0,
                kv_tile,
                descending: bits & 4 != 0,
                merge: None,
            })
        });
        all.filter(|facts| facts.rounds_weights || (facts.kv_tile.is_none() && !facts.descending))
    }

    fn profile(self, declared_tile: usize) -> NumericProfile {
        NumericProfile {
            rounds_weights: self.rounds_weights,
            scales_logit_gradients: false,
            scales_queries: self.scales_queries,
            kv_tile: self.kv_tile.unwrap_or(declared_tile),
            kv_order: if self.descending { KeyOrder::Descending } else { KeyOrder::Ascending },
        }
    }
}

impl BackwardFacts {
    fn all() -> impl Iterator<Item = BackwardFacts> {
        (0..4u32).map(|bits| BackwardFacts {
            rounds_weights: bits & 1 == 0,
            scales_logit_gradients: bits & 2 != 0,
        })
    }

    fn profile(self) -> NumericProfile {
        let BackwardFacts { rounds_weights, scales_logit_gradients } = self;
        let kv_order = KeyOrder::Ascending;
        NumericProfile { rounds_weights, scales_logit_gradients, scales_queries: false, kv_tile: 1, kv_order }
    }
}

/// Result of a calibration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CalibrationOutcome {
    /// The one candidate that explains every case.
    Unique(Box<Lock>),
    /// No candidate explains every case: tiers W and T alone judge the subject.
    None,
    /// Number of candidates that explain every case, where these cases do not tell them apart.
    Several(usize),
    /// Reason why nothing can be locked.
    Refused(Unlockable),
}

/// Reason why a subject has no profile to lock, whatever it rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unlockable {
    /// A table that refuses every case.
    #[error("its table refuses all {0} dithered cases: run more, or widen the table")]
    NoCase(u64),
    /// A subject that tells nothing about its launches.
    #[error(
        "it does not say which keys its launches show together, so that its roundings cannot be replayed: tiers W and T \
         judge it; `Backend::launches` would let it be calibrated"
    )]
    NoLaunches,
    /// A hidden LSE, from which the backward would recompute the weights.
    #[error("it hides its LSE, so that its backward cannot be replayed: tiers W and T judge it, end to end")]
    HiddenLse,
    /// Scaled queries that are rounded before the product.
    #[error(
        "it multiplies queries by the scale and rounds them before the product: that is another function of the inputs \
         than the problem's, which tier W condemns wherever the scale is no power of two; nothing to lock before that is \
         gone"
    )]
    ScaledQueries,
}

/// Returns the smallest number of cases for a lock. With fewer, a wrong candidate may be the only one to survive
/// where the subject's own is not among the candidates. Each wrong candidate survives a case with a chance of at most
/// 1 − [`CONDEMNING_SHARE`]. Over all candidates, the chances to survive every case add up to [`WRONG_LOCK_CHANCE`]
/// at most.
pub fn lock_cases_min() -> u64 {
    let merges = 1 + MergeOrder::ALL.len();
    let candidates = (ForwardFacts::all().count() * merges * BackwardFacts::all().count()) as f64;
    let cases = libm::log(WRONG_LOCK_CHANCE / candidates) / libm::log(1.0 - CONDEMNING_SHARE);
    cases.ceil() as u64
}

impl Calibration {
    /// Scores every candidate on `cases` dithered problems of `seed`. The function `backend` makes the instance for a
    /// case.
    pub fn run(
        backend: impl Fn(u64) -> Result<Box<dyn Backend>, RunError> + Sync,
        cases: u64,
        seed: u64,
    ) -> Result<Calibration, RunError> {
        let dithered: Vec<(u64, Problem)> = (0..cases.saturating_mul(DRAWS_MAX))
            .filter_map(|index| Some((index, dithered(seed, index)?)))
            .take(cases as usize)
            .collect();
        let score = |(index, problem): (u64, Problem)| Calibration::of_case(&*backend(index)?, &problem);
        let each = dithered.into_par_iter().map(score).collect::<Result<Vec<Calibration>, RunError>>()?;
        Ok(each.into_iter().fold(Calibration::default(), Calibration::worse))
    }

    fn of_case(backend: &dyn Backend, problem: &Problem) -> Result<Calibration, RunError> {
        if backend.declaration().table.refusal(problem).is_some() {
            return Ok(Calibration { refused: 1, ..Calibration::default() });
        }
        let Some(trial) = Trial::run(backend, problem)? else {
            return Ok(Calibration { untold: 1, ..Calibration::default() });
        };
        let tile = trial.declared_tile();
        let others =
            MergeOrder::ALL.into_iter().filter_map(|order| Some((order, trial.other_merges(order)?)));
        let others: BTreeMap<MergeOrder, Merges> = others.collect();
        let mut forward = BTreeMap::new();
        for facts in ForwardFacts::all() {
            let declared = trial.out(facts.profile(tile), None);
            forward.insert(facts, declared);
            for order in MergeOrder::ALL {
                let other = others.get(&order).map(|merges| trial.out(facts.profile(tile), Some(*merges)));
                forward.insert(ForwardFacts { merge: Some(order), ..facts }, other.unwrap_or(declared));
            }
        }
        Ok(Calibration {
            cases: 1,
            refused: 0,
            untold: 0,
            forward,
            other_orders: others.into_keys().collect(),
            backward: BackwardFacts::all()
                .filter_map(|facts| Some((facts, trial.gradients(facts.profile())?)))
                .collect(),
        })
    }

    fn worse(mut self, other: Calibration) -> Calibration {
        self.cases += other.cases;
        self.refused += other.refused;
        self.untold += other.untold;
        raise(&mut self.forward, other.forward);
        raise(&mut self.backward, other.backward);
        self.other_orders.extend(other.other_orders);
        self
    }

    /// Returns the candidate with these facts and the tightest merges that explain out in every case, if any merges
    /// do.
    fn tightest(&self, facts: ForwardFacts) -> Option<ForwardFacts> {
        let known = |merge: &Option<MergeOrder>| merge.is_none_or(|order| self.other_orders.contains(&order));
        let by_bound = [Some(MergeOrder::Running), None, Some(MergeOrder::Deferred)];
        let candidates = by_bound.into_iter().filter(known).map(|merge| ForwardFacts { merge, ..facts });
        let explains = |facts: &ForwardFacts| self.forward.get(facts).is_some_and(|score| *score <= 1.0);
        candidates.into_iter().find(explains)
    }

    /// Returns why nothing can be locked, if the cases show it.
    fn unlockable(&self, forward: &[ForwardFacts]) -> Option<Unlockable> {
        let scaled = !forward.is_empty() && forward.iter().all(|facts| facts.scales_queries);
        match self.cases {
            0 if self.untold > 0 => Some(Unlockable::NoLaunches),
            0 => Some(Unlockable::NoCase(self.refused)),
            _ if scaled => Some(Unlockable::ScaledQueries),
            _ if self.backward.is_empty() => Some(Unlockable::HiddenLse),
            _ => None,
        }
    }

    /// Returns the one profile that explains everything, or else why there is none.
    pub fn outcome(&self, backend: &str, seed: u64) -> CalibrationOutcome {
        let forward: Vec<ForwardFacts> =
            ForwardFacts::all().filter_map(|facts| self.tightest(facts)).collect();
        if let Some(why) = self.unlockable(&forward) {
            return CalibrationOutcome::Refused(why);
        }
        let fits = forward.into_iter().flat_map(|forward| {
            let agree = self.backward.iter().filter(move |(facts, score)| {
                **score <= 1.0 && facts.rounds_weights == forward.rounds_weights && !forward.scales_queries
            });
            agree.map(move |(backward, _)| (forward, *backward))
        });
        let fits: Vec<(ForwardFacts, BackwardFacts)> = fits.collect();
        match fits[..] {
            [] => CalibrationOutcome::None,
            [(forward, backward)] => CalibrationOutcome::Unique(Box::new(Lock {
                version: LOCK_VERSION,
                backend: backend.to_owned(),
                rounds_weights: forward.rounds_weights,
                scales_logit_gradients: backward.scales_logit_gradients,
                scales_queries: forward.scales_queries,
                kv_tile: forward.kv_tile,
                kv_order: forward.profile(1).kv_order,
                merge: forward.merge,
                seed,
                cases: self.cases,
            })),
            _ => CalibrationOutcome::Several(fits.len()),
        }
    }
}

/// Keeps the larger score of each candidate.
fn raise<Facts: Ord>(scores: &mut BTreeMap<Facts, f64>, others: BTreeMap<Facts, f64>) {
    for (facts, score) in others {
        let worst = scores.entry(facts).or_default();
        *worst = worst.max(score);
    }
}

/// Returns a drawn problem with a backward pass whose inputs have a continuous distribution, if the draw is one.
fn dithered(seed: u64, index: u64) -> Option<Problem> {
    match generate::draw(seed, index, &Limits::quick()) {
        Draw::Problem(problem) => {
            let continuous = matches!(problem.mode, InputMode::Flat | InputMode::Peaked);
            (continuous && problem.pass == Pass::Backward).then_some(problem)
        }
        Draw::Malformed(_) => None,
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |is: bool| if is { "yes" } else { "no" };
        let Calibration { cases, refused, untold, .. } = self;
        write!(f, "cases     {cases} dithered ones")?;
        if refused + untold > 0 {
            write!(f, " (and {refused} refused, {untold} without launches)")?;
        }
        writeln!(f, "; the largest error ÷ bound of each candidate")?;
        let head = ["rounds P", "scales q", "kv tile", "order", "merges"];
        head.iter().try_for_each(|head| write!(f, "{head:<12}"))?;
        writeln!(f, "{:>12}", "out")?;
        let shown = |facts: &ForwardFacts| facts.merge.is_none_or(|order| self.other_orders.contains(&order));
        for (facts, score) in self.forward.iter().filter(|(facts, _)| shown(facts)) {
            let tile = facts.kv_tile.map_or("declared".to_owned(), |tile| tile.to_string());
            let order = if facts.descending { "descending" } else { "ascending" };
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_queries));
            let merge = facts.merge.map_or("declared", MergeOrder::name);
            writeln!(f, "{rounds:<12}{scales:<12}{tile:<12}{order:<12}{merge:<12}{score:>12.3}")?;
        }
        writeln!(f, "{:<12}{:<48}{:>12}", "rounds P", "scales dS before rounding", "gradients")?;
        for (facts, score) in &self.backward {
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_logit_gradients));
            writeln!(f, "{rounds:<12}{scales:<48}{score:>12.3}")?;
        }
        Ok(())
    }
}
