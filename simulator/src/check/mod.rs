//! The checker: proves a [`Schedule`] right, symbolically and on intervals, without arithmetic.
//!
//! Rows of buffers hold *symbols* instead of numbers. A symbol is an input's row (tensor, sequence, position, head),
//! padding, nothing yet, zero, or a sum of *patches*: the (query, key) pairs that a launch attends. Operations
//! transform symbols.
//! [`check`] proves:
//!
//! 1. *Form* (`shape.rs`): every index, run, head range and shape is inside its bounds, on the operation's own rank;
//!    no operation writes a row twice. Ranks of the world outside the group are idle: they have no program and no
//!    buffer, and no message and no collective names one.
//! 2. *Order* (`order.rs`): sends meet receives, every member enters every collective, no wait is endless.
//! 3. *Races* (`race.rs`): conflicting accesses to a buffer are ordered by streams, events and messages.
//! 4. *Content* (`execute.rs` and the files that it names): every row that is read holds a symbol that its reader can
//!    take. In particular, no padding, uninitialised or foreign row reaches a real one, merges and sums add up matching
//!    rows, and a backward reads whole outs, with the sink.
//!    In a sequence-parallel region (`linear.rs`), a row carries its *form*: the side of the linear layer that it is
//!    on, and its rotation. Attention takes rows of the rank's heads, with q and k rotated once, by their own
//!    positions.
//! 5. *Results* (`finish.rs`, `cover.rs`): every visible (query, key) pair is in out, LSE, dq, dk and dv exactly once,
//!    and no invisible pair is in them. dsink counts each query once over all ranks, and max_logit counts every launch.
//!    Padding rows are zero, rows that nobody owns are untouched, and every real row is owned once.
//!
//! The later parts run only if form and order hold; races and content are then checked independently. All errors of the
//! parts that run are returned, races first, up to [`ERRORS_MAX`].
//!
//! Some things are not proved: anything about numbers (formats, rounding, the scale of a gradient), that a kernel does
//! what its call says, that memory is enough, and how long anything takes. The checker assumes no barrier between
//! forward and backward.
//!
//! [`growth()`] looks at what a schedule takes: how its memory, launches, segments and host reads grow with the tokens,
//! the sequences, the ranks, and the ranks of a region.

mod attend;
mod content;
mod cover;
mod error;
mod execute;
mod finish;
mod growth;
mod linear;
mod machine;
mod moves;
mod order;
pub mod plan;
mod proved;
mod race;
mod resource;
mod resources;
mod shape;
mod sink;
mod stretch;
mod sums;
mod symbol;
mod touch;
mod trace;
mod whole;

use seamproof_oracle::Problem;

pub use error::{CheckError, CoverKind, ERRORS_MAX, FormError, Needed, OperationId};
pub use growth::growth;
pub use order::Action;
pub use resource::{Axis, GrowthError, Resource};
pub use stretch::Stretch;
pub use touch::buffers_of;
pub use trace::{Held, HeldRows, Reading, TracedLaunch, actions, trace, trace_moves};

use crate::schedule::{Schedule, SideBySideError, Work, side_by_side};

/// Sizes of a proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proof {
    /// Number of operations of all ranks.
    pub operations: usize,
    /// Number of segments of all launches.
    pub segments: usize,
    /// Number of (query, key, query head) triples of the forward: all visible ones, each once.
    pub pairs: u64,
}

/// Proves that a schedule computes its problem, or returns its errors.
pub fn check(problem: &Problem, schedule: &Schedule) -> Result<Proof, Vec<CheckError>> {
    let mut errors = error::Errors::default();
    shape::check(problem, schedule, &mut errors);
    if !errors.0.is_empty() {
        return Err(errors.0);
    }
    let Some(order) = order::order(schedule, &mut errors) else { return Err(errors.0) };
    let races = || {
        let mut errors = error::Errors::default();
        race::check(schedule, &order, &mut errors);
        errors
    };
    let (mut errors, (pairs, contents)) = rayon::join(races, || content(problem, schedule, &order));
    contents.0.into_iter().for_each(|error| errors.push(error));
    if errors.0.is_empty() { Ok(proof(schedule, pairs)) } else { Err(errors.0) }
}

/// Runs the operations on symbols. Returns the number of attended pairs, and all errors about rows.
fn content(problem: &Problem, schedule: &Schedule, order: &order::Order) -> (u64, error::Errors) {
    let mut machine = machine::Machine::new(problem, schedule, error::Errors::default());
    let last = touch::last_touches(schedule, &order.steps);
    for (step, done) in order.steps.iter().zip(&last) {
        if machine.errors.full() {
            break;
        }
        machine.step(step);
        machine.forget(done);
    }
    (machine.finish(), machine.errors)
}

/// Proves that groups of one world, each with its own problem, run [side by side](crate::schedule::side_by_side()), or
/// returns the errors of all: the groups are of one world, no rank is in two, and each schedule computes its problem. A
/// right schedule names ranks of its own group alone. No message and no collective can then be between two groups, and
/// each group runs as it does alone.
pub fn check_side_by_side(groups: &[(&Problem, &Schedule)]) -> Result<Proof, Vec<CheckError>> {
    let schedules: Vec<&Schedule> = groups.iter().map(|(_, schedule)| *schedule).collect();
    let apart = side_by_side(&schedules).err().map(|error| {
        let (what, index, fault) = match error {
            SideBySideError::SharedRank(rank) => ("rank", rank, "is in two groups of its world"),
            SideBySideError::Worlds(_, ranks) => {
                ("world", ranks, "is not as large as that of the first group")
            }
            SideBySideError::Regions(_, ranks) => {
                ("region", ranks.unwrap_or(0), "is not as wide as those of the first group")
            }
        };
        CheckError::Table { what, index, fault: FormError::Plain(fault) }
    });
    let (mut sum, mut errors) = (Proof::default(), Vec::from_iter(apart));
    for (problem, schedule) in groups {
        match check(problem, schedule) {
            Ok(Proof { operations, segments, pairs }) => {
                sum.operations += operations;
                sum.segments += segments;
                sum.pairs += pairs;
            }
            Err(more) => errors.extend(more),
        }
    }
    if errors.is_empty() { Ok(sum) } else { Err(errors) }
}

fn proof(schedule: &Schedule, pairs: u64) -> Proof {
    let operations = schedule.ranks.iter().flat_map(|program| &program.operations);
    let segments = operations.clone().map(|operation| match &operation.work {
        Work::Attend(attend) => attend.call.segments.len(),
        Work::AttendBackward(attend) => attend.call.segments.len(),
        _ => 0,
    });
    Proof { segments: segments.sum(), operations: operations.count(), pairs }
}
