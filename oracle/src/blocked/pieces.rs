//! The cut of a problem into groups, pieces and tiles, and the matrices of each.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use crate::envelope::Model;
use crate::envelope::dither::multiplicities;
use crate::{InputViews, Problem, Run};

/// The number of query rows of one matrix product. A larger number wastes work on causal diagonals, and a smaller one
/// packs the keys too often.
pub(super) const ROW_TILE: usize = 128;
/// The number of keys of one tile of the backward. Three strips of a tile stay in the second-level cache.
pub(super) const KEY_TILE: usize = 512;
/// The fewest query rows of a piece, and the most pieces of one head.
const PIECE_ROWS_MIN: usize = 1024;
const PIECES_MAX: usize = 8;
/// The fewest visible pairs times heads of a problem that is computed in parallel. Smaller problems run on the caller's
/// thread, because campaigns are parallel across cases.
const PARALLEL_PAIRS_MIN: u64 = 1 << 18;

/// One sequence and one KV head, with that head's query heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
}

/// A range of query positions of one query head.
#[derive(Clone, Debug)]
pub(super) struct QueryRange {
    pub(super) head: usize,
    pub(super) rows: Range<usize>,
}

/// Keys and values of one group as matrices, and their magnitudes where an envelope is asked for.
pub(super) struct Keys {
    pub(super) k: Array2<f64>,
    pub(super) v: Array2<f64>,
    pub(super) k_abs: Array2<f64>,
    pub(super) v_abs: Array2<f64>,
    /// The number of copies of each key; empty where no envelope is asked for.
    pub(super) copies: Vec<f64>,
}

impl Keys {
    pub(super) fn gather(
        problem: &Problem,
        inputs: &InputViews<'_>,
        group: &Group,
        model: Option<&Model>,
    ) -> Keys {
        let run = problem.sequences[group.sequence].kv;
        let k = gather(&inputs.k, &run, 0..run.len, group.kv_head);
        let v = gather(&inputs.v, &run, 0..run.len, group.kv_head);
        let abs = |m: &Array2<f64>| match model {
            Some(model) => m.mapv(|input| model.magnitude(input)),
            None => Array2::zeros((0, 0)),
        };
        let copies = if model.is_some() { multiplicities(&k.view()) } else { Vec::new() };
        Keys { k_abs: abs(&k), v_abs: abs(&v), copies, k, v }
    }

    /// Asserts that magnitudes were gathered: without an envelope they are empty.
    pub(super) fn assert_magnitudes(&self) {
        assert_eq!(self.k_abs.dim(), self.k.dim(), "shape of the keys' magnitudes");
        assert_eq!(self.v_abs.dim(), self.v.dim(), "shape of the values' magnitudes");
        assert_eq!(self.copies.len(), self.k.nrows(), "number of counted keys");
    }
}

pub(super) fn is_large(problem: &Problem) -> bool {
    problem.pairs().saturating_mul(problem.heads.q as u64) >= PARALLEL_PAIRS_MIN
}

pub(super) fn groups(problem: &Problem) -> Vec<Group> {
    let heads = problem.heads.kv;
    (0..problem.sequences.len())
        .flat_map(|sequence| (0..heads).map(move |kv_head| Group { sequence, kv_head }))
        .collect()
}

/// Returns every query head of a group, each cut into pieces by the number of its rows alone.
pub(super) fn pieces(problem: &Problem, group: &Group) -> Vec<QueryRange> {
    let rows = problem.sequences[group.sequence].q.len;
    let size = rows.div_ceil(PIECES_MAX).max(PIECE_ROWS_MIN);
    let heads = group.kv_head * problem.group()..(group.kv_head + 1) * problem.group();
    heads
        .flat_map(|head| {
            (0..rows).step_by(size).map(move |start| QueryRange { head, rows: start..rows.min(start + size) })
        })
        .collect()
}

pub(super) fn map<T: Send, R: Send>(
    parallel: bool,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync + Send,
) -> Vec<R> {
    if parallel { items.into_par_iter().map(work).collect() } else { items.into_iter().map(work).collect() }
}

/// Returns positions `positions` of a run, for one head, as a matrix `[positions, dim]`.
pub(super) fn gather(
    tensor: &ArrayView3<'_, f32>,
    run: &Run,
    positions: Range<usize>,
    head: usize,
) -> Array2<f64> {
    let rows = positions.len();
    let mut matrix = Vec::with_capacity(rows * tensor.shape()[2]);
    let of_head = tensor.index_axis(Axis(1), head);
    for position in positions {
        matrix.extend(of_head.row(run.row(position)).iter().map(|&value| f64::from(value)));
    }
    Array2::from_shape_vec((rows, tensor.shape()[2]), matrix).expect("every row has the tensor's lanes")
}

/// Returns the range of keys that the query positions `rows` see, from the first key that any of them sees to the last.
pub(super) fn visible_union(problem: &Problem, sequence: usize, rows: Range<usize>) -> Range<usize> {
    let sequence = &problem.sequences[sequence];
    rows.map(|i| problem.mask.visible(i, sequence.q.len, sequence.kv.len))
        .filter(|keys| !keys.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0)
}

/// Returns `a · bᵀ`.
pub(super) fn product_transposed(a: &ArrayView2<'_, f64>, b: &ArrayView2<'_, f64>) -> Array2<f64> {
    a.dot(&b.t())
}

/// Returns a row of a matrix that is stored row by row, as every product here is.
pub(super) fn row_of(matrix: &Array2<f64>, row: usize) -> &[f64] {
    let columns = matrix.ncols();
    &matrix.as_slice().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// Returns a row of a matrix that is stored row by row, to write.
pub(super) fn row_mut(matrix: &mut Array2<f64>, row: usize) -> &mut [f64] {
    let columns = matrix.ncols();
    &mut matrix.as_slice_mut().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// Returns pieces of `range` of at most `size`.
pub(super) fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}
