//! A KV cache in pages: where each sequence's keys and values lie in a *pool* of pages of one size.
//!
//! A *table* names the pages of each sequence in order of positions: position `p` lies in row `p mod size` of page
//! `p ÷ size` of the sequence's row of the table. The last page may be filled in part, and a sequence may own pages
//! that hold no row yet. Whatever holds no row of a sequence may hold anything. Sequences whose first rows are equal
//! may *share* the full pages of these rows; a page that two sequences own otherwise is an error.
//!
//! Pages are no part of the mathematics: the answer is that of the same rows in any other place. They are for a
//! forward. A backward would add the gradients of all owners of a shared page, and no kernel writes gradients into
//! pages.

use std::collections::HashMap;
use std::ops::Range;

use ndarray::{Array3, Axis, s};
use serde::{Deserialize, Serialize};

use crate::limits::ROWS_MAX;
use crate::{Inputs, Problem, ProblemFields, Run, Sequence, SingleForwardError};

/// Largest number of rows of a page.
pub const PAGE_SIZE_MAX: usize = 256;

/// The pages of a problem's keys and values.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pages {
    /// Rows of a page.
    pub size: usize,
    /// Pages of the pool. What no sequence owns is free.
    pub count: usize,
    /// Pages of each sequence, in order of positions.
    pub table: Vec<Vec<usize>>,
    /// Sequences that begin with the pages of another, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedPrefix>,
}

/// A sequence whose first pages are those of an earlier one. Its rows there have the values of the earlier one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedPrefix {
    /// Index of the sequence.
    pub sequence: usize,
    /// Index of the earlier sequence.
    pub with: usize,
    /// Number of its first pages that are shared. All of their rows are filled, before the first call of a problem with
    /// steps.
    pub pages: usize,
}

/// The reason why a problem's keys and values cannot lie in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A page of no row, or of too many.
    #[error("size is {size}; use 1 to {PAGE_SIZE_MAX}")]
    Size {
        /// The rows of a page.
        size: usize,
    },
    /// A pool of too many rows.
    #[error("{count} pages of {size} rows are too many; use at most {ROWS_MAX} rows together")]
    Pool {
        /// The number of pages.
        count: usize,
        /// The rows of a page.
        size: usize,
    },
    /// A problem that is not one forward call.
    #[error(transparent)]
    SingleForward(#[from] SingleForwardError),
    /// A table with a row too many or too few.
    #[error("the table has {rows} rows; use one for each of the {sequences} sequences")]
    Rows {
        /// The rows of the table.
        rows: usize,
        /// The number of sequences.
        sequences: usize,
    },
    /// A sequence with too few pages.
    #[error("table[{sequence}] is too short: it names {pages} pages, and {keys} keys need {needed}")]
    Short {
        /// The index of the sequence.
        sequence: usize,
        /// The number of its pages.
        pages: usize,
        /// The number of its keys.
        keys: usize,
        /// The number of pages that they need.
        needed: usize,
    },
    /// A page that the pool does not have.
    #[error("table[{sequence}][{index}] is page {page}; the pool has {count}")]
    OutOfRange {
        /// The index of the sequence.
        sequence: usize,
        /// The place in its row of the table.
        index: usize,
        /// The page.
        page: usize,
        /// The number of pages of the pool.
        count: usize,
    },
    /// A page with two owners, or that one sequence names twice, which is no declared prefix.
    #[error(
        "page {page} is owned by sequences[{first}] and again by sequences[{second}], which do not share it"
    )]
    Owned {
        /// The page.
        page: usize,
        /// The index of the first owner.
        first: usize,
        /// The index of the second owner, perhaps the same.
        second: usize,
    },
    /// A prefix shared by a sequence that is not there, with one that does not come before it, twice or out of order.
    #[error("shared names sequence {sequence} with {with}; name each once and in order, with one before it")]
    Sharing {
        /// The index of the sequence.
        sequence: usize,
        /// The index of the other one.
        with: usize,
    },
    /// Rows of the table that do not begin with the same pages.
    #[error("table[{sequence}] and table[{with}] do not both begin with the same {pages} shared pages")]
    Unequal {
        /// The index of the sequence.
        sequence: usize,
        /// The index of the other one.
        with: usize,
        /// The number of shared pages.
        pages: usize,
    },
    /// A shared page that is not full before the first call.
    #[error("sequence {sequence} shares {pages} pages, more than its {keys} first keys fill")]
    NotFull {
        /// The index of the sequence.
        sequence: usize,
        /// The number of shared pages.
        pages: usize,
        /// Its keys before the first call.
        keys: usize,
    },
    /// A mode that draws a sequence's values for its own queries.
    #[error("an exact mode draws keys for the queries of their own sequence; share no page, or use another")]
    ExactMode,
}

