//! Calibration: it finds a subject's numeric profile.
//!
//! The subject runs cases whose inputs are dithered, so that roundings differ from weight to weight. Each candidate
//! profile is replayed on each case, and scored by the largest error ÷ bound of tier R over all cases. The subject's
//! own profile stays at 1 or below; a wrong one is off by orders of magnitude. If exactly one candidate explains
//! everything, it is a profile worth locking. If none does, the subject is judged by tiers W and T alone. Where the
//! cases show why no profile is possible, the outcome says so ([`Unlockable`]).
//!
//! The order of merging partial results changes bounds alone: of out by its merges, and of gradients by their sums. With
//! given scales partial results are codes, whose order is the declared one.
//! The bounds of the orders are nested. Several candidates may explain everything and differ in their order alone. The
//! profile is then the tightest of them: results kept in f32, then what the subject declares, then results rounded to
//! their own format. Both passes of a candidate have one order. The source of D and
//! the format of single heads' gradients are found in the same way, in the order of [`BackwardFacts`]: a stored out
//! leaves D no error to speak of, and an unrounded out leaves it that of the last rounding.
//!
//! A choice that the cases show, and that every instance declared so, is left to the declaration in the lock. What a
//! subject declares as unknown is locked as it was found.
//!
//! How sure a profile is follows from the cases that condemned each other candidate ([`Calibration::doubt`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::envelope::{
    Arithmetic, Delta, DsWeights, GroupSums, Joints, KeyOrder, NumericProfile, TileFactor, WeightRounding,
};
use seamproof_oracle::{InputMode, Pass, Problem, Quantity};
use seamproof_simulator::schedule::MergeOrder;
use serde::Serialize;

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

/// Smallest share of dithered cases that condemn a wrong candidate. Of 100 cases of an emulated kernel that stores the
/// gradients of single heads, 30 condemn that it does not, since the others have no groups or no rounding that shows.
/// Apart from orders of merging, which few cases have, no other wrong candidate survives as often. If the true share
/// were a fifth, that count would have a chance of one in 90.
const CONDEMNING_SHARE: f64 = 1.0 / 5.0;
/// Largest chance of locking a profile that is not the subject's.
const WRONG_LOCK_CHANCE: f64 = 1e-6;
/// Largest [`Calibration::doubt`] with which a profile is locked.
pub const DOUBT_MAX: f64 = 1e-4;

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
    /// Whether weights are normalised before they are rounded, [`NumericProfile::weights`].
    pub normalises_first: bool,
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
    /// Format of the gradients of one query head, [`NumericProfile::group_sums`]. The tighter choice comes first.
    pub group_sums: GroupSums,
    /// Source of D, [`NumericProfile::delta`]. A tighter choice comes before a weaker one.
    pub delta: Delta,
    /// Weights that dS is made of, [`NumericProfile::ds_weights`].
    pub ds_weights: DsWeights,
    /// Rule of the factor that a tile's dS has, [`NumericProfile::tile_factor`].
    pub tile_factor: Option<TileFactor>,
    /// Order of merging, as in [`ForwardFacts::merge`].
    pub merge: Option<MergeOrder>,
}

/// What of a backward has to be known: the other facts have a tightest choice.
type BackwardKey = (bool, bool, Option<TileFactor>, Option<MergeOrder>);

/// Rules of a tile's factor that are tried.
const TILE_FACTORS: [Option<TileFactor>; 3] = [None, Some(TileFactor::Largest), Some(TileFactor::OfExponent)];

/// Choices of arithmetic that an instance declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Choices {
    /// Order of rounding weights and normalising them.
    pub weights: WeightRounding,
    /// Source of D.
    pub delta: Delta,
    /// Format of the gradients of one query head.
    pub group_sums: GroupSums,
    /// Weights that dS is made of.
    pub ds_weights: DsWeights,
}

/// Score of a candidate over all cases.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Largest error ÷ bound of any case.
    pub worst: f64,
    /// Number of cases with an error past its bound.
    pub condemned: u64,
}

impl Score {
    fn of_case(ratio: f64) -> Score {
        Score { worst: ratio, condemned: u64::from(!explains(ratio)) }
    }

    /// Whether the candidate explains every case.
    pub fn explains(&self) -> bool {
        self.condemned == 0
    }

