//! Form of messages and collectives, and of the rows of loans that they carry.

use seamproof_oracle::{Side, TensorName};

use super::{At, Checked, Forms};
use crate::check::plan::error::PlanFault;
use crate::schedule::plan::{Loan, Own, Way};

impl Forms<'_> {
    pub(super) fn exchange(&self, sent: [Own; 2], received: [Own; 2]) -> Checked {
        sent.into_iter().zip(received).try_for_each(|(from, to)| self.alike(from, to))
    }

    pub(super) fn all_to_all(&self, (side, way): (Side, Way), from: Own, to: Own, landings: u16) -> Checked {
        self.exchanges()?;
        let (local, ranked, expected) = match way {
            Way::Collect => (from, to, 1),
            Way::Deal => (to, from, self.plan.replicas(side)),
        };
        self.has_rows(local, side, At::Rank)?;
        self.has_rows(ranked, side, At::Ranked)?;
        self.same_elements(from, to)?;
        if usize::from(landings) != expected {
            return Err(PlanFault::Shape(to.0));
        }
        (1..landings).try_for_each(|landing| self.alike(to, Own(to.0.saturating_add(landing))))
    }

    /// Checks a gather of the keys of all ranks, or a scatter of their sums.
    pub(super) fn gather_keys(&self, own: Own, ranked: Own) -> Checked {
        self.gathers()?;
        self.has_rows(own, Side::Kv, At::Rank)?;
        self.has_rows(ranked, Side::Kv, At::Ranked)?;
        self.same_elements(own, ranked)
    }

    pub(super) fn gather_heads(&self, from: Own, to: Own) -> Checked {
        self.exchanges()?;
        self.is(from, TensorName::MaxLogit, At::Ring)?;
        self.is(to, TensorName::MaxLogit, At::Rank)
    }

    pub(super) fn pack(&self, from: Own, to: Own, loan: Loan) -> Checked {
        self.has_rows(from, Side::Kv, At::Rank)?;
        self.has_loan(to, loan)?;
        self.same_row(from, to)
    }

    pub(super) fn trade(&self, loan: Loan, from: Own, to: Own) -> Checked {
        self.has_loan(from, loan)?;
        self.has_loan(to, loan.other())?;
        self.same_row(from, to)
    }

    /// Checks the use of rows of loans that have arrived.
    pub(super) fn take_loans(&self, loan: Loan, from: Own, to: Own) -> Checked {
        self.has_loan(from, loan)?;
        self.has_rows(to, Side::Kv, At::Rank)?;
        self.same_row(from, to)
    }

    fn exchanges(&self) -> Checked {
        match self.plan.has_exchange() {
            true => Ok(()),
            false => Err(PlanFault::Unknown("an exchange where there is none")),
        }
    }

    fn has_loan(&self, own: Own, loan: Loan) -> Checked {
        if self.plan.loan(own) == Some(loan) { Ok(()) } else { Err(PlanFault::Shape(own.0)) }
    }

    /// Checks that rows of two buffers are alike.
    fn same_row(&self, one: Own, other: Own) -> Checked {
        let (a, b) = (self.of(one)?, self.of(other)?);
        if (a.0, a.2, a.3) == (b.0, b.2, b.3) { Ok(()) } else { Err(PlanFault::Shape(other.0)) }
    }
}
