//! Growth: the law of resources. A schedule may be dear; it may not grow faster than its algorithm declares.
//!
//! The law is asked of *probes*: problems with the algorithm, the balance, the formats and the pass of a given one.
//! A probe is doubled twice along one axis: in tokens, in sequences, or in ranks that keep their rows. An amount is
//! *flat* if it never rises, and *linear* if it never more than doubles. Nothing is run, so a probe costs what its
//! builder costs.

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields, Sharing, TensorRows,
};

use super::resource::{Axis, GrowthError, Resource};
use super::resources::amount;
use crate::schedule::{Growth, MergeOrder, Schedule, memory_growth};

/// Returns every resource that grows faster than a problem's algorithm declares, in the schedules that `schedule` makes
/// of the probes. `order` is the order in which the schedule of record merges. Returns `None` if a probe has no
/// schedule, or one with sequence-parallel regions, for which nothing is declared.
pub fn growth(
    problem: &Problem,
    order: MergeOrder,
    schedule: impl Fn(&Problem) -> Option<Schedule>,
) -> Option<Vec<GrowthError>> {
    let memory = memory_growth(problem.parallel.algorithm, order);
    let amounts = |axis: Axis, times: usize| {
        let schedule = schedule(&probe(problem, axis, times)?)?;
        let declared = schedule.sequence_parallel.is_none();
        declared.then(|| Resource::ALL.map(|resource| amount(resource, &schedule)))
    };
    let mut errors = Vec::new();
    for axis in Axis::ALL {
        let found = [amounts(axis, 1)?, amounts(axis, 2)?, amounts(axis, 4)?];
        for (index, resource) in Resource::ALL.into_iter().enumerate() {
            let (amounts, declared) = (found.map(|found| found[index]), law(axis, resource, memory));
            if growth_of(amounts) > declared {
                let sizes = [1, 2, 4].map(|times| size(problem, axis, times));
                errors.push(GrowthError { resource, axis, sizes, amounts, declared });
            }
        }
    }
    Some(errors)
}

/// Returns the fastest growth of a resource that is right. Launches do not depend on the number of sequences. They may
/// depend on tokens: the backward of an all-gather has one for each stripe of a rank's queries.
fn law(axis: Axis, resource: Resource, memory: Growth) -> Growth {
    match (axis, resource) {
        (Axis::Ranks, Resource::PeakBytes(_)) => memory,
        (_, Resource::HostReads) | (Axis::Sequences, Resource::Launches) => Growth::Flat,
        _ => Growth::Linear,
    }
}

/// Returns the growth of three amounts, each at twice the size of the one before.
fn growth_of([a, b, c]: [u64; 3]) -> Growth {
    if b <= a && c <= b {
        Growth::Flat
    } else if b <= 2 * a && c <= 2 * b {
        Growth::Linear
    } else {
        Growth::Faster
    }
}

/// Members of the smallest ring: with fewer, not all of a ring's buffers are in use.
const MEMBERS: usize = 3;
/// Heads of a probe, which all its groups divide.
const HEADS: usize = 4 * MEMBERS * 2;

/// Returns the problem's algorithm in a group of a probe, and the size of the group.
fn group(problem: &Problem, axis: Axis, times: usize) -> (Algorithm, usize) {
    let members = if axis == Axis::Ranks { MEMBERS * times } else { MEMBERS };
    match problem.parallel.algorithm {
        Algorithm::Single => (Algorithm::Single, 1),
        Algorithm::Hierarchical { .. } => (Algorithm::Hierarchical { all_to_all: 2 }, 2 * members),
        algorithm => (algorithm, members),
    }
}

/// Returns the number of rows of each rank and sequence. It is even, for the two chunks of a rank. Where tokens are
/// doubled there are more, so that what rises with their square outweighs what does not rise.
fn rows(axis: Axis, times: usize) -> usize {
    if axis == Axis::Tokens { 64 * times } else { 4 }
}

/// Returns the size of a probe along the axis.
fn size(problem: &Problem, axis: Axis, times: usize) -> usize {
    let (_, ranks) = group(problem, axis, times);
    match axis {
        Axis::Tokens => rows(axis, times) * ranks,
        Axis::Sequences => times,
        Axis::Ranks => ranks,
    }
}

/// Returns a problem that is `times` as large along an axis. It has whole sequences and no window, so that sizes are
/// exact multiples.
fn probe(problem: &Problem, axis: Axis, times: usize) -> Option<Problem> {
    let (algorithm, ranks) = group(problem, axis, times);
    let sequences = if axis == Axis::Sequences { times } else { 1 };
    let balance = match problem.parallel.balance {
        Balance::Striped { stripe } => Balance::Striped { stripe: stripe.min(2) },
        balance => balance,
    };
    let length = rows(axis, times) * ranks;
    let packed = ProblemFields::packed(&vec![(length, length); sequences], 1);
    Problem::new(ProblemFields {
        sequences: packed.sequences,
        rows: TensorRows { q: sequences * length, kv: sequences * length },
        heads: Heads { q: HEADS, kv: HEADS },
        dims: packed.dims,
        mask: if problem.mask.is_causal() { Mask::CAUSAL } else { Mask::FULL },
        parallel: ContextParallel::over(ranks, algorithm, balance),
        sharing: Sharing::default(),
        ..ProblemFields::from(problem.clone())
    })
    .ok()
}