    fn and(self, other: Score) -> Score {
        Score { worst: self.worst.max(other.worst), condemned: self.condemned + other.condemned }
    }
}

fn explains(ratio: f64) -> bool {
    ratio <= 1.0
}

/// Scores of all candidates, each the largest error ÷ bound.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// Number of cases that were judged.
    pub cases: u64,
    /// Number of cases that the subject's table refuses, or whose backward it does.
    pub refused: u64,
    /// Number of cases whose launches the subject does not tell, or for which it gave no whole result.
    pub untold: u64,
    /// Whether a case of both passes came without an LSE, from which the backward would recompute the weights.
    pub hides_lse: bool,
    /// Score of each forward candidate, from out.
    pub forward: BTreeMap<ForwardFacts, Score>,
    /// Orders of merging that differ in some case from what the subject declares.
    pub other_orders: BTreeSet<MergeOrder>,
    /// Sizes of tiles, of those that are tried, that differ in some case from what the instance declares.
    pub other_tiles: BTreeSet<usize>,
    /// Sizes of tiles, absent for the declared one, of which some case has several in a row: only then has a row an order
    /// of tiles.
    pub several_tiles: BTreeSet<Option<usize>>,
    /// Score of each backward candidate, from dq, dk and dv; empty where gradients are not replayed: the subject shows
    /// no LSE or no tiles of a dS with factors, or there is no backward.
    pub backward: BTreeMap<BackwardFacts, Score>,
    /// Choices that the instances declared, with an unknown one where a choice is.
    pub declared: BTreeSet<Choices>,
    /// Versions of what ran, [`Backend::versions`].
    pub versions: BTreeMap<String, String>,
}

impl ForwardFacts {
    /// Returns every candidate that merges as declared. Weights that are not rounded, or that are normalised first,
    /// tell nothing about tiles and their order, so they get one candidate for all of these. Weights that are not
    /// rounded tell nothing about the order of normalising them either.
    fn all() -> impl Iterator<Item = ForwardFacts> {
        let tiles = [None].into_iter().chain(KV_TILES.map(Some));
        let all = tiles.flat_map(|kv_tile| {
            (0..16u32).map(move |bits| ForwardFacts {
                rounds_weights: bits & 1 == 0,
                scales_queries: bits & 2 != 0,
                kv_tile,
                descending: bits & 4 != 0,
                normalises_first: bits & 8 != 0,
                merge: None,
            })
        });
        let is_told = |facts: &ForwardFacts| facts.rounds_weights || !facts.normalises_first;
        let has_tiles = |facts: &ForwardFacts| facts.rounds_weights && !facts.normalises_first;
        let has_one = |facts: &ForwardFacts| facts.kv_tile.is_none() && !facts.descending;
        all.filter(move |facts| is_told(facts) && (has_tiles(facts) || has_one(facts)))
    }

    fn weights(self) -> WeightRounding {
        match self.normalises_first {
            true => WeightRounding::AfterNormalisation,
            false => WeightRounding::BeforeNormalisation,
        }
    }

    fn profile(self, declared_tile: usize) -> NumericProfile {
        NumericProfile {
            rounds_weights: self.rounds_weights,
            scales_logit_gradients: false,
            scales_queries: self.scales_queries,
            kv_tile: self.kv_tile.unwrap_or(declared_tile),
            kv_order: if self.descending { KeyOrder::Descending } else { KeyOrder::Ascending },
            weights: self.weights(),
            delta: Delta::StoredOut,
            group_sums: GroupSums::F32,
            ds_weights: DsWeights::Unrounded,
            tile_factor: None,
        }
    }
}

