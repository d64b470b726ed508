//! Sums of Hopper's matrix unit in FP8 in a replay of the forward (tier R).
//!
//! A subject that declares these sums ([`Accumulation::WgmmaFp8`](crate::envelope::Accumulation)) makes the product of a
//! query and a key from codes that the oracle knows, so the very number follows. Once its weights are replayed, so does
//! the product with the values: tile by tile, in steps of keys from the tile's begin on, where sums are promoted. What
//! is never promoted passes through rescalings between the steps, and its bound stays that of tier W.

use std::ops::Range;

use ndarray::{Array2, ArrayViewMut1, Axis};

use super::pieces::Group;
use crate::envelope::{Model, Promotion};
use crate::matrix_unit::{Code, STEP, steps, sum};
use crate::replay::Met;
use crate::{Format, InputViews, TensorName};

/// The codes of a group's keys and values, and of a query head.
pub(super) struct Codes<'a, 'i> {
    inputs: &'a InputViews<'i>,
    group: Group<'a>,
    head: usize,
    promotion: Promotion,
    /// Codes of k, `[keys][dim]`.
    k: Vec<Code>,
    /// Numbers of v, `[keys][dim]`, and their format.
    v: Vec<f32>,
    format_v: Format,
}

/// A replayed weight of a tile: multiplied and rounded, and whether it may have been rounded to another number.
#[derive(Clone, Copy)]
pub(super) struct Weighed {
    pub(super) rounded: f64,
    pub(super) is_near_tie: bool,
}

impl<'a, 'i> Codes<'a, 'i> {
    /// Returns the codes of a query head; `None` where the model replays no sums.
    pub(super) fn of(
        inputs: &'a InputViews<'i>,
        group: &Group<'a>,
        head: usize,
        model: &Model,
    ) -> Option<Codes<'a, 'i>> {
        let promotion = model.promotion()?;
        let keys = 0..group.kv.len();
        let k = codes(inputs, TensorName::K, group, keys.clone(), group.kv_head);
        let v = numbers(inputs, TensorName::V, group, keys, group.kv_head).collect();
        let format_v = group.problem.precision.of(TensorName::V).format;
        Some(Codes { inputs, group: *group, head, promotion, k, v, format_v })
    }

    /// Returns the products of some queries with some keys as the unit makes them, with descales: `[queries, keys]`.
    pub(super) fn products(&self, queries: Range<usize>, keys: Range<usize>) -> Array2<f64> {
        let dim = self.group.problem.dims.qk;
        let q = codes(self.inputs, TensorName::Q, &self.group, queries.clone(), self.head);
        let descale =
            self.descale(TensorName::Q, self.head) * self.descale(TensorName::K, self.group.kv_head);
        let row = |row: usize| row * dim..(row + 1) * dim;
        Array2::from_shape_fn((queries.len(), keys.len()), |(query, key)| {
            descale * sum(&q[row(query)], &self.k[row(keys.start + key)], self.promotion.after)
        })
    }

    /// Whether the unit's sums of weights and values are replayed.
    pub(super) fn has_numerators(&self) -> bool {
        self.promotion.after.is_some()
    }

    /// Adds the unit's sum of a tile's weights and values to a row, multiplied by `share`. `weighed` are the weights of
    /// the tile's keys. `uncertain` is called with each key of a part in which a weight may be another number, and with
    /// the part's steps.
    pub(super) fn add_tile(
        &self,
        tile: &[Met],
        weighed: &[Weighed],
        (kv_tile, share): (usize, f64),
        mut to: ArrayViewMut1<'_, f64>,
        mut uncertain: impl FnMut(usize, usize),
    ) {
        let Some(after) = self.promotion.after else { return };
        let dim = self.group.problem.dims.v;
        let share = share * self.descale(TensorName::V, self.group.kv_head);
        let place = |index: usize| tile[index].number % kv_tile / STEP;
        let indices: Vec<usize> = (0..tile.len()).collect();
        for part in indices.chunk_by(|a, b| place(*a) / after == place(*b) / after) {
            let (mut sums, mut count) = (vec![0.0; dim], 0);
            for indices in part.chunk_by(|a, b| place(*a) == place(*b)) {
                let weight = |index: &usize| Code::new(weighed[*index].rounded, self.promotion.p);
                let weights: Vec<Code> = indices.iter().map(weight).collect();
                let row = |index: &usize| &self.v[tile[*index].key * dim..][..dim];
                let rows: Vec<&[f32]> = indices.iter().map(row).collect();
                steps(&mut sums, &weights, &rows, self.format_v);
                count += 1;
            }
            to.iter_mut().zip(&sums).for_each(|(to, sum)| *to += share * f64::from(*sum));
            if part.iter().any(|index| weighed[*index].is_near_tie) {
                part.iter().for_each(|index| uncertain(tile[*index].key, count));
            }
        }
    }

    /// Returns the descale of a head, which all its rows share.
    fn descale(&self, tensor: TensorName, head: usize) -> f64 {
        self.inputs.scales.of(tensor).map_or(1.0, |scales| scales.of(self.group.sequence, 0, head, 0))
    }
}

/// Returns the codes of some rows of one head of an input, row by row.
fn codes(
    inputs: &InputViews<'_>,
    tensor: TensorName,
    group: &Group<'_>,
    indices: Range<usize>,
    head: usize,
) -> Vec<Code> {
    let format = group.problem.precision.of(tensor).format;
    let code = |value| Code::new(f64::from(value), format);
    numbers(inputs, tensor, group, indices, head).map(code).collect()
}

/// Returns the numbers of some rows of one head of an input, row by row.
fn numbers(
    inputs: &InputViews<'_>,
    tensor: TensorName,
    group: &Group<'_>,
    indices: Range<usize>,
    head: usize,
) -> impl Iterator<Item = f32> {
    let of_head = inputs.of(tensor).index_axis_move(Axis(1), head);
    let rows = group.rows(tensor);
    indices.flat_map(move |index| of_head.row(rows.row(index)).to_vec())
}
