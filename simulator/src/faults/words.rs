//! Faults of what a caller says beside lengths and offsets: a word for padding between sequences, and the largest
//! lengths.
//!
//! Without the word a subject looks for padding itself. A subject that ignores the word is right as long as it looks
//! well; what that costs is `host-decides-on-padding`.

use seamproof_oracle::{Algorithm, Balance, Form, FormError, Problem, Run, Side};

use super::edit::{attends, backwards, calls, lie_at_sums, segments};
use super::fault::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::Segment;

/// Source of the word, and of subjects that look for padding or do not.
const WORD: &str = "https://github.com/NVIDIA/TransformerEngine/pull/2596";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "padding-looked-for-in-q-alone",
        imitates: "nothing is said of padding, and only the offsets of q are compared: keys lie at sums of lengths",
        source: WORD,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            if problem.form.is_plain() && differing_side(problem) == Some(Side::Kv) {
                calls(schedule).for_each(|call| lie_at_sums(call, &[Side::Kv]));
            }
        },
    },
    Fault {
        id: "padding-looked-for-in-maxima",
        imitates: "nothing is said of padding, and only the longest lengths are compared: rows lie at sums of lengths",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3331",
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            let alike = [Side::Q, Side::Kv].into_iter().all(|side| {
                let [real, padded] = maxima(problem, side);
                real == padded
            });
            if problem.form.is_plain() && alike && differing_side(problem).is_some() {
                calls(schedule).for_each(|call| lie_at_sums(call, &[Side::Q, Side::Kv]));
            }
        },
    },
    Fault {
        id: "said-padding-dropped",
        imitates: "the caller says that there is padding, and a path has that word fixed to false",
        source: WORD,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            if problem.form.pad_between_seqs() == Some(true) {
                calls(schedule).for_each(|call| lie_at_sums(call, &[Side::Q, Side::Kv]));
            }
        },
    },
    Fault {
        id: "said-padding-forgotten-in-the-backward",
        imitates: "the caller's word for padding is not kept for the backward, which takes it for false",
        source: WORD,
        entries: &[],
        caught_by: &[Checker, Structure, Poison, Envelope, Crash],
        edit: |problem, schedule| {
            if problem.form.pad_between_seqs() == Some(true) {
                backwards(schedule).for_each(|attend| lie_at_sums(&mut attend.call, &[Side::Q, Side::Kv]));
            }
        },
    },
    Fault {
        id: "said-padding-believed-over-lengths",
        imitates: "the caller says that there is padding, and a full sequence loses its last key to it",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3487",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            let full = |run: &Run| run.len > 0 && run.len == run.span;
            if problem.form.pad_between_seqs() == Some(true) {
                segments(schedule, |segment| {
                    segment.kv.iter_mut().filter(|run| full(run)).for_each(|run| run.len -= 1);
                });
            }
        },
    },
    Fault {
        id: "maximum-of-q-for-kv",
        imitates: "the loop over keys ends at the largest number of queries, of whatever sequence",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1069",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let most = call.segments.iter().map(|segment| segment.q.len).max().unwrap_or(0);
                call.segments.iter_mut().for_each(|segment| end_keys_at(segment, most));
            }
        },
    },
    Fault {
        id: "maximum-too-small",
        imitates: "the grid covers the largest length of an earlier batch: the longest sequence's last row has no block",
        source: "https://github.com/vllm-project/flash-attention/issues/18",
        entries: &[],
        caught_by: &[Checker, Structure, Envelope],
        edit: |_, schedule| {
            for call in calls(schedule) {
                let most = call.segments.iter().map(|segment| segment.q.len).max().unwrap_or(0);
                let longest = call.segments.iter_mut().filter(|segment| most > 0 && segment.q.len == most);
                longest.for_each(|Segment { q, .. }| (q.len, q.span) = (most - 1, most - 1));
            }
        },
    },
    Fault {
        id: "real-maximum-for-padded-rows",
        imitates: "the largest length counts real rows alone: rows of padding past it are not cleared",
        source: "https://github.com/sgl-project/sglang/issues/30107",
        entries: &[48],
        caught_by: &[Checker, Structure],
        edit: |problem, schedule| {
            let [real, _] = maxima(problem, Side::Q);
            attends(schedule)
                .flat_map(|attend| &mut attend.call.segments)
                .for_each(|Segment { q, .. }| q.span = q.span.min(real.max(q.len)));
        },
    },
    Fault {
        id: "real-maximum-divided-by-ranks",
        imitates: "the largest real length is divided by the ranks and rounded down: a rank's last rows are past it",
        source: "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
        entries: &[],
        caught_by: &[Checker, Structure, Envelope],
        edit: |problem, schedule| {
            let [q, kv] = [Side::Q, Side::Kv].map(|side| maxima(problem, side)[0]);
            match (problem.parallel.algorithm, problem.parallel.size()) {
                (Algorithm::Ring, cp @ 2..) => segments(schedule, |segment| {
                    segment.q.len = segment.q.len.min(q / cp);
                    end_keys_at(segment, kv / cp);
                }),
                // A step has one chunk of the queries, and keys of all ranks.
                (Algorithm::AllGather, cp @ 2..) => {
                    let chunks = if problem.parallel.balance == Balance::DualChunk { 2 * cp } else { cp };
                    segments(schedule, |segment| segment.q.len = segment.q.len.min(q / chunks));
                }
                _ => {}
            }
        },
    },
];

/// Returns the first side on which rows lie elsewhere than at the sums of the real lengths.
fn differing_side(problem: &Problem) -> Option<Side> {
    match Form::NoPadBetweenSeqs.check(problem) {
        Err(FormError::Run { side, .. }) => Some(side),
        _ => None,
    }
}

/// Returns the largest real length and the largest span of a side.
fn maxima(problem: &Problem, side: Side) -> [usize; 2] {
    let runs =
        problem.sequences.iter().map(|sequence| if side == Side::Q { sequence.q } else { sequence.kv });
    runs.fold([0; 2], |[len, span], run| [len.max(run.len), span.max(run.span)])
}

/// Cuts the keys of a segment past a number of them.
fn end_keys_at(segment: &mut Segment, most: usize) {
    let mut left = most;
    for run in &mut segment.kv {
        run.len = run.len.min(left);
        left -= run.len;
    }
}
