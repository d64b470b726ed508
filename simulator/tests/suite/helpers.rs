//! What the helper kernels do, and the tables that they make.

use seamproof_simulator::helpers::*;
use seamproof_simulator::shard::ShardedSide;
use std::collections::BTreeSet;

use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Format, Mask, Pass, Problem, ProblemFields, Run,
    Sequence, Side,
};
use seamproof_simulator::Segment;
use seamproof_simulator::schedule::{Work, build};

/// Returns a problem with sequences of (real, padded) rows and a gap of `2·cp` rows before each.
fn problem(
    lengths: &[(usize, usize)],
    cp: usize,
    algorithm: Algorithm,
    balance: Balance,
    mask: Mask,
) -> Problem {
    let mut rows = 0;
    let sequences = (0..).zip(lengths).map(|(id, &(len, span))| {
        let run = Run::packed(rows + 2 * cp, len, span);
        rows += 2 * cp + span;
        Sequence { id, q: run, kv: run }
    });
    let fields = ProblemFields::of(sequences.collect(), 1);
    let parallel = ContextParallel::over(cp, algorithm, balance);
    Problem::new(ProblemFields { mask, parallel, ..fields }).unwrap()
}

/// Test that a conversion there and back loses nothing, and that BSHD and SBHD are each other's transposes.
#[test]
fn conversions_keep_every_real_row() {
    // A first offset, an empty sequence, padding, a gap and slack.
    let slots = [Run::packed(2, 3, 4), Run::packed(6, 0, 0), Run::packed(6, 2, 2), Run::packed(9, 1, 3)];
    let real: Vec<usize> = slots.iter().flat_map(Run::real_rows).collect();
    let pairs = |from, to, positions| converted_pairs(&slots, positions, [from, to]);
    for layout in BatchLayout::ALL {
        let there = pairs(BatchLayout::Thd, layout, 3);
        let back = pairs(layout, BatchLayout::Thd, 3);
        assert_eq!(there.iter().map(|&(row, _)| row).collect::<Vec<_>>(), real);
        assert_eq!(back, there.iter().map(|&(row, there)| (there, row)).collect::<Vec<_>>());
        assert_eq!(there.iter().map(|&(_, row)| row).collect::<BTreeSet<_>>().len(), real.len());
    }
    let rows = [(0, 0), (1, 4), (2, 8), (6, 2), (7, 6), (9, 3)];
    assert_eq!(pairs(BatchLayout::Bshd, BatchLayout::Sbhd, 3), rows);
    assert_eq!(
        pairs(BatchLayout::Thd, BatchLayout::Bshd, 1),
        [(2, 0), (6, 2), (9, 3)],
        "room for one position"
    );
}

/// Whether any query of a row sees a key.
fn shows(row: &SegmentRow) -> bool {
    let (queries, keys) = (row.q.1 as i64, row.kv.1 as i64);
    let first = row.lo.unwrap_or(i64::MIN).max(1 - queries);
    queries > 0 && keys > 0 && first <= row.hi.unwrap_or(i64::MAX).min(keys - 1)
}

/// Returns the rows of every launch of a rank in a pass, sorted, and the steps of their keys.
fn launched(problem: &Problem, rank: usize, pass: Pass) -> (Vec<SegmentRow>, BTreeSet<usize>) {
    let schedule = build(problem).unwrap();
    let calls = schedule.ranks[rank].operations.iter().filter_map(|operation| match &operation.work {
        Work::Attend(attend) if pass == Pass::Forward => Some(attend.call.segments.clone()),
        Work::AttendBackward(attend) if pass == Pass::Backward => Some(attend.call.segments.clone()),
        _ => None,
    });
    let mut steps = BTreeSet::new();
    let mut row = |segment: Segment| {
        let of_key = segment.kv[0];
        let row = SegmentRow {
            q: (segment.q.offset, segment.q.len),
            kv: (of_key.offset, of_key.len),
            key_step: of_key.step,
            lo: segment.lo,
            hi: segment.hi,
        };
        shows(&row).then(|| steps.insert(of_key.step)).map(|_| row)
    };
    let mut rows: Vec<SegmentRow> = calls.flatten().filter_map(&mut row).collect();
    rows.sort_unstable();
    (rows, steps)
}

fn shown(mut rows: Vec<SegmentRow>) -> Vec<SegmentRow> {
    rows.retain(shows);
    rows.sort_unstable();
    rows
}

/// Compares both passes of both algorithms on one rank. Returns the number of segments.
fn tables_are_launched(lengths: &[(usize, usize)], cp: usize, balance: Balance, mask: Mask) -> usize {
    let ring = problem(lengths, cp, Algorithm::Ring, balance, mask);
    let gather = problem(lengths, cp, Algorithm::AllGather, balance, mask);
    let [q, kv] = [Side::Q, Side::Kv].map(|side| ShardedSide::new(&ring, side).unwrap());
    let mut compared = 0;
    let mut same = |rows: Vec<SegmentRow>, of: &Problem, rank: usize, pass: Pass, step: usize| {
        let (launched, steps) = launched(of, rank, pass);
        compared += launched.len();
        assert_eq!(shown(rows), launched, "{pass:?} {balance:?} {mask:?} {rank}/{cp}");
        assert!(steps.iter().all(|&of_keys| of_keys == step), "{pass:?} {balance:?} {steps:?}");
    };
    for rank in 0..cp {
        let steps = (0..cp).map(|owner| ring_segments(&mask, [&q, &kv], rank, owner).expect("a band"));
        let steps: Vec<_> = steps.collect();
        for pass in [Pass::Forward, Pass::Backward] {
            // A ring's keys are consecutive rows of its owner.
            same(steps.concat(), &ring, rank, pass, 1);
        }
        let [forward, backward] = [all_gather_segments, all_gather_backward_segments]
            .map(|tables| tables(&mask, [&q, &kv], rank).expect("a band"));
        let residues = balance == (Balance::Striped { stripe: 1 });
        same(forward, &gather, rank, Pass::Forward, 1);
        same(backward, &gather, rank, Pass::Backward, if residues { cp } else { 1 });
    }
    compared
}

