//! The parts of a schedule: buffers, operations, and the placements that tie them to a problem.

use std::fmt;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use seamproof_oracle::sharding::PlacedRun;
use seamproof_oracle::{Format, Mask, Run, TensorName};
use serde::{Deserialize, Serialize};

use super::descaled::Descales;
use crate::AttentionCall;
use crate::shard::ShardedSide;

/// A buffer of the schedule, by its index in [`Schedule::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// An event of one rank. Ranks share no events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub usize);

/// Meaning of a buffer's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// `[rows, heads, dim]`.
    Rows,
    /// `[heads, rows, 1]`.
    Statistic,
    /// `[heads, 1, 1]`; the rows of a region are ignored.
    Heads,
}

/// Content of a buffer when the schedule begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A rank's part of an input, with poison in padding and slack.
    Input(TensorName),
    /// Unwritten at the beginning; a rank's part of a result at the end.
    Output(TensorName),
    /// Unwritten at the beginning, and no result at the end.
    Scratch,
}

/// One buffer of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Name for people, such as `k gathered` or `out of step 2`.
    pub name: Arc<str>,
    /// Rank of the world that owns the buffer.
    pub rank: usize,
    /// Meaning of the axes.
    pub axes: Axes,
    /// Number of rows.
    pub rows: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of elements of a row and head; 1 for statistics.
    pub dim: usize,
    /// Format to which elements are rounded.
    pub format: Format,
    /// Content at the beginning.
    pub role: Role,
}

impl Buffer {
    /// Returns the shape in storage.
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

/// Rows of one buffer and the rows of another to which they go. Both runs have the same `len`.
pub type RowPair = (Run, Run);

/// Step of the algorithm to which a launch belongs. Only people read it; devices, executor and checker do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// The only launch of a pass.
    #[default]
    Only,
    /// One of several launches of a pass on the same keys.
    Launch {
        /// Index of the launch, from 0.
        index: usize,
        /// Number of launches.
        of: usize,
    },
    /// A launch of a ring's step.
    Ring {
        /// Index of the step, from 0.
        index: usize,
        /// Number of steps of the ring.
        of: usize,
        /// The member that owns the keys, by its place in the ring.
        owner: usize,
        /// The part of the pair matrix that the step covers.
        section: Section,
        /// The part of the owner's keys, or of a step between stripes of several rows, from 0, and the number of parts.
        part: (usize, usize),
    },
}

/// Part of the pair matrix that a ring's step covers, in TransformerEngine's words. Chunks under a mask that ends at
/// the diagonal have such parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// Own keys.
    Diagonal,
    /// Keys of a member before: their first chunk is seen, the second is not.
    Lower,
    /// Keys of a member behind: the second chunk of the queries sees them, the first does not.
    Upper,
    /// Any pair may be seen.
    Full,
    /// Stripes of several rows that a bound of the mask cuts, each with the stripe where it does.
    Edge,
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
                    Section::Edge => return write!(f, "ring step {} of {of}: edge {part}", index + 1),
                };
                write!(f, "ring step {} of {of}: {section} section", index + 1)?;
                if parts > 1 { write!(f, ", part {} of {parts} of the keys", part + 1) } else { Ok(()) }
            }
        }
    }
}

/// Buffers and call of one launch of a forward kernel. The launch works on all heads of its buffers, addressed by the
/// call's runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// Step of the algorithm.
    pub step: Step,
    /// The call of the launch.
    pub call: AttentionCall,
    /// The rows of a [table](Work::MakeSegments) that say the call's segments, if the device reads them there. The call
    /// then says what the host expects, and the checker proves that both are one.
    pub table: Option<Region>,
    /// Descales of codes in FP8, by segment and then by query head of the launch; empty where nothing is scaled.
    /// [`Schedule::descale`] says them.
    pub descales: Vec<Vec<Descales>>,
    /// Queries.
    pub q: BufferId,
    /// Keys.
    pub k: BufferId,
    /// Values.
    pub v: BufferId,
    /// The learnable sink, if the call applies one.
    pub sink: Option<BufferId>,
    /// The output.
    pub out: BufferId,
    /// The LSE.
    pub lse: BufferId,
    /// The largest logit of each head. A launch raises it and never lowers it: it must have been filled before. Raises
    /// are atomic and commute bit for bit, and two launches may raise one buffer unordered without a race.
    pub max_logit: BufferId,
}

