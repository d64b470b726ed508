//! Keys that sequences share: rows that are lent, and what borrowers add to their gradients.

use super::super::act::{Loan, Own};
use super::works::{Works, id};
use crate::schedule::collect::inverse;
use crate::schedule::lending::Counter;
use crate::schedule::program::{FillValue, Region, RowPair, Work};

impl Works<'_> {
    fn counter(&self, loan: Loan) -> Option<&Counter> {
        self.plan.counter(self.rank, loan)
    }

    pub(super) fn pack(&self, from: Own, to: Own, loan: Loan) -> Work {
        let rows = self.counter(loan).into_iter().flat_map(Counter::rows).collect();
        Work::Copy { from: id(from), to: id(to), rows }
    }

    pub(super) fn trade(&self, loan: Loan, from: Own, to: Own) -> Work {
        let (send, recv) = (self.traded(from, loan), self.traded(to, loan.other()));
        Work::AllToAll { communicator: self.plan.loan_communicator(), send, recv }
    }

    /// Returns the rows of loans of each member.
    fn traded(&self, own: Own, loan: Loan) -> Vec<Region> {
        let regions = self.counter(loan).into_iter().flat_map(|of| &of.regions);
        regions.map(|rows| Region { rows: *rows, ..self.all(own) }).collect()
    }

    pub(super) fn unpack(&self, from: Own, to: Own) -> Work {
        let rows = self.counter(Loan::Holes).into_iter().flat_map(Counter::rows);
        Work::Copy { from: id(from), to: id(to), rows: inverse(&rows.collect::<Vec<_>>()) }
    }

    pub(super) fn repay(&self, from: Own, to: Own) -> Vec<Work> {
        let turns = self.counter(Loan::Lent).map_or(Vec::new(), Counter::turns).into_iter();
        let add = |rows: Vec<_>| Work::Accumulate { from: id(from), to: id(to), rows: inverse(&rows) };
        turns.map(add).collect()
    }

    pub(super) fn spread(&self, from: Own, to: Own) -> Work {
        let shared = self.plan.shared.iter();
        let rows = shared.flat_map(|shared| shared.held.iter().chain(shared.lent.iter().flatten()));
        Work::Copy { from: id(from), to: id(to), rows: rows.copied().collect() }
    }

    pub(super) fn unspread(&self, from: Own, to: Own) -> Vec<Work> {
        let Some(shared) = &self.plan.shared else { return Vec::new() };
        let every = vec![self.all(to).rows];
        let (from, to) = (id(from), id(to));
        let zeros = Work::Fill { to, rows: every, value: FillValue::Zero };
        let copy = Work::Copy { from, to, rows: shared.held.clone() };
        let add = |lent: &Vec<RowPair>| Work::Accumulate { from, to, rows: inverse(lent) };
        [zeros, copy].into_iter().chain(shared.lent.iter().map(add)).collect()
    }
}
