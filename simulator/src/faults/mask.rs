//! Faults of masks: a key too few or too many, another corner, one shift for all sequences.

use seamproof_oracle::{
    Alignment, BORDERS_MAX, Balance, Blocks, Borders, Problem, ProblemFields, Run, runs_of,
};

use super::edit::{Passes, attends, calls, rebuild, segments, works};
use super::fault::Catcher::{Checker, Envelope};
use super::fault::{Edit, Fault};
use crate::schedule::{Attend, AttendBackward, Schedule, Section, Step, Work};
use crate::{AttentionCall, Segment};

/// The campaign's canary. The real bug lay below the tolerance of the very tests that were its guard.
pub const WINDOW_OFF_BY_ONE: Fault<Edit> = Fault {
    id: "window-off-by-one",
    imitates: "the left bound of each window is one key too narrow",
    source: "https://github.com/NVIDIA/TransformerEngine/pull/1212",
    entries: &[80],
    caught_by: &[Checker, Envelope],
    edit: |_, schedule| segments(schedule, |segment| segment.lo = segment.lo.map(|lo| lo + 1)),
};

pub(super) const FAULTS: &[Fault<Edit>] = &[
    WINDOW_OFF_BY_ONE,
    Fault {
        id: "window-one-too-wide",
        imitates: "an inclusive bound is taken for an exclusive one: one key too many on the left",
        source: "https://github.com/huggingface/transformers/issues/29623",
        entries: &[82],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| segments(schedule, |segment| segment.lo = segment.lo.map(|lo| lo - 1)),
    },
    Fault {
        id: "right-bound-one-short",
        imitates: "≥ for > at the right bound: the last visible key of each query is lost",
        source: "https://github.com/SandAI-org/MagiAttention/pull/117",
        entries: &[90],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| segments(schedule, |segment| segment.hi = segment.hi.map(|hi| hi - 1)),
    },
    Fault {
        id: "bottom-right-for-top-left",
        imitates: "after an upgrade causal means the other corner: bottom-right where top-left was asked",
        source: "https://github.com/Dao-AILab/flash-attention/commit/9e5e8bc9",
        entries: &[84],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |f| f.mask.align = Alignment::BottomRight);
        },
    },
    Fault {
        id: "top-left-for-bottom-right",
        imitates: "the mask is aligned to the top left corner where bottom-right was asked",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/960",
        entries: &[84],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |f| f.mask.align = Alignment::TopLeft);
        },
    },
    Fault {
        id: "alignment-from-padded-lengths",
        imitates: "the bottom right corner is found from padded lengths, not from real ones",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1354",
        entries: &[94],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| shifted_by_padding(problem, schedule),
    },
    Fault {
        id: "visible-prefix-stops-at-diagonal",
        imitates: "the gathered keys of a chunk end at its diagonal: the right half of the window is cut off",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[17],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            let right = i64::from(problem.mask.right.unwrap_or(0));
            segments(schedule, |segment| {
                let last = segment.hi.map(|hi| segment.q.len as i64 + hi - right);
                if let (Some(last), [run]) = (last, segment.kv.as_mut_slice()) {
                    run.len = run.len.min(last.max(0) as usize);
                }
            });
        },
    },
    Fault {
        id: "document-border-one-late",
        imitates: "the border of each document is one key late: its first key is hidden from all its later queries",
        source: "https://github.com/swiss-ai/Megatron-LM/pull/40",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.mask.blocks = moved_borders(fields.mask.blocks, |border| border + 1);
            });
        },
    },
    Fault {
        id: "documents-joined",
        imitates: "packed documents are not told from their positions, and see each other",
        source: "https://github.com/huggingface/transformers/pull/46634",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.mask.blocks = fields.mask.blocks.filter(|blocks| matches!(blocks, Blocks::Chunks(_)));
            });
        },
    },
    Fault {
        id: "prefix-taken-as-causal",
        imitates: "the prefix gets the causal triangle of the rest: its queries miss half of its keys",
        source: "https://github.com/vllm-project/vllm-gaudi/pull/1797",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, |f| f.mask.prefix = 0),
    },
    Fault {
        id: "prefix-ends-one-row-early",
        imitates: "the index of the prefix is one less than its length: the last query before it is causal",
        source: "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/167",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| attends(schedule).for_each(|attend| last_row_causal(&mut attend.call)),
    },
    Fault {
        id: "prefix-of-the-first-document",
        imitates: "there is a prefix for the rows of a batch, and documents after the first of a row have none",
        source: "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/52",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| prefix_of_first_documents(problem, schedule),
    },
    Fault {
        id: "sink-tokens-forgotten",
        imitates: "the first tokens are kept in the cache alone: past the window, a long prompt's queries miss them",
        source: "https://github.com/tomaarsen/attention_sinks/issues/17",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, |f| f.mask.sink_tokens = 0),
    },
    Fault {
        id: "sink-tokens-past-the-diagonal",
        imitates: "the mask is lifted for sink tokens by their number alone: early queries see those of the future",
        source: "https://github.com/ROCm/rocm-libraries/pull/6914",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.mask.prefix = fields.mask.prefix.max(fields.mask.sink_tokens);
            });
        },
    },
    Fault {
        id: "sink-tokens-of-the-pack",
        imitates: "sink tokens are counted among all packed keys: later sequences see those of the first one",
        source: "https://github.com/meta-pytorch/attention-gym/pull/148",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| calls(schedule).for_each(share_sink_tokens),
    },
    Fault {
        id: "chunks-dropped",
        imitates: "context parallelism replaces the mask of each layer by a causal flag, those of chunks too",
        source: "https://github.com/huggingface/accelerate/pull/4177",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Both, |fields| {
                fields.mask.blocks =
                    fields.mask.blocks.filter(|blocks| matches!(blocks, Blocks::Documents(_)));
            });
        },
    },
    Fault {
        id: "chunks-counted-on-each-rank",
        imitates: "chunks are counted from the first row of a rank's piece, not from the first key of the sequence",
        source: "https://github.com/nod-ai/amd-shark-ai/pull/1452",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, chunks_of_ranks),
    },
    Fault {
        id: "causal-dropped",
        imitates: "the causal flag has no effect",
        source: "https://github.com/jax-ml/jax/issues/19237",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, open_right),
    },
    Fault {
        id: "window-dropped",
        imitates: "windowed layers run without their window: an attribute was renamed",
        source: "https://github.com/PrimeIntellect-ai/prime-rl/pull/2828",
        entries: &[92],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, |f| f.mask.left = None),
    },
    Fault {
        id: "right-window-taken-for-causal",
        imitates: "a balanced schedule assumes causal skipping, whatever the mask shows to the right",
        source: "https://github.com/pytorch/pytorch/issues/141429",
        entries: &[95],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Both, |f| f.mask.right = Some(0)),
    },
    Fault {
        id: "backward-aligned-top-left",
        imitates: "the forward aligns bottom-right, the backward as though lengths were equal",
        source: "https://github.com/xlite-dev/ffpa-attn/pull/300",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| {
            rebuild(problem, schedule, Passes::Backward, |f| f.mask.align = Alignment::TopLeft);
        },
    },
    Fault {
        id: "backward-not-causal",
        imitates: "the causal flag is consulted in one direction only",
        source: "https://github.com/triton-lang/triton/issues/4541",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Backward, open_right),
    },
    Fault {
        id: "backward-without-window",
        imitates: "arguments of the forward are neither saved nor forwarded: gradients ignore the user's mask",
        source: "https://github.com/Dao-AILab/flash-attention/issues/2424",
        entries: &[127],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Backward, |f| f.mask.left = None),
    },
    Fault {
        id: "backward-without-sink-tokens",
        imitates: "sink tokens are made for generation: the backward knows the window alone",
        source: "https://github.com/huggingface/transformers/issues/26553",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| rebuild(problem, schedule, Passes::Backward, |f| f.mask.sink_tokens = 0),
    },
    Fault {
        id: "stripes-masked-by-one-band",
        imitates: "a ring's step is causal, or causal without the diagonal, as between stripes of one row: of wider \
                   stripes, the pairs beside the diagonal are lost",
        source: "https://github.com/lucidrains/ring-attention-pytorch/issues/11",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| edges(schedule, |segment| segment.hi = segment.lo.map(|lo| lo - 1)),
    },
    Fault {
        id: "cut-stripes-seen-whole",
        imitates: "blocks that a mask cuts are taken for full ones, to which no mask is applied: hidden pairs are seen",
        source: "https://github.com/pytorch/pytorch/blob/main/torch/nn/attention/flex_attention.py",
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |_, schedule| edges(schedule, |segment| (segment.lo, segment.hi) = (None, None)),
    },
];

