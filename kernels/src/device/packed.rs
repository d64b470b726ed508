//! Row pairs that have the form of packed slots, which faster kernels take.

use std::ops::Range;

use seamproof_oracle::{Balance, Format, Run};
use seamproof_simulator::helpers::Direction;
use seamproof_simulator::schedule::{Axes, Layer, RowPair};
use seamproof_simulator::shard::{ShardedSide, Slot};

use super::image::Placed;
use crate::region::HeadPart;
use crate::tables::Cut;
use crate::view::Table;

/// The most ranks that a reordering is looked for with.
const RANKS_MAX: usize = 64;

/// Slots in tables of the device, with `count` of them in each of offset, span and length.
#[derive(Clone, Debug)]
pub(super) struct PackedSlots {
    pub(super) table: Table,
    pub(super) count: usize,
}

/// Returns the slots whose real rows the pairs are: the same rows on both sides, consecutive, in order after sorting.
pub(super) fn slots(rows: &[RowPair]) -> Option<PackedSlots> {
    let mut runs: Vec<Run> = Vec::new();
    for (from, to) in rows.iter().filter(|(from, _)| from.len > 0) {
        if (from.offset, from.step) != (to.offset, to.step) || from.step != 1 {
            return None;
        }
        runs.push(Run::packed(from.offset, from.len, from.len));
    }
    runs.sort_by_key(|run| run.offset);
    let apart = runs.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset);
    if runs.is_empty() || !apart {
        return None;
    }
    Some(tables(&runs))
}

/// Returns slots as tables.
pub(super) fn tables(runs: &[Run]) -> PackedSlots {
    let mut table = Table::default();
    let columns: [fn(&Run) -> usize; 3] = [|run| run.offset, |run| run.span, |run| run.len];
    for column in columns {
        runs.iter().for_each(|run| table.i32(&[column(run) as i32]));
    }
    PackedSlots { table, count: runs.len() }
}

/// A bijection of rows between rank order and sequence order.
#[derive(Clone, Debug)]
pub(super) struct Reorder {
    /// The slots of a rank.
    pub(super) slots: PackedSlots,
    /// The rows of a rank.
    pub(super) rows: usize,
    pub(super) cut: Cut,
    pub(super) order: Direction,
}

/// Returns the reordering of `total` rows that the pairs are, if they are one. Cuts that fit the first rank's pairs
/// are tried; one is taken if it gives every row's place.
pub(super) fn reordering(rows: &[RowPair], total: usize) -> Option<Reorder> {
    let back: Vec<RowPair> = rows.iter().map(|&(from, to)| (to, from)).collect();
    [(rows, Direction::ToSequences), (&back, Direction::ToRanks)].into_iter().find_map(|(pairs, order)| {
        let places = places(pairs, total)?;
        let mut pairs: Vec<RowPair> = pairs.iter().copied().filter(|(from, _)| from.len > 0).collect();
        pairs.sort_by_key(|(from, _)| from.offset);
        let cuts = (2..=RANKS_MAX).filter(|cp| total.is_multiple_of(*cp));
        cuts.flat_map(|cp| {
            [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }]
                .map(|balance| Cut { cp, balance })
        })
        .find_map(|cut| {
            let rows = total / cut.cp;
            let slots = rank_slots(&pairs, rows, cut)?;
            let of_shard = slots.iter().map(|run| Slot { offset: run.offset, span: run.span, len: run.len });
            let Cut { cp, balance } = cut;
            let slots_of_shard = of_shard.collect();
            let shard = ShardedSide { cp, balance, members: 1, rows, slots: slots_of_shard, lanes: None };
            // A wrong cut shows on its first rank as a rule, and the places of the others are not computed.
            let mut ranks = places.chunks(rows).enumerate();
            let fits = ranks.all(|(rank, there)| shard.partition_indices(rank) == there);
            fits.then(|| Reorder { slots: tables(&slots), rows, cut, order })
        })
    })
}

