//! Sharding for builders of schedules: the cut of [`seamproof_oracle::sharding`], computed rank by rank instead of
//! position by position. Tests compare the two.
//!
//! A rank's slot of a sequence is a list of *pieces*: runs of positions in the order in which they lie in the slot. For
//! every balance, the real positions of a slot are a prefix of it, and one count says how much of a slot is real. Every
//! quantity follows from the *span*. The real length never moves a row (it did in TransformerEngine issue 1930: lengths
//! divided by cp).
//!
//! *Sequence order* is the layout of a gathered buffer in which every sequence is whole. It has `cp` times the rank's
//! rows, and each sequence lies at `cp` times its slot's offset. *Rank order* has the ranks' rows one after the other.
//!
//! Of rows side by side (SBHD), slots say where they would lie if each lane followed the one before. What
//! [`ShardedSide`] returns are the rows themselves: side by side on a rank, and in sequence order too.
//! [`ShardedSide::reorder`] is the bijection between the two. It includes rows that no sequence owns
//! (TransformerEngine's kernels lose or double those rows if a buffer is longer than the last offset).

use seamproof_oracle::sharding::{self, Lanes, Piece, PlacedRun, ShardingError, run_of, without_lanes};
use seamproof_oracle::{Balance, Problem, Run, Side};

/// One sequence on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First row of the slot in a rank's tensor.
    pub offset: usize,
    /// Number of rows of the slot.
    pub span: usize,
    /// Number of real positions of the whole sequence.
    pub len: usize,
}

/// One side of a problem, cut over `cp` ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedSide {
    /// Number of ranks.
    pub cp: usize,
    /// Manner in which sequences are cut.
    pub balance: Balance,
    /// Number of ranks of a finer cut whose rows each rank holds together, one after the other: each of these ranks has
    /// a piece of its own. It is 1 but for stripes of one row in the rings of the hierarchical algorithm.
    pub members: usize,
    /// Number of rows of each rank's tensor.
    pub rows: usize,
    /// The sequences, in the problem's order.
    pub slots: Vec<Slot>,
    /// The lanes of a rank's tensor, where rows lie side by side.
    pub lanes: Option<Lanes>,
}

impl ShardedSide {
    /// Cuts one side of `problem` over its group.
    pub fn new(problem: &Problem, side: Side) -> Result<ShardedSide, ShardingError> {
        sharding::check(problem, side)?;
        let total = if side == Side::Q { problem.rows.q } else { problem.rows.kv };
        let runs: Vec<Run> = problem.sequences.iter().map(|both| run_of(both, side)).collect();
        Ok(ShardedSide::of_runs(&runs, total, problem.parallel.size(), problem.parallel.balance))
    }

    /// Cuts runs of a tensor of `total` rows. Nothing is checked: spans must be multiples of
    /// [`sharding::span_multiple`], and rows must be consecutive or side by side.
    pub fn of_runs(runs: &[Run], total: usize, cp: usize, balance: Balance) -> ShardedSide {
        let (runs, total, lanes) = without_lanes(runs, total);
        let mut order: Vec<usize> = (0..runs.len()).collect();
        order.sort_by_key(|&index| (runs[index].offset, runs[index].span));
        let mut slots = vec![Slot { offset: 0, span: 0, len: 0 }; runs.len()];
        let (mut end, mut rows) = (0, 0);
        for index in order {
            let run = runs[index];
            // An empty run may lie anywhere, even inside another run.
            rows += run.offset.saturating_sub(end) / cp;
            slots[index] = Slot { offset: rows, span: run.span / cp, len: run.len };
            rows += run.span / cp;
            end = end.max(run.offset + run.span);
        }
        rows += total.saturating_sub(end) / cp;
        let lanes = lanes.map(|lanes| lanes.part(cp));
        ShardedSide { cp, balance, members: 1, rows, slots, lanes }
    }

    /// Returns where rows lie on a rank that are numbered lane after lane.
    pub(crate) fn on_rank(&self, run: Run) -> Run {
        self.lanes.map_or(run, |lanes| lanes.beside(run))
    }

    /// Returns where rows lie in sequence order that are numbered lane after lane.
    fn in_order(&self, run: Run) -> Run {
        self.lanes.map_or(run, |lanes| lanes.whole(self.cp).beside(run))
    }

    /// Returns the pieces of a rank's slot, in order of rows; none for an empty slot.
    pub fn pieces(&self, sequence: usize, rank: usize) -> impl Iterator<Item = Piece> {
        let pieces = (0..self.piece_count(sequence)).map(move |part| self.piece(sequence, rank, part));
        pieces.filter(|piece| piece.span > 0)
    }