/// Buffers and call of one launch of a backward kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct AttendBackward {
    /// Step of the algorithm.
    pub step: Step,
    /// The call of the launch. Its policy says how padding rows of dq, dk and dv are treated.
    pub call: AttentionCall,
    /// The rows of a table that say the call's segments, as in [`Attend::table`].
    pub table: Option<Region>,
    /// Descales of codes in FP8, as in [`Attend::descales`].
    pub descales: Vec<Vec<Descales>>,
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
    /// The learnable sink and its gradient, in exactly one launch of a rank. The gradient is overwritten.
    pub sink: Option<(BufferId, BufferId)>,
    /// Gradient of the queries, overwritten.
    pub dq: BufferId,
    /// Gradient of the keys, overwritten.
    pub dk: BufferId,
    /// Gradient of the values, overwritten.
    pub dv: BufferId,
}

/// Manner in which a step's result enters the running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeStyle {
    /// Merges both lse and out: `lse' = ln(e^lse + e^step)`, `out' = out·e^(lse − lse') + step·e^(step lse − lse')`.
    Running,
    /// Merges both like [`MergeStyle::Running`], by a difference: `out' = out − σ(step lse − lse)·(out − step)` and
    /// `lse' = lse − ln σ(lse − step lse)`. A step or a running result with an LSE of −∞ is the identity.
    Difference,
    /// Merges only the LSE. The outs follow with [`MergeStyle::Weighted`] once the LSE is final.
    Statistics,
    /// Merges only the out, against a final LSE: `out' = out + step·e^(step lse − lse)`.
    Weighted {
        /// Whether the product is rounded to the running format before it is added (TransformerEngine's THD kernel).
        product_rounded: bool,
    },
}

/// Order and formula in which a ring folds its steps' outs together. All compute the same function and round it
/// differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MergeOrder {
    /// Running order: each step's out and LSE enter the running ones ([`MergeStyle::Running`]), which are kept in f32
    /// and rounded once.
    #[default]
    Running,
    /// TransformerEngine's shipped order. Each step's LSE enters the running one ([`MergeStyle::Statistics`]), and each
    /// step's out is kept. Once the LSE is final, the outs are added, weighted by it ([`MergeStyle::Weighted`]). Steps'
    /// outs and their sum are kept in the result's own format, and each product is rounded to it. Steps' outs and
    /// gradients in FP8 are added in f32, and the last sum is rounded to bf16 before it becomes codes. Steps' dk and dv
    /// in FP8 are kept too, and go to their owners in one all-to-all. Scratch grows with the number of members. Source:
    /// `cp_p2p_fwd_fused_attn`, `thd_out_correction` and `AttnFuncWithCPAndKVP2P` of
    /// <https://github.com/NVIDIA/TransformerEngine>.
    ///
    /// An all-gather merges nothing. Its shipped order is a step for each chunk of a rank's queries, on two streams in
    /// turn, of which each has an out of its own. The valid rows of these are copied into the result. Gradients of a
    /// step and their sums are kept in the result's own format, and sums of gradients in FP8 in bf16, over ranks too.
    /// Source: `AttnFuncWithCPAndKVAllGather`, in the same place.
    ///
    /// A single rank merges nothing. Its shipped order is that of unfused attention: packed sequences are converted into
    /// a batch and back ([`converted`](super::converted())). Source: `UnfusedDotProductAttention`, in the same place.
    ///
    /// An all-to-all merges nothing either, and has one step. In the shipped order of algorithms of several ranks, launches read
    /// their segments in [tables](Work::MakeSegments) where these can say them.
    Deferred,
    /// Running order, each merge by a difference ([`MergeStyle::Difference`]), as rings on torch have it. No CUDA
    /// kernel does it. Source: `update_out_and_lse` of <https://github.com/zhuzilin/ring-flash-attention>.
    Difference,
}

impl MergeOrder {
    /// Every order.
    pub const ALL: [MergeOrder; 3] = [MergeOrder::Running, MergeOrder::Deferred, MergeOrder::Difference];
    /// The orders that multiply outs by their weights, which are those of the CUDA kernels.
    pub const WEIGHTED: [MergeOrder; 2] = [MergeOrder::Running, MergeOrder::Deferred];

