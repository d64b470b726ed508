//! The backward pass of one group: a sequence, a KV head and the query heads that read it.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, s};

use super::{
    Answer, Group, KEY_TILE, Keys, Piece, ROW_TILE, exponential, gather, map, pieces, product_transposed,
    row_mut, tiles, visible_union,
};
use crate::envelope::Model;
use crate::{Gradients, Inputs, Problem, Saved};

/// `Σ p_sink · D` of one head, with what its bound needs.
#[derive(Clone, Debug, Default)]
pub(super) struct SinkSum {
    pub(super) value: f64,
    pub(super) terms: f64,
    pub(super) errors: f64,
    pub(super) rows: usize,
}

impl SinkSum {
    pub(super) fn add(&mut self, other: &SinkSum) {
        self.value += other.value;
        self.terms += other.terms;
        self.errors += other.errors;
        self.rows += other.rows;
    }
}

/// Gradients, or their bounds, of one group.
pub(super) struct GroupGradients {
    /// dq of each piece, in the order of [`pieces`].
    dq: Vec<(Piece, Array2<f64>)>,
    dk: Array2<f64>,
    dv: Array2<f64>,
}

/// Everything that a group contributes.
pub(super) struct GroupBackward {
    pub(super) exact: GroupGradients,
    pub(super) bound: Option<GroupGradients>,
    pub(super) sinks: Vec<(usize, SinkSum)>,
}

impl GroupGradients {
    /// Puts the group's rows where they lie in the problem's tensors.
    pub(super) fn store(&self, problem: &Problem, group: &Group, to: &mut Gradients) {
        let sequence = &problem.sequences[group.sequence];
        for (piece, dq) in &self.dq {
            for (local, position) in piece.rows.clone().enumerate() {
                to.dq.slice_mut(s![sequence.q.row(position), piece.head, ..]).assign(&dq.row(local));
            }
        }
        for (position, row) in sequence.kv.real_rows().enumerate() {
            to.dk.slice_mut(s![row, group.kv_head, ..]).assign(&self.dk.row(position));
            to.dv.slice_mut(s![row, group.kv_head, ..]).assign(&self.dv.row(position));
        }
    }
}

/// What one piece adds: its own dq, and partial sums of dk and dv for the keys that it sees.
struct PieceGradients {
    dq: Array2<f64>,
    keys: Range<usize>,
    dk: Array2<f64>,
    dv: Array2<f64>,
}

impl PieceGradients {
    fn new(problem: &Problem, rows: usize, keys: Range<usize>) -> PieceGradients {
        PieceGradients {
            dq: Array2::zeros((rows, problem.dims.qk)),
            dk: Array2::zeros((keys.len(), problem.dims.qk)),
            dv: Array2::zeros((keys.len(), problem.dims.v)),
            keys,
        }
    }
}

/// The group's gradients: pieces by themselves, then their sum in order.
pub(super) fn group(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    group: &Group,
    model: Option<&Model>,
    parallel: bool,
) -> GroupBackward {
    let keys = Keys::gather(problem, inputs, group, model);
    let results = map(parallel, pieces(problem, group), |piece| {
        let context = Context { problem, inputs, saved, group, keys: &keys, model };
        let (answer, sink) = context.piece(&piece);
        (piece, answer, sink)
    });
    let rows = keys.k.nrows();
    let empty = || GroupGradients {
        dq: Vec::new(),
        dk: Array2::zeros((rows, problem.dims.qk)),
        dv: Array2::zeros((rows, problem.dims.v)),
    };
    let mut backward = GroupBackward { exact: empty(), bound: model.map(|_| empty()), sinks: Vec::new() };
    for (piece, answer, sink) in results {
        backward.sinks.push((piece.head, sink));
        backward.exact.add(&piece, answer.exact);
        if let (Some(to), Some(from)) = (&mut backward.bound, answer.bound) {
            to.add(&piece, from);
        }
    }
    if let (Some(model), Some(bound)) = (model, &mut backward.bound) {
        finish_bounds(problem, group, model, &backward.exact, bound);
    }
    backward
}

impl GroupGradients {
    fn add(&mut self, piece: &Piece, from: PieceGradients) {
        let mut dk = self.dk.slice_mut(s![from.keys.clone(), ..]);
        dk += &from.dk;
        let mut dv = self.dv.slice_mut(s![from.keys, ..]);
        dv += &from.dv;
        self.dq.push((piece.clone(), from.dq));
    }
}

/// Turns summed errors into bounds: underflow and the final rounding, which needs the whole sum.
fn finish_bounds(
    problem: &Problem,
    group: &Group,
    model: &Model,
    exact: &GroupGradients,
    bound: &mut GroupGradients,
) {
    let sequence = &problem.sequences[group.sequence];
    let finish = |bound: &mut Array2<f64>, exact: &Array2<f64>, terms: usize| {
        bound.zip_mut_with(exact, |bound, exact| {
            *bound = if *bound == 0.0 { 0.0 } else { model.gradient_bound(*exact, *bound, terms) };
        });
    };
    let queries = sequence.q.len * problem.group();
    finish(&mut bound.dk, &exact.dk, queries);
    finish(&mut bound.dv, &exact.dv, queries);
    for ((_, bound), (_, exact)) in bound.dq.iter_mut().zip(&exact.dq) {
        finish(bound, exact, sequence.kv.len);
    }
}

