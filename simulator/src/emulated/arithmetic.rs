//! [`UnitArithmetic`]: how a kernel's units multiply, add and take exponentials; [`Serial`] is the plainest.
//!
//! A *score* is what a unit compares and takes the maximum of: the logit itself, or the bare product where the scale is
//! folded into the exponential. A tile's *weights* are P or dS; `first` says at which column of the tile they start,
//! since a matrix unit adds columns in groups that are aligned to the tile.

use std::ops::Range;

use seamproof_oracle::{Format, Softmax};

use crate::{GuardedTensor, Real};

/// Partial sums of a row, one for each thread that holds some of its columns; a unit may use fewer.
pub type RowSum<T> = [T; 4];

/// Rows of one head of a tensor.
#[derive(Debug)]
pub struct HeadRows<'a, T> {
    /// The tensor, `[rows, heads, dim]`.
    pub tensor: &'a GuardedTensor<T>,
    /// Which rows, in order.
    pub rows: &'a [usize],
    /// The head.
    pub head: usize,
}

impl<T> Clone for HeadRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for HeadRows<'_, T> {}

impl<'a, T: Real> HeadRows<'a, T> {
    /// The elements of row `j` of these.
    pub fn lane(&self, j: usize) -> &'a [T] {
        self.tensor.lane(self.rows[j], self.head)
    }

    /// Some of the rows.
    pub fn slice(&self, range: Range<usize>) -> HeadRows<'a, T> {
        HeadRows { rows: &self.rows[range], ..*self }
    }

    /// All their elements, row after row.
    pub fn lanes(&self) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let rows = *self;
        rows.rows.iter().map(move |&row| rows.tensor.lane(row, rows.head))
    }
}

/// One query row's weights of consecutive columns of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, T> {
    /// The weights, rounded to their format.
    pub values: &'a [T],
    /// What they are stored in.
    pub format: Format,
    /// The tile's column of the first.
    pub first: usize,
}

/// The weights of a tile, `[rows][columns]`; 0 where a query does not see a key.
#[derive(Clone, Debug)]
pub struct TileWeights<T> {
    values: Vec<T>,
    columns: usize,
    /// What they are stored in.
    pub format: Format,
    /// For each row the columns that it sees.
    pub seen: Vec<Range<usize>>,
}

impl<T: Real> TileWeights<T> {
    /// Rows that see nothing.
    pub fn new(rows: usize, columns: usize, format: Format) -> TileWeights<T> {
        TileWeights { values: vec![T::ZERO; rows * columns], columns, format, seen: vec![0..0; rows] }
    }

    /// All columns of a row.
    pub fn row(&self, i: usize) -> &[T] {
        &self.values[i * self.columns..(i + 1) * self.columns]
    }

    /// All columns of a row.
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        &mut self.values[i * self.columns..(i + 1) * self.columns]
    }

    /// Columns of the tile.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// What row `i` sees.
    pub fn weights(&self, i: usize) -> Weights<'_, T> {
        let seen = self.seen[i].clone();
        Weights { values: &self.row(i)[seen.clone()], format: self.format, first: seen.start }
    }
}

/// The units of a device.
pub trait UnitArithmetic<T: Real>: Sync {
    /// `to[j] = Σ_c a[c] · b[c][j]`; both operands are of `format`.
    fn products(&self, format: Format, a: &[T], b: &[T], to: &mut [T]);

    /// `to += Σ_j weight_j · row_j`, the accumulator being that of the tiles before.
    fn add_rows(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>);

    /// The same where tiles may come in any order and each may have its own accumulator.
    fn add_tile(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>);

