//! Packed batches described by segment ids and positions, both ways. Any ids and positions must give runs that say
//! exactly the same, and a rank's rows described in this way must give back what the rank owns.

use seamproof_oracle::{Problem, Side};
use seamproof_simulator::helpers::{SegmentRun, segment_runs};

use seamproof_oracle::sharding as layout;

/// Checks the runs of any ids and positions in batch rows of `row_length`, at least 1.
///
/// # Panics
/// Panics where the runs say anything else, or one of them could be longer.
pub fn descriptor(rows: &[(i8, i8)], row_length: u8) {
    let (ids, positions): (Vec<i32>, Vec<i32>) =
        rows.iter().map(|&(id, position)| (i32::from(id), i32::from(position))).unzip();
    let row_length = usize::from(row_length).max(1);
    let runs = segment_runs(&ids, &positions, row_length);
    said(&runs, &ids, &positions);
    for run in &runs {
        let last = run.offset + run.len - 1;
        assert_eq!(run.offset / row_length, last / row_length, "{run:?} crosses the end of a batch row");
    }
    for pair in runs.windows(2) {
        let [before, after] = [pair[0], pair[1]];
        let follows = before.offset + before.len == after.offset
            && before.id == after.id
            && before.position.wrapping_add(before.len as i32) == after.position;
        assert!(!follows || after.offset.is_multiple_of(row_length), "{before:?} ends before {after:?}");
    }
}

/// Checks that each rank's rows, described by sequence and position, have runs of exactly the rank's real rows.
///
/// # Panics
/// Panics where the runs have other rows.
pub fn described(problem: &Problem) {
    let Ok(layouts) = layout::layouts(problem) else { return };
    for side in layouts.iter().flat_map(|rank| [Side::Q, Side::Kv].map(|side| rank.side(side))) {
        let (mut ids, mut positions) = (vec![0; side.rows], vec![0; side.rows]);
        for placed in &side.runs {
            for (i, row) in placed.local.real_rows().enumerate() {
                ids[row] = placed.sequence as i32 + 1;
                positions[row] = (placed.piece.start + i * placed.piece.step) as i32;
            }
        }
        let runs = segment_runs(&ids, &positions, side.rows.max(1));
        said(&runs, &ids, &positions);
        let real: usize = side.runs.iter().map(|placed| placed.local.len).sum();
        assert_eq!(runs.iter().map(|run| run.len).sum::<usize>(), real, "{problem:?}");
    }
}

/// Checks that the runs, written out row by row, give the ids, and the positions wherever there is an id.
fn said(runs: &[SegmentRun], ids: &[i32], positions: &[i32]) {
    let mut told = vec![None; ids.len()];
    for run in runs {
        assert!(run.id != 0 && run.len > 0, "{run:?}");
        for i in 0..run.len {
            let place = &mut told[run.offset + i];
            assert_eq!(*place, None, "row {} is in two runs", run.offset + i);
            *place = Some((run.id, run.position.wrapping_add(i as i32)));
        }
    }
    let rows = ids.iter().zip(positions);
    let meant: Vec<_> = rows.map(|(&id, &position)| (id != 0).then_some((id, position))).collect();
    assert_eq!(told, meant);
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::generate::{self, Draw, Limits};

    #[test]
    fn runs_hold_for_short_lists_and_drawn_problems() {
        // The lists are all those of four rows with two ids and padding, and positions 0 and 1.
        for list in 0..6_u32.pow(4) {
            let row = |at: u32| ((list / 6_u32.pow(at) % 6 / 2) as i8, (list / 6_u32.pow(at) % 2) as i8);
            let rows: Vec<(i8, i8)> = (0..4).map(row).collect();
            [0, 1, 2, 4].into_iter().for_each(|row_length| descriptor(&rows, row_length));
        }
        for index in 0..300 {
            if let Draw::Problem(problem) = generate::draw(6, index, &Limits::fuzz()) {
                described(&problem);
            }
        }
    }
}
