//! The operations of a plan.

use seamproof_oracle::Side;

use crate::schedule::{FillValue, Layer, MergeStyle};

/// A buffer of a rank, by its index in [`Plan::buffers`](super::Plan::buffers). Every rank has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Own(pub u16);

/// An event of a rank, by a number below [`Plan::events`](super::Plan::events).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mark(pub u32);

/// A launch of a ring's step: parts of the member's own queries against one part of an owner's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launch {
    /// The member of the ring that owns the keys, by its place.
    pub owner: u32,
    /// The first part of the queries, and the end of the parts.
    pub queries: [u16; 2],
    /// The part of the keys.
    pub keys: u16,
}

/// Launches of a ring's step: each of some parts of the queries against each of some parts of an owner's keys, where some
/// query of the one sees a key of the other. The part of the keys varies fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launches {
    /// The member of the ring that owns the keys, by its place.
    pub owner: u32,
    /// The first part of the queries, and the end of the parts.
    pub queries: [u16; 2],
    /// The first part of the keys, and the end of the parts.
    pub keys: [u16; 2],
}

/// Rows of a buffer, as a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// The rows of every slot of a side as a ring's member holds them, padding included.
    Slots(Side),
    /// The rows of every slot of a side as a rank holds them, padding included.
    LocalSlots(Side),
    /// The rows that a rank's pieces of a side have and no sequence borrows, padding included.
    Held(Side),
    /// The rows of a rank's shard in a region that sequences own, padding included.
    Shard(Side),
    /// Every row.
    All,
    /// The values of a buffer without rows.
    Values,
}

/// Rows of keys that sequences share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loan {
    /// Rows that are lent, once for each borrower.
    Lent,
    /// Rows that borrowers have for them.
    Holes,
}

/// Direction of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// From a rank's rows of every head to all members' rows of the rank's heads, one member after the other.
    Collect,
    /// Back again. Gradients of a KV head that several members hold land apart, one for each of these.
    Deal,
}

