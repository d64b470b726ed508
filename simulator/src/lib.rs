//! Schedules of context parallelism: the work of each rank as data, with a checker and an executor.
//!
//! [`shard`] cuts sequences over ranks. [`schedule`] builds each rank's list of operations, with one builder for each
//! algorithm. [`mod@check`] proves a schedule right without arithmetic. One [`executor`] runs any schedule on a
//! [`device`], with all ranks in one process; [`threads`] runs it with a thread for each rank. An [`AttentionCall`] is
//! what a kernel launch receives. A
//! [`GuardedTensor`] is a buffer with guard bands. [`emulated`] is a FlashAttention-style tiled kernel on the CPU with
//! the roundings of a real one, and [`quantiser`] makes FP8 codes and scales on every rank. [`faults`] is the catalogue of
//! planted bugs: edits of a schedule, and kernels with a wrong stage.

mod call;
pub mod check;
pub mod device;
pub mod emulated;
pub mod executor;
mod exponential;
pub mod faults;
pub mod helpers;
pub mod quantiser;
mod real;
pub mod schedule;
pub mod shard;
mod tensor;
pub mod threads;

pub use call::{AttentionCall, CallError, RowPolicy, Segment};
pub use real::{Real, UNWRITTEN_BITS, is_unwritten};
pub use tensor::{Damage, Guard, GuardedTensor};
