//! Sequence-parallel regions: they are proved, run in f64, and refused if heads cannot be dealt.

use crate::common::hold::hold;
use crate::common::{Draws, problem};

use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Heads, Mask, Pass, Problem, ProblemFields, Run, Sequence, Sink,
    TensorRows,
};
use seamproof_simulator::check::check;
use seamproof_simulator::schedule::{
    BuildError, Layer, MergeOrder, Operation, Rotated, Schedule, Work, build, build_with, sequence_parallel,
};

/// Returns a random problem whose heads a region of `ranks` ranks can hold. KV heads are split, or one is replicated.
fn dealt(draws: &mut Draws, algorithm: Algorithm, balance: Balance, cp: usize, ranks: usize) -> Problem {
    let mut fields = ProblemFields::from(problem(draws, algorithm, balance, cp));
    let Heads { q, kv } = fields.heads;
    fields.heads = match draws.below(2) {
        0 => Heads { q: q * ranks, kv: kv * ranks },
        _ => Heads { q: q * ranks, kv: 1 },
    };
    fields.parallel.region = ranks;
    Problem::new(fields).unwrap()
}

fn proved(problem: &Problem, schedule: &Schedule) {
    let proof = check(problem, schedule).unwrap_or_else(|errors| {
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        panic!("{} ranks: {texts:#?}\n{problem:#?}", schedule.ranks.len())
    });
    assert_eq!(proof.pairs, problem.pairs() * problem.heads.q as u64);
}

fn holds(algorithm: Algorithm, balances: &[Balance], cp: usize, cases: usize) {
    let mut draws = Draws(3);
    for ranks in 1..=4 {
        for &balance in balances {
            for _ in 0..cases {
                let problem = dealt(&mut draws, algorithm, balance, cp, ranks);
                for &order in MergeOrder::of(algorithm) {
                    let schedule = sequence_parallel(&problem, |heads| build_with(heads, order)).unwrap();
                    assert_eq!(schedule.ranks.len(), cp * ranks);
                    proved(&problem, &schedule);
                    hold(&problem, &schedule, &mut draws);
                }
            }
        }
    }
}

const CUTS: [Balance; 4] =
    [Balance::DualChunk, Balance::Contiguous, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];

#[test]
fn a_region_around_one_rank_is_exact() {
    holds(Algorithm::Single, &CUTS[1..2], 1, 60);
}

#[test]
fn a_region_inside_a_ring_is_exact() {
    holds(Algorithm::Ring, &CUTS[..3], 2, 10);
}

#[test]
fn a_region_inside_an_all_gather_is_exact() {
    holds(Algorithm::AllGather, &CUTS, 3, 10);
}

#[test]
fn a_region_inside_an_all_to_all_is_exact() {
    holds(Algorithm::AllToAll, &CUTS, 2, 10);
}

#[test]
fn a_region_inside_a_hierarchy_is_exact() {
    holds(Algorithm::Hierarchical { all_to_all: 2 }, &CUTS[..2], 4, 5);
}

#[test]
fn what_a_region_cannot_hold_is_refused() {
    let heads = |q, kv, ranks| {
        let mut fields =
            ProblemFields::from(problem(&mut Draws(1), Algorithm::Single, Balance::Contiguous, 1));
        fields.heads = Heads { q, kv };
        fields.parallel.region = ranks;
        build(&Problem::new(fields).unwrap()).map(|_| ())
    };
    assert_eq!(heads(6, 2, 4), Err(BuildError::QueryHeads { heads: 6, ranks: 4 }));
    assert_eq!(heads(12, 3, 4), Err(BuildError::KvHeads { heads: 3, ranks: 4 }));
    assert_eq!(heads(4, 2, 4), Ok(()));
}

/// Returns a causal pack on one rank. Sequences are given as (real, padded) lengths; `first` rows lie before them and
/// one row of slack behind. A region of `ranks` ranks holds them.
fn packed(lengths: &[(usize, usize)], first: usize, heads: Heads, ranks: usize) -> Problem {
    let mut rows = first;
    let sequences = lengths.iter().enumerate().map(|(id, &(len, span))| {
        let run = Run::packed(rows, len, span);
        rows += span;
        Sequence { id: id as u32, q: run, kv: run }
    });
    let sequences = sequences.collect();
    let mut fields = ProblemFields::from(problem(&mut Draws(1), Algorithm::Single, Balance::Contiguous, 1));
    fields.sequences = sequences;
    (fields.rows, fields.heads) = (TensorRows { q: rows + 1, kv: rows + 1 }, heads);
    (fields.mask, fields.pass) = (Mask::CAUSAL, Pass::Backward);
    fields.softmax.sink = Sink::Learnable;
    fields.parallel = ContextParallel { region: ranks, ..ContextParallel::single() };
    Problem::new(fields).unwrap()
}

/// Returns a problem in which every shard holds real rows of a sequence, and the border between two shards cuts a
/// sequence. Its 15 rows become 8 on each of two ranks.
fn small() -> (Problem, Schedule) {
    let problem = packed(&[(5, 6), (6, 7)], 1, Heads { q: 4, kv: 2 }, 2);
    let schedule = build(&problem).unwrap();
    (problem, schedule)
}

