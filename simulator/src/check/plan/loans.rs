//! Keys that sequences share: each borrowed position gets the lender's row of that position once, and each lent row gets
//! back what each borrower adds to it once. Rows that sequences hold are all rows but the borrowed ones.
//!
//! Rows are looked at one by one, each once for each sequence that has it.

use std::ops::Range;

use rayon::prelude::*;
use seamproof_oracle::{Run, Side};

use super::dealt::{Row, rows};
use super::error::Unproved;
use crate::schedule::RowPair;
use crate::schedule::plan::{Counter, Plan};

/// Proves the claims of this file.
pub(super) fn check(plan: &Plan<'_>) -> Result<(), Unproved> {
    if !plan.shares() {
        return Ok(());
    }
    let [shards, pieces] = plan.cuts(Side::Kv);
    let content = |cut, rank| rows(cut, rank).map_err(|_| wrong(rank, "a row is in no slot"));
    let of_ranks: Vec<Vec<Row>> =
        (0..plan.size()).into_par_iter().map(|rank| content(shards, rank)).collect::<Result<_, _>>()?;
    (0..plan.size()).into_par_iter().try_for_each(|rank| held(plan, rank, &of_ranks[rank]))?;
    match plan.shared() {
        Some(_) => spread(plan, &content(pieces, 0)?),
        None => lent(plan, &of_ranks),
    }
}

fn wrong(rank: usize, fault: &'static str) -> Unproved {
    Unproved::Loans { rank, fault }
}

/// Whether a row is of a position that its sequence borrows.
fn is_borrowed(plan: &Plan<'_>, row: Row) -> bool {
    matches!(row, Row::Real(sequence, position) if position < plan.problem().sharing.borrowed(sequence))
}

/// Whether a row is owned by a sequence, which does not borrow it.
pub(super) fn is_held(plan: &Plan<'_>, row: Row) -> bool {
    matches!(row, Row::Real(..) | Row::Padding(_)) && !is_borrowed(plan, row)
}

/// Marks the rows of runs. Returns whether each is there once and has the content that is wanted.
fn once(runs: impl IntoIterator<Item = Run>, seen: &mut [bool], is_right: impl Fn(usize) -> bool) -> bool {
    let mut rows = runs.into_iter().flat_map(|run| run.real_rows().collect::<Vec<_>>());
    rows.all(|row| seen.get_mut(row).is_some_and(|seen| !std::mem::replace(seen, true)) && is_right(row))
}

/// Whether the rows that are marked are those that are wanted.
fn are_all(content: &[Row], seen: &[bool], is_wanted: impl Fn(Row) -> bool) -> bool {
    content.iter().zip(seen).all(|(row, seen)| *seen == is_wanted(*row))
}

/// Checks the rows that a rank's sequences hold.
fn held(plan: &Plan<'_>, rank: usize, content: &[Row]) -> Result<(), Unproved> {
    let mut seen = vec![false; content.len()];
    let is_once = once(plan.held(rank, Side::Kv), &mut seen, |_| true);
    match is_once && are_all(content, &seen, |row| is_held(plan, row)) {
        true => Ok(()),
        false => Err(wrong(rank, "rows are held twice, or borrowed rows are held")),
    }
}

/// Whether a row of a lender is the one that a borrower has a hole for.
fn is_loan(plan: &Plan<'_>, lent: Row, hole: Row) -> bool {
    let (Row::Real(with, position), Row::Real(sequence, other)) = (lent, hole) else { return false };
    let shared = plan.problem().sharing.of(sequence);
    position == other && shared.is_some_and(|shared| shared.with == with && position < shared.keys)
}

/// Checks the rows of gathered keys.
fn spread(plan: &Plan<'_>, content: &[Row]) -> Result<(), Unproved> {
    let Some(shared) = plan.shared() else { return Ok(()) };
    let mut seen = vec![false; content.len()];
    let held = shared.held.iter().map(|(_, to)| *to);
    let is_same = shared.held.iter().all(|(from, to)| from == to);
    if !is_same || !once(held, &mut seen, |row| is_held(plan, content[row])) {
        return Err(wrong(0, "gathered rows that sequences hold are others, or twice there"));
    }
    for turn in &shared.lent {
        let are_loans = turn.iter().all(|pair| is_right(plan, pair, content));
        let lent = turn.iter().map(|(lent, _)| *lent);
        let holes = turn.iter().map(|(_, hole)| *hole);
        if !are_loans
            || !once(lent, &mut vec![false; content.len()], |_| true)
            || !once(holes, &mut seen, |_| true)
        {
            return Err(wrong(0, "a gathered row is lent twice in a turn, or to another position"));
        }
    }
    match are_all(content, &seen, |row| matches!(row, Row::Real(..) | Row::Padding(_))) {
        true => Ok(()),
        false => Err(wrong(0, "a gathered row is not spread")),
    }
}