impl BackwardFacts {
    /// Returns every candidate that sums gradients as declared.
    fn all() -> impl Iterator<Item = BackwardFacts> {
        let choices = [GroupSums::F32, GroupSums::Stored].into_iter().flat_map(|group_sums| {
            let deltas = [Delta::StoredOut, Delta::WeightedDots, Delta::UnroundedOut];
            deltas.map(|delta| (group_sums, delta))
        });
        choices
            .flat_map(|(group_sums, delta)| {
                (0..8u32).map(move |bits| BackwardFacts {
                    rounds_weights: bits & 1 == 0,
                    scales_logit_gradients: bits & 2 != 0,
                    group_sums,
                    delta,
                    tile_factor: None,
                    merge: None,
                    ds_weights: if bits & 4 == 0 { DsWeights::Unrounded } else { DsWeights::Rounded },
                })
            })
            // Weights that are not rounded are the same for dS.
            .filter(|facts| facts.rounds_weights || facts.ds_weights == DsWeights::Unrounded)
            .flat_map(|facts| TILE_FACTORS.map(|tile_factor| BackwardFacts { tile_factor, ..facts }))
            // Tiles with factors have codes of weights and of dS, and take the softmax's scale behind.
            .filter(|facts| {
                let has_codes = facts.rounds_weights && !facts.scales_logit_gradients;
                facts.tile_factor.is_none() || has_codes
            })
    }

    fn key(&self) -> BackwardKey {
        (self.rounds_weights, self.scales_logit_gradients, self.tile_factor, self.merge)
    }

    fn profile(self) -> NumericProfile {
        let BackwardFacts { rounds_weights, scales_logit_gradients, delta, group_sums, ds_weights, .. } =
            self;
        let tile_factor = self.tile_factor;
        let kv_order = KeyOrder::Ascending;
        NumericProfile {
            rounds_weights,
            scales_logit_gradients,
            scales_queries: false,
            weights: WeightRounding::BeforeNormalisation,
            delta,
            group_sums,
            ds_weights,
            kv_tile: 1,
            kv_order,
            tile_factor,
        }
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
    let merges = 1 + MergeOrder::WEIGHTED.len();
    // Tiles of a subject have factors or have none, and fewer candidates have one.
    let backward = BackwardFacts::all().filter(|facts| facts.tile_factor.is_none()).count();
    let candidates = (ForwardFacts::all().count() * merges * backward) as f64;
    let cases = libm::log(WRONG_LOCK_CHANCE / candidates) / libm::log(1.0 - CONDEMNING_SHARE);
    cases.ceil() as u64
}

impl Calibration {
    /// Scores every candidate on `cases` dithered problems of `seed`, each fitted to what the subject takes. The
    /// function `backend` makes the instance for a case.
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
        let table = backend.declaration().table;
        let problem = &table.fitted(problem.clone());
        let has_lost_backward = table.backward && problem.pass == Pass::Forward;
        if table.refusal(problem).is_some() || has_lost_backward {
            return Ok(Calibration { refused: 1, ..Calibration::default() });
        }
        let Some(trial) = Trial::run(backend, problem)? else {
            return Ok(Calibration { untold: 1, ..Calibration::default() });
        };
        let tile = trial.declared_tile();
        let others =
            MergeOrder::WEIGHTED.into_iter().filter_map(|order| Some((order, trial.other_joints(order)?)));
        // Codes of partial gradients have bounds too wide to tell a wrong order, so that theirs is the declared one.
        let has_codes = Quantity::Out.is_given(&problem.precision);
        let others: BTreeMap<MergeOrder, Joints> = others.filter(|_| !has_codes).collect();
        let mut replays = Replays { trial: &trial, forward: Vec::new(), backward: Vec::new() };
        let (mut forward, mut backward) = (BTreeMap::new(), BTreeMap::new());
        for facts in ForwardFacts::all() {
            let declared = replays.forward(facts.profile(tile), None);
            forward.insert(facts, declared);
            for order in MergeOrder::WEIGHTED {
                let other =
                    others.get(&order).map(|joints| replays.forward(facts.profile(tile), Some(*joints)));
                forward.insert(ForwardFacts { merge: Some(order), ..facts }, other.unwrap_or(declared));
            }
        }
        for facts in BackwardFacts::all() {
            for merge in [None].into_iter().chain(MergeOrder::WEIGHTED.map(Some)) {
                let joints = merge.and_then(|order| others.get(&order).copied());
                let score = replays.backward(facts.profile(), joints);
                backward.extend(score.map(|score| (BackwardFacts { merge, ..facts }, score)));
            }
        }
        let Arithmetic { weights, delta, group_sums, ds_weights, .. } = backend.declaration().arithmetic;
        Ok(Calibration {
            cases: 1,
            refused: 0,
            untold: 0,
            hides_lse: table.backward && trial.hides_lse(),
            forward,
            other_orders: others.into_keys().collect(),
            other_tiles: KV_TILES.into_iter().filter(|other| *other != tile).collect(),
            several_tiles: ForwardFacts::all()
                .filter(|facts| {
                    let ascending = ForwardFacts { descending: false, ..*facts };
                    let in_effect = |facts: ForwardFacts| trial.in_effect(facts.profile(tile));
                    facts.descending && in_effect(*facts) != in_effect(ascending)
                })
                .map(|facts| facts.kv_tile)
                .collect(),
            backward,
            declared: BTreeSet::from([Choices { weights, delta, group_sums, ds_weights }]),
            versions: backend.versions(),
        })
    }

