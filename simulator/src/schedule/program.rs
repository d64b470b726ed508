//! What a schedule is made of: buffers, operations, and the placements that tie them to a problem.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Algorithm, Format, Run, TensorName};
use serde::{Deserialize, Serialize};

use crate::AttentionCall;

/// A buffer of the schedule, by its place in [`Schedule::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// An event of one rank; events of different ranks share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub usize);

/// What a buffer's axes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// `[rows, heads, dim]`.
    Rows,
    /// `[heads, rows, 1]`.
    Statistic,
    /// `[heads, 1, 1]`; region rows are ignored.
    Heads,
}

/// What a buffer holds when the schedule begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A rank's part of an input, with poison in padding and slack.
    Input(TensorName),
    /// Nothing yet; at the end a rank's part of a result.
    Output(TensorName),
    /// Nothing yet.
    Scratch,
}

/// One buffer of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// For people: `k gathered`, `out of step 2`.
    pub name: Arc<str>,
    /// The rank that owns it, by its place in the group.
    pub rank: usize,
    /// What its axes mean.
    pub axes: Axes,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a row and head; 1 for statistics.
    pub dim: usize,
    /// What its elements are rounded to.
    pub format: Format,
    /// What it holds at the beginning.
    pub role: Role,
}

impl Buffer {
    /// The shape in storage.
    pub fn shape(&self) -> [usize; 3] {
        match self.axes {
            Axes::Rows => [self.rows, self.heads, self.dim],
            Axes::Statistic => [self.heads, self.rows, 1],
            Axes::Heads => [self.heads, 1, 1],
        }
    }
}

/// Rows and heads of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The buffer.
    pub buffer: BufferId,
    /// The rows `rows.offset, rows.offset + rows.step, …`, `rows.len` of them.
    pub rows: Run,
    /// The heads.
    pub heads: Range<usize>,
}

/// Rows of one buffer and the rows of another that they go to; both runs have the same `len`.
pub type RowPair = (Run, Run);

/// Which step of its algorithm a launch is. Devices, executor and checker don't read it; people do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// The only launch of a pass.
    #[default]
    Only,
    /// One of some launches of a pass on the same keys.
    Launch {
        /// From 0.
        index: usize,
        /// How many there are.
        of: usize,
    },
    /// A launch of a ring's step.
    Ring {
        /// The step, from 0.
        index: usize,
        /// Steps of the ring.
        of: usize,
        /// The member that owns the keys, by its place in the ring.
        owner: usize,
        /// The part of the pair matrix.
        section: Section,
        /// The part of the owner's keys, from 0, and how many there are.
        part: (usize, usize),
    },
}

/// The part of the pair matrix that a ring's step covers, in TransformerEngine's words; chunks under a mask that ends at
/// the diagonal have such parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// Own keys.
    Diagonal,
    /// Keys of a member before: its first chunk is seen, its second is not.
    Lower,
    /// Keys of a member behind: the second chunk of the queries sees them, the first does not.
    Upper,
    /// Anything may be seen.
    Full,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::Only => Ok(()),
            Step::Launch { index, of } => write!(f, "launch {} of {of}", index + 1),
            Step::Ring { index, of, section, part: (part, parts), .. } => {
                let section = match section {
                    Section::Diagonal => "diagonal",
                    Section::Lower => "lower",
                    Section::Upper => "upper",
                    Section::Full => "full",
                };
                write!(f, "ring step {} of {of}: {section} section", index + 1)?;
                if parts > 1 { write!(f, ", part {} of {parts} of the keys", part + 1) } else { Ok(()) }
            }
        }
    }
}

/// What an attention kernel is launched on: all heads of its buffers, addressed by the call's runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// Which step of its algorithm it is.
    pub step: Step,
    /// The launch.
    pub call: AttentionCall,
    /// Queries.
    pub q: BufferId,
    /// Keys.
    pub k: BufferId,
    /// Values.
    pub v: BufferId,
    /// The learnable sink, where the call applies one.
    pub sink: Option<BufferId>,
    /// The output.
    pub out: BufferId,
    /// The LSE.
    pub lse: BufferId,
    /// The largest logit of each head: raised, never lowered, so that it must have been filled before. Raises
    /// commute bit for bit and are atomic: two launches may raise one buffer unordered, and that is no race.
    pub max_logit: BufferId,
}

/// What a backward kernel is launched on.
#[derive(Clone, Debug, PartialEq)]
pub struct AttendBackward {
    /// Which step of its algorithm it is.
    pub step: Step,
    /// The launch; its policy says what becomes of padding rows of dq, dk and dv.
    pub call: AttentionCall,
    /// Queries.
    pub q: BufferId,
    /// Keys.
    pub k: BufferId,
    /// Values.
    pub v: BufferId,
    /// Gradient of the output.
    pub dout: BufferId,
    /// The output, after the last merge.
    pub out: BufferId,
    /// The LSE, after the last merge.
    pub lse: BufferId,
    /// The learnable sink and its gradient, which is overwritten, in exactly one launch of a rank.
    pub sink: Option<(BufferId, BufferId)>,
    /// Gradient of the queries, overwritten.
    pub dq: BufferId,
    /// Gradient of the keys, overwritten.
    pub dk: BufferId,
    /// Gradient of the values, overwritten.
    pub dv: BufferId,
}

