//! What is right.
//!
//! This crate defines attention from its mask and nothing else: a [`Problem`] (mathematics plus memory layout), its
//! exact answer in f64 ([`exact`], plain loops; [`blocked`], the same answer fast), for every element of that answer the
//! largest error that an honest subject can show ([`envelope`]), and which rank holds which row of it ([`sharding`]).
//!
//! It is pure: no files, no threads' order in a result, no GPU, no randomness of its own. It knows no ranks' programs,
//! no online softmax and no tile of any subject. A reader who wants to know what is right needs no other crate.

pub mod blocked;
pub mod envelope;
pub mod exact;
mod format;
mod input_mode;
mod inputs;
pub mod limits;
mod mask;
pub mod names;
mod parallel;
mod positions;
mod precision;
mod problem;
pub mod replay;
mod run;
pub mod sharding;
mod softmax;
mod tensor_name;

pub use format::{Format, FormatNameError};
pub use input_mode::InputMode;
pub use inputs::{ForwardResults, Gradients, Inputs, Saved, ShapeError};
pub use mask::{Alignment, Band, Mask};
pub use parallel::{Algorithm, Balance, ContextParallel};
pub use positions::Positions;
pub use precision::{Element, ElementNameError, Precision, Scaling};
pub use problem::{Dims, Heads, Pass, Problem, ProblemError, ProblemFields, Sequence, Side, TensorRows};
pub use run::{Run, RunLayoutError};
pub use softmax::{Sink, Softmax};
pub use tensor_name::TensorName;
