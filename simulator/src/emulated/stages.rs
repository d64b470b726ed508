//! [`Stages`]: the work of a tiled kernel, stage by stage. The provided methods are the right kernel ([`Right`]). A
//! kernel that differs in one stage overrides this one method.
//!
//! Rows of a tile are *local*: 0 is the tile's first query. Tables of rows belong to a segment: entry `i` of `Q` is the
//! row of local query `i`, and entry `j` of `K` is the row of local key `j`.

use std::ops::Range;

use seamproof_oracle::{Format, Intervals, Pass, Run, Softmax, TensorName};

use super::arithmetic::{HeadRows, RowSum, TileWeights, UnitArithmetic, Weights};
use super::columns::Panel;
use super::right;
use super::row::{Finished, Online};
use crate::{GuardedTensor, Real, Segment};

/// One (query, key) pair of the backward.
#[derive(Clone, Copy, Debug)]
pub struct Pair<T> {
    /// The recomputed weight, unrounded.
    pub weight: T,
    /// `⟨dout, v⟩`.
    pub dp: T,
    /// `⟨dout, out⟩` of the row.
    pub d: T,
    /// The score.
    pub score: T,
}

/// Stages of a kernel. `units` are its arithmetic.
pub trait Stages<T: Real, A: UnitArithmetic<T>>: Sync {
    /// Returns the row of each local query or key in the tensor that is loaded (q, k, v or dout).
    fn rows(&self, _pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
        right::rows(tensor, segment)
    }

    /// Returns the local keys that local query `i` sees.
    fn visible(&self, _pass: Pass, segment: &Segment, i: usize) -> Intervals {
        segment.visible(i)
    }

    /// Returns the tiles of `keys` local keys, cut at multiples of `size`, that some query of `rows` sees.
    fn tiles(
        &self,
        pass: Pass,
        segment: &Segment,
        rows: &Range<usize>,
        keys: usize,
        size: usize,
    ) -> Vec<Range<usize>> {
        right::tiles(&|i| self.visible(pass, segment, i), rows, keys, size)
    }

    /// Returns the KV head of a query head. `group` query heads share one.
    fn kv_head(&self, head: usize, group: usize) -> usize {
        head / group
    }

    /// Writes `to[j] = ⟨a, column j of b⟩`, for queries with keys or for dout with values. `b` has at most 64 neighbouring
    /// keys of a segment, whatever its tiles, and may end in columns of zeros.
    fn products(&self, units: &A, _pass: Pass, formats: [Format; 2], a: &[T], b: Panel<'_, T>, to: &mut [T]) {
        units.products(formats, a, b, to);
    }

    /// Turns products into scores.
    fn scores(&self, units: &A, _pass: Pass, softmax: &Softmax, products: &mut [T]) {
        units.scores(softmax, products);
    }

