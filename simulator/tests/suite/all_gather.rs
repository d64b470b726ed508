//! Segments of an all-gather schedule, and tables of its steps.

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Mask, Pass, Problem, ProblemFields, Run,
};
use seamproof_simulator::Segment;
use seamproof_simulator::helpers::SegmentRow;
use seamproof_simulator::schedule::{MergeOrder, Work, all_gather};

/// A problem on two ranks with dual-chunk balance; its packed sequences are given as (real, padded) rows.
fn problem(lengths: &[(usize, usize)], left: Option<u32>, right: Option<u32>) -> Problem {
    Problem::new(ProblemFields {
        mask: Mask { left, right, align: Alignment::TopLeft, ..Mask::FULL },
        parallel: ContextParallel::over(2, Algorithm::AllGather, Balance::DualChunk),
        pass: Pass::Forward,
        ..ProblemFields::padded(lengths, 1)
    })
    .unwrap()
}

/// Returns the segments of a rank's forward launches.
fn segments(problem: &Problem, rank: usize) -> Vec<Segment> {
    let schedule = all_gather(problem, MergeOrder::Running).unwrap();
    let calls = schedule.ranks[rank].operations.iter().filter_map(|operation| match &operation.work {
        Work::Attend(attend) => Some(attend.call.segments.clone()),
        _ => None,
    });
    calls.flatten().collect()
}

#[test]
fn a_window_is_cut_for_each_sequence_by_itself() {
    // TransformerEngine's smallest bad pack: 2 rows padded to 4 with the window (0, 8). Here it lies behind a
    // longer sequence.
    let problem = problem(&[(8, 8), (2, 4)], Some(0), Some(8));
    let short = segments(&problem, 0)[2].clone();
    assert_eq!(short.q, Run::packed(4, 1, 1));
    assert_eq!(short.kv, [Run::packed(8, 2, 2)]);
    assert_eq!((short.lo, short.hi), (Some(0), Some(8)));
    // Rank 1 has the second position, which sees only itself out of two keys.
    let short = segments(&problem, 1)[2].clone();
    assert_eq!(short.kv, [Run::packed(8, 2, 2)]);
    assert_eq!((short.lo, short.hi), (Some(1), Some(9)));
}

#[test]
fn keys_past_the_last_visible_one_are_not_named() {
    let problem = problem(&[(7, 8)], None, Some(0));
    let keys = |rank| segments(&problem, rank).iter().map(Segment::keys).collect::<Vec<_>>();
    assert_eq!(keys(0), [2, 7], "chunks 0 and 3, its last row padding");
    assert_eq!(keys(1), [4, 6], "chunks 1 and 2");
}

/// Returns the tables of a rank's steps.
fn tables(problem: &Problem, rank: usize) -> Vec<SegmentRow> {
    let schedule = all_gather(problem, MergeOrder::Deferred).unwrap();
    let made = schedule.ranks[rank].operations.iter().find_map(|operation| match &operation.work {
        Work::MakeSegments { from, .. } => from.rows(),
        _ => None,
    });
    made.expect("a table")
}

#[test]
fn the_tables_of_steps_are_the_golden_ones() {
    // Step 0 has both sequences' first chunk of the rank, step 1 the second. Of padding alone no key is named.
    let problem = problem(&[(3, 4), (13, 16)], None, Some(0));
    let rows = |rank| tables(&problem, rank).iter().map(|row| (row.q, row.kv)).collect::<Vec<_>>();
    assert_eq!(
        rows(0),
        [((0, 1), (0, 1)), ((2, 4), (4, 4)), ((1, 0), (0, 0)), ((6, 1), (4, 13))],
        "chunks 0 and 3"
    );
    assert_eq!(
        rows(1),
        [((0, 1), (0, 2)), ((2, 4), (4, 8)), ((1, 1), (0, 3)), ((6, 4), (4, 12))],
        "chunks 1 and 2"
    );
}
