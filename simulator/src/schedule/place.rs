//! Places in the world: gives the ranks of a schedule their numbers in the world, and puts groups side by side.
//!
//! A builder numbers ranks by their *place* in the group, as though the group were the world. [`placed`] is the one
//! step from places to *ranks of the world*: afterwards programs, buffers, messages and communicators name these alone.
//! Ranks of the world that are in no group are *idle*. They have no program and no buffer, and a message to one is an
//! error.
//!
//! Groups *side by side* have no rank in common. They run as one schedule, which knows no groups any more: a message
//! that one group sends to a rank of another one gets there. That none does is for the checker to prove
//! ([`check_side_by_side`](crate::check::check_side_by_side)).

use std::mem;

use seamproof_oracle::ContextParallel;

use super::embed;
use super::program::{BufferId, Placement, RankProgram, Schedule};

/// The reason why groups do not run side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SideBySideError {
    /// A rank that would run the programs of two groups.
    #[error("rank {0} of the world is in two groups; groups side by side share none")]
    SharedRank(usize),
    /// Groups of worlds of unlike sizes.
    #[error("a world of {0} ranks and one of {1}; groups side by side have one world")]
    Worlds(usize, usize),
    /// Sequence-parallel regions that are not of as many ranks in each group, or not there in each.
    #[error(
        "sequence-parallel regions of {0:?} and of {1:?} ranks; groups side by side have alike ones or none"
    )]
    Regions(Option<usize>, Option<usize>),
}

/// Returns a schedule whose ranks are places in a group as one whose ranks are those of the group's world.
pub(super) fn placed(mut schedule: Schedule, parallel: &ContextParallel) -> Schedule {
    let ranks: Vec<usize> = parallel.world_ranks().collect();
    let place_in_world = |rank: &mut usize| *rank = ranks[*rank];
    schedule.buffers.iter_mut().map(|buffer| &mut buffer.rank).for_each(place_in_world);
    schedule.communicators.iter_mut().flatten().for_each(place_in_world);
    let programs = schedule.ranks.iter_mut().flat_map(|program| &mut program.operations);
    programs.filter_map(|operation| embed::peer(&mut operation.work)).for_each(place_in_world);
    let mut of_world = vec![RankProgram::default(); parallel.all_of_world()];
    for (&rank, program) in ranks.iter().zip(mem::take(&mut schedule.ranks)) {
        of_world[rank] = program;
    }
    Schedule { ranks: of_world, members: ranks, ..schedule }
}

/// Returns the schedules of groups of one world as one, for an executor. Buffers of the first group keep their ids, and
/// those of each later one follow. Communicators of the same ranks are one. Errors are a rank of two groups, and groups of
/// unlike worlds or regions.
pub fn side_by_side(groups: &[&Schedule]) -> Result<Schedule, SideBySideError> {
    let (world, regions) =
        groups.first().map_or((0, None), |group| (group.ranks.len(), group.sequence_parallel));
    let mut all = Schedule {
        buffers: Vec::new(),
        ranks: vec![RankProgram::default(); world],
        members: Vec::new(),
        communicators: Vec::new(),
        placements: Vec::new(),
        sequence_parallel: regions,
    };
    groups.iter().try_for_each(|group| join(&mut all, group))?;
    Ok(all)
}

/// Adds a group to those that a schedule has already.
fn join(all: &mut Schedule, group: &Schedule) -> Result<(), SideBySideError> {
    if group.ranks.len() != all.ranks.len() {
        return Err(SideBySideError::Worlds(all.ranks.len(), group.ranks.len()));
    }
    if group.sequence_parallel != all.sequence_parallel {
        return Err(SideBySideError::Regions(all.sequence_parallel, group.sequence_parallel));
    }
    let first = all.buffers.len();
    let communicators: Vec<usize> = group.communicators.iter().map(|ranks| of_ranks(all, ranks)).collect();
    for &rank in &group.members {
        if all.place(rank).is_some() {
            return Err(SideBySideError::SharedRank(rank));
        }
        all.members.push(rank);
        let Some(mut program) = group.ranks.get(rank).cloned() else { continue };
        for work in program.operations.iter_mut().map(|operation| &mut operation.work) {
            embed::buffers(work).into_iter().for_each(|id| id.0 += first);
            if let Some(communicator) = embed::communicator(work)
                && let Some(joined) = communicators.get(*communicator)
            {
                *communicator = *joined;
            }
        }
        all.ranks[rank] = program;
    }
    all.buffers.extend(group.buffers.iter().cloned());
    let moved = |placement: &Placement| Placement {
        buffer: BufferId(placement.buffer.0 + first),
        ..placement.clone()
    };
    all.placements.extend(group.placements.iter().map(moved));
    Ok(())
}

/// Returns the index of the communicator of these ranks, which is added if there is none.
fn of_ranks(all: &mut Schedule, ranks: &[usize]) -> usize {
    let known = all.communicators.iter().position(|communicator| communicator == ranks);
    known.unwrap_or_else(|| {
        all.communicators.push(ranks.to_vec());
        all.communicators.len() - 1
    })
}
