//! Proofs of schedules: the builders' schedules of problems are checked symbolically
//! ([`seamproof_simulator::check`]), and so is the growth of what they take.

use rayon::prelude::*;
use seamproof_oracle::{ContextParallel, Heads, Problem, ProblemFields};
use seamproof_simulator::check::{CheckError, Proof, check, growth};
use seamproof_simulator::schedule::{BuildError, MergeOrder, build_with};

use seamproof_judge::generate::{self, Draw, Limits, RawProblem};

/// Largest group of a sweep.
pub const SWEEP_RANKS_MAX: u32 = 16;

/// Result for one problem.
#[derive(Debug)]
pub enum Proved {
    /// A right schedule.
    Held(Proof),
    /// A problem of which no builder makes a schedule.
    Refused(BuildError),
    /// A wrong schedule.
    Wrong(Vec<CheckError>),
}

/// Builds and checks a problem's schedule that merges in the given order, and the growth of its resources.
pub fn prove(problem: &Problem, order: MergeOrder) -> Proved {
    match prove_one(problem, order) {
        Proved::Held(proof) => match growth(problem, order, |probe| build_with(probe, order).ok()) {
            Some(grown) if !grown.is_empty() => {
                Proved::Wrong(grown.into_iter().map(CheckError::from).collect())
            }
            _ => Proved::Held(proof),
        },
        other => other,
    }
}

/// Builds and checks a problem's schedule like [`prove`], at its own size alone.
fn prove_one(problem: &Problem, order: MergeOrder) -> Proved {
    match build_with(problem, order) {
        Err(error) => Proved::Refused(error),
        Ok(schedule) => match check(problem, &schedule) {
            Ok(proof) => Proved::Held(proof),
            Err(errors) => Proved::Wrong(errors),
        },
    }
}

/// An algorithm and a cut (as the raw problem's numbers), and an order of merging.
type Cut = (u32, u32, MergeOrder);

/// Cut of a single rank.
const SINGLE: Cut = (0, 0, MergeOrder::Running);

/// Number of algorithms of several ranks with each cut and each order in which they merge.
const CUTS: u64 = 32;

/// Returns one of these, by its number.
fn cut(number: u64) -> Cut {
    let order = if (number / 4).is_multiple_of(2) { MergeOrder::Running } else { MergeOrder::Deferred };
    (1 + number as u32 / 8, number as u32 % 4, order)
}

/// Size of the groups of a sweep for which growth is asked, and of their regions.
const GROWTH_RANKS: usize = 2;

/// Number of kinds of schedules: the cuts, and a sequence-parallel region.
const KINDS: u64 = CUTS + 1;

/// Number of schedules of one pack.
const VARIANTS: u64 = KINDS * SWEEP_RANKS_MAX as u64;

/// One schedule of a sweep.
struct Item {
    problem: Problem,
    order: MergeOrder,
}

impl Item {
    /// Proves the schedule. Growth is the same at each size of the group, and asked at one.
    fn prove(&self) -> Proved {
        let parallel = &self.problem.parallel;
        match (parallel.size(), parallel.region) {
            (GROWTH_RANKS, 1) | (1 | GROWTH_RANKS, GROWTH_RANKS) => prove(&self.problem, self.order),
            _ => prove_one(&self.problem, self.order),
        }
    }
}

/// Returns item `index` of a sweep: packs in turn, each over every algorithm, cut, order and group size, and in a
/// region of each size. Returns `None` for the packs that the generator keeps illegal.
fn item_of_sweep(seed: u64, index: u64) -> Option<Item> {
    let (pack, variant) = (index / VARIANTS, index % VARIANTS);
    let ranks = 1 + (variant / KINDS) as u32;
    match variant % KINDS {
        CUTS => region_of_sweep(seed, pack, ranks),
        number => {
            let cut = cut(number);
            let problem = drawn(seed, pack, cut, ranks)?;
            Some(Item { problem, order: cut.2 })
        }
    }
}

/// Returns a pack on one rank or on two, in a region of all ranks or of half of them, but at least of two, with heads
/// that its ranks can hold.
fn region_of_sweep(seed: u64, pack: u64, ranks: u32) -> Option<Item> {
    let halves = ranks.is_multiple_of(2) && (pack + u64::from(ranks) / 2).is_multiple_of(2);
    let any = cut((pack + u64::from(ranks)) % CUTS);
    let (cut, size) = if halves { (any, 2) } else { (SINGLE, 1) };
    let problem = drawn(seed, pack, cut, size)?;
    let ranks = (ranks as usize / problem.parallel.size()).max(2);
    let mut fields = ProblemFields::from(problem);
    fields.parallel = ContextParallel { region: ranks, ..fields.parallel };
    let Heads { q, kv } = fields.heads;
    // KV heads are split for every other pack; for the others one KV head is replicated.
    fields.heads = Heads { q: q * ranks, kv: if pack.is_multiple_of(2) { kv * ranks } else { 1 } };
    Some(Item { problem: Problem::new(fields.sayable()).ok()?, order: cut.2 })
}

/// Returns a pack over some ranks.
fn drawn(seed: u64, pack: u64, (algorithm, balance, _): Cut, ranks: u32) -> Option<Problem> {
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

/// Result of a sweep.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Number of problems whose schedules were proved. A problem with two orders of merging counts twice.
    pub proved: u64,
    /// Number of those problems in sequence-parallel regions.
    pub regions: u64,
    /// Number of operations in their schedules.
    pub operations: u64,
    /// Number of visible (query, key, head) triples that the schedules cover.
    pub pairs: u64,
    /// Number of problems that have no schedule.
    pub refused: u64,
    /// First few problems whose schedules are wrong, with their errors.
    pub wrong: Vec<(Problem, Vec<CheckError>)>,
}

/// Largest number of wrong schedules that a sweep keeps.
const WRONG_KEPT: usize = 5;

impl Sweep {
    fn add(mut self, item: Item) -> Sweep {
        match item.prove() {
            Proved::Held(proof) => {
                self.proved += 1;
                self.regions += u64::from(item.problem.parallel.region > 1);
                self.operations += proof.operations as u64;
                self.pairs += proof.pairs;
            }
            Proved::Refused(_) => self.refused += 1,
            Proved::Wrong(errors) => self.wrong.push((item.problem, errors)),
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

/// Proves the first `problems` problems of the sweep of `seed`: every algorithm, cut, order of merging and group
/// size up to [`SWEEP_RANKS_MAX`], over packs of the generator, and sequence-parallel regions around them.
pub fn sweep(seed: u64, problems: u64) -> Sweep {
    (0..problems)
        .into_par_iter()
        .filter_map(|index| item_of_sweep(seed, index))
        .fold(Sweep::default, Sweep::add)
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
        assert!(sweep.proved > 550 && sweep.regions > 25, "{} {}", sweep.proved, sweep.regions);
    }
}
