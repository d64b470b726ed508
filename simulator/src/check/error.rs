//! Errors of a schedule, in the words of a trace's reader: rank, operation, stream, sequence, rows.

use std::fmt;
use std::ops::Range;

use seamproof_oracle::{Positions, RunLayoutError, TensorName};

use super::resource::GrowthError;
use super::stretch::Stretch;

/// Largest number of errors that one check returns. Later errors mostly follow from earlier ones.
pub const ERRORS_MAX: usize = 64;

/// An operation, by its index in its rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId {
    /// The rank of the world.
    pub rank: usize,
    /// Index in the rank's program.
    pub operation: usize,
    /// The stream.
    pub stream: usize,
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, operation {} (stream {})", self.rank, self.operation, self.stream)
    }
}

/// The place where a tensor must be a sum over exactly the visible pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// The sum of a result over all ranks.
    AllRanks,
    /// A result on this rank of the world.
    Result(usize),
    /// An operation.
    Operation(OperationId),
}

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Needed::AllRanks => write!(f, "the sum over all ranks"),
            Needed::Result(rank) => write!(f, "result on rank {rank}"),
            Needed::Operation(at) => at.fmt(f),
        }
    }
}

/// Difference between a set of (query, key) pairs and the pairs that the mask shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CoverKind {
    /// Visible pairs that no launch attends.
    Missing,
    /// Pairs that are attended twice.
    Twice,
    /// Pairs that the mask hides.
    Invisible,
    /// Positions whose steps fit no proof.
    Irregular,
}

impl fmt::Display for CoverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CoverKind::Missing => "are missing",
            CoverKind::Twice => "count twice",
            CoverKind::Invisible => "are invisible, yet count",
            CoverKind::Irregular => "have steps too irregular to prove",
        })
    }
}

/// Reason why an operation, a buffer or a placement is meaningless for any data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// A buffer that does not exist.
    #[error("there is no buffer {0}")]
    NoBuffer(usize),
    /// A rank outside the world.
    #[error("there is no rank {0}")]
    NoRank(usize),
    /// A rank of the world that is not in the group.
    #[error("rank {0} of the world is not in the group: it is idle, or of another group")]
    Outside(usize),
    /// Another rank's buffer.
    #[error("{buffer} belongs to rank {owner}")]
    Foreign {
        /// The buffer.
        buffer: String,
        /// Rank that owns the buffer.
        owner: usize,
    },
    /// Rows outside a buffer.
    #[error("{buffer}: {error}")]
    Rows {
        /// The buffer.
        buffer: String,
        /// The error in the rows.
        error: RunLayoutError,
    },
    /// Heads outside a buffer.
    #[error("{buffer} has {heads} heads, none of them {asked:?}")]
    Heads {
        /// The buffer.
        buffer: String,
        /// Number of heads of the buffer.
        heads: usize,
        /// Heads that are named.
        asked: Range<usize>,
    },
    /// Buffers that do not fit each other.
    #[error("{first} and {second} do not have the same {what}")]
    Unlike {
        /// One buffer.
        first: String,
        /// The other buffer.
        second: String,
        /// Property in which they differ.
        what: &'static str,
    },
    /// A row that is written twice, or that is read and written in any order.
    #[error("row {row} of {buffer} is {what}")]
    Row {
        /// The buffer.
        buffer: String,
        /// The row.
        row: usize,
        /// The fault, as a predicate of the row.
        what: &'static str,
    },
    /// A wrong count.
    #[error("{what}: {got}, not {expected}")]
    Count {
        /// The thing that is counted.
        what: &'static str,
        /// Actual number.
        got: usize,
        /// Expected number.
        expected: usize,
    },
    /// A count that is too large for the checker.
    #[error("{what}: {got}; at most {max} are checked")]
    TooMany {
        /// The thing that is counted.
        what: &'static str,
        /// Actual number.
        got: usize,
        /// Largest number that is checked.
        max: usize,
    },
    /// Any fault that one sentence describes.
    #[error("{0}")]
    Plain(&'static str),
}

