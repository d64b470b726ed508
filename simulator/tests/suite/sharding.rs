//! The cut of the schedules' builders is the oracle's cut, and both are TransformerEngine's.

use crate::common::{Draws, problem, side_by_side};

use std::collections::BTreeMap;

use seamproof_oracle::sharding::{PlacedRun, RankLayout, SideLayout, layouts, run_of, span_multiple};
use seamproof_oracle::{Algorithm, Balance, Problem, ProblemFields, Run, Sequence, Side, TensorRows};
use seamproof_simulator::check::check;
use seamproof_simulator::faults;
use seamproof_simulator::helpers::rank_slots;
use seamproof_simulator::shard::{ShardedSide, cu_seqlens_on_cp_rank};

const BALANCES: [Balance; 6] = [
    Balance::Contiguous,
    Balance::DualChunk,
    Balance::Striped { stripe: 1 },
    Balance::Striped { stripe: 2 },
    Balance::Striped { stripe: 3 },
    Balance::Striped { stripe: 8 },
];

/// Returns the content of each owned row of a tensor: sequence, position, and whether the row is real.
fn held(rows: usize, runs: &[PlacedRun]) -> BTreeMap<usize, (usize, usize, bool)> {
    let mut held = BTreeMap::new();
    for PlacedRun { sequence, piece, local } in runs {
        assert_eq!(piece.span, local.span);
        for index in 0..local.span {
            let token = (*sequence, piece.start + index * piece.step, index < local.len);
            assert!(local.row(index) < rows, "{local:?} of {rows} rows");
            assert_eq!(held.insert(local.row(index), token), None, "two tokens in one row");
        }
    }
    held
}

/// Returns runs of the given spans, in a drawn order of memory with gaps, and the number of the tensor's rows. A run
/// without rows lies anywhere.
fn drawn_runs(draws: &mut Draws, spans: &[usize], cp: usize) -> (Vec<Run>, usize) {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    (1..order.len()).for_each(|last| order.swap(last, draws.below(last + 1)));
    let (mut runs, mut end) = (vec![Run::packed(0, 0, 0); spans.len()], 0);
    for index in order {
        let offset = end + draws.pick(&[0, 0, 1, cp, 2 * cp + 1]);
        runs[index] = Run::packed(offset, draws.below(spans[index] + 1), spans[index]);
        end = offset + spans[index];
    }
    let rows = end + draws.below(2 * cp + 2);
    let empty = |run: &&mut Run| run.span == 0;
    runs.iter_mut().filter(empty).for_each(|run| run.offset = draws.below(rows + 1));
    (runs, rows)
}

/// Returns a problem with up to five sequences in any order of memory, or side by side. Its gaps, first offset and
/// slack need not be divisible by the ranks.
fn drawn(draws: &mut Draws, balance: Balance, cp: usize) -> Problem {
    let mut fields = ProblemFields::from(problem(draws, Algorithm::AllGather, balance, cp));
    let count = draws.below(6);
    let mut side = || {
        let spans: Vec<usize> = (0..count).map(|_| span_multiple(balance, cp) * draws.below(4)).collect();
        drawn_runs(draws, &spans, cp)
    };
    let ((q, q_rows), (kv, kv_rows)) = (side(), side());
    let pairs = (0..).zip(q.into_iter().zip(kv));
    fields.sequences = pairs.map(|(id, (q, kv))| Sequence { id, q, kv }).collect();
    fields.rows = TensorRows { q: q_rows, kv: kv_rows };
    let packed = Problem::new(fields).expect("a problem");
    if draws.below(3) == 0 { side_by_side(draws, &packed) } else { packed }
}

#[test]
fn every_rank_of_a_shard_holds_what_the_oracle_says() {
    let mut draws = Draws(1);
    for (balance, cp) in BALANCES.into_iter().flat_map(|balance| (1..=8).map(move |cp| (balance, cp))) {
        for _ in 0..40 {
            let problem = drawn(&mut draws, balance, cp);
            let ranks = layouts(&problem).expect("spans that the balance divides");
            assert_eq!(ranks.len(), cp);
            for side in [Side::Q, Side::Kv] {
                let shard = ShardedSide::new(&problem, side).expect("the same spans");
                for (rank, layout) in ranks.iter().enumerate() {
                    let SideLayout { rows, runs } = layout.side(side);
                    assert_eq!(shard.rows, *rows, "{problem:?}");
                    assert_eq!(
                        held(*rows, &shard.placed(rank)),
                        held(*rows, runs),
                        "rank {rank} of {problem:?}"
                    );
                }
                every_position_is_once(&problem, side, &ranks);
            }
        }
    }
}

