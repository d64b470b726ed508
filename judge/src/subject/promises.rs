//! What a subject promises of its padding rows and of the bits of its results.

use super::Word;

/// What a subject lets padding and slack rows of its inputs hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingInputs {
    /// Anything, NaN and infinities included.
    Anything,
    /// Any finite number.
    Finite,
}

/// What a subject puts into padding rows of its outputs (the owned rows past the real ones). Rows that no sequence owns are
/// not among them: under each of these they stay as [`RankOutputs`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingOutputs {
    /// Exact zeros; −∞ in the LSE.
    Zero,
    /// Not one bit changes.
    Untouched,
    /// Anything.
    Unspecified,
}

/// Both sides of a subject's padding contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingContract {
    /// Of inputs.
    pub inputs: PaddingInputs,
    /// Of outputs.
    pub outputs: PaddingOutputs,
}

/// What a subject promises of the bits of its results, beyond being right: what a right subject may leave open. Where
/// it promises nothing, no relation that needs the promise is asked.
///
/// The forward gives the same bits for the same inputs without any promise: every subject must.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// The same inputs give the same bits of the gradients too: no sum in an order that chance decides.
    pub deterministic_backward: bool,
    /// The results of a sequence depend neither on other sequences nor on where rows lie: tiles and splits begin anew
    /// with each sequence, and on several ranks follow from the span alone.
    pub sequences_alone: bool,
    /// The results of a head depend neither on its number nor on the heads of other groups.
    pub heads_alone: bool,
    /// dq of a query head does not depend on which others share its KV head: its sum over keys is made in one order,
    /// however large the group.
    pub groups_alone: bool,
    /// out, lse and dq of a query row depend on the row, on the keys that it sees and on their positions in the
    /// sequence alone: neither on other rows nor on the form in which the mask is given. dk and dv of a key depend in
    /// the same way on the rows that see it.
    pub rows_alone: bool,
}

impl Promises {
    /// All of them.
    pub const ALL: Promises = Promises {
        deterministic_backward: true,
        sequences_alone: true,
        heads_alone: true,
        groups_alone: true,
        rows_alone: true,
    };
}

/// A way that runs of a problem can go through a subject, and whether they do: to these kernels or to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its name.
    pub name: Word,
    /// Whether runs of the problem go there.
    pub taken: bool,
}

/// The way of a problem all of whose forward launches go to tensor cores.
pub const FORWARD_ON_TENSOR_CORES: Word = "forward on tensor cores";
/// The same of its backward launches.
pub const BACKWARD_ON_TENSOR_CORES: Word = "backward on tensor cores";
