//! Keys that sequences share outside of pages: the first keys and values of a sequence are those of an earlier one, as
//! when several answers follow one prompt.
//!
//! A sequence that *borrows* its first keys sees them like its own: masks count them, and its length includes them.
//! They lie once, in the rows of the sequence that *lends* them. The rows that the borrower has for them are a *hole*:
//! nobody reads or writes them, and they may hold anything. dk and dv of a lent row are the sums over all sequences that
//! have it. [`Inputs`](crate::Inputs) repeat the lender's rows in the hole, so that each sequence can be read by itself.
//!
//! A row of two sequences that is not declared here stays an error.

use std::collections::HashMap;

use ndarray::{Array3, s};
use serde::{Deserialize, Serialize};

use crate::{Form, Gradients, Problem, ProblemFields, Sequence};

/// A sequence whose first keys are those of an earlier one, which has them in rows of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedKeys {
    /// Index of the sequence that borrows.
    pub sequence: usize,
    /// Index of the earlier sequence that lends.
    pub with: usize,
    /// Number of the first keys that are shared.
    pub keys: usize,
}

/// The sequences of a problem that borrow keys, in order. A lender borrows nothing itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sharing(pub Vec<SharedKeys>);

/// The reason why the sequences of a problem cannot share keys so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SharingError {
    /// A sequence that is not there, that is named twice or out of order, or that does not come after its lender.
    #[error("sequence {sequence} shares with {with}; name each once and in order, with one before it")]
    Order {
        /// The index of the sequence.
        sequence: usize,
        /// The index of the lender.
        with: usize,
    },
    /// A lender that borrows itself.
    #[error("sequence {sequence} shares with {with}, which shares keys itself; name whose keys they are")]
    Lender {
        /// The index of the sequence.
        sequence: usize,
        /// The index of the lender.
        with: usize,
    },
    /// A number of keys that one of the two does not have.
    #[error("sequence {sequence} shares {keys} keys; use 1 to {most}, which both sequences have")]
    Keys {
        /// The index of the sequence.
        sequence: usize,
        /// The number of shared keys.
        keys: usize,
        /// The number of keys that both have.
        most: usize,
    },
    /// Steps or pages, which have shared pages of their own.
    #[error("the problem has a cache in steps or pages; share pages there")]
    Cache,
    /// A form other than the plain one.
    #[error("the form is {}; use cu_seqlens", form.name())]
    Form {
        /// The form.
        form: Form,
    },
    /// A mode that draws a sequence's values for its own queries.
    #[error("an exact mode draws keys for the queries of their own sequence; share no keys, or use another")]
    ExactMode,
}

impl Sharing {
    /// Whether no sequence borrows keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of a sequence's first keys that are another's.
    pub fn borrowed(&self, sequence: usize) -> usize {
        self.of(sequence).map_or(0, |shared| shared.keys)
    }

    /// Returns what a sequence borrows.
    pub fn of(&self, sequence: usize) -> Option<&SharedKeys> {
        let at = self.0.binary_search_by_key(&sequence, |shared| shared.sequence).ok()?;
        self.0.get(at)
    }

    /// Returns what others borrow of a sequence, in order.
    pub fn lent(&self, sequence: usize) -> impl Iterator<Item = &SharedKeys> {
        self.0.iter().filter(move |shared| shared.with == sequence)
    }

    /// Returns the number of sequences that borrow of the same lender before this one does.
    pub fn turn(&self, shared: &SharedKeys) -> usize {
        self.lent(shared.with).take_while(|other| *other != shared).count()
    }

    /// Returns the number of a sequence's first keys that other sequences have too.
    pub fn common(&self, sequence: usize) -> usize {
        let lent = self.lent(sequence).map(|shared| shared.keys).max().unwrap_or(0);
        self.borrowed(sequence).max(lent)
    }

