//! Form: buffers of an operation have the shapes that it needs, none is read and written by it, and its sink and pieces
//! are the problem's.

use seamproof_oracle::{Side, Sink, TensorName};

use super::clocks::touches;
use super::error::PlanFault;
use crate::check::touch::Access;
use crate::schedule::plan::{Act, Extent, Launch, Launches, Loan, Own, Plan, Way};
use crate::schedule::{Axes, Layer, Role};

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

    fn is(&self, own: Own, tensor: TensorName, at: At) -> Result<(), PlanFault> {
        if self.of(own)? == self.shape(tensor, at) { Ok(()) } else { Err(PlanFault::Shape(own.0)) }
    }

    fn are<const N: usize>(&self, owns: [Own; N], tensors: [TensorName; N], at: At) -> Result<(), PlanFault> {
        owns.into_iter().zip(tensors).try_for_each(|(own, tensor)| self.is(own, tensor, at))
    }

    /// Checks that two buffers have one shape.
    fn alike(&self, one: Own, other: Own) -> Result<(), PlanFault> {
        if self.of(one)? == self.of(other)? { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }

    /// Checks that a buffer has the rows of a side, with statistics and elements as they may be.
    fn has_rows(&self, own: Own, side: Side, at: At) -> Result<(), PlanFault> {
        use TensorName::{K, Lse, Out, Q, V};
        let tensors = if side == Side::Q { &[Q, Out, Lse][..] } else { &[K, V] };
        match tensors.iter().any(|tensor| self.is(own, *tensor, at).is_ok()) {
            true => Ok(()),
            false => Err(PlanFault::Shape(own.0)),
        }
    }

    fn launch(&self, launch: &Launch) -> Result<(), PlanFault> {
        let Launch { owner, queries: [first, end], keys } = *launch;
        let [q_parts, kv_parts] = self.plan.parts();
        let there = (owner as usize) < self.plan.owners() && usize::from(keys) < kv_parts;
        let is_step = !self.plan.is_whole() || self.plan.gathers();
        match there && first < end && usize::from(end) <= q_parts && is_step {
            true => Ok(()),
            false => Err(PlanFault::Pieces(*launch)),
        }
    }

    /// Checks launches, of which each has one part of the queries and one of the keys.
    fn each(&self, launches: &Launches) -> Result<(), PlanFault> {
        let Launches { owner, queries, keys: [first, end] } = *launches;
        if !self.plan.is_apart() || self.plan.has_steps() {
            self.ring()?;
        }
        if first >= end {
            return Err(PlanFault::Pieces(Launch { owner, queries, keys: first }));
        }
        [first, end - 1].into_iter().try_for_each(|keys| self.launch(&Launch { owner, queries, keys }))
    }

    fn forward(&self, inputs: [Own; 3], results: [Own; 3]) -> Result<(), PlanFault> {
        use TensorName::{K, Lse, MaxLogit, Out, Q, V};
        self.are(inputs, [Q, K, V], At::Ring)?;
        self.are(results, [Out, Lse, MaxLogit], At::Ring)
    }

    fn backward(&self, inputs: [Own; 6], results: [Own; 3]) -> Result<(), PlanFault> {
        use TensorName::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
        self.are(inputs, [Q, K, V, Dout, Out, Lse], At::Ring)?;
        self.are(results, [Dq, Dk, Dv], At::Ring)
    }

    /// Checks that launches of this plan attend whole sequences.
    fn whole(&self) -> Result<(), PlanFault> {
        match self.plan.is_whole() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("a launch on whole sequences in a ring")),
        }
    }

    fn ring(&self) -> Result<(), PlanFault> {
        match self.plan.is_whole() {
            true => Err(PlanFault::Unknown("a step of a ring in another algorithm")),
            false => Ok(()),
        }
    }

    fn gathers(&self) -> Result<(), PlanFault> {
        match self.plan.gathers() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("a gather in another algorithm")),
        }
    }

    fn exchanges(&self) -> Result<(), PlanFault> {
        match self.plan.has_exchange() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("an exchange where there is none")),
        }
    }

    /// Checks that a launch reads a table where this plan has tables, and only there.
    fn table(&self, table: Option<Own>) -> Result<(), PlanFault> {
        match table {
            Some(own) if !self.plan.is_table(own) => Err(PlanFault::Shape(own.0)),
            None if self.plan.has_tables() => Err(PlanFault::Unknown("a launch without a table")),
            _ => Ok(()),
        }
    }

    /// Checks a step on gathered keys, or what it leaves: it has one part of the queries and the pass's table.
    fn step(&self, launch: &Launch, table: Option<Own>, is_backward: bool) -> Result<(), PlanFault> {
        if !self.plan.has_steps() {
            return Err(PlanFault::Unknown("a step on gathered keys in another algorithm"));
        }
        self.launch(launch)?;
        let Launch { queries: [first, end], keys, .. } = *launch;
        let is_there = usize::from(keys) < self.plan.pairs(is_backward).parts()[1];
        match (is_there && end - first == 1, table == self.plan.step_table(is_backward)) {
            (true, true) => Ok(()),
            (true, false) => Err(PlanFault::Shape(table.map_or(0, |own| own.0))),
            (false, _) => Err(PlanFault::Pieces(*launch)),
        }
    }

    /// Checks the sink of a kernel, which knows by itself of one that is not learnable.
    fn kernel_sink(&self, sink: Option<Own>) -> Result<(), PlanFault> {
        let is_learnable = self.plan.problem().softmax.sink == Sink::Learnable;
        if is_learnable != sink.is_some() {
            return Err(PlanFault::Sink);
        }
        sink.map_or(Ok(()), |sink| self.is(sink, TensorName::Sink, At::Ring))
    }

    /// Checks one operation.
    pub(super) fn check(&self, act: &Act) -> Result<(), PlanFault> {
        apart(act)?;
        self.fits(act)?;
        self.spares(act)
    }

    /// Checks the shapes of an operation's buffers, its pieces and its sink.
    fn fits(&self, act: &Act) -> Result<(), PlanFault> {
        use TensorName::{Dout, Dsink, Lse, MaxLogit, Out};
        match act {
            Act::Attend { launch, table, inputs, results } => {
                self.ring()?;
                self.table(*table)?;
                self.launch(launch)?;
                self.forward(*inputs, *results)
            }
            Act::AttendBackwardEach { launches, table, inputs, results, sums } => {
                self.each(launches)?;
                self.table(*table)?;
                self.backward(*inputs, *results)?;
                results.iter().zip(sums).try_for_each(|(from, to)| self.alike(*from, *to))
            }
            Act::AttendStep { launch, table, inputs, sink, results } => {
                self.step(launch, *table, false)?;
                self.kernel_sink(*sink)?;
                self.forward(*inputs, *results)
            }
            Act::CopyValid { launch, table, from, to } => {
                self.step(launch, *table, false)?;
                self.has_rows(*from, Side::Q, At::Ring)?;
                self.alike(*from, *to)
            }
            Act::AttendWhole { table, inputs, sink, results } => {
                self.whole()?;
                if self.plan.has_steps() {
                    return Err(PlanFault::Unknown("one launch of a forward in steps"));
                }
                self.table(*table)?;
                self.kernel_sink(*sink)?;
                self.forward(*inputs, *results)
            }
            Act::AttendBackward { launch, table, inputs, results } => {
                if self.plan.has_steps() {
                    self.step(launch, *table, true)?;
                    return self.backward(*inputs, *results);
                }
                self.ring()?;
                self.table(*table)?;
                self.launch(launch)?;
                self.backward(*inputs, *results)
            }
            Act::AttendGathered { launch, inputs, results } => {
                self.gathers()?;
                if self.plan.has_steps() {
                    return Err(PlanFault::Unknown("a launch that writes dq itself, in a backward in steps"));
                }
                if self.plan.is_apart() {
                    return Err(PlanFault::Unknown(
                        "a launch that writes dq itself, of queries that lie apart",
                    ));
                }
                self.launch(launch)?;
                self.backward(*inputs, *results)
            }
            Act::AttendBackwardWhole { table, inputs, sink, results } => {
                self.whole()?;
                self.table(*table)?;
                if self.plan.gathers() {
                    return Err(PlanFault::Unknown("one launch of a backward on gathered keys"));
                }
                self.kernel_sink(sink.map(|[sink, _]| sink))?;
                sink.map_or(Ok(()), |[_, dsink]| self.is(dsink, Dsink, At::Ring))?;
                self.backward(*inputs, *results)
            }
            Act::MakeSegments { to, owner } => {
                self.table(Some(*to))?;
                match (*owner as usize) < self.plan.owners() {
                    true => Ok(()),
                    false => Err(PlanFault::Unknown("a table of keys that nobody owns")),
                }
            }
            Act::Merge { launch, step, running, .. } => {
                self.launch(launch)?;
                self.are(*step, [Out, Lse], At::Ring)?;
                self.are(*running, [Out, Lse], At::Ring)
            }
            Act::Accumulate { launch, side, from, to } => {
                self.launch(launch)?;
                self.has_rows(*from, *side, At::Ring)?;
                self.alike(*from, *to)
            }
            Act::Add { side, from, to } => {
                self.has_rows(*from, *side, At::Rank)?;
                self.alike(*from, *to)
            }
            Act::ApplySink { sink, results } => {
                self.sink(*sink)?;
                self.are(*results, [Out, Lse], At::Ring)
            }
            Act::SinkGradient { inputs: [sink, dout, out, lse], dsink } => {
                self.sink(Some(*sink))?;
                self.are([*dout, *out, *lse], [Dout, Out, Lse], At::Ring)?;
                self.is(*dsink, Dsink, At::Ring)
            }
            Act::Fill { to, rows, .. } => self.extent(*to, *rows),
            Act::Copy { from, to, rows } => {
                self.extent(*to, *rows)?;
                self.alike(*from, *to)
            }
            Act::Reorder { from, to, side, way } => {
                let (ranked, collected) = if *way == Way::Collect { (from, to) } else { (to, from) };
                self.has_rows(*ranked, *side, At::Ranked)?;
                self.has_rows(*collected, *side, At::Ring)?;
                self.same_elements(*from, *to)
            }
            Act::Exchange { sent, received, .. } => {
                sent.iter().zip(received).try_for_each(|(from, to)| self.alike(*from, *to))
            }
            Act::AllToAll { side, way, from, to, landings } => {
                self.exchanges()?;
                let (local, ranked) = if *way == Way::Collect { (from, to) } else { (to, from) };
                self.has_rows(*local, *side, At::Rank)?;
                self.has_rows(*ranked, *side, At::Ranked)?;
                self.same_elements(*from, *to)?;
                let expected = if *way == Way::Collect { 1 } else { self.plan.replicas(*side) };
                if usize::from(*landings) != expected {
                    return Err(PlanFault::Shape(to.0));
                }
                (1..*landings).try_for_each(|landing| self.alike(*to, Own(to.0.saturating_add(landing))))
            }
            Act::AllGather { from, to } | Act::ReduceScatter { from: to, to: from } => {
                self.gathers()?;
                self.has_rows(*from, Side::Kv, At::Rank)?;
                self.has_rows(*to, Side::Kv, At::Ranked)?;
                self.same_elements(*from, *to)
            }
            Act::Pack { from, to, loan } => {
                self.has_rows(*from, Side::Kv, At::Rank)?;
                self.has_loan(*to, *loan)?;
                self.same_row(*from, *to)
            }
            Act::Trade { loan, from, to } => {
                self.has_loan(*from, *loan)?;
                self.has_loan(*to, loan.other())?;
                self.same_row(*from, *to)
            }
            Act::Unpack { from, to } | Act::Repay { from, to } => {
                let loan = if matches!(act, Act::Unpack { .. }) { Loan::Holes } else { Loan::Lent };
                self.has_loan(*from, loan)?;
                self.has_rows(*to, Side::Kv, At::Rank)?;
                self.same_row(*from, *to)
            }
            Act::Spread { from, to } | Act::Unspread { from, to } => {
                self.gathers()?;
                self.has_rows(*from, Side::Kv, At::Ring)?;
                self.alike(*from, *to)
            }
            Act::GatherHidden { from, to } | Act::ScatterHidden { from: to, to: from } => {
                self.region()?;
                let side = self.side_of(*from, At::Shard)?;
                self.has_rows(*to, side, At::Hidden)?;
                self.same_elements(*from, *to)
            }
            Act::Linear { layer, side, from, to } => {
                self.region()?;
                let (hidden, own) = if *layer == Layer::Column { (from, to) } else { (to, from) };
                self.has_rows(*hidden, *side, At::Hidden)?;
                self.has_rows(*own, *side, At::Rank)?;
                self.same_elements(*from, *to)
            }
            Act::Rotate { buffer, side, .. } => {
                self.region()?;
                self.has_rows(*buffer, *side, At::Rank)
            }
            Act::GatherHeads { from, to } => {
                self.exchanges()?;
                self.is(*from, MaxLogit, At::Ring)?;
                self.is(*to, MaxLogit, At::Rank)
            }
            Act::AllReduce { buffer } => self.is(*buffer, MaxLogit, At::Ring),
            Act::Record(_) | Act::Wait(_) => Ok(()),
        }
    }

    /// Checks that an operation that writes every row writes none of a result, which has rows that nobody owns.
    fn spares(&self, act: &Act) -> Result<(), PlanFault> {
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

    fn same_elements(&self, one: Own, other: Own) -> Result<(), PlanFault> {
        let (a, b) = (self.of(one)?, self.of(other)?);
        if (a.0, a.3) == (b.0, b.3) { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }

    fn region(&self) -> Result<(), PlanFault> {
        match self.plan.region_ranks() {
            1 => Err(PlanFault::Unknown("an operation of a region where there is none")),
            _ => Ok(()),
        }
    }

    /// Returns a side of which a buffer has the rows.
    fn side_of(&self, own: Own, at: At) -> Result<Side, PlanFault> {
        let mut sides = [Side::Q, Side::Kv].into_iter();
        sides.find(|side| self.has_rows(own, *side, at).is_ok()).ok_or(PlanFault::Shape(own.0))
    }

    fn has_loan(&self, own: Own, loan: Loan) -> Result<(), PlanFault> {
        if self.plan.loan(own) == Some(loan) { Ok(()) } else { Err(PlanFault::Shape(own.0)) }
    }

    /// Checks that rows of two buffers are alike.
    fn same_row(&self, one: Own, other: Own) -> Result<(), PlanFault> {
        let (a, b) = (self.of(one)?, self.of(other)?);
        if (a.0, a.2, a.3) == (b.0, b.2, b.3) { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }

    /// Checks the sink of an operation that applies one.
    fn sink(&self, sink: Option<Own>) -> Result<(), PlanFault> {
        let of_problem = self.plan.problem().softmax.sink;
        if of_problem == Sink::None || (of_problem == Sink::Learnable) != sink.is_some() {
            return Err(PlanFault::Sink);
        }
        sink.map_or(Ok(()), |sink| self.is(sink, TensorName::Sink, At::Ring))
    }

    fn extent(&self, own: Own, rows: Extent) -> Result<(), PlanFault> {
        match rows {
            Extent::Slots(side) => self.has_rows(own, side, At::Ring),
            Extent::Shard(side) => self.has_rows(own, side, At::Shard),
            Extent::LocalSlots(side) | Extent::Held(side) => self.has_rows(own, side, At::Rank),
            Extent::Values if self.of(own)?.0 == Axes::Heads => Ok(()),
            Extent::All if self.of(own)?.0 != Axes::Heads => Ok(()),
            Extent::All | Extent::Values => Err(PlanFault::Shape(own.0)),
        }
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
fn apart(act: &Act) -> Result<(), PlanFault> {
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
