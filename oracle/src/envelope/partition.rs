//! The partition of a subject's sums: tiles, merges of partial results, partial gradients.

use serde::{Deserialize, Serialize};

use crate::{Balance, ContextParallel, Format};

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
    /// The format to which the merged out is rounded before it becomes a code in FP8; `None` where its code is made of
    /// the running out.
    pub through: Option<Format>,
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
    /// The number of roundings of a term to a code in FP8 with the gradient's given scale, before the last sum: one in
    /// the launch, and another one where a step's sum is stored.
    pub codes: usize,
    /// The format to which the last sum is rounded before it becomes a code in FP8; `None` where its code is made of the
    /// sum.
    pub through: Option<Format>,
}

/// The joints of a row's partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joints {
    /// The merges of outs and LSEs.
    pub merges: Merges,
    /// The sums of gradients.
    pub sums: GradientSums,
}

/// Number of parts in which the keys of a rank may come to a row: two chunks of queries by two of keys.
const PARTS: usize = 4;
/// The same for stripes of several rows, in a ring: a band, and two edges for each of three ranges of keys.
const PARTS_OF_STRIPES: usize = 7;

impl Partition {
    /// Returns the joints of partial results.
    pub fn joints(&self) -> Joints {
        Joints { merges: self.merges, sums: self.sums }
    }

    /// Returns the partition with the weakest joints of a group whose schedule is not known: partial outs are stored in
    /// `merge` and merged by `by`, partial gradients stored in `wire`. A row has a merge for each part of each rank's
    /// keys, and one for the sink. An element of a gradient has a partial sum and a running sum for each of those parts,
    /// and two for each rank where a reduction over the ranks follows.
    pub fn of_group(self, parallel: &ContextParallel, merge: Format, by: MergeBy, wire: Format) -> Partition {
        let (ranks, wide) =
            (parallel.all_ranks(), matches!(parallel.balance, Balance::Striped { stripe: 2.. }));
        let parts = if wide { PARTS_OF_STRIPES } else { PARTS };
        // The nominal format of tensors in FP8, to which a schedule that is not known may round before it makes codes.
        let through = Some(Format::Bf16);
        let merges = Merges {
            count: parts * ranks + 1,
            step: merge,
            running: merge,
            product_rounded: true,
            by,
            through,
        };
        let sums = GradientSums { count: (2 * parts + 2) * ranks, format: wire, codes: 2, through };
        Partition { merges, sums, ..self }
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
                through: None,
            },
            sums: GradientSums { count: 0, format: f32, codes: 0, through: None },
        }
    }
}
