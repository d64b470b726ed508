//! What each rank does.
//!
//! [`shard`] cuts sequences over ranks, [`schedule`] builds each rank's list of operations, one builder an algorithm, and
//! [`mod@check`] proves such a schedule right without arithmetic. One [`executor`] runs any schedule on a [`device`], all
//! ranks of it in one process. [`AttentionCall`] is what a kernel launch receives, [`GuardedTensor`] a buffer with guard
//! bands, and [`emulated`] a FlashAttention-style tiled kernel on the CPU with the rounding of the real ones. [`faults`] is
//! the catalogue of planted bugs, edits of a schedule and kernels that are wrong in a stage.

mod call;
pub mod check;
pub mod device;
pub mod emulated;
pub mod executor;
pub mod faults;
pub mod helpers;
mod real;
pub mod schedule;
pub mod shard;
mod tensor;

pub use call::{AttentionCall, CallError, RowPolicy, Segment};
pub use real::{Real, UNWRITTEN_BITS, is_unwritten};
pub use tensor::{Damage, Guard, GuardedTensor};
