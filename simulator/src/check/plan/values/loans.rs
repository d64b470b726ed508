//! Keys that sequences share, on their way from lenders to borrowers, and their gradients on the way back.

use seamproof_oracle::{Side, TensorName};

use super::{Run, Values};
use crate::check::plan::value::{Value, Whole, joined};
use crate::schedule::plan::{Loan, Own};

impl Values<'_> {
    pub(super) fn pack(&mut self, from: Own, to: Own, loan: Loan) -> Run {
        let of = match (self.get(from), loan) {
            (Value::Holed(tensor), Loan::Lent) => Whole::Of(tensor),
            (Value::Done(whole), Loan::Holes) if whole.side() == Side::Kv => whole,
            _ => return Err(self.holds(from, "keys that are lent, or a gradient of holes")),
        };
        self.write(to, Value::Loaned { of, loan, arrived: false })
    }

    pub(super) fn unpack(&mut self, from: Own, to: Own) -> Run {
        match (self.get(from), self.get(to)) {
            (Value::Loaned { of: Whole::Of(of), loan: Loan::Holes, arrived: true }, Value::Holed(tensor))
                if of == tensor && matches!(tensor, TensorName::K | TensorName::V) =>
            {
                self.put(from, Value::Taken);
                self.put(to, self.input(tensor));
                Ok(())
            }
            _ => Err(self.holds(from, "the keys that its sequences borrow")),
        }
    }

    pub(super) fn repay(&mut self, from: Own, to: Own) -> Run {
        match (self.get(from), self.get(to)) {
            (Value::Loaned { of, loan: Loan::Lent, arrived: true }, Value::Done(whole)) => {
                let joined = joined(of, whole).ok_or_else(|| self.holds(from, "the gradient's loans"))?;
                self.put(from, Value::Taken);
                self.put(to, Value::Repaid(joined));
                Ok(())
            }
            _ => Err(self.holds(from, "what borrowers add to a whole gradient")),
        }
    }

    pub(super) fn spread(&mut self, from: Own, to: Own) -> Run {
        match self.get(from) {
            Value::Holed(tensor) => self.write(to, Value::Input(tensor, self.owner)),
            _ => Err(self.holds(from, "keys without those that sequences borrow")),
        }
    }

    pub(super) fn unspread(&mut self, from: Own, to: Own) -> Run {
        let whole = self.gathered_sum(from)?;
        self.put(from, Value::Taken);
        self.write(to, Value::Repaid(whole))
    }

    /// Returns an input as launches or exchanges want it, with the keys that sequences borrow.
    fn input(&self, tensor: TensorName) -> Value {
        match self.plan.has_exchange() {
            true => Value::Local(tensor),
            false => Value::Input(tensor, self.place),
        }
    }
}
