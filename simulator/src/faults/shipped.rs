//! TransformerEngine's defects as shipped: its own index algebra, planted in a right schedule.
//!
//! These faults need the cases for which its context parallelism is made: dual-chunk cuts (stripes where a fault says
//! this) and self-attention (equal real and padded lengths of both sides). Elsewhere they change nothing.

use std::collections::BTreeMap;

use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Algorithm, Balance, Problem, Run, Sequence};

use super::edit::{attends, each_reorder};
use super::fault::Catcher::{Checker, Crash, Envelope, Poison, Structure};
use super::fault::{Edit, Fault};
use crate::schedule::{
    Attend, AttendBackward, BufferId, Operation, RankProgram, Role, RowPair, Schedule, Section, Step, Work,
    build,
};
use crate::shard::ShardedSide;
use crate::{AttentionCall, Segment};

/// The context-parallel code with the index algebra.
const CONTEXT_PARALLEL: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py";
/// The kernels that reorder rows.
const REORDER: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/fused_attn/context_parallel.cu";
/// The helpers of the JAX side.
const JAX: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/cpp_extensions/attention.py";

pub(super) const FAULTS: &[Fault<Edit>] = &[
    Fault {
        id: "batch-wide-window-shift",
        imitates: "all-gather adjusts the window once for the batch, by its longest sequence (D1)",
        source: CONTEXT_PARALLEL,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| batch_wide_window(problem, schedule, true),
    },
    Fault {
        id: "adjusted-window-at-top-left",
        imitates: "all-gather hands a window adjusted to the bottom right corner to a kernel told top-left (D2)",
        source: CONTEXT_PARALLEL,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: |problem, schedule| batch_wide_window(problem, schedule, false),
    },
    Fault {
        id: "all-gather-real-offsets",
        imitates: "a kernel that knows no padding gets running sums of visible lengths as rows of gathered keys (D3)",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2829",
        entries: &[20],
        caught_by: &[Checker, Structure, Poison],
        edit: real_offsets,
    },
    Fault {
        id: "striped-offsets-miss-a-run",
        imitates: "runs of a stripe are told apart by gaps of positions alone: where the next sequence goes on with the \
                   next position, its offset is missing (D4)",
        source: JAX,
        entries: &[],
        caught_by: &[Checker, Crash, Structure, Envelope],
        edit: missing_offset,
    },
    Fault {
        id: "bound-of-minus-one-opens",
        imitates: "a ring step's left bound that comes out as −1 is the mark of an unlimited one (D5)",
        source: JAX,
        entries: &[],
        caught_by: &[Checker, Envelope],
        edit: opened_window,
    },
    Fault {
        id: "lengths-floored",
        imitates: "a rank's length is floor(running sum / cp), a half's floor(running sum / 2·cp): tokens vanish (D8)",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/1930",
        entries: &[24],
        caught_by: &[Checker, Structure, Poison, Envelope],
        edit: floored_lengths,
    },
    Fault {
        id: "reorder-writes-rows-twice",
        imitates: "a buffer longer than its last offset: the reorder takes its tail for more of the last sequence (D9)",
        source: REORDER,
        entries: &[],
        caught_by: &[Checker, Structure, Poison],
        edit: |problem, schedule| reordered_by(problem, schedule, |slot| slot.span),
    },
    Fault {
        id: "reorder-loses-rows",
        imitates: "the reorder is given offsets that 2·cp does not divide: some rows are written twice, some never (D10)",
        source: REORDER,
        entries: &[],
        caught_by: &[Checker, Structure, Poison],
        edit: |problem, schedule| {
            let cp = problem.parallel.size();
            reordered_by(problem, schedule, |slot| slot.len / cp);
        },
    },
];

fn is(problem: &Problem, algorithm: Algorithm, balance: Balance) -> bool {
    let same = |sequence: &Sequence| (sequence.q.len, sequence.q.span) == (sequence.kv.len, sequence.kv.span);
    problem.parallel.algorithm == algorithm
        && problem.parallel.balance == balance
        && problem.sequences.iter().all(same)
}

