//! Lengths and offsets: real for padded, global for local, one side's for the other's.

use seamproof_oracle::{Run, Sequence};

use super::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::edit::{Passes, attends, calls, rebuild, segments};
use super::{Edit, Fault};
use crate::Segment;

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "padded-keys-as-real",
        imitates: "padded offsets are passed as the real ones too: padding becomes visible keys",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
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
        caught_by: &[Checker, Structure],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.sequences.iter_mut().for_each(|sequence| sequence.q.len = sequence.q.span);
            });
        },
    },
    Fault {
        id: "lengths-floored",
        imitates: "a rank's length is floor(length / cp): the last tokens of a sequence vanish (D8)",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/1930",
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            let cp = problem.parallel.size();
            rebuild(problem, schedule, Passes::Both, |fields| {
                for Sequence { q, kv, .. } in &mut fields.sequences {
                    (q.len, kv.len) = (q.len / cp * cp, kv.len / cp * cp);
                }
            });
        },
    },
    Fault {
        id: "tail-padding-undetected",
        imitates: "padding is looked for between sequences only: of the last one each rank takes an equal part",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3331",
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
        caught_by: &[Checker, Crash],
        edit: |problem, schedule| {
            let cp = problem.parallel.size();
            segments(schedule, |segment| segment.q.offset *= cp);
        },
    },
    Fault {
        id: "kv-lengths-from-q",
        imitates: "equal maxima are taken for self attention: keys get the queries' lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1069",
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
        id: "tail-becomes-a-sequence",
        imitates: "the buffer's capacity is appended as an offset: rows past the last sequence are attended",
        source: "https://github.com/NVIDIA/Megatron-LM/commit/1a244a5f19",
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
                    attend.call.segments.push(Segment { q, kv, lo: None, hi: None });
                }
            }
        },
    },
    Fault {
        id: "first-offset-taken-for-zero",
        imitates: "rows are found by lengths alone, as though the first sequence began at row 0",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
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
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            segments(schedule, |segment| segment.kv.iter_mut().for_each(|run| run.len -= run.len % 2));
        },
    },
];
