//! Faults of lengths and offsets: real for padded, global for local, or one side's for the other's.

use std::collections::BTreeMap;

use seamproof_oracle::{Run, Sequence, Side, TensorName};

use super::edit::{Passes, attends, backwards, calls, lie_at_sums, rebuild, rewrite, segments, works};
use super::fault::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{Attend, AttendBackward, BufferId, Operation, Region, Section, Step, Work};
use crate::{AttentionCall, Segment};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "padded-keys-as-real",
        imitates: "padded offsets are passed as the real ones too: padding becomes visible keys",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[4],
        caught_by: &[Checker, Structure],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.sequences.iter_mut().for_each(|sequence| sequence.kv.len = sequence.kv.span);
            });
        },
    },
    Fault {
        id: "padded-queries-as-real",
        imitates: "steps keep rows past the last real one: padding queries get an output",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1012",
        entries: &[26],
        caught_by: &[Checker, Structure],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.sequences.iter_mut().for_each(|sequence| sequence.q.len = sequence.q.span);
            });
        },
    },
    Fault {
        id: "padded-offsets-in-both-roles",
        imitates: "one array of padded offsets is passed for both kinds: padding of queries and of keys is attended",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[4],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                for Sequence { q, kv, .. } in &mut fields.sequences {
                    (q.len, kv.len) = (q.span, kv.span);
                }
            });
        },
    },
    Fault {
        id: "tail-padding-undetected",
        imitates: "padding is looked for between sequences only: of the last one each rank takes an equal part",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3331",
        entries: &[23],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            let parts = 2 * problem.parallel.size();
            let Some((last, others)) = problem.sequences.split_last() else { return };
            if others.iter().all(|sequence| sequence.kv.len == sequence.kv.span) && last.kv.len < last.kv.span
            {
                rebuild(problem, schedule, Passes::Both, |fields| {
                    if let Some(Sequence { q, kv, .. }) = fields.sequences.last_mut() {
                        (q.len, kv.len) = (q.len / parts * parts, kv.len / parts * parts);
                    }
                });
            }
        },
    },
    Fault {
        id: "global-offsets-on-a-shard",
        imitates: "offsets of the whole pack index a rank's part of it",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[5],
        caught_by: &[Checker, Crash],
        edit: |problem, schedule| {
            let cp = problem.parallel.size();
            segments(schedule, |segment| segment.q.offset *= cp);
        },
    },
    Fault {
        id: "global-offsets-in-the-backward",
        imitates: "the forward has the offsets of the rank, and the backward those of the whole pack",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[5],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            let cp = problem.parallel.size();
            let segments = backwards(schedule).flat_map(|attend| &mut attend.call.segments);
            segments.for_each(|segment| segment.q.offset *= cp);
        },
    },
    Fault {
        id: "kv-lengths-from-q",
        imitates: "equal maxima are taken for self attention: keys get the queries' lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1069",
        entries: &[39],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.sequences.iter_mut().for_each(|Sequence { q, kv, .. }| kv.len = q.len.min(kv.span));
            });
        },
    },
    Fault {
        id: "kv-sliced-by-q",
        imitates: "a fast path cuts keys at the number of queries: a decode step sees the first cached token",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[12],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            segments(schedule, |segment| {
                let queries = segment.q.len;
                segment.kv.iter_mut().for_each(|run| run.len = run.len.min(queries));
            });
        },
    },
    Fault {
        id: "offsets-from-lengths",
        imitates: "first rows are a running sum of real lengths; the layout's offsets are never read",
        source: "https://github.com/NVIDIA/cudnn-frontend/issues/737",
        entries: &[42],
        caught_by: &[Checker, Structure, Poison],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let mut end = 0;
                for run in call.segments.iter_mut().flat_map(|segment| &mut segment.kv) {
                    run.offset = end;
                    end += run.len;
                }
            }
        },
    },
    Fault {
        id: "query-offsets-from-lengths",
        imitates: "first rows of queries are a running sum of real lengths, those of keys are the padded ones",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |_, schedule| calls(schedule).for_each(|call| lie_at_sums(call, &[Side::Q])),
    },
    Fault {
        id: "offsets-from-lengths-in-the-backward",
        imitates: "the forward has padded offsets, and in the backward rows lie at running sums of real lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |_, schedule| {
            backwards(schedule).for_each(|attend| lie_at_sums(&mut attend.call, &[Side::Q, Side::Kv]));
        },
    },
    Fault {
        id: "one-call-without-padded-offsets",
        imitates: "padded offsets do not reach one call of a ring, that on halves of an earlier rank's keys: its rows lie closer",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |_, schedule| {
            for work in works(schedule) {
                if let Work::Attend(Attend { step, call, .. })
                | Work::AttendBackward(AttendBackward { step, call, .. }) = work
                    && matches!(step, Step::Ring { section: Section::Lower, .. })
                {
                    without_padding_between(call);
                }
            }
        },
    },
    Fault {
        id: "kv-layout-from-q",
        imitates: "keys are read in the layout of the queries: interleaved for blocked rows, or the reverse",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| laid_out_as_q(&mut fields.sequences));
        },
    },
    Fault {
        id: "sbhd-on-a-shard-as-thd",
        imitates: "a rank's keys of an interleaved batch are taken to follow each other",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |problem, schedule| {
            let lanes = problem.sequences.iter().map(|sequence| sequence.kv.step).max().unwrap_or(1);
            if problem.parallel.size() > 1 && lanes > 1 {
                segments(schedule, |segment| segment.kv.iter_mut().for_each(|run| run.step /= lanes));
            }
        },
    },
    Fault {
        id: "tail-becomes-a-sequence",
        imitates: "the buffer's capacity is appended as an offset: rows past the last sequence are attended",
        source: "https://github.com/NVIDIA/Megatron-LM/commit/1a244a5f19",
        entries: &[31],
        caught_by: &[Checker, Structure, Poison],
        edit: |_, schedule| {
            let rows: Vec<usize> = schedule.buffers.iter().map(|buffer| buffer.rows).collect();
            for attend in attends(schedule) {
                let runs = || attend.call.segments.iter().map(|segment| segment.q);
                let end = runs().map(|run| run.offset + run.span * run.step).max().unwrap_or(0);
                let tail = rows[attend.q.0].saturating_sub(end).min(rows[attend.k.0]);
                let kv = vec![Run::packed(rows[attend.k.0] - tail, tail, tail)];
                if tail > 0 {
                    let q = Run::packed(end, tail, tail);
                    attend.call.segments.push(Segment {
                        q,
                        kv,
                        lo: None,
                        hi: None,
                        prefix: 0,
                        sink_tokens: 0,
                    });
                }
            }
        },
    },
    Fault {
        id: "first-offset-taken-for-zero",
        imitates: "rows are found by lengths alone, as though the first sequence began at row 0",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[18],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let first = call.segments.iter().map(|segment| segment.q.offset).min().unwrap_or(0);
                call.segments.iter_mut().for_each(|segment| segment.q.offset -= first);
            }
        },
    },
    Fault {
        id: "tokens-leak-across-a-border",
        imitates: "borders come from real offsets, rows from padded ones: a sequence reads a row of the next one",
        source: "https://github.com/NVIDIA/Megatron-LM/pull/4495",
        entries: &[30],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let next: Vec<Option<Run>> =
                    call.segments.iter().skip(1).map(|segment| segment.kv.first().copied()).collect();
                for (segment, next) in call.segments.iter_mut().zip(next) {
                    let leaked = next.filter(|run| run.len > 0 && !segment.kv.contains(run));
                    segment.kv.extend(leaked.map(|run| Run::packed(run.offset, 1, 1)));
                }
            }
        },
    },
    Fault {
        id: "tail-key-dropped",
        imitates: "an odd length is treated as the even one below it",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/1929",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            segments(schedule, |segment| segment.kv.iter_mut().for_each(|run| run.len -= run.len % 2));
        },
    },
    Fault {
        id: "output-sized-by-real-lengths",
        imitates: "the output has the sum of the real lengths as rows, not those of the padded input",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[2],
        caught_by: &[Checker, Structure, Crash],
        edit: |_, schedule| {
            for placed in schedule.placements.iter().filter(|placed| placed.tensor == TensorName::Out) {
                let real = placed.rows.iter().map(|run| run.local.len).sum();
                schedule.buffers[placed.buffer.0].rows = real;
            }
        },
    },
    Fault {
        id: "output-with-the-dim-of-keys",
        imitates: "the output is allocated like the queries, although values have another head dimension",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: &[Checker, Structure, Crash],
        edit: |problem, schedule| {
            for placed in schedule.placements.iter().filter(|placed| placed.tensor == TensorName::Out) {
                schedule.buffers[placed.buffer.0].dim = problem.dims.qk;
            }
        },
    },
    Fault {
        id: "host-decides-on-padding",
        imitates: "whether there is padding is decided on the host, which reads a device's offsets in each call",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[7, 22],
        caught_by: &[Checker],
        edit: |_, schedule| {
            let rows = |buffer: BufferId| schedule.buffers[buffer.0].rows.min(1);
            let read =
                |buffer| Region { buffer, rows: Run::packed(0, rows(buffer), rows(buffer)), heads: 0..1 };
            let inputs: BTreeMap<BufferId, Region> =
                (0..schedule.buffers.len()).map(BufferId).map(|id| (id, read(id))).collect();
            rewrite(schedule, |_, operation| {
                let read = match &operation.work {
                    Work::Attend(attend) => Some(Work::HostRead(inputs[&attend.q].clone())),
                    _ => None,
                };
                read.map(|work| Operation { stream: operation.stream, work }).into_iter().chain([operation])
            });
        },
    },
];