    /// Returns the name used in options and texts.
    pub fn name(self) -> &'static str {
        match self {
            MergeOrder::Running => "running",
            MergeOrder::Deferred => "deferred",
            MergeOrder::Difference => "difference",
        }
    }

    /// Returns the manner in which a step enters the running result at once; the deferred order has another one later.
    pub(super) fn style(self) -> MergeStyle {
        match self {
            MergeOrder::Running | MergeOrder::Deferred => MergeStyle::Running,
            MergeOrder::Difference => MergeStyle::Difference,
        }
    }

    /// Returns the order with this name.
    pub fn by_name(name: &str) -> Option<MergeOrder> {
        MergeOrder::ALL.into_iter().find(|order| order.name() == name)
    }
}

/// Operation that folds a step's out and LSE into the running ones. The identity is (out 0, lse −∞).
#[derive(Clone, Debug, PartialEq)]
pub struct Merge {
    /// Manner of the merge.
    pub style: MergeStyle,
    /// The step's out.
    pub step_out: BufferId,
    /// The step's LSE.
    pub step_lse: BufferId,
    /// The running out.
    pub out: BufferId,
    /// The running LSE.
    pub lse: BufferId,
    /// The step's rows and the running rows to which they go.
    pub rows: Vec<RowPair>,
}

/// Keys that the queries of a launch meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// Every rank's keys in sequence order, up to the last one that is seen: an all-gather's.
    Gathered,
    /// The keys of the rank at this place of the cut: a step's of a ring. Sequences that are whole on every rank, as an
    /// all-to-all collects them, are cut over one rank.
    Of(usize),
    /// Every rank's keys in sequence order, in pieces of every cp-th key: for stripes of one row on cp ranks, whose
    /// queries have a band against each of these pieces. An all-gather's backward.
    Residues,
}

/// Lengths of whole sequences from which a table of segments is made, and who asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentSource {
    /// Both sides, queries first.
    pub sides: Arc<[ShardedSide; 2]>,
    /// The mask, a band.
    pub mask: Mask,
    /// The rank whose queries attend, by its place in the cut.
    pub place: usize,
    /// The keys.
    pub keys: KeySource,
}

/// Value that a fill writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillValue {
    /// 0.
    Zero,
    /// −∞: an empty LSE, an empty maximum.
    NegInfinity,
}

/// Side of a tensor-parallel linear layer that is cut over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Column-parallel: hidden rows become rows of the rank's heads.
    Column,
    /// Row-parallel: rows of the rank's heads become the rank's summand of hidden rows, which is zero for other heads.
    Row,
}

impl Layer {
    /// Returns the heads that are read and those that are written, where `heads` are the rank's among those of a hidden
    /// row.
    pub fn heads(self, heads: &Range<usize>) -> [Range<usize>; 2] {
        let own = 0..heads.len();
        match self {
            Layer::Column => [heads.clone(), own],
            Layer::Row => [own, heads.clone()],
        }
    }
}

/// Rows to rotate: row i has the position `position + step·i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// The rows, `rows.len` of them.
    pub rows: Run,
    /// Position of the first row.
    pub position: usize,
    /// Distance in positions from one row to the next.
    pub step: usize,
}

/// Manner in which ranks' values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, added in order of rank. Each partial sum is rounded to the buffer's format.
    Sum,
    /// The largest value.
    Max,
}

