//! Calibration: which numeric profile a subject has.
//!
//! The subject runs cases whose inputs are dithered, so that roundings differ from weight to weight. Each candidate
//! profile is replayed on each case, and scored by the largest error ÷ bound of tier R over all of them: the subject's
//! own profile stays at 1 or below, a wrong one is off by orders of magnitude. Exactly one candidate that explains
//! everything is a profile worth locking; with none, the subject is judged by the tiers W and T alone.
//!
//! Merges of partial results are not among the candidates: they follow from the schedule that a subject declares.

use std::collections::BTreeMap;
use std::fmt;

use rayon::prelude::*;
use seamproof_oracle::replay::{KeyOrder, Profile};
use seamproof_oracle::{InputMode, Pass, Problem};

use crate::backend::{Backend, RunError};
use crate::generate::{self, Draw, Limits};
use crate::judge::Trial;
use crate::profile::{LOCK_VERSION, Lock};

/// Cases unless told otherwise.
pub const CASES: u64 = 200;
/// Tiles that are tried beside the one that an instance declares.
const KV_TILES: [usize; 4] = [16, 32, 64, 128];
/// Draws of the generator for each dithered case wanted, at most.
const DRAWS_MAX: u64 = 100;

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
    /// Of out.
    pub forward: BTreeMap<ForwardFacts, f64>,
    /// Of dq, dk and dv; empty where the subject shows no LSE.
    pub backward: BTreeMap<BackwardFacts, f64>,
}

impl ForwardFacts {
    /// Every candidate; a weight that is not rounded tells nothing of tiles and their order.
    fn all() -> impl Iterator<Item = ForwardFacts> {
        let tiles = [None].into_iter().chain(KV_TILES.map(Some));
        let all = tiles.flat_map(|kv_tile| {
            (0..8u32).map(move |bits| ForwardFacts {
                rounds_weights: bits & 1 == 0,
                scales_queries: bits & 2 != 0,
                kv_tile,
                descending: bits & 4 != 0,
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
        if backend.capabilities().refusal(problem).is_some() {
            return Ok(Calibration::default());
        }
        let Some(trial) = Trial::run(backend, problem)? else { return Ok(Calibration::default()) };
        let tile = trial.declared_tile();
        Ok(Calibration {
            cases: 1,
            forward: ForwardFacts::all().map(|facts| (facts, trial.out(facts.profile(tile)))).collect(),
            backward: BackwardFacts::all()
                .filter_map(|facts| Some((facts, trial.gradients(facts.profile())?)))
                .collect(),
        })
    }

    fn worse(mut self, other: Calibration) -> Calibration {
        self.cases += other.cases;
        for (facts, score) in other.forward {
            let worst = self.forward.entry(facts).or_default();
            *worst = worst.max(score);
        }
        for (facts, score) in other.backward {
            let worst = self.backward.entry(facts).or_default();
            *worst = worst.max(score);
        }
        self
    }

    /// The one profile that explains everything, if there is one.
    pub fn outcome(&self, backend: &str, seed: u64) -> Outcome {
        let forward = self.forward.iter().filter(|(_, score)| **score <= 1.0).map(|(facts, _)| *facts);
        let fits = forward.flat_map(|forward| {
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
                seed,
                cases: self.cases,
            })),
            _ => Outcome::Several(fits.len()),
        }
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
        writeln!(f, "cases     {} dithered ones; the largest error ÷ bound of each candidate", self.cases)?;
        writeln!(f, "{:<10}{:<10}{:<10}{:<12}{:>12}", "rounds P", "scales q", "kv tile", "order", "out")?;
        for (facts, score) in &self.forward {
            let tile = facts.kv_tile.map_or("declared".to_owned(), |tile| tile.to_string());
            let order = if facts.descending { "descending" } else { "ascending" };
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_queries));
            writeln!(f, "{rounds:<10}{scales:<10}{tile:<10}{order:<12}{score:>12.3}")?;
        }
        writeln!(f, "{:<10}{:<32}{:>12}", "rounds P", "scales dS before rounding", "gradients")?;
        for (facts, score) in &self.backward {
            let (rounds, scales) = (yes(facts.rounds_weights), yes(facts.scales_logit_gradients));
            writeln!(f, "{rounds:<10}{scales:<32}{score:>12.3}")?;
        }
        Ok(())
    }
}
