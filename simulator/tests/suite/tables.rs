//! Tables of segments that drive the launches of TransformerEngine's shipped order.

use crate::common::hold::hold;
use crate::common::{Draws, side_by_side};

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Heads, Mask, Pass, Problem, ProblemFields, Sink, Softmax,
};
use seamproof_simulator::check::{CheckError, check};
use seamproof_simulator::helpers::SegmentRow;
use seamproof_simulator::schedule::{MergeOrder, Region, Schedule, Work, build_with};

const HIERARCHICAL: Algorithm = Algorithm::Hierarchical { all_to_all: 2 };
const STRIPES: Balance = Balance::Striped { stripe: 1 };

/// The cuts whose launches tables say.
const TOLD: [(Algorithm, Balance); 16] = [
    (Algorithm::AllGather, Balance::Contiguous),
    (Algorithm::AllGather, Balance::DualChunk),
    (Algorithm::AllGather, STRIPES),
    (Algorithm::AllGather, Balance::Striped { stripe: 2 }),
    (Algorithm::Ring, Balance::Contiguous),
    (Algorithm::Ring, Balance::DualChunk),
    (Algorithm::Ring, STRIPES),
    (Algorithm::Ring, Balance::Striped { stripe: 2 }),
    (Algorithm::AllToAll, Balance::Contiguous),
    (Algorithm::AllToAll, Balance::DualChunk),
    (Algorithm::AllToAll, STRIPES),
    (Algorithm::AllToAll, Balance::Striped { stripe: 2 }),
    (HIERARCHICAL, Balance::Contiguous),
    (HIERARCHICAL, Balance::DualChunk),
    (HIERARCHICAL, STRIPES),
    (HIERARCHICAL, Balance::Striped { stripe: 2 }),
];

/// Returns a problem over four ranks, with sequences that end in every chunk, an empty one and one of padding alone.
fn problem((algorithm, balance): (Algorithm, Balance), sink: Sink) -> Problem {
    let mask = Mask::window(Some(9), Some(1), Alignment::BottomRight);
    Problem::new(ProblemFields {
        mask,
        heads: Heads { q: 4, kv: 4 },
        softmax: Softmax { sink, ..ProblemFields::padded(&[], 1).softmax },
        parallel: ContextParallel::over(4, algorithm, balance),
        pass: Pass::Backward,
        ..ProblemFields::padded(&[(3, 8), (13, 16), (0, 8), (0, 0), (8, 8), (15, 24)], 4)
    })
    .unwrap()
}

fn deferred(problem: &Problem) -> Schedule {
    build_with(problem, MergeOrder::Deferred).unwrap()
}

fn works(schedule: &Schedule) -> impl Iterator<Item = &Work> {
    schedule.ranks.iter().flat_map(|program| &program.operations).map(|operation| &operation.work)
}

/// Returns the rows of a table that each launch reads.
fn tables(schedule: &Schedule) -> Vec<Option<Region>> {
    let of_launch = |work: &Work| match work {
        Work::Attend(attend) => Some(attend.table.clone()),
        Work::AttendBackward(attend) => Some(attend.table.clone()),
        _ => None,
    };
    works(schedule).filter_map(of_launch).collect()
}

/// Makes launches and copies say nothing themselves where a table does.
fn leave_to_tables(schedule: &mut Schedule) {
    for operation in schedule.ranks.iter_mut().flat_map(|program| &mut program.operations) {
        match &mut operation.work {
            Work::Attend(attend) if attend.table.is_some() => attend.call.segments.clear(),
            Work::AttendBackward(attend) if attend.table.is_some() => attend.call.segments.clear(),
            Work::CopyValid { rows, .. } => rows.clear(),
            _ => {}
        }
    }
}

#[test]
fn a_run_goes_by_its_tables() {
    for (cut, sink) in TOLD.into_iter().flat_map(|cut| [(cut, Sink::None), (cut, Sink::Learnable)]) {
        let problem = problem(cut, sink);
        let mut schedule = deferred(&problem);
        let read = tables(&schedule);
        assert!(!read.is_empty() && read.iter().all(Option::is_some), "{cut:?}");
        assert_eq!(check(&problem, &schedule).err(), None, "{cut:?}");
        leave_to_tables(&mut schedule);
        hold(&problem, &schedule, &mut Draws(1));
        assert!(check(&problem, &schedule).is_err(), "the checker asks for the host's word too: {cut:?}");
    }
}

/// A copy of valid rows finds them by a search, so the table of each has them in rising order.
#[test]
fn rows_that_are_copied_by_a_table_rise() {
    for cut in TOLD {
        let problem = problem(cut, Sink::None);
        let mut schedule = deferred(&problem);
        let copies = schedule.ranks.iter_mut().flat_map(|program| &mut program.operations);
        let mut copied = copies.filter_map(|operation| match &mut operation.work {
            Work::CopyValid { rows, .. } if rows.len() > 1 => Some(rows),
            _ => None,
        });
        let Some(rows) = copied.next() else { continue };
        rows.reverse();
        let errors = check(&problem, &schedule).expect_err("rows in falling order");
        let fallen = |error: &CheckError| error.to_string().contains("behind later rows in a table");
        assert!(errors.iter().any(fallen), "{cut:?}: {errors:?}");
    }
}