/// Test that rows which are brought from the order of ranks to that of sequences, and back, are where they were.
#[test]
fn there_and_back_is_the_identity() {
    let mut draws = Draws(23);
    for (cp, balance) in (1..=5).flat_map(|cp| BALANCES.map(|balance| (cp, balance))) {
        for _ in 0..10 {
            let problem = drawn(&mut draws, balance, cp);
            let shard = ShardedSide::new(&problem, Side::Kv).unwrap();
            let of_rank = |rank: usize| {
                let pairs = shard.reorder(rank).into_iter();
                let rows = pairs.flat_map(|(here, there)| here.real_rows().zip(there.real_rows()));
                rows.map(move |(here, there)| (rank * shard.rows + here, there)).collect::<Vec<_>>()
            };
            let pairs: Vec<(usize, usize)> = (0..cp).flat_map(of_rank).collect();
            let ranks: Vec<usize> = (0..shard.rows * cp).collect();
            let (mut sequences, mut back) = (vec![usize::MAX; ranks.len()], vec![usize::MAX; ranks.len()]);
            pairs.iter().for_each(|&(here, there)| sequences[there] = ranks[here]);
            assert!(sequences.iter().all(|row| *row != usize::MAX), "{problem:?}");
            pairs.iter().for_each(|&(here, there)| back[here] = sequences[there]);
            assert_eq!(back, ranks, "{problem:?}");
        }
    }
}

fn every_position_is_once(problem: &Problem, side: Side, ranks: &[RankLayout]) {
    let held = ranks.iter().flat_map(|rank| held(rank.side(side).rows, &rank.side(side).runs).into_values());
    let mut held: Vec<_> = held.collect();
    held.sort_unstable();
    let of = |(sequence, both): (usize, &Sequence)| {
        let Run { len, span, .. } = run_of(both, side);
        (0..span).map(move |position| (sequence, position, position < len))
    };
    assert!(problem.sequences.iter().enumerate().flat_map(of).eq(held), "{problem:?}");
}

/// Returns a problem with packed sequences, given as (real, padded), and a dual-chunk cut.
fn dual(lengths: &[(usize, usize)], cp: usize) -> Problem {
    let mut fields =
        ProblemFields::from(problem(&mut Draws(1), Algorithm::AllGather, Balance::DualChunk, cp));
    let mut end = 0;
    let sequence = |(id, &(len, padded)): (u32, &(usize, usize))| {
        let run = Run::packed(end, len, padded);
        end += padded;
        Sequence { id, q: run, kv: run }
    };
    fields.sequences = (0..).zip(lengths).map(sequence).collect();
    fields.rows = TensorRows { q: end, kv: end };
    Problem::new(fields).expect("a problem")
}

/// Returns the row in the whole pack of each row of a rank, from the shard and from the oracle.
fn partition(problem: &Problem, rank: usize) -> [Vec<usize>; 2] {
    let side = &layouts(problem).expect("a cut")[rank].q;
    let row = |(sequence, position, _): (usize, usize, bool)| problem.sequences[sequence].q.row(position);
    [
        ShardedSide::new(problem, Side::Q).expect("a cut").partition_indices(rank),
        held(side.rows, &side.runs).into_values().map(row).collect(),
    ]
}

#[test]
fn partition_indices_are_the_golden_ones() {
    let golden = |padded: &[usize], cp: usize, ranks: &[&[usize]]| {
        let lengths: Vec<_> = padded.iter().map(|&padded| (padded, padded)).collect();
        for (rank, &indices) in ranks.iter().enumerate() {
            assert_eq!(partition(&dual(&lengths, cp), rank), [indices, indices], "{padded:?} rank {rank}");
        }
    };
    let four: [&[usize]; 4] = [
        &[0, 7, 8, 15, 16, 23, 24, 25, 38, 39],
        &[1, 6, 9, 14, 17, 22, 26, 27, 36, 37],
        &[2, 5, 10, 13, 18, 21, 28, 29, 34, 35],
        &[3, 4, 11, 12, 19, 20, 30, 31, 32, 33],
    ];
    golden(&[8, 8, 8, 16], 4, &four);
    golden(&[4, 0, 8], 2, &[&[0, 3, 4, 5, 10, 11], &[1, 2, 6, 7, 8, 9]]);
}

