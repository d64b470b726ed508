//! Faults of resources: the results are right, and the memory, the launches or the reads of the host grow too fast.

use std::collections::BTreeMap;
use std::mem;

use seamproof_oracle::{Algorithm, Format, Problem, Run, TensorName};

use super::edit::{calls, rewrite, works};
use super::fault::Catcher::{Checker, Resources};
use super::fault::{Edit, Fault};
use crate::schedule::{
    Attend, Axes, Buffer, BufferId, FillValue, Layer, Operation, Region, Role, Schedule, Step, Work,
};
use crate::{AttentionCall, Segment};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "partial-outs-kept-to-the-end",
        imitates: "a ring keeps the out of every step, and merges them all after the last one",
        source: "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
        entries: &[],
        caught_by: &[Resources],
        edit: |_, schedule| merged_at_the_end(schedule),
    },
    Fault {
        id: "keys-gathered-before-the-first-step",
        imitates: "a ring gathers the keys of all members before its first step, where they should stream",
        source: "https://github.com/pytorch/pytorch/blob/main/torch/distributed/tensor/experimental/_context_parallel/_attention.py",
        entries: &[],
        caught_by: &[Resources],
        edit: gathered_first,
    },
    Fault {
        id: "mask-of-queries-by-keys",
        imitates: "a mask of every query by every key is made for packed input, where bounds would do",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2522",
        entries: &[14, 203],
        caught_by: &[Resources],
        edit: |_, schedule| whole_masks(schedule),
    },
    Fault {
        id: "statistic-of-each-step-kept",
        imitates: "each step's statistic stays attached until it is logged: memory leaks with every step",
        source: "https://github.com/NVIDIA/Megatron-LM/issues/5067",
        entries: &[206],
        caught_by: &[Resources],
        edit: |_, schedule| statistics_kept(schedule),
    },
    Fault {
        id: "hidden-rows-kept-to-the-end",
        imitates: "a linear layer keeps the rows that its region gathered, and not its own shard of them: memory does \
                   not fall as ranks share it",
        source: "https://arxiv.org/abs/2205.05198",
        entries: &[],
        caught_by: &[Resources],
        edit: |_, schedule| hidden_rows_kept(schedule),
    },
    Fault {
        id: "host-read-for-each-sequence",
        imitates: "the padding mask is built on the host, with one read of the device for each sequence",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3268",
        entries: &[49],
        caught_by: &[Checker, Resources],
        edit: |problem, schedule| {
            let rows: Vec<usize> = schedule.buffers.iter().map(|buffer| buffer.rows.min(1)).collect();
            rewrite(schedule, |_, operation| {
                let read = |buffer: BufferId| {
                    let rows = Run::packed(0, rows[buffer.0], rows[buffer.0]);
                    let work = Work::HostRead(Region { buffer, rows, heads: 0..1 });
                    vec![Operation { stream: operation.stream, work }; problem.sequences.len()]
                };
                let mut reads =
                    if let Work::Attend(attend) = &operation.work { read(attend.q) } else { vec![] };
                reads.push(operation);
                reads
            });
        },
    },
    Fault {
        id: "blocks-for-every-pair-of-sequences",
        imitates: "the grid follows the length of the table times the sequences: most blocks have no work",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3057",
        entries: &[204],
        caught_by: &[Resources],
        edit: |_, schedule| calls(schedule).for_each(with_idle_blocks),
    },
];

/// Returns a new scratch buffer with the shape and the format of another.
fn another(buffers: &mut Vec<Buffer>, like: BufferId) -> BufferId {
    let model = buffers[like.0].clone();
    let name = format!("{}, kept", model.name).into();
    buffers.push(Buffer { name, role: Role::Scratch, ..model });
    BufferId(buffers.len() - 1)
}

/// Whether a work follows the last merge of a ring: the sink, and the rounding of the out.
fn ends_merges(work: &Work) -> bool {
    matches!(work, Work::ApplySink { .. } | Work::Copy { .. })
}

/// Gives each launch its own out and LSE, and moves every merge behind the last launch.
fn merged_at_the_end(schedule: &mut Schedule) {
    if !works(schedule).any(|work| matches!(work, Work::Merge(_))) {
        return;
    }
    let (mut buffers, mut kept) = (mem::take(&mut schedule.buffers), Vec::new());
    let mut partial = None;
    rewrite(schedule, |_, mut operation| {
        match &mut operation.work {
            Work::Attend(Attend { out, lse, .. }) => {
                (*out, *lse) = (another(&mut buffers, *out), another(&mut buffers, *lse));
                partial = Some((*out, *lse));
            }
            Work::Merge(merge) => {
                (merge.step_out, merge.step_lse) = partial.unwrap_or((merge.step_out, merge.step_lse));
                kept.push(Work::Merge(merge.clone()));
                return Vec::new();
            }
            _ => {}
        }
        released(&mut kept, operation)
    });
    schedule.buffers = buffers;
}

/// Copies the LSE of each step, and reads the copies after the last merge.
fn statistics_kept(schedule: &mut Schedule) {
    let (mut buffers, mut kept) = (mem::take(&mut schedule.buffers), Vec::new());
    rewrite(schedule, |_, operation| {
        let Work::Merge(merge) = &operation.work else { return released(&mut kept, operation) };
        let (from, to) = (merge.step_lse, another(&mut buffers, merge.step_lse));
        let rows: Vec<_> = merge.rows.iter().map(|(step, _)| (*step, *step)).collect();
        kept.push(Work::Copy { from: to, to: another(&mut buffers, to), rows: rows.clone() });
        let copy = Operation { stream: operation.stream, work: Work::Copy { from, to, rows } };
        vec![operation, copy]
    });
    schedule.buffers = buffers;
}

