//! The forward pass of one piece.

use ndarray::{Array2, s};

use super::{
    Answer, Group, Keys, Piece, ROW_TILE, exponential, gather, product_transposed, row_mut, tiles,
    visible_union,
};
use crate::envelope::{Model, Row};
use crate::{Forward, Inputs, Problem, Run};

/// Results, or bounds, of one piece.
pub(super) struct PieceForward {
    out: Array2<f64>,
    lse: Vec<f64>,
    max_logit: f64,
}

impl PieceForward {
    fn new(rows: usize, dim: usize, statistic: f64) -> PieceForward {
        PieceForward { out: Array2::zeros((rows, dim)), lse: vec![statistic; rows], max_logit: statistic }
    }

    /// Puts the piece's rows where they lie in the problem's tensors.
    pub(super) fn store(&self, run: &Run, piece: &Piece, to: &mut Forward) {
        for (local, position) in piece.rows.clone().enumerate() {
            let row = run.row(position);
            to.out.slice_mut(s![row, piece.head, ..]).assign(&self.out.row(local));
            to.lse[[piece.head, row]] = self.lse[local];
        }
        let max_logit = &mut to.max_logit[piece.head];
        *max_logit = max_logit.max(self.max_logit);
    }
}

/// The rows of a piece, tile by tile.
pub(super) fn piece(
    problem: &Problem,
    inputs: &Inputs,
    group: &Group,
    keys: &Keys,
    piece: &Piece,
    model: Option<&Model>,
) -> Answer<PieceForward> {
    let run = problem.sequences[group.sequence].q;
    let dim = problem.dims.v;
    let mut answer = Answer {
        exact: PieceForward::new(piece.rows.len(), dim, f64::NEG_INFINITY),
        bound: model.map(|_| PieceForward::new(piece.rows.len(), dim, 0.0)),
    };
    for rows in tiles(piece.rows.clone(), ROW_TILE) {
        let at = rows.start - piece.rows.start;
        let q = gather(&inputs.q, &run, rows.clone(), piece.head);
        let sink = problem.sink(piece.head, inputs.sink.as_slice().unwrap_or(&[]));
        let tile = Tile::new(problem, group, keys, &q, rows.clone(), sink);
        tile.write(keys, at, &mut answer.exact);
        if let (Some(model), Some(bound)) = (model, &mut answer.bound) {
            tile.write_bound(keys, &q, at, model, &answer.exact, bound);
        }
    }
    answer
}

/// Logits and weights of one tile of rows against the keys that any of them sees.
struct Tile {
    /// The keys of the columns.
    keys: std::ops::Range<usize>,
    /// For each row the visible columns.
    visible: Vec<std::ops::Range<usize>>,
    rows: Vec<Row>,
    /// `s`, valid in visible columns only.
    logits: Array2<f64>,
    /// `exp(s − max)`, 0 in hidden columns.
    weights: Array2<f64>,
}

impl Tile {
    fn new(
        problem: &Problem,
        group: &Group,
        operands: &Keys,
        q: &Array2<f64>,
        rows: std::ops::Range<usize>,
        sink: Option<f64>,
    ) -> Tile {
        let sequence = &problem.sequences[group.sequence];
        let keys = visible_union(problem, group.sequence, rows.clone());
        let mut logits = product_transposed(&q.view(), &operands.k.slice(s![keys.clone(), ..]));
        let mut weights = Array2::zeros(logits.raw_dim());
        let mut tile_rows = Vec::with_capacity(rows.len());
        let mut visible = Vec::with_capacity(rows.len());
        for (local, i) in rows.enumerate() {
            let seen = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
            let columns = if seen.is_empty() { 0..0 } else { seen.start - keys.start..seen.end - keys.start };
            let logits = &mut row_mut(&mut logits, local)[columns.clone()];
            let weights = &mut row_mut(&mut weights, local)[columns.clone()];
            tile_rows.push(softmax_row(problem, logits, weights, sink));
            visible.push(columns);
        }
        Tile { keys, visible, rows: tile_rows, logits, weights }
    }

