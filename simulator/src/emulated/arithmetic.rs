//! [`UnitArithmetic`]: the arithmetic of a kernel's units, which multiply, add and take exponentials. [`Serial`] is the
//! plainest.
//!
//! A *score* is the number of which a unit takes the maximum: the logit itself, or the bare product if the scale is
//! folded into the exponential. A tile's *weights* are P or dS. `first` is the column of the tile at which they start.
//! It matters because a matrix unit adds columns in groups that are aligned to the tile.

use std::ops::Range;

use multiversion::multiversion;
use seamproof_oracle::{Format, Intervals, Softmax};

use super::clip;
use super::columns::Panel;
use crate::{GuardedTensor, Real};

/// Partial sums of a row, one for each thread that holds some of its columns. A unit may use fewer.
pub type RowSum<T> = [T; 4];

/// Rows of one head of a tensor.
#[derive(Debug)]
pub struct HeadRows<'a, T> {
    /// The tensor, `[rows, heads, dim]`.
    pub tensor: &'a GuardedTensor<T>,
    /// The rows, in order.
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
    /// Returns the elements of the `j`-th row.
    pub fn lane(&self, j: usize) -> &'a [T] {
        self.tensor.lane(self.rows[j], self.head)
    }

    /// Returns some of the rows.
    pub fn slice(&self, range: Range<usize>) -> HeadRows<'a, T> {
        HeadRows { rows: &self.rows[range], ..*self }
    }

    /// Returns the elements of all rows, row after row.
    pub fn lanes(&self) -> impl Iterator<Item = &'a [T]> + Clone + use<'a, T> {
        let rows = *self;
        rows.rows.iter().map(move |&row| rows.tensor.lane(row, rows.head))
    }
}

/// Weights of one query row for consecutive columns of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, T> {
    /// The weights, rounded to their format.
    pub values: &'a [T],
    /// Format in which they are stored.
    pub format: Format,
    /// Column of the tile to which the first weight belongs.
    pub first: usize,
}

/// Weights of a tile, `[rows][columns]`. A weight is 0 where a query does not see a key.
#[derive(Clone, Debug)]
pub struct TileWeights<T> {
    values: Vec<T>,
    columns: usize,
    /// Format in which they are stored.
    pub format: Format,
    /// Columns of each row from the first that it sees to the last.
    pub seen: Vec<Range<usize>>,
}

impl<T: Real> TileWeights<T> {
    /// Returns weights of rows that see nothing.
    pub fn new(rows: usize, columns: usize, format: Format) -> TileWeights<T> {
        TileWeights { values: vec![T::ZERO; rows * columns], columns, format, seen: vec![0..0; rows] }
    }

    /// Replaces the weights by the given columns of some rows. `seen` says which columns each of the rows sees.
    pub(super) fn load<'r>(
        &mut self,
        rows: impl Iterator<Item = &'r [T]>,
        columns: &Range<usize>,
        seen: &[Intervals],
    ) {
        self.columns = columns.len();
        self.values.clear();
        self.seen.clear();
        for (row, seen) in rows.zip(seen) {
            self.values.extend_from_slice(&row[columns.clone()]);
            self.seen.push(clip(seen, columns).hull());
        }
    }

    /// Returns all columns of a row.
    pub fn row(&self, i: usize) -> &[T] {
        &self.values[i * self.columns..(i + 1) * self.columns]
    }

    /// Returns all columns of a row, for changes.
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        &mut self.values[i * self.columns..(i + 1) * self.columns]
    }

    /// Returns all weights, for changes.
    pub fn values_mut(&mut self) -> &mut [T] {
        &mut self.values
    }

    /// Returns all weights.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Returns the number of columns of the tile.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the weights of row `i` from the first column that it sees to the last.
    pub fn weights(&self, i: usize) -> Weights<'_, T> {
        let seen = self.seen[i].clone();
        Weights { values: &self.row(i)[seen.clone()], format: self.format, first: seen.start }
    }
}

