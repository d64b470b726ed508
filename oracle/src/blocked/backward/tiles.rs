//! A piece's gradients, from tiles of its rows against tiles of keys.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1, ArrayView2, s};

use super::super::exponential;
use super::super::pieces::{
    Group, KEY_TILE, Keys, QueryRange, Sides, clear_others, clip, gather, map, product_transposed, row_mut,
    tiles,
};
use super::gradients::{Dithered, Errors, PieceGradients};
use super::strips::{BoundStrips, Certificate, Pairs, RowSums, bound_stretch, replay_stretch, squares};
use super::{Backward, SinkSum};
use crate::envelope::{GradientPair, Model, NOISE};
use crate::{Intervals, Problem, TensorName, amax};

/// The largest error of D, and the largest dS, that is told apart from none at all. Larger ones would make infinities,
/// and no number of an infinity times 0.
const ERROR_MAX: f64 = 1e100;

/// The logarithm of the largest weight that is told apart from any larger one. A saved LSE that leaves such a weight is
/// further from the logits than the row has keys, and says nothing about them.
pub(super) const EXPONENT_MAX: f64 = 230.0;

/// The data that every tile of a piece reads.
pub(super) struct Context<'a, 'i, 's> {
    pub(super) of: &'a Backward<'a, 'i, 's>,
    pub(super) problem: &'a Problem,
    pub(super) group: &'a Group<'a>,
    pub(super) sides: Sides,
    pub(super) keys: &'a Keys<'a, 'i>,
    /// The numbers of [`query_copies`], where sums over queries are wanted.
    pub(super) copies: &'a [f64],
    /// The numbers of [`query_sums`].
    pub(super) query_sums: &'a [f64],
    /// The numbers of [`Context::largest_gradients`], where they are needed and not given.
    pub(super) ds_most: Vec<f64>,
}

/// Some neighbouring keys of a group.
struct KeyTile {
    columns: Range<usize>,
    k: Array2<f64>,
    v: Array2<f64>,
    /// Magnitudes of k and v, where an envelope is asked for.
    magnitudes: Option<[Array2<f64>; 2]>,
}

/// The quantities of one row in the backward.
#[derive(Clone, Copy)]
pub(super) struct Statistics {
    pub(super) lse: f64,
    /// The most by which the subject's own LSE may differ from `lse`; 0 where `lse` is the subject's own.
    pub(super) lse_error: f64,
    pub(super) d: f64,
    pub(super) d_error: f64,
    /// The largest magnitude of dS in a tile that the row has a part of, where bounds need it.
    pub(super) ds_most: f64,
}

/// The query side of one tile of rows.
pub(super) struct QueryTile {
    pub(super) rows: Range<usize>,
    pub(super) q: Array2<f64>,
    pub(super) dout: Array2<f64>,
    pub(super) statistics: Vec<Statistics>,
    /// The number of copies of each query in its group.
    pub(super) copies: Vec<f64>,
}

/// Neighbouring columns of a tile that one of its rows sees.
pub(super) struct Stretch {
    pub(super) local: usize,
    pub(super) visible: Range<usize>,
}

impl Stretch {
    /// Returns the stretch's part of a strip.
    pub(super) fn of<'s>(&self, strip: &'s mut Array2<f64>) -> &'s mut [f64] {
        &mut row_mut(strip, self.local)[self.visible.clone()]
    }
}

/// The strips of one tile: rows × keys.
struct Strips {
    p: Array2<f64>,
    ds: Array2<f64>,
    bound: Option<BoundStrips>,
}

/// The weights and logit gradients of one tile, with what their bounds need.
struct Weighed {
    p: Array2<f64>,
    ds: Array2<f64>,
    /// `Σ|q||k|` and `Σ|dout||v|`, where bounds are asked for.
    magnitudes: Option<[Array2<f64>; 2]>,
    seen: Vec<Stretch>,
    /// The logits and `dP − D` of each stretch.
    kept: Vec<Vec<(f64, f64)>>,
}