/// Work of an operation. Row pairs are disjoint on the side that is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Launches the forward kernel.
    Attend(Attend),
    /// Launches the backward kernel.
    AttendBackward(AttendBackward),
    /// Folds a step into the running result.
    Merge(Merge),
    /// Adds the sink's term to final statistics: `lse' = ln(e^lse + e^sink)`, and out is scaled by `e^(lse − lse')`.
    /// Without a learnable sink, the sink is 0 (off-by-one).
    ApplySink {
        /// The learnable sink; `None` for a sink of 0.
        sink: Option<BufferId>,
        /// The out.
        out: BufferId,
        /// The LSE.
        lse: BufferId,
        /// The rows.
        rows: Vec<Run>,
    },
    /// Writes the gradient of the learnable sink over the given rows: `dsink = −Σ exp(sink − lse) · ⟨dout, out⟩` for
    /// each head. The gradient is overwritten.
    SinkGradient {
        /// The learnable sink.
        sink: BufferId,
        /// Gradient of the output.
        dout: BufferId,
        /// The final output.
        out: BufferId,
        /// The final LSE, the sink included.
        lse: BufferId,
        /// The gradient, which is written. It is a partial sum of the rank.
        dsink: BufferId,
        /// The rows, each run those of one sequence.
        rows: Vec<Run>,
        /// Descales of codes of dout, by run and then by head; empty where nothing is scaled.
        descales: Vec<Vec<Descales>>,
    },
    /// Adds for all heads: `to += from`, rounded to the format of `to`.
    Accumulate {
        /// The addends, which are read.
        from: BufferId,
        /// The sums, which are read and written.
        to: BufferId,
        /// Rows of both buffers.
        rows: Vec<RowPair>,
    },
    /// Copies rows of all heads and rounds them to the format of `to`. A reorder is a copy of every row.
    Copy {
        /// The buffer that is read.
        from: BufferId,
        /// The buffer that is written.
        to: BufferId,
        /// Rows of both buffers.
        rows: Vec<RowPair>,
    },
    /// Makes the segments of launches on the device, one for each row of a scratch buffer of [`SegmentSource::WORDS`]
    /// words. Launches and copies read rows of the table. Nothing else may.
    MakeSegments {
        /// The table, which is written whole.
        to: BufferId,
        /// The lengths that the caller gives.
        from: SegmentSource,
    },
    /// Copies the real queries of some segments, all heads, as rows of a table say them (TransformerEngine's
    /// `thd_copy_valid_tokens_from_per_split_to_rank_local`).
    CopyValid {
        /// The buffer that is read.
        from: BufferId,
        /// The buffer that is written.
        to: BufferId,
        /// The rows of the table.
        table: Region,
        /// The rows of both buffers that the table is expected to say.
        rows: Vec<RowPair>,
    },
    /// Applies a linear layer row by row: each output row depends on one input row. A *hidden* row is a row on the side
    /// of the layer that is not cut, and holds every head of a tensor. The layer is opaque to the checker. The
    /// devices' layers have weights of 0 and 1 that copy each head.
    Linear {
        /// The side that is cut.
        layer: Layer,
        /// The rank's heads among those of the hidden rows: all heads of the rank's buffer.
        heads: Range<usize>,
        /// The buffer that is read.
        from: BufferId,
        /// The buffer that is written, all heads.
        to: BufferId,
        /// Rows of both buffers.
        rows: Vec<RowPair>,
    },
    /// Applies the rotation by the position in place to all heads. It is opaque to the checker, but for being a
    /// rotation: one by p and one by q are one by p + q. The devices' is
    /// [`rotated`](seamproof_oracle::region::rotated), which is exact in every format.
    Rotate {
        /// The buffer, which is read and written.
        buffer: BufferId,
        /// The rows and their positions.
        rows: Vec<Rotated>,
        /// Whether rows are turned back, as a gradient requires.
        inverse: bool,
    },
    /// Fills rows of all heads.
    Fill {
        /// The buffer that is written.
        to: BufferId,
        /// The rows.
        rows: Vec<Run>,
        /// The value.
        value: FillValue,
    },
    /// Sends regions to a rank. The peer's `Recv` has regions of the same sizes.
    Send {
        /// The receiving rank of the world.
        to: usize,
        /// The group. Operations of one group on one stream are launched as one and block only together.
        group: Option<usize>,
        /// The regions that are read, one after the other.
        regions: Vec<Region>,
    },
    /// Receives regions from a rank. The peer's `Send` has regions of the same sizes.
    Recv {
        /// The sending rank of the world.
        from: usize,
        /// The group, as in [`Work::Send`].
        group: Option<usize>,
        /// The regions that are written, one after the other.
        regions: Vec<Region>,
    },
    /// Gathers every member's `from` in the `to` of every member, one member after the other.
    AllGather {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// The region that is read.
        from: Region,
        /// The regions that are written: for each member the one to which its `from` goes.
        to: Vec<Region>,
    },
    /// Writes the sum of every member's `from[i]` to member i's `to`. The sum is in order of members.
    ReduceScatter {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// The regions that are read: for each member the part that it will own.
        from: Vec<Region>,
        /// The region that is written.
        to: Region,
    },
    /// Moves member i's `send[j]` to member j's `recv[i]`.
    AllToAll {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// The regions that are read: one for each receiving member.
        send: Vec<Region>,
        /// The regions that are written: one for each sending member.
        recv: Vec<Region>,
    },
    /// Replaces every member's region with the combination of all.
    AllReduce {
        /// Index in [`Schedule::communicators`].
        communicator: usize,
        /// The region, which is read and written.
        region: Region,
        /// Manner of the combination.
        reduction: Reduction,
    },
    /// Marks the point that the stream has reached.
    RecordEvent(EventId),
    /// Holds the stream until the event's last record before this operation in host order has been reached. Without
    /// such a record, a device does not wait at all, and the checker reports an error.
    WaitEvent(EventId),
    /// Makes the host wait for the stream and read. Production schedules may not contain such a read.
    HostRead(Region),
}

