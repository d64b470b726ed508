//! Dealt rows: on which rank, and in which row there, each position of one side of a sequence lies.
//!
//! Positions count the rows of the sequence: real ones first, then padding. The *own position* of a row counts those
//! that its rank has of the sequence.

use std::collections::HashMap;

use seamproof_oracle::Side;
use seamproof_oracle::sharding::{PlacedRun, RankLayout, run_of};

use super::pairs::Pairs;

/// The rows that one rank holds of a sequence: all, or one of its two chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Rank in the group.
    pub(super) rank: usize,
    /// 0 or 1 where the rank has two runs of positions.
    pub(super) chunk: Option<usize>,
}

impl Part {
    pub(super) fn holds(self, other: Part) -> bool {
        self.rank == other.rank && (self.chunk.is_none() || self.chunk == other.chunk)
    }
}

/// Where a position lies.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) part: Part,
    /// Row in the rank's tensor.
    pub(super) row: usize,
    /// Its own position.
    pub(super) own: usize,
}

/// One side of a sequence, by the ranks that hold it.
pub(super) struct Dealt {
    pub(super) ranks: usize,
    /// Number of real rows.
    pub(super) len: usize,
    /// What the ranks hold, each part once: chunks where a rank has two.
    pub(super) parts: Vec<Part>,
    /// Place of each position, padding included.
    places: Vec<Option<Place>>,
    /// Position of each row of each rank. Tables of a recording may number padding as they like.
    positions: HashMap<(usize, usize), usize>,
}

impl Dealt {
    pub(super) fn new(layouts: &[RankLayout], pairs: &Pairs<'_>, side: Side) -> Dealt {
        let run = run_of(pairs.both, side);
        let (mut parts, mut places, mut positions) = (Vec::new(), vec![None; run.span], HashMap::new());
        for (rank, layout) in layouts.iter().enumerate() {
            let of_sequence = layout.side(side).runs.iter().filter(|run| run.sequence == pairs.sequence);
            let runs: Vec<&PlacedRun> = of_sequence.collect();
            let mut before = 0;
            for (index, PlacedRun { piece, local, .. }) in runs.iter().enumerate() {
                let part = Part { rank, chunk: (runs.len() == 2).then_some(index) };
                if parts.last() != Some(&part) {
                    parts.push(part);
                }
                for i in 0..local.span {
                    let (position, row) = (piece.start + i * piece.step, local.row(i));
                    positions.insert((rank, row), position);
                    if let Some(place) = places.get_mut(position) {
                        *place = Some(Place { part, row, own: before + i });
                    }
                }
                before += local.span;
            }
        }
        Dealt { ranks: layouts.len(), len: run.len, parts, places, positions }
    }

    /// Returns the place of a real position.
    pub(super) fn place(&self, position: usize) -> Option<Place> {
        self.places[..self.len].get(position).copied().flatten()
    }

    /// Returns the real positions of a part.
    pub(super) fn positions(&self, part: Part) -> impl Iterator<Item = usize> {
        (0..self.len).filter(move |position| self.place(*position).is_some_and(|place| place.part == part))
    }

    /// Returns the real position that lies in a row of a rank.
    pub(super) fn position(&self, rank: usize, row: usize) -> Option<usize> {
        self.positions.get(&(rank, row)).copied().filter(|position| *position < self.len)
    }

    /// Returns the places of all positions, padding included; `None` where one lies on no rank, or where ranks have
    /// positions past the last one.
    pub(super) fn all(&self) -> Option<Vec<Place>> {
        let is_within = self.positions.values().all(|position| *position < self.places.len());
        self.places.iter().copied().collect::<Option<_>>().filter(|_| is_within)
    }
}