/// One error of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Schedule-wide data that has no meaning.
    #[error("{what} {index}: {fault}")]
    Table {
        /// `buffer`, `communicator`, `placement` or `rank`; of groups side by side `world` or `region`.
        what: &'static str,
        /// Index in the table, or the number of ranks of a world or a region.
        index: usize,
        /// The fault.
        fault: FormError,
    },
    /// An operation that has no meaning.
    #[error("{at}: {fault}")]
    Malformed {
        /// The operation.
        at: OperationId,
        /// The fault.
        fault: FormError,
    },
    /// A wait that never ends.
    #[error("deadlock: {at} waits for {on}")]
    Deadlock {
        /// The operation.
        at: OperationId,
        /// The peer, the members or the event for which it waits.
        on: String,
    },
    /// Two ends of a message, or two members of a collective, that do not agree.
    #[error("{at} and {peer} do not agree on {what}")]
    Disagree {
        /// One end.
        at: OperationId,
        /// The other.
        peer: OperationId,
        /// Property on which they do not agree.
        what: &'static str,
    },
    /// Unordered accesses to the same rows, at least one of which is a write.
    #[error("race on {buffer}, rows {rows:?}, heads {heads:?}: {first} and {second} are not ordered")]
    Race {
        /// The operation met first.
        first: OperationId,
        /// The operation met second.
        second: OperationId,
        /// The buffer.
        buffer: String,
        /// The rows.
        rows: Range<usize>,
        /// The heads.
        heads: Range<usize>,
    },
    /// An operation on rows with the wrong content.
    #[error("{at}: row {row} of {buffer}, heads {heads:?}: holds {found}; {needed}")]
    Content {
        /// The operation.
        at: OperationId,
        /// The buffer.
        buffer: String,
        /// The first of the rows.
        row: usize,
        /// The heads.
        heads: Range<usize>,
        /// Actual content of the rows.
        found: String,
        /// Needed content of the rows.
        needed: String,
    },
    /// A result, or an input of the backward, that is not the sum over exactly the visible pairs.
    #[error(
        "{at}: {tensor} of sequence {sequence}, heads {heads:?}, {pairs} {kind}{}",
        launch.map(|at| format!(" (launched by {at})")).unwrap_or_default()
    )]
    Cover {
        /// The place that needs the tensor.
        at: Needed,
        /// The tensor.
        tensor: TensorName,
        /// The sequence.
        sequence: usize,
        /// Heads of the tensor.
        heads: Range<usize>,
        /// Positions of the tensor, each with positions of the other side.
        pairs: Stretch,
        /// The fault of the pairs.
        kind: CoverKind,
        /// The launch that adds them.
        launch: Option<OperationId>,
    },
    /// A result that is at another place than its placement says, or has the wrong content.
    #[error(
        "result {tensor} on rank {rank}, rows {rows:?} of {buffer}, heads {heads:?}: holds {found}; {needed}"
    )]
    Result {
        /// The tensor.
        tensor: TensorName,
        /// The rank.
        rank: usize,
        /// The buffer.
        buffer: String,
        /// Rows of the buffer.
        rows: Range<usize>,
        /// Heads of the buffer.
        heads: Range<usize>,
        /// Actual content of the rows.
        found: String,
        /// Needed content of the rows.
        needed: String,
    },
    /// Rows of a result that no placement owns, or that several own.
    #[error(
        "{tensor} of sequence {sequence}, heads {heads:?}: positions {positions} {kind} in the placements"
    )]
    Ownership {
        /// The tensor.
        tensor: TensorName,
        /// The sequence.
        sequence: usize,
        /// Heads of the tensor.
        heads: Range<usize>,
        /// The positions.
        positions: Positions,
        /// Missing or twice.
        kind: CoverKind,
    },
    /// A resource that grows faster than the algorithm declares.
    #[error(transparent)]
    Growth(#[from] GrowthError),
}

impl CheckError {
    /// Returns the rank that the error concerns, and the operation if it concerns one. Errors of the whole schedule or
    /// of a sequence have no rank: `None`.
    pub fn about(&self) -> Option<(usize, Option<usize>)> {
        match self {
            CheckError::Malformed { at, .. }
            | CheckError::Deadlock { at, .. }
            | CheckError::Disagree { at, .. }
            | CheckError::Content { at, .. }
            | CheckError::Race { second: at, .. } => Some((at.rank, Some(at.operation))),
            CheckError::Cover { at: Needed::Operation(at), .. } => Some((at.rank, Some(at.operation))),
            CheckError::Cover { at: Needed::Result(rank), .. } | CheckError::Result { rank, .. } => {
                Some((*rank, None))
            }
            CheckError::Cover { at: Needed::AllRanks, .. } => None,
            CheckError::Table { .. } | CheckError::Ownership { .. } | CheckError::Growth(_) => None,
        }
    }
}

/// The errors of a check, up to [`ERRORS_MAX`].
#[derive(Debug, Default)]
pub(super) struct Errors(pub(super) Vec<CheckError>);

impl Errors {
    pub(super) fn push(&mut self, error: CheckError) {
        if self.0.len() < ERRORS_MAX && self.0.last() != Some(&error) {
            self.0.push(error);
        }
    }

    pub(super) fn full(&self) -> bool {
        self.0.len() >= ERRORS_MAX
    }
}
