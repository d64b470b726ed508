//! The exact answer, fast, and its error envelope beside it.
//!
//! The same definitions as [`crate::exact`], evaluated in f64 matrix products over tiles; pairs that the mask hides
//! are skipped. A *piece* is a range of query rows of one query head; pieces are independent but for dk and dv, whose
//! partial sums are added in a fixed order. The cut into pieces depends on the problem alone, so results do not
//! depend on the number of threads. Held to [`crate::exact`] by a property test.

mod backward;
pub(crate) mod dither;
mod exponential;
mod forward;

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis};
use rayon::prelude::*;

use crate::envelope::Model;
use crate::replay::{Profile, Replay};
use crate::{Forward, Gradients, Inputs, Pass, Problem, Run, Saved, Side};

/// Query rows of one matrix product. Larger wastes work on causal diagonals, smaller packs the keys too often.
const ROW_TILE: usize = 128;
/// Keys of one tile of the backward: three strips of it stay in the second-level cache.
const KEY_TILE: usize = 512;
/// Fewest query rows of a piece, and most pieces of one head.
const PIECE_ROWS_MIN: usize = 1024;
const PIECES_MAX: usize = 8;
/// Groups whose results are held at once before they are stored: what a group costs does not shrink with its rows.
const GROUPS_HELD: usize = 1024;
/// Problems with fewer visible pairs times heads run on the caller's thread: campaigns are parallel across cases.
const PARALLEL_PAIRS_MIN: u64 = 1 << 18;

/// An exact result and, where a model was given, the largest honest error of each of its elements.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// The exact values.
    pub exact: T,
    /// Bounds of the same shapes; 0 where the exact value is the only right one.
    pub bound: Option<Bounds<T>>,
}

/// The envelope's tiers.
#[derive(Clone, Debug)]
pub struct Bounds<T> {
    /// Tier W.
    pub worst: T,
    /// Tier T: never above W; infinite where nothing is certified, so that W speaks alone.
    pub dithered: T,
}

/// The forward pass, with the envelope of `model`. `inputs` must have the problem's shapes ([`Inputs::check`]).
pub fn forward(problem: &Problem, inputs: &Inputs, model: Option<&Model>) -> Answer<Forward> {
    all_forward(problem, inputs, model, None)
}

/// See [`crate::replay::forward`].
pub(crate) fn replayed_forward(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    replay: &Replay,
) -> Answer<Forward> {
    all_forward(problem, inputs, Some(model), Some(replay))
}

fn all_forward(
    problem: &Problem,
    inputs: &Inputs,
    model: Option<&Model>,
    replay: Option<&Replay>,
) -> Answer<Forward> {
    inputs.assert_shapes(problem, Pass::Forward);
    let empty = |lse: f64| Forward {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), lse),
        max_logit: Array1::from_elem(problem.heads.q, lse),
    };
    let bound = model.map(|_| Bounds { worst: empty(0.0), dithered: empty(f64::INFINITY) });
    let mut answer = Answer { exact: empty(f64::NEG_INFINITY), bound };
    let parallel = is_large(problem);
    let work = |group: Group| {
        let operands = Keys::gather(problem, inputs, &group, model);
        let pieces = map(parallel, pieces(problem, &group), |piece| {
            let result = forward::piece(problem, inputs, &group, &operands, &piece, model, replay);
            (piece, result)
        });
        (group, pieces)
    };
    let all = groups(problem);
    for (group, pieces) in all.chunks(GROUPS_HELD).flat_map(|held| map(parallel, held.to_vec(), work)) {
        let run = problem.sequences[group.sequence].q;
        for (piece, result) in pieces {
            result.exact.store(&run, &piece, &mut answer.exact);
            if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
                from.worst.store(&run, &piece, &mut to.worst);
                from.dithered.store(&run, &piece, &mut to.dithered);
            }
        }
    }
    answer
}

