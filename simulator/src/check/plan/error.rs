//! The reasons why a plan is not proved.

use seamproof_oracle::TensorName;

use crate::schedule::plan::{Launch, PieceId, WrongSegments};

/// A reason why a plan is not proved, or why a schedule is not one's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unproved {
    /// Programs of another length than the plan's.
    #[error("the programs have {0} sections, and the plan has others")]
    Sections(usize),
    /// An operation that is wrong.
    #[error("rank {rank}, section {section}, operation {operation}: {fault}")]
    Operation {
        /// Place of the rank in the group.
        rank: usize,
        /// The section of its program.
        section: usize,
        /// Index in the section.
        operation: usize,
        /// The fault.
        fault: PlanFault,
    },
    /// Pieces of which some query sees a key, and that no launch has together.
    #[error("rank {rank}: no launch of the {pass} has {queries:?} of the queries and {keys:?} of the keys")]
    Missing {
        /// Place of the rank in the group.
        rank: usize,
        /// `forward` or `backward`.
        pass: &'static str,
        /// The queries.
        queries: PieceId,
        /// The keys.
        keys: PieceId,
    },
    /// A buffer that does not hold what it must at the end.
    #[error("rank {rank}: at the end, `{buffer}` holds {found}")]
    End {
        /// Place of the rank in the group.
        rank: usize,
        /// Name of the buffer.
        buffer: String,
        /// What it holds.
        found: String,
    },
    /// Rows that are dealt, or exchanged, wrongly.
    #[error("rank {rank}: row {row} of {tensor} {fault}")]
    Row {
        /// Place of the rank in the group.
        rank: usize,
        /// The tensor.
        tensor: TensorName,
        /// The row in the rank's tensor.
        row: usize,
        /// The fault.
        fault: &'static str,
    },
    /// A position of a sequence that is on no rank, or on two.
    #[error("sequence {sequence}: position {position} of {tensor} is on {times} ranks")]
    Dealt {
        /// The sequence.
        sequence: usize,
        /// The position.
        position: usize,
        /// The tensor.
        tensor: TensorName,
        /// Number of rows that hold it.
        times: usize,
    },
    /// Heads of a member that are not what attention of a block needs.
    #[error(
        "member {0} of an exchange has query heads that do not read its kv heads, or no block of its own"
    )]
    Heads(usize),
    /// Slots of a side that are not inside a rank's tensor, or have a row in common.
    #[error("slots of {0} have a row in common, or one that the tensor lacks")]
    Slots(TensorName),
    /// Rows of keys that sequences share which do not go from the lender to the borrower, and back.
    #[error("rank {rank}: of keys that sequences share, {fault}")]
    Loans {
        /// Place of the rank in the group.
        rank: usize,
        /// The fault.
        fault: &'static str,
    },
    /// Pieces whose segments are wrong.
    #[error(transparent)]
    Segments(#[from] WrongSegments),
    /// A rank of a schedule that is not as the plan says.
    #[error("rank {rank}: {what} of the schedule {}", within(*index))]
    Unlike {
        /// The rank of the world.
        rank: usize,
        /// What differs.
        what: &'static str,
        /// Index of the first that differs, if it is one of a list.
        index: Option<usize>,
    },
}

fn within(index: Option<usize>) -> String {
    index
        .map_or("are not the plan's".into(), |index| format!("differ from the plan's from number {index} on"))
}

/// The fault of an operation of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// A buffer of the wrong shape, or one that is not there.
    #[error("buffer {0} is not of the shape that the operation needs")]
    Shape(u16),
    /// A buffer that an operation reads and writes, or writes twice.
    #[error("buffer {0} is read and written, or written twice")]
    Twice(u16),
    /// A stream that a rank does not have.
    #[error("there is no stream {0}")]
    Stream(u8),
    /// A wait for a mark without a record before it.
    #[error("waits for mark {0}, which has no record before")]
    Unrecorded(u32),
    /// Two accesses to a buffer that nothing orders.
    #[error("races for buffer {0} with an earlier operation")]
    Race(u16),
    /// A launch of pieces that do not exist.
    #[error("there are no such pieces as {0:?}")]
    Pieces(Launch),
    /// A launch that is there twice.
    #[error("{0:?} is launched twice in a pass, or with two parts of the queries in a backward")]
    Launched(Launch),
    /// A sink where the problem has none, or another one.
    #[error("applies a sink that is not the problem's")]
    Sink,
    /// A buffer that does not hold what is needed.
    #[error("buffer {buffer} holds {found}, and {needed} is needed")]
    Holds {
        /// The buffer.
        buffer: u16,
        /// What it holds.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// A write over something that nobody has taken.
    #[error("buffer {buffer} is overwritten, and {lost} is lost")]
    Lost {
        /// The buffer.
        buffer: u16,
        /// What it held.
        lost: String,
    },
    /// An operation that plans of this kind do not have.
    #[error("the rule of this operation is not known here: {0}")]
    Unknown(&'static str),
    /// A message between ranks of two rings.
    #[error("it exchanges with rank {0}, which is in another ring")]
    Stranger(usize),
    /// A rank that waits for one that does not come.
    #[error("it waits for rank {0}, which waits for something else, or has ended")]
    Alone(usize),
}