    fn worse(mut self, other: Calibration) -> Calibration {
        self.cases += other.cases;
        self.refused += other.refused;
        self.untold += other.untold;
        self.hides_lse |= other.hides_lse;
        raise(&mut self.forward, other.forward);
        raise(&mut self.backward, other.backward);
        self.other_orders.extend(other.other_orders);
        self.other_tiles.extend(other.other_tiles);
        self.several_tiles.extend(other.several_tiles);
        self.declared.extend(other.declared);
        self.versions.extend(other.versions);
        self
    }

    /// Whether an order is the declared one, or differs from it in some case.
    fn has_order(&self, merge: Option<MergeOrder>) -> bool {
        merge.is_none_or(|order| self.other_orders.contains(&order))
    }

    /// Whether a candidate differs in some case from the one that takes tiles and merges as declared, and from the one
    /// that takes its tiles in ascending order.
    fn is_apart(&self, facts: &ForwardFacts) -> bool {
        self.has_order(facts.merge)
            && facts.kv_tile.is_none_or(|tile| self.other_tiles.contains(&tile))
            && (!facts.descending || self.several_tiles.contains(&facts.kv_tile))
    }

    /// Returns the candidates with these facts that explain out in every case, from the tightest order on.
    fn by_bound(&self, facts: ForwardFacts) -> impl Iterator<Item = ForwardFacts> {
        let orders = [Some(MergeOrder::Running), None, Some(MergeOrder::Deferred)];
        let explains = |facts: &ForwardFacts| self.forward.get(facts).is_some_and(Score::explains);
        let candidates = orders.map(|merge| ForwardFacts { merge, ..facts });
        candidates.into_iter().filter(move |facts| self.is_apart(facts) && explains(facts))
    }

    /// Returns the backward candidates that explain every case, each with the tightest of its sums and sources of D.
    fn tightest_backward(&self) -> Vec<BackwardFacts> {
        let explaining = self.backward.iter().filter(|(_, score)| score.explains()).map(|(facts, _)| *facts);
        let mut tightest: BTreeMap<BackwardKey, BackwardFacts> = BTreeMap::new();
        // In the order of candidates, tighter choices come before weaker ones.
        for facts in explaining {
            tightest.entry(facts.key()).or_insert(facts);
        }
        tightest.into_values().collect()
    }

    /// Returns the candidates of both passes that explain every case, or of the forward alone where no backward is
    /// replayed. Of those that differ in what has a tightest choice
    /// alone, there is one: the order is chosen last, because a weaker choice may make up for a wrong one.
    fn fits(&self) -> Vec<(ForwardFacts, Option<BackwardFacts>)> {
        if self.backward.is_empty() {
            let forward = ForwardFacts::all().filter(|facts| !facts.scales_queries);
            return forward.filter_map(|facts| Some((self.by_bound(facts).next()?, None))).collect();
        }
        let backward = self.tightest_backward();
        let fit = |facts: ForwardFacts, scales: bool, tile_factor: Option<TileFactor>| {
            let agreeing = |forward: ForwardFacts| {
                let key = (forward.rounds_weights, scales, tile_factor, forward.merge);
                let agrees = move |facts: &&BackwardFacts| facts.key() == key && !forward.scales_queries;
                backward.iter().filter(agrees).map(move |facts| (forward, *facts))
            };
            let all = self.by_bound(facts).flat_map(agreeing);
            all.min_by_key(|(_, facts)| BackwardFacts { merge: None, ..*facts })
        };
        ForwardFacts::all()
            .flat_map(|facts| [false, true].map(|scales| (facts, scales)))
            .flat_map(|(facts, scales)| TILE_FACTORS.map(|tile_factor| fit(facts, scales, tile_factor)))
            .flatten()
            .map(|(forward, backward)| (forward, Some(backward)))
            .collect()
    }

