//! Exact modes: inputs built so that the right answer is known bit for bit.
//!
//! Queries and keys are chosen so that every weight, relative to the largest of its row, is 0 or a power of two, and
//! values and output gradients are small integers. Then every partial sum is a small multiple of one power of two: it
//! is the same in any order, for any tile, whether products are added one after the other or in a tensor core that
//! keeps 25 bits below the largest addend and cuts off the rest. Of the exponential nothing is used but that it is
//! (nearly) 1 at (nearly) 0 and 0 far below: see [`GAP`].
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
//! In `routing` and `pairs` each *group* of keys (one key; two neighbours) has a *code*: its number in binary, each bit
//! a lane of ±1, the bits repeated over the *code lanes* of the head dimension. A query chooses a visible key (the first
//! one, the last one or any, as the hash says) and holds the code of its group, times the *amplitude* A, a power of two.
//! Lane 0 is the *bias*: 1 in every key, and in queries such that the chosen group's logit is `scale · A · steps`. A
//! group whose code differs in h lanes lies `2 h · scale · A` below it, and h is at least the number of repetitions, so
//! that A makes this at least [`GAP`]. Every fourth lane is *payload*: 0 in queries and −1, 0 or 1 in keys; it enters no
//! logit and tells the keys of a pair apart in dq. Signs of the code lanes are flipped for each sequence and KV head
//! as the hash says, so that another head's keys are other codes.
//!
//! # The staircase
//!
//! One key in each four is a *step* of level 0, 0, 1, 2, … 12, 0, 0, 1, … in order of position, or 12, 11, … in the
//! descending form; all others are *dead*: their level is −360. Levels stand in one lane of k, in which q holds 1.
//!
//! The hash of [`crate::values`] draws all of it, from the sequence's id, positions and heads alone; what a query
//! chooses depends on the mask and on its own sequence's lengths too.

mod eligible;
mod plan;
mod table;

use ndarray::{Array1, Array3};
use seamproof_oracle::{Format, Inputs, Pass, Problem, Side, Sink};

pub use eligible::{Merging, Parts, Why, eligible, fit_scale, keys_max, parts};
pub(crate) use eligible::{backward_weight_error, lse_error, out_error};
pub(crate) use plan::{Plan, has_codes, is_uniform};
pub use table::table;

/// How far, in nats, a key that is to have no weight lies below the others: `e^−104` is less than half of f32's
/// smallest subnormal number, so that it becomes 0 whatever the rounding, and 16 more make the same of the merged weight
/// of a whole launch of up to `e^16` such keys.
pub const GAP: f64 = 120.0;
/// The learnable sink of `routing` and `pairs`: without weight beside any visible key, whose logits are above 0.
pub(crate) const DEAD_SINK: f32 = -256.0;
/// Level of a key of the staircase that is no step: `360 · ln 2` is more than twice [`GAP`].
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

/// The inputs of a problem in an exact mode; its preconditions need not hold. Rows without a token are zero.
pub fn inputs(problem: &Problem) -> Inputs {
    let plans: Vec<Plan<'_>> = (0..problem.sequences.len()).map(|index| Plan::new(problem, index)).collect();
    let precision = &problem.precision;
    let dout_shape = match problem.pass {
        Pass::Forward => [0, problem.heads.q, problem.dims.v],
        Pass::Backward => problem.out_shape(),
    };
    Inputs {
        q: filled(&plans, Side::Q, problem.q_shape(), precision.q.format, Plan::fill_q),
        k: filled(&plans, Side::Kv, problem.k_shape(), precision.k.format, Plan::fill_k),
        v: filled(&plans, Side::Kv, problem.v_shape(), precision.v.format, Plan::fill_v),
        dout: filled(&plans, Side::Q, dout_shape, precision.dout.format, Plan::fill_dout),
        sink: Array1::from_elem(problem.learnable_sinks(), sink(problem).unwrap_or(0.0)),
    }
}

/// The logit of the sink, the same for every head; none where there is no sink.
pub(crate) fn sink(problem: &Problem) -> Option<f32> {
    match problem.softmax.sink {
        Sink::None => None,
        Sink::Learnable if has_codes(problem.mode) => Some(DEAD_SINK),
        Sink::OffByOne | Sink::Learnable => Some(0.0),
    }
}

fn filled<'a>(
    plans: &[Plan<'a>],
    side: Side,
    shape: [usize; 3],
    format: Format,
    fill: fn(&Plan<'a>, usize, usize, &mut [f32]),
) -> Array3<f32> {
    let mut array = Array3::zeros(shape);
    let [rows, heads, dim] = shape;
    if rows == 0 {
        return array;
    }
    let values = array.as_slice_mut().unwrap_or_default();
    // Where the preconditions do not hold a value can be beyond the format.
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