    /// Returns the number of pieces of any slot, empty ones included; `None` if it depends on the span.
    pub(crate) fn parts(&self) -> Option<usize> {
        match self.balance {
            Balance::Contiguous => Some(1),
            Balance::DualChunk => Some(2),
            Balance::Striped { stripe: 1 } => Some(self.members),
            Balance::Striped { .. } => None,
        }
    }

    fn piece_count(&self, sequence: usize) -> usize {
        match (self.parts(), self.balance) {
            (None, Balance::Striped { stripe }) => self.slots[sequence].span / stripe,
            (parts, _) => parts.unwrap_or(1),
        }
    }

    /// Returns the largest number of stripes of a slot; 1 where rows are not cut into stripes.
    pub fn stripes_most(&self) -> usize {
        let Balance::Striped { stripe } = self.balance else { return 1 };
        self.slots.iter().map(|slot| slot.span / stripe).max().unwrap_or(0)
    }

    /// Returns the side as a ring takes it: the stripes of a rank alone are one piece.
    pub(crate) fn in_ring(&self) -> ShardedSide {
        let is_whole = self.cp == 1 && self.parts().is_none();
        ShardedSide { balance: if is_whole { Balance::Contiguous } else { self.balance }, ..self.clone() }
    }

    /// Returns one piece of a rank's slot, which may be empty.
    pub(crate) fn piece(&self, sequence: usize, rank: usize, part: usize) -> Piece {
        let (cp, span) = (self.cp, self.slots[sequence].span);
        match self.balance {
            Balance::Contiguous => Piece { start: rank * span, step: 1, span, at: 0 },
            Balance::DualChunk => {
                let (chunk, id) = (span / 2, [rank, 2 * cp - 1 - rank][part]);
                Piece { start: id * chunk, step: 1, span: chunk, at: part * chunk }
            }
            Balance::Striped { stripe: 1 } => {
                let (members, span) = (self.members, span / self.members);
                Piece { start: rank * members + part, step: cp * members, span, at: part * span }
            }
            Balance::Striped { stripe } => {
                Piece { start: (part * cp + rank) * stripe, step: 1, span: stripe, at: part * stripe }
            }
        }
    }

    /// Returns the number of real positions of a piece.
    pub fn real(&self, sequence: usize, piece: &Piece) -> usize {
        let len = self.slots[sequence].len;
        len.saturating_sub(piece.start).div_ceil(piece.step).min(piece.span)
    }

    /// Returns the rows of a piece in a rank's tensor.
    pub fn local(&self, sequence: usize, piece: &Piece) -> Run {
        let offset = self.slots[sequence].offset + piece.at;
        self.on_rank(Run { offset, step: 1, len: self.real(sequence, piece), span: piece.span })
    }

    /// Returns the rows of a sequence in a rank's tensor. Padding is included and counted as rows (`len = span`).
    pub fn slot(&self, sequence: usize) -> Run {
        let Slot { offset, span, .. } = self.slots[sequence];
        self.on_rank(Run::packed(offset, span, span))
    }

    /// Returns the pieces of every sequence on a rank, with their rows.
    pub fn placed(&self, rank: usize) -> Vec<PlacedRun> {
        (0..self.slots.len())
            .flat_map(|sequence| self.pieces(sequence, rank).map(move |piece| (sequence, piece)))
            .map(|(sequence, piece)| PlacedRun { sequence, piece, local: self.local(sequence, &piece) })
            .collect()
    }

    /// Returns the rows of a sequence in a buffer in sequence order.
    pub fn gathered(&self, sequence: usize) -> Run {
        let slot = self.slots[sequence];
        self.in_order(Run::packed(slot.offset * self.cp, slot.len, slot.span * self.cp))
    }

    /// Returns runs of a rank's tensor with their rows in sequence order. Every row of the tensor occurs once. Besides
    /// the slots' pieces there are the rows that no sequence owns, which lie rank after rank in their share of the
    /// gathered gap.
    pub fn reorder(&self, rank: usize) -> Vec<(Run, Run)> {
        let moves = self.moves(rank).into_iter();
        moves.map(|(here, there)| (self.on_rank(here), self.in_order(there))).collect()
    }

