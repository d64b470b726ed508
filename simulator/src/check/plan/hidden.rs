//! The rows of sequence-parallel regions: each row of a member's sequences is in one shard of its region, at its own place,
//! and is rotated by its position.
//!
//! Rows are looked at one by one, each once.

use rayon::prelude::*;
use seamproof_oracle::Side;
use seamproof_oracle::sharding::PlacedRun;

use super::dealt::{Row, rows, tensor};
use super::error::Unproved;
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
    let mut wanted = vec![Row::Nobody; content.len()];
    placed.iter().flat_map(of_run).for_each(|(row, of)| wanted[row] = of);
    if let Some(row) = wanted.iter().zip(&content).position(|(row, of)| *row != Row::Nobody && row != of) {
        return Err(wrong(row, "is placed with another position"));
    }
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