/// How a step's result enters the running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeStyle {
    /// Both lse and out: `lse' = ln(e^lse + e^step)`, `out' = out·e^(lse − lse') + step·e^(step lse − lse')`.
    Running,
    /// The LSE alone; outs follow with [`MergeStyle::Weighted`] once the LSE is final.
    Statistics,
    /// The out alone, against a final LSE: `out' = out + step·e^(step lse − lse)`.
    Weighted {
        /// Whether the product is rounded to the running format before it is added (TransformerEngine's THD kernel).
        product_rounded: bool,
    },
}

/// When a ring folds its steps' outs together: both orders compute the same function and round it differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MergeOrder {
    /// Each step's out and LSE enter the running ones ([`MergeStyle::Running`]), kept in f32 and rounded once.
    #[default]
    Running,
    /// As TransformerEngine ships it: each step's LSE enters the running one ([`MergeStyle::Statistics`]), each step's out
    /// is kept; when the LSE is final, the outs are added, weighed by it ([`MergeStyle::Weighted`]). Steps' outs and
    /// their sum are kept in the result's own format, and each product is rounded to it. Scratch grows with the number of
    /// members. Source: `cp_p2p_fwd_fused_attn` and `thd_out_correction` of
    /// <https://github.com/NVIDIA/TransformerEngine>.
    Deferred,
}

impl MergeOrder {
    /// Both.
    pub const ALL: [MergeOrder; 2] = [MergeOrder::Running, MergeOrder::Deferred];

    /// The name in options and texts.
    pub fn name(self) -> &'static str {
        match self {
            MergeOrder::Running => "running",
            MergeOrder::Deferred => "deferred",
        }
    }

    /// The order of this name.
    pub fn by_name(name: &str) -> Option<MergeOrder> {
        MergeOrder::ALL.into_iter().find(|order| order.name() == name)
    }

    /// The orders in which an algorithm has different schedules: the default one alone where it merges nothing.
    pub fn of(algorithm: Algorithm) -> &'static [MergeOrder] {
        match algorithm {
            Algorithm::Ring | Algorithm::Hierarchical { .. } => &MergeOrder::ALL,
            _ => &[MergeOrder::Running],
        }
    }
}

/// Folds a step's out and LSE into the running ones. (out 0, lse −∞) is the identity.
#[derive(Clone, Debug, PartialEq)]
pub struct Merge {
    /// How.
    pub style: MergeStyle,
    /// The step's out.
    pub step_out: BufferId,
    /// The step's LSE.
    pub step_lse: BufferId,
    /// The running out.
    pub out: BufferId,
    /// The running LSE.
    pub lse: BufferId,
    /// The step's rows and the running rows that they go to.
    pub rows: Vec<RowPair>,
}

/// What a fill writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillValue {
    /// 0.
    Zero,
    /// −∞: an empty LSE, an empty maximum.
    NegInfinity,
}

/// Which side of a tensor-parallel linear layer is cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Column-parallel: hidden rows become rows of the rank's heads.
    Column,
    /// Row-parallel: rows of the rank's heads become the rank's summand of hidden rows, nothing for other heads.
    Row,
}

/// Rows that are rotated: row i by position `position + step·i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// The rows, `rows.len` of them.
    pub rows: Run,
    /// Of the first row.
    pub position: usize,
    /// Positions from one row to the next.
    pub step: usize,
}

/// How ranks' values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Added in order of rank, each sum rounded to the buffer's format.
    Sum,
    /// The largest.
    Max,
}