/// Arithmetic of a device's units.
pub trait UnitArithmetic<T: Real>: Sync {
    /// Writes `to[j] = Σ_c a[c] · b[c][j]`. The operands are of these formats.
    fn products(&self, formats: [Format; 2], a: &[T], b: Panel<'_, T>, to: &mut [T]);

    /// Adds `to += Σ_j weight_j · row_j`. The accumulator is that of the tiles before.
    fn add_rows(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>);

    /// Adds `to += Σ_j weight_j · row_j` where tiles may come in any order. Each tile may have its own accumulator.
    fn add_tile(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>);

    /// Adds `to[j] += Σ_i weight_ij · row_i` for each column j of a tile. `to` is `[columns][dim]`.
    fn add_columns(&self, to: &mut [T], weights: &TileWeights<T>, rows: HeadRows<'_, T>);

    /// Puts the tiles of keys of query tile `tile` in the order in which the backward adds them up.
    fn order(&self, tile: [usize; 2], tiles: &mut [Range<usize>]);

    /// Adds unrounded weights to a row's sum. The first weight is that of local key `first`.
    fn add_weights(&self, sum: &mut RowSum<T>, first: usize, weights: &[T]);

    /// Returns the row's sum.
    fn total(&self, sum: &RowSum<T>) -> T;

    /// Returns `Σ_c a[c] · b[c]`, computed on ordinary units.
    fn row_dot(&self, a: &[T], b: &[T]) -> T;

    /// Turns products into scores.
    fn scores(&self, softmax: &Softmax, products: &mut [T]);

    /// Returns the logit of a score.
    fn logit(&self, softmax: &Softmax, score: T) -> T;

    /// Returns `e^(logit − max's logit)` of two scores.
    fn weight(&self, softmax: &Softmax, score: T, max: T) -> T;

    /// Turns scores into the weights of [`UnitArithmetic::weight`].
    fn weights(&self, softmax: &Softmax, scores: &mut [T], max: T) {
        scores.iter_mut().for_each(|score| *score = self.weight(softmax, *score, max));
    }

    /// Returns `e^(old's logit − new's logit)` of two scores: the factor of a row's sums when its maximum grows.
    fn rescale(&self, softmax: &Softmax, old: T, new: T) -> T;

    /// Returns `e^(logit − lse)` of a score.
    fn probability(&self, softmax: &Softmax, score: T, lse: T) -> T;

    /// Turns scores into the weights of [`UnitArithmetic::probability`].
    fn probabilities(&self, softmax: &Softmax, scores: &mut [T], lse: T) {
        scores.iter_mut().for_each(|score| *score = self.probability(softmax, *score, lse));
    }

    /// Returns the soft cap's derivative at a score; 1 without a cap.
    fn cap_derivative(&self, softmax: &Softmax, score: T) -> T;

    /// Returns `e^x`.
    fn exp(&self, x: T) -> T;
}

/// Arithmetic of one product and one sum after the other, each rounded to nearest. It is in f32, or in f64 for a
/// schedule's logic.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serial;

impl<T: Real> UnitArithmetic<T> for Serial {
    fn products(&self, _: [Format; 2], a: &[T], b: Panel<'_, T>, to: &mut [T]) {
        to.fill(T::ZERO);
        add_scaled_rows(to, a, b.rows());
    }

    fn add_rows(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>) {
        add_scaled_rows(to, weights.values, rows.lanes());
    }

    fn add_tile(&self, to: &mut [T], weights: Weights<'_, T>, rows: HeadRows<'_, T>) {
        self.add_rows(to, weights, rows);
    }

    fn add_columns(&self, to: &mut [T], weights: &TileWeights<T>, rows: HeadRows<'_, T>) {
        for (i, row) in rows.lanes().enumerate() {
            let (dim, weights) = (row.len(), weights.weights(i));
            add_multiples(&mut to[weights.first * dim..], weights.values, row);
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

    fn weights(&self, _: &Softmax, scores: &mut [T], max: T) {
        exp_above(scores, max);
    }

    fn rescale(&self, _: &Softmax, old: T, new: T) -> T {
        (old - new).exp()
    }

    fn probability(&self, _: &Softmax, score: T, lse: T) -> T {
        (score - lse).exp()
    }

    fn probabilities(&self, _: &Softmax, scores: &mut [T], lse: T) {
        exp_above(scores, lse);
    }

    fn cap_derivative(&self, softmax: &Softmax, score: T) -> T {
        let of = |cap: T| T::ONE - (score / cap) * (score / cap);
        softmax.softcap.map(T::from_f32).map_or(T::ONE, of)
    }

    fn exp(&self, x: T) -> T {
        x.exp()
    }
}

/// Replaces each score by `e^(score − zero)`.
fn exp_above<T: Real>(scores: &mut [T], zero: T) {
    scores.iter_mut().for_each(|score| *score -= zero);
    T::exp_all(scores);
}

/// Adds each row times its factor, one row after the other.
#[multiversion(targets("x86_64+avx2+fma"))]
fn add_scaled_rows<'r, T: Real>(to: &mut [T], factors: &[T], rows: impl Iterator<Item = &'r [T]> + Clone) {
    let (wide, rest) = to.as_chunks_mut::<32>();
    let (narrow, rest) = rest.as_chunks_mut::<8>();
    let mut first = 0;
    for block in wide {
        add_to_block(block, first, factors, rows.clone());
        first += block.len();
    }
    for block in narrow {
        add_to_block(block, first, factors, rows.clone());
        first += block.len();
    }
    if !rest.is_empty() {
        factors.iter().zip(rows).for_each(|(factor, row)| add_scaled(rest, *factor, &row[first..]));
    }
}

/// Adds some lanes of each row, from `first` on, times the row's factor. Sums of so few lanes stay in registers.
#[inline(always)]
fn add_to_block<'r, T: Real, const N: usize>(
    to: &mut [T; N],
    first: usize,
    factors: &[T],
    rows: impl Iterator<Item = &'r [T]>,
) {
    let mut sums = *to;
    for (factor, row) in factors.iter().zip(rows) {
        let lanes = &row[first..first + N];
        for lane in 0..N {
            sums[lane] += *factor * lanes[lane];
        }
    }
    *to = sums;
}

/// Adds multiples of a row to rows that lie one behind the other, one for each factor.
#[multiversion(targets("x86_64+avx2+fma"))]
fn add_multiples<T: Real>(to: &mut [T], factors: &[T], row: &[T]) {
    for (factor, to) in factors.iter().zip(to.chunks_exact_mut(row.len().max(1))) {
        add_scaled(to, *factor, row);
    }
}

#[inline(always)]
fn add_scaled<T: Real>(to: &mut [T], factor: T, from: &[T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns rows of numbers that no sum in another order hits by chance.
    fn rows(count: usize, width: usize) -> Vec<Vec<f32>> {
        let number = |row: usize, lane: usize| ((row * 31 + lane * 17) as f32 * 0.37).sin() / 3.0;
        (0..count).map(|row| (0..width).map(|lane| number(row, lane)).collect()).collect()
    }

    #[test]
    fn blocks_of_lanes_have_the_sums_of_a_plain_loop() {
        let factors = [0.3, -1.7, 2.9, 0.11, -0.7];
        for width in 0..75 {
            let rows = rows(factors.len(), width);
            let (mut got, mut right) = (vec![0.25f32; width], vec![0.25f32; width]);
            add_scaled_rows(&mut got, &factors, rows.iter().map(Vec::as_slice));
            for (factor, row) in factors.iter().zip(&rows) {
                right.iter_mut().zip(row).for_each(|(to, from)| *to += factor * from);
            }
            assert_eq!(got, right, "{width} lanes");
        }
    }

    #[test]
    fn multiples_of_a_row_go_to_rows_one_behind_the_other() {
        for width in [1, 7, 8, 33] {
            let row = &rows(1, width)[0];
            let mut to = vec![1.0f32; 4 * width];
            add_multiples(&mut to[width..], &[2.0, -3.0], row);
            let of = |factor: f32| row.iter().map(move |from| 1.0 + factor * from);
            let right = of(0.0).chain(of(2.0)).chain(of(-3.0)).chain(of(0.0));
            assert!(to.into_iter().eq(right), "{width} lanes");
        }
    }
}
