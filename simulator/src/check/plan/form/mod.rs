//! Form: buffers of an operation have the shapes that it needs, none is read and written by it, and its sink and pieces
//! are the problem's.

mod launches;
mod messages;
mod regions;
mod rows;
mod sums;

use seamproof_oracle::{Side, TensorName};

use super::clocks::touches;
use super::error::PlanFault;
use crate::check::touch::Access;
use crate::schedule::plan::{Act, Extent, Launch, Loan, Own, Plan};
use crate::schedule::{Axes, Role};

type Checked = Result<(), PlanFault>;

/// A shape of a buffer: axes, rows, heads and elements.
type Shape = (Axes, usize, usize, usize);

/// Shapes of a plan's buffers, and those of the tensors in a ring and on a rank.
pub(super) struct Forms<'p> {
    plan: &'p Plan<'p>,
    shapes: Vec<Shape>,
}

/// Place of a tensor: with a ring's member, or on a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Ring,
    Rank,
    /// In the order of an exchange's members, with a block of heads.
    Ranked,
    /// In a shard of a region, with all heads of the problem.
    Shard,
    /// In the shards of a region, one after the other.
    Hidden,
}

impl<'p> Forms<'p> {
    pub(super) fn new(plan: &'p Plan<'p>) -> Forms<'p> {
        let shape = |buffer: &crate::schedule::Buffer| (buffer.axes, buffer.rows, buffer.heads, buffer.dim);
        Forms { plan, shapes: plan.buffers().iter().map(shape).collect() }
    }

    fn of(&self, own: Own) -> Result<Shape, PlanFault> {
        self.shapes.get(usize::from(own.0)).copied().ok_or(PlanFault::Shape(own.0))
    }

    /// Returns the shape of a tensor.
    fn shape(&self, tensor: TensorName, at: At) -> Shape {
        use TensorName::{Dk, Dq, Dsink, Dv, K, Lse, MaxLogit, Q, Sink, V};
        let (plan, dims) = (self.plan, self.plan.problem().dims);
        let side = if matches!(tensor, K | V | Dk | Dv) { Side::Kv } else { Side::Q };
        let [local, piece] = [plan.rows(side), plan.piece_rows(side)];
        let (rows, heads) = match at {
            At::Ring => (piece, plan.block_heads(side)),
            At::Rank => (local, plan.all_heads(side)),
            At::Ranked => (plan.ranked_rows(side), plan.block_heads(side)),
            At::Shard => (local.div_ceil(plan.region_ranks()), plan.hidden_heads(side)),
            At::Hidden => {
                (local.div_ceil(plan.region_ranks()) * plan.region_ranks(), plan.hidden_heads(side))
            }
        };
        match tensor {
            Q | K | Dq | Dk => (Axes::Rows, rows, heads, dims.qk),
            Lse => (Axes::Statistic, rows, heads, 1),
            MaxLogit => (Axes::Heads, 0, heads, 1),
            // A rank has the sinks of its block alone.
            Sink | Dsink => (Axes::Heads, 0, plan.block_heads(side), 1),
            _ => (Axes::Rows, rows, heads, dims.v),
        }
    }

    fn is(&self, own: Own, tensor: TensorName, at: At) -> Checked {
        if self.of(own)? == self.shape(tensor, at) { Ok(()) } else { Err(PlanFault::Shape(own.0)) }
    }

    fn are<const N: usize>(&self, owns: [Own; N], tensors: [TensorName; N], at: At) -> Checked {
        owns.into_iter().zip(tensors).try_for_each(|(own, tensor)| self.is(own, tensor, at))
    }

    /// Checks that two buffers have one shape.
    fn alike(&self, one: Own, other: Own) -> Checked {
        if self.of(one)? == self.of(other)? { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }

    /// Checks that a buffer has the rows of a side, with statistics and elements as they may be.
    fn has_rows(&self, own: Own, side: Side, at: At) -> Checked {
        use TensorName::{K, Lse, Out, Q, V};
        let tensors = if side == Side::Q { &[Q, Out, Lse][..] } else { &[K, V] };
        match tensors.iter().any(|tensor| self.is(own, *tensor, at).is_ok()) {
            true => Ok(()),
            false => Err(PlanFault::Shape(own.0)),
        }
    }

    /// Checks one operation.
    pub(super) fn check(&self, act: &Act) -> Checked {
        apart(act)?;
        self.fits(act)?;
        self.spares(act)
    }

    fn launch(&self, launch: &Launch) -> Checked {
        let Launch { owner, queries: [first, end], keys } = *launch;
        let [q_parts, kv_parts] = self.plan.parts();
        let there = (owner as usize) < self.plan.owners() && usize::from(keys) < kv_parts;
        let is_step = !self.plan.is_whole() || self.plan.gathers();
        match there && first < end && usize::from(end) <= q_parts && is_step {
            true => Ok(()),
            false => Err(PlanFault::Pieces(*launch)),
        }
    }

    /// Checks the shapes of an operation's buffers, its pieces and its sink.
    fn fits(&self, act: &Act) -> Checked {
        match *act {
            Act::Attend { ref launch, table, inputs, results } => self.attend(launch, table, inputs, results),
            Act::AttendStep { ref launch, table, inputs, sink, results } => {
                self.attend_step(launch, table, (inputs, sink), results)
            }
            Act::AttendWhole { table, inputs, sink, results } => {
                self.attend_whole(table, (inputs, sink), results)
            }
            Act::AttendBackward { ref launch, table, inputs, results } => {
                self.attend_backward(launch, table, inputs, results)
            }
            Act::AttendBackwardEach { ref launches, table, inputs, results, sums } => {
                self.attend_backward_each(launches, (table, inputs), results, sums)
            }
            Act::AttendBackwardWhole { table, inputs, sink, results } => {
                self.attend_backward_whole(table, inputs, sink, results)
            }
            Act::AttendGathered { ref launch, inputs, results } => {
                self.attend_gathered(launch, inputs, results)
            }
            Act::CopyValid { ref launch, table, from, to } => self.copy_valid(launch, table, from, to),
            Act::MakeSegments { to, owner } => self.make_segments(to, owner),
            Act::Merge { ref launch, step, running, .. } => self.merge(launch, step, running),
            Act::Accumulate { ref launch, side, from, to } => self.accumulate(launch, side, from, to),
            Act::Add { side, from, to } => self.add(side, from, to),
            Act::ApplySink { sink, results } => self.apply_sink(sink, results),
            Act::SinkGradient { inputs, dsink } => self.sink_gradient(inputs, dsink),
            Act::Fill { to, rows, .. } => self.extent(to, rows),
            Act::Copy { from, to, rows } => self.copy(from, to, rows),
            Act::Reorder { from, to, side, way } => self.reorder((side, way), from, to),
            Act::Exchange { sent, received, .. } => self.exchange(sent, received),
            Act::AllToAll { side, way, from, to, landings } => {
                self.all_to_all((side, way), from, to, landings)
            }
            Act::AllGather { from, to } | Act::ReduceScatter { from: to, to: from } => {
                self.gather_keys(from, to)
            }
            Act::Pack { from, to, loan } => self.pack(from, to, loan),
            Act::Trade { loan, from, to } => self.trade(loan, from, to),
            Act::Unpack { from, to } => self.take_loans(Loan::Holes, from, to),
            Act::Repay { from, to } => self.take_loans(Loan::Lent, from, to),
            Act::Spread { from, to } | Act::Unspread { from, to } => self.spread(from, to),
            Act::GatherHidden { from, to } | Act::ScatterHidden { from: to, to: from } => {
                self.gather_hidden(from, to)
            }
            Act::Linear { layer, side, from, to } => self.linear((side, layer), from, to),
            Act::Rotate { buffer, side, .. } => self.rotate(buffer, side),
            Act::GatherHeads { from, to } => self.gather_heads(from, to),
            Act::AllReduce { buffer } => self.is(buffer, TensorName::MaxLogit, At::Ring),
            Act::Record(_) | Act::Wait(_) => Ok(()),
        }
    }

    fn gathers(&self) -> Checked {
        match self.plan.gathers() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("a gather in another algorithm")),
        }
    }

    /// Checks that an operation that writes every row writes none of a result, which has rows that nobody owns.
    fn spares(&self, act: &Act) -> Checked {
        if !writes_all(act) {
            return Ok(());
        }
        let mut is_result = false;
        touches(act, |own, kind| {
            let buffer = self.plan.buffers().get(usize::from(own.0));
            let is_output = buffer.is_some_and(|buffer| matches!(buffer.role, Role::Output(_)));
            is_result |= is_output && kind == Access::Write;
        });
        match is_result {
            true => Err(PlanFault::Unknown("a write of every row of a result, with those that nobody owns")),
            false => Ok(()),
        }
    }

    fn same_elements(&self, one: Own, other: Own) -> Checked {
        let (a, b) = (self.of(one)?, self.of(other)?);
        if (a.0, a.3) == (b.0, b.3) { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }
}