/// Returns the checker's errors about an edited schedule, in words.
fn rejected(edit: impl FnOnce(&mut Schedule)) -> String {
    let (problem, mut schedule) = small();
    edit(&mut schedule);
    let errors = check(&problem, &schedule).expect_err("the edit is wrong");
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Edits the first operation on rank 1 that the closure accepts.
fn first(schedule: &mut Schedule, mut edit: impl FnMut(&mut Work) -> bool) {
    let found = schedule.ranks[1].operations.iter_mut().any(|operation| edit(&mut operation.work));
    assert!(found, "nothing to edit");
}

/// Edits the rows of the first rotation, forward or back.
fn rotation(schedule: &mut Schedule, back: bool, edit: impl Fn(&mut Vec<Rotated>)) {
    first(schedule, |work| match work {
        Work::Rotate { rows, inverse, .. } if *inverse == back => {
            edit(rows);
            true
        }
        _ => false,
    });
}

#[test]
fn the_seed_pack_is_proved_over_any_ranks() {
    // TransformerEngine issue 2892: lengths are padded to 16 rows for FP8, and there are 32 heads.
    let lengths = [(100, 112), (150, 160), (120, 128), (130, 144)];
    for ranks in [1, 2, 4, 8, 16, 32] {
        let problem = packed(&lengths, 0, Heads { q: 32, kv: 8 }, ranks);
        let schedule = sequence_parallel(&problem, build).unwrap();
        assert_eq!(check(&problem, &schedule).unwrap().pairs, problem.pairs() * 32, "{ranks} ranks");
    }
}

#[test]
fn no_operation_of_a_region_is_idle() {
    let (problem, right) = small();
    assert!(check(&problem, &right).is_ok());
    for rank in 0..2 {
        for operation in 0..right.ranks[rank].operations.len() {
            let mut schedule = right.clone();
            let program = &mut schedule.ranks[rank];
            let removed = program.operations.remove(operation);
            program.backward = program.backward.map(|begin| begin - usize::from(operation < begin));
            assert!(check(&problem, &schedule).is_err(), "rank {rank}, operation {operation}: {removed:?}");
        }
    }
}

#[test]
fn a_rotation_is_by_the_position_in_the_sequence() {
    let wrong = rejected(|schedule| rotation(schedule, false, |rows| rows[1].position += 6));
    assert!(wrong.contains("holds q of sequence 1, position 0, rotated by position 6"), "{wrong}");
    assert!(wrong.contains("a real row of q, rotated by its position, is needed"), "{wrong}");
    let drifting = rejected(|schedule| rotation(schedule, false, |rows| rows[0].step = 2));
    assert!(drifting.contains("holds q of sequence 0, position 1, rotated by position 2"), "{drifting}");
    assert!(!drifting.contains("holds q of sequence 0, position 0"), "the first row is right: {drifting}");
    let missing = rejected(|schedule| rotation(schedule, false, |rows| rows.truncate(1)));
    assert!(missing.contains("holds q of sequence 1, position 0; a real row"), "{missing}");
    let back = rejected(|schedule| rotation(schedule, true, |rows| rows.truncate(1)));
    assert!(back.contains("holds partial dq of sequence 1, position 0, rotated by position 0;"), "{back}");
}

#[test]
fn a_layer_takes_the_rows_and_heads_that_are_its_own() {
    let layer = |schedule: &mut Schedule, which: Layer, edit: fn(&mut std::ops::Range<usize>)| {
        first(schedule, |work| match work {
            Work::Linear { layer, heads, .. } if *layer == which => {
                edit(heads);
                true
            }
            _ => false,
        });
    };
    let other = |heads: &mut std::ops::Range<usize>| *heads = 0..heads.len();
    rejected(|schedule| layer(schedule, Layer::Column, other));
    let twice = rejected(|schedule| layer(schedule, Layer::Row, other));
    assert!(twice.contains("the layer is of heads from 0 on, the row from 2"), "{twice}");
    let outside = rejected(|schedule| layer(schedule, Layer::Column, |heads| *heads = 3..5));
    assert!(outside.contains("has 4 heads, none of them 3..5"), "{outside}");
    let turned = rejected(|schedule| {
        first(schedule, |work| match work {
            Work::Linear { layer, .. } if *layer == Layer::Column => {
                *layer = Layer::Row;
                true
            }
            _ => false,
        });
    });
    assert!(turned.contains("q of own heads has 2 heads, none of them 2..4"), "{turned}");
    let there_and_back = rejected(|schedule| {
        let operations = &mut schedule.ranks[1].operations;
        let column =
            |operation: &Operation| matches!(operation.work, Work::Linear { layer: Layer::Column, .. });
        let at = operations.iter().position(column).unwrap();
        let mut row = operations[at].clone();
        if let Work::Linear { layer, from, to, rows, .. } = &mut row.work {
            *layer = Layer::Row;
            std::mem::swap(from, to);
            rows.iter_mut().for_each(|pair| *pair = (pair.1, pair.0));
        }
        let again = [row, operations[at].clone()];
        operations.splice(at + 1..at + 1, again);
        schedule.ranks[1].backward = schedule.ranks[1].backward.map(|begin| begin + 2);
    });
    assert!(there_and_back.contains("a row-parallel layer needs an out or gradient"), "{there_and_back}");
}

#[test]
fn what_has_no_meaning_is_an_error() {
    let far = rejected(|schedule| rotation(schedule, false, |rows| rows[0].position = usize::MAX));
    assert!(far.contains("positions of a rotation"), "{far}");
    let twice = rejected(|schedule| rotation(schedule, false, |rows| rows.push(rows[0])));
    assert!(twice.contains("named twice"), "{twice}");
    for regions in [None, Some(0), Some(1), Some(usize::MAX)] {
        rejected(|schedule| schedule.sequence_parallel = regions);
    }
}
