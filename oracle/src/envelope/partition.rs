//! The partition of a subject's sums: tiles, merges of partial results, partial gradients.

use serde::{Deserialize, Serialize};

use crate::Format;

/// The separately rounded pieces into which a subject cuts a problem's sums.
///
/// Smaller tiles allow more roundings, and a subject with tiles of several sizes declares the smallest. A subject
/// without tiles declares [`Partition::single`] of all rows of the problem, which is one tile. A subject that takes
/// keys one at a time, with a running maximum, has tiles of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// The number of query rows of a tile.
    pub q_tile: usize,
    /// The number of keys of a tile. The running maximum and sum change once for each tile.
    pub kv_tile: usize,
    /// The merges of a row's partial results.
    pub merges: Merges,
    /// The sums of partial gradients.
    pub sums: GradientSums,
}

/// Merges of one row's partial outs and LSEs, which separate launches compute (ring steps, splits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merges {
    /// The most merges that a row goes through; 0 where one launch makes the final row.
    pub count: usize,
    /// The format in which a launch's partial out is stored.
    pub step: Format,
    /// The format in which the running out is stored.
    pub running: Format,
    /// Whether the weighted partial out is rounded to the running format before it is added.
    pub product_rounded: bool,
    /// The formula of a merge.
    pub by: MergeBy,
}

/// The formula by which a step's out `B` and LSE `b` enter the running out `O` and LSE `L`. Both formulas compute the
/// same function in f32, and round it differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MergeBy {
    /// Weights: `L' = ln(e^L + e^b)`, `O' = e^(L − L')·O + e^(b − L')·B`. An error of O' is relative to its summands.
    #[default]
    Weights,
    /// A difference: `O' = O − σ(b − L)·(O − B)`, `L' = L − ln σ(L − b)`. Where σ is 1 the two O cancel. An error of O'
    /// is then relative to the larger of O and B, and that of L' to the larger of L and b.
    Difference,
}

/// Sums of one row's partial gradients, which separate launches compute and store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientSums {
    /// The number of roundings to `format` of one element's partial sums, and of what they are added up to; 0 where one
    /// launch makes the final gradient. Each rounding allows a unit roundoff of the sum of all terms' magnitudes, and
    /// half a smallest spacing. N stored partial sums count as N, whether they are added in f32 or one after the other
    /// in `format`: no term passes through more roundings. Query heads of a group that store their own dk and dv are
    /// declared in [`Arithmetic::group_sums`](super::Arithmetic::group_sums), and do not count here.
    pub count: usize,
    /// The format of the roundings.
    pub format: Format,
}

/// The joints of a row's partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joints {
    /// The merges of outs and LSEs.
    pub merges: Merges,
    /// The sums of gradients.
    pub sums: GradientSums,
}

/// Number of merges of a row's partial results that are allowed for each rank of a group, where each key may come in
/// four parts (two chunks of queries, two of keys). One more is allowed for the sink.
const MERGES_PER_RANK: usize = 4;
/// Number of stored partial sums of a gradient's element that are allowed for each rank of a group: a partial sum and a
/// running sum for each of those four parts, and two where a reduction over the ranks follows.
const SUMS_PER_RANK: usize = 10;

impl Partition {
    /// Returns the joints of partial results.
    pub fn joints(&self) -> Joints {
        Joints { merges: self.merges, sums: self.sums }
    }

    /// Returns the partition with the weakest joints of a group of this many ranks whose schedule is not known: partial
    /// outs are stored in `merge` and merged by `by`, partial gradients stored in `wire`.
    pub fn of_group(self, ranks: usize, merge: Format, by: MergeBy, wire: Format) -> Partition {
        let count = MERGES_PER_RANK * ranks + 1;
        let merges = Merges { count, step: merge, running: merge, product_rounded: true, by };
        Partition { merges, sums: GradientSums { count: SUMS_PER_RANK * ranks, format: wire }, ..self }
    }

    /// Returns the partition of a subject that makes every row in one launch: tiles only.
    pub fn single(q_tile: usize, kv_tile: usize) -> Partition {
        let f32 = Format::F32;
        Partition {
            q_tile,
            kv_tile,
            merges: Merges {
                count: 0,
                step: f32,
                running: f32,
                product_rounded: false,
                by: MergeBy::Weights,
            },
            sums: GradientSums { count: 0, format: f32 },
        }
    }
}