/// Whether all rows of a pair are loans.
fn is_right(plan: &Plan<'_>, (lent, hole): &RowPair, content: &[Row]) -> bool {
    let get = |row: usize| content.get(row).copied().unwrap_or_default();
    let mut rows = lent.real_rows().zip(hole.real_rows());
    lent.len == hole.len && rows.all(|(lent, hole)| is_loan(plan, get(lent), get(hole)))
}

/// Rows of one side of a rank's loans, in the order in which they are sent or arrive.
struct Ordered<'a> {
    rows: Vec<usize>,
    regions: &'a [Run],
}

impl<'a> Ordered<'a> {
    /// Returns the rows; `None` if a place in the order has no row or two, or a row has none.
    fn new(counter: &'a Counter) -> Option<Ordered<'a>> {
        let mut rows = vec![None; counter.rows];
        for (here, sent) in counter.rows() {
            if here.len != sent.len {
                return None;
            }
            for (row, at) in here.real_rows().zip(sent.real_rows()) {
                let place = rows.get_mut(at).filter(|place| place.is_none())?;
                *place = Some(row);
            }
        }
        let mut next = 0;
        let follow = counter.regions.iter().all(|region| {
            let is_next = region.offset == next && region.step == 1;
            next += region.len;
            is_next
        });
        let rows: Option<Vec<usize>> = rows.into_iter().collect();
        Some(Ordered { rows: rows?, regions: &counter.regions }).filter(|_| follow && next == counter.rows)
    }

    fn of(&self, member: usize) -> Option<&[usize]> {
        let Run { offset, len, .. } = *self.regions.get(member)?;
        let range: Range<usize> = offset..offset + len;
        self.rows.get(range)
    }
}

/// Checks the rows that ranks lend each other.
fn lent(plan: &Plan<'_>, content: &[Vec<Row>]) -> Result<(), Unproved> {
    let order = |rank: usize| {
        let desk = plan.desks().get(rank)?;
        Some([Ordered::new(&desk.lent)?, Ordered::new(&desk.holes)?])
    };
    let ordered = |rank| order(rank).ok_or(wrong(rank, "rows are sent in no order"));
    let orders: Vec<[Ordered<'_>; 2]> = (0..plan.size()).map(ordered).collect::<Result<_, _>>()?;
    let ranks = (0..plan.size()).into_par_iter();
    ranks.try_for_each(|rank| {
        for other in 0..plan.size() {
            let sides = orders[rank][0].of(other).zip(orders[other][1].of(rank));
            let (sent, holes) = sides.ok_or(wrong(rank, "rows of a member are not there"))?;
            let mut pairs = sent.iter().zip(holes);
            let get = |rank: usize, row: usize| content[rank].get(row).copied().unwrap_or_default();
            let are_loans = pairs.all(|(lent, hole)| is_loan(plan, get(rank, *lent), get(other, *hole)));
            if sent.len() != holes.len() || !are_loans {
                return Err(wrong(rank, "a lent row goes to another position"));
            }
        }
        borrowed(plan, rank, (&content[rank], &orders[rank][1].rows))?;
        turns(plan, rank, content[rank].len())
    })
}

/// Checks that a rank gets each row that its sequences borrow once.
fn borrowed(plan: &Plan<'_>, rank: usize, (content, holes): (&[Row], &[usize])) -> Result<(), Unproved> {
    let mut seen = vec![false; content.len()];
    let is_once = once(holes.iter().map(|row| Run::packed(*row, 1, 1)), &mut seen, |_| true);
    match is_once && are_all(content, &seen, |row| is_borrowed(plan, row)) {
        true => Ok(()),
        false => Err(wrong(rank, "a borrowed row arrives twice, or not at all")),
    }
}

/// Checks that each loan is in one turn, in which no lent row is twice.
fn turns(plan: &Plan<'_>, rank: usize, rows: usize) -> Result<(), Unproved> {
    let Some(desk) = plan.desks().get(rank) else { return Ok(()) };
    let mut sent = vec![false; desk.lent.rows];
    for turn in desk.lent.turns() {
        let lent = turn.iter().map(|(lent, _)| *lent);
        let places = turn.iter().map(|(_, place)| *place);
        if !once(lent, &mut vec![false; rows], |_| true) || !once(places, &mut sent, |_| true) {
            return Err(wrong(rank, "a lent row is twice in a turn"));
        }
    }
    if sent.into_iter().all(|sent| sent) { Ok(()) } else { Err(wrong(rank, "a loan is in no turn")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_is_sent_to_no_place_is_in_no_order() {
        let sent = Run::packed(0, 2, 2);
        let of = |here| Counter { loans: vec![((here, sent), 0)], regions: vec![sent], rows: 2 };
        let order = |here| Ordered::new(&of(here)).map(|ordered| ordered.rows);
        assert_eq!(order(Run::packed(4, 2, 2)), Some(vec![4, 5]));
        assert_eq!(order(Run::packed(4, 3, 3)), None);
        assert_eq!(order(Run::packed(4, 1, 2)), None);
    }
}
