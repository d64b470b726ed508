//! The table of algorithms: which builder makes the schedule of a problem.

use seamproof_oracle::{Algorithm, Problem};

use super::all_gather::all_gather;
use super::all_to_all::all_to_all;
use super::build::BuildError;
use super::hierarchical::hierarchical;
use super::program::{MergeOrder, Schedule};
use super::ring::ring;
use super::single::single;

/// The schedule of a problem's own algorithm, or why there can be none.
pub fn build(problem: &Problem) -> Result<Schedule, BuildError> {
    build_with(problem, MergeOrder::default())
}

/// [`build()`], with the order in which a ring merges.
pub fn build_with(problem: &Problem, order: MergeOrder) -> Result<Schedule, BuildError> {
    match problem.parallel.algorithm {
        Algorithm::Single => single(problem),
        Algorithm::Ring => ring(problem, order),
        Algorithm::AllGather => all_gather(problem),
        Algorithm::AllToAll => all_to_all(problem),
        Algorithm::Hierarchical { all_to_all } => hierarchical(problem, all_to_all, order),
    }
}
