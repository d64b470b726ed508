//! Layouts in which a kernel returns the LSE of a rank: plain, or with rows that are padded to a multiple.
//!
//! A layout with *padded rows* has more columns than there are rows. cuDNN and FlashAttention return `[B, H, S]` and
//! `[H, T]` with S or T rounded up, so that the stride from one head to the next is not the number of rows. What the
//! columns behind the rows hold says nothing.

use serde::{Deserialize, Serialize};

use crate::sharding::SideLayout;

/// Order of the dimensions of an LSE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LseOrder {
    /// `[heads, rows]`: one row of columns for each head.
    #[default]
    HeadsRows,
    /// `[sequences · heads, positions]`: one for each head of each sequence, as `[B, H, S]` lies in memory. Positions
    /// count the rows that the sequence owns on the rank.
    Batch,
}

/// Layout of an LSE: an array of `blocks · heads` lines of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LseLayout {
    /// Order of the dimensions.
    pub order: LseOrder,
    /// Number of which the columns are a multiple; at least 1.
    pub multiple: usize,
}

impl Default for LseLayout {
    /// Returns `[heads, rows]` without padding.
    fn default() -> LseLayout {
        LseLayout { order: LseOrder::HeadsRows, multiple: 1 }
    }
}

impl LseLayout {
    /// Whether the LSE is `[heads, rows]` without padding.
    pub fn is_plain(&self) -> bool {
        *self == LseLayout::default()
    }

    /// Returns the shape of the LSE of a rank with these rows, in a problem of so many sequences: lines and columns.
    pub fn shape(&self, rows: &SideLayout, heads: usize, sequences: usize) -> [usize; 2] {
        let (blocks, columns) = match self.order {
            LseOrder::HeadsRows => (1, rows.rows),
            LseOrder::Batch => (sequences, spans(rows, sequences).into_iter().max().unwrap_or(0)),
        };
        [blocks * heads, columns.next_multiple_of(self.multiple.max(1))]
    }

    /// Returns the block and the column of each row of a rank; `None` for a row that has none. Head h of it lies in
    /// line block · heads + h.
    pub fn places(&self, rows: &SideLayout, sequences: usize) -> Vec<Option<(usize, usize)>> {
        if self.order == LseOrder::HeadsRows {
            return (0..rows.rows).map(|row| Some((0, row))).collect();
        }
        let (mut places, mut ends) = (vec![None; rows.rows], vec![0; sequences]);
        for placed in &rows.runs {
            for row in (0..placed.local.span).map(|i| placed.local.row(i)) {
                places[row] = Some((placed.sequence, ends[placed.sequence]));
                ends[placed.sequence] += 1;
            }
        }
        places
    }
}

/// Returns the number of rows that each sequence owns on a rank.
fn spans(rows: &SideLayout, sequences: usize) -> Vec<usize> {
    let mut spans = vec![0; sequences];
    for placed in &rows.runs {
        spans[placed.sequence] += placed.local.span;
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::whole;
    use crate::{Problem, ProblemFields};

    #[test]
    fn rows_are_padded_and_every_owned_row_has_its_place() {
        let problem = Problem::new(ProblemFields::padded(&[(3, 4), (5, 5)], 8)).expect("a problem");
        let rows = whole(&problem).q;
        let layout = |order, multiple| LseLayout { order, multiple };
        assert_eq!(LseLayout::default().shape(&rows, 2, 2), [2, 9]);
        assert_eq!(layout(LseOrder::HeadsRows, 8).shape(&rows, 2, 2), [2, 16]);
        assert_eq!(layout(LseOrder::Batch, 1).shape(&rows, 2, 2), [4, 5]);
        assert_eq!(layout(LseOrder::Batch, 4).shape(&rows, 2, 2), [4, 8]);
        let places = layout(LseOrder::Batch, 4).places(&rows, 2);
        assert_eq!(places[..5], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)].map(Some));
        assert_eq!(layout(LseOrder::HeadsRows, 8).places(&rows, 2)[8], Some((0, 8)));
        let none = SideLayout::default();
        assert_eq!(layout(LseOrder::Batch, 4).shape(&none, 2, 0), [0, 0]);
    }
}