/// Takes the last query that a prefix widens in each segment out of it: it and all after it see their band alone.
fn last_row_causal(call: &mut AttentionCall) {
    let cut = |segment: &Segment| {
        let mut bands = segment.bands();
        if let [first, rest] = &mut bands[..]
            && rest.q.len > 0
        {
            first.q.len -= 1;
            first.q.span -= 1;
            rest.q = Run {
                offset: rest.q.offset - rest.q.step,
                len: rest.q.len + 1,
                span: rest.q.span + 1,
                ..rest.q
            };
            (rest.lo, rest.hi) = (rest.lo.map(|lo| lo - 1), rest.hi.map(|hi| hi - 1));
        }
        bands
    };
    call.segments = call.segments.iter().flat_map(cut).collect();
}

/// Leaves a prefix to the first document of each sequence, on one rank.
fn prefix_of_first_documents(problem: &Problem, schedule: &mut Schedule) {
    if problem.parallel.size() > 1 || problem.mask.blocks.is_none() {
        return;
    }
    let first: Vec<usize> = problem.sequences.iter().map(|sequence| sequence.kv.offset).collect();
    let begins = |segment: &Segment| segment.kv.iter().any(|run| first.contains(&run.offset));
    segments(schedule, |segment| segment.prefix = if begins(segment) { segment.prefix } else { 0 });
}