/// Reads the rows that each rank of a region gathered for its linear layers once more, behind everything else.
fn hidden_rows_kept(schedule: &mut Schedule) {
    let Schedule { buffers, ranks, .. } = schedule;
    for program in ranks {
        let gathered = program.operations.iter().filter_map(|operation| match operation.work {
            Work::Linear { layer: Layer::Column, from, .. } => Some(from),
            _ => None,
        });
        let read = |from: BufferId| {
            let (rows, to) = (buffers[from.0].rows, another(buffers, from));
            let rows = Run::packed(0, rows, rows);
            Operation { stream: 0, work: Work::Copy { from, to, rows: vec![(rows, rows)] } }
        };
        let last: Vec<Operation> = gathered.collect::<Vec<_>>().into_iter().map(read).collect();
        program.operations.extend(last);
    }
}

/// Returns an operation. Where merges have ended, works that were kept stand before it, on its stream.
fn released(kept: &mut Vec<Work>, operation: Operation) -> Vec<Operation> {
    let due = if ends_merges(&operation.work) { mem::take(kept) } else { Vec::new() };
    let stream = operation.stream;
    due.into_iter().map(|work| Operation { stream, work }).chain([operation]).collect()
}

/// Makes each rank of a ring gather all keys and values, and read each step's from there. The forward sends none.
fn gathered_first(problem: &Problem, schedule: &mut Schedule) {
    let (group, members) = (schedule.members.clone(), schedule.members.len());
    let is_ring = problem.parallel.algorithm == Algorithm::Ring && schedule.sequence_parallel.is_none();
    if !is_ring || members == 1 {
        return;
    }
    for rank in group {
        let Schedule { buffers, ranks, .. } = &mut *schedule;
        let own = [TensorName::K, TensorName::V].map(|tensor| {
            let is = |buffer: &Buffer| buffer.rank == rank && buffer.role == Role::Input(tensor);
            BufferId(buffers.iter().position(is).unwrap_or(0))
        });
        let rows = buffers[own[0].0].rows;
        let gathered = own.map(|id| another(buffers, id));
        gathered.iter().for_each(|id| buffers[id.0].rows = rows * members);
        let program = &mut ranks[rank];
        let backward = program.operations.split_off(program.backward.unwrap_or(program.operations.len()));
        let mut forward: Vec<Operation> =
            own.into_iter().zip(gathered).map(|(from, to)| gather(buffers, members, from, to)).collect();
        let exchanged = |work: &Work| matches!(work, Work::Send { .. } | Work::Recv { .. });
        forward.extend(program.operations.drain(..).filter(|operation| !exchanged(&operation.work)));
        for operation in &mut forward {
            if let Work::Attend(Attend { step: Step::Ring { owner, .. }, call, k, v, .. }) =
                &mut operation.work
            {
                [*k, *v] = gathered;
                let keys = call.segments.iter_mut().flat_map(|segment| &mut segment.kv);
                keys.for_each(|run| run.offset += *owner * rows);
            }
        }
        program.backward = program.backward.map(|_| forward.len());
        forward.extend(backward);
        program.operations = forward;
    }
}

/// Returns the gathering of a buffer of every member, one member after the other.
fn gather(buffers: &[Buffer], members: usize, from: BufferId, to: BufferId) -> Operation {
    let Buffer { rows, heads, .. } = buffers[from.0];
    let part = |buffer, member: usize| Region {
        buffer,
        rows: Run::packed(member * rows, rows, rows),
        heads: 0..heads,
    };
    let to = (0..members).map(|member| part(to, member)).collect();
    Operation { stream: 0, work: Work::AllGather { communicator: 0, from: part(from, 0), to } }
}

/// Makes a mask of all queries by all keys before each launch, in one buffer for each rank and stream.
fn whole_masks(schedule: &mut Schedule) {
    let (mut buffers, mut masks) = (mem::take(&mut schedule.buffers), BTreeMap::new());
    rewrite(schedule, |rank, operation| {
        let sides = match &operation.work {
            Work::Attend(attend) => Some([attend.q, attend.k]),
            Work::AttendBackward(attend) => Some([attend.q, attend.k]),
            _ => None,
        };
        let sides = sides.map(|sides| sides.map(|side| buffers[side.0].rows));
        let fill = sides.filter(|[rows, keys]| rows * keys > 0).map(|[rows, keys]| {
            let to = *masks.entry((rank, operation.stream)).or_insert_with(|| {
                let (name, axes, format, role) = ("mask".into(), Axes::Rows, Format::Bf16, Role::Scratch);
                buffers.push(Buffer { name, rank, axes, rows, heads: 1, dim: keys, format, role });
                BufferId(buffers.len() - 1)
            });
            let rows = vec![Run::packed(0, rows, rows)];
            Operation { stream: operation.stream, work: Work::Fill { to, rows, value: FillValue::Zero } }
        });
        fill.into_iter().chain([operation])
    });
    schedule.buffers = buffers;
}

/// Adds blocks without rows, until there are as many as the square of the segments.
fn with_idle_blocks(call: &mut AttentionCall) {
    let count = call.segments.len();
    if let Some(first) = call.segments.first() {
        let idle = Segment { q: Run { len: 0, span: 0, ..first.q }, kv: Vec::new(), ..first.clone() };
        call.segments.resize(count * count, idle);
    }
}
