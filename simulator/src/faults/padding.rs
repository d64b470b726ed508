//! Faults of padding, slack, idle ranks and empty sets: rows that nobody writes, that everybody writes, or that are no
//! identity.

use seamproof_oracle::{Run, TensorName};

use super::edit::{attends, backwards, calls, remove, works};
use super::fault::Catcher::{Checker, Crash, Envelope, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{Axes, FillValue, Role, Schedule, Work};
use crate::{RowPolicy, Segment};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "output-padding-unwritten",
        imitates: "the kernel leaves padding rows of the output as they were allocated",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1009",
        entries: &[51],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| attends(schedule).for_each(|attend| attend.call.policy = RowPolicy::Leave),
    },
    Fault {
        id: "gradient-padding-unwritten",
        imitates: "gradients are allocated uninitialised and the backward skips padding rows",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[8],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| backwards(schedule).for_each(|attend| attend.call.policy = RowPolicy::Leave),
    },
    Fault {
        id: "fill-past-its-sequence",
        imitates: "the path that stores zeros is bounded by the tile's extent: it writes rows that are not its own",
        source: "https://github.com/Dao-AILab/flash-attention/commit/a3a257c7",
        entries: &[],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            let rows: Vec<usize> = schedule.buffers.iter().map(|buffer| buffer.rows).collect();
            for work in works(schedule) {
                if let Work::Fill { to, rows: runs, .. } = work
                    && let Some(first) = runs.first().map(|run| run.offset)
                {
                    *runs = vec![Run::packed(first, rows[to.0] - first, rows[to.0] - first)];
                }
            }
        },
    },
    Fault {
        id: "fill-misses-its-last-row",
        imitates: "a fill ends at the last real row of the pack instead of the last owned one",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[8],
        caught_by: &[Checker, Structure, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::Fill { rows, .. } = work
                    && let Some(last) = rows.last_mut().filter(|run| run.len > 0)
                {
                    (last.len, last.span) = (last.len - 1, last.span - 1);
                }
            }
        },
    },
    Fault {
        id: "gradient-sums-not-cleared",
        imitates: "gradients of steps are summed into a buffer that is taken for zeros",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[21],
        caught_by: &[Checker, Structure, Envelope],
        edit: |_, schedule| {
            remove(schedule, |_, operation| {
                matches!(operation.work, Work::Fill { value: FillValue::Zero, .. })
            });
        },
    },
    Fault {
        id: "idle-rank-uninitialised",
        imitates: "a rank that has nothing to attend returns its buffers as they were allocated",
        source: "https://github.com/SandAI-org/MagiAttention/pull/17",
        entries: &[55],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            let idle = idle(schedule);
            remove(schedule, |rank, operation| idle[rank] && matches!(operation.work, Work::Fill { .. }));
        },
    },
    Fault {
        id: "idle-rank-leaves-collectives",
        imitates: "a rank without tokens returns before the collective: its peers wait for ever",
        source: "https://github.com/uccl-project/uccl/pull/993",
        entries: &[78],
        caught_by: &[Checker, Crash],
        edit: |_, schedule| {
            let idle = idle(schedule);
            remove(schedule, |rank, operation| {
                idle[rank] && matches!(operation.work, Work::AllReduce { .. } | Work::AllGather { .. })
            });
        },
    },
    Fault {
        id: "empty-lse-finite",
        imitates: "the LSE of rows that saw no key yet is 0 instead of −∞, and is merged as though it were real",
        source: "https://github.com/vllm-project/vllm/pull/49294",
        entries: &[66],
        caught_by: &[Checker, Structure, Envelope],
        edit: |_, schedule| zero_instead_of_infinity(schedule, Axes::Statistic),
    },
    Fault {
        id: "max-logit-starts-at-zero",
        imitates: "the largest logit is raised from 0: negative maxima are lost",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| zero_instead_of_infinity(schedule, Axes::Heads),
    },
    Fault {
        id: "sink-uninitialised",
        imitates: "the learnable sink is allocated and never initialised",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2694",
        entries: &[56],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            for buffer in &mut schedule.buffers {
                if buffer.role == Role::Input(TensorName::Sink) {
                    buffer.role = Role::Scratch;
                }
            }
            schedule.placements.retain(|placement| placement.tensor != TensorName::Sink);
        },
    },
    Fault {
        id: "keyless-queries-skipped",
        imitates: "a sequence without keys is not launched: its output is never written",
        source: "https://github.com/Dao-AILab/flash-attention/pull/2470",
        entries: &[70],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            calls(schedule).for_each(|call| call.segments.retain(|segment| segment.keys() > 0));
        },
    },
    Fault {
        id: "loop-ends-at-an-empty-sequence",
        imitates: "a loop over the batch ends at a sequence of length 0, where it should go on with the next one",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let empty = |segment: &Segment| segment.q.len == 0 || segment.keys() == 0;
                let end = call.segments.iter().position(empty).unwrap_or(call.segments.len());
                call.segments.truncate(end);
            }
        },
    },
    Fault {
        id: "masked-rows-uniform",
        imitates: "where the mask shows nothing, the softmax of equal scores weighs every key alike",
        source: "https://github.com/pytorch/pytorch/issues/103963",
        entries: &[72],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for segment in calls(schedule).flat_map(|call| &mut call.segments) {
                let hidden = |query| segment.visible(query).is_empty();
                if segment.q.len > 0 && segment.keys() > 0 && (0..segment.q.len).all(hidden) {
                    (segment.lo, segment.hi) = (None, None);
                }
            }
        },
    },
    Fault {
        id: "padding-chunk-skipped",
        imitates: "a chunk that holds padding alone is left out of the backward: its gradients are garbage",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2186",
        entries: &[25],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            backwards(schedule).for_each(|attend| attend.call.segments.retain(|segment| segment.q.len > 0));
        },
    },
];

/// Returns for each rank whether it attends to nothing while others attend to something.
fn idle(schedule: &Schedule) -> Vec<bool> {
    let works = |call: &crate::AttentionCall| {
        call.segments.iter().any(|segment| (0..segment.q.len).any(|query| !segment.visible(query).is_empty()))
    };
    let programs = schedule.ranks.iter();
    let idle: Vec<bool> = programs
        .map(|program| {
            !program
                .operations
                .iter()
                .any(|operation| matches!(&operation.work, Work::Attend(attend) if works(&attend.call)))
        })
        .collect();
    if idle.iter().all(|&idle| idle) { vec![false; idle.len()] } else { idle }
}

/// Replaces fills of −∞ by zeros in buffers with these axes.
fn zero_instead_of_infinity(schedule: &mut Schedule, axes: Axes) {
    let hit: Vec<bool> = schedule.buffers.iter().map(|buffer| buffer.axes == axes).collect();
    for work in works(schedule) {
        if let Work::Fill { to, value, .. } = work
            && hit[to.0]
        {
            *value = FillValue::Zero;
        }
    }
}
