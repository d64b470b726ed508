//! Rows that are filled, copied or moved.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values, begins};
use crate::check::plan::value::{Value, Whole, side};
use crate::schedule::FillValue;
use crate::schedule::plan::{Extent, Own, Way};

impl Values<'_> {
    pub(super) fn fill(&mut self, to: Own, rows: Extent, value: FillValue) -> Run {
        let value = match value {
            FillValue::Zero => Value::Zero(rows),
            FillValue::NegInfinity => Value::NegInfinity(rows),
        };
        self.write(to, value)
    }

    pub(super) fn copy(&mut self, from: Own, to: Own, rows: Extent) -> Run {
        let whole = match (self.get(from), rows) {
            (Value::Sum { tensor, .. }, Extent::Slots(of))
                if side(tensor) == of && tensor != TensorName::Lse =>
            {
                self.whole(from, tensor)?
            }
            (Value::Zero(filled), Extent::Slots(of)) if begins(filled, of) => Whole::Zero(of),
            // A result that is rounded once more.
            (Value::Done(whole), Extent::Slots(of)) if whole.side() == of && whole.has_lanes() => whole,
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

    pub(super) fn reorder(&mut self, from: Own, to: Own, of: Side, way: Way) -> Run {
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
}