impl Pages {
    /// Returns pages in the order of the sequences and positions, as many as these numbers of keys need.
    pub fn in_order(size: usize, keys: impl IntoIterator<Item = usize>) -> Pages {
        let mut count = 0;
        let table = keys.into_iter().map(|keys| {
            let first = count;
            count += keys.div_ceil(size);
            (first..count).collect()
        });
        Pages { table: table.collect(), count, size, shared: Vec::new() }
    }

    /// Returns the same pages in the opposite order, so that no two that follow each other in the table do in the pool.
    pub fn reversed(self) -> Pages {
        let names: Vec<usize> = (0..self.count).rev().collect();
        self.renamed(&names)
    }

    /// Returns the pages under other numbers: page p becomes `names[p]`, a number below the number of pages.
    pub fn renamed(mut self, names: &[usize]) -> Pages {
        self.table.iter_mut().flatten().for_each(|page| *page = names[*page]);
        self
    }

    /// Returns the pages where all sequences begin with those of the one that has most, as far as all owners fill them.
    pub fn sharing_a_prefix(mut self, fields: &ProblemFields) -> Pages {
        let most = self.table.iter().max_by_key(|pages| pages.len()).cloned().unwrap_or_default();
        for pages in &mut self.table {
            let count = pages.len().min(most.len());
            pages[..count].copy_from_slice(&most[..count]);
        }
        self.of_full(fields)
    }

    /// Returns the pages with every first page that several sequences name declared as shared.
    pub fn shared(self) -> Pages {
        Pages { shared: shared_in(&self.table), ..self }
    }

    /// Returns the pages without sharing: each sequence has pages of its own.
    pub fn parted(mut self) -> Pages {
        for (sequence, borrowed) in self.borrowed().into_iter().enumerate() {
            for page in &mut self.table[sequence][..borrowed] {
                *page = self.count;
                self.count += 1;
            }
        }
        Pages { shared: Vec::new(), ..self }
    }

    /// Returns the pages without those that no sequence owns. The others keep their order.
    pub fn without_free(self) -> Pages {
        let free = self.free();
        self.without(&free)
    }

    /// Returns the pages that no sequence owns, in order.
    pub fn free(&self) -> Vec<usize> {
        let mut owned = vec![false; self.count];
        self.table.iter().flatten().for_each(|&page| owned[page] = true);
        (0..self.count).filter(|&page| !owned[page]).collect()
    }

    /// Returns the pages without some of those that no sequence owns, which are in order. The others keep their order.
    pub fn without(self, free: &[usize]) -> Pages {
        let names: Vec<usize> =
            (0..self.count).map(|page| page - free.partition_point(|&free| free < page)).collect();
        Pages { count: self.count - free.len(), ..self.renamed(&names) }
    }

    /// Returns the number of rows of the pool.
    pub fn rows(&self) -> usize {
        self.count * self.size
    }

    /// Returns the row of the pool at which a position of a sequence lies.
    pub fn row(&self, sequence: usize, position: usize) -> usize {
        self.table[sequence][position / self.size] * self.size + position % self.size
    }

    /// Returns the rows of the pool at which positions of a sequence lie, in as few runs as possible.
    pub fn runs(&self, sequence: usize, positions: Range<usize>) -> Vec<Run> {
        runs_of(positions.map(|position| self.row(sequence, position)))
    }

    /// Whether two sequences have the same rows of the pool at these positions.
    pub fn share(&self, one: usize, other: usize, mut positions: Range<usize>) -> bool {
        let page = |sequence: usize, position: usize| self.table[sequence].get(position / self.size);
        positions.all(|position| page(one, position).is_some_and(|own| Some(own) == page(other, position)))
    }

    /// Returns for each sequence the number of its first pages that are another's.
    pub fn borrowed(&self) -> Vec<usize> {
        let mut borrowed = vec![0; self.table.len()];
        self.shared.iter().for_each(|prefix| borrowed[prefix.sequence] = prefix.pages);
        borrowed
    }

