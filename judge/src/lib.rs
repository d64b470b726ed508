//! Is an attention kernel right?
//!
//! This crate holds a subject (a kernel, or a whole context-parallel program) against the exact answer of
//! [`oracle`](seamproof_oracle): it draws problems that aim at the seams, runs the subject on them, judges every element
//! against a proven bound, and shrinks each failure to a case that a person can read.
//!
//! A crate with a kernel of its own needs this one alone. It implements [`Backend`](subject::Backend) and asks
//! [`Campaign`](campaign::Campaign):
//!
//! ```
#![doc = include_str!("../tests/first_kernel/kernel.rs")]
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`subject`] | what a subject declares, runs and returns |
//! | [`subjects`] | the emulated kernel, right and with planted faults; wrong calls of any subject |
//! | [`generate`], [`census`] | problems from choices, and what was drawn |
//! | [`values`], [`exact`], [`hash`] | the inputs of a problem |
//! | [`ladder`], [`identity`] | the judge: its rungs, and relations between results of the subject alone |
//! | [`finding`], [`verdict`], [`failure`] | what it says |
//! | [`shrink`], [`strategy`] | from a failing problem to a small one; the same as a proptest strategy |
//! | [`campaign`] | all of it together, in memory |
//! | [`calibrate`], [`profile`] | what a subject rounds, found from outside and locked |
//! | [`case`](mod@case), [`files`], [`prose`] | what is stored, and how it reads |

pub mod calibrate;
pub mod campaign;
pub mod case;
pub mod census;
pub mod evaluate;
pub mod exact;
pub mod failure;
pub mod files;
pub mod finding;
pub mod generate;
pub mod hash;
pub mod identity;
pub mod ladder;
pub mod prelude;
pub mod profile;
pub mod prose;
pub mod shrink;
pub mod strategy;
pub mod subject;
pub mod subjects;
pub mod values;
pub mod verdict;

pub use {ndarray, proptest, seamproof_oracle as oracle, seamproof_simulator as simulator};
