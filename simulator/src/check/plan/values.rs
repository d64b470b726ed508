//! The values of buffers, buffer by buffer ([`Value`]).
//!
//! A *value* says what all rows of a buffer hold that matter. A launch's contribution is a value that may be taken
//! once: a sum takes it, and then it is gone. A sum may be sent away or copied to its result, once too. Nothing that has
//! not been taken is overwritten or left behind at the end. So every contribution is in a result exactly once.
//!
//! Whoever holds an input, a contribution to keys or a sum over keys, holds those of one *member* of the ring, which the
//! value names. A launch takes keys of the member that it names, and its contribution goes to that member's sum.

use seamproof_oracle::{Side, Sink, TensorName};

use super::error::PlanFault;
use super::value::{Value, Whole, joined, side};
use crate::schedule::plan::{Act, Extent, Launch, Loan, Own, Plan, Way};
use crate::schedule::rotates;
use crate::schedule::{FillValue, Layer, MergeStyle, Role};

/// Returns an input as a rank has it at the beginning, or behind the layers of a region.
fn dealt(plan: &Plan<'_>, tensor: TensorName, place: u32) -> Value {
    match tensor {
        _ if plan.lends() && side(tensor) == Side::Kv => Value::Holed(tensor),
        TensorName::Sink => Value::Local(tensor),
        _ if plan.has_exchange() || plan.gathers() && side(tensor) == Side::Kv => Value::Local(tensor),
        _ => Value::Input(tensor, place),
    }
}