#[test]
fn what_no_table_says_stays_in_the_calls() {
    let plain = |cut| ProblemFields::from(problem(cut, Sink::None));
    let prefix = |cut| ProblemFields { mask: Mask { prefix: 3, ..Mask::CAUSAL }, ..plain(cut) };
    let backwards = |cut| {
        let mut fields = plain(cut);
        let runs: Vec<_> = fields.sequences.iter().map(|sequence| (sequence.q, sequence.kv)).collect();
        // The first sequence and the fifth are of one span.
        (fields.sequences[0].q, fields.sequences[0].kv) = runs[4];
        (fields.sequences[4].q, fields.sequences[4].kv) = runs[0];
        fields
    };
    let beside = |cut| {
        let equal = ProblemFields { sequences: plain(cut).sequences[4..5].to_vec(), ..plain(cut) };
        let problem = Problem::new(equal).unwrap();
        let apart = |draws: u64| side_by_side(&mut Draws(draws), &problem);
        let is_beside =
            |problem: &Problem| problem.sequences[0].q.step > 1 && problem.sequences[0].kv.step > 1;
        ProblemFields::from((0..50).map(apart).find(is_beside).unwrap())
    };
    let others = TOLD.map(prefix).into_iter().chain(TOLD.map(backwards)).chain(TOLD.map(beside));
    for fields in others {
        let problem = Problem::new(fields).unwrap();
        let schedule = deferred(&problem);
        assert!(tables(&schedule).iter().all(Option::is_none), "{problem:?}");
        assert!(!works(&schedule).any(|work| matches!(work, Work::MakeSegments { .. })), "{problem:?}");
        hold(&problem, &schedule, &mut Draws(2));
    }
}

/// Returns the tables of a rank's forward, and the first and the number of rows that each launch reads.
fn golden(problem: &Problem, rank: usize) -> (Vec<Vec<SegmentRow>>, Vec<(usize, usize)>) {
    let (mut made, mut read) = (Vec::new(), Vec::new());
    for operation in &deferred(problem).ranks[rank].operations {
        match &operation.work {
            Work::MakeSegments { from, .. } => made.push(from.rows().unwrap()),
            Work::Attend(attend) => {
                read.extend(attend.table.as_ref().map(|table| (table.rows.offset, table.rows.len)));
            }
            _ => {}
        }
    }
    (made, read)
}

fn two_ranks(algorithm: Algorithm) -> Problem {
    Problem::new(ProblemFields {
        heads: Heads { q: 2, kv: 2 },
        mask: Mask::CAUSAL,
        parallel: ContextParallel::over(2, algorithm, Balance::DualChunk),
        pass: Pass::Forward,
        ..ProblemFields::padded(&[(3, 4), (13, 16)], 1)
    })
    .unwrap()
}

#[test]
fn the_tables_of_a_ring_are_the_golden_ones() {
    let (made, read) = golden(&two_ranks(Algorithm::Ring), 0);
    let rows: Vec<Vec<_>> =
        made.iter().map(|table| table.iter().map(|row| (row.q, row.kv, row.hi)).collect()).collect();
    // Chunks 0 and 3 are its own; chunk 3 of the first sequence is padding.
    let diagonal = [
        [((0, 1), (0, 1), Some(0)), ((2, 4), (2, 4), Some(0))],
        [((1, 0), (0, 1), Some(3)), ((6, 1), (2, 4), Some(12))],
        [((0, 1), (1, 0), Some(-3)), ((2, 4), (6, 1), Some(-12))],
        [((1, 0), (1, 0), Some(0)), ((6, 1), (6, 1), Some(0))],
    ];
    // Chunks 1 and 2 are the other rank's, and seen by chunk 3 alone.
    let upper = [
        [((0, 1), (0, 1), Some(-1)), ((2, 4), (2, 4), Some(-4))],
        [((1, 0), (0, 1), Some(2)), ((6, 1), (2, 4), Some(8))],
        [((0, 1), (1, 1), Some(-2)), ((2, 4), (6, 4), Some(-8))],
        [((1, 0), (1, 1), Some(1)), ((6, 1), (6, 4), Some(4))],
    ];
    assert_eq!(rows, [diagonal.concat(), upper.concat()]);
    assert_eq!(read, [(0, 4), (6, 2), (2, 2), (6, 2)], "pieces of queries that see nothing are left out");
}

#[test]
fn the_table_of_an_all_to_all_has_whole_sequences() {
    let (made, read) = golden(&two_ranks(Algorithm::AllToAll), 1);
    let row = |rows| SegmentRow { q: rows, kv: rows, key_step: 1, lo: None, hi: Some(0) };
    assert_eq!((made, read), (vec![vec![row((0, 3)), row((4, 13))]], vec![(0, 2)]));
}