    /// Returns the chance that a candidate other than a subject's own is left, as these cases tell it: each candidate
    /// that was condemned in k of n cases would be left by n cases with the chance `(1 − k/n)^n`. It is the sum over
    /// them.
    pub fn doubt(&self) -> f64 {
        let cases = self.cases as f64;
        let left = |condemned: u64| libm::pow(1.0 - condemned as f64 / cases, cases);
        self.condemnations().map(left).sum::<f64>().min(1.0)
    }

    /// Returns the number of cases that condemned each candidate that was condemned. A candidate that is weaker than
    /// one that explains every case is left out: it would not have been taken. So is a backward of another order than
    /// that of a candidate which fits: the forward of that order tells.
    fn condemnations(&self) -> impl Iterator<Item = u64> {
        let tightest = self.tightest_backward();
        let orders: BTreeSet<_> = self.fits().into_iter().map(|(forward, _)| forward.merge).collect();
        let is_weaker = move |facts: &BackwardFacts| {
            !orders.contains(&facts.merge)
                || tightest.iter().any(|taken| taken.key() == facts.key() && taken < facts)
        };
        let backward =
            self.backward.iter().filter(move |(facts, _)| !is_weaker(facts)).map(|(_, score)| score);
        let forward = self.forward.iter().filter(|(facts, _)| self.is_apart(facts)).map(|(_, score)| score);
        forward.chain(backward).filter(|score| !score.explains()).map(|score| score.condemned)
    }

    /// Returns the fewest cases that condemned any candidate that was condemned at all.
    pub fn nearest(&self) -> Option<u64> {
        self.condemnations().min()
    }

    /// Returns a choice for the lock: `None` where every instance declared what was found.
    fn undeclared<T: PartialEq>(&self, found: T, of: fn(&Choices) -> T) -> Option<T> {
        let is_declared = self.declared.iter().all(|declared| of(declared) == found);
        (!is_declared).then_some(found)
    }

    /// Returns why nothing can be locked, if the cases show it.
    fn unlockable(&self, forward: &[ForwardFacts]) -> Option<Unlockable> {
        let scaled = !forward.is_empty() && forward.iter().all(|facts| facts.scales_queries);
        match self.cases {
            0 if self.untold > 0 => Some(Unlockable::NoLaunches),
            0 => Some(Unlockable::NoCase(self.refused)),
            _ if scaled => Some(Unlockable::ScaledQueries),
            _ if self.hides_lse => Some(Unlockable::HiddenLse),
            _ => None,
        }
    }

    /// Returns the one profile that explains everything, or else why there is none.
    pub fn outcome(&self, backend: &str, seed: u64) -> CalibrationOutcome {
        let forward: Vec<ForwardFacts> =
            ForwardFacts::all().filter_map(|facts| self.by_bound(facts).next()).collect();
        if let Some(why) = self.unlockable(&forward) {
            return CalibrationOutcome::Refused(why);
        }
        let fits = self.fits();
        match fits[..] {
            [] => CalibrationOutcome::None,
            [(forward, backward)] => CalibrationOutcome::Unique(Box::new(Lock {
                version: LOCK_VERSION,
                backend: backend.to_owned(),
                rounds_weights: forward.rounds_weights,
                scales_logit_gradients: backward.is_some_and(|facts| facts.scales_logit_gradients),
                scales_queries: forward.scales_queries,
                weights: self.undeclared(forward.weights(), |declared| declared.weights),
                delta: backward.and_then(|facts| self.undeclared(facts.delta, |declared| declared.delta)),
                group_sums: backward
                    .and_then(|facts| self.undeclared(facts.group_sums, |declared| declared.group_sums)),
                ds_weights: backward
                    .and_then(|facts| self.undeclared(facts.ds_weights, |declared| declared.ds_weights)),
                kv_tile: forward.kv_tile,
                kv_order: forward.profile(1).kv_order,
                merge: forward.merge,
                tile_factor: backward.and_then(|facts| facts.tile_factor),
                seed,
                cases: self.cases,
                versions: self.versions.clone(),
            })),
            _ => CalibrationOutcome::Several(fits.len()),
        }
    }
}