/// Returns the runs of queries of each buffer that holds queries.
fn placed_queries(schedule: &Schedule) -> BTreeMap<BufferId, Vec<PlacedRun>> {
    let queries =
        schedule.placements.iter().filter(|placed| placed.tensor == seamproof_oracle::TensorName::Q);
    queries.map(|placed| (placed.buffer, placed.rows.clone())).collect()
}

fn placed_at(runs: &[PlacedRun], segment: &Segment) -> Option<PlacedRun> {
    runs.iter().copied().find(|run| run.local.span > 0 && run.local.offset == segment.q.offset)
}

/// Sets the window of each chunk as `get_kv_seq_info_after_all_gather` does. Keys go up to the batch's chunk end plus
/// the right window. Bounds count from the bottom right corner of the keys that each sequence shows, or from the top
/// left.
fn batch_wide_window(problem: &Problem, schedule: &mut Schedule, bottom_right: bool) {
    let mask = problem.mask;
    let (Some(left), Some(right)) = (mask.left.map(i64::from), mask.right.map(i64::from)) else { return };
    if right == 0 || !is(problem, Algorithm::AllGather, Balance::DualChunk) {
        return;
    }
    let chunks = 2 * problem.parallel.size();
    let longest = problem.sequences.iter().map(|sequence| sequence.kv.span).max().unwrap_or(0) / chunks;
    let queries = placed_queries(schedule);
    for Attend { q, call, .. } in attends(schedule) {
        let Some(runs) = queries.get(q) else { continue };
        for segment in &mut call.segments {
            let Some(placed) = placed_at(runs, segment) else { continue };
            let keys = problem.sequences[placed.sequence].kv;
            let chunk = placed.piece.start / placed.piece.span + 1;
            let (chunk_end, full) = ((chunk * longest) as i64, (chunks * longest) as i64);
            let end = full.min(chunk_end + right);
            let visible = (keys.len as i64).min((chunk * placed.piece.span) as i64 + right);
            let corner = if bottom_right { visible - segment.q.len as i64 } else { 0 };
            if let ([run], true) = (segment.kv.as_mut_slice(), segment.q.len > 0) {
                (run.len, run.span) = (visible as usize, visible as usize);
                segment.lo = Some(corner - (left + end - chunk_end));
                segment.hi = Some(corner + chunk_end + right - end);
            }
        }
    }
}

/// Makes the keys of a sequence begin where the visible keys of the sequences before it would end, in each of the two
/// steps.
fn real_offsets(problem: &Problem, schedule: &mut Schedule) {
    if !is(problem, Algorithm::AllGather, Balance::DualChunk) {
        return;
    }
    let queries = placed_queries(schedule);
    for Attend { q, call, .. } in attends(schedule) {
        let Some(runs) = queries.get(q) else { continue };
        let mut ends = [0, 0];
        for segment in &mut call.segments {
            let Some(placed) = placed_at(runs, segment) else { continue };
            let end = &mut ends[usize::from(placed.piece.at > 0)];
            for run in &mut segment.kv {
                run.offset = *end;
                *end += run.len;
            }
        }
    }
}

/// Gives runs of real rows the first offsets that the search finds. It finds none for a run that starts at the position
/// after the run before.
fn missing_offset(problem: &Problem, schedule: &mut Schedule) {
    let striped = matches!(problem.parallel.balance, Balance::Striped { stripe } if stripe > 1);
    if !striped || !is(problem, Algorithm::AllGather, problem.parallel.balance) {
        return;
    }
    let queries = placed_queries(schedule);
    for Attend { q, call, .. } in attends(schedule) {
        let Some(runs) = queries.get(q) else { continue };
        let (mut real, mut rest): (Vec<Segment>, Vec<Segment>) =
            std::mem::take(&mut call.segments).into_iter().partition(|segment| segment.q.len > 0);
        real.sort_by_key(|segment| segment.q.offset);
        let mut next = None;
        let mut offsets = Vec::new();
        for segment in &real {
            let start = placed_at(runs, segment).map(|placed| placed.piece.start);
            if start.is_none() || start != next {
                offsets.push(segment.q.offset);
            }
            next = start.map(|start| start + segment.q.len);
        }
        if offsets.len() < real.len() {
            real.truncate(offsets.len());
            for (segment, offset) in real.iter_mut().zip(offsets) {
                segment.q = Run::packed(offset, segment.q.len, segment.q.len);
            }
        }
        real.append(&mut rest);
        call.segments = real;
    }
}

