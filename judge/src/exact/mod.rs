//! Exact modes: inputs built so that the right answer is known bit for bit.
//!
//! Queries and keys are chosen so that every weight, relative to the largest of its row, is 0 or a power of two.
//! Values and output gradients are small integers. Every partial sum is then a small multiple of one power of two. It
//! is the same in any order and for any tile, whether products are added one after the other or in a tensor core that
//! keeps 25 bits below the largest addend and truncates the rest. The modes rely on the exponential only for being
//! (nearly) 1 at (nearly) 0, and 0 far below (see [`GAP`]).
//!
//! | mode | logits of a row | values | shows |
//! |---|---|---|---|
//! | `uniform-count` | all 0 (q = 0) | −15 to 15 | how many keys a query sees, and which |
//! | `endpoints` | all 0 (q = 0) | `F(j + 1) − F(j)`, F from 0 to 60 | the first and the last key of the interval |
//! | `routing` | one key's far above all others | −127 to 127 | which row a query reads, and the scale |
//! | `pairs` | those of a pair of keys far above all others | 0, 1 | edges from both sides; the whole backward |
//! | `staircase` | `level · ln 2` | 0 to 15 | rescaling in both orders of keys, merge weights |
//!
//! # Codes
//!
//! In `routing` and `pairs`, each *group* of keys (one key, or two neighbours) has a *code*: its number in binary,
//! with each bit in a lane of ±1, and the bits repeated over the *code lanes* of the head dimension. A query chooses
//! a visible key (the first, the last or any, as the hash says). It holds the code of that key's group, times the
//! *amplitude* A, a power of two. Lane 0 is the *bias*: 1 in every key, and such in queries that the chosen group's
//! logit is `scale · A · steps`. A group whose code differs in h lanes lies `2 h · scale · A` below it. Since h is at
//! least the number of repetitions, A can make this distance at least [`GAP`]. Every fourth lane is *payload*: 0 in
//! queries, and −1, 0 or 1 in keys. It enters no logit, and it tells the keys of a pair apart in dq. The hash flips
//! signs of the code lanes for each sequence and KV head, so another head's keys have other codes.
//!
//! # The staircase
//!
//! One key in each four is a *step* of level 0, 0, 1, 2, … 12, 0, 0, 1, … in order of position, or of level 12, 12,
//! 11, … in the descending form. All others are *dead*: their level is −360. Levels stand in one lane of k, in which
//! q holds 1.
//!
//! The hash of [`crate::values`] draws all of this from the sequence's id, positions and heads alone. A query's
//! choice also depends on the mask and on the lengths of its own sequence.

mod eligible;
mod plan;
mod table;

use crate::values::scales;
use ndarray::{Array1, Array3};
use seamproof_oracle::{Format, Inputs, Pass, Problem, Side, Sink};

pub use eligible::{Merging, Parts, Why, eligible, fit_scale, keys_max, parts};
pub(crate) use eligible::{backward_weight_error, difference_error, lse_error, normalised, out_error};
pub(crate) use plan::{ExactPlan, has_codes, is_uniform};
pub use table::table;

/// Distance in nats by which a key without weight lies below the others. `e^−104` is less than half of f32's smallest
/// subnormal number, so it becomes 0 whatever the rounding. Another 16 give the same for the merged weight of a whole
/// launch of up to `e^16` such keys.
pub const GAP: f64 = 120.0;
/// Learnable sink of `routing` and `pairs`. It has no weight beside any visible key, since their logits are above 0.
pub(crate) const DEAD_SINK: f32 = -256.0;
/// Level of a key of the staircase that is not a step. `360 · ln 2` is more than twice [`GAP`].
pub(crate) const DEAD_LEVEL: i32 = -360;
/// Highest level of the staircase.
pub(crate) const LEVEL_MAX: i32 = 12;
/// Largest magnitude of a value in `uniform-count`.
pub(crate) const COUNT_VALUE: u32 = 15;
/// Largest entry of a table of `endpoints`: differences have 7 bits, which every 16-bit format holds.
pub(crate) const TABLE_MAX: u32 = 60;
/// Largest magnitude of a value in `routing`.
pub(crate) const ROUTED_VALUE: u32 = 127;
/// Largest value in `staircase`.
pub(crate) const STAIR_VALUE: u32 = 15;

/// Returns the inputs of a problem in an exact mode, whose preconditions need not hold. Rows without a token are
/// zero.
pub fn inputs(problem: &Problem) -> Inputs {
    let plans: Vec<ExactPlan<'_>> =
        (0..problem.sequences.len()).map(|index| ExactPlan::new(problem, index)).collect();
    let precision = &problem.precision;
    let dout_shape = match problem.pass {
        Pass::Forward => [0, problem.heads.q, problem.dims.v],
        Pass::Backward => problem.out_shape(),
    };
    Inputs {
        q: filled(&plans, Side::Q, problem.q_shape(), precision.q.format, ExactPlan::fill_q),
        k: filled(&plans, Side::Kv, problem.k_shape(), precision.k.format, ExactPlan::fill_k),
        v: filled(&plans, Side::Kv, problem.v_shape(), precision.v.format, ExactPlan::fill_v),
        dout: filled(&plans, Side::Q, dout_shape, precision.dout.format, ExactPlan::fill_dout),
        sink: Array1::from_elem(problem.learnable_sinks(), sink(problem).unwrap_or(0.0)),
        scales: scales(problem),
    }
}

/// Returns the logit of the sink, the same for every head; `None` where there is no sink.
pub(crate) fn sink(problem: &Problem) -> Option<f32> {
    match problem.softmax.sink {
        Sink::None => None,
        Sink::Learnable if has_codes(problem.mode) => Some(DEAD_SINK),
        Sink::OffByOne | Sink::Learnable => Some(0.0),
    }
}

fn filled<'a>(
    plans: &[ExactPlan<'a>],
    side: Side,
    shape: [usize; 3],
    format: Format,
    fill: fn(&ExactPlan<'a>, usize, usize, &mut [f32]),
) -> Array3<f32> {
    let mut array = Array3::zeros(shape);
    let [rows, heads, dim] = shape;
    if rows == 0 {
        return array;
    }
    let values = array.as_slice_mut().unwrap_or_default();
    // Where the preconditions do not hold, a value can lie beyond the format.
    let largest = format.max_finite() as f32;
    for plan in plans {
        for (position, row) in plan.run(side).real_rows().enumerate() {
            let lanes = &mut values[row * heads * dim..(row + 1) * heads * dim];
            for (head, lanes) in lanes.chunks_exact_mut(dim).enumerate() {
                fill(plan, position, head, lanes);
                for lane in lanes {
                    *lane = format.round_f32(lane.clamp(-largest, largest));
                }
            }
        }
    }
    array
}