    /// out, lse and max_logit of the tile's rows.
    fn write(&self, operands: &Keys, at: usize, to: &mut PieceForward) {
        let values = operands.v.slice(s![self.keys.clone(), ..]);
        let mut out = to.out.slice_mut(s![at..at + self.rows.len(), ..]);
        ndarray::linalg::general_mat_mul(1.0, &self.weights, &values, 0.0, &mut out);
        for (local, row) in self.rows.iter().enumerate() {
            to.lse[at + local] = row.lse;
            if row.keys > 0 {
                out.row_mut(local).mapv_inplace(|value| value / row.sum);
                let logits = self.logits.slice(s![local, self.visible[local].clone()]);
                to.max_logit = logits.iter().copied().fold(to.max_logit, f64::max);
            }
        }
    }

    /// The bounds of the tile's rows.
    fn write_bound(
        &self,
        operands: &Keys,
        q: &Array2<f64>,
        at: usize,
        model: &Model,
        exact: &PieceForward,
        to: &mut PieceForward,
    ) {
        let k_abs = operands.k_abs.slice(s![self.keys.clone(), ..]);
        let mut errors = product_transposed(&q.mapv(|q| model.magnitude(q)).view(), &k_abs);
        let mut denominators = Vec::with_capacity(self.rows.len());
        for (local, row) in self.rows.iter().enumerate() {
            let g = model.value_sum(row.keys);
            let mut weight_errors = 0.0;
            let visible = self.visible[local].clone();
            let logits = self.logits.row(local).to_slice().unwrap_or(&[]);
            let weights = self.weights.row(local).to_slice().unwrap_or(&[]);
            let errors = row_mut(&mut errors, local);
            errors[..visible.start].fill(0.0);
            errors[visible.end..].fill(0.0);
            for column in visible {
                let (logit, a) = (logits[column], errors[column]);
                to.max_logit = to.max_logit.max(model.logit_error(a, logit));
                let pair = model.pair(row, logit, weights[column] / row.sum, a, g);
                weight_errors += pair.weight;
                errors[column] = pair.value;
            }
            denominators.push(model.denominator(row, weight_errors));
        }
        let v_abs = operands.v_abs.slice(s![self.keys.clone(), ..]);
        let value_max = v_abs.iter().copied().fold(0.0, f64::max);
        let mut bounds = to.out.slice_mut(s![at..at + self.rows.len(), ..]);
        ndarray::linalg::general_mat_mul(1.0, &errors, &v_abs, 0.0, &mut bounds);
        for (local, row) in self.rows.iter().enumerate() {
            let denominator = denominators[local];
            let mut bounds = bounds.row_mut(local);
            if row.keys == 0 {
                bounds.fill(0.0);
            } else {
                for (bound, &out) in bounds.iter_mut().zip(exact.out.row(at + local)) {
                    *bound = model.out_bound(row, out, *bound, denominator, value_max);
                }
            }
            let sees_nothing = row.lse == f64::NEG_INFINITY;
            to.lse[at + local] = if sees_nothing { 0.0 } else { model.lse_bound(row, denominator) };
        }
    }
}

/// Turns products into logits, fills the weights and sums them up; the sink enters as a key without a value.
fn softmax_row(problem: &Problem, logits: &mut [f64], weights: &mut [f64], sink: Option<f64>) -> Row {
    let scale = f64::from(problem.softmax.scale);
    for logit in logits.iter_mut() {
        *logit = problem.softmax.cap(scale * *logit);
    }
    let extremes = |(low, high): (f64, f64), logit: f64| (low.min(logit), high.max(logit));
    let (min, max) = logits.iter().copied().chain(sink).fold((f64::INFINITY, f64::NEG_INFINITY), extremes);
    let keys = logits.len();
    if max == f64::NEG_INFINITY {
        return Row { keys, max, max_abs: 0.0, range: 0.0, sum: 0.0, lse: f64::NEG_INFINITY, sink };
    }
    for (weight, logit) in weights.iter_mut().zip(logits.iter()) {
        *weight = logit - max;
    }
    exponential::exp(weights);
    let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| libm::exp(sink - max));
    let lse = max + libm::log(sum);
    Row { keys, max, max_abs: min.abs().max(max.abs()), range: max - min, sum, lse, sink }
}