/// Returns where each row goes; `None` unless the pairs are a bijection.
fn places(pairs: &[RowPair], total: usize) -> Option<Vec<usize>> {
    if pairs.iter().map(|(from, to)| from.len.min(to.len)).sum::<usize>() != total {
        return None;
    }
    let (mut places, mut taken) = (vec![usize::MAX; total], vec![false; total]);
    for (from, to) in pairs {
        for (source, target) in from.real_rows().zip(to.real_rows()) {
            let free = places[source] == usize::MAX && !std::mem::replace(&mut taken[target], true);
            places[source] = if free { target } else { return None };
        }
    }
    taken.iter().all(|&taken| taken).then_some(places)
}

/// Returns the slots of the first rank, of so many rows, as its pairs would show them under a cut. An empty slot
/// stands where rows between slots begin; their shares follow from that.
fn rank_slots(pairs: &[RowPair], rows: usize, cut: Cut) -> Option<Vec<Run>> {
    let mine: Vec<RowPair> = pairs.iter().copied().take_while(|(from, _)| from.offset < rows).collect();
    let (last, _) = mine.last()?;
    if last.offset + last.len != rows || mine.iter().any(|(from, _)| from.step != 1) {
        return None;
    }
    let slot = |offset: usize, span: usize| Run::packed(offset, span, span);
    let mut slots = Vec::new();
    let mut rest = mine.as_slice();
    while let [(from, to), after @ ..] = rest {
        rest = after;
        match cut.balance {
            Balance::Contiguous => slots.push(slot(from.offset, from.len)),
            Balance::Striped { .. } if to.step == cut.cp => slots.push(slot(from.offset, from.len)),
            Balance::Striped { .. } => slots.push(slot(from.offset, 0)),
            Balance::DualChunk => {
                // The second chunk lies behind the first, and goes to the slot's last place.
                let (next, there) =
                    (from.offset + from.len, from.offset * cut.cp + (2 * cut.cp - 1) * from.len);
                let is_second =
                    |pair: &RowPair| (pair.0.offset, pair.0.len, pair.1.offset) == (next, from.len, there);
                match rest.split_first().filter(|(pair, _)| is_second(pair)) {
                    Some((_, after)) => {
                        slots.push(slot(from.offset, 2 * from.len));
                        rest = after;
                    }
                    None => slots.push(slot(from.offset, 0)),
                }
            }
        }
    }
    (!slots.is_empty()).then_some(slots)
}

/// A linear layer on rows that follow each other: the rank's part of a hidden row, the rows that are read and those
/// that are written, and the bytes of the rank's heads of a row.
#[derive(Clone, Debug)]
pub(super) struct PackedLayer {
    pub(super) of: HeadPart,
    pub(super) rows: [Range<usize>; 2],
    pub(super) row_bytes: usize,
}

/// Returns the layer from one tensor to another, of one format, if the rank's heads are one of equal parts of all.
pub(super) fn layer(
    layer: Layer,
    heads: &Range<usize>,
    [from, to]: &[Placed; 2],
    rows: &[RowPair],
) -> Option<PackedLayer> {
    let [(source, target)] = rows else { return None };
    let (hidden, own) = match layer {
        Layer::Column => (from, to),
        Layer::Row => (to, from),
    };
    let parts =
        |number: usize| number.is_multiple_of(own.heads).then(|| number.checked_div(own.heads)).flatten();
    let of = HeadPart { index: parts(heads.start)?, count: parts(hidden.heads)? };
    let of_rows = from.axes == Axes::Rows && to.axes == Axes::Rows;
    let alike = (from.format, from.dim) == (to.format, to.dim) && heads.len() == own.heads;
    let packed = source.step == 1 && target.step == 1 && source.len == target.len;
    let rows = [source, target].map(|run| run.offset..run.offset + run.len);
    let row_bytes = own.bytes_of(own.heads);
    (of_rows && alike && packed && row_bytes > 0).then_some(PackedLayer { of, rows, row_bytes })
}

/// Returns whether two tensors have one shape, in formats that the kernels add up.
pub(super) fn adds(to: &Placed, step: &Placed) -> bool {
    let formats = match (to.format, step.format) {
        (Format::F32, _) => true,
        (to, step) => to == step,
    };
    formats && alike(to, step)
}

