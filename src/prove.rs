//! Proofs of schedules: the builders' schedules of problems are checked symbolically
//! ([`seamproof_simulator::check`]), and so is the growth of what they take.

use rayon::prelude::*;
use seamproof_oracle::{ContextParallel, Heads, Problem, ProblemFields};
use seamproof_simulator::check::plan::{PlanProof, Unproved, is_plan, prove_plan};
use seamproof_simulator::check::{CheckError, Proof, check, check_side_by_side, growth};
use seamproof_simulator::schedule::plan::{Plan, PlanError};
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
    /// A schedule that is too large to be written out, of which the plan is proved or not.
    Planned(Result<PlanProof, Unproved>),
}

/// Most ranks of a plan that is proved in place of its schedule.
const PLANNED_RANKS_MAX: usize = 1024;

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
        Err(error @ BuildError::TooLarge { ranks: ..=PLANNED_RANKS_MAX, .. }) => {
            match Plan::new(problem, order) {
                Ok(plan) => Proved::Planned(prove_plan(&plan, &plan)),
                Err(PlanError::Segments(wrong)) => Proved::Planned(Err(wrong.into())),
                Err(PlanError::Build(error)) => Proved::Refused(error),
                Err(_) => Proved::Refused(error),
            }
        }
        Err(error) => Proved::Refused(error),
        Ok(schedule) => match check(problem, &schedule) {
            Ok(proof) => Proved::Held(proof),
            Err(errors) => Proved::Wrong(errors),
        },
    }
}

/// Proves a problem's plan, and that the problem's schedule is the plan unrolled. Returns `None` where there is no plan.
pub fn prove_planned(problem: &Problem, order: MergeOrder) -> Option<Result<(), Unproved>> {
    let plan = match Plan::new(problem, order) {
        Ok(plan) => plan,
        Err(PlanError::Segments(wrong)) => return Some(Err(wrong.into())),
        Err(_) => return None,
    };
    let schedule = build_with(problem, order).ok()?;
    Some(prove_plan(&plan, &plan).and_then(|_| is_plan(&plan, &plan, &schedule)))
}

/// An algorithm and a cut (as the raw problem's numbers), and an order of merging.
type Cut = (u32, u32, MergeOrder);

/// Cuts of a single rank: as it lies, and converted into a batch.
const SINGLE: [Cut; 2] = [(0, 0, MergeOrder::Running), (0, 0, MergeOrder::Deferred)];

/// Number of algorithms of several ranks with each cut and each order in which they merge.
const CUTS: u64 = 32;

/// Returns one of these, by its number.
fn cut(number: u64) -> Cut {
    let order = if (number / 4).is_multiple_of(2) { MergeOrder::Running } else { MergeOrder::Deferred };
    (1 + number as u32 / 8, number as u32 % 4, order)
}

/// Size of the groups of a sweep for which growth is asked, and of their regions.
const GROWTH_RANKS: usize = 2;

/// Number of kinds of schedules: the cuts, a sequence-parallel region, and two groups side by side.
const KINDS: u64 = CUTS + 2;

/// Number of schedules of one pack.
const VARIANTS: u64 = KINDS * SWEEP_RANKS_MAX as u64;

/// One schedule of a sweep, or two.
struct Item {
    problem: Problem,
    order: MergeOrder,
    /// The problem of another group of the same world.
    beside: Option<Problem>,
}

impl Item {
    /// Proves the schedules. Growth is the same at each size of the group, and asked at one.
    fn prove(&self) -> Proved {
        let parallel = &self.problem.parallel;
        match (&self.beside, parallel.size(), parallel.region) {
            (Some(beside), ..) => prove_side_by_side([&self.problem, beside], self.order),
            (None, GROWTH_RANKS, 1) | (None, 1 | GROWTH_RANKS, GROWTH_RANKS) => {
                prove(&self.problem, self.order)
            }
            (None, ..) => prove_one(&self.problem, self.order),
        }
    }

    /// Proves the plan of the one schedule.
    fn prove_planned(&self) -> Option<Result<(), Unproved>> {
        if self.beside.is_some() { None } else { prove_planned(&self.problem, self.order) }
    }
}

