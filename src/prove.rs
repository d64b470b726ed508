//! Proving schedules: the builders' schedules of problems, checked symbolically ([`seamproof_simulator::check`]).

use rayon::prelude::*;
use seamproof_oracle::{Heads, Problem, ProblemFields};
use seamproof_simulator::check::{CheckError, Proof, check};
use seamproof_simulator::schedule::{RegionError, Schedule, build, sequence_parallel};

use crate::generate::{self, Draw, Limits, RawProblem};

/// Largest group of a sweep.
pub const SWEEP_RANKS_MAX: u32 = 16;

/// What came of one problem.
#[derive(Debug)]
pub enum Proved {
    /// The schedule is right.
    Held(Proof),
    /// There can be no schedule.
    Refused(RegionError),
    /// The schedule is wrong.
    Wrong(Vec<CheckError>),
}

/// Builds and checks a problem's schedule.
pub fn prove(problem: &Problem) -> Proved {
    checked(problem, build(problem).map_err(RegionError::from))
}

/// Builds and checks a problem's schedule inside sequence-parallel regions of `ranks` ranks.
pub fn prove_region(problem: &Problem, ranks: usize) -> Proved {
    checked(problem, sequence_parallel(problem, ranks))
}

fn checked(problem: &Problem, schedule: Result<Schedule, RegionError>) -> Proved {
    match schedule {
        Err(error) => Proved::Refused(error),
        Ok(schedule) => match check(problem, &schedule) {
            Ok(proof) => Proved::Held(proof),
            Err(errors) => Proved::Wrong(errors),
        },
    }
}

/// Every algorithm with every cut that it takes: the raw problem's numbers of both.
const CUTS: [(u32, u32); 13] =
    [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3), (4, 0), (4, 1)];

/// Kinds of schedules: the cuts, and a sequence-parallel region.
const KINDS: u64 = CUTS.len() as u64 + 1;

/// Schedules of one pack.
const VARIANTS: u64 = KINDS * SWEEP_RANKS_MAX as u64;

/// Item `index` of a sweep: packs in turn, each over every algorithm, cut and group size, and in a region of each size.
/// `None` for the packs that the generator keeps illegal.
fn item_of_sweep(seed: u64, index: u64) -> Option<(Problem, Option<usize>)> {
    let (pack, variant) = (index / VARIANTS, index % VARIANTS);
    let ranks = 1 + (variant / KINDS) as u32;
    match CUTS.get((variant % KINDS) as usize) {
        Some(&cut) => Some((drawn(seed, pack, cut, ranks)?, None)),
        None => region_of_sweep(seed, pack, ranks).map(|(problem, ranks)| (problem, Some(ranks))),
    }
}

/// A pack on one rank or on two, in a region of all ranks or of half of them, whose heads its ranks can hold.
fn region_of_sweep(seed: u64, pack: u64, ranks: u32) -> Option<(Problem, usize)> {
    let halves = ranks.is_multiple_of(2) && (pack + u64::from(ranks) / 2).is_multiple_of(2);
    let cut = CUTS[(pack + u64::from(ranks)) as usize % CUTS.len()];
    let problem = if halves { drawn(seed, pack, cut, 2) } else { drawn(seed, pack, SINGLE, 1) }?;
    let ranks = ranks as usize / problem.parallel.size();
    let mut fields = ProblemFields::from(problem);
    let Heads { q, kv } = fields.heads;
    // KV heads are split, or one is replicated.
    fields.heads = Heads { q: q * ranks, kv: if pack.is_multiple_of(2) { kv * ranks } else { 1 } };
    Some((Problem::new(fields).ok()?, ranks))
}

/// The single rank as a raw problem's numbers of algorithm and cut.
const SINGLE: (u32, u32) = (0, 0);

/// A pack over some ranks.
fn drawn(seed: u64, pack: u64, (algorithm, balance): (u32, u32), ranks: u32) -> Option<Problem> {
    let limits = Limits::seams();
    let drawn = generate::draw_raw(seed, pack, &limits);
    let all_to_all = 1 + (drawn.detail.max(drawn.all_to_all) + pack as u32) % ranks;
    let raw = RawProblem {
        algorithm,
        balance,
        ranks,
        all_to_all,
        stripe: drawn.stripe.max(2),
        malformed: 0,
        unsupported: 0,
        ..drawn
    };
    match generate::fixup(&raw, &limits) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    }
}

/// What a sweep found.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Problems whose schedules were proved.
    pub proved: u64,
    /// Those of them in sequence-parallel regions.
    pub regions: u64,
    /// Operations of their schedules.
    pub operations: u64,
    /// Visible (query, key, head) triples that they cover.
    pub pairs: u64,
    /// Problems that have no schedule.
    pub refused: u64,
    /// Problems whose schedules are wrong, with their errors; the first few.
    pub wrong: Vec<(Problem, Vec<CheckError>)>,
}

/// Wrong schedules that a sweep keeps.
const WRONG_KEPT: usize = 5;

impl Sweep {
    fn add(mut self, problem: Problem, region: Option<usize>) -> Sweep {
        let proved = region.map_or_else(|| prove(&problem), |ranks| prove_region(&problem, ranks));
        match proved {
            Proved::Held(proof) => {
                self.proved += 1;
                self.regions += u64::from(region.is_some());
                self.operations += proof.operations as u64;
                self.pairs += proof.pairs;
            }
            Proved::Refused(_) => self.refused += 1,
            Proved::Wrong(errors) => self.wrong.push((problem, errors)),
        }
        self
    }

    fn merge(mut self, other: Sweep) -> Sweep {
        self.proved += other.proved;
        self.regions += other.regions;
        self.operations += other.operations;
        self.pairs += other.pairs;
        self.refused += other.refused;
        self.wrong.extend(other.wrong);
        self.wrong.truncate(WRONG_KEPT);
        self
    }
}

/// Proves the first `problems` problems of the sweep of `seed`: every algorithm, cut and group size up to
/// [`SWEEP_RANKS_MAX`], over packs of the generator, and sequence-parallel regions around them.
pub fn sweep(seed: u64, problems: u64) -> Sweep {
    (0..problems)
        .into_par_iter()
        .filter_map(|index| item_of_sweep(seed, index))
        .fold(Sweep::default, |sweep, (problem, region)| sweep.add(problem, region))
        .reduce(Sweep::default, Sweep::merge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_sweep_proves_every_builder() {
        let sweep = sweep(1, 2 * VARIANTS);
        assert!(sweep.wrong.is_empty(), "{:?}", sweep.wrong);
        assert_eq!(sweep.refused, 0, "the generator makes what can be cut and dealt");
        assert!(sweep.proved > 400 && sweep.regions > 25, "{} {}", sweep.proved, sweep.regions);
    }
}