/// What every tile of a piece reads.
struct Context<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    saved: &'a Saved,
    group: &'a Group,
    keys: &'a Keys,
    model: Option<&'a Model>,
}

/// The query side of one tile of rows.
struct QueryTile {
    rows: Range<usize>,
    q: Array2<f64>,
    dout: Array2<f64>,
    /// `[row]`: lse, D and the error of D.
    statistics: Vec<(f64, f64, f64)>,
}

/// The strips of one tile: rows × keys.
struct Strips {
    p: Array2<f64>,
    ds: Array2<f64>,
    bound: Option<[Array2<f64>; 3]>,
}

impl Context<'_> {
    fn piece(&self, piece: &Piece) -> (Answer<PieceGradients>, SinkSum) {
        let keys = visible_union(self.problem, self.group.sequence, piece.rows.clone());
        let new = || PieceGradients::new(self.problem, piece.rows.len(), keys.clone());
        let mut answer = Answer { exact: new(), bound: self.model.map(|_| new()) };
        let mut sink = SinkSum::default();
        for rows in tiles(piece.rows.clone(), ROW_TILE) {
            let tile = self.query_tile(piece.head, rows.clone());
            self.add_sink(piece.head, &tile, &mut sink);
            let at = rows.start - piece.rows.start..rows.end - piece.rows.start;
            let seen = visible_union(self.problem, self.group.sequence, rows);
            for columns in tiles(seen, KEY_TILE) {
                let strips = self.strips(&tile, &columns);
                self.add_exact(&tile, &strips, &columns, at.clone(), &mut answer.exact);
                if let (Some(strips), Some(bound)) = (&strips.bound, &mut answer.bound) {
                    self.add_bound(&tile, strips, &columns, at.clone(), bound);
                }
            }
        }
        (answer, sink)
    }

    fn query_tile(&self, head: usize, rows: Range<usize>) -> QueryTile {
        let run = self.problem.sequences[self.group.sequence].q;
        let q = gather(&self.inputs.q, &run, rows.clone(), head);
        let dout = gather(&self.inputs.dout, &run, rows.clone(), head);
        let statistics = rows
            .clone()
            .zip(dout.outer_iter())
            .map(|(position, dout)| {
                let row = run.row(position);
                let out = self.saved.out.slice(s![row, head, ..]);
                let d = dout.dot(&out);
                let magnitudes: f64 = dout.iter().zip(out).map(|(a, b)| (a * b).abs()).sum();
                let d_error = self.model.map_or(0.0, |model| model.d_error(magnitudes));
                (self.saved.lse[[head, row]], d, d_error)
            })
            .collect();
        QueryTile { rows, q, dout, statistics }
    }

    fn add_sink(&self, head: usize, tile: &QueryTile, to: &mut SinkSum) {
        let Some(&sink) = self.inputs.sink.get(head) else { return };
        for &(lse, d, d_error) in tile.statistics.iter().filter(|(lse, ..)| *lse != f64::NEG_INFINITY) {
            to.value += libm::exp(f64::from(sink) - lse) * d;
            to.rows += 1;
            if let Some(model) = self.model {
                let (term, error) = model.sink_row(f64::from(sink), lse, d, d_error);
                to.terms += term;
                to.errors += error;
            }
        }
    }

    /// Weights and logit gradients of the tile's rows against the keys `columns`; 0 where the mask hides a pair.
    fn strips(&self, tile: &QueryTile, columns: &Range<usize>) -> Strips {
        let (problem, keys) = (self.problem, self.keys);
        let mut p = product_transposed(&tile.q.view(), &keys.k.slice(s![columns.clone(), ..]));
        let mut ds = product_transposed(&tile.dout.view(), &keys.v.slice(s![columns.clone(), ..]));
        let mut bound = self.model.map(|model| {
            let magnitude = |input| model.magnitude(input);
            let a = product_transposed(
                &tile.q.mapv(magnitude).view(),
                &keys.k_abs.slice(s![columns.clone(), ..]),
            );
            let b = product_transposed(
                &tile.dout.mapv(magnitude).view(),
                &keys.v_abs.slice(s![columns.clone(), ..]),
            );
            let c = Array2::zeros(a.raw_dim());
            [a, b, c]
        });
        let sequence = &problem.sequences[self.group.sequence];
        let (lq, lk) = (sequence.q.len, sequence.kv.len);
        for (local, i) in tile.rows.clone().enumerate() {
            let seen = problem.mask.visible(i, lq, lk);
            let clip = |key: usize| key.clamp(columns.start, columns.end) - columns.start;
            let mut visible = clip(seen.start)..clip(seen.end);
            if tile.statistics[local].0 == f64::NEG_INFINITY {
                visible = 0..0;
            }
            let rows = [&mut p, &mut ds].into_iter().chain(bound.iter_mut().flatten());
            for row in rows.map(|strip| row_mut(strip, local)) {
                row[..visible.start].fill(0.0);
                row[visible.end..].fill(0.0);
            }
            let logits = self.weigh_row(tile, local, &visible, &mut p, &mut ds);
            if let (Some(model), Some(bound)) = (self.model, &mut bound) {
                self.bound_row(model, tile, local, visible, &logits, &p, bound);
            }
        }
        Strips { p, ds, bound }
    }

    /// One row of [`Context::strips`]: products become weights and logit gradients. Returns, for the visible columns,
    /// the logits and `dP − D`, which only the bounds need further.
    fn weigh_row(
        &self,
        tile: &QueryTile,
        local: usize,
        visible: &Range<usize>,
        p: &mut Array2<f64>,
        ds: &mut Array2<f64>,
    ) -> Vec<(f64, f64)> {
        let softmax = &self.problem.softmax;
        let scale = f64::from(softmax.scale);
        let (lse, d, _) = tile.statistics[local];
        let p = &mut row_mut(p, local)[visible.clone()];
        let ds = &mut row_mut(ds, local)[visible.clone()];
        p.iter_mut().for_each(|product| *product = softmax.cap(scale * *product));
        ds.iter_mut().for_each(|dp| *dp -= d);
        let kept = match self.model {
            Some(_) => p.iter().copied().zip(ds.iter().copied()).collect(),
            None => Vec::new(),
        };
        if softmax.softcap.is_some() {
            ds.iter_mut().zip(p.iter()).for_each(|(ds, logit)| *ds *= softmax.cap_derivative(*logit));
        }
        p.iter_mut().for_each(|logit| *logit -= lse);
        exponential::exp(p);
        ds.iter_mut().zip(p.iter()).for_each(|(ds, weight)| *ds *= weight);
        kept
    }

    /// One row of the bounds: magnitudes become errors.
    fn bound_row(
        &self,
        model: &Model,
        tile: &QueryTile,
        local: usize,
        visible: Range<usize>,
        kept: &[(f64, f64)],
        p: &Array2<f64>,
        [a, b, c]: &mut [Array2<f64>; 3],
    ) {
        let softmax = &self.problem.softmax;
        let sequence = &self.problem.sequences[self.group.sequence];
        let sums = model.gradient_sums(sequence.q.len * self.problem.group(), sequence.kv.len);
        let (lse, _, d_error) = tile.statistics[local];
        let p = &p.row(local).to_slice().unwrap_or(&[])[visible.clone()];
        let a = &mut row_mut(a, local)[visible.clone()];
        let b = &mut row_mut(b, local)[visible.clone()];
        let c = &mut row_mut(c, local)[visible];
        for (column, (&(logit, x), &p)) in kept.iter().zip(p).enumerate() {
            let derivative = softmax.cap_derivative(logit);
            let (a, b, c) = (&mut a[column], &mut b[column], &mut c[column]);
            let pair = model.gradient_pair(logit, lse, p, x, derivative, *a, *b, d_error, sums);
            (*a, *b, *c) = (pair.dv, pair.dk, pair.dq);
        }
    }

    fn add_exact(
        &self,
        tile: &QueryTile,
        strips: &Strips,
        columns: &Range<usize>,
        at: Range<usize>,
        to: &mut PieceGradients,
    ) {
        let scale = f64::from(self.problem.softmax.scale);
        let local = columns.start - to.keys.start..columns.end - to.keys.start;
        let k = self.keys.k.slice(s![columns.clone(), ..]);
        general_mat_mul(scale, &strips.ds, &k, 1.0, &mut to.dq.slice_mut(s![at, ..]));
        general_mat_mul(scale, &strips.ds.t(), &tile.q, 1.0, &mut to.dk.slice_mut(s![local.clone(), ..]));
        general_mat_mul(1.0, &strips.p.t(), &tile.dout, 1.0, &mut to.dv.slice_mut(s![local, ..]));
    }

    fn add_bound(
        &self,
        tile: &QueryTile,
        [dv, dk, dq]: &[Array2<f64>; 3],
        columns: &Range<usize>,
        at: Range<usize>,
        to: &mut PieceGradients,
    ) {
        let scale = f64::from(self.problem.softmax.scale);
        let local = columns.start - to.keys.start..columns.end - to.keys.start;
        let k = self.keys.k_abs.slice(s![columns.clone(), ..]);
        let magnitude = |input: f64| self.model.map_or(0.0, |model| model.magnitude(input));
        let (q, dout) = (tile.q.mapv(magnitude), tile.dout.mapv(magnitude));
        general_mat_mul(scale, dq, &k, 1.0, &mut to.dq.slice_mut(s![at, ..]));
        general_mat_mul(scale, &dk.t(), &q, 1.0, &mut to.dk.slice_mut(s![local.clone(), ..]));
        general_mat_mul(1.0, &dv.t(), &dout, 1.0, &mut to.dv.slice_mut(s![local, ..]));
    }
}