/// What an operation does. Row pairs are disjoint on the side that is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// The forward kernel.
    Attend(Attend),
    /// The backward kernel.
    AttendBackward(AttendBackward),
    /// Folds a step into the running result.
    Merge(Merge),
    /// Adds the sink's term to final statistics: `lse' = ln(e^lse + e^sink)`, out scaled by `e^(lse − lse')`. `None`
    /// is the sink of 0 (off by one).
    ApplySink {
        /// The learnable sink.
        sink: Option<BufferId>,
        /// The out.
        out: BufferId,
        /// The LSE.
        lse: BufferId,
        /// The rows.
        rows: Vec<Run>,
    },
    /// The gradient of the learnable sink over the given rows: `dsink = −Σ exp(sink − lse) · ⟨dout, out⟩` for each
    /// head, overwritten.
    SinkGradient {
        /// The learnable sink.
        sink: BufferId,
        /// Gradient of the output.
        dout: BufferId,
        /// The final output.
        out: BufferId,
        /// The final LSE, the sink included.
        lse: BufferId,
        /// Written: a partial sum of the rank.
        dsink: BufferId,
        /// The rows.
        rows: Vec<Run>,
    },
    /// `to += from`, rounded to the format of `to`, all heads.
    Accumulate {
        /// Read.
        from: BufferId,
        /// Read and written.
        to: BufferId,
        /// Rows of both.
        rows: Vec<RowPair>,
    },
    /// Copies rows, rounding to the format of `to`, all heads. A reorder is a copy of every row.
    Copy {
        /// Read.
        from: BufferId,
        /// Written.
        to: BufferId,
        /// Rows of both.
        rows: Vec<RowPair>,
    },
    /// A linear layer, row by row: no row sees another. A *hidden* row holds every head of a tensor, as the side of the
    /// layer that is not cut; the layer is opaque to the checker, and the CPU device's has weights of 0 and 1 that copy
    /// each head.
    Linear {
        /// Which side is cut.
        layer: Layer,
        /// Heads of the hidden rows that are the rank's: all those of its buffer.
        heads: Range<usize>,
        /// Read.
        from: BufferId,
        /// Written, all heads.
        to: BufferId,
        /// Rows of both.
        rows: Vec<RowPair>,
    },
    /// The rotary embedding in place, all heads: of a row of `2·n` elements `j` and `j + n` turn by the angle
    /// `position · 10000^(−j/n)` ([RoFormer](https://arxiv.org/abs/2104.09864)); the last of an odd number stays.
    Rotate {
        /// Read and written.
        buffer: BufferId,
        /// The rows and their positions.
        rows: Vec<Rotated>,
        /// Turns back, as a gradient must.
        inverse: bool,
    },
    /// Fills rows, all heads.
    Fill {
        /// Written.
        to: BufferId,
        /// The rows.
        rows: Vec<Run>,
        /// With this.
        value: FillValue,
    },
    /// Sends regions to a rank; the peer's `Recv` has regions of the same sizes.
    Send {
        /// The receiving rank, by its place in the group.
        to: usize,
        /// Operations of one group on one stream are launched as one and block only together.
        group: Option<usize>,
        /// Read, one after the other.
        regions: Vec<Region>,
    },
    /// Receives what the peer sends.
    Recv {
        /// The sending rank, by its place in the group.
        from: usize,
        /// See [`Work::Send`].
        group: Option<usize>,
        /// Written, one after the other.
        regions: Vec<Region>,
    },
    /// Every member's `from` goes to every member's `to`, member after member.
    AllGather {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// Read.
        from: Region,
        /// Written: for each member the region that its `from` goes to.
        to: Vec<Region>,
    },
    /// Member i's `to` becomes the sum of every member's `from[i]`, in order of members.
    ReduceScatter {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// Read: for each member the part that it will own.
        from: Vec<Region>,
        /// Written.
        to: Region,
    },
    /// Member i's `send[j]` goes to member j's `recv[i]`.
    AllToAll {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// Read: for each member what goes to it.
        send: Vec<Region>,
        /// Written: for each member what comes from it.
        recv: Vec<Region>,
    },
    /// Every member's region becomes the combination of all.
    AllReduce {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// Read and written.
        region: Region,
        /// How.
        reduction: Reduction,
    },
    /// Marks the point that the stream has reached.
    RecordEvent(EventId),
    /// Holds the stream until the event's last record before it in host order has been reached. Without one a device does
    /// not wait at all, which the checker calls an error.
    WaitEvent(EventId),
    /// The host waits for the stream and reads; forbidden in production schedules.
    HostRead(Region),
}

/// One operation of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The stream, from 0.
    pub stream: usize,
    /// What it does.
    pub work: Work,
}

/// A rank's operations, in host order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankProgram {
    /// The operations.
    pub operations: Vec<Operation>,
    /// Where the backward pass begins: a caller may hold, move and replay what the forward saved before it goes on.
    /// Absent in a forward pass.
    pub backward: Option<usize>,
}

/// Which part of a problem's tensor a buffer holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The tensor.
    pub tensor: TensorName,
    /// The buffer.
    pub buffer: BufferId,
    /// The tensor's heads that the buffer's heads are.
    pub heads: Range<usize>,
    /// The rows; none for tensors without rows.
    pub rows: Vec<PlacedRun>,
}

/// A context-parallel algorithm on one problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Every rank's buffers.
    pub buffers: Vec<Buffer>,
    /// The programs, by place in the group.
    pub ranks: Vec<RankProgram>,
    /// Groups of ranks that hold collectives, each in its own order.
    pub communicators: Vec<Vec<usize>>,
    /// Inputs and results. dsink's placements on several ranks are partial sums.
    pub placements: Vec<Placement>,
    /// Where present, the schedule is a *sequence-parallel region*: each rank of the problem's group is this many ranks
    /// that follow each other, and q, k, v, dout, out, dq, dk and dv are placed as hidden rows, with linear layers, and
    /// for q and k a rotation by the position in the sequence, between them and attention.
    pub sequence_parallel: Option<usize>,
}