/// Whether a value is a gradient that must be rotated back before it leaves a region.
fn needs_turn(tensor: TensorName, value: Value) -> bool {
    rotates(tensor) && !matches!(value, Value::Turned(_))
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

    /// Runs an operation of one rank. Messages and collectives are none.
    pub(super) fn run(&mut self, act: &Act) -> Run {
        use TensorName::{Dk, Dout, Dq, Dsink, Dv, Lse, Out};
        match *act {
            Act::MakeSegments { to, owner } => match self.get(to) {
                Value::Nothing | Value::Table(_) => {
                    self.put(to, Value::Table(owner));
                    Ok(())
                }
                _ => Err(self.holds(to, "a table")),
            },
            Act::AttendWhole { table, inputs, sink, results: [out, lse, max_logit] } => {
                self.table(table, 0)?;
                if table.is_some() {
                    self.expect(out, Value::Zero(Extent::Slots(Side::Q)))?;
                    self.expect(lse, Value::NegInfinity(Extent::Slots(Side::Q)))?;
                }
                self.inputs(inputs, self.owner)?;
                sink.map_or(Ok(()), |sink| self.expect(sink, Value::Local(TensorName::Sink)))?;
                self.raise(max_logit)?;
                self.write(out, Value::Done(Whole::Of(Out)))?;
                self.write(lse, Value::Done(Whole::Of(Lse)))
            }
            Act::AttendBackwardWhole { table, inputs: [q, k, v, dout, out, lse], sink, results } => {
                self.table(table, 0)?;
                self.inputs([q, k, v], self.owner)?;
                self.expect(dout, Value::Input(Dout, self.place))?;
                self.read(out, Out)?;
                self.read(lse, Lse)?;
                if let Some([sink, dsink]) = sink {
                    self.expect(sink, Value::Local(TensorName::Sink))?;
                    self.write(dsink, Value::Done(Whole::Of(Dsink)))?;
                }
                [Dq, Dk, Dv].into_iter().zip(results).try_for_each(|(tensor, to)| {
                    if table.is_some() {
                        self.expect(to, Value::Zero(Extent::Slots(side(tensor))))?;
                    }
                    self.write(to, Value::Done(Whole::Of(tensor)))
                })
            }
            Act::AttendBackwardEach { launches, table, inputs, results, sums } => {
                // A second launch finds and leaves what the first one leaves: results that were taken, and sums.
                let first = self.plan.each_launch(self.place as usize, &launches).next();
                let Some(launch) = first else { return Ok(()) };
                self.run(&Act::AttendBackward { launch, table, inputs, results })?;
                let gradients = [Side::Q, Side::Kv, Side::Kv].into_iter().zip(results.into_iter().zip(sums));
                let mut acts = gradients.map(|(side, (from, to))| Act::Accumulate { launch, side, from, to });
                acts.try_for_each(|act| self.run(&act))
            }
            Act::AttendGathered { launch, inputs: [q, k, v, dout, out, lse], results: [dq, dk, dv] } => {
                self.inputs([q, k, v], launch.owner)?;
                self.expect(dout, Value::Input(Dout, self.place))?;
                self.read(out, Out)?;
                self.read(lse, Lse)?;
                self.write_part(dq, Dq, launch.queries[0], Value::Nothing)?;
                self.write(dk, Value::Part(Dk, launch))?;
                self.write(dv, Value::Part(Dv, launch))
            }
            Act::AttendStep { launch, table, inputs, sink, results: [out, lse, max_logit] } => {
                self.table(table, launch.owner)?;
                self.inputs(inputs, launch.owner)?;
                sink.map_or(Ok(()), |sink| self.expect(sink, Value::Local(TensorName::Sink)))?;
                self.raise(max_logit)?;
                self.write(out, Value::Part(Out, launch))?;
                self.write_part(lse, Lse, launch.queries[0], Value::NegInfinity(Extent::Slots(Side::Q)))
            }
            Act::CopyValid { launch, table, from, to } => {
                self.table(table, launch.owner)?;
                let tensor = if self.get(from) == Value::Part(Out, launch) { Out } else { Dq };
                if tensor == Dq && self.plan.is_apart() {
                    return Err(PlanFault::Unknown("a copy of dq of a launch that is one of several"));
                }
                self.take(from, tensor, launch)?;
                self.write_part(to, tensor, launch.queries[0], Value::Zero(Extent::Slots(Side::Q)))
            }
            Act::Attend { launch, table, inputs, results: [out, lse, max_logit] } => {
                self.table(table, launch.owner)?;
                self.inputs(inputs, launch.owner)?;
                self.raise(max_logit)?;
                self.write(out, Value::Part(Out, launch))?;
                self.write(lse, Value::Part(Lse, launch))
            }
            Act::AttendBackward { launch, table, inputs: [q, k, v, dout, out, lse], results } => {
                self.table(table, launch.owner)?;
                self.inputs([q, k, v], launch.owner)?;
                self.expect(dout, Value::Input(Dout, self.place))?;
                self.read(out, Out)?;
                self.read(lse, Lse)?;
                if self.plan.has_steps() {
                    results[1..].iter().try_for_each(|to| self.expect(*to, Value::Zero(Extent::All)))?;
                }
                let tensors = [Dq, Dk, Dv].into_iter().zip(results);
                tensors.into_iter().try_for_each(|(tensor, to)| self.write(to, Value::Part(tensor, launch)))
            }
            Act::Merge { style: MergeStyle::Statistics, launch, step: [_, from], running: [_, to] } => {
                self.take(from, Lse, launch)?;
                self.put(from, Value::Counted(launch));
                self.add(to, Lse, self.place)
            }
            Act::Merge {
                style: MergeStyle::Weighted { .. },
                launch,
                step: [from, weight],
                running: [to, lse],
            } => {
                self.expect(weight, Value::Counted(launch))?;
                self.close(lse)?;
                self.take(from, Out, launch)?;
                self.add(to, Out, self.place)
            }
            Act::Merge { launch, step, running, .. } => {
                for (tensor, (from, to)) in [Out, Lse].into_iter().zip(step.into_iter().zip(running)) {
                    self.take(from, tensor, launch)?;
                    self.add(to, tensor, self.place)?;
                }
                Ok(())
            }
            Act::Accumulate { launch, side: of, from, to } => {
                let Value::Part(tensor @ (Dq | Dk | Dv), _) = self.get(from) else {
                    return Err(self.holds(from, "a gradient of a launch"));
                };
                if side(tensor) != of {
                    return Err(self.holds(from, "a gradient of the other side"));
                }
                self.take(from, tensor, launch)?;
                self.add(to, tensor, if tensor == Dq { self.place } else { launch.owner })
            }
            Act::Add { side: Side::Kv, from, to } => self.add_landing(from, to),
            Act::Add { .. } => Err(PlanFault::Unknown("a sum of landings of the queries")),
            Act::ApplySink { sink, results } => {
                if let Some(sink) = sink {
                    self.expect(sink, Value::Local(TensorName::Sink))?;
                }
                for (tensor, own) in [Out, Lse].into_iter().zip(results) {
                    if (tensor, self.get(own)) != (Lse, Value::Final) {
                        self.add(own, tensor, self.place)?;
                    }
                    self.put(own, Value::Sum { tensor, of: self.place, sunk: true });
                }
                Ok(())
            }
            Act::SinkGradient { inputs: [sink, dout, out, lse], dsink } => {
                self.expect(sink, Value::Local(TensorName::Sink))?;
                self.expect(dout, Value::Input(Dout, self.place))?;
                self.read(out, Out)?;
                self.read(lse, Lse)?;
                self.write(dsink, Value::Done(Whole::Of(Dsink)))
            }
            Act::Fill { to, rows, value } => self.fill(to, rows, value),
            Act::Copy { from, to, rows } => self.copy(from, to, rows),
            Act::Reorder { from, to, side: of, way } => self.reorder(from, to, of, way),
            Act::Pack { from, to, loan } => {
                let of = match (self.get(from), loan) {
                    (Value::Holed(tensor), Loan::Lent) => Whole::Of(tensor),
                    (Value::Done(whole), Loan::Holes) if whole.side() == Side::Kv => whole,
                    _ => return Err(self.holds(from, "keys that are lent, or a gradient of holes")),
                };
                self.write(to, Value::Loaned { of, loan, arrived: false })
            }
            Act::Unpack { from, to } => match (self.get(from), self.get(to)) {
                (
                    Value::Loaned { of: Whole::Of(of), loan: Loan::Holes, arrived: true },
                    Value::Holed(tensor),
                ) if of == tensor && matches!(tensor, TensorName::K | TensorName::V) => {
                    self.put(from, Value::Taken);
                    self.put(to, self.input(tensor));
                    Ok(())
                }
                _ => Err(self.holds(from, "the keys that its sequences borrow")),
            },
            Act::Repay { from, to } => match (self.get(from), self.get(to)) {
                (Value::Loaned { of, loan: Loan::Lent, arrived: true }, Value::Done(whole)) => {
                    let joined = joined(of, whole).ok_or_else(|| self.holds(from, "the gradient's loans"))?;
                    self.put(from, Value::Taken);
                    self.put(to, Value::Repaid(joined));
                    Ok(())
                }
                _ => Err(self.holds(from, "what borrowers add to a whole gradient")),
            },
            Act::Spread { from, to } => match self.get(from) {
                Value::Holed(tensor) => self.write(to, Value::Input(tensor, self.owner)),
                _ => Err(self.holds(from, "keys without those that sequences borrow")),
            },
            Act::Unspread { from, to } => {
                let whole = self.gathered_sum(from)?;
                self.put(from, Value::Taken);
                self.write(to, Value::Repaid(whole))
            }
            Act::Linear { layer: Layer::Column, side: of, from, to } => match self.get(from) {
                Value::AllHidden(tensor) if side(tensor) == of && rotates(tensor) => {
                    self.write(to, Value::Straight(tensor))
                }
                Value::AllHidden(tensor) if side(tensor) == of => {
                    self.write(to, dealt(self.plan, tensor, self.place))
                }
                _ => Err(self.holds(from, "the shards of an input of the side")),
            },
            Act::Linear { layer: Layer::Row, side: of, from, to } => {
                let whole = match self.get(from) {
                    Value::Turned(whole) => whole,
                    _ => self.result(from)?,
                };
                if whole.side() != of
                    || matches!(whole, Whole::Of(tensor) if needs_turn(tensor, self.get(from)))
                {
                    return Err(self.holds(from, "a result of the side that is rotated back"));
                }
                let is_turned = matches!(self.get(from), Value::Turned(_));
                self.put(from, if is_turned { Value::Taken } else { Value::Given(whole) });
                self.write(to, Value::Summand(whole))
            }
            Act::Rotate { buffer, side: of, inverse: false } => match self.get(buffer) {
                Value::Straight(tensor) if side(tensor) == of => {
                    self.put(buffer, dealt(self.plan, tensor, self.place));
                    Ok(())
                }
                _ => Err(self.holds(buffer, "an input of the side that is not rotated")),
            },
            Act::Rotate { buffer, side: of, inverse: true } => {
                let whole = self.result(buffer)?;
                if whole.side() != of || matches!(whole, Whole::Of(tensor) if !rotates(tensor)) {
                    return Err(self.holds(buffer, "a result of the side that is rotated"));
                }
                self.put(buffer, Value::Turned(whole));
                Ok(())
            }
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

    /// Checks the table of a launch on an owner's keys, if it reads one.
    fn table(&self, table: Option<Own>, owner: u32) -> Run {
        table.map_or(Ok(()), |table| self.expect(table, Value::Table(owner)))
    }

    /// Makes a running LSE take no more.
    fn close(&mut self, lse: Own) -> Run {
        let sum = Value::Sum { tensor: TensorName::Lse, of: self.place, sunk: false };
        if self.get(lse) != Value::Final {
            self.expect(lse, sum)?;
        }
        self.put(lse, Value::Final);
        Ok(())
    }

    /// Returns which whole result a buffer holds, that takes no more.
    fn result(&mut self, own: Own) -> Result<Whole, PlanFault> {
        let tensor = match self.get(own) {
            Value::Done(whole) => return Ok(whole),
            Value::Sum { tensor, .. } | Value::Written { tensor, .. } => tensor,
            Value::Zero(Extent::Slots(Side::Q)) => TensorName::Out,
            _ => return Err(self.holds(own, "a whole result")),
        };
        self.whole(own, tensor)
    }

    /// Returns a shard that a rank gives to its region.
    pub(super) fn hidden(&self, own: Own) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Hidden(_) => Ok(value),
            _ => Err(self.holds(own, "a shard of an input")),
        }
    }

    /// Returns the summand that a rank gives to a sum over its region.
    pub(super) fn summand(&mut self, own: Own) -> Result<Value, PlanFault> {
        let value = self.get(own);
        if !matches!(value, Value::Summand(_)) {
            return Err(self.holds(own, "a summand of hidden rows"));
        }
        self.put(own, Value::Taken);
        Ok(value)
    }

    /// Returns an input as launches or exchanges want it, with the keys that sequences borrow.
    fn input(&self, tensor: TensorName) -> Value {
        match self.plan.has_exchange() {
            true => Value::Local(tensor),
            false => Value::Input(tensor, self.place),
        }
    }

    /// Returns the sum over a rank's own launches of all keys.
    fn gathered_sum(&self, own: Own) -> Result<Whole, PlanFault> {
        match self.get(own) {
            Value::Sum { tensor, of: 0, sunk: false } if side(tensor) == Side::Kv => Ok(Whole::Of(tensor)),
            Value::Zero(Extent::All) => Ok(Whole::Zero(Side::Kv)),
            _ => Err(self.holds(own, "a gradient of all keys")),
        }
    }

    /// Writes a part of a result, behind the parts before it. `first` is what the result holds before all parts.
    fn write_part(&mut self, to: Own, tensor: TensorName, part: u16, first: Value) -> Run {
        let before = match self.get(to) {
            held if held == first => 0,
            Value::Written { tensor: held, parts } if held == tensor => parts,
            _ => return Err(self.holds(to, "a result without this part")),
        };
        if before != part {
            return Err(self.holds(to, "a result with the parts before"));
        }
        self.put(to, Value::Written { tensor, parts: part + 1 });
        Ok(())
    }

    /// Notes a launch in a statistic.
    fn raise(&mut self, max_logit: Own) -> Run {
        match self.get(max_logit) {
            Value::NegInfinity(Extent::Values) | Value::Largest { over_ring: false } => {}
            _ => return Err(self.holds(max_logit, "-inf, or the largest logit of other launches,")),
        }
        self.put(max_logit, Value::Largest { over_ring: false });
        Ok(())
    }

    /// Checks that a launch reads the queries of its rank and the keys of an owner.
    fn inputs(&self, [q, k, v]: [Own; 3], owner: u32) -> Run {
        self.expect(q, Value::Input(TensorName::Q, self.place))?;
        self.expect(k, Value::Input(TensorName::K, owner))?;
        self.expect(v, Value::Input(TensorName::V, owner))
    }

    /// Adds something to a sum without the sink, or begins one.
    fn add(&mut self, to: Own, tensor: TensorName, of: u32) -> Run {
        let sum = Value::Sum { tensor, of, sunk: false };
        let is_there = match self.get(to) {
            Value::Zero(rows) => tensor != TensorName::Lse && begins(rows, side(tensor)),
            Value::NegInfinity(rows) => tensor == TensorName::Lse && begins(rows, Side::Q),
            held => held == sum,
        };
        if !is_there {
            return Err(self.holds(to, sum));
        }
        self.put(to, sum);
        Ok(())
    }

    /// Reads a whole out or LSE, which takes no launches any more.
    fn read(&mut self, own: Own, tensor: TensorName) -> Run {
        match self.get(own) {
            Value::Given(whole) if whole == Whole::Of(tensor) => Ok(()),
            Value::Given(Whole::Zero(Side::Q)) if tensor == TensorName::Out => Ok(()),
            _ => self.whole(own, tensor).map(|_| ()),
        }
    }

    /// Returns a buffer's whole result, which takes no contribution any more. It is an error if the sink is missing.
    fn whole(&mut self, own: Own, tensor: TensorName) -> Result<Whole, PlanFault> {
        let needs_sink = self.plan.problem().softmax.sink != Sink::None;
        let is_softmax = matches!(tensor, TensorName::Out | TensorName::Lse);
        let of_tensor = Whole::Of(tensor);
        let whole = match self.get(own) {
            Value::Done(whole) if whole == of_tensor => whole,
            Value::Done(whole @ Whole::Zero(of)) if of == side(tensor) && tensor != TensorName::Lse => whole,
            Value::Sum { tensor: held, of, sunk }
                if held == tensor && of == self.place && sunk == (needs_sink && is_softmax) =>
            {
                of_tensor
            }
            Value::Written { tensor: held, parts }
                if held == tensor && usize::from(parts) == self.plan.parts()[0] =>
            {
                of_tensor
            }
            Value::Zero(rows) if tensor != TensorName::Lse && begins(rows, side(tensor)) => {
                Whole::Zero(side(tensor))
            }
            Value::Final if tensor == TensorName::Lse && !needs_sink => of_tensor,
            Value::NegInfinity(rows) if tensor == TensorName::Lse && !needs_sink && begins(rows, Side::Q) => {
                of_tensor
            }
            _ => return Err(self.holds(own, Value::Done(of_tensor))),
        };
        self.put(own, Value::Done(whole));
        Ok(whole)
    }

    fn fill(&mut self, to: Own, rows: Extent, value: FillValue) -> Run {
        let value = match value {
            FillValue::Zero => Value::Zero(rows),
            FillValue::NegInfinity => Value::NegInfinity(rows),
        };
        self.write(to, value)
    }

    fn copy(&mut self, from: Own, to: Own, rows: Extent) -> Run {
        let whole = match (self.get(from), rows) {
            (Value::Sum { tensor, .. }, Extent::Slots(of))
                if side(tensor) == of && tensor != TensorName::Lse =>
            {
                self.whole(from, tensor)?
            }
            (Value::Zero(filled), Extent::Slots(of)) if begins(filled, of) => Whole::Zero(of),
            (Value::Scattered(whole), Extent::Shard(of)) if whole.side() == of => whole,
            (value @ Value::Holed(_), Extent::All) if self.plan.lends() => return self.write(to, value),
            (Value::Done(whole @ Whole::Of(TensorName::Dq)), Extent::Held(Side::Q)) => whole,
            (Value::Done(whole @ Whole::Zero(Side::Q)), Extent::Held(Side::Q)) => whole,
            (Value::Repaid(whole), Extent::Held(Side::Kv)) if self.plan.lends() => whole,
            (Value::Landed { of, first: 0, count: 1 }, Extent::Held(Side::Kv))
                if self.plan.shares() && self.plan.gathers() && of.side() == Side::Kv =>
            {
                of
            }
            (Value::Landed { of, first: 0, count }, Extent::LocalSlots(to_side))
                if of.side() == to_side
                    && usize::from(count) == self.plan.replicas(to_side)
                    && !(self.plan.gathers() && self.plan.shares()) =>
            {
                of
            }
            _ => return Err(self.holds(from, "a whole sum or landing of the side")),
        };
        self.put(from, Value::Taken);
        if matches!(rows, Extent::Held(Side::Kv) | Extent::Shard(_)) && self.get(to) == Value::Closed {
            self.put(to, Value::Nothing);
        }
        self.write(to, Value::Done(whole))
    }

    fn reorder(&mut self, from: Own, to: Own, of: Side, way: Way) -> Run {
        match (way, self.get(from)) {
            (Way::Collect, Value::Ranked(tensor)) if self.plan.gathers() && self.plan.shares() => {
                if side(tensor) != of {
                    return Err(self.holds(from, "an input of the side"));
                }
                self.write(to, Value::Holed(tensor))
            }
            (Way::Collect, Value::Ranked(tensor)) if side(tensor) == of => {
                let of = if of == Side::Kv { self.owner } else { self.place };
                self.write(to, Value::Input(tensor, of))
            }
            (Way::Deal, Value::Repaid(whole)) if self.plan.gathers() && of == Side::Kv => {
                self.put(from, Value::Taken);
                self.write(to, Value::RankedSum(whole))
            }
            (Way::Deal, _) if self.plan.gathers() && of == Side::Kv && !self.plan.shares() => {
                let whole = self.gathered_sum(from)?;
                self.put(from, Value::Taken);
                self.write(to, Value::RankedSum(whole))
            }
            (Way::Deal, Value::Done(whole)) if whole.side() == of => self.deal(from, to, whole),
            // The LSE's running result is the result itself, and in the deferred order out's is too.
            (Way::Deal, Value::Sum { tensor: TensorName::Out, .. } | Value::Zero(_)) if of == Side::Q => {
                let whole = self.whole(from, TensorName::Out)?;
                self.deal(from, to, whole)
            }
            (
                Way::Deal,
                Value::Sum { tensor: TensorName::Lse, .. } | Value::Final | Value::NegInfinity(_),
            ) if of == Side::Q => {
                let whole = self.whole(from, TensorName::Lse)?;
                self.deal(from, to, whole)
            }
            _ => Err(self.holds(from, "an input in rank order, or a whole result")),
        }
    }

    /// Gives a whole result to the members of an exchange. A backward may still read it.
    fn deal(&mut self, from: Own, to: Own, whole: Whole) -> Run {
        self.put(from, Value::Given(whole));
        self.write(to, Value::RankedResult(whole))
    }

    /// Adds the partial sums of other members that hold the same KV heads.
    fn add_landing(&mut self, from: Own, to: Own) -> Run {
        let (Value::Landed { of, first, count: 1 }, Value::Landed { of: sum, first: 0, count }) =
            (self.get(from), self.get(to))
        else {
            return Err(self.holds(from, "a landing, and more landings in the sum,"));
        };
        let is_gradient =
            |whole| matches!(whole, Whole::Of(TensorName::Dk | TensorName::Dv) | Whole::Zero(Side::Kv));
        match joined(of, sum).filter(|_| first == count && is_gradient(of) && is_gradient(sum)) {
            Some(joined) => {
                self.put(from, Value::Taken);
                self.put(to, Value::Landed { of: joined, first: 0, count: count + 1 });
                Ok(())
            }
            None => Err(self.holds(from, "the next landing of the same gradient")),
        }
    }

    /// Returns the rows of loans that a rank sends.
    pub(super) fn lent(&self, own: Own, loan: Loan) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Loaned { loan: held, arrived: false, .. } if held == loan => Ok(value),
            _ => Err(self.holds(own, "rows of loans")),
        }
    }

    /// Sends a buffer. Sums move, inputs and zeros are copied.
    pub(super) fn send(&mut self, own: Own) -> Result<Value, PlanFault> {
        let value = self.get(own);
        match value {
            Value::Input(..) | Value::Zero(Extent::All) => {}
            Value::Sum { sunk: false, tensor: TensorName::Dk | TensorName::Dv, .. } => {
                self.put(own, Value::Taken);
            }
            _ => return Err(self.holds(own, "an input or a travelling sum")),
        }
        Ok(value)
    }

    /// Returns what a member gives to an all-to-all.
    pub(super) fn give(&mut self, own: Own, of: Side, way: Way) -> Result<Value, PlanFault> {
        match (way, self.get(own)) {
            (Way::Collect, value @ Value::Local(tensor))
                if side(tensor) == of && tensor != TensorName::Sink =>
            {
                Ok(value)
            }
            (Way::Deal, value @ Value::RankedResult(whole)) if whole.side() == of => {
                self.put(own, Value::Taken);
                Ok(value)
            }
            _ => Err(self.holds(own, "what all members exchange")),
        }
    }

    /// Returns what a rank gives to a gather of all ranks.
    pub(super) fn gathered(&self, own: Own) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Local(tensor) if side(tensor) == Side::Kv => Ok(value),
            _ => Err(self.holds(own, "keys or values as they are dealt")),
        }
    }

    /// Returns what a rank gives to a sum over all ranks.
    pub(super) fn scattered(&mut self, own: Own) -> Result<Value, PlanFault> {
        let value = self.get(own);
        if !matches!(value, Value::RankedSum(_)) {
            return Err(self.holds(own, "a rank's sum in rank order"));
        }
        self.put(own, Value::Taken);
        Ok(value)
    }

    /// Returns the fault of a statistic that is not that of the launches so far, over the ring if it has more members
    /// and this is asked.
    pub(super) fn largest(&self, own: Own, over_ring: bool) -> Run {
        match self.get(own) {
            Value::Largest { over_ring: held } if held == over_ring => Ok(()),
            Value::NegInfinity(Extent::Values) if !over_ring => Ok(()),
            _ => Err(self.holds(own, Value::Largest { over_ring })),
        }
    }

    /// Checks a statistic that is gathered.
    pub(super) fn gathers(&self, own: Own) -> Run {
        self.largest(own, self.plan.reduces())
    }

    /// Takes a statistic that is gathered.
    pub(super) fn take_largest(&mut self, own: Own) -> Run {
        self.gathers(own)?;
        self.put(own, Value::Taken);
        Ok(())
    }

    /// Sets the value of a statistic that a reduction or a gather writes.
    pub(super) fn reduced(&mut self, own: Own) {
        self.put(own, Value::Largest { over_ring: true });
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