/// Work of an operation on whole pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Launches the forward kernel. The sink is left to [`Act::ApplySink`].
    Attend {
        /// The pieces.
        launch: Launch,
        /// The table that says its segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys and values.
        inputs: [Own; 3],
        /// Out, LSE and max_logit.
        results: [Own; 3],
    },
    /// Launches the forward kernel on a part of a rank's queries and every rank's keys, as a step of its own. The kernel
    /// applies the sink and leaves padding alone. Its LSE is the result itself.
    AttendStep {
        /// The pieces. The keys are one part of one owner.
        launch: Launch,
        /// The table that says its segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys and values.
        inputs: [Own; 3],
        /// The learnable sink, if there is one.
        sink: Option<Own>,
        /// Out of a step, and the results LSE and max_logit.
        results: [Own; 3],
    },
    /// Copies the real queries of a step on gathered keys to a result.
    CopyValid {
        /// The pieces.
        launch: Launch,
        /// The table that says the rows, where launches read one.
        table: Option<Own>,
        /// Out or dq of the step.
        from: Own,
        /// The result.
        to: Own,
    },
    /// Launches the backward kernel. On gathered keys, its dk and dv are zeros before.
    AttendBackward {
        /// The pieces.
        launch: Launch,
        /// The table that says its segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys, values, dout, out and LSE.
        inputs: [Own; 6],
        /// dq, dk and dv.
        results: [Own; 3],
    },
    /// Launches the backward kernel, and adds the gradients of each launch before the next one. No launch or all of them
    /// may be there.
    AttendBackwardEach {
        /// The launches.
        launches: Launches,
        /// The table that says their segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys, values, dout, out and LSE.
        inputs: [Own; 6],
        /// dq, dk and dv of a launch.
        results: [Own; 3],
        /// The sums to which they are added.
        sums: [Own; 3],
    },
    /// Launches the forward kernel on all queries of a rank and all keys. The kernel applies the sink.
    AttendWhole {
        /// The table that says its segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys and values.
        inputs: [Own; 3],
        /// The learnable sink, if there is one.
        sink: Option<Own>,
        /// Out, LSE and max_logit.
        results: [Own; 3],
    },
    /// Launches the backward kernel on every sequence, whole.
    AttendBackwardWhole {
        /// The table that says its segments, where launches read one.
        table: Option<Own>,
        /// Queries, keys, values, dout, out and LSE.
        inputs: [Own; 6],
        /// The learnable sink and its gradient, if there is one.
        sink: Option<[Own; 2]>,
        /// dq, dk and dv.
        results: [Own; 3],
    },
    /// Launches the backward kernel on a part of a rank's queries and every rank's keys. Its dq is the result itself.
    /// Queries that lie apart have [`Act::AttendBackwardEach`] instead.
    AttendGathered {
        /// The pieces. The keys are one part of one owner.
        launch: Launch,
        /// Queries, keys, values, dout, out and LSE.
        inputs: [Own; 6],
        /// dq, dk and dv.
        results: [Own; 3],
    },
    /// Makes the table of all launches of a rank's queries on an owner's keys.
    MakeSegments {
        /// The table.
        to: Own,
        /// The member of the ring that owns the keys, by its place.
        owner: u32,
    },
    /// Folds out and LSE of a launch, all rows that it writes, into the running ones.
    Merge {
        /// Manner of the merge.
        style: MergeStyle,
        /// The launch.
        launch: Launch,
        /// Its out and LSE.
        step: [Own; 2],
        /// The running out and LSE.
        running: [Own; 2],
    },
    /// Adds a gradient of a launch, all rows of a side that it writes. Of a step on gathered keys, all keys are added: of
    /// those that it does not name, the gradient is zero.
    Accumulate {
        /// The launch.
        launch: Launch,
        /// The side.
        side: Side,
        /// The addends.
        from: Own,
        /// The sums.
        to: Own,
    },
    /// Adds one sum to another, in the rows of a rank's slots.
    Add {
        /// The side.
        side: Side,
        /// The addends.
        from: Own,
        /// The sums.
        to: Own,
    },
    /// Applies the sink to the real queries of a ring's member.
    ApplySink {
        /// The learnable sink; `None` for a sink of 0.
        sink: Option<Own>,
        /// The out and the LSE.
        results: [Own; 2],
    },
    /// Writes the gradient of the sink over the real queries of a ring's member.
    SinkGradient {
        /// The sink, dout, out and LSE.
        inputs: [Own; 4],
        /// The gradient.
        dsink: Own,
    },
    /// Fills rows.
    Fill {
        /// The buffer.
        to: Own,
        /// The rows.
        rows: Extent,
        /// The value.
        value: FillValue,
    },
    /// Copies rows to the same rows of another buffer.
    Copy {
        /// The buffer that is read.
        from: Own,
        /// The buffer that is written.
        to: Own,
        /// The rows.
        rows: Extent,
    },
    /// Moves rows between the order of members and the order in which attention wants them.
    Reorder {
        /// The buffer that is read.
        from: Own,
        /// The buffer that is written.
        to: Own,
        /// The side.
        side: Side,
        /// Whether to the order of attention, or back.
        way: Way,
    },
    /// Sends two buffers to a rank, all rows, and receives two from another rank, in one group.
    Exchange {
        /// The receiving rank, by its place in the group.
        to: u32,
        /// The buffers that are sent.
        sent: [Own; 2],
        /// The sending rank, by its place in the group.
        from: u32,
        /// The buffers that are received.
        received: [Own; 2],
    },
    /// An all-to-all among the members of a group of ranks, with a block of heads for each.
    AllToAll {
        /// The side.
        side: Side,
        /// The direction.
        way: Way,
        /// The buffer that is read.
        from: Own,
        /// The first of the buffers that are written: one, or where gradients of replicated heads land, one for each
        /// replica.
        to: Own,
        /// Number of these buffers.
        landings: u16,
    },
    /// Gathers a buffer of every rank, one rank after the other.
    AllGather {
        /// The buffer that is read.
        from: Own,
        /// The buffer that is written.
        to: Own,
    },
    /// Sums the rows of each rank over all ranks, and gives them to it.
    ReduceScatter {
        /// The rows of all ranks, one rank after the other.
        from: Own,
        /// The rank's own.
        to: Own,
    },
    /// Copies a rank's rows of one side of its loans, in the order in which they are sent.
    Pack {
        /// The buffer that is read.
        from: Own,
        /// The rows that are sent.
        to: Own,
        /// The side.
        loan: Loan,
    },
    /// Sends such rows to the ranks that have the other side of the loans.
    Trade {
        /// The side that is sent.
        loan: Loan,
        /// The rows that are sent.
        from: Own,
        /// The rows that arrive.
        to: Own,
    },
    /// Copies rows that have arrived into a rank's holes.
    Unpack {
        /// The rows that have arrived.
        from: Own,
        /// The buffer with the holes.
        to: Own,
    },
    /// Adds rows that have arrived to lent rows, borrower after borrower.
    Repay {
        /// The rows that have arrived.
        from: Own,
        /// The buffer with the lent rows.
        to: Own,
    },
    /// Copies gathered rows, and lent rows into holes too.
    Spread {
        /// The buffer that is read.
        from: Own,
        /// The buffer that is written.
        to: Own,
    },
    /// Adds to gathered rows what borrowers have in their holes. All other rows of the sums are zeros.
    Unspread {
        /// The buffer that is read.
        from: Own,
        /// The sums.
        to: Own,
    },
    /// Gathers the hidden rows of a region.
    GatherHidden {
        /// The rank's shard.
        from: Own,
        /// The rows of all shards.
        to: Own,
    },
    /// Sums hidden rows over a region, and gives each rank its shard.
    ScatterHidden {
        /// The rows of all shards.
        from: Own,
        /// The rank's shard.
        to: Own,
    },
    /// Makes a rank's heads of hidden rows, or a summand of hidden rows of these.
    Linear {
        /// Which of the two.
        layer: Layer,
        /// The side.
        side: Side,
        /// The buffer that is read.
        from: Own,
        /// The buffer that is written.
        to: Own,
    },
    /// Rotates the rows of every sequence by their positions, or back.
    Rotate {
        /// The buffer.
        buffer: Own,
        /// The side.
        side: Side,
        /// Whether back.
        inverse: bool,
    },
    /// Gathers a statistic of every member's query heads into one of all heads.
    GatherHeads {
        /// The statistic of the rank's heads.
        from: Own,
        /// The statistic of all heads.
        to: Own,
    },
    /// Takes the largest values over the members of a ring.
    AllReduce {
        /// The buffer.
        buffer: Own,
    },
    /// Marks the point that the stream has reached.
    Record(Mark),
    /// Holds the stream until the mark has been reached.
    Wait(Mark),
}

/// An operation of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// The stream, below [`STREAMS`].
    pub stream: u8,
    /// The work.
    pub act: Act,
}

/// Number of streams of a rank.
pub const STREAMS: usize = 3;