impl Context<'_, '_, '_> {
    pub(super) fn piece(
        &self,
        piece: &QueryRange,
    ) -> (PieceGradients, Option<Errors<PieceGradients>>, SinkSum) {
        let (sides, model) = (self.sides, self.of.model);
        let keys = self.group.seen_by_any(piece.rows.clone());
        let new = || PieceGradients::new(self.problem, sides, piece.rows.len(), keys.clone());
        let (mut exact, mut errors) = (new(), model.map(|_| Errors { linear: new(), dithered: None }));
        let mut sink = SinkSum::default();
        for rows in self.group.row_tiles(piece.rows.clone(), usize::MAX) {
            let seen = self.group.seen_by_any(rows.clone());
            if seen.is_empty() && !sides.sink {
                continue;
            }
            let tile = self.query_tile(piece.head, rows.clone());
            if sides.sink {
                self.add_sink(piece.head, &tile, &mut sink);
            }
            let at = rows.start - piece.rows.start..rows.end - piece.rows.start;
            for columns in tiles(seen, KEY_TILE) {
                let keys = self.key_tile(columns);
                let strips = self.strips(&tile, &keys);
                self.add_exact(&tile, &strips, &keys, at.clone(), &mut exact);
                if let (Some(model), Some(strips), Some(errors)) = (model, strips.bound, &mut errors) {
                    self.add_bound(model, &tile, strips, &keys, at.clone(), errors);
                }
            }
        }
        (exact, errors, sink)
    }

    /// Returns, for each query head of the group, the largest magnitude of dS with its error. No tile of the head has a
    /// larger one.
    pub(super) fn largest_gradients(&self, model: &Model, parallel: bool) -> Vec<f64> {
        let heads = self.group.heads();
        let mut largest = vec![0.0f64; heads.len()];
        for (head, range) in
            map(parallel, self.group.pieces(), |piece| (piece.head, self.largest_gradient(model, &piece)))
        {
            let most_of_head = &mut largest[head - heads.start];
            *most_of_head = most_of_head.max(range.most.min(ERROR_MAX));
        }
        largest
    }

    pub(super) fn largest_gradient(&self, model: &Model, piece: &QueryRange) -> amax::Range {
        let mut largest = amax::Range::default();
        for rows in self.group.row_tiles(piece.rows.clone(), usize::MAX) {
            let tile = self.query_tile(piece.head, rows.clone());
            for columns in tiles(self.group.seen_by_any(rows), KEY_TILE) {
                let keys = self.key_tile(columns);
                let Weighed { mut p, magnitudes, seen, kept, .. } = self.weighed(&tile, &keys);
                let Some([mut a, mut b]) = magnitudes else { continue };
                for (stretch, kept) in seen.iter().zip(&kept) {
                    let pairs = self.pairs(&tile, stretch, kept);
                    let [p, a, b] = [&mut p, &mut a, &mut b].map(|strip| &*stretch.of(strip));
                    for column in 0..kept.len() {
                        let pair = pairs.at(column, p[column], [a[column], b[column]]);
                        let (ds, error) = model.logit_gradient(&pair);
                        largest.add(ds, error);
                    }
                }
            }
        }
        largest
    }

    fn key_tile(&self, columns: Range<usize>) -> KeyTile {
        let (k, v) = (self.keys.k(columns.clone()), self.keys.v(columns.clone()));
        let magnitudes = |model: &Model| [&k, &v].map(|inputs| inputs.mapv(|x| model.magnitude(x)));
        KeyTile { magnitudes: self.of.model.map(magnitudes), columns, k, v }
    }

    pub(super) fn query_tile(&self, head: usize, rows: Range<usize>) -> QueryTile {
        let Backward { inputs, saved, errors, model, .. } = *self.of;
        let has_keys = !self.group.kv.is_picked();
        let q = gather(inputs, TensorName::Q, self.group, rows.clone(), head);
        let dout = gather(inputs, TensorName::Dout, self.group, rows.clone(), head);
        let mut statistics: Vec<Statistics> = rows
            .clone()
            .zip(dout.outer_iter())
            .map(|(query, dout)| {
                let at = [head, self.group.q.row(query)];
                let of = |errors: Option<&Array2<f64>>| errors.map_or(0.0, |errors| errors[at]);
                let (d, d_error) = self.out_dot(dout, saved.out.lanes(at[1], head).view());
                let apart = if has_keys { 0.0 } else { of(errors.delta).min(ERROR_MAX) };
                let d_error = d_error.max(apart);
                let of_head = self.ds_most.get(head % self.problem.group());
                let ds_most = of_head.copied().unwrap_or_else(|| of(errors.ds_most).min(ERROR_MAX));
                Statistics { lse: saved.lse[at], lse_error: of(errors.lse), d, d_error, ds_most }
            })
            .collect();
        if let Some(model) = model.filter(|model| model.weighs_dots() && has_keys) {
            let dots = self.weighted_dots(model, rows.clone(), [&q, &dout], &statistics);
            for (row, dots) in statistics.iter_mut().zip(dots) {
                (row.d, row.d_error) = model.row_delta((row.d, row.d_error), Some(dots));
            }
        }
        let first = (head % self.problem.group()) * self.group.q.len();
        let copies = match self.copies {
            [] => Vec::new(),
            copies => copies[first + rows.start..first + rows.end].to_vec(),
        };
        QueryTile { rows, q, dout, statistics, copies }
    }

    /// Returns `Σ dout·out` of the saved out, and the error of D against it.
    fn out_dot(&self, dout: ArrayView1<'_, f64>, out: ArrayView1<'_, f64>) -> (f64, f64) {
        let d = dout.dot(&out);
        let Some(model) = self.of.model else { return (d, 0.0) };
        let (mut magnitudes, mut roundings) = (0.0, 0.0);
        for (dout, out) in dout.iter().zip(out) {
            magnitudes += (dout * out).abs();
            roundings += dout.abs() * model.last_rounding(*out);
        }
        (d, model.out_dot_error(magnitudes, roundings))
    }

    /// Returns `Σ P·dP` of each row over all keys that it sees, and the error of that sum.
    fn weighted_dots(
        &self,
        model: &Model,
        rows: Range<usize>,
        [q, dout]: [&Array2<f64>; 2],
        statistics: &[Statistics],
    ) -> Vec<(f64, f64)> {
        let (problem, group) = (self.problem, self.group);
        let mut sums = vec![(0.0, 0.0, 0.0); rows.len()];
        for columns in tiles(group.seen_by_any(rows.clone()), KEY_TILE) {
            let keys = self.key_tile(columns.clone());
            let products = product_transposed(&q.view(), &keys.k.view());
            let dots = product_transposed(&dout.view(), &keys.v.view());
            let [a, b] = keys.products(model, [q, dout]);
            for (local, (i, sums)) in rows.clone().zip(&mut sums).enumerate() {
                let Statistics { lse, lse_error, .. } = statistics[local];
                let seen = clip(&group.seen(i), &columns).filter(|_| lse != f64::NEG_INFINITY);
                for at in seen.map(|column| [local, column]) {
                    let logit = problem.softmax.cap(f64::from(problem.softmax.scale) * products[at]);
                    let (p, x) = (libm::exp(logit - lse), dots[at]);
                    let weight = GradientPair::of_weight(logit, lse, p, a[at]);
                    let pair = GradientPair { lse_error, x, b: b[at], ..weight };
                    let (magnitude, error) = model.weighted_dot(&pair);
                    *sums = (sums.0 + p * x, sums.1 + magnitude, sums.2 + error);
                }
            }
        }
        rows.zip(sums)
            .map(|(i, (value, magnitudes, errors))| {
                (value, model.weighted_dots_error(group.seen(i).len(), magnitudes, errors))
            })
            .collect()
    }

    pub(super) fn add_sink(&self, head: usize, tile: &QueryTile, to: &mut SinkSum) {
        let Some(&sink) = self.of.inputs.sink.get(head) else { return };
        for row in tile.statistics.iter().filter(|row| row.lse != f64::NEG_INFINITY) {
            let &Statistics { lse, lse_error, d, d_error, .. } = row;
            to.value += libm::exp(f64::from(sink) - lse) * d;
            to.rows += 1;
            if let Some(model) = self.of.model {
                let (term, error) = model.sink_row(f64::from(sink), (lse, lse_error), (d, d_error));
                to.terms += term;
                to.errors += error;
            }
        }
    }

    /// Returns the weights and logit gradients of the tile's rows against some keys; 0 where the mask hides a pair.
    fn weighed(&self, tile: &QueryTile, keys: &KeyTile) -> Weighed {
        let columns = &keys.columns;
        let mut p = product_transposed(&tile.q.view(), &keys.k.view());
        let mut ds = product_transposed(&tile.dout.view(), &keys.v.view());
        let mut magnitudes = self.of.model.map(|model| keys.products(model, [&tile.q, &tile.dout]));
        let (mut seen, mut kept) = (Vec::new(), Vec::new());
        for (local, i) in tile.rows.clone().enumerate() {
            let sees_nothing = tile.statistics[local].lse == f64::NEG_INFINITY;
            let visible =
                if sees_nothing { Intervals::default() } else { clip(&self.group.seen(i), columns) };
            let rows = [&mut p, &mut ds].into_iter().chain(magnitudes.iter_mut().flatten());
            rows.for_each(|strip| clear_others(row_mut(strip, local), &visible));
            for visible in visible.parts() {
                let stretch = Stretch { local, visible };
                kept.push(self.weigh(tile, &stretch, &mut p, &mut ds));
                seen.push(stretch);
            }
        }
        Weighed { p, ds, magnitudes, seen, kept }
    }

    /// Returns the weights and logit gradients of [`Context::weighed`], with their errors where bounds are asked for.
    fn strips(&self, tile: &QueryTile, keys: &KeyTile) -> Strips {
        let Backward { model, replay, .. } = *self.of;
        let columns = &keys.columns;
        let Weighed { mut p, mut ds, magnitudes, seen, kept } = self.weighed(tile, keys);
        let bound = model.zip(magnitudes).map(|(model, magnitudes)| {
            let certificate = match replay {
                None => Certificate::new(tile, &seen, &kept, &p),
                Some(_) => Certificate { rows: vec![false; p.nrows()], columns: vec![false; p.ncols()] },
            };
            let mut strips = BoundStrips::new(magnitudes, &certificate);
            for (stretch, kept) in seen.iter().zip(&kept) {
                let pairs = self.pairs(tile, stretch, kept);
                let sums = self.sums(model, tile.rows.start + stretch.local, columns, &stretch.visible);
                match replay {
                    None => {
                        let p = stretch.of(&mut p);
                        bound_stretch(model, &pairs, sums, stretch, p, &certificate, &mut strips);
                    }
                    Some(profile) => {
                        replay_stretch(model, profile, &pairs, sums, stretch, [&mut p, &mut ds], &mut strips);
                    }
                }
            }
            strips
        });
        Strips { p, ds, bound }
    }

    /// Turns the products of one stretch of [`Context::weighed`] into weights and logit gradients. Returns, for its
    /// columns, the logits and `dP − D`, which only the bounds need further.
    fn weigh(
        &self,
        tile: &QueryTile,
        stretch: &Stretch,
        p: &mut Array2<f64>,
        ds: &mut Array2<f64>,
    ) -> Vec<(f64, f64)> {
        let softmax = &self.problem.softmax;
        let scale = f64::from(softmax.scale);
        let Statistics { lse, d, .. } = tile.statistics[stretch.local];
        let [p, ds] = [p, ds].map(|strip| stretch.of(strip));
        p.iter_mut().for_each(|product| *product = softmax.cap(scale * *product));
        ds.iter_mut().for_each(|dp| *dp -= d);
        let kept = match self.of.model {
            Some(_) => p.iter().copied().zip(ds.iter().copied()).collect(),
            None => Vec::new(),
        };
        if softmax.softcap.is_some() {
            ds.iter_mut().zip(p.iter()).for_each(|(ds, logit)| *ds *= softmax.cap_derivative(*logit));
        }
        p.iter_mut().for_each(|logit| *logit = (*logit - lse).min(EXPONENT_MAX));
        exponential::exp(p);
        ds.iter_mut().zip(p.iter()).for_each(|(ds, weight)| *ds *= weight);
        kept
    }

    /// Returns the pairs of one stretch, which its bounds need.
    fn pairs<'p>(&'p self, tile: &QueryTile, stretch: &Stretch, kept: &'p [(f64, f64)]) -> Pairs<'p> {
        Pairs { softmax: &self.problem.softmax, row: tile.statistics[stretch.local], kept }
    }

    /// Returns `g` of the sums that a row and its visible keys take part in.
    fn sums(
        &self,
        model: &Model,
        query: usize,
        columns: &Range<usize>,
        visible: &Range<usize>,
    ) -> RowSums<'_> {
        let by_query = match self.query_sums {
            [] => &[],
            sums => &sums[columns.start + visible.start..columns.start + visible.end],
        };
        RowSums { by_query, by_key: model.key_sum(self.group.keys_of(query)) }
    }

    fn add_exact(
        &self,
        tile: &QueryTile,
        strips: &Strips,
        keys: &KeyTile,
        at: Range<usize>,
        to: &mut PieceGradients,
    ) {
        let coefficients = [&strips.p, &strips.ds, &strips.ds];
        let factors = [tile.dout.view(), tile.q.view(), keys.k.view()];
        self.add_products(coefficients, &factors, 1, &keys.columns, &at, to);
    }

    fn add_bound(
        &self,
        model: &Model,
        tile: &QueryTile,
        strips: BoundStrips,
        keys: &KeyTile,
        at: Range<usize>,
        to: &mut Errors<PieceGradients>,
    ) {
        let Some([k, _]) = &keys.magnitudes else { return };
        let (k, columns) = (k.view(), &keys.columns);
        let magnitude = |input: f64| model.magnitude(input);
        let (q, dout) = (tile.q.mapv(magnitude), tile.dout.mapv(magnitude));
        let factors = [dout.view(), q.view(), k];
        self.add_products(strips.linear.each_ref(), &factors, 1, columns, &at, &mut to.linear);
        if !strips.is_dithered {
            return;
        }
        let to = to.dithered.get_or_insert_with(|| Dithered::of(|| to.linear.zeros()));
        self.add_products(strips.rounding.each_ref(), &factors, 1, columns, &at, &mut to.rounding);
        let noise = strips.rounding.map(|mut strip| {
            strip.mapv_inplace(|rounding| (NOISE * rounding).powi(2));
            strip
        });
        let [dout, q, k] = [
            (dout.view(), &tile.copies[..]),
            (q.view(), &tile.copies),
            (k, &self.keys.copies[columns.clone()]),
        ]
        .map(|(factor, copies)| squares(&factor, copies));
        let factors = [dout.view(), q.view(), k.view()];
        self.add_products(noise.each_ref(), &factors, 2, columns, &at, &mut to.noise);
    }

    /// Adds coefficients of dv, dk and dq times dout, q and k. Those of dk and dq are also multiplied by this power of
    /// the scale.
    fn add_products(
        &self,
        [dv, dk, dq]: [&Array2<f64>; 3],
        [dout, q, k]: &[ArrayView2<'_, f64>; 3],
        power: i32,
        columns: &Range<usize>,
        at: &Range<usize>,
        to: &mut PieceGradients,
    ) {
        let scale = f64::from(self.problem.softmax.scale).powi(power);
        if self.sides.q {
            general_mat_mul(scale, dq, k, 1.0, &mut to.dq.slice_mut(s![at.clone(), ..]));
        }
        if self.sides.kv {
            let local = columns.start - to.keys.start..columns.end - to.keys.start;
            general_mat_mul(scale, &dk.t(), q, 1.0, &mut to.dk.slice_mut(s![local.clone(), ..]));
            general_mat_mul(1.0, &dv.t(), dout, 1.0, &mut to.dv.slice_mut(s![local, ..]));
        }
    }
}

impl KeyTile {
    /// Returns `Σ|q||k|` and `Σ|dout||v|` of a tile.
    fn products(&self, model: &Model, [q, dout]: [&Array2<f64>; 2]) -> [Array2<f64>; 2] {
        let [k, v] = self.magnitudes.as_ref().expect("magnitudes are there where a model is");
        let magnitude = |input: f64| model.magnitude(input);
        [(q, k), (dout, v)].map(|(rows, keys)| product_transposed(&rows.mapv(magnitude).view(), &keys.view()))
    }
}