#[test]
fn step_tables_are_what_the_schedules_launch() {
    let lengths = [(48, 48), (0, 24), (1, 24), (25, 48), (0, 0), (23, 24)];
    let side = |bound: u32| (bound < 100).then_some(bound);
    let mut compared = 0;
    for (cp, left, right) in
        [1, 2, 3, 4].into_iter().flat_map(|cp| [(cp, 100, 0), (cp, 5, 0), (cp, 100, 100), (cp, 3, 7)])
    {
        for align in [Alignment::TopLeft, Alignment::BottomRight] {
            let mask = Mask { left: side(left), right: side(right), align, ..Mask::FULL };
            let stripes = [1, 2, 3].map(|stripe| Balance::Striped { stripe });
            let stripes = stripes.into_iter().filter(|&cut| 24_usize.is_multiple_of(span_multiple(cut, cp)));
            for balance in [Balance::Contiguous, Balance::DualChunk].into_iter().chain(stripes) {
                compared += tables_are_launched(&lengths, cp, balance, mask);
            }
        }
    }
    assert!(compared > 5000, "too little compared: {compared}");
}

#[test]
fn a_halfs_pairs_are_its_chunk_and_stay_apart() {
    let slots = [Run::packed(3, 5, 6), Run::packed(9, 0, 0), Run::packed(10, 1, 4)];
    assert_eq!(half_pairs(&slots, Half::First), [(3, 1), (4, 2), (5, 3), (10, 5), (11, 6)]);
    assert_eq!(half_pairs(&slots, Half::Second), [(6, 1), (7, 2), (8, 3), (12, 5), (13, 6)]);
    assert_eq!(SlotPart::Compact(Half::Second).pairs(&slots), [(6, 1), (7, 2)]);
    assert_eq!(SlotPart::HalfInPlace(Half::First).pairs(&slots), [(3, 3), (4, 4), (5, 5), (10, 10)]);
}

#[test]
fn an_empty_row_is_the_identity_of_a_merge_whatever_its_out_holds() {
    let one = |lse: f32, out: f32| {
        let numbers = Numbers { heads: 1, dim: 1, format: Format::F32, values: vec![out] };
        (numbers, Statistic { rows: 1, values: vec![lse] })
    };
    for (a, b) in [((0.5, 3.0), (f32::NEG_INFINITY, f32::NAN)), ((f32::NEG_INFINITY, f32::NAN), (0.5, 3.0))] {
        let ((mut out, mut lse), (step_out, step_lse)) = (one(a.0, a.1), one(b.0, b.1));
        merge_out(&[(0, 0)], Style::Running, (&mut out, &mut lse), (&step_out, &step_lse));
        assert_eq!((lse.values[0], out.values[0]), (0.5, 3.0));
    }
    let (mut empty, step) = (one(f32::NEG_INFINITY, 0.0).1, one(f32::NEG_INFINITY, 0.0).1);
    merge_statistics(&[(0, 0)], &mut empty, &step);
    assert_eq!(empty.values, [f32::NEG_INFINITY]);
}

#[test]
fn ids_and_positions_both_end_a_run() {
    // The positions of two segments happen to follow on. Lengths and offsets from ids alone or positions alone
    // would differ.
    let rows = [(1, 0), (1, 1), (2, 2), (2, 3), (0, 4), (2, 5), (3, 0), (3, 2)];
    let runs: Vec<_> = segment_runs(&rows, 8).iter().map(|run| (run.offset, run.len, run.id)).collect();
    assert_eq!(runs, [(0, 2, 1), (2, 2, 2), (5, 1, 2), (6, 1, 3), (7, 1, 3)]);
    let rows: Vec<_> =
        segment_runs(&[(1, 0), (1, 1), (1, 2), (1, 3)], 2).iter().map(|run| run.offset).collect();
    assert_eq!(rows, [0, 2], "no run crosses the end of a batch row");
}

/// Test of the order of gathered chunks: each rank's first and second one, rank after rank, and by sequence within a rank.
#[test]
fn gathered_chunks_lie_in_the_golden_order() {
    let order = |spans: &[usize], cp: usize| {
        let offsets = spans.iter().scan(0, |end, span| Some(std::mem::replace(end, *end + span)));
        let runs: Vec<_> =
            offsets.zip(spans).map(|(offset, &span)| Run::packed(offset, span, span)).collect();
        rank_order(&ShardedSide::of_runs(&runs, spans.iter().sum(), cp, Balance::DualChunk))
    };
    assert_eq!(order(&[4], 2), [0, 3, 1, 2]);
    assert_eq!(order(&[6], 3), [0, 5, 1, 4, 2, 3]);
    assert_eq!(order(&[4, 8], 2), [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]);
}

#[test]
fn a_rank_has_its_share_of_real_rows() {
    let runs = [Run::packed(4, 7, 8), Run::packed(12, 0, 0), Run::packed(16, 13, 16)];
    let shard = ShardedSide::of_runs(&runs, 36, 2, Balance::DualChunk);
    assert_eq!(rank_slots(&shard, 0), [Run::packed(2, 3, 4), Run::packed(6, 0, 0), Run::packed(8, 5, 8)]);
    assert_eq!(rank_slots(&shard, 1), [Run::packed(2, 4, 4), Run::packed(6, 0, 0), Run::packed(8, 8, 8)]);
}