/// Builds the schedules of two groups of one world, and checks that they run side by side.
fn prove_side_by_side(problems: [&Problem; 2], order: MergeOrder) -> Proved {
    let [own, other] = match problems.map(|problem| build_with(problem, order)) {
        [Ok(own), Ok(other)] => [own, other],
        [Err(error), _] | [_, Err(error)] => return Proved::Refused(error),
    };
    match check_side_by_side(&[(problems[0], &own), (problems[1], &other)]) {
        Ok(proof) => Proved::Held(proof),
        Err(errors) => Proved::Wrong(errors),
    }
}

/// Returns item `index` of a sweep: packs in turn, each over every algorithm, cut, order and group size, and in a
/// region of each size, and beside another group. Returns `None` for the packs that the generator keeps illegal.
fn item_of_sweep(seed: u64, index: u64) -> Option<Item> {
    let (pack, variant) = (index / VARIANTS, index % VARIANTS);
    let ranks = 1 + (variant / KINDS) as u32;
    match variant % KINDS {
        CUTS => region_of_sweep(seed, pack, ranks),
        number if number > CUTS => groups_of_sweep(seed, pack, ranks),
        number => {
            let cut = cut(number);
            let problem = drawn(seed, pack, cut, ranks)?;
            Some(Item { problem, order: cut.2, beside: None })
        }
    }
}

/// Returns two packs over groups of one world, of several ranks each, with cuts of one order of merging. The ranks of
/// the world are dealt in an order that depends on the pack. Up to two are left idle.
fn groups_of_sweep(seed: u64, pack: u64, ranks: u32) -> Option<Item> {
    let own = cut((pack + u64::from(ranks)) % CUTS);
    let alike: Vec<Cut> = (0..CUTS).map(cut).filter(|cut| cut.2 == own.2).collect();
    let other = alike[pack as usize % alike.len()];
    let first = drawn(seed, pack, own, ranks.max(2))?;
    let second = drawn(seed, pack + 1, other, 2 + pack as u32 % 3)?;
    let sizes = [&first, &second].map(|problem| problem.parallel.size());
    let world = sizes[0] + sizes[1] + pack as usize % 3;
    let mut dealt: Vec<usize> = (0..world).collect();
    dealt.sort_by_key(|rank| seamproof_judge::hash::mix(pack << 32 | *rank as u64));
    let (of_first, rest) = dealt.split_at(sizes[0]);
    let problem = on_ranks(first, world, of_first)?;
    let beside = Some(on_ranks(second, world, &rest[..sizes[1]])?);
    Some(Item { problem, order: own.2, beside })
}

/// Returns a problem on these ranks of a world, which are no regions.
fn on_ranks(problem: Problem, world: usize, ranks: &[usize]) -> Option<Problem> {
    let mut fields = ProblemFields::from(problem);
    fields.parallel = ContextParallel { world, ranks: ranks.to_vec(), region: 1, ..fields.parallel };
    Problem::new(fields).ok()
}

/// Returns a pack on one rank or on two, in a region of all ranks or of half of them, but at least of two, with heads
/// that its ranks can hold.
fn region_of_sweep(seed: u64, pack: u64, ranks: u32) -> Option<Item> {
    let halves = ranks.is_multiple_of(2) && (pack + u64::from(ranks) / 2).is_multiple_of(2);
    let any = cut((pack + u64::from(ranks)) % CUTS);
    let (cut, size) = if halves { (any, 2) } else { (SINGLE[pack as usize % SINGLE.len()], 1) };
    let problem = drawn(seed, pack, cut, size)?;
    let ranks = (ranks as usize / problem.parallel.size()).max(2);
    let mut fields = ProblemFields::from(problem);
    fields.parallel = ContextParallel { region: ranks, ..fields.parallel };
    let Heads { q, kv } = fields.heads;
    // KV heads are split for every other pack; for the others one KV head is replicated.
    fields.heads = Heads { q: q * ranks, kv: if pack.is_multiple_of(2) { kv * ranks } else { 1 } };
    Some(Item { problem: Problem::new(fields.sayable()).ok()?, order: cut.2, beside: None })
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
    /// Number of those problems whose group is a part of its world.
    pub sub_groups: u64,
    /// Number of those problems that were proved beside another group's. They are sub-groups too.
    pub beside: u64,
    /// Number of those problems with a plan, which was proved too.
    pub planned: u64,
    /// Number of operations in their schedules.
    pub operations: u64,
    /// Number of visible (query, key, head) triples that the schedules cover.
    pub pairs: u64,
    /// Number of problems that have no schedule.
    pub refused: u64,
    /// First few problems whose schedules are wrong, with their errors.
    pub wrong: Vec<(Problem, Vec<CheckError>)>,
    /// First few problems whose schedules are right, and whose plans are not proved or not those of the schedules.
    pub unplanned: Vec<(Problem, Unproved)>,
}

