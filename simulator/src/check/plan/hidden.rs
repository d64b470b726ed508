//! The rows of sequence-parallel regions: each row of a member's sequences is placed, is in one shard of its region at its own
//! place, and is rotated by its position.
//!
//! Rows are looked at one by one, each once.

use rayon::prelude::*;
use seamproof_oracle::Side;
use seamproof_oracle::sharding::PlacedRun;

use super::dealt::{Row, rows, tensor};
use super::error::Unproved;
use super::loans::is_held;
use crate::schedule::plan::Plan;
use crate::schedule::plan::rotated;

/// Proves the claims of this file.
pub(super) fn check(plan: &Plan<'_>) -> Result<(), Unproved> {
    if plan.region_ranks() == 1 {
        return Ok(());
    }
    let each = (0..plan.size()).into_par_iter();
    each.try_for_each(|member| {
        [Side::Q, Side::Kv].into_iter().try_for_each(|side| of_member(plan, member, side))
    })
}

fn of_member(plan: &Plan<'_>, member: usize, side: Side) -> Result<(), Unproved> {
    let wrong = |row, fault| Unproved::Row { rank: member, tensor: tensor(side), row, fault };
    let content = rows(plan.cuts(side)[0], member).map_err(|row| wrong(row, "is in no slot"))?;
    let placed = plan.placed(member, side);
    let is_owned = |row: Row| match side {
        Side::Q => matches!(row, Row::Real(..) | Row::Padding(_)),
        Side::Kv => is_held(plan, row),
    };
    let wanted = all_placed(&placed, &content, is_owned).map_err(|(row, fault)| wrong(row, fault))?;
    let (ranks, mut seen) = (plan.region_ranks(), wanted.clone());
    for place in 0..ranks {
        let first = place * content.len().div_ceil(ranks);
        for (row, of) in plan.shard(member * ranks + place, side).iter().flat_map(of_run) {
            match seen.get_mut(first + row).filter(|seen| **seen == of && of != Row::Nobody) {
                Some(seen) => *seen = Row::Nobody,
                None => return Err(wrong(first + row, "is in two shards, or with another position in one")),
            }
        }
    }
    if let Some(row) = seen.iter().position(|row| *row != Row::Nobody) {
        return Err(wrong(row, "is in no shard"));
    }
    turned(&placed, &wanted).map_err(|row| wrong(row, "is not rotated by its position"))
}

/// Returns the content of placed rows, which are all that are owned; or a row that is not so, with its fault.
fn all_placed(
    placed: &[PlacedRun],
    content: &[Row],
    is_owned: impl Fn(Row) -> bool,
) -> Result<Vec<Row>, (usize, &'static str)> {
    let mut wanted = vec![Row::Nobody; content.len()];
    for (row, of) in placed.iter().flat_map(of_run) {
        *wanted.get_mut(row).ok_or((row, "is placed outside of the tensor"))? = of;
    }
    for (row, (of, there)) in wanted.iter().zip(content).enumerate() {
        match *of {
            Row::Nobody if is_owned(*there) => return Err((row, "is of a sequence and is not placed")),
            Row::Nobody => {}
            of if of == *there => {}
            _ => return Err((row, "is placed with another position")),
        }
    }
    Ok(wanted)
}

/// Returns the rows of a placed run with their content.
fn of_run(placed: &PlacedRun) -> impl Iterator<Item = (usize, Row)> {
    let PlacedRun { sequence, piece, local } = *placed;
    (0..local.span).map(move |index| {
        let position = piece.start + piece.step * index;
        let is_real = index < local.len;
        (local.row(index), if is_real { Row::Real(sequence, position) } else { Row::Padding(sequence) })
    })
}

/// Checks the rotation of real rows. Returns a row that is not turned once, or by another position.
fn turned(placed: &[PlacedRun], content: &[Row]) -> Result<(), usize> {
    let mut turned = vec![false; content.len()];
    for rotation in rotated(placed) {
        for index in 0..rotation.rows.len {
            let (row, by) = (rotation.rows.row(index), rotation.position + rotation.step * index);
            let is_right = match content.get(row) {
                Some(Row::Real(_, position)) => *position == by,
                Some(Row::Padding(_)) => true,
                _ => false,
            };
            if !is_right || std::mem::replace(&mut turned[row], true) {
                return Err(row);
            }
        }
    }
    let is_missed = |(row, turned): (&Row, &bool)| matches!(row, Row::Real(..)) && !turned;
    content.iter().zip(&turned).position(is_missed).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::Run;
    use seamproof_oracle::sharding::Piece;

    use super::*;

    #[test]
    fn a_row_of_a_sequence_that_is_not_placed_is_found() {
        let run = |sequence, local: Run| {
            let piece = Piece { start: 0, step: 1, span: local.span, at: 0 };
            PlacedRun { sequence, piece, local }
        };
        let [first, second] = [run(0, Run::packed(0, 2, 3)), run(1, Run::packed(4, 2, 2))];
        let content = [
            Row::Real(0, 0),
            Row::Real(0, 1),
            Row::Padding(0),
            Row::Nobody,
            Row::Real(1, 0),
            Row::Real(1, 1),
        ];
        let placed = |placed: &[PlacedRun]| all_placed(placed, &content, |row| row != Row::Nobody);
        assert_eq!(placed(&[first, second]), Ok(content.to_vec()));
        assert_eq!(placed(&[first]), Err((4, "is of a sequence and is not placed")));
        let unpadded = run(0, Run::packed(0, 2, 2));
        assert_eq!(placed(&[unpadded, second]), Err((2, "is of a sequence and is not placed")));
        let moved = run(1, Run::packed(5, 2, 2));
        assert_eq!(placed(&[first, second, moved]), Err((6, "is placed outside of the tensor")));
    }
}
