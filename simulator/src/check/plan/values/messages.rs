//! Messages and collectives: what a rank gives to them, and the statistics that they reduce.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values};
use crate::check::plan::error::PlanFault;
use crate::check::plan::value::{Value, side};
use crate::schedule::plan::{Extent, Loan, Own, Way};

impl Values<'_> {
    /// Returns a shard that a rank gives to its region.
    pub(in crate::check::plan) fn hidden(&self, own: Own) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Hidden(_) => Ok(value),
            _ => Err(self.holds(own, "a shard of an input")),
        }
    }

    /// Returns the summand that a rank gives to a sum over its region.
    pub(in crate::check::plan) fn summand(&mut self, own: Own) -> Result<Value, PlanFault> {
        let value = self.get(own);
        if !matches!(value, Value::Summand(_)) {
            return Err(self.holds(own, "a summand of hidden rows"));
        }
        self.put(own, Value::Taken);
        Ok(value)
    }

    /// Returns the rows of loans that a rank sends.
    pub(in crate::check::plan) fn lent(&self, own: Own, loan: Loan) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Loaned { loan: held, arrived: false, .. } if held == loan => Ok(value),
            _ => Err(self.holds(own, "rows of loans")),
        }
    }

    /// Sends a buffer. Sums move, inputs and zeros are copied.
    pub(in crate::check::plan) fn send(&mut self, own: Own) -> Result<Value, PlanFault> {
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
    pub(in crate::check::plan) fn give(&mut self, own: Own, of: Side, way: Way) -> Result<Value, PlanFault> {
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
    pub(in crate::check::plan) fn gathered(&self, own: Own) -> Result<Value, PlanFault> {
        match self.get(own) {
            value @ Value::Local(tensor) if side(tensor) == Side::Kv => Ok(value),
            _ => Err(self.holds(own, "keys or values as they are dealt")),
        }
    }

    /// Returns what a rank gives to a sum over all ranks.
    pub(in crate::check::plan) fn scattered(&mut self, own: Own) -> Result<Value, PlanFault> {
        let value = self.get(own);
        if !matches!(value, Value::RankedSum(_)) {
            return Err(self.holds(own, "a rank's sum in rank order"));
        }
        self.put(own, Value::Taken);
        Ok(value)
    }

    /// Returns the fault of a statistic that is not that of the launches so far, over the ring if it has more members
    /// and this is asked.
    pub(in crate::check::plan) fn largest(&self, own: Own, over_ring: bool) -> Run {
        match self.get(own) {
            Value::Largest { over_ring: held } if held == over_ring => Ok(()),
            Value::NegInfinity(Extent::Values) if !over_ring => Ok(()),
            _ => Err(self.holds(own, Value::Largest { over_ring })),
        }
    }

    /// Checks a statistic that is gathered.
    pub(in crate::check::plan) fn gathers(&self, own: Own) -> Run {
        self.largest(own, self.plan.reduces())
    }

    /// Takes a statistic that is gathered.
    pub(in crate::check::plan) fn take_largest(&mut self, own: Own) -> Run {
        self.gathers(own)?;
        self.put(own, Value::Taken);
        Ok(())
    }

    /// Sets the value of a statistic that a reduction or a gather writes.
    pub(in crate::check::plan) fn reduced(&mut self, own: Own) {
        self.put(own, Value::Largest { over_ring: true });
    }
}