    /// Checks that the sequences of these fields can share keys so. The fields' own sharing is not read.
    pub fn check(&self, fields: &ProblemFields) -> Result<(), SharingError> {
        if self.is_empty() {
            return Ok(());
        }
        if !fields.steps.is_empty() || fields.pages.is_some() {
            return Err(SharingError::Cache);
        }
        if !fields.form.is_plain() {
            return Err(SharingError::Form { form: fields.form });
        }
        if fields.mode.is_exact() {
            return Err(SharingError::ExactMode);
        }
        let mut next = 0;
        for &SharedKeys { sequence, with, keys } in &self.0 {
            if sequence < next || sequence >= fields.sequences.len() || with >= sequence {
                return Err(SharingError::Order { sequence, with });
            }
            next = sequence + 1;
            if self.of(with).is_some() {
                return Err(SharingError::Lender { sequence, with });
            }
            let most = fields.sequences[sequence].kv.len.min(fields.sequences[with].kv.len);
            if !(1..=most).contains(&keys) {
                return Err(SharingError::Keys { sequence, keys, most });
            }
        }
        Ok(())
    }

    /// Returns this sharing for other sequences of the same problem, which are fewer, or shorter, or in another order:
    /// those that shared keys still do, as far as both have them. Sequences are told by their ids.
    pub fn fitted(&self, before: &[Sequence], after: &[Sequence]) -> Sharing {
        // Each sequence's lender, and the number of keys that it has in common with it.
        let mut groups: HashMap<u32, (usize, usize)> = HashMap::new();
        for &SharedKeys { sequence, with, keys } in &self.0 {
            groups.insert(before[with].id, (with, usize::MAX));
            groups.insert(before[sequence].id, (with, keys));
        }
        let mut lenders: HashMap<usize, (usize, usize)> = HashMap::new();
        let mut shared = Vec::new();
        for (sequence, Sequence { id, kv, .. }) in after.iter().enumerate() {
            let Some(&(group, common)) = groups.get(id) else { continue };
            let own = common.min(kv.len);
            let &mut (with, lent) = lenders.entry(group).or_insert((sequence, own));
            let keys = own.min(lent);
            shared.extend((with < sequence && keys > 0).then_some(SharedKeys { sequence, with, keys }));
        }
        Sharing(shared)
    }
}

impl Problem {
    /// Returns the problem without sharing: every sequence has its keys in rows of its own.
    pub fn unshared(&self) -> Problem {
        self.edited(|fields| fields.sharing = Sharing::default())
    }

    /// Whether two sequences have the same keys at these positions: in pages, or as one lends them to the other.
    pub fn share(&self, one: usize, other: usize, positions: std::ops::Range<usize>) -> bool {
        let borrows = |sequence: usize, with: usize| {
            self.sharing.of(sequence).is_some_and(|of| of.with == with && positions.end <= of.keys)
        };
        borrows(one, other)
            || borrows(other, one)
            || self.pages.as_ref().is_some_and(|pages| pages.share(one, other, positions.clone()))
    }

    /// Returns pairs of rows of k and v: a lent row, and the row of the hole that the borrower has for it.
    pub(crate) fn lent_rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.sharing.0.iter().flat_map(|&SharedKeys { sequence, with, keys }| {
            let [with, own] = [with, sequence].map(|index| self.sequences[index].kv);
            (0..keys).map(move |position| (with.row(position), own.row(position)))
        })
    }

    /// Adds what gradients hold in holes to the lent rows, sequence after sequence, and leaves zeros there.
    pub(crate) fn sum_shared(&self, gradients: &mut Gradients) {
        for (lent, hole) in self.lent_rows() {
            for gradient in [&mut gradients.dk, &mut gradients.dv] {
                add_row(gradient, hole, lent);
            }
        }
    }
}

/// Adds one row to another and clears it.
fn add_row(tensor: &mut Array3<f64>, from: usize, to: usize) {
    let (mut from_row, mut to_row) = tensor.multi_slice_mut((s![from, .., ..], s![to, .., ..]));
    to_row += &from_row;
    from_row.fill(0.0);
}