/// Largest number of wrong schedules that a sweep keeps.
const WRONG_KEPT: usize = 5;

impl Sweep {
    fn add(mut self, item: Item) -> Sweep {
        match item.prove() {
            Proved::Held(proof) => {
                self.proved += 1;
                let parallel = &item.problem.parallel;
                self.regions += u64::from(parallel.region > 1);
                self.sub_groups += u64::from(parallel.world > parallel.size());
                self.beside += u64::from(item.beside.is_some());
                self.operations += proof.operations as u64;
                self.pairs += proof.pairs;
                match item.prove_planned() {
                    None => {}
                    Some(Ok(())) => self.planned += 1,
                    Some(Err(error)) => self.unplanned.push((item.problem, error)),
                }
            }
            Proved::Refused(_) => self.refused += 1,
            Proved::Wrong(errors) => self.wrong.push((item.problem, errors)),
            Proved::Planned(Ok(_)) => self.planned += 1,
            Proved::Planned(Err(error)) => self.unplanned.push((item.problem, error)),
        }
        self
    }

    fn merge(mut self, other: Sweep) -> Sweep {
        self.proved += other.proved;
        self.regions += other.regions;
        self.sub_groups += other.sub_groups;
        self.beside += other.beside;
        self.operations += other.operations;
        self.pairs += other.pairs;
        self.refused += other.refused;
        self.wrong.extend(other.wrong);
        self.wrong.truncate(WRONG_KEPT);
        self.planned += other.planned;
        self.unplanned.extend(other.unplanned);
        self.unplanned.truncate(WRONG_KEPT);
        self
    }
}

/// Proves the first `problems` problems of the sweep of `seed`: every algorithm, cut, order of merging and group size
/// up to [`SWEEP_RANKS_MAX`], over packs of the generator, sequence-parallel regions around them, and two groups of one
/// world side by side.
pub fn sweep(seed: u64, problems: u64) -> Sweep {
    (0..problems)
        .into_par_iter()
        .filter_map(|index| item_of_sweep(seed, index))
        .fold(Sweep::default, Sweep::add)
        .reduce(Sweep::default, Sweep::merge)
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Algorithm, Balance, Mask, Run, Sequence};

    use super::*;

    /// Returns a causal ring of so many ranks, with one sequence.
    fn ring(ranks: usize) -> Problem {
        let run = Run::packed(0, 2 * ranks, 2 * ranks);
        let fields = ProblemFields {
            mask: Mask::CAUSAL,
            parallel: ContextParallel::over(ranks, Algorithm::Ring, Balance::DualChunk),
            ..ProblemFields::of(vec![Sequence { id: 0, q: run, kv: run }], 1)
        };
        Problem::new(fields).expect("the problem is legal")
    }

    #[test]
    fn a_schedule_that_is_too_large_to_be_written_out_is_proved_as_a_plan() {
        let order = MergeOrder::Running;
        let written = build_with(&ring(300), order);
        assert_eq!(written.err(), Some(BuildError::TooLarge { ranks: 300, sequences: 1 }));
        assert!(matches!(prove(&ring(300), order), Proved::Planned(Ok(_))));
        assert!(matches!(prove(&ring(4096), order), Proved::Refused(BuildError::TooLarge { .. })));
    }

    #[test]
    fn a_short_sweep_proves_every_builder() {
        let sweep = sweep(1, 2 * VARIANTS);
        assert!(sweep.wrong.is_empty(), "{:?}", sweep.wrong);
        assert!(sweep.unplanned.is_empty(), "{:?}", sweep.unplanned);
        assert!(sweep.planned > 850, "{} of {}", sweep.planned, sweep.proved);
        assert_eq!(sweep.refused, 0, "the generator makes what can be cut and dealt");
        assert!(sweep.proved > 550 && sweep.regions > 25, "{} {}", sweep.proved, sweep.regions);
        assert!(sweep.sub_groups > 60 && sweep.beside > 25, "{} {}", sweep.sub_groups, sweep.beside);
    }
}
