//! How a subject cuts a problem's sums: tiles, merges of partial results, partial gradients.

use crate::Format;

/// How a subject cuts a problem's sums into separately rounded pieces.
///
/// Smaller tiles allow more roundings: a subject with tiles of several sizes declares the smallest, and one without tiles
/// [`Partition::single`] of all rows of the problem, one tile (keys taken one at a time, the maximum running, are tiles of 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Query rows of a tile.
    pub q_tile: usize,
    /// Keys of a tile: the running maximum and sum change once a tile.
    pub kv_tile: usize,
    /// How a row's partial results are merged.
    pub merges: Merges,
    /// How partial gradients are added up.
    pub sums: GradientSums,
}

/// Partial outs and LSEs of one row, computed by separate launches and merged (ring steps, splits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merges {
    /// Merges that a row goes through at most; 0 where one launch makes the final row.
    pub count: usize,
    /// What a launch's partial out is stored in.
    pub step: Format,
    /// What the running out is stored in.
    pub running: Format,
    /// Whether the weighted partial out is rounded to the running format before it is added.
    pub product_rounded: bool,
}

/// Partial gradients of one row, computed by separate launches, stored and added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientSums {
    /// Roundings to `format` of the partial sums of one element, and of what they are added up to; 0 where one launch makes
    /// the final gradient. Each allows a unit roundoff of the sum of all terms' magnitudes, and half a smallest spacing. Of N
    /// stored partial sums the count is N, whether they are added in f32 or one after the other in `format`: no term
    /// passes through more. So where each query head of a group stores its own dk and dv, which are then added, it is the
    /// number of the group's query heads.
    pub count: usize,
    /// What they round to.
    pub format: Format,
}

impl Partition {
    /// One launch makes every row: tiles only.
    pub fn single(q_tile: usize, kv_tile: usize) -> Partition {
        let f32 = Format::F32;
        Partition {
            q_tile,
            kv_tile,
            merges: Merges { count: 0, step: f32, running: f32, product_rounded: false },
            sums: GradientSums { count: 0, format: f32 },
        }
    }
}