    /// Scales a row's state for scores up to `max`.
    fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<T>, max: T) {
        right::grow(units, softmax, state, max);
    }

    /// Turns scores into unrounded weights.
    fn weights(&self, units: &A, softmax: &Softmax, scores: &mut [T], max: T) {
        units.weights(softmax, scores, max);
    }

    /// Adds a tile's weights to the row's sum. The first weight is that of local key `first`.
    fn add_weights(&self, units: &A, sum: &mut RowSum<T>, first: usize, weights: &[T]) {
        units.add_weights(sum, first, weights);
    }

    /// Rounds P, or dS, as they enter a product.
    fn round(&self, _pass: Pass, values: &mut [T], format: Format) {
        T::round_all(values, format);
    }

    /// Adds a tile's weighted values to a row.
    fn add_values(&self, units: &A, acc: &mut [T], weights: Weights<'_, T>, values: HeadRows<'_, T>) {
        units.add_rows(acc, weights, values);
    }

    /// Adds the sink to a row's denominator.
    fn sink(&self, units: &A, row: &mut Finished<T>, sink: T) {
        row.add_sink(units, sink);
    }

    /// Writes the output of local row `local`. The whole tile is given, as a thread block has it in registers.
    fn out(&self, tile: &[Finished<T>], local: usize, format: Format, to: &mut [T]) {
        right::out(&tile[local], format, to);
    }

    /// Returns the LSE of local row `local`.
    fn lse(&self, tile: &[Finished<T>], local: usize) -> T {
        right::lse(&tile[local])
    }

    /// Returns a head's largest logit after one more tile of queries.
    fn max_logit(&self, before: T, tile: T) -> T {
        before.larger(tile)
    }

    /// Returns the query heads whose gradients are summed for a KV head.
    fn query_heads(&self, kv_head: usize, group: usize) -> Range<usize> {
        kv_head * group..(kv_head + 1) * group
    }

    /// Returns `D = ⟨dout, out⟩` of each row of a tile.
    fn row_dots(&self, units: &A, dout: HeadRows<'_, T>, out: HeadRows<'_, T>) -> Vec<T> {
        right::row_dots(units, dout, out)
    }

    /// Multiplies D of each row by dout's descale.
    fn descale_dots(&self, dots: &mut [T], dout: T) {
        dots.iter_mut().for_each(|dot| *dot *= dout);
    }

    /// Returns the saved LSE of each row of a tile.
    fn saved_lse(&self, lse: &GuardedTensor<T>, head: usize, rows: &[usize]) -> Vec<T> {
        right::saved_lse(lse, head, rows)
    }

    /// Turns scores into recomputed weights.
    fn probabilities(&self, units: &A, softmax: &Softmax, scores: &mut [T], lse: T) {
        units.probabilities(softmax, scores, lse);
    }

    /// Returns dS of a pair, without the scale.
    fn logit_gradient(&self, units: &A, softmax: &Softmax, pair: Pair<T>) -> T {
        pair.weight * (pair.dp - pair.d) * units.cap_derivative(softmax, pair.score)
    }

    /// Returns the factor of a tile's dS before it is rounded to a format.
    fn tile_factor(&self, ds: &TileWeights<T>, format: Format) -> T {
        right::tile_factor(ds.values(), format)
    }

    /// Returns the factor that undoes that of a tile.
    fn undone(&self, factor: T) -> T {
        T::ONE / factor
    }

    /// Adds a tile's share of dq. `to` is `[rows][dim]`.
    fn add_dq(&self, units: &A, to: &mut [T], ds: &TileWeights<T>, keys: HeadRows<'_, T>) {
        right::add_dq(units, to, ds, keys);
    }

    /// Adds a tile's share of dk. `to` is `[columns][dim]`.
    fn add_dk(&self, units: &A, to: &mut [T], ds: &TileWeights<T>, queries: HeadRows<'_, T>) {
        right::add_columns(units, to, ds, queries);
    }

    /// Adds a tile's share of dv. `to` is `[columns][dim]`.
    fn add_dv(&self, units: &A, to: &mut [T], p: &TileWeights<T>, dout: HeadRows<'_, T>) {
        right::add_columns(units, to, p, dout);
    }

    /// Returns the factor by which a summed gradient is multiplied at the end.
    fn factor(&self, gradient: TensorName, softmax: &Softmax) -> T {
        if gradient == TensorName::Dv { T::ONE } else { T::from_f32(softmax.scale) }
    }

    /// Writes row `index` of the summed gradients `sums`, which are `[rows][dim]`.
    fn store(
        &self,
        _gradient: TensorName,
        factor: T,
        sums: &[T],
        index: usize,
        format: Format,
        to: &mut [T],
    ) {
        right::store(factor, sums, index, format, to);
    }

    /// Returns the amount that a row with a finite LSE subtracts from dsink.
    fn sink_gradient(&self, units: &A, sink: T, lse: T, d: T) -> T {
        units.exp(sink - lse) * d
    }

    /// Returns the share of a step in a merge by a difference, `σ(step − running)` of both LSEs.
    fn difference_share(&self, running: T, step: T) -> T {
        right::sigmoid(step - running)
    }

    /// Returns an element of out, merged by a difference: `out − share·(out − step)`.
    fn difference(&self, out: T, step: T, share: T) -> T {
        out - share * (out - step)
    }

    /// Returns an LSE, merged by a difference: `running − ln σ(running − step)`.
    fn difference_lse(&self, running: T, step: T) -> T {
        running - right::log_sigmoid(running - step)
    }

    /// Returns the padding rows that become zero (−∞ in the LSE).
    fn padding(&self, _tensor: TensorName, run: &Run) -> Vec<usize> {
        right::padding(run)
    }
}

/// The right kernel: every stage as provided.
#[derive(Clone, Copy, Debug, Default)]
pub struct Right;

impl<T: Real, A: UnitArithmetic<T>> Stages<T, A> for Right {}
