//! The table of algorithms: the builder of each algorithm's schedule.

use seamproof_oracle::{Algorithm, Problem};

use super::all_gather::all_gather;
use super::all_to_all::all_to_all;
use super::build::{BuildError, check_size};
use super::converted::converted;
use super::hierarchical::hierarchical;
use super::lending::lending;
use super::place::placed;
use super::program::{MergeOrder, Schedule};
use super::ring::ring;
use super::sequence_parallel::sequence_parallel;
use super::single::single;

/// Returns the schedule of a problem's own algorithm, inside the problem's sequence-parallel regions, or the reason why
/// there is none.
pub fn build(problem: &Problem) -> Result<Schedule, BuildError> {
    build_with(problem, MergeOrder::default())
}

/// Returns the schedule of a problem's own algorithm like [`build()`], with the given order in which a ring merges.
/// Builders number ranks by their place in the group; here they get their numbers in the world.
pub fn build_with(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    check_size(problem)?;
    let schedule = match problem.parallel.region {
        0 | 1 => outside_regions(problem, order),
        _ => sequence_parallel(problem, |heads| outside_regions(heads, order)),
    };
    Ok(placed(schedule?, &problem.parallel))
}

/// Returns the schedule of a problem whose ranks are no regions. A single rank and an all-gather have every sequence
/// whole and read shared keys themselves.
fn outside_regions(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    let algorithm = problem.parallel.algorithm;
    if !problem.sharing.is_empty() && !matches!(algorithm, Algorithm::Single | Algorithm::AllGather) {
        return lending(problem, |alone| outside_regions(alone, order));
    }
    match algorithm {
        Algorithm::Single if order == MergeOrder::Deferred => converted(problem),
        Algorithm::Single => single(problem),
        Algorithm::Ring => ring(problem, order),
        Algorithm::AllGather => all_gather(problem, order),
        Algorithm::AllToAll => all_to_all(problem, order),
        Algorithm::Hierarchical { all_to_all } => hierarchical(problem, all_to_all, order),
    }
}

/// Manner in which an amount grows with a size. Later ones are faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Growth {
    /// The amount is a constant divided by the size.
    Falling,
    /// The amount stays.
    Flat,
    /// The amount is a constant and a multiple of the size.
    Linear,
    /// The amount rises faster than the size.
    Faster,
}

/// Returns the growth that an algorithm declares for the memory of a rank, with ranks that keep their rows.
pub fn memory_growth(algorithm: Algorithm, order: MergeOrder) -> Growth {
    match (algorithm, order) {
        (Algorithm::AllGather, _) => Growth::Linear,
        (Algorithm::Ring | Algorithm::Hierarchical { .. }, MergeOrder::Deferred) => Growth::Linear,
        _ => Growth::Flat,
    }
}

impl MergeOrder {
    /// Returns the orders that give an algorithm different schedules.
    pub fn of(algorithm: Algorithm) -> &'static [MergeOrder] {
        match algorithm {
            Algorithm::Single | Algorithm::AllGather | Algorithm::AllToAll => &MergeOrder::WEIGHTED,
            Algorithm::Ring | Algorithm::Hierarchical { .. } => &MergeOrder::ALL,
        }
    }
}
