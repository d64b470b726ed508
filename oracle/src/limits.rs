//! Every bound on what a [`crate::Problem`] may say, as a named constant. Nothing read from outside is unbounded.

/// Rows of one packed tensor. Overlap checks keep one bit a row, so this is 8 MiB.
pub const ROWS_MAX: usize = 1 << 26;
/// Sequences of one problem.
pub const SEQUENCES_MAX: usize = 1 << 17;
/// Query heads.
pub const HEADS_MAX: usize = 1 << 12;
/// Head dimension, of queries and keys or of values.
pub const HEAD_DIM_MAX: usize = 256;
/// Ranks of the world that a context-parallel group lives in.
pub const WORLD_MAX: usize = 1 << 12;
/// Rows or columns of one scaling block.
pub const SCALING_BLOCK_MAX: usize = 1 << 12;
/// The softmax scale: with values of a 16-bit format's ordinary range, logits stay where an f32 statistic still has a
/// fraction, and products with it neither vanish nor overflow.
pub const SCALE_MIN: f32 = 1.0 / (1 << 20) as f32;
/// See [`SCALE_MIN`].
pub const SCALE_MAX: f32 = 64.0;
/// The soft cap, for the same reason.
pub const SOFTCAP_MIN: f32 = 1.0 / (1 << 10) as f32;
/// See [`SOFTCAP_MIN`].
pub const SOFTCAP_MAX: f32 = (1 << 20) as f32;