/// Returns for each sequence the real tokens in the first or the second half of a rank's slot, from TransformerEngine's
/// helper and from the oracle.
fn counts(lens: &[usize], slots: &[usize], cp: usize, rank: usize, second: bool) -> [Vec<usize>; 2] {
    let sums = cu_seqlens_on_cp_rank(lens, slots, cp, rank, !second, second);
    let lengths: Vec<_> = lens.iter().zip(slots).map(|(&len, &slot)| (len, slot * cp)).collect();
    let side = &layouts(&dual(&lengths, cp)).expect("a cut")[rank].q;
    let mut rows = held(side.rows, &side.runs).into_values();
    let mut half =
        |rows_of_half: usize| rows.by_ref().take(rows_of_half).filter(|(_, _, real)| *real).count();
    let halves = slots.iter().map(|slot| [half(slot / 2), half(slot / 2)][usize::from(second)]);
    [sums.windows(2).map(|pair| pair[1] - pair[0]).collect(), halves.collect()]
}

#[test]
fn counts_on_ranks_are_the_golden_ones() {
    let golden = |lens: &[usize], slots: &[usize], cp, rank, first: &[usize], second: &[usize]| {
        assert_eq!(counts(lens, slots, cp, rank, false), [first, first], "{lens:?} rank {rank}");
        assert_eq!(counts(lens, slots, cp, rank, true), [second, second], "{lens:?} rank {rank}");
    };
    golden(&[7], &[4], 2, 0, &[2], &[1]);
    golden(&[7], &[4], 2, 1, &[2], &[2]);
    golden(&[698], &[176], 4, 0, &[88], &[82]);
    golden(&[698], &[176], 4, 3, &[88], &[88]);
    // TransformerEngine issue 2186: cu_seqlens 0,9,17,25,37,45,57 in 0,12,20,28,40,48,60 on two ranks.
    let (lens, slots) = ([9, 8, 8, 12, 8, 12], [6, 4, 4, 6, 4, 6]);
    golden(&lens, &slots, 2, 0, &[3, 2, 2, 3, 2, 3], &[0, 2, 2, 3, 2, 3]);
    golden(&lens, &slots, 2, 1, &[3, 2, 2, 3, 2, 3], &[3, 2, 2, 3, 2, 3]);
    assert_eq!(cu_seqlens_on_cp_rank(&lens, &slots, 2, 0, true, true), [0, 3, 7, 11, 17, 21, 27]);
    golden(&[3, 13], &[2, 8], 2, 0, &[1, 4], &[0, 1]);
    golden(&[3, 13], &[2, 8], 2, 1, &[1, 4], &[1, 4]);
}

/// Test of counts with padding included, which a caller asks for by padded lengths: their running sum has the offsets of
/// the rank's rows, on every rank, and the running sum of the real ones does not.
#[test]
fn counts_with_padding_are_the_offsets_of_the_ranks_rows() {
    let (lens, padded) = ([5, 8, 8, 12, 8, 12], [12, 8, 8, 12, 8, 12]);
    let (slots, golden) = (padded.map(|padded| padded / 2), [0, 6, 10, 14, 20, 24, 30]);
    let shard = ShardedSide::new(&dual(&lens.into_iter().zip(padded).collect::<Vec<_>>(), 2), Side::Q);
    let shard = shard.expect("a cut");
    for rank in 0..2 {
        let sums = |lens: &[usize]| cu_seqlens_on_cp_rank(lens, &slots, 2, rank, true, true);
        assert_eq!(sums(&padded), golden);
        let runs = rank_slots(&shard, rank);
        assert_eq!(runs.iter().map(|run| run.offset).collect::<Vec<_>>(), golden[..6]);
        let real: Vec<_> = sums(&lens).windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(runs.iter().map(|run| run.len).collect::<Vec<_>>(), real);
        assert_ne!(sums(&lens), golden);
    }
}

#[test]
fn no_proof_sees_a_wrong_cut_that_a_whole_schedule_agrees_on() {
    let fault = faults::by_id("dealt-in-order").expect("a fault of the catalogue");
    let mut draws = Draws(1);
    for cp in 2..=4 {
        for algorithm in [Algorithm::Ring, Algorithm::AllGather, Algorithm::AllToAll] {
            let problem = problem(&mut draws, algorithm, Balance::DualChunk, cp);
            let mut schedule = fault.schedule(&problem).expect("a schedule");
            assert!(problem.sequences.is_empty() || fault.plant(&problem, &mut schedule), "{problem:?}");
            assert_eq!(check(&problem, &schedule).err(), None, "{problem:?}");
        }
    }
}