    /// Checks that the keys and values of these fields can lie in the pages. The fields' own pages are not read.
    pub fn check(&self, fields: &ProblemFields) -> Result<(), PagesError> {
        let (size, count) = (self.size, self.count);
        if !(1..=PAGE_SIZE_MAX).contains(&size) {
            return Err(PagesError::Size { size });
        }
        if count.checked_mul(size).is_none_or(|rows| rows > ROWS_MAX) {
            return Err(PagesError::Pool { count, size });
        }
        fields.check_single_forward()?;
        let (rows, sequences) = (self.table.len(), fields.sequences.len());
        if rows != sequences {
            return Err(PagesError::Rows { rows, sequences });
        }
        for (sequence, (pages, Sequence { kv, .. })) in self.table.iter().zip(&fields.sequences).enumerate() {
            let (pages, keys, needed) = (pages.len(), kv.len, kv.len.div_ceil(size));
            if pages < needed {
                return Err(PagesError::Short { sequence, pages, keys, needed });
            }
        }
        for (sequence, pages) in self.table.iter().enumerate() {
            if let Some(index) = pages.iter().position(|&page| page >= count) {
                return Err(PagesError::OutOfRange { sequence, index, page: pages[index], count });
            }
        }
        self.check_shared(fields)?;
        self.check_owners()
    }

    fn check_shared(&self, fields: &ProblemFields) -> Result<(), PagesError> {
        if !self.shared.is_empty() && fields.mode.is_exact() {
            return Err(PagesError::ExactMode);
        }
        let mut next = 0;
        for &SharedPrefix { sequence, with, pages } in &self.shared {
            if sequence < next || sequence >= self.table.len() || with >= sequence {
                return Err(PagesError::Sharing { sequence, with });
            }
            next = sequence + 1;
            let first = |sequence: usize| self.table[sequence].get(..pages);
            if first(sequence).is_none() || first(sequence) != first(with) {
                return Err(PagesError::Unequal { sequence, with, pages });
            }
            for sequence in [sequence, with] {
                let keys = first_keys(fields, sequence);
                if pages > keys / self.size {
                    return Err(PagesError::NotFull { sequence, pages, keys });
                }
            }
        }
        Ok(())
    }

    fn check_owners(&self) -> Result<(), PagesError> {
        let mut owners: HashMap<usize, usize> = HashMap::new();
        for (second, (pages, borrowed)) in self.table.iter().zip(self.borrowed()).enumerate() {
            for &page in &pages[borrowed..] {
                if let Some(first) = owners.insert(page, second) {
                    return Err(PagesError::Owned { page, first, second });
                }
            }
        }
        Ok(())
    }

    /// Returns the pages of some of the sequences, by their indices in order. Who is left of those that share a page
    /// still shares it.
    pub fn of(&self, kept: &[usize]) -> Pages {
        let table: Vec<Vec<usize>> = kept.iter().map(|&sequence| self.table[sequence].clone()).collect();
        let (size, count, none) = (self.size, self.count, Vec::new());
        Pages { size, count, table, shared: none }.shared()
    }

    /// Returns these pages for other sequences of the same problem, which are fewer, or shorter, or longer: each keeps
    /// the pages that it needs, and as many that hold no key, and gets new ones where it has too few. Sequences are
    /// told by their ids. One with a new id has the pages of the one in whose place it is, if that is gone.
    pub fn fitted(&self, before: &[Sequence], fields: &ProblemFields) -> Pages {
        let after = &fields.sequences;
        let places = |sequences: &[Sequence]| -> HashMap<u32, usize> {
            sequences.iter().enumerate().map(|(index, one)| (one.id, index)).collect()
        };
        let (own, kept) = (places(before), places(after));
        let in_place = |index: usize| {
            let gone = before.len() == after.len() && !kept.contains_key(&before[index].id);
            gone.then_some(index)
        };
        let needed = |sequence: &Sequence| sequence.kv.len.div_ceil(self.size);
        let mut pages = Pages { table: Vec::with_capacity(after.len()), shared: Vec::new(), ..*self };
        let mut lengths = Vec::with_capacity(after.len());
        for (index, sequence) in after.iter().enumerate() {
            let place = own.get(&sequence.id).copied().or_else(|| in_place(index));
            let mut row = place.and_then(|place| self.table.get(place)).cloned().unwrap_or_default();
            let unfilled = place.map_or(0, |place| row.len().saturating_sub(needed(&before[place])));
            lengths.push(needed(sequence) + unfilled);
            row.truncate(needed(sequence) + unfilled);
            pages.table.push(row);
        }
        pages.part_unfilled(fields);
        for (row, length) in pages.table.iter_mut().zip(lengths) {
            while row.len() < length {
                row.push(pages.count);
                pages.count += 1;
            }
        }
        pages.shared()
    }

