//! A [`Schedule`]: a context-parallel algorithm as data.
//!
//! A *rank* is one of the world, in which the schedule's group may be a part; the others are idle. Each rank of the
//! group has buffers and a program: a list of [`Operation`]s in the order in which its host issues them. Every
//! operation names its stream. A stream runs its operations in order; only events order streams among each other.
//! `Send` and `Recv` are rendezvous and block their stream unless they share a group. Collectives of one communicator
//! match in order. A builder makes a schedule, a checker proves it without arithmetic, and an executor runs it on a
//! device. No operation decides anything at run time.
//!
//! *Placements* say which rows of the problem each input and output buffer holds. Inputs are dealt to ranks and results
//! are read back by placements. They are the only link between a schedule and its problem's memory.
//!
//! # Capabilities
//!
#![doc = include_str!("CAPABILITIES.md")]

mod algorithms;
mod all_gather;
mod all_gather_steps;
mod all_to_all;
mod build;
mod collect;
mod converted;
mod descaled;
mod embed;
mod exchange;
mod hierarchical;
mod lending;
mod partition;
mod place;
pub mod plan;
mod program;
mod ring;
mod sequence_parallel;
mod shared;
mod single;
mod stripes;
mod tables;

pub use algorithms::{Growth, build, build_with, memory_growth};
pub use all_gather::all_gather;
pub use all_to_all::all_to_all;
pub(crate) use build::band;
pub use build::{BuildError, check_size};
pub(crate) use build::{Unseeing, pad, part, segments};
pub use converted::converted;
pub use descaled::{Descales, LaunchedHead};
pub(crate) use embed::{communicator, peer};
pub use hierarchical::hierarchical;
pub(crate) use lending::ARRIVED;
pub use partition::KeyBlocks;
pub use place::{SideBySideError, side_by_side};
pub use program::{
    Attend, AttendBackward, Axes, Buffer, BufferId, EventId, FillValue, KeySource, Layer, Merge, MergeOrder,
    MergeStyle, Operation, Placement, RankProgram, Reduction, Region, Role, Rotated, RowPair, Schedule,
    Section, SegmentSource, Step, Work,
};
pub use ring::ring;
pub use sequence_parallel::sequence_parallel;
pub(crate) use sequence_parallel::{hidden, rotates};
pub use single::single;
pub(crate) use stripes::rows as stripe_rows;
