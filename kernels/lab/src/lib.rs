//! Measurements of the kernels, and attacks on them.
//!
//! [`mod@check`] compares each kernel with its twin on the CPU, and attention with itself. [`mod@bench`] measures the
//! kernels against device copies, and attention against a peer. [`faults`] holds edits of CUDA sources that plant
//! real bugs, each with the check that must see it. [`mod@reference`] gives the exact forward of chosen rows in f64,
//! on the GPU, with a source of its own; [`large`] judges by it forwards that are too large for the oracle on a CPU.
//!
//! The kernels and their launchers are in `seamproof-kernels`, which knows nothing of this crate.

pub mod bench;
pub mod check;
pub mod faults;
pub mod large;
mod problem;
mod quantiser;
mod ready;
mod ready_fp8;
pub mod reference;
mod sources;

pub use quantiser::CudaQuantiser;
pub use sources::{block_of, sources};
