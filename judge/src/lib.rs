//! Judge of attention kernels: it decides whether a kernel's results are right.
//!
//! This crate compares a subject (a kernel, or a whole context-parallel program) with the exact answer of
//! [`oracle`]. It draws problems that aim at the seams, runs the subject on them, judges every
//! element against a proven bound, and shrinks each failure to a case that a person can read.
//!
//! To test a kernel, a crate depends on this crate alone. It implements [`Backend`](subject::Backend) for the kernel
//! and runs a [`Campaign`](campaign::Campaign):
//!
//! ```
#![doc = include_str!("../tests/suite/first_kernel/kernel.rs")]
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`subject`] | what a subject declares, runs and returns |
//! | [`subjects`] | the emulated kernel, right and with planted faults; wrong calls of any subject |
//! | [`generate`], [`asked`], [`census`] | problems made from choices, what a subject is asked of them, and counts |
//! | [`values`], [`exact`], [`hash`] | the inputs of a problem |
//! | [`ladder`], [`identity`] | the judge: its rungs, and relations between results of the subject alone |
//! | [`finding`], [`verdict`], [`failure`] | the judge's answers |
//! | [`shrink`], [`strategy`] | from a failing problem to a small one, alone and as a proptest strategy |
//! | [`campaign`], [`exercise`] | a whole campaign in memory, and what it showed of a subject's table |
//! | [`calibrate`], [`profile`] | what a subject rounds, found from outside and locked |
//! | [`quantise`] | the judge of quantisers to FP8 |
//! | [`case`](mod@case), [`files`], [`prose`] | what is stored, and how it reads |

// The example is a test of `tests/suite/first_kernel`. Here it only has to compile.
#![allow(clippy::test_attr_in_doctest)]

pub mod asked;
pub mod calibrate;
pub mod campaign;
pub mod case;
pub mod census;
pub mod evaluate;
pub mod exact;
pub mod exercise;
pub mod failure;
pub mod files;
pub mod finding;
pub mod generate;
pub mod hash;
pub mod identity;
pub mod ladder;
pub mod large;
pub mod prelude;
pub mod profile;
pub mod prose;
pub mod quantise;
pub mod shrink;
pub mod strategy;
pub mod subject;
pub mod subjects;
pub mod values;
pub mod verdict;

pub use {ndarray, proptest, seamproof_oracle as oracle, seamproof_simulator as simulator};