/// Moves each run of a call up by the padding of those before it.
fn without_padding_between(call: &mut AttentionCall) {
    let [mut queries, mut keys] = [0; 2];
    let close_up = |run: &mut Run, padding: &mut usize| {
        run.offset -= run.offset.min(*padding);
        *padding += run.span - run.len;
    };
    for Segment { q, kv, .. } in &mut call.segments {
        close_up(q, &mut queries);
        kv.iter_mut().for_each(|run| close_up(run, &mut keys));
    }
}

/// Puts the keys of equal spans where they would lie in the layout of the queries: side by side where queries of one
/// position do, and one sequence after the other where they do not.
fn laid_out_as_q(sequences: &mut [Sequence]) {
    let (batch, first) = (sequences.len(), sequences.iter().map(|sequence| sequence.kv.offset).min());
    let span = sequences.first().map_or(0, |sequence| sequence.kv.span);
    let Some(first) = first.filter(|_| sequences.iter().all(|sequence| sequence.kv.span == span)) else {
        return;
    };
    for (index, Sequence { q, kv, .. }) in sequences.iter_mut().enumerate() {
        match (q.step > 1, kv.step > 1) {
            (true, false) => (kv.offset, kv.step) = (first + index, batch),
            (false, true) => (kv.offset, kv.step) = (first + index * span, 1),
            _ => {}
        }
    }
}
