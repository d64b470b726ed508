//! [`Columns`]: keys or values as a query's products take them.
//!
//! Products run along keys, so the lanes of neighbouring keys lie together. The keys of a segment are cut into *panels*,
//! which are transposed. A panel has as many keys whatever the kernel's tiles, since a product depends on no other key.

use std::ops::Range;

use crate::{GuardedTensor, Real};

/// Number of keys of a panel.
const PANEL: usize = 64;
/// Number of columns that are multiplied together. A panel's width is a multiple of it, filled up with zeros.
const WIDTH: usize = super::tensor_core::LANES;

/// Columns of transposed keys or values that are multiplied together, `[lanes][columns]`. Their number is a multiple of
/// 8.
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a, T> {
    values: &'a [T],
    width: usize,
    first: usize,
    columns: usize,
}

impl<'a, T> Panel<'a, T> {
    /// Returns the first lanes of these columns.
    pub fn lanes(self, count: usize) -> Panel<'a, T> {
        Panel { values: &self.values[..count * self.width], ..self }
    }

    /// Returns the columns of each lane.
    pub fn rows(&self) -> impl Iterator<Item = &'a [T]> + Clone + use<'a, T> {
        let columns = self.first..self.first + self.columns;
        self.values.chunks_exact(self.width).map(move |row| &row[columns.clone()])
    }
}

/// Rows of keys or values that a head's queries are multiplied with.
pub(super) struct Operand<'a, T> {
    pub(super) tensor: &'a GuardedTensor<T>,
    /// The row of each local key.
    pub(super) rows: &'a [usize],
}

/// Panels of keys or values of one head. Each is made once for all queries.
pub(super) struct Columns<T> {
    /// The head.
    pub(super) head: usize,
    /// Panels in order. One that no query has met is empty.
    panels: Vec<Vec<T>>,
}

impl<T: Real> Columns<T> {
    /// Returns a cache without panels.
    pub(super) fn new() -> Columns<T> {
        Columns { head: 0, panels: Vec::new() }
    }

    /// Sets the head of the next panels.
    pub(super) fn turn_to(&mut self, head: usize) {
        if head != self.head {
            self.panels.clear();
        }
        self.head = head;
    }

    /// Returns the panel of this number.
    fn panel(&mut self, operand: &Operand<'_, T>, number: usize) -> Panel<'_, T> {
        let rows = &operand.rows[number * PANEL..operand.rows.len().min((number + 1) * PANEL)];
        if self.panels.len() <= number {
            self.panels.resize_with(number + 1, Vec::new);
        }
        let (width, panel) = (rows.len().next_multiple_of(WIDTH), &mut self.panels[number]);
        if panel.is_empty() {
            *panel = transposed(operand.tensor, rows, self.head, width);
        }
        Panel { values: panel, width, first: 0, columns: width }
    }

    /// Multiplies the columns of some keys, panel by panel. `multiply` gets columns and the places of their products.
    /// Columns are taken in whole groups of [`WIDTH`], so those of neighbours may be among them. `to` has [`padded`]
    /// products of all keys.
    pub(super) fn each(
        &mut self,
        operand: &Operand<'_, T>,
        keys: &Range<usize>,
        to: &mut [T],
        mut multiply: impl FnMut(Panel<'_, T>, &mut [T]),
    ) {
        for number in keys.start / PANEL..keys.end.div_ceil(PANEL) {
            let begin = number * PANEL;
            let first = (keys.start.max(begin) - begin) / WIDTH * WIDTH;
            let end = (keys.end.min(begin + PANEL) - begin).next_multiple_of(WIDTH);
            let panel = Panel { first, columns: end - first, ..self.panel(operand, number) };
            multiply(panel, &mut to[begin + first..begin + end]);
        }
    }
}

/// Returns the number of columns of so many keys, zeros at the end included.
pub(super) fn padded(keys: usize) -> usize {
    keys.next_multiple_of(WIDTH)
}

/// Returns the given rows of one head as `[dim][width]`. The lane is outermost, and products run along keys.
fn transposed<T: Real>(tensor: &GuardedTensor<T>, rows: &[usize], head: usize, width: usize) -> Vec<T> {
    let mut columns = vec![T::ZERO; tensor.shape()[2] * width];
    for (j, &row) in rows.iter().enumerate() {
        for (to, &value) in columns[j..].iter_mut().step_by(width).zip(tensor.lane(row, head)) {
            *to = value;
        }
    }
    columns
}
