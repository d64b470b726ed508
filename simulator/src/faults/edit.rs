//! The parts of edits: walks over calls, segments and operations, and the schedules of a wrongly told builder.

use std::mem;

use seamproof_oracle::{Problem, ProblemFields, Run, Side};

use crate::schedule::{Attend, AttendBackward, Operation, RowPair, Schedule, Work, build};
use crate::{AttentionCall, Segment};

pub(super) fn works(schedule: &mut Schedule) -> impl Iterator<Item = &mut Work> {
    let programs = schedule.ranks.iter_mut();
    programs.flat_map(|program| &mut program.operations).map(|operation| &mut operation.work)
}

pub(super) fn attends(schedule: &mut Schedule) -> impl Iterator<Item = &mut Attend> {
    works(schedule).filter_map(|work| if let Work::Attend(attend) = work { Some(attend) } else { None })
}

pub(super) fn backwards(schedule: &mut Schedule) -> impl Iterator<Item = &mut AttendBackward> {
    works(schedule)
        .filter_map(|work| if let Work::AttendBackward(attend) = work { Some(attend) } else { None })
}

/// Returns the calls of both passes.
pub(super) fn calls(schedule: &mut Schedule) -> impl Iterator<Item = &mut AttentionCall> {
    works(schedule).filter_map(|work| match work {
        Work::Attend(attend) => Some(&mut attend.call),
        Work::AttendBackward(attend) => Some(&mut attend.call),
        _ => None,
    })
}

/// Edits every segment of both passes.
pub(super) fn segments(schedule: &mut Schedule, edit: impl FnMut(&mut Segment)) {
    calls(schedule).flat_map(|call| &mut call.segments).for_each(edit);
}

/// Puts the rows of some sides where they would lie without padding: each run behind the real rows of those before it.
pub(super) fn lie_at_sums(call: &mut AttentionCall, sides: &[Side]) {
    let [mut queries, mut keys] = [0; 2];
    let place = |run: &mut Run, end: &mut usize| {
        *run = Run::packed(*end, run.len, run.len);
        *end += run.len;
    };
    for segment in &mut call.segments {
        if sides.contains(&Side::Q) {
            place(&mut segment.q, &mut queries);
        }
        if sides.contains(&Side::Kv) {
            segment.kv.iter_mut().for_each(|run| place(run, &mut keys));
        }
    }
}

/// Replaces each operation with the operations that `edit` returns for it. The backward begins at the operation where
/// it began.
pub(super) fn rewrite<O: IntoIterator<Item = Operation>>(
    schedule: &mut Schedule,
    mut edit: impl FnMut(usize, Operation) -> O,
) {
    for (rank, program) in schedule.ranks.iter_mut().enumerate() {
        let (begin, mut operations) = (program.backward, Vec::new());
        for (index, operation) in mem::take(&mut program.operations).into_iter().enumerate() {
            if begin == Some(index) {
                program.backward = Some(operations.len());
            }
            operations.extend(edit(rank, operation));
        }
        program.operations = operations;
    }
}

/// Removes the operations that `bad` accepts, given each rank.
pub(super) fn remove(schedule: &mut Schedule, mut bad: impl FnMut(usize, &Operation) -> bool) {
    rewrite(schedule, |rank, operation| (!bad(rank, &operation)).then_some(operation));
}

/// Removes the last operation of each rank that `pick` accepts.
pub(super) fn remove_last(schedule: &mut Schedule, pick: impl Fn(&Work) -> bool) {
    for program in &mut schedule.ranks {
        let last = program.operations.iter().rposition(|operation| pick(&operation.work));
        if let Some(index) = last {
            program.operations.remove(index);
            program.backward = program.backward.map(|begin| begin - usize::from(index < begin));
        }
    }
}

/// Edits the row pairs of every copy that moves rows, in one pass: the forward or the backward.
pub(super) fn each_reorder(schedule: &mut Schedule, backward: bool, mut edit: impl FnMut(&mut Vec<RowPair>)) {
    for program in &mut schedule.ranks {
        let begin = program.backward.unwrap_or(program.operations.len());
        for (index, operation) in program.operations.iter_mut().enumerate() {
            if let Work::Copy { rows, .. } = &mut operation.work
                && (index >= begin) == backward
                && rows.iter().any(|(from, to)| from != to)
            {
                edit(rows);
            }
        }
    }
}

/// Passes that a wrongly told builder builds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Passes {
    Both,
    Backward,
}

/// Replaces the programs with those of a builder that was given the edited problem. Buffers and placements stay the
/// right ones. Nothing changes if the two do not fit.
pub(super) fn rebuild(
    problem: &Problem,
    schedule: &mut Schedule,
    passes: Passes,
    edit: impl FnOnce(&mut ProblemFields),
) {
    let mut fields = ProblemFields::from(problem.clone());
    edit(&mut fields);
    let Some(other) = Problem::new(fields).ok().and_then(|other| build(&other).ok()) else { return };
    if other.buffers != schedule.buffers {
        return;
    }
    for (mine, mut other) in schedule.ranks.iter_mut().zip(other.ranks) {
        match (passes, mine.backward, other.backward) {
            (Passes::Both, ..) => *mine = other,
            (Passes::Backward, Some(begin), Some(from)) => {
                mine.operations.truncate(begin);
                mine.operations.extend(other.operations.drain(from..));
            }
            _ => {}
        }
    }
}
