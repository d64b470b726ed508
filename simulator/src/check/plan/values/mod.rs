//! The values of buffers, buffer by buffer ([`Value`]).
//!
//! A *value* says what all rows of a buffer hold that matter. A launch's contribution is a value that may be taken
//! once: a sum takes it, and then it is gone. A sum may be sent away or copied to its result, once too. Nothing that has
//! not been taken is overwritten or left behind at the end. So every contribution is in a result exactly once.
//!
//! Whoever holds an input, a contribution to keys or a sum over keys, holds those of one *member* of the ring, which the
//! value names. A launch takes keys of the member that it names, and its contribution goes to that member's sum.

mod launches;
mod loans;
mod messages;
mod regions;
mod results;
mod rows;
mod sums;

use seamproof_oracle::{Side, TensorName};

use super::error::PlanFault;
use super::value::{Value, Whole, side};
use crate::schedule::plan::{Act, Extent, Launch, Own, Plan};
use crate::schedule::{Layer, Role};

/// Returns an input as a rank has it at the beginning, or behind the layers of a region.
fn dealt(plan: &Plan<'_>, tensor: TensorName, place: u32) -> Value {
    match tensor {
        _ if plan.lends() && side(tensor) == Side::Kv => Value::Holed(tensor),
        TensorName::Sink => Value::Local(tensor),
        _ if plan.has_exchange() || plan.gathers() && side(tensor) == Side::Kv => Value::Local(tensor),
        _ => Value::Input(tensor, place),
    }
}

/// Whether zeros in these rows are the beginning of a sum of a side.
fn begins(rows: Extent, of: Side) -> bool {
    matches!(rows, Extent::All) || rows == Extent::Slots(of)
}

/// What all buffers of a rank hold.
pub(super) struct Values<'p> {
    plan: &'p Plan<'p>,
    /// The rank's place in its ring.
    place: u32,
    /// The member whose keys a rank collects.
    owner: u32,
    held: Vec<Value>,
}

type Run = Result<(), PlanFault>;

