//! Layouts of ranks: the places of slots, sides that cannot be cut, and the layouts of many sequences and of long ones.

use crate::common::plain;

use seamproof_oracle::sharding::{Piece, PlacedRun, ShardingError, layouts, whole};
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Problem, ProblemFields, Run, Sequence, Side, TensorRows,
};

const STRIPES: Balance = Balance::Striped { stripe: 1 };

/// Returns a problem with runs of queries in a tensor of `rows` rows, cut over two ranks. Keys lie like queries.
fn problem(runs: &[Run], rows: usize, balance: Balance) -> Problem {
    let mut fields = plain(&[], 1);
    let sequence = |(id, &run): (u32, &Run)| Sequence { id, q: run, kv: run };
    fields.sequences = (0..).zip(runs).map(sequence).collect();
    fields.rows = TensorRows { q: rows, kv: rows };
    fields.parallel = ContextParallel::over(2, Algorithm::AllGather, balance);
    Problem::new(fields).expect("a problem")
}

fn placed(sequence: usize, positions: [usize; 3], at: usize, local: Run) -> PlacedRun {
    let [start, step, span] = positions;
    PlacedRun { sequence, piece: Piece { start, step, span, at }, local }
}

#[test]
fn slots_lie_in_the_order_of_memory_with_gaps_between_them() {
    // 4 free rows, sequence 1, 3 free rows, sequence 0, 2 free rows.
    let runs = [Run::packed(11, 1, 4), Run::packed(4, 3, 4)];
    let ranks = layouts(&problem(&runs, 17, Balance::DualChunk)).expect("4 is a multiple of 4");
    let first = [
        placed(0, [0, 1, 1], 0, Run::packed(5, 1, 1)),
        placed(0, [3, 1, 1], 1, Run::packed(6, 0, 1)),
        placed(1, [0, 1, 1], 0, Run::packed(2, 1, 1)),
        placed(1, [3, 1, 1], 1, Run::packed(3, 0, 1)),
    ];
    let second =
        [placed(0, [1, 1, 2], 0, Run::packed(5, 0, 2)), placed(1, [1, 1, 2], 0, Run::packed(2, 2, 2))];
    assert_eq!((ranks[0].q.rows, &ranks[0].q.runs[..]), (8, &first[..]));
    assert_eq!((ranks[1].q.rows, &ranks[1].q.runs[..]), (8, &second[..]));
    assert_eq!([&ranks[0].q, &ranks[1].q], [&ranks[0].kv, &ranks[1].kv]);
}

#[test]
fn a_single_rank_holds_the_problems_own_layout() {
    let strided = Run { offset: 1, step: 3, len: 2, span: 3 };
    let runs = [placed(0, [0, 1, 3], 0, strided), placed(1, [0, 1, 0], 0, Run::packed(0, 0, 0))];
    let mut fields = ProblemFields::from(problem(&runs.map(|run| run.local), 9, Balance::DualChunk));
    fields.parallel = ContextParallel::single();
    let problem = Problem::new(fields).expect("a problem");
    let layouts = layouts(&problem).expect("nothing is cut");
    assert_eq!(layouts, [whole(&problem)]);
    assert_eq!((layouts[0].q.rows, &layouts[0].q.runs[..]), (9, &runs[..]));
}

#[test]
fn what_cannot_be_cut_is_said() {
    let cut = |run: Run, balance| layouts(&problem(&[Run::packed(0, 0, 0), run], 100, balance)).err();
    let uneven = |span, multiple| Some(ShardingError::Span { sequence: 1, side: Side::Q, span, multiple });
    let strided = Run { offset: 0, step: 2, len: 1, span: 24 };
    assert_eq!(cut(strided, STRIPES), None, "no other rows are beside it");
    let mixed = layouts(&problem(&[Run::packed(60, 1, 4), strided], 100, STRIPES)).err();
    assert_eq!(mixed, Some(ShardingError::Strided { sequence: 1, side: Side::Q, step: 2 }));
    assert_eq!(cut(Run::packed(0, 3, 3), Balance::Contiguous), uneven(3, 2));
    assert_eq!(cut(Run::packed(0, 3, 6), Balance::DualChunk), uneven(6, 4));
    assert_eq!(cut(Run::packed(0, 3, 5), STRIPES), uneven(5, 2));
    assert_eq!(cut(Run::packed(0, 3, 8), Balance::Striped { stripe: 3 }), uneven(8, 6));
    assert_eq!(cut(Run::packed(0, 3, 12), Balance::Striped { stripe: 3 }), None);
}

/// Three sequences in SBHD behind two rows of nobody, of which one is short, dealt to two ranks by chunks.
#[test]
fn rows_side_by_side_stay_side_by_side() {
    let lane = |lane: usize, len, span| Run { offset: 2 + lane, step: 3, len, span };
    let runs = [lane(0, 7, 8), lane(2, 3, 4), lane(1, 0, 8)];
    let layouts = layouts(&problem(&runs, 28, Balance::DualChunk)).expect("spans of four");
    let [first, second] = [&layouts[0].q, &layouts[1].q];
    assert_eq!([first.rows, second.rows], [14, 14], "2 / 2 rows, three lanes of four, 2 / 2 rows");
    let rows = |offset, len, span| Run { offset, step: 3, len, span };
    assert_eq!(
        first.runs,
        [
            placed(0, [0, 1, 2], 0, rows(1, 2, 2)),
            placed(0, [6, 1, 2], 2, rows(7, 1, 2)),
            placed(1, [0, 1, 1], 0, rows(3, 1, 1)),
            placed(1, [3, 1, 1], 1, rows(6, 0, 1)),
            placed(2, [0, 1, 2], 0, rows(2, 0, 2)),
            placed(2, [6, 1, 2], 2, rows(8, 0, 2)),
        ]
    );
    assert_eq!(second.runs[0], placed(0, [2, 1, 4], 0, rows(1, 4, 4)));
}

#[test]
fn as_few_runs_are_kept_as_there_can_be() {
    let tokens: Vec<Run> = (0..1 << 17).map(|index| Run::packed(4 * index, 1, 4)).collect();
    let long = [Run::packed(0, (1 << 20) - 5, 1 << 20)];
    for (balance, runs) in [(Balance::Contiguous, 1), (Balance::DualChunk, 2), (STRIPES, 1)] {
        let ranks = layouts(&problem(&tokens, 4 << 17, balance)).expect("spans of four");
        assert!(ranks.iter().all(|rank| rank.q.runs.len() <= runs << 17));
        let ranks = layouts(&problem(&long, 1 << 20, balance)).expect("an even span");
        assert_eq!(ranks[0].q.runs.len(), runs);
        assert_eq!(
            ranks.iter().flat_map(|rank| &rank.q.runs).map(|run| run.local.len).sum::<usize>(),
            long[0].len
        );
    }
}
