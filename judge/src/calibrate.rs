//! Calibration: which numeric profile a subject has.
//!
//! The subject runs cases whose inputs are dithered, so that roundings differ from weight to weight. Each candidate
//! profile is replayed on each case, and scored by the largest error ÷ bound of tier R over all of them: the subject's
//! own profile stays at 1 or below, a wrong one is off by orders of magnitude. Exactly one candidate that explains
//! everything is a profile worth locking; with none, the subject is judged by the tiers W and T alone. Where the cases
//! show why there can be none, that is said ([`Unlockable`]).
//!
//! How partial results are merged changes bounds alone, and the orders' bounds lie one in the other. Of candidates that
//! differ in that alone and explain everything, the profile is the tightest: merges kept in f32 before what the subject
//! declares, and that before merges rounded to the result's format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::envelope::{KeyOrder, Merges, Profile};
use seamproof_oracle::{InputMode, Pass, Problem};
use seamproof_simulator::schedule::MergeOrder;

use crate::generate::{self, Draw, Limits};
use crate::ladder::Trial;
use crate::profile::{LOCK_VERSION, Lock};
use crate::subject::{Backend, RunError};

/// Cases unless told otherwise.
pub const CASES: u64 = 200;
/// Tiles that are tried beside the one that an instance declares.
const KV_TILES: [usize; 4] = [16, 32, 64, 128];
/// Draws of the generator for each dithered case wanted, at most.
const DRAWS_MAX: u64 = 100;

/// Least share of dithered cases that condemn a wrong candidate. Of 139 cases of the emulated kernel 62 condemn the one that
/// survives most, scaled queries, which differ where the scale is no power of two; a third is what that count leaves with a
/// chance of one in 300.
const CONDEMNING_SHARE: f64 = 1.0 / 3.0;
/// Chance that a lock may be of a profile that is not the subject's.
const WRONG_LOCK_CHANCE: f64 = 1e-6;

/// What the forward shows of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForwardFacts {
    /// See [`Profile::rounds_weights`].
    pub rounds_weights: bool,
    /// See [`Profile::scales_queries`].
    pub scales_queries: bool,
    /// See [`Lock::kv_tile`].
    pub kv_tile: Option<usize>,
    /// Whether tiles are taken from the last to the first.
    pub descending: bool,
    /// See [`Lock::merge`].
    pub merge: Option<MergeOrder>,
}

/// What the backward shows of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackwardFacts {
    /// See [`Profile::rounds_weights`].
    pub rounds_weights: bool,
    /// See [`Profile::scales_logit_gradients`].
    pub scales_logit_gradients: bool,
}

/// Every candidate with its score: the largest error ÷ bound.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// Cases that were judged.
    pub cases: u64,
    /// Cases that the subject's table refuses.
    pub refused: u64,
    /// Cases of which the subject does not tell its launches, or gave no whole result.
    pub untold: u64,
    /// Of out.
    pub forward: BTreeMap<ForwardFacts, f64>,
    /// The orders of merging that in some case are not as the subject declares.
    pub other_orders: BTreeSet<MergeOrder>,
    /// Of dq, dk and dv; empty where the subject shows no LSE.
    pub backward: BTreeMap<BackwardFacts, f64>,
}

impl ForwardFacts {
    /// Every candidate that merges as declared; a weight that is not rounded tells nothing of tiles and their order.
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

    fn profile(self, declared_tile: usize) -> Profile {
        Profile {
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

    fn profile(self) -> Profile {
        let BackwardFacts { rounds_weights, scales_logit_gradients } = self;
        let kv_order = KeyOrder::Ascending;
        Profile { rounds_weights, scales_logit_gradients, scales_queries: false, kv_tile: 1, kv_order }
    }
}

/// The profile that a calibration comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// One candidate explains every case.
    Unique(Box<Lock>),
    /// None does: tiers W and T alone.
    None,
    /// Several do: these cases do not tell them apart.
    Several(usize),
    /// What would be locked cannot be.
    Refused(Unlockable),
}

/// Why a subject has no profile to lock, whatever it rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unlockable {
    /// Its table refuses every case.
    #[error("its capability table refuses all {0} dithered cases: run more, or widen the table")]
    NoCase(u64),
    /// It tells nothing of its launches.
    #[error(
        "it does not say which keys its launches show together, so that its roundings cannot be replayed: tiers W and T \
         judge it; `Backend::launches` would let it be calibrated"
    )]
    NoLaunches,
    /// It hides its LSE, and with it what its backward recomputes weights from.
    #[error("it hides its LSE, so that its backward cannot be replayed: tiers W and T judge it, end to end")]
    HiddenLse,
    /// It rounds scaled queries.
    #[error(
        "it multiplies queries by the scale and rounds them before the product: that is another function of the inputs \
         than the problem's, which tier W condemns wherever the scale is no power of two; nothing to lock before that is \
         gone"
    )]
    ScaledQueries,
}

/// Least cases of a lock: fewer may leave a wrong candidate alone where the subject's own is not among them. Each of the
/// others survives a case with a chance of at most 1 − [`CONDEMNING_SHARE`], and all that do add up to
/// [`WRONG_LOCK_CHANCE`] at most.
pub fn lock_cases_min() -> u64 {
    let merges = 1 + MergeOrder::ALL.len();
    let candidates = (ForwardFacts::all().count() * merges * BackwardFacts::all().count()) as f64;
    let cases = libm::log(WRONG_LOCK_CHANCE / candidates) / libm::log(1.0 - CONDEMNING_SHARE);
    cases.ceil() as u64
}

impl Calibration {
    /// Scores every candidate on `cases` dithered problems of `seed`; `backend` makes the instance of a case.
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
        if backend.declaration().capabilities.refusal(problem).is_some() {
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

    /// A candidate that explains out in every case, with the tightest merges that do.
    fn tightest(&self, facts: ForwardFacts) -> Option<ForwardFacts> {
        let known = |merge: &Option<MergeOrder>| merge.is_none_or(|order| self.other_orders.contains(&order));
        let by_bound = [Some(MergeOrder::Running), None, Some(MergeOrder::Deferred)];
        let candidates = by_bound.into_iter().filter(known).map(|merge| ForwardFacts { merge, ..facts });
        let explains = |facts: &ForwardFacts| self.forward.get(facts).is_some_and(|score| *score <= 1.0);
        candidates.into_iter().find(explains)
    }

    /// Why there is nothing to lock, if what the cases show says so.
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

    /// The one profile that explains everything, if there is one; else why not.
    pub fn outcome(&self, backend: &str, seed: u64) -> Outcome {
        let forward: Vec<ForwardFacts> =
            ForwardFacts::all().filter_map(|facts| self.tightest(facts)).collect();
        if let Some(why) = self.unlockable(&forward) {
            return Outcome::Refused(why);
        }
        let fits = forward.into_iter().flat_map(|forward| {
            let agree = self.backward.iter().filter(move |(facts, score)| {
                **score <= 1.0 && facts.rounds_weights == forward.rounds_weights && !forward.scales_queries
            });
            agree.map(move |(backward, _)| (forward, *backward))
        });
        let fits: Vec<(ForwardFacts, BackwardFacts)> = fits.collect();
        match fits[..] {
            [] => Outcome::None,
            [(forward, backward)] => Outcome::Unique(Box::new(Lock {
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
            _ => Outcome::Several(fits.len()),
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

/// A drawn problem whose inputs are of a continuous law.
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
