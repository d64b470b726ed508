//! Promises of a subject about its padding rows and about the bits of its results.

use seamproof_oracle::{ContextParallel, Problem};
use serde::{Deserialize, Serialize};

use super::Word;
use super::table::has_ring_stripes;

/// Values that a subject allows in padding and slack rows of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PaddingInputs {
    /// Anything, NaN and infinities included.
    Anything,
    /// Any finite number.
    Finite,
}

/// Values that a subject leaves in padding rows of its outputs (the owned rows past the real ones). Rows that no
/// sequence owns are excluded: with each of these variants they stay as [`RankOutputs`](super::RankOutputs) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PaddingOutputs {
    /// Exact zeros; −∞ in the LSE.
    Zero,
    /// The bits that were there before.
    Untouched,
    /// Anything.
    Unspecified,
}

/// Both sides of a subject's padding contract. The default is the weakest one: finite inputs, unspecified outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaddingContract {
    /// Rule for padding rows of inputs.
    pub inputs: PaddingInputs,
    /// Rule for padding rows of outputs.
    pub outputs: PaddingOutputs,
}

impl Default for PaddingContract {
    fn default() -> PaddingContract {
        PaddingContract { inputs: PaddingInputs::Finite, outputs: PaddingOutputs::Unspecified }
    }
}

/// Promises about the bits of the results and about memory, beyond being right: a right subject may leave all of them
/// open. A relation that needs a promise is asked only of a subject that makes it.
///
/// No promise is needed for the forward: every subject must give the same bits for the same inputs there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Promises {
    /// Equal inputs give equal bits of the gradients as well: no sum depends on an order that chance decides.
    pub deterministic_backward: bool,
    /// The results of a sequence depend neither on other sequences nor on the place of its rows, nor on the form in
    /// which these are told. Tiles and splits begin anew with each sequence, and on several ranks they follow from the
    /// span alone.
    pub sequences_alone: bool,
    /// The results of a head depend neither on its number nor on the heads of other groups.
    pub heads_alone: bool,
    /// The dq of a query head does not depend on the other heads that share its KV head: its sum over keys is made in
    /// one order, however large the group.
    pub groups_alone: bool,
    /// The out, lse and dq of a query row depend on the row, on the keys that it sees and on their positions in the
    /// sequence alone. They depend neither on other rows nor on the form in which the mask is given. The dk and dv of
    /// a key depend in the same way on the rows that see it.
    pub rows_alone: bool,
    /// The peak bytes that the subject reports grow no faster than the tokens of one sequence do.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub linear_memory: bool,
}

impl Promises {
    /// Every promise about bits.
    pub const ALL: Promises = Promises {
        deterministic_backward: true,
        sequences_alone: true,
        heads_alone: true,
        groups_alone: true,
        rows_alone: true,
        linear_memory: false,
    };

    /// Returns what of these promises holds where this project's schedule of a problem runs. In a ring of stripes of
    /// several rows, the bounds of the mask say which keys a query meets in one launch, also where they hide none.
    pub fn of_schedule(self, problem: &Problem) -> Promises {
        let ContextParallel { algorithm, balance, .. } = problem.parallel;
        Promises { rows_alone: self.rows_alone && !has_ring_stripes(algorithm, balance), ..self }
    }
}

/// A path through the subject (one set of kernels or another), and whether runs of a problem take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Name of the way.
    pub name: Word,
    /// Whether runs of the problem take it.
    pub taken: bool,
}

/// Way of a problem whose forward launches all go to tensor cores.
pub const FORWARD_ON_TENSOR_CORES: Word = "forward on tensor cores";
/// Way of a problem whose backward launches all go to tensor cores.
pub const BACKWARD_ON_TENSOR_CORES: Word = "backward on tensor cores";
/// Way of a problem of which some backward launch on tensor cores has several turns for a tile of keys, where it has the
/// long form by choice.
pub const SEVERAL_TURNS: Word = "several turns in the long form";
/// Way of such a problem whose kernel makes dq a turn late: with head dims from 65 to 128, not the general one.
pub const SEVERAL_LATE_TURNS: Word = "several turns in the long form, dq a turn late";
/// Way of a problem of which some launch on tensor cores has more tiles than its blocks take at once, where blocks are
/// few by choice.
pub const SEVERAL_IN_A_BLOCK: Word = "several tiles in a block";
/// Way of a problem of which some launch on tensor cores has more segments than threads plan it, where these are few by
/// choice.
pub const SEVERAL_FOR_A_PLANNER: Word = "several segments for a planner";
/// Way of a problem of which some launch in FP8 has more tiles than its blocks take at once, where blocks are few by choice.
pub const SEVERAL_IN_A_BLOCK_FP8: Word = "several tiles of codes in a block";
/// Way of a problem of which some launch in FP8 has more segments than threads plan it, where these are few by choice.
pub const SEVERAL_FOR_A_PLANNER_FP8: Word = "several segments of codes for a planner";