    /// Returns the same runs, numbered lane after lane.
    pub(crate) fn moves(&self, rank: usize) -> Vec<(Run, Run)> {
        let mut map = Vec::new();
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|&index| (self.slots[index].offset, self.slots[index].span));
        let mut end = 0;
        let share = |(from, to): (usize, usize)| {
            let rows = to - from;
            let there = from * self.cp + rank * rows;
            (rows > 0).then(|| (Run::packed(from, rows, rows), Run::packed(there, rows, rows)))
        };
        let unowned = |from: usize, to: usize| {
            let stretches: Vec<_> = self.stretches(from, to).into_iter().filter_map(share).collect();
            stretches
        };
        for index in order {
            let slot = self.slots[index];
            map.extend(unowned(end, slot.offset));
            for piece in self.pieces(index, rank) {
                let offset = slot.offset * self.cp + piece.start;
                let there = Run { offset, step: piece.step, len: piece.span, span: piece.span };
                map.push((Run::packed(slot.offset + piece.at, piece.span, piece.span), there));
            }
            end = slot.offset + slot.span;
        }
        map.extend(unowned(end, self.rows));
        map
    }

    /// Returns the parts of `from..to` of which each lies in one lane or outside all of them.
    fn stretches(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
        let borders = self
            .lanes
            .into_iter()
            .flat_map(|Lanes { first, step, height }| (0..=step).map(move |lane| first + lane * height));
        let inner = borders.filter(|&border| from < border && border < to);
        let ends: Vec<usize> = [from].into_iter().chain(inner).chain([to.max(from)]).collect();
        ends.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }

    /// Returns the row in sequence order of each row of a rank's tensor, as TransformerEngine's
    /// `thd_get_partitioned_indices` does.
    pub fn partition_indices(&self, rank: usize) -> Vec<usize> {
        let mut indices = vec![0; self.rows];
        for (here, there) in self.reorder(rank) {
            for (row, index) in here.real_rows().zip(there.real_rows()) {
                indices[row] = index;
            }
        }
        indices
    }
}

/// Returns TransformerEngine's `get_cu_seqlens_on_cp_rank`: the running sum from 0 of the real tokens in the first and
/// the second chunk of a rank's dual-chunk slot of each sequence. A chunk counts only on request.
///
/// `lens` are global real lengths. `slots` are the ranks' padded lengths, which are the global ones divided by `cp`.
pub fn cu_seqlens_on_cp_rank(
    lens: &[usize],
    slots: &[usize],
    cp: usize,
    rank: usize,
    first: bool,
    second: bool,
) -> Vec<usize> {
    let mut sum = 0;
    let counts = lens.iter().zip(slots).map(|(&len, &slot)| {
        let chunk = slot / 2;
        let real = |id: usize| len.saturating_sub(id * chunk).min(chunk);
        sum += if first { real(rank) } else { 0 } + if second { real(2 * cp - 1 - rank) } else { 0 };
        sum
    });
    std::iter::once(0).chain(counts.collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::sharding::span_multiple;

    use super::*;

    /// Returns a shard of packed sequences that are given as (real, padded), with a first offset and slack in ranks'
    /// rows.
    fn shard(
        lengths: &[(usize, usize)],
        cp: usize,
        balance: Balance,
        first: usize,
        slack: usize,
    ) -> ShardedSide {
        let mut rows = first;
        let slots = lengths.iter().map(|&(len, padded)| {
            let slot = Slot { offset: rows, span: padded / cp, len };
            rows += slot.span;
            slot
        });
        let slots = slots.collect();
        ShardedSide { cp, balance, members: 1, rows: rows + slack, slots, lanes: None }
    }

    #[test]
    fn reorder_is_a_bijection_and_real_rows_are_prefixes() {
        let balances = [
            Balance::Contiguous,
            Balance::DualChunk,
            Balance::Striped { stripe: 1 },
            Balance::Striped { stripe: 3 },
        ];
        for (cp, balance) in (1..=9).flat_map(|cp| balances.map(|balance| (cp, balance))) {
            let unit = span_multiple(balance, cp);
            for (first, slack) in [(0, 0), (2, 0), (0, 3), (1, 1)] {
                for len in [0, 1, unit, 2 * unit - 1, 2 * unit + 1] {
                    let shard = shard(&[(len, 3 * unit), (0, 0), (1, unit)], cp, balance, first, slack);
                    let mut seen = vec![0; shard.rows * cp];
                    for rank in 0..cp {
                        shard.partition_indices(rank).into_iter().for_each(|index| seen[index] += 1);
                    }
                    assert!(seen.iter().all(|&count| count == 1), "{shard:?}");
                    for rank in 0..cp {
                        real_rows_are_a_prefix(&shard, rank);
                    }
                    let real: usize = (0..cp)
                        .flat_map(|rank| shard.pieces(0, rank))
                        .map(|piece| shard.real(0, &piece))
                        .sum();
                    assert_eq!(real, len, "{shard:?}");
                }
            }
        }
    }

    fn real_rows_are_a_prefix(shard: &ShardedSide, rank: usize) {
        let indices = shard.partition_indices(rank);
        for (sequence, slot) in shard.slots.iter().enumerate() {
            let start = shard.gathered(sequence).offset;
            let positions = indices[slot.offset..slot.offset + slot.span].iter().map(|index| index - start);
            let real: Vec<bool> = positions.map(|position| position < slot.len).collect();
            assert!(real.is_sorted_by(|a, b| a >= b), "{shard:?} rank {rank}");
        }
    }
}
