//! Layers and rotations of sequence-parallel regions.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values, dealt};
use crate::check::plan::error::PlanFault;
use crate::check::plan::value::{Value, Whole, side};
use crate::schedule::plan::{Extent, Own};
use crate::schedule::rotates;

impl Values<'_> {
    /// Makes an input of a rank's heads from the shards of a region.
    pub(super) fn column_layer(&mut self, of: Side, from: Own, to: Own) -> Run {
        match self.get(from) {
            Value::AllHidden(tensor) if side(tensor) == of && rotates(tensor) => {
                self.write(to, Value::Straight(tensor))
            }
            Value::AllHidden(tensor) if side(tensor) == of => {
                self.write(to, dealt(self.plan, tensor, self.place))
            }
            _ => Err(self.holds(from, "the shards of an input of the side")),
        }
    }

    /// Makes a summand of hidden rows from a result of a rank's heads.
    pub(super) fn row_layer(&mut self, of: Side, from: Own, to: Own) -> Run {
        let whole = match self.get(from) {
            Value::Turned(whole) => whole,
            _ => self.result(from)?,
        };
        if whole.side() != of || matches!(whole, Whole::Of(tensor) if needs_turn(tensor, self.get(from))) {
            return Err(self.holds(from, "a result of the side that is rotated back"));
        }
        let is_turned = matches!(self.get(from), Value::Turned(_));
        self.put(from, if is_turned { Value::Taken } else { Value::Given(whole) });
        self.write(to, Value::Summand(whole))
    }

    pub(super) fn rotate(&mut self, buffer: Own, of: Side) -> Run {
        match self.get(buffer) {
            Value::Straight(tensor) if side(tensor) == of => {
                self.put(buffer, dealt(self.plan, tensor, self.place));
                Ok(())
            }
            _ => Err(self.holds(buffer, "an input of the side that is not rotated")),
        }
    }

    pub(super) fn rotate_back(&mut self, buffer: Own, of: Side) -> Run {
        let whole = self.result(buffer)?;
        if whole.side() != of || matches!(whole, Whole::Of(tensor) if !rotates(tensor)) {
            return Err(self.holds(buffer, "a result of the side that is rotated"));
        }
        self.put(buffer, Value::Turned(whole));
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
}

/// Whether a value is a gradient that must be rotated back before it leaves a region.
fn needs_turn(tensor: TensorName, value: Value) -> bool {
    rotates(tensor) && !matches!(value, Value::Turned(_))
}