/// Whether an operation writes every row of the buffers that it writes.
fn writes_all(act: &Act) -> bool {
    matches!(
        act,
        Act::Fill { rows: Extent::All, .. }
            | Act::Copy { rows: Extent::All, .. }
            | Act::Exchange { .. }
            | Act::AllToAll { .. }
            | Act::Trade { .. }
            | Act::Unspread { .. }
            | Act::GatherHidden { .. }
            | Act::ScatterHidden { .. }
            | Act::Linear { .. }
            | Act::AllGather { .. }
            | Act::ReduceScatter { .. }
    )
}

/// Checks that an operation writes to different buffers, and reads none of them. Sums read what they write, which is not
/// told apart.
fn apart(act: &Act) -> Checked {
    if let Act::AllToAll { from, to, landings, .. } = act {
        let is_among = (to.0..to.0.saturating_add(*landings)).contains(&from.0);
        return if is_among { Err(PlanFault::Twice(from.0)) } else { Ok(()) };
    }
    let (mut seen, mut count, mut twice) = ([(Own(0), Access::Read); TOUCHES_MAX], 0, None);
    touches(act, |own, kind| {
        let meets = |(other, access): &(Own, Access)| *other == own && kind.conflicts(*access);
        if seen[..count].iter().any(meets) {
            twice = Some(PlanFault::Twice(own.0));
        }
        seen[count] = (own, kind);
        count += 1;
    });
    twice.map_or(Ok(()), Err)
}

/// Largest number of buffers of an operation, but for an all-to-all: a table, six inputs, three results, and three sums or
/// the sink and its gradient.
const TOUCHES_MAX: usize = 13;
