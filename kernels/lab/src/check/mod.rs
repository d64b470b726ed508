//! Checks of the kernels on a GPU.

mod blocks;
mod calls;
mod codes;
mod draw;
mod elements;
mod far;
mod image;
mod large;
mod levels;
mod mismatch;
mod moves;
mod passes;
mod planted;
mod quantise;
mod regions;
mod replay;
mod steady;
mod tables;
mod twins;

pub use blocks::check_few_blocks;
pub use calls::check_calls;
pub use codes::check_turned;
pub use large::check_large;
pub use levels::check_levels;
pub use mismatch::Mismatch;
pub use passes::{instances, launch_instances};
pub use planted::{prepare, seen};
pub use quantise::check_quantise;
pub use replay::{REPLAYED, ReplayTables, Replayed, replayed};
pub use steady::{STEADY_DIMS, STEADY_MASKS, STEADY_PACKS, Steady, SteadyPack, accumulated, direct, steady};
pub use twins::{CheckOutcome, MISMATCHES_MAX, OperationTally, check, check_until};