    /// Returns the pages with those parted that sequences share and these fields do not fill alike.
    pub fn of_full(mut self, fields: &ProblemFields) -> Pages {
        self.part_unfilled(fields);
        self.shared()
    }

    /// Gives each sequence pages of its own in place of shared ones that are not full, or that values of an exact mode
    /// do not fill alike.
    fn part_unfilled(&mut self, fields: &ProblemFields) {
        let exact = fields.mode.is_exact();
        let full: Vec<usize> =
            (0..self.table.len()).map(|sequence| first_keys(fields, sequence) / self.size).collect();
        let mut owners: HashMap<usize, usize> = HashMap::new();
        for sequence in 0..self.table.len() {
            for index in 0..self.table[sequence].len() {
                let page = self.table[sequence][index];
                let owner = *owners.entry(page).or_insert(sequence);
                if owner != sequence && (exact || index >= full[sequence].min(full[owner])) {
                    self.table[sequence][index] = self.count;
                    self.count += 1;
                }
            }
        }
    }
}

/// Returns the keys of a sequence that are there before the first call of a problem with steps; all, where it has none.
fn first_keys(fields: &ProblemFields, sequence: usize) -> usize {
    let Sequence { q, kv, .. } = fields.sequences[sequence];
    if fields.steps.is_empty() { kv.len } else { kv.len.saturating_sub(q.len) }
}

/// Returns which sequences begin with the pages of an earlier one, each with the first of those of which it has most.
fn shared_in(table: &[Vec<usize>]) -> Vec<SharedPrefix> {
    // A tree of pages, by number: the page that comes behind others leads to a node, which a first sequence has made.
    let mut behind: HashMap<(usize, usize), (usize, usize)> = HashMap::new();
    let mut shared = Vec::new();
    for (sequence, row) in table.iter().enumerate() {
        let (mut node, mut prefix) = (0, SharedPrefix { sequence, with: sequence, pages: 0 });
        for &page in row {
            let next = behind.len() + 1;
            let (child, with) = *behind.entry((node, page)).or_insert((next, sequence));
            if with < sequence {
                prefix = SharedPrefix { with, pages: prefix.pages + 1, ..prefix };
            }
            node = child;
        }
        shared.extend((prefix.pages > 0).then_some(prefix));
    }
    shared
}

/// Returns rows in order as runs of rows that follow each other.
pub fn runs_of(rows: impl IntoIterator<Item = usize>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for row in rows {
        match runs.last_mut().filter(|run| run.offset + run.len == row) {
            Some(run) => (run.len, run.span) = (run.len + 1, run.span + 1),
            None => runs.push(Run::packed(row, 1, 1)),
        }
    }
    runs
}

impl Problem {
    /// Returns pairs of rows of k and v that lie in one row of the pool, or of the tensor, and therefore must be equal:
    /// the row of the earlier sequence, and that of the one which shares it.
    pub fn shared_rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let in_pages = self.pages.iter().flat_map(move |pages| {
            pages.shared.iter().flat_map(move |prefix| {
                let [with, own] = [prefix.with, prefix.sequence].map(|index| self.sequences[index].kv);
                (0..prefix.pages * pages.size).map(move |position| (with.row(position), own.row(position)))
            })
        });
        in_pages.chain(self.lent_rows())
    }

    /// Repeats shared rows of k and v of the earlier sequence in the rows of the one that shares them.
    pub fn repeat_shared(&self, k: &mut Array3<f32>, v: &mut Array3<f32>) {
        for (from, to) in self.shared_rows() {
            for tensor in [&mut *k, &mut *v] {
                let (from, mut to) = tensor.multi_slice_mut((s![from, .., ..], s![to, .., ..]));
                to.assign(&from);
            }
        }
    }

    /// Whether rows that sequences share are equal, bit for bit.
    pub fn shares_equal_rows(&self, inputs: &Inputs) -> bool {
        let equal = |tensor: &Array3<f32>, a: usize, b: usize| {
            let [a, b] = [a, b].map(|row| tensor.index_axis(Axis(0), row));
            a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        self.shared_rows().all(|(a, b)| equal(&inputs.k, a, b) && equal(&inputs.v, a, b))
    }
}
