//! Results of a rank: whole ones, which take no contribution any more, and those that are written part by part.

use seamproof_oracle::{Side, Sink, TensorName};

use super::{Run, Values, begins};
use crate::check::plan::error::PlanFault;
use crate::check::plan::value::{Value, Whole, side};
use crate::schedule::plan::{Extent, Own};

impl Values<'_> {
    /// Checks that a backward reads dout, and out and LSE of the forward.
    pub(super) fn forward_results(&mut self, [dout, out, lse]: [Own; 3]) -> Run {
        self.expect(dout, Value::Input(TensorName::Dout, self.place))?;
        self.read(out, TensorName::Out)?;
        self.read(lse, TensorName::Lse)
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
    pub(super) fn whole(&mut self, own: Own, tensor: TensorName) -> Result<Whole, PlanFault> {
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

    /// Returns the sum over a rank's own launches of all keys.
    pub(super) fn gathered_sum(&self, own: Own) -> Result<Whole, PlanFault> {
        match self.get(own) {
            Value::Sum { tensor, of: 0, sunk: false } if side(tensor) == Side::Kv => Ok(Whole::Of(tensor)),
            Value::Zero(Extent::All) => Ok(Whole::Zero(Side::Kv)),
            _ => Err(self.holds(own, "a gradient of all keys")),
        }
    }

    /// Writes a part of a result, behind the parts before it. `first` is what the result holds before all parts.
    pub(super) fn write_part(&mut self, to: Own, tensor: TensorName, part: u16, first: Value) -> Run {
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
}
