//! Properties that hold for every problem, whatever its numbers. Each function panics where its property does not
//! hold.

use seamproof_oracle::sharding::{self as layout, PlacedRun, SideLayout};
use seamproof_oracle::{Format, Problem, Run, Side};
use seamproof_simulator::schedule::MergeOrder;
use seamproof_simulator::shard::ShardedSide;

use crate::prove::{Proved, prove};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, same_bits};
use seamproof_judge::values::{self, Poison};

/// Checks that every row that a sequence owns lies on one rank, in a place of its own, where schedules put it too, and
/// that no rank has the rows of keys that it borrows. A reordering of a rank must name each of its rows once on either
/// side.
pub fn layout(problem: &Problem) {
    let Ok(layouts) = layout::layouts(problem) else { return };
    let members = layout::members(problem).unwrap_or_default();
    for side in [Side::Q, Side::Kv] {
        let ranks: Vec<&SideLayout> = layouts.iter().map(|rank| rank.side(side)).collect();
        let mut owners: Vec<Vec<u8>> =
            problem.sequences.iter().map(|both| vec![0; layout::run_of(both, side).span]).collect();
        ranks.iter().for_each(|rank| on_rank(rank, &mut owners));
        for (sequence, owners) in owners.iter().enumerate() {
            let borrowed = layout::hole(problem, side, sequence);
            let is_right = |(row, &count): (usize, &u8)| count == u8::from(row >= borrowed);
            assert!(owners.iter().enumerate().all(is_right), "{side:?}, sequence {sequence}: {owners:?}");
        }
        if let Ok(shard) = ShardedSide::new(problem, side) {
            reorders(&shard);
            let members = members.iter().map(|rank| rank.side(side));
            for (rank, &SideLayout { rows, ref runs }) in members.enumerate() {
                // A schedule has holes for what a sequence borrows.
                let mut placed = tokens(&shard.placed(rank));
                placed
                    .retain(|&(_, sequence, position, _)| position >= layout::hole(problem, side, sequence));
                assert_eq!((shard.rows, placed), (rows, tokens(runs)), "rank {rank}");
            }
        }
    }
}

/// Returns row, sequence, position, and whether it is real, of each owned row.
fn tokens(runs: &[PlacedRun]) -> Vec<(usize, usize, usize, bool)> {
    let of = |&PlacedRun { sequence, piece, local }: &PlacedRun| {
        assert_eq!(piece.span, local.span);
        (0..local.span).map(move |i| (local.row(i), sequence, piece.start + piece.step * i, i < local.len))
    };
    runs.iter().flat_map(of).collect()
}

fn on_rank(rank: &SideLayout, owners: &mut [Vec<u8>]) {
    let mut taken = vec![false; rank.rows];
    for (row, sequence, position, _) in tokens(&rank.runs) {
        owners[sequence][position] += 1;
        assert!(!std::mem::replace(&mut taken[row], true), "two positions in row {row}");
    }
}

fn reorders(shard: &ShardedSide) {
    let mut sequence_rows = vec![false; shard.rows * shard.cp];
    for rank in 0..shard.cp {
        let mut rank_rows = vec![false; shard.rows];
        for (here, there) in shard.reorder(rank) {
            take(&mut rank_rows, here);
            take(&mut sequence_rows, there);
        }
        assert!(rank_rows.into_iter().all(|taken| taken), "rank {rank}: a row goes nowhere");
    }
    assert!(sequence_rows.into_iter().all(|taken| taken), "a row comes from nowhere");
}

fn take(rows: &mut [bool], run: Run) {
    for row in run.real_rows() {
        assert!(!std::mem::replace(&mut rows[row], true), "row {row} twice");
    }
}

/// Checks that the builder's schedule of a problem is right, or that the builder refuses the problem.
pub fn schedule(problem: &Problem) {
    for order in MergeOrder::ALL {
        if let Proved::Wrong(errors) = prove(problem, order) {
            panic!("{problem:?}: {}", errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
        }
    }
}

/// Checks that no order in which ranks and streams proceed changes a bit.
pub fn interleaving(problem: &Problem, orders: [u64; 2]) {
    let mut inputs = values::inputs(problem);
    values::poison(&mut inputs, problem, Poison::Nan);
    let results = orders.map(|order| Emulated { order, ..Emulated::default() }.run(problem, &inputs));
    if let [Ok(first), Ok(second)] = &results {
        assert!(same_bits(first, second), "orders {orders:?} differ: {problem:?}");
    }
    assert_eq!(results[0].is_ok(), results[1].is_ok(), "one of {orders:?} fails: {problem:?}");
}

/// Checks that rounding to a format gives its nearest number, and that a number of the format stays as it is.
pub fn formats(value: f64, code: u32) {
    for format in Format::ALL {
        let rounded = format.round(value);
        assert_eq!(rounded.is_nan(), value.is_nan(), "{format}: {value:e}");
        let kept = format.decode(code & ((1_u64 << format.bits()) - 1) as u32);
        // Overflow saturates, and so do infinities.
        if !kept.is_finite() || value.is_nan() {
            continue;
        }
        assert_eq!(format.round(kept).to_bits(), kept.to_bits(), "{format}: {kept:e} does not stay");
        assert_eq!(
            format.decode(format.encode(kept)).to_bits(),
            kept.to_bits(),
            "{format}: {kept:e} comes back"
        );
        // No number of the format may be nearer.
        if rounded.is_finite() {
            assert!(
                (rounded - value).abs() <= (kept - value).abs(),
                "{format}: {kept:e} is nearer to {value:e}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::problem;

    #[test]
    fn the_properties_hold_of_drawn_problems() {
        let mut state = 1_u64;
        for _ in 0..40 {
            let mut bytes = [0; 512];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (state >> 33) as u8;
            }
            let Some(problem) = problem(&bytes) else { continue };
            layout(&problem);
            schedule(&problem);
            interleaving(&problem, [1, state]);
            formats(f64::from_bits(state), (state >> 7) as u32);
            formats((state >> 40) as f64 / 1e5 - 80.0, (state >> 7) as u32);
        }
    }
}