/// The backward pass from the given `saved` out and lse, with the envelope of `model`.
pub fn backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: Option<&Model>,
) -> Answer<Gradients> {
    all_backward(problem, inputs, (saved, None), Sides::BOTH, model, None)
}

/// The same of one side: dq, or dk and dv; of no side dsink alone. Other gradients, and their bounds, are 0.
pub fn backward_of(
    problem: &Problem,
    inputs: &Inputs,
    (saved, lse_error): (&Saved, Option<&Array2<f64>>),
    side: Option<Side>,
    model: &Model,
) -> Answer<Gradients> {
    let sides = Sides { q: side == Some(Side::Q), kv: side == Some(Side::Kv) };
    all_backward(problem, inputs, (saved, lse_error), sides, Some(model), None)
}

/// The backward pass of a subject that hides its LSE: `saved.lse` is the exact one, and the subject's own may be
/// `lse_error` from it, `[q heads, q rows]`.
pub fn backward_of_hidden_lse(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    lse_error: &Array2<f64>,
    model: &Model,
) -> Answer<Gradients> {
    all_backward(problem, inputs, (saved, Some(lse_error)), Sides::BOTH, Some(model), None)
}

/// See [`crate::replay::backward`].
pub(crate) fn replayed_backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    model: &Model,
    profile: &Profile,
) -> Answer<Gradients> {
    all_backward(problem, inputs, (saved, None), Sides::BOTH, Some(model), Some(profile))
}

fn all_backward(
    problem: &Problem,
    inputs: &Inputs,
    saved: (&Saved, Option<&Array2<f64>>),
    sides: Sides,
    model: Option<&Model>,
    replay: Option<&Profile>,
) -> Answer<Gradients> {
    inputs.assert_shapes(problem, Pass::Backward);
    saved.0.assert_shapes(problem);
    let empty = || Gradients {
        dq: Array3::zeros(problem.q_shape()),
        dk: Array3::zeros(problem.k_shape()),
        dv: Array3::zeros(problem.v_shape()),
        dsink: Array1::zeros(problem.learnable_sinks()),
    };
    let bound = model.map(|_| Bounds { worst: empty(), dithered: empty() });
    let mut answer = Answer { exact: empty(), bound };
    let mut sinks = vec![backward::SinkSum::default(); problem.heads.q];
    let parallel = is_large(problem);
    let work = |group: Group| {
        let result = backward::group(problem, inputs, saved, &group, sides, model, replay, parallel);
        (group, result)
    };
    let all = groups(problem);
    for (group, result) in all.chunks(GROUPS_HELD).flat_map(|held| map(parallel, held.to_vec(), work)) {
        result.exact.store(problem, &group, &mut answer.exact);
        if let (Some(from), Some(to)) = (&result.bound, &mut answer.bound) {
            from.worst.store(problem, &group, &mut to.worst);
            from.dithered.store(problem, &group, &mut to.dithered);
        }
        for (head, sink) in result.sinks {
            sinks[head].add(&sink);
        }
    }
    for head in 0..problem.learnable_sinks() {
        answer.exact.dsink[head] = -sinks[head].value;
        if let (Some(bound), Some(model)) = (&mut answer.bound, model) {
            let sum = model.sink_bound(sinks[head].terms, sinks[head].errors, sinks[head].rows);
            bound.worst.dsink[head] = sum;
            bound.dithered.dsink[head] = f64::INFINITY;
        }
    }
    answer
}

/// Of which sides gradients are wanted.
#[derive(Clone, Copy, Debug)]
struct Sides {
    /// dq.
    q: bool,
    /// dk and dv.
    kv: bool,
}

impl Sides {
    const BOTH: Sides = Sides { q: true, kv: true };
}

/// One sequence and one KV head, with the query heads that read it.
#[derive(Clone, Copy, Debug)]
struct Group {
    sequence: usize,
    kv_head: usize,
}

/// A range of query positions of one query head.
#[derive(Clone, Debug)]
struct Piece {
    head: usize,
    rows: Range<usize>,
}