/// Returns whether two tensors of rows have one shape.
pub(super) fn alike(a: &Placed, b: &Placed) -> bool {
    a.axes == Axes::Rows && b.axes == Axes::Rows && (a.rows, a.heads, a.dim) == (b.rows, b.heads, b.dim)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots with gaps, an empty one and slack are cut over ranks. The pairs are recognised both ways.
    #[test]
    fn reorderings_are_recognised() {
        let balances = [
            (Balance::Contiguous, 1),
            (Balance::DualChunk, 2),
            (Balance::Striped { stripe: 1 }, 1),
            (Balance::Striped { stripe: 2 }, 2),
        ];
        for (balance, unit) in balances {
            for cp in [2, 3, 8] {
                let mut end = 0;
                let runs: Vec<Run> = [(0, 3), (1, 2), (0, 0), (2, 1)]
                    .map(|(gap, units)| {
                        let run = Run::packed(end + gap * cp, units * unit * cp, units * unit * cp);
                        end = run.offset + run.span;
                        run
                    })
                    .to_vec();
                let shard = ShardedSide::of_runs(&runs, end + cp, cp, balance);
                let pairs: Vec<RowPair> = (0..cp)
                    .flat_map(|rank| {
                        let before = rank * shard.rows;
                        let pairs = shard.reorder(rank).into_iter();
                        pairs.map(move |(here, there)| (Run { offset: before + here.offset, ..here }, there))
                    })
                    .collect();
                let found = reordering(&pairs, shard.rows * cp).map(|found| (found.order, found.rows));
                assert_eq!(found, Some((Direction::ToSequences, shard.rows)), "{balance:?} over {cp}");
                let back: Vec<RowPair> = pairs.iter().map(|&(from, to)| (to, from)).collect();
                assert!(reordering(&back, shard.rows * cp).is_some(), "{balance:?} over {cp}");
                let mut wrong = pairs.clone();
                let (first, second) = (wrong[0].1, wrong[1].1);
                if first.len == second.len {
                    (wrong[0].1, wrong[1].1) = (second, first);
                    assert!(reordering(&wrong, shard.rows * cp).is_none(), "{balance:?} over {cp}");
                }
            }
        }
    }

    /// Every cut of every batch is recognised, and no wrong cut that is tried on the way panics.
    #[test]
    fn every_batch_is_recognised() {
        let mut state = 1_u64;
        let mut below = |end: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % end
        };
        for _ in 0..2000 {
            let (cp, stripe) = (2 + below(7), 1 + below(3));
            let balance = [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe }][below(3)];
            let unit = seamproof_oracle::sharding::span_multiple(balance, cp);
            let (mut end, mut runs) = (0, Vec::new());
            for _ in 0..1 + below(8) {
                let run = Run::packed(end + below(2) * below(4) * cp, 0, below(4) * unit);
                end = run.offset + run.span;
                runs.push(run);
            }
            let shard = ShardedSide::of_runs(&runs, end + below(2) * cp, cp, balance);
            if shard.rows == 0 {
                continue;
            }
            let of_rank = |rank: usize| {
                let pairs = shard.reorder(rank).into_iter();
                let before = rank * shard.rows;
                pairs.map(move |(here, there)| (Run { offset: before + here.offset, ..here }, there))
            };
            let pairs: Vec<RowPair> = (0..cp).flat_map(of_rank).collect();
            assert!(
                reordering(&pairs, shard.rows * cp).is_some(),
                "{balance:?} over {cp}: {shard:?} {pairs:?}"
            );
        }
    }

    #[test]
    fn slots_are_the_same_rows_on_both_sides() {
        let run = |offset, len| Run::packed(offset, len, len);
        assert!(slots(&[(run(4, 2), run(4, 2)), (run(1, 3), run(1, 3))]).is_some());
        assert!(slots(&[(run(4, 2), run(5, 2))]).is_none(), "moved");
        assert!(slots(&[(run(4, 2), run(4, 2)), (run(5, 3), run(5, 3))]).is_none(), "overlapping");
        let apart = Run { offset: 0, step: 2, len: 3, span: 3 };
        assert!(slots(&[(apart, apart)]).is_none(), "rows apart");
    }
}
