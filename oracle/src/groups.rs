//! [`Groups`]: the elements of a tensor that share a scale, and the shape of the tensor's scales.
//!
//! Scales are an array of three axes: groups of rows, heads (or groups of heads), groups of lanes. An axis that a
//! [`Scaling`] does not cut has the length 1:
//!
//! | scaling | shape |
//! |---|---|
//! | tensor | `[1, 1, 1]` |
//! | head | `[1, heads, 1]` |
//! | sequence-head | `[sequences, heads, 1]` |
//! | sequence-group | `[sequences, KV heads, 1]` |
//! | token-head | `[owned rows, heads, 1]` |
//! | block R × C | `[blocks of R owned rows, heads, blocks of C lanes]` |
//!
//! The last two number the rows that sequences own, sequence after sequence as the problem lists them, padding
//! included. Gaps and slack have no scale. A sequence begins a new block, and so no block has rows of two sequences.

use crate::sharding::run_of;
use crate::{Problem, Scaling, TensorName};

/// The groups of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    scaling: Scaling,
    shape: [usize; 3],
    /// Heads of the tensor that share a KV head.
    heads_per_group: usize,
    /// The first group of rows of each sequence, where rows are cut.
    first: Vec<usize>,
}

impl Groups {
    /// Returns the groups of an input or a result that has rows, heads and lanes. A tensor without scaling is one
    /// group.
    pub fn new(problem: &Problem, tensor: TensorName, scaling: Scaling) -> Groups {
        let [_, heads, lanes] = problem.shape_of(tensor);
        let (rows_per_group, lanes_per_group) = match scaling {
            Scaling::PerBlock { rows, columns } => (rows, columns),
            _ => (1, lanes.max(1)),
        };
        let (mut rows, mut first) = (0, Vec::new());
        for sequence in &problem.sequences {
            first.push(rows);
            rows += run_of(sequence, tensor.side()).span.div_ceil(rows_per_group);
        }
        let shape = match scaling {
            Scaling::None | Scaling::PerTensor => [1, 1, 1],
            Scaling::PerHead => [1, heads, 1],
            Scaling::PerSequenceHead => [problem.sequences.len(), heads, 1],
            Scaling::PerSequenceGroup => [problem.sequences.len(), problem.heads.kv, 1],
            Scaling::PerTokenHead | Scaling::PerBlock { .. } => {
                [rows, heads, lanes.div_ceil(lanes_per_group)]
            }
        };
        Groups { scaling, shape, heads_per_group: heads / problem.heads.kv, first }
    }

    /// Returns the shape of the tensor's scales.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Returns the place of an element's scale. The position counts the rows of its sequence, padding included.
    pub fn of(&self, sequence: usize, position: usize, head: usize, lane: usize) -> [usize; 3] {
        match self.scaling {
            Scaling::None | Scaling::PerTensor => [0, 0, 0],
            Scaling::PerHead => [0, head, 0],
            Scaling::PerSequenceHead => [sequence, head, 0],
            Scaling::PerSequenceGroup => [sequence, head / self.heads_per_group, 0],
            Scaling::PerTokenHead => [self.first[sequence] + position, head, 0],
            Scaling::PerBlock { rows, columns } => {
                [self.first[sequence] + position / rows, head, lane / columns]
            }
        }
    }

    /// Returns the sequence of a group of rows, and the number of the group in that sequence; `None` where all
    /// sequences share it.
    pub fn sequence_of(&self, rows: usize) -> Option<(usize, usize)> {
        match self.scaling {
            Scaling::None | Scaling::PerTensor | Scaling::PerHead => None,
            Scaling::PerSequenceHead | Scaling::PerSequenceGroup => Some((rows, 0)),
            Scaling::PerTokenHead | Scaling::PerBlock { .. } => {
                let sequence = self.first.partition_point(|first| *first <= rows) - 1;
                Some((sequence, rows - self.first[sequence]))
            }
        }
    }

    /// Returns an element that has the scale of this place: the sequence, or `None` where all sequences share it, the
    /// position, the head and the lane.
    pub fn element(&self, [rows, head, lanes]: [usize; 3]) -> (Option<usize>, [usize; 3]) {
        let (sequence, group) = self.sequence_of(rows).unzip();
        let group = group.unwrap_or(0);
        let element = match self.scaling {
            Scaling::PerSequenceGroup => [group, head * self.heads_per_group, lanes],
            Scaling::PerBlock { rows, columns } => [group * rows, head, lanes * columns],
            _ => [group, head, lanes],
        };
        (sequence, element)
    }

    /// Whether a scale belongs to some rows of a sequence. Such a scale is known to the ranks that hold these rows;
    /// any other is known to every rank.
    pub fn are_of_rows(&self) -> bool {
        self.scaling.is_of_rows()
    }
}
