//! Faults of streams and events: work that begins too early. A run may not show it, but the proof does. A run with
//! ranks as [threads](crate::threads) shows it more often.

use std::collections::{BTreeMap, BTreeSet};

use super::edit::{remove, rewrite, works};
use super::fault::Catcher::{Checker, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{BufferId, EventId, Operation, RankProgram, Role, Schedule, Work};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "kv-read-before-it-arrives",
        imitates: "a kernel is launched without a wait for the message that brings its keys",
        source: "https://github.com/SandAI-org/MagiAttention/pull/200",
        entries: &[111],
        caught_by: &[Checker],
        edit: |_, schedule| drop_waits(schedule, false, true),
    },
    Fault {
        id: "sent-before-it-is-made",
        imitates: "what a kernel writes is sent, and what it reads overwritten, before the kernel is done",
        source: "https://github.com/SandAI-org/MagiAttention/pull/75",
        entries: &[177],
        caught_by: &[Checker],
        edit: |_, schedule| drop_waits(schedule, true, false),
    },
    Fault {
        id: "merge-before-its-turn",
        imitates: "two streams fold their steps into one result without waiting for each other",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/756f085",
        entries: &[171],
        caught_by: &[Checker],
        edit: |_, schedule| drop_waits(schedule, true, true),
    },
    Fault {
        id: "merge-on-the-wrong-stream",
        imitates: "a step's LSE is worked on in the main stream while a side stream still makes it",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1624",
        entries: &[171],
        caught_by: &[Checker],
        edit: |_, schedule| {
            rewrite(schedule, |_, mut operation| {
                if matches!(operation.work, Work::Merge(_)) {
                    operation.stream = 0;
                }
                [operation]
            });
        },
    },
    Fault {
        id: "one-slot-for-two",
        imitates: "a buffer is freed and taken again while a side stream still reads it",
        source: "https://github.com/Dao-AILab/flash-attention/pull/1085",
        entries: &[175],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: one_slot,
    },
];

/// Returns the events that a rank records on streams that run kernels.
fn recorded_by_kernels(program: &RankProgram, kernels: &BTreeSet<usize>) -> BTreeSet<EventId> {
    let recorded = program.operations.iter().filter_map(|Operation { stream, work }| match work {
        Work::RecordEvent(event) if kernels.contains(stream) => Some(*event),
        _ => None,
    });
    recorded.collect()
}

/// Returns the streams that run kernels.
fn kernel_streams(program: &RankProgram) -> BTreeSet<usize> {
    let kernel = |work: &Work| matches!(work, Work::Attend(_) | Work::AttendBackward(_));
    program
        .operations
        .iter()
        .filter(|operation| kernel(&operation.work))
        .map(|operation| operation.stream)
        .collect()
}

/// Removes the waits of some streams for others. Each side is either the streams that run kernels or those that move
/// messages.
fn drop_waits(schedule: &mut Schedule, for_kernels: bool, of_kernels: bool) {
    let kernels: Vec<_> = schedule.ranks.iter().map(kernel_streams).collect();
    let programs = schedule.ranks.iter().zip(&kernels);
    let recorded: Vec<_> = programs.map(|(program, kernels)| recorded_by_kernels(program, kernels)).collect();
    remove(schedule, |rank, Operation { stream, work }| match work {
        Work::WaitEvent(event) => {
            recorded[rank].contains(event) == for_kernels && kernels[rank].contains(stream) == of_kernels
        }
        _ => false,
    });
}

/// Makes one buffer of all scratch buffers that receive messages and are alike.
fn one_slot(_: &seamproof_oracle::Problem, schedule: &mut Schedule) {
    let key = |id: BufferId| {
        let buffer = &schedule.buffers[id.0];
        let tensor = buffer.name.split(',').next().unwrap_or_default().to_owned();
        (buffer.role == Role::Scratch).then_some((buffer.rank, tensor, buffer.shape()))
    };
    let mut first: BTreeMap<_, BufferId> = BTreeMap::new();
    let mut same: BTreeMap<BufferId, BufferId> = BTreeMap::new();
    for operation in schedule.ranks.iter().flat_map(|program| &program.operations) {
        if let Work::Recv { regions, .. } = &operation.work {
            for region in regions {
                if let Some(key) = key(region.buffer) {
                    same.insert(region.buffer, *first.entry(key).or_insert(region.buffer));
                }
            }
        }
    }
    let moved = |id: &mut BufferId| *id = same.get(id).copied().unwrap_or(*id);
    for work in works(schedule) {
        match work {
            Work::Attend(attend) => [&mut attend.k, &mut attend.v].into_iter().for_each(moved),
            Work::AttendBackward(attend) => [&mut attend.k, &mut attend.v].into_iter().for_each(moved),
            Work::Send { regions, .. } | Work::Recv { regions, .. } => {
                regions.iter_mut().for_each(|region| moved(&mut region.buffer));
            }
            _ => {}
        }
    }
}