/// What a replay follows: a profile, and joints that are not the declared ones.
type Replayed = (NumericProfile, Option<Joints>);

/// Scores of one trial's replays. Profiles that this trial cannot tell apart are replayed once.
struct Replays<'a> {
    trial: &'a Trial,
    forward: Vec<(Replayed, Score)>,
    backward: Vec<(Replayed, Option<Score>)>,
}

impl Replays<'_> {
    fn forward(&mut self, profile: NumericProfile, joints: Option<Joints>) -> Score {
        let profile = self.trial.in_effect(profile);
        once(&mut self.forward, (profile, joints), || Score::of_case(self.trial.out(profile, joints)))
    }

    /// Returns the score of a backward; `None` where it cannot be replayed.
    fn backward(&mut self, profile: NumericProfile, joints: Option<Joints>) -> Option<Score> {
        let profile = self.trial.in_effect(profile);
        once(&mut self.backward, (profile, joints), || {
            self.trial.gradients(profile, joints).map(Score::of_case)
        })
    }
}

/// Returns what is known of a key, and computes it where nothing is.
fn once<Key: PartialEq, T: Copy>(known: &mut Vec<(Key, T)>, key: Key, compute: impl FnOnce() -> T) -> T {
    if let Some((_, value)) = known.iter().find(|(before, _)| *before == key) {
        return *value;
    }
    let value = compute();
    known.push((key, value));
    value
}

/// Joins the scores of each candidate.
fn raise<Facts: Ord>(scores: &mut BTreeMap<Facts, Score>, others: BTreeMap<Facts, Score>) {
    for (facts, score) in others {
        let joined = scores.entry(facts).or_default();
        *joined = joined.and(score);
    }
}

/// Returns the name of a choice, as a declaration has it.
fn name_of<T: Serialize>(choice: T) -> String {
    serde_json::to_value(choice).ok().and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default()
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
        writeln!(f, "{:<22}{:>12}{:>11}", "P normalised", "out", "condemned")?;
        for (facts, score) in self.forward.iter().filter(|(facts, _)| self.is_apart(facts)) {
            let tile = facts.kv_tile.map_or("declared".to_owned(), |tile| tile.to_string());
            let order = if facts.descending { "descending" } else { "ascending" };
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_queries));
            let merge = facts.merge.map_or("declared", MergeOrder::name);
            let normalised = if facts.normalises_first { "before rounding" } else { "after rounding" };
            let Score { worst, condemned } = score;
            write!(f, "{rounds:<12}{scales:<12}{tile:<12}{order:<12}{merge:<12}{normalised:<22}")?;
            writeln!(f, "{worst:>12.3}{condemned:>11}")?;
        }
        let head = ["rounds P", "scales dS before rounding", "heads of a group", "dS of P", "D", "merges"];
        let [rounds, scales, heads, ds, delta, merge] = head;
        write!(
            f,
            "{rounds:<12}{scales:<28}{heads:<20}{ds:<12}{delta:<22}{merge:<12}{:<14}",
            "tile's factor"
        )?;
        writeln!(f, "{:>12}{:>11}", "gradients", "condemned")?;
        let backward = self.backward.iter().filter(|(facts, _)| self.has_order(facts.merge));
        for (facts, Score { worst, condemned }) in backward {
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_logit_gradients));
            let (heads, ds, delta) =
                (name_of(facts.group_sums), name_of(facts.ds_weights), name_of(facts.delta));
            let merge = facts.merge.map_or("declared", MergeOrder::name);
            let factor = facts.tile_factor.map_or("none".to_owned(), name_of);
            write!(f, "{rounds:<12}{scales:<28}{heads:<20}{ds:<12}{delta:<22}{merge:<12}{factor:<14}")?;
            writeln!(f, "{worst:>12.3}{condemned:>11}")?;
        }
        if let Some(nearest) = self.nearest() {
            writeln!(
                f,
                "sure      the nearest other candidate was condemned in {nearest} of {cases} cases; the chance that one \
                 which is not the subject's is left: {:.0e}",
                self.doubt()
            )?;
        }
        Ok(())
    }
}