/// One operation of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The stream, from 0.
    pub stream: usize,
    /// The work.
    pub work: Work,
}

/// A rank's operations, in host order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankProgram {
    /// The operations.
    pub operations: Vec<Operation>,
    /// Index of the operation at which the backward pass begins; absent in a forward pass. Before that operation, a
    /// caller may hold, move and replay the results that the forward saved.
    pub backward: Option<usize>,
}

impl RankProgram {
    /// Returns the operations of the forward and those of the backward.
    pub(super) fn passes(&self) -> [&[Operation]; 2] {
        let (forward, backward) = self
            .operations
            .split_at(self.backward.unwrap_or(self.operations.len()).min(self.operations.len()));
        [forward, backward]
    }
}

/// Part of a problem's tensor that a buffer holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The tensor.
    pub tensor: TensorName,
    /// The buffer.
    pub buffer: BufferId,
    /// The heads of the tensor that the buffer holds.
    pub heads: Range<usize>,
    /// The rows; empty for tensors without rows.
    pub rows: Vec<PlacedRun>,
}

/// A context-parallel algorithm on one problem, or several [side by side](super::side_by_side()).
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Every rank's buffers.
    pub buffers: Vec<Buffer>,
    /// The programs, by rank of the world. Those of *idle* ranks, which are no members, are empty.
    pub ranks: Vec<RankProgram>,
    /// The ranks of the world that take part: those of the group, in order of places.
    pub members: Vec<usize>,
    /// Ranks of the world for collectives, each list in its own order.
    pub communicators: Vec<Vec<usize>>,
    /// Placements of inputs and results. Placements of dsink on several ranks are partial sums.
    pub placements: Vec<Placement>,
    /// Number of ranks of each *sequence-parallel region*, if the schedule has regions. Each member of the problem's
    /// group becomes this many consecutive ranks. q, k, v, dout, out, dq, dk and dv are then placed as hidden rows.
    /// Between these and attention there are linear layers and, for q and k, a rotation by the position in the
    /// sequence.
    pub sequence_parallel: Option<usize>,
}

impl Work {
    /// Returns the communicator of a collective; `None` for any other work.
    pub fn communicator(&self) -> Option<usize> {
        match self {
            Work::AllGather { communicator, .. }
            | Work::ReduceScatter { communicator, .. }
            | Work::AllToAll { communicator, .. }
            | Work::AllReduce { communicator, .. } => Some(*communicator),
            _ => None,
        }
    }
}

impl Schedule {
    /// Returns the number of ranks of each sequence-parallel region; 1 in a schedule without regions.
    pub fn region(&self) -> usize {
        self.sequence_parallel.unwrap_or(1).max(1)
    }

    /// Returns the ranks of the world that a message or a collective names: its peer, or all members of its
    /// communicator. There are none for other work, and for a communicator that does not exist.
    pub fn named<'a>(&'a self, work: &'a Work) -> &'a [usize] {
        match work {
            Work::Send { to: peer, .. } | Work::Recv { from: peer, .. } => slice::from_ref(peer),
            other => {
                let members =
                    other.communicator().and_then(|communicator| self.communicators.get(communicator));
                members.map_or(&[], Vec::as_slice)
            }
        }
    }

    /// Returns the place of a rank of the world in the group; `None` for an idle rank.
    pub fn place(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|member| *member == rank)
    }
}
