//! The bounds of a [`crate::Problem`]'s fields, each a named constant. Nothing that is read from outside is unbounded.

/// The most rows of one packed tensor. Overlap checks keep one bit for each row: 8 MiB at most.
pub const ROWS_MAX: usize = 1 << 26;
/// The most sequences of one problem.
pub const SEQUENCES_MAX: usize = 1 << 17;
/// The most query heads.
pub const HEADS_MAX: usize = 1 << 12;
/// The largest head dimension, of queries and keys or of values. It is that of latent attention, whose one KV head has 512
/// latent lanes, which are the values, and 64 rotary ones beside them in q and k. Source: section 2.1 of DeepSeek-V2
/// (<https://arxiv.org/abs/2405.04434>).
pub const HEAD_DIM_MAX: usize = 576;
/// The most ranks of the world that a context-parallel group lives in.
pub const WORLD_MAX: usize = 1 << 12;
/// The most rows or columns of one scaling block.
pub const SCALING_BLOCK_MAX: usize = 1 << 12;
/// The least softmax scale. With a scale between its bounds and values in a 16-bit format's ordinary range, logits stay
/// where an f32 statistic still has a fraction. Products with the scale neither vanish nor overflow.
pub const SCALE_MIN: f32 = 1.0 / (1 << 20) as f32;
/// The largest softmax scale, for the reasons at [`SCALE_MIN`].
pub const SCALE_MAX: f32 = 64.0;
/// The least soft cap, for the reasons at [`SCALE_MIN`].
pub const SOFTCAP_MIN: f32 = 1.0 / (1 << 10) as f32;
/// The largest soft cap, for the reasons at [`SCALE_MIN`].
pub const SOFTCAP_MAX: f32 = (1 << 20) as f32;
