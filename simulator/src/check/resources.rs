//! The resources that a schedule takes, counted from its data.
//!
//! Memory is counted as an allocator sees it that follows the host's order: an input is there for the whole program, a
//! result from its first touch to the end, and scratch from its first touch to its last.

use std::collections::BTreeSet;

use seamproof_oracle::Pass;

use super::resource::Resource;
use super::touch::touches;
use crate::schedule::{Buffer, BufferId, RankProgram, Role, Schedule, Work};

/// Returns the amount that the dearest rank takes.
pub(super) fn amount(resource: Resource, schedule: &Schedule) -> u64 {
    let amount = |program: &RankProgram| match resource {
        Resource::PeakBytes(pass) => most_bytes(schedule, program, pass, |_| true, |_| true),
        Resource::BytesAtLaunches(pass) => {
            let tables = tables(program);
            most_bytes(schedule, program, pass, is_launch, |buffer| !tables.contains(&buffer))
        }
        _ => program.operations.iter().map(|operation| of_work(resource, &operation.work)).sum(),
    };
    schedule.ranks.iter().map(amount).max().unwrap_or(0)
}

/// Returns the amount that one operation adds. Bytes are not counted so: buffers outlive operations.
fn of_work(resource: Resource, work: &Work) -> u64 {
    let segments = match work {
        Work::Attend(attend) => Some(attend.call.segments.len()),
        Work::AttendBackward(attend) => Some(attend.call.segments.len()),
        _ => None,
    };
    match resource {
        Resource::PeakBytes(_) | Resource::BytesAtLaunches(_) => 0,
        Resource::Launches => u64::from(segments.is_some()),
        Resource::Segments => segments.unwrap_or(0) as u64,
        Resource::HostReads => u64::from(matches!(work, Work::HostRead(_))),
    }
}

/// Returns the largest number of bytes of some buffers that are live at once, at some operations of a pass of a rank's
/// program.
fn most_bytes(
    schedule: &Schedule,
    program: &RankProgram,
    pass: Pass,
    at: impl Fn(&Work) -> bool,
    counts: impl Fn(BufferId) -> bool,
) -> u64 {
    let end = program.operations.len();
    // The bytes that each operation brings, and those that the operation before it was the last to need.
    let (mut born, mut gone) = (vec![0; end + 1], vec![0; end + 1]);
    let buffers = schedule.buffers.iter().zip(touched(schedule, program)).enumerate();
    for (_, (buffer, (first, last))) in buffers.filter(|(index, _)| counts(BufferId(*index))) {
        let Some((first, last)) = first.zip(last) else { continue };
        let (first, last) = match buffer.role {
            Role::Input(_) => (0, end),
            Role::Output(_) => (first, end),
            Role::Scratch => (first, last + 1),
        };
        born[first] += bytes(buffer);
        gone[last] += bytes(buffer);
    }
    let live = born.iter().zip(&gone).scan(0, |live, (born, gone)| {
        *live = *live + born - gone;
        Some(*live)
    });
    let begin = program.backward.unwrap_or(end);
    let of_pass = match pass {
        Pass::Forward => 0..begin,
        Pass::Backward => begin..end,
    };
    let operations = live.zip(&program.operations).skip(of_pass.start).take(of_pass.len());
    operations.filter(|(_, operation)| at(&operation.work)).map(|(live, _)| live).max().unwrap_or(0)
}

fn is_launch(work: &Work) -> bool {
    matches!(work, Work::Attend(_) | Work::AttendBackward(_))
}

/// Returns the buffers of a program that are tables of segments.
fn tables(program: &RankProgram) -> BTreeSet<BufferId> {
    let tables = program.operations.iter().filter_map(|operation| match operation.work {
        Work::MakeSegments { to, .. } => Some(to),
        _ => None,
    });
    tables.collect()
}

/// Returns the first and the last operation of a program that touches each buffer of its schedule.
fn touched(schedule: &Schedule, program: &RankProgram) -> Vec<(Option<usize>, Option<usize>)> {
    let mut touched = vec![(None, None); schedule.buffers.len()];
    for (index, operation) in program.operations.iter().enumerate() {
        for (buffer, ..) in touches(&operation.work) {
            let (first, last) = &mut touched[buffer.0];
            first.get_or_insert(index);
            *last = Some(index);
        }
    }
    touched
}

fn bytes(buffer: &Buffer) -> u64 {
    let elements: u64 = buffer.shape().iter().map(|&extent| extent as u64).product();
    elements * u64::from(buffer.format.bits()) / 8
}
