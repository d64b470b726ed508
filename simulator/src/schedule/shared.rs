//! Keys that sequences [share](seamproof_oracle::Sharing), for launches that take every sequence's keys together.
//!
//! A buffer is *spread* when lent rows are also in the holes of the borrowers. A launch reads a spread K and V as if no
//! key were shared, and writes a spread dK and dV: what each borrower adds to a lent row is in its hole. These are then
//! *gathered*: added to the lent rows in f32, borrower after borrower, in the order of sequences.
//!
//! One accumulation adds at most one borrower to a lent row, and there are as many as some lender has borrowers.

use seamproof_oracle::{Format, Problem, Run, SharedKeys};

use super::build::{self, Builder};
use super::program::{BufferId, FillValue, RowPair, Work};

/// The rows of shared keys in a buffer that has every sequence whole.
#[derive(Debug)]
pub(crate) struct SharedRows {
    /// The rows that sequences hold themselves, padding included.
    pub(crate) held: Vec<RowPair>,
    /// Lent rows with the holes of borrowers: of the first borrower of each lender, then of the second, and so on.
    pub(crate) lent: Vec<Vec<RowPair>>,
}

impl SharedRows {
    /// Returns the rows of a problem whose sequences lie where `rows` says; `None` if no key is shared.
    pub(super) fn of(problem: &Problem, rows: impl Fn(usize) -> Run) -> Option<SharedRows> {
        if problem.sharing.is_empty() {
            return None;
        }
        let held = (0..problem.sequences.len()).map(|sequence| {
            let (run, first) = (rows(sequence), problem.sharing.borrowed(sequence));
            build::part(Run { len: run.span, ..run }, &(first..run.span))
        });
        let held = build::same_rows(&held.filter(|run| run.span > 0).collect::<Vec<_>>());
        let mut lent: Vec<Vec<RowPair>> = Vec::new();
        for shared @ &SharedKeys { sequence, with, keys } in &problem.sharing.0 {
            let turn = problem.sharing.turn(shared);
            if turn == lent.len() {
                lent.push(Vec::new());
            }
            let [with, own] = [with, sequence].map(|sequence| build::part(rows(sequence), &(0..keys)));
            lent[turn].push((with, own));
        }
        Some(SharedRows { held, lent })
    }

    /// Returns a copy of a buffer, spread.
    pub(super) fn spread(
        &self,
        builder: &mut Builder,
        (rank, stream): (usize, usize),
        from: BufferId,
    ) -> BufferId {
        let (name, format) =
            (format!("{} of every sequence", builder.describe(from).name), builder.describe(from).format);
        let to = builder.like(from, &name, format);
        let rows: Vec<RowPair> = self.held.iter().chain(self.lent.iter().flatten()).copied().collect();
        builder.copy(rank, stream, from, to, &rows);
        to
    }

    /// Returns the sums of a spread gradient, in the rows that sequences hold. All other rows are zeros.
    pub(super) fn gather(
        &self,
        builder: &mut Builder,
        (rank, stream): (usize, usize),
        from: BufferId,
    ) -> BufferId {
        let name = format!("{}, summed", builder.describe(from).name);
        let to = builder.like(from, &name, Format::F32);
        let rows = builder.describe(to).rows;
        builder.fill(rank, stream, to, &[Run::packed(0, rows, rows)], FillValue::Zero);
        builder.copy(rank, stream, from, to, &self.held);
        for lent in &self.lent {
            let rows = lent.iter().map(|&(lent, hole)| (hole, lent)).collect();
            builder.push(rank, stream, Work::Accumulate { from, to, rows });
        }
        to
    }

    /// Returns the rows that sequences hold.
    pub(super) fn held(&self) -> &[RowPair] {
        &self.held
    }
}