/// Puts the first segment's sink tokens in the place of those of all others.
fn share_sink_tokens(call: &mut AttentionCall) {
    let rows = |segment: &Segment| segment.kv.iter().flat_map(Run::real_rows).collect::<Vec<_>>();
    let mut with_sink_tokens = call.segments.iter_mut().filter(|segment| segment.sink_tokens > 0);
    let Some(first) = with_sink_tokens.next().map(|first| rows(first)) else { return };
    for segment in with_sink_tokens {
        let own = rows(segment);
        let count = segment.sink_tokens.min(first.len()).min(own.len());
        segment.kv = runs_of(first[..count].iter().chain(&own[count..]).copied());
    }
}

/// Returns documents with other borders. Chunks stay.
fn moved_borders(blocks: Option<Blocks>, to: fn(u32) -> u32) -> Option<Blocks> {
    let Some(Blocks::Documents(borders)) = blocks else { return blocks };
    let keys: Vec<u32> = borders.keys().iter().map(|&border| to(border)).collect();
    Borders::new(&keys).ok().map(Blocks::Documents)
}

/// Cuts chunks where the ranks' pieces of the longest sequence begin, and counts them from there, as far as there may
/// be so many documents.
fn chunks_of_ranks(fields: &mut ProblemFields) {
    let Some(Blocks::Chunks(length)) = fields.mask.blocks else { return };
    let pieces = match fields.parallel.balance {
        Balance::Contiguous => fields.parallel.size(),
        Balance::DualChunk => 2 * fields.parallel.size(),
        Balance::Striped { .. } => return,
    };
    let piece = fields.sequences.iter().map(|sequence| sequence.kv.span).max().unwrap_or(0) / pieces;
    let of_piece = |index: usize| (index * piece..(index + 1) * piece).step_by(length.get() as usize);
    let borders = (0..pieces).flat_map(of_piece).skip(1).take(BORDERS_MAX);
    let borders: Vec<u32> = borders.filter_map(|border| u32::try_from(border).ok()).collect();
    if fields.parallel.size() > 1
        && let Ok(borders) = Borders::new(&borders)
    {
        fields.mask.blocks = Some(Blocks::Documents(borders));
    }
}

/// Edits the segments of the edges of stripes, in both passes.
fn edges(schedule: &mut Schedule, edit: impl FnMut(&mut Segment)) {
    let is_edge = |step: &Step| matches!(step, Step::Ring { section: Section::Edge, .. });
    let calls = works(schedule).filter_map(|work| match work {
        Work::Attend(Attend { step, call, .. }) if is_edge(step) => Some(call),
        Work::AttendBackward(AttendBackward { step, call, .. }) if is_edge(step) => Some(call),
        _ => None,
    });
    calls.flat_map(|call| &mut call.segments).for_each(edit);
}

fn open_right(fields: &mut ProblemFields) {
    fields.mask.right = None;
}

/// Moves a bottom-right mask by the difference between the sides' padding, if it is one number for all sequences.
fn shifted_by_padding(problem: &Problem, schedule: &mut Schedule) {
    let padding = |run: seamproof_oracle::Run| (run.span - run.len) as i64;
    let mut shifts = problem.sequences.iter().map(|sequence| padding(sequence.kv) - padding(sequence.q));
    let Some(shift) = shifts.next().filter(|&first| shifts.all(|shift| shift == first)) else { return };
    if problem.mask.align == Alignment::BottomRight {
        segments(schedule, |segment| {
            segment.lo = segment.lo.map(|lo| lo + shift);
            segment.hi = segment.hi.map(|hi| hi + shift);
        });
    }
}
