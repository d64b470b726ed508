//! The oracle: attention as mathematics, its exact answer, and the largest error that each element may show.
//!
//! This crate defines attention from its mask and nothing else. A [`Problem`] is mathematics plus a memory layout. Its
//! exact answer in f64 comes from [`exact`], in plain loops, and from [`blocked`], which is fast. The [`envelope`]
//! gives each element of that answer the largest error that an honest subject can show. [`sharding`] says which rank
//! holds which row of the problem, [`dealing`] what each is told of the sequences, and [`region`] what a rank is that
//! stands for several.
//!
//! The crate is pure. It reads no files, uses no GPU, and draws no random numbers, and no result depends on the order
//! of threads. It contains no schedules, no online softmax and no subject's own tiles. A reader who wants to know what
//! is right needs no other crate.

pub mod amax;
pub mod blocked;
pub mod dealing;
mod e8m0;
pub mod envelope;
pub mod exact;
mod form;
mod format;
pub mod groups;
mod input_mode;
mod inputs;
mod intervals;
pub mod lanes;
pub mod limits;
mod lse_layout;
mod mask;
pub mod matrix_unit;
pub mod names;
mod pages;
mod parallel;
mod positions;
mod precision;
mod problem;
pub mod quantise;
pub mod region;
pub mod replay;
mod run;
mod scales;
pub mod segments;
pub mod sharding;
mod sharing;
mod single_forward;
mod softmax;
mod steps;
mod stored;
mod tensor_name;

pub use e8m0::E8m0;
pub use form::{Form, FormError, Given};
pub use format::{Format, FormatNameError};
pub use input_mode::InputMode;
pub use inputs::{
    ForwardResults, Gradients, InputViews, Inputs, Saved, SavedErrors, SavedOut, SavedViews, ShapeError,
};
pub use intervals::Intervals;
pub use lse_layout::{LseLayout, LseOrder};
pub use mask::{Alignment, BORDERS_MAX, Band, Blocks, Borders, BordersError, Mask, Sight, Tile};
pub use pages::{PAGE_SIZE_MAX, Pages, PagesError, SharedPrefix, runs_of};
pub use parallel::{Algorithm, Balance, ContextParallel};
pub use positions::Positions;
pub use precision::{Element, ElementNameError, Precision, Scaling};
pub use problem::{Dims, Heads, Pass, Problem, ProblemError, ProblemFields, Sequence, Side, TensorRows};
pub use run::{Run, RunLayoutError};
pub use scales::{OwnScales, Quantity, ScaleValues, Scales, TensorScales};
pub use sharing::{SharedKeys, Sharing, SharingError};
pub use single_forward::SingleForwardError;
pub use softmax::{Sink, Softmax};
pub use steps::{Append, Call, STEPS_MAX, Steps, StepsError};
pub use stored::Stored;
pub use tensor_name::TensorName;
