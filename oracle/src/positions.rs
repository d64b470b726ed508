//! Positions of a sequence in equal steps.

use std::fmt;
use std::ops::Range;

/// The `len` positions `start, start + step, …`. As text they are `a..b`, without b, or `a..b step s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// The first position.
    pub start: usize,
    /// The distance from one position to the next; at least 1.
    pub step: usize,
    /// The number of positions.
    pub len: usize,
}

impl Positions {
    /// Returns the first `len` positions of a sequence: 0, 1, …
    pub fn first(len: usize) -> Positions {
        Positions { start: 0, step: 1, len }
    }

    /// Returns the position at an index, which need not be below `len`.
    pub fn at(&self, index: usize) -> usize {
        self.start + self.step * index
    }

    /// Whether a position is among these.
    pub fn contains(&self, position: usize) -> bool {
        position >= self.start
            && (position - self.start).is_multiple_of(self.step)
            && (position - self.start) / self.step < self.len
    }

    /// Returns the positions that lie in a range.
    pub fn within(&self, range: &Range<usize>) -> Positions {
        let index = |position: usize| position.saturating_sub(self.start).div_ceil(self.step).min(self.len);
        let (first, end) = (index(range.start), index(range.end));
        Positions { start: self.at(first), step: self.step, len: end.saturating_sub(first) }
    }

    /// Returns the positions, each moved on by `by`.
    pub fn moved(self, by: usize) -> Positions {
        Positions { start: self.start + by, ..self }
    }
}

impl fmt::Display for Positions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.len == 0 { self.start } else { self.at(self.len - 1) + 1 };
        write!(f, "{}..{end}", self.start)?;
        if self.len > 1 && self.step > 1 { write!(f, " step {}", self.step) } else { Ok(()) }
    }
}
