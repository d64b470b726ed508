//! A [`Stretch`]: rows, and the positions that each of them meets on the other side.

use std::fmt;

use seamproof_oracle::Positions;

/// Rows, each with a line of columns. The lines change in equal steps from the first row's to the last row's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The rows, at least one.
    pub rows: Positions,
    /// The first row's columns.
    pub first: Positions,
    /// The last row's columns.
    pub last: Positions,
}

impl Stretch {
    /// Returns the stretch of one row, or of rows that all have the same columns.
    pub(super) fn alike(rows: Positions, cols: Positions) -> Stretch {
        Stretch { rows, first: cols, last: cols }
    }
}

impl fmt::Display for Stretch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stretch { rows, first, last } = self;
        write!(f, "positions {rows}: pairs with positions {first}")?;
        if first == last { Ok(()) } else { write!(f, " of the first to {last} of the last") }
    }
}