    /// `to[j] += Σ_i weight_ij · row_i` for each column j of a tile; `to` is `[columns][dim]`.
    fn add_columns(&self, to: &mut [T], weights: &TileWeights<T>, rows: HeadRows<'_, T>);

    /// The order in which the tiles of keys of query tile `tile` are added up in the backward.
    fn order(&self, tile: [usize; 2], tiles: &mut [Range<usize>]);

    /// Adds unrounded weights to a row's sum; the first is of local key `first`.
    fn add_weights(&self, sum: &mut RowSum<T>, first: usize, weights: &[T]);

    /// The row's sum.
    fn total(&self, sum: &RowSum<T>) -> T;

    /// `Σ_c a[c] · b[c]` on ordinary units.
    fn row_dot(&self, a: &[T], b: &[T]) -> T;

    /// Turns products into scores.
    fn scores(&self, softmax: &Softmax, products: &mut [T]);

    /// The logit of a score.
    fn logit(&self, softmax: &Softmax, score: T) -> T;

    /// `e^(logit − max's logit)`, of two scores.
    fn weight(&self, softmax: &Softmax, score: T, max: T) -> T;

    /// `e^(old's logit − new's logit)`, of two scores: by what a row's sums shrink when its maximum grows.
    fn rescale(&self, softmax: &Softmax, old: T, new: T) -> T;

    /// `e^(logit − lse)`, of a score.
    fn probability(&self, softmax: &Softmax, score: T, lse: T) -> T;

    /// The soft cap's derivative at a score; 1 without one.
    fn cap_derivative(&self, softmax: &Softmax, score: T) -> T;

    /// `e^x`.
    fn exp(&self, x: T) -> T;
}

/// One product and one sum after the other, each rounded to nearest: f32, or f64 for a schedule's logic.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serial;

impl<T: Real> UnitArithmetic<T> for Serial {
    fn products(&self, _: Format, a: &[T], b: &[T], to: &mut [T]) {
        to.fill(T::ZERO);
        for (a, b) in a.iter().zip(b.chunks_exact(to.len())) {
            add_scaled(to, *a, b);
        }
    }

    fn add_rows(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>) {
        for (weight, row) in weights.values.iter().zip(rows.lanes()) {
            add_scaled(to, *weight, row);
        }
    }

    fn add_tile(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>) {
        self.add_rows(to, weights, rows);
    }

    fn add_columns(&self, to: &mut [T], weights: &TileWeights<T>, rows: HeadRows<'_, T>) {
        let dim = rows.tensor.shape()[2];
        for (i, row) in rows.lanes().enumerate() {
            let of_row = weights.row(i);
            for j in weights.seen[i].clone() {
                add_scaled(&mut to[j * dim..(j + 1) * dim], of_row[j], row);
            }
        }
    }

    fn order(&self, _: [usize; 2], _: &mut [Range<usize>]) {}

    fn add_weights(&self, sum: &mut RowSum<T>, _: usize, weights: &[T]) {
        weights.iter().for_each(|weight| sum[0] += *weight);
    }

    fn total(&self, sum: &RowSum<T>) -> T {
        sum[0]
    }

    fn row_dot(&self, a: &[T], b: &[T]) -> T {
        a.iter().zip(b).fold(T::ZERO, |sum, (a, b)| sum + *a * *b)
    }

    fn scores(&self, softmax: &Softmax, products: &mut [T]) {
        let scale = T::from_f32(softmax.scale);
        products.iter_mut().for_each(|product| *product = scale * *product);
        if let Some(cap) = softmax.softcap.map(T::from_f32) {
            products.iter_mut().for_each(|scaled| *scaled = cap * (*scaled / cap).tanh());
        }
    }

    fn logit(&self, _: &Softmax, score: T) -> T {
        score
    }

    fn weight(&self, _: &Softmax, score: T, max: T) -> T {
        (score - max).exp()
    }

    fn rescale(&self, _: &Softmax, old: T, new: T) -> T {
        (old - new).exp()
    }

    fn probability(&self, _: &Softmax, score: T, lse: T) -> T {
        (score - lse).exp()
    }

    fn cap_derivative(&self, softmax: &Softmax, score: T) -> T {
        let of = |cap: T| T::ONE - (score / cap) * (score / cap);
        softmax.softcap.map(T::from_f32).map_or(T::ONE, of)
    }

    fn exp(&self, x: T) -> T {
        x.exp()
    }
}

fn add_scaled<T: Real>(to: &mut [T], factor: T, from: &[T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * *from;
    }
}