/// Keys and values of one group as matrices, and their magnitudes where an envelope is asked for.
struct Keys {
    k: Array2<f64>,
    v: Array2<f64>,
    k_abs: Array2<f64>,
    v_abs: Array2<f64>,
    /// How often each key is there.
    copies: Vec<f64>,
}

impl Keys {
    fn gather(problem: &Problem, inputs: &Inputs, group: &Group, model: Option<&Model>) -> Keys {
        let run = problem.sequences[group.sequence].kv;
        let k = gather(&inputs.k, &run, 0..run.len, group.kv_head);
        let v = gather(&inputs.v, &run, 0..run.len, group.kv_head);
        let abs = |m: &Array2<f64>| match model {
            Some(model) => m.mapv(|input| model.magnitude(input)),
            None => Array2::zeros((0, 0)),
        };
        let copies = if model.is_some() { dither::multiplicities(&k.view()) } else { Vec::new() };
        Keys { k_abs: abs(&k), v_abs: abs(&v), copies, k, v }
    }
}

fn is_large(problem: &Problem) -> bool {
    problem.pairs().saturating_mul(problem.heads.q as u64) >= PARALLEL_PAIRS_MIN
}

fn groups(problem: &Problem) -> Vec<Group> {
    let heads = problem.heads.kv;
    (0..problem.sequences.len())
        .flat_map(|sequence| (0..heads).map(move |kv_head| Group { sequence, kv_head }))
        .collect()
}

/// Every query head of a group, each cut into pieces by the number of its rows alone.
fn pieces(problem: &Problem, group: &Group) -> Vec<Piece> {
    let rows = problem.sequences[group.sequence].q.len;
    let size = rows.div_ceil(PIECES_MAX).max(PIECE_ROWS_MIN);
    let heads = group.kv_head * problem.group()..(group.kv_head + 1) * problem.group();
    heads
        .flat_map(|head| {
            (0..rows).step_by(size).map(move |start| Piece { head, rows: start..rows.min(start + size) })
        })
        .collect()
}

fn map<T: Send, R: Send>(parallel: bool, items: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    if parallel { items.into_par_iter().map(work).collect() } else { items.into_iter().map(work).collect() }
}

/// Positions `positions` of a run, for one head, as a matrix `[positions, dim]`.
fn gather(tensor: &Array3<f32>, run: &Run, positions: Range<usize>, head: usize) -> Array2<f64> {
    let rows = positions.len();
    let mut matrix = Vec::with_capacity(rows * tensor.shape()[2]);
    let of_head = tensor.index_axis(Axis(1), head);
    for position in positions {
        matrix.extend(of_head.row(run.row(position)).iter().map(|&value| f64::from(value)));
    }
    Array2::from_shape_vec((rows, tensor.shape()[2]), matrix).expect("every row has the tensor's lanes")
}

/// The keys that any of the query positions `rows` sees.
fn visible_union(problem: &Problem, sequence: usize, rows: Range<usize>) -> Range<usize> {
    let sequence = &problem.sequences[sequence];
    rows.map(|i| problem.mask.visible(i, sequence.q.len, sequence.kv.len))
        .filter(|keys| !keys.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0)
}

/// `a · bᵀ`.
fn product_transposed(a: &ArrayView2<'_, f64>, b: &ArrayView2<'_, f64>) -> Array2<f64> {
    a.dot(&b.t())
}

/// A row of a matrix that is stored row by row, as every product here is.
fn row_of(matrix: &Array2<f64>, row: usize) -> &[f64] {
    let columns = matrix.ncols();
    &matrix.as_slice().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// [`row_of`], to write.
fn row_mut(matrix: &mut Array2<f64>, row: usize) -> &mut [f64] {
    let columns = matrix.ncols();
    &mut matrix.as_slice_mut().expect("a product is stored row by row")[row * columns..(row + 1) * columns]
}

/// Pieces of `range` of at most `size`.
fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}