/// Returns the step of a launch; `None` for any other work.
fn is_launch(work: &Work) -> Option<Step> {
    match work {
        Work::Attend(Attend { step, .. }) | Work::AttendBackward(AttendBackward { step, .. }) => Some(*step),
        _ => None,
    }
}

fn follows(work: &Work) -> bool {
    matches!(work, Work::Merge(_) | Work::Accumulate { .. })
}

/// Returns the launches by pass and step, each with the following merges and sums.
fn launches(program: &RankProgram) -> BTreeMap<(bool, Step), Vec<Operation>> {
    let begin = program.backward.unwrap_or(program.operations.len());
    let (mut found, mut last): (BTreeMap<_, Vec<Operation>>, _) = (BTreeMap::new(), None);
    for (index, operation) in program.operations.iter().enumerate() {
        last = is_launch(&operation.work).map(|step| (index >= begin, step)).or(last);
        if let (Some(key), true) = (last, is_launch(&operation.work).is_some() || follows(&operation.work)) {
            found.entry(key).or_default().push(operation.clone());
        }
    }
    found
}

/// Runs steps on keys of a later member without a left bound, although a short window shows none of these keys.
fn opened_window(problem: &Problem, schedule: &mut Schedule) {
    let (cp, Some(left)) = (problem.parallel.size(), problem.mask.left) else { return };
    let striped = Balance::Striped { stripe: 1 };
    if !problem.mask.is_causal() || !is(problem, Algorithm::Ring, striped) {
        return;
    }
    let mut fields = seamproof_oracle::ProblemFields::from(problem.clone());
    fields.mask.left = None;
    let Some(open) = Problem::new(fields).ok().and_then(|open| build(&open).ok()) else { return };
    for (place, &rank) in schedule.members.iter().enumerate() {
        let opens = |step: Step| match step {
            Step::Ring { owner, .. } => owner > place && (left as usize) < cp - (owner - place),
            _ => false,
        };
        let mine = &mut schedule.ranks[rank];
        *mine = with_opened(&launches(mine), open.ranks[rank].clone(), opens);
    }
}

/// Returns the open program with the right launches in those steps that `opens` does not accept.
fn with_opened(
    right: &BTreeMap<(bool, Step), Vec<Operation>>,
    open: RankProgram,
    opens: impl Fn(Step) -> bool,
) -> RankProgram {
    let begin = open.backward.unwrap_or(open.operations.len());
    let mut program = RankProgram { backward: open.backward, operations: Vec::new() };
    let mut rest: Option<std::vec::IntoIter<Operation>> = None;
    for (index, operation) in open.operations.into_iter().enumerate() {
        if index == begin {
            program.backward = program.backward.map(|_| program.operations.len());
        }
        if let Some(step) = is_launch(&operation.work) {
            let mine = right.get(&(index >= begin, step)).cloned().unwrap_or_default();
            rest = (!opens(step)).then(|| mine.into_iter());
        }
        match &mut rest {
            Some(rest) if is_launch(&operation.work).is_some() || follows(&operation.work) => {
                program.operations.extend(rest.next());
            }
            _ => program.operations.push(operation),
        }
    }
    program
}

