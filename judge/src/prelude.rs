//! Names that a test of a kernel usually needs.

pub use seamproof_oracle::envelope::{
    Accumulation, Arithmetic, Delta, DsWeights, GroupSums, MergeBy, SoftCap, WeightRounding,
};
pub use seamproof_oracle::{
    Alignment, ContextParallel, Dims, Form, Format, Given, Heads, InputMode, Inputs, Mask, Pages, Pass,
    Precision, Problem, ProblemFields, Run, Sequence, SharedKeys, Sharing, Side, Sink, Softmax, Steps,
    TensorRows,
};
pub use seamproof_simulator::UNWRITTEN_BITS;

pub use crate::campaign::{Campaign, CampaignSummary};
pub use crate::case::Case;
pub use crate::generate::{Limits, Profile};
pub use crate::ladder::judge;
pub use crate::strategy::{problems, problems_for};
pub use crate::subject::{
    Backend, Declaration, MaskForm, MaskKind, Outputs, PaddingContract, PaddingInputs, PaddingOutputs,
    Promises, RankGradients, RankOutputs, Refusal, RunError, Sizes, Table, TensorName,
};
pub use crate::subjects::{Miscalled, miscall};
pub use crate::verdict::Verdict;