impl<'p> Values<'p> {
    pub(super) fn new(plan: &'p Plan<'p>, rank: usize) -> Values<'p> {
        let place = plan.place(rank) as u32;
        let held = plan.buffers().iter().map(|buffer| match buffer.role {
            Role::Input(tensor) if plan.hides(tensor) => Value::Hidden(tensor),
            Role::Input(tensor) => dealt(plan, tensor, place),
            Role::Output(tensor) if plan.hides(tensor) => Value::Closed,
            Role::Output(tensor) if plan.shares() && side(tensor) == Side::Kv => Value::Closed,
            _ => Value::Nothing,
        });
        Values { plan, place, owner: plan.owner(rank) as u32, held: held.collect() }
    }

    pub(super) fn get(&self, own: Own) -> Value {
        self.held.get(usize::from(own.0)).copied().unwrap_or(Value::Nothing)
    }

    fn put(&mut self, own: Own, value: Value) {
        if let Some(held) = self.held.get_mut(usize::from(own.0)) {
            *held = value;
        }
    }

    fn holds(&self, own: Own, needed: impl ToString) -> PlanFault {
        PlanFault::Holds { buffer: own.0, found: self.get(own).to_string(), needed: needed.to_string() }
    }

    fn expect(&self, own: Own, value: Value) -> Run {
        if self.get(own) == value { Ok(()) } else { Err(self.holds(own, value)) }
    }

    /// Writes a value over one that may go.
    pub(super) fn write(&mut self, own: Own, value: Value) -> Run {
        let before = self.get(own);
        if !before.may_go() {
            return Err(PlanFault::Lost { buffer: own.0, lost: before.to_string() });
        }
        self.put(own, value);
        Ok(())
    }

    /// Takes a launch's contribution.
    fn take(&mut self, own: Own, tensor: TensorName, launch: Launch) -> Run {
        self.expect(own, Value::Part(tensor, launch))?;
        self.put(own, Value::Taken);
        Ok(())
    }

    /// Checks the sink of an operation, if it reads one.
    fn sink(&self, sink: Option<Own>) -> Run {
        sink.map_or(Ok(()), |sink| self.expect(sink, Value::Local(TensorName::Sink)))
    }

    /// Runs an operation of one rank. Messages and collectives are none.
    pub(super) fn run(&mut self, act: &Act) -> Run {
        match *act {
            Act::MakeSegments { to, owner } => self.make_segments(to, owner),
            Act::Attend { launch, table, inputs, results } => self.attend(launch, table, inputs, results),
            Act::AttendStep { launch, table, inputs, sink, results } => {
                self.attend_step(launch, table, (inputs, sink), results)
            }
            Act::AttendWhole { table, inputs, sink, results } => {
                self.attend_whole(table, (inputs, sink), results)
            }
            Act::AttendBackward { launch, table, inputs, results } => {
                self.attend_backward(launch, table, inputs, results)
            }
            Act::AttendBackwardEach { ref launches, table, inputs, results, sums } => {
                self.attend_backward_each(launches, (table, inputs), results, sums)
            }
            Act::AttendBackwardWhole { table, inputs, sink, results } => {
                self.attend_backward_whole(table, inputs, sink, results)
            }
            Act::AttendGathered { launch, inputs, results } => self.attend_gathered(launch, inputs, results),
            Act::CopyValid { launch, table, from, to } => self.copy_valid(launch, table, from, to),
            Act::Merge { style, launch, step, running } => self.merge(style, launch, step, running),
            Act::Accumulate { launch, side, from, to } => self.accumulate(launch, side, from, to),
            Act::Add { side, from, to } => self.add_landing(side, from, to),
            Act::ApplySink { sink, results } => self.apply_sink(sink, results),
            Act::SinkGradient { inputs, dsink } => self.sink_gradient(inputs, dsink),
            Act::Fill { to, rows, value } => self.fill(to, rows, value),
            Act::Copy { from, to, rows } => self.copy(from, to, rows),
            Act::Reorder { from, to, side, way } => self.reorder(from, to, side, way),
            Act::Pack { from, to, loan } => self.pack(from, to, loan),
            Act::Unpack { from, to } => self.unpack(from, to),
            Act::Repay { from, to } => self.repay(from, to),
            Act::Spread { from, to } => self.spread(from, to),
            Act::Unspread { from, to } => self.unspread(from, to),
            Act::Linear { layer: Layer::Column, side, from, to } => self.column_layer(side, from, to),
            Act::Linear { layer: Layer::Row, side, from, to } => self.row_layer(side, from, to),
            Act::Rotate { buffer, side, inverse: false } => self.rotate(buffer, side),
            Act::Rotate { buffer, side, inverse: true } => self.rotate_back(buffer, side),
            Act::Record(_) | Act::Wait(_) => Ok(()),
            Act::GatherHidden { .. }
            | Act::ScatterHidden { .. }
            | Act::Exchange { .. }
            | Act::Trade { .. }
            | Act::AllToAll { .. }
            | Act::AllGather { .. }
            | Act::ReduceScatter { .. }
            | Act::GatherHeads { .. }
            | Act::AllReduce { .. } => Err(PlanFault::Unknown("a message, run by one rank")),
        }
    }

    /// Checks the results, and that nothing is left behind. Returns the wrong buffer.
    pub(super) fn finish(&mut self) -> Result<(), Own> {
        let buffers = self.plan.buffers().iter().enumerate();
        for (own, role) in buffers.map(|(index, buffer)| (Own(index as u16), buffer.role)) {
            let is_right = match role {
                Role::Input(_) | Role::Scratch => !self.get(own).must_be_taken(),
                Role::Output(TensorName::MaxLogit) if self.plan.has_exchange() => {
                    self.get(own) == Value::Done(Whole::Of(TensorName::MaxLogit))
                }
                Role::Output(TensorName::MaxLogit) => self.gathers(own).is_ok(),
                Role::Output(tensor) => self.whole(own, tensor).is_ok(),
            };
            if !is_right {
                return Err(own);
            }
        }
        Ok(())
    }
}
