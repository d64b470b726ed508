//! Growth: the law of resources. A schedule may be dear; it may not grow faster than its algorithm declares.
//!
//! The law is asked of *probes*: problems with the algorithm, the balance, the formats and the pass of a given one.
//! A probe is doubled twice along one axis: in tokens, in sequences, in ranks that keep their rows, or in ranks of each
//! sequence-parallel region, which share them. An amount is *falling* if it halves each time, and *flat* if it never
//! rises. It is *linear* if it never more than doubles, or if it rises by no more than twice as much
//! the second time, as a multiple of the size less a constant does. Nothing is run, so a probe costs what its builder
//! costs.
//!
//! A region does not change what its algorithm declares. Its ranks share the rows outside of attention and the heads
//! inside, so that what a rank holds while attention runs falls as they become more. All hidden rows are on a rank only
//! where it enters or leaves attention: its peak does not fall, and does not rise either. Source:
//! <https://arxiv.org/abs/2205.05198>, section 4.2.2.

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Mask, Problem, ProblemFields, Sharing, TensorRows,
};

use super::resource::{Axis, GrowthError, Resource};
use super::resources::amount;
use crate::schedule::{Growth, MergeOrder, Schedule, memory_growth};

/// Returns every resource that grows faster than a problem's algorithm declares, in the schedules that `schedule` makes
/// of the probes. `order` is the order in which the schedule of record merges. Returns `None` if a probe has no
/// schedule. Ranks of regions are asked for where the problem has regions.
pub fn growth(
    problem: &Problem,
    order: MergeOrder,
    schedule: impl Fn(&Problem) -> Option<Schedule>,
) -> Option<Vec<GrowthError>> {
    let memory = memory_growth(problem.parallel.algorithm, order);
    let amounts = |axis: Axis, times: usize| {
        let schedule = schedule(&probe(problem, axis, times)?)?;
        Some(Resource::ALL.map(|resource| amount(resource, &schedule)))
    };
    let mut errors = Vec::new();
    let has_regions = problem.parallel.region > 1;
    for axis in Axis::ALL.into_iter().filter(|axis| has_regions || *axis != Axis::Region) {
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
        (Axis::Region, Resource::BytesAtLaunches(_)) => Growth::Falling,
        (Axis::Region, _) => Growth::Flat,
        (Axis::Ranks, Resource::PeakBytes(_) | Resource::BytesAtLaunches(_)) => memory,
        (_, Resource::HostReads) | (Axis::Sequences, Resource::Launches) => Growth::Flat,
        _ => Growth::Linear,
    }
}

/// Returns the growth of three amounts, each at twice the size of the one before.
fn growth_of([a, b, c]: [u64; 3]) -> Growth {
    if 2 * b <= a && 2 * c <= b {
        Growth::Falling
    } else if b <= a && c <= b {
        Growth::Flat
    } else if b <= 2 * a && c <= 2 * b || c + 2 * a <= 3 * b {
        Growth::Linear
    } else {
        Growth::Faster
    }
}

/// Members of the smallest ring: with fewer, not all of a ring's buffers are in use.
const MEMBERS: usize = 3;
/// Ranks of the smallest region.
const REGION: usize = 2;
/// Heads of a probe, which all its groups divide, in each of its regions too.
const HEADS: usize = 4 * MEMBERS * 2 * REGION;

/// Returns the problem's algorithm in a group of a probe, and the size of the group.
fn group(problem: &Problem, axis: Axis, times: usize) -> (Algorithm, usize) {
    let members = if axis == Axis::Ranks { MEMBERS * times } else { MEMBERS };
    match problem.parallel.algorithm {
        Algorithm::Single => (Algorithm::Single, 1),
        Algorithm::Hierarchical { .. } => (Algorithm::Hierarchical { all_to_all: 2 }, 2 * members),
        algorithm => (algorithm, members),
    }
}

/// Returns the number of ranks of each region; 1 where the problem has none.
fn region(problem: &Problem, axis: Axis, times: usize) -> usize {
    match (problem.parallel.region, axis) {
        (0 | 1, _) => 1,
        (_, Axis::Region) => REGION * times,
        _ => REGION,
    }
}

/// Returns the number of rows of each rank and sequence. It is even, for the two chunks of a rank. Where tokens are
/// doubled there are more, so that what rises with their square outweighs what does not rise. Ranks of a region share
/// the rows evenly.
fn rows(axis: Axis, times: usize) -> usize {
    match axis {
        Axis::Tokens => 64 * times,
        Axis::Region => 4 * REGION,
        Axis::Sequences | Axis::Ranks => 4,
    }
}

/// Returns the size of a probe along the axis.
fn size(problem: &Problem, axis: Axis, times: usize) -> usize {
    let (_, ranks) = group(problem, axis, times);
    match axis {
        Axis::Tokens => rows(axis, times) * ranks,
        Axis::Sequences => times,
        Axis::Ranks => ranks,
        Axis::Region => region(problem, axis, times),
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
        parallel: ContextParallel {
            region: region(problem, axis, times),
            ..ContextParallel::over(ranks, algorithm, balance)
        },
        sharing: Sharing::default(),
        ..ProblemFields::from(problem.clone())
    })
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_linear_whatever_its_constant_and_a_square_is_faster() {
        for constant in -8..=8 {
            let amounts = |of: fn(i64) -> i64| [3, 6, 12].map(|size| (of(size) + constant) as u64);
            assert_eq!(growth_of(amounts(|_| 9)), Growth::Flat);
            assert_eq!(growth_of(amounts(|size| 4 * size)), Growth::Linear, "{constant}");
            assert_eq!(growth_of(amounts(|size| size * size)), Growth::Faster, "{constant}");
        }
        assert_eq!(growth_of([5, 5, 6]), Growth::Linear, "a step that sets in late");
        assert_eq!(growth_of([6, 5, 4]), Growth::Flat);
        assert_eq!([[8, 4, 2], [8, 4, 3]].map(growth_of), [Growth::Falling, Growth::Flat]);
    }
}
