//! Packed batches described by segment ids and positions, both ways. Any ids and positions must give runs that say
//! exactly the same, and a rank's rows described in this way must give back what the rank owns. Sequences that are read
//! from batches of both sides have the mask of the ids and positions, or there is an error; and so say their runs,
//! paired.

use seamproof_oracle::segments::{Array, Described, Segments, positions_of};
use seamproof_oracle::{Band, Problem, Run, Side};
use seamproof_simulator::helpers::{SegmentRun, paired_runs, segment_runs};

use seamproof_oracle::sharding as layout;

/// Checks the runs of any ids and positions in batch rows of `row_length`, at least 1.
///
/// # Panics
/// Panics where the runs say anything else, or one of them could be longer.
pub fn descriptor(rows: &[(i8, i8)], row_length: u8) {
    let rows: Vec<(i32, i32)> =
        rows.iter().map(|&(id, position)| (i32::from(id), i32::from(position))).collect();
    let row_length = usize::from(row_length).max(1);
    let runs = segment_runs(&rows, row_length);
    said(&runs, &rows);
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

/// Ids and positions of a side, as bytes of a fuzzer: the dimensions of each array, of which the first four count
/// modulo 8, and its values.
pub type DrawnSide = [(Vec<u8>, Vec<i8>); 2];

/// Checks the sequences of any ids and positions under any shapes.
///
/// # Panics
/// Panics where they say anything else than the ids and positions.
pub fn batches(sides: &[DrawnSide; 2]) {
    let arrays = sides.each_ref().map(|side| {
        side.each_ref().map(|(dims, values)| {
            let shape: Vec<usize> = dims.iter().take(4).map(|&dim| usize::from(dim % 8)).collect();
            Array { shape, values: values.iter().map(|&value| i32::from(value)).collect() }
        })
    });
    let [q, kv] = arrays.map(|[ids, positions]| Described {
        ids,
        positions: Some(positions).filter(|positions| !positions.shape.is_empty()),
    });
    let Ok(segments) = Segments::new(&q, &kv) else { return };
    let rows = segments.rows();
    let batch_rows = segments.leading().iter().product();
    paired([(&q, rows.q), (&kv, rows.kv)], batch_rows);
    let Ok(sequences) = segments.sequences(usize::MAX) else { return };
    let holds = |run: &Run, row: usize| run.real_rows().any(|own| own == row);
    for (i, j) in (0..rows.q.min(64)).flat_map(|i| (0..rows.kv.min(64)).map(move |j| (i, j))) {
        let with = sequences.iter().find(|sequence| holds(&sequence.q, i) && holds(&sequence.kv, j));
        assert_eq!(segments.sees(i, j, Band { lo: None, hi: None }), with.is_some(), "{i} and {j}");
        if let Some(sequence) = with {
            let diagonal = i - sequence.q.offset == j - sequence.kv.offset;
            assert_eq!(segments.sees(i, j, Band { lo: Some(0), hi: Some(0) }), diagonal, "{i} and {j}");
        }
    }
}

/// Checks that the paired runs of both sides are, batch row by batch row, the sequences of that batch row alone.
fn paired(sides: [(&Described, usize); 2], batch_rows: usize) {
    let whole = sides.map(|(side, rows)| {
        let made = || positions_of(&side.ids, None).expect("the ids have their shape");
        let positions = side.positions.as_ref().map_or_else(made, |positions| positions.values.clone());
        let pairs = side.ids.values.iter().copied().cycle().zip(positions.into_iter().cycle());
        pairs.take(rows).collect::<Vec<(i32, i32)>>()
    });
    let lengths = whole.each_ref().map(|rows| rows.len() / batch_rows.max(1));
    let runs: Vec<Vec<SegmentRun>> =
        whole.iter().zip(lengths).map(|(rows, length)| segment_runs(rows, length.max(1))).collect();
    let told = paired_runs([&runs[0], &runs[1]], lengths.map(|length| length.max(1)), batch_rows);
    for (batch_row, told) in told.into_iter().enumerate() {
        let [q, kv] = [0, 1].map(|side| {
            let rows = &whole[side][batch_row * lengths[side]..(batch_row + 1) * lengths[side]];
            let array = |of: fn(&(i32, i32)) -> i32| Array {
                shape: vec![lengths[side]],
                values: rows.iter().map(of).collect(),
            };
            Described { ids: array(|row| row.0), positions: Some(array(|row| row.1)) }
        });
        let meant = Segments::new(&q, &kv).and_then(|segments| segments.sequences(usize::MAX)).ok();
        let rows = |run: Run, side: usize| match run.len {
            0 => (batch_row * lengths[side], 0),
            len => (batch_row * lengths[side] + run.offset, len),
        };
        let meant = meant.map(|meant| meant.iter().map(|s| [rows(s.q, 0), rows(s.kv, 1)]).collect());
        // An empty side has no row to begin at.
        let told = told.filter(|_| lengths.iter().all(|length| *length > 0));
        let meant = meant.filter(|_: &Vec<_>| lengths.iter().all(|length| *length > 0));
        assert_eq!(told, meant, "batch row {batch_row} of {q:?} and {kv:?}");
    }
}

/// Checks that each rank's rows, described by sequence and position, have runs of exactly the rank's real rows.
///
/// # Panics
/// Panics where the runs have other rows.
pub fn described(problem: &Problem) {
    let Ok(layouts) = layout::layouts(problem) else { return };
    for side in layouts.iter().flat_map(|rank| [Side::Q, Side::Kv].map(|side| rank.side(side))) {
        let mut rows = vec![(0, 0); side.rows];
        for placed in &side.runs {
            for (i, row) in placed.local.real_rows().enumerate() {
                rows[row] = (placed.sequence as i32 + 1, (placed.piece.start + i * placed.piece.step) as i32);
            }
        }
        let runs = segment_runs(&rows, side.rows.max(1));
        said(&runs, &rows);
        let real: usize = side.runs.iter().map(|placed| placed.local.len).sum();
        assert_eq!(runs.iter().map(|run| run.len).sum::<usize>(), real, "{problem:?}");
    }
}

/// Checks that the runs, written out row by row, give the ids, and the positions wherever there is an id.
fn said(runs: &[SegmentRun], rows: &[(i32, i32)]) {
    let mut told = vec![None; rows.len()];
    for run in runs {
        assert!(run.id != 0 && run.len > 0, "{run:?}");
        for i in 0..run.len {
            let place = &mut told[run.offset + i];
            assert_eq!(*place, None, "row {} is in two runs", run.offset + i);
            *place = Some((run.id, run.position.wrapping_add(i as i32)));
        }
    }
    let meant: Vec<_> = rows.iter().map(|&row| (row.0 != 0).then_some(row)).collect();
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
        let side = |dims: &[u8], ids: &[i8]| [(dims.to_vec(), ids.to_vec()), (Vec::new(), Vec::new())];
        batches(&[side(&[2, 3], &[1, 1, 2, 1, 0, 3]), side(&[4], &[3, 1, 2, 2])]);
        batches(&[side(&[2, 0], &[]), side(&[7, 7, 7, 0], &[])]);
        // Two batch rows of three with ids 0 to 2, and all positions of one of them or none.
        for list in 0..3_u32.pow(6) {
            let ids: Vec<i8> = (0..6).map(|at| (list / 3_u32.pow(at) % 3) as i8).collect();
            let with = |positions: &[i8]| [(vec![2, 3], ids.clone()), (vec![3], positions.to_vec())];
            for positions in [[0, 1, 2], [0, 0, 1], [0, 1, 0]] {
                batches(&[with(&positions), side(&[3], &[2, 2, 1])]);
            }
            batches(&[side(&[2, 3], &ids), side(&[2, 3], &[1, 2, 0, 2, 1, 1])]);
        }
        for index in 0..300 {
            if let Draw::Problem(problem) = generate::draw(6, index, &Limits::fuzz()) {
                described(&problem);
            }
        }
    }
}