/// Sets the lengths of the ring's dual-chunk sections from the divided running sum of real lengths.
fn floored_lengths(problem: &Problem, schedule: &mut Schedule) {
    let cp = problem.parallel.size();
    if cp == 1 || !is(problem, Algorithm::Ring, Balance::DualChunk) {
        return;
    }
    let queries = placed_queries(schedule);
    let own: Vec<bool> =
        schedule.buffers.iter().map(|buffer| matches!(buffer.role, Role::Input(_))).collect();
    let floored = |q: BufferId, k: BufferId, step: Step, call: &mut AttentionCall| {
        let (Some(runs), Step::Ring { section, part, .. }) = (queries.get(&q), step) else { return };
        let section = if own[k.0] { Section::Diagonal } else { section };
        for segment in &mut call.segments {
            if let Some(placed) = placed_at(runs, segment) {
                floor_segment(problem, section, part.0, &placed, segment);
            }
        }
    };
    for program in &mut schedule.ranks {
        for operation in &mut program.operations {
            match &mut operation.work {
                Work::Attend(Attend { q, k, step, call, .. }) => floored(*q, *k, *step, call),
                Work::AttendBackward(AttendBackward { q, k, step, call, .. }) => floored(*q, *k, *step, call),
                _ => {}
            }
        }
    }
}

fn floor_segment(
    problem: &Problem,
    section: Section,
    part: usize,
    placed: &PlacedRun,
    segment: &mut Segment,
) {
    let (cp, chunk) = (problem.parallel.size(), placed.piece.span);
    let before: usize = problem.sequences[..placed.sequence].iter().map(|sequence| sequence.q.len).sum();
    let sums = (before, before + problem.sequences[placed.sequence].q.len);
    let length = |divisor: usize| sums.1 / divisor - sums.0 / divisor;
    let whole = |second: bool| length(cp).saturating_sub(if second { chunk } else { 0 }).min(chunk);
    let half = length(2 * cp).min(chunk);
    segment.q.len = if section == Section::Upper { half } else { whole(placed.piece.at > 0) };
    let keys = if section == Section::Lower { half } else { whole(part > 0) };
    segment.kv.iter_mut().for_each(|run| run.len = keys.min(run.span));
}

/// Reorders keys and values as the kernel's index algebra does, with the number of rows that `length` gives a slot. A
/// row belongs to the last sequence that begins before it, even if this sequence also ends before it.
fn reordered_by(problem: &Problem, schedule: &mut Schedule, length: impl Fn(&crate::shard::Slot) -> usize) {
    let algorithm = problem.parallel.algorithm;
    let reorders = [Algorithm::AllGather, Algorithm::AllToAll].contains(&algorithm);
    let packed = problem.sequences.first().is_some_and(|first| first.kv.offset == 0 && first.kv.span > 0);
    if !reorders || !packed || !is(problem, algorithm, Balance::DualChunk) {
        return;
    }
    let Ok(shard) = ShardedSide::new(problem, seamproof_oracle::Side::Kv) else { return };
    let mut starts = vec![0];
    for slot in &shard.slots {
        starts.push(starts[starts.len() - 1] + length(slot));
    }
    each_reorder(schedule, false, |rows| {
        let total: usize = rows.iter().map(|(from, _)| from.len).sum();
        if total == shard.rows * shard.cp {
            *rows = kernel_order(&shard, &starts);
        }
    });
}

fn kernel_order(shard: &ShardedSide, starts: &[usize]) -> Vec<RowPair> {
    let (cp, last) = (shard.cp, starts.len() - 2);
    let row = |offset: usize| Run::packed(offset, 1, 1);
    let of_rank = |rank: usize| {
        (0..shard.rows).map(move |token| {
            let sequence = starts[..=last].partition_point(|&start| start <= token).max(1) - 1;
            let (start, rows) = (starts[sequence], starts[sequence + 1] - starts[sequence]);
            let inside = token - start;
            let chunk = if inside < rows / 2 { rank } else { 2 * (cp - 1) - rank };
            (row(rank * shard.rows + token), row(inside + start * cp + rows / 2 * chunk))
        })
    };
    (0..cp).flat_map(of_rank).collect()
}
