//! The resources that a schedule takes, counted from its data.
//!
//! Memory is counted as an allocator sees it that follows the host's order: an input is there for the whole program, a
//! result from its first touch to the end, and scratch from its first touch to its last.

use seamproof_oracle::Pass;

use super::resource::Resource;
use super::touch::touches;
use crate::schedule::{Buffer, RankProgram, Role, Schedule, Work};

/// Returns the amount that the dearest rank takes.
pub(super) fn amount(resource: Resource, schedule: &Schedule) -> u64 {
    let amount = |program: &RankProgram| match resource {
        Resource::PeakBytes(pass) => peak_bytes(schedule, program, pass),
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
        Resource::PeakBytes(_) => 0,
        Resource::Launches => u64::from(segments.is_some()),
        Resource::Segments => segments.unwrap_or(0) as u64,
        Resource::HostReads => u64::from(matches!(work, Work::HostRead(_))),
    }
}

/// Returns the largest number of bytes that are live at once in a pass of a rank's program.
fn peak_bytes(schedule: &Schedule, program: &RankProgram, pass: Pass) -> u64 {
    let end = program.operations.len();
    // The bytes that each operation brings, and those that the operation before it was the last to need.
    let (mut born, mut gone) = (vec![0; end + 1], vec![0; end + 1]);
    for (buffer, (first, last)) in schedule.buffers.iter().zip(touched(schedule, program)) {
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
    live.skip(of_pass.start).take(of_pass.len()).max().unwrap_or(0)
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
