//! Proving schedules: the builders' schedules of problems, checked symbolically ([`seamproof_simulator::check`]).

use rayon::prelude::*;
use seamproof_oracle::Problem;
use seamproof_simulator::check::{CheckError, Proof, check};
use seamproof_simulator::schedule::{BuildError, MergeOrder, build_with};

use crate::generate::{self, Draw, Limits, RawProblem};

/// Largest group of a sweep.
pub const SWEEP_RANKS_MAX: u32 = 16;

/// What came of one problem.
#[derive(Debug)]
pub enum Proved {
    /// The schedule is right.
    Held(Proof),
    /// There can be no schedule.
    Refused(BuildError),
    /// The schedule is wrong.
    Wrong(Vec<CheckError>),
}

/// Builds and checks a problem's schedule that merges in the given order.
pub fn prove(problem: &Problem, order: MergeOrder) -> Proved {
    match build_with(problem, order) {
        Err(error) => Proved::Refused(error),
        Ok(schedule) => match check(problem, &schedule) {
            Ok(proof) => Proved::Held(proof),
            Err(errors) => Proved::Wrong(errors),
        },
    }
}

/// Every algorithm with every cut that it takes (the raw problem's numbers of both) and order in which it merges.
const CUTS: [(u32, u32, MergeOrder); 18] = {
    const RUNNING: MergeOrder = MergeOrder::Running;
    const DEFERRED: MergeOrder = MergeOrder::Deferred;
    [
        (1, 0, RUNNING),
        (1, 1, RUNNING),
        (1, 2, RUNNING),
        (1, 0, DEFERRED),
        (1, 1, DEFERRED),
        (1, 2, DEFERRED),
        (2, 0, RUNNING),
        (2, 1, RUNNING),
        (2, 2, RUNNING),
        (2, 3, RUNNING),
        (3, 0, RUNNING),
        (3, 1, RUNNING),
        (3, 2, RUNNING),
        (3, 3, RUNNING),
        (4, 0, RUNNING),
        (4, 1, RUNNING),
        (4, 0, DEFERRED),
        (4, 1, DEFERRED),
    ]
};

/// Problem `index` of a sweep and the order in which it merges: packs in turn, each over every algorithm, cut, order
/// and group size. `None` for the packs that the generator keeps illegal.
fn problem_of_sweep(seed: u64, index: u64) -> Option<(Problem, MergeOrder)> {
    let variants = CUTS.len() as u64 * u64::from(SWEEP_RANKS_MAX);
    let (pack, variant) = (index / variants, index % variants);
    let (algorithm, balance, order) = CUTS[(variant % CUTS.len() as u64) as usize];
    let ranks = 1 + (variant / CUTS.len() as u64) as u32;
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
        Draw::Problem(problem) => Some((problem, order)),
        Draw::Malformed(_) => None,
    }
}

/// What a sweep found.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Problems whose schedules were proved; those of two orders of merging count twice.
    pub proved: u64,
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
    fn add(mut self, problem: Problem, proved: Proved) -> Sweep {
        match proved {
            Proved::Held(proof) => {
                self.proved += 1;
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
        self.operations += other.operations;
        self.pairs += other.pairs;
        self.refused += other.refused;
        self.wrong.extend(other.wrong);
        self.wrong.truncate(WRONG_KEPT);
        self
    }
}

/// Proves the first `problems` problems of the sweep of `seed`: every algorithm, cut, order of merging and group
/// size up to [`SWEEP_RANKS_MAX`], over packs of the generator.
pub fn sweep(seed: u64, problems: u64) -> Sweep {
    (0..problems)
        .into_par_iter()
        .filter_map(|index| problem_of_sweep(seed, index))
        .fold(Sweep::default, |sweep, (problem, order)| {
            let proved = prove(&problem, order);
            sweep.add(problem, proved)
        })
        .reduce(Sweep::default, Sweep::merge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_sweep_proves_every_builder() {
        let sweep = sweep(1, 2 * CUTS.len() as u64 * u64::from(SWEEP_RANKS_MAX));
        assert!(sweep.wrong.is_empty(), "{:?}", sweep.wrong);
        assert_eq!(sweep.refused, 0, "the generator makes what can be cut and dealt");
        assert!(sweep.proved > 550, "{}", sweep.proved);
    }
}
