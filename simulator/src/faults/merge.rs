//! Faults of the merges of partial results, and of the formats in which these are kept.

use seamproof_oracle::Format;

use super::edit::{attends, remove_last, rewrite, works};
use super::fault::Catcher::{Checker, Envelope, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{Buffer, MergeStyle, Reduction, Role, Schedule, Work};

/// The public record of the merges of partial results and of their bugs.
const MERGES: &str = "https://github.com/NVIDIA/cudnn-frontend/issues/752";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "merge-missing",
        imitates: "the last step's partial result is computed and dropped",
        source: MERGES,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| remove_last(schedule, |work| matches!(work, Work::Merge(_))),
    },
    Fault {
        id: "merge-twice",
        imitates: "a step's partial result enters the running one twice",
        source: MERGES,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            rewrite(schedule, |_, operation| {
                let times = if matches!(operation.work, Work::Merge(_)) { 2 } else { 1 };
                vec![operation; times]
            });
        },
    },
    Fault {
        id: "out-not-corrected",
        imitates: "a merge updates the LSE; the running out is neither rescaled nor added to",
        source: MERGES,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| restyle(schedule, MergeStyle::Statistics),
    },
    Fault {
        id: "lse-not-corrected",
        imitates: "a merge adds a step's out, weighed by a running LSE that never learns of the step",
        source: MERGES,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| restyle(schedule, MergeStyle::Weighted { product_rounded: false }),
    },
    Fault {
        id: "max-logit-of-one-rank",
        imitates: "the largest logit is that of the rank's own pairs: it is never reduced over ranks",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Checker, Structure],
        edit: |_, schedule| {
            let max = |work: &Work| matches!(work, Work::AllReduce { reduction: Reduction::Max, .. });
            remove_last(schedule, max);
        },
    },
    Fault {
        id: "max-logit-summed",
        imitates: "a statistic that is a maximum is reduced like a sum",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::AllReduce { reduction, .. } = work {
                    *reduction = Reduction::Sum;
                }
            }
        },
    },
    Fault {
        id: "partial-outs-in-16-bit",
        imitates: "each step's out is rounded to 16 bits before it is merged",
        source: "https://github.com/zhuzilin/ring-flash-attention/issues/42",
        entries: &[190],
        caught_by: &[Envelope],
        edit: |_, schedule| {
            let mut partial = vec![false; schedule.buffers.len()];
            for work in works(schedule) {
                if let Work::Merge(merge) = work {
                    partial[merge.step_out.0] = true;
                    partial[merge.out.0] = true;
                }
            }
            narrow(schedule, &partial);
        },
    },
    Fault {
        id: "gradient-sums-in-16-bit",
        imitates: "travelling gradients are kept and added in 16 bits",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/4072701",
        entries: &[100],
        caught_by: &[Envelope],
        edit: |_, schedule| {
            let mut sums = vec![false; schedule.buffers.len()];
            for work in works(schedule) {
                if let Work::Accumulate { from, to, .. } = work {
                    (sums[from.0], sums[to.0]) = (true, true);
                }
            }
            narrow(schedule, &sums);
        },
    },
    Fault {
        id: "softcap-missing",
        imitates: "an option is taken by the wrapper and not passed down",
        source: "https://github.com/Dao-AILab/flash-attention/commit/386e3911",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| attends(schedule).for_each(|attend| attend.call.softmax.softcap = None),
    },
    Fault {
        id: "scale-of-the-module",
        imitates: "a fast path takes the module's constant for the scale that the layer adjusted",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[13],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| attends(schedule).for_each(|attend| attend.call.softmax.scale = 1.0),
    },
];

fn restyle(schedule: &mut Schedule, to: MergeStyle) {
    for work in works(schedule) {
        if let Work::Merge(merge) = work {
            merge.style = to;
        }
    }
}

/// Keeps the named scratch in 16 bits.
fn narrow(schedule: &mut Schedule, named: &[bool]) {
    let scratch = |buffer: &Buffer| buffer.role == Role::Scratch && buffer.format == Format::F32;
    for (buffer, _) in
        schedule.buffers.iter_mut().zip(named).filter(|(buffer, named)| **named && scratch(buffer))
    {
        buffer.format = Format::Bf16;
    }
}
