//! Faults of the sink and the backward: terms that the forward has and the backward lacks, and terms that do not count
//! exactly once.

use seamproof_oracle::{Run, Sink, TensorName};

use super::edit::{attends, backwards, rewrite, works};
use super::fault::Catcher::{Checker, Envelope};
use super::fault::{Edit, Fault};
use crate::schedule::{BufferId, FillValue, Operation, Reduction, Region, Role, Schedule, Work};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "sink-dropped",
        imitates: "the kind of softmax is not forwarded to the kernel: the sink is ignored",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3551",
        entries: &[108],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            super::edit::remove(schedule, |_, operation| matches!(operation.work, Work::ApplySink { .. }));
            for attend in attends(schedule) {
                (attend.sink, attend.call.softmax.sink) = (None, Sink::None);
            }
        },
    },
    Fault {
        id: "sink-twice",
        imitates: "the sink enters a step and once more after the last merge",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2541",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: sink_twice,
    },
    Fault {
        id: "dsink-zero",
        imitates: "the sink's gradient is exactly 0: nothing computes it",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2541",
        entries: &[108],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::SinkGradient { dsink, .. } = work {
                    *work = Work::Fill { to: *dsink, rows: Vec::new(), value: FillValue::Zero };
                }
            }
        },
    },
    Fault {
        id: "dsink-counted-on-every-rank",
        imitates: "the sink's gradient is reduced over the CP ranks and summed over them again (D15)",
        source: "https://github.com/NVIDIA/Megatron-LM/commit/3bdcbbbe5d",
        entries: &[113],
        caught_by: &[Checker, Envelope],
        edit: dsink_reduced,
    },
    Fault {
        id: "dout-of-other-rows",
        imitates: "the incoming gradient is read with the strides of the output",
        source: "https://github.com/pytorch/pytorch/issues/176915",
        entries: &[145],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for placement in schedule.placements.iter_mut().filter(|p| p.tensor == TensorName::Dout) {
                if let [first, second, ..] = placement.rows.as_mut_slice()
                    && (first.local.len, first.local.span) == (second.local.len, second.local.span)
                {
                    std::mem::swap(&mut first.local, &mut second.local);
                }
            }
        },
    },
    Fault {
        id: "lse-of-a-step-in-backward",
        imitates: "the backward weighs pairs by the LSE of one step instead of the final one",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/498",
        entries: &[144],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            let mut steps: Vec<(BufferId, BufferId)> = Vec::new();
            for work in works(schedule) {
                if let Work::Merge(merge) = work {
                    steps.push((merge.lse, merge.step_lse));
                }
            }
            for attend in backwards(schedule) {
                let step = steps.iter().find(|(lse, _)| *lse == attend.lse);
                attend.lse = step.map_or(attend.lse, |(_, step)| *step);
            }
        },
    },
    Fault {
        id: "softcap-missing-in-backward",
        imitates: "the soft cap is not saved for the backward",
        source: "https://github.com/Dao-AILab/flash-attention/issues/2424",
        entries: &[127],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| backwards(schedule).for_each(|attend| attend.call.softmax.softcap = None),
    },
    Fault {
        id: "scale-missing-in-backward",
        imitates: "the backward takes the default scale",
        source: "https://github.com/Dao-AILab/flash-attention/commit/386e3911",
        entries: &[128],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| backwards(schedule).for_each(|attend| attend.call.softmax.scale = 1.0),
    },
];

/// Applies the sink a second time after each launch that applies it, or after the merges.
fn sink_twice(_: &seamproof_oracle::Problem, schedule: &mut Schedule) {
    rewrite(schedule, |_, operation| {
        let again = match &operation.work {
            Work::ApplySink { .. } => Some(operation.clone()),
            Work::Attend(attend) if attend.call.softmax.sink != Sink::None => {
                let real = |run: Run| Run { span: run.len, ..run };
                let queries = attend.call.segments.iter().map(|segment| real(segment.q));
                let rows = queries.filter(|run| run.len > 0).collect();
                let work = Work::ApplySink { sink: attend.sink, out: attend.out, lse: attend.lse, rows };
                Some(Operation { stream: operation.stream, work })
            }
            _ => None,
        };
        [operation].into_iter().chain(again)
    });
}

/// Sums dsink over all ranks, although it is a partial sum by contract.
fn dsink_reduced(problem: &seamproof_oracle::Problem, schedule: &mut Schedule) {
    let whole = |buffer: &crate::schedule::Buffer| {
        buffer.role == Role::Output(TensorName::Dsink) && buffer.heads == problem.learnable_sinks()
    };
    let sums: Vec<usize> = (0..schedule.buffers.len()).filter(|&id| whole(&schedule.buffers[id])).collect();
    if problem.parallel.size() == 1 || sums.len() != schedule.members.len() {
        return;
    }
    for id in sums {
        let heads = 0..schedule.buffers[id].heads;
        let region = Region { buffer: BufferId(id), rows: Run::packed(0, 0, 0), heads };
        let work = Work::AllReduce { communicator: 0, region, reduction: Reduction::Sum };
        let program = &mut schedule.ranks[schedule.buffers[id].rank];
        program.operations.push(Operation { stream: 0, work });
    }
}
