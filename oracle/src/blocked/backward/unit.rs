//! A replay of a backward on Hopper's matrix unit in FP8, where dS has a factor: each tile its own, or a given one (tier R).
//!
//! The products q·k and dout·v are sums of codes that the oracle knows. Weights follow from the saved LSE and are rounded;
//! a weight near to the middle of two codes is a near-tie. dS is known up to the errors of f32, and so is the largest
//! magnitude of a tile, of which the tile's own factor follows. Where two factors are right, none is taken: the roundings of
//! that tile count in full. dv, dk and dq are the unit's sums of these codes, in steps from the tile's begin.
//!
//! What the unit cuts depends on all factors of a step. In a part between two promotions that has a near-tie, two right
//! sums are apart by the error of the part's steps, each of them.

use std::num::NonZeroUsize;
use std::ops::Range;

use multiversion::multiversion;
use ndarray::Array2;

use super::super::exponential;
use super::super::pieces::{Group, QueryRange, gather, row_mut, row_of};
use super::SinkSum;
use super::gradients::{Errors, PieceGradients};
use super::launches::{Place, Tile, each_tile};
use super::tiles::{Context, EXPONENT_MAX, QueryTile};
use crate::envelope::{DsFactor, GradientPair, Model, NumericProfile, Promotion, ReplayedTile};
use crate::matrix_unit::{Code, STEP, steps};
use crate::replay::ReplayedTiles;
use crate::{Format, InputViews, TensorName};

/// The tiles and the roundings that a replay follows.
#[derive(Clone, Copy)]
pub(in crate::blocked) struct Followed<'a> {
    pub(in crate::blocked) tiles: &'a ReplayedTiles,
    pub(in crate::blocked) rule: DsFactor,
    pub(in crate::blocked) profile: &'a NumericProfile,
    pub(in crate::blocked) promotion: Promotion,
}

/// The codes of some rows of one head, with the descale that they share.
struct Codes {
    values: Array2<f32>,
    format: Format,
    descale: f64,
}

impl Codes {
    fn of(inputs: &InputViews<'_>, tensor: TensorName, group: &Group<'_>, head: usize) -> Codes {
        let (all, rows) = (inputs.of(tensor), group.rows(tensor));
        let values = Array2::from_shape_fn((rows.len(), all.shape()[2]), |(index, lane)| {
            all[[rows.row(index), head, lane]]
        });
        let scales = inputs.scales.of(tensor);
        Codes {
            values,
            format: group.problem.precision.of(tensor).format,
            descale: scales.map_or(1.0, |scales| scales.of(group.sequence, 0, head, 0)),
        }
    }

    /// Returns the codes with the lanes outermost.
    fn transposed(self) -> Codes {
        let values = self.values.reversed_axes().as_standard_layout().into_owned();
        Codes { values, ..self }
    }

    /// Returns a row of the codes, which are stored row by row.
    fn row(&self, index: usize) -> &[f32] {
        let columns = self.values.ncols();
        &self.values.as_slice().unwrap_or_default()[index * columns..(index + 1) * columns]
    }
}

/// The keys and values of a group, as every query head's products take them.
pub(super) struct GroupCodes {
    /// Codes of k, `[keys][dim]`.
    k: Codes,
    /// Codes of k and of v, `[dim][keys]`.
    lanes: [Codes; 2],
    /// Magnitudes of k, `[keys][dim]`.
    k_magnitudes: Array2<f64>,
}

impl GroupCodes {
    pub(super) fn of(inputs: &InputViews<'_>, group: &Group<'_>, model: &Model) -> GroupCodes {
        let of = |tensor| Codes::of(inputs, tensor, group, group.kv_head);
        let k = gather(inputs, TensorName::K, group, 0..group.kv.len(), group.kv_head);
        GroupCodes {
            k: of(TensorName::K),
            lanes: [TensorName::K, TensorName::V].map(|tensor| of(tensor).transposed()),
            k_magnitudes: k.mapv_into(|k| model.magnitude(k)),
        }
    }
}

/// A query head, whose tiles are replayed one after the other.
struct Head<'a, 'c, 'i, 's> {
    context: &'a Context<'c, 'i, 's>,
    model: &'a Model,
    followed: Followed<'a>,
    keys: &'a GroupCodes,
    queries: QueryTile,
    /// Codes of q and of dout, `[queries][dim]`.
    codes: [Codes; 2],
    /// Their magnitudes.
    magnitudes: [Array2<f64>; 2],
    /// `g` of dv and of dk ([`Model::replayed_query_sums`]).
    query_sums: [f64; 2],
}

/// The pairs of a tile, rows × columns. What a row does not see is 0.
struct Pairs {
    p: Array2<f64>,
    p_left: Array2<f64>,
    ds: Array2<f64>,
    /// The errors of dS, and once it is rounded how far another right one may be.
    ds_left: Array2<f64>,
    /// The least and the largest number that the largest magnitude of dS may be.
    amax: [f64; 2],
}

/// One term of a sum over a tile's rows or columns.
struct Term {
    /// Its place in the tile, from which steps are counted.
    place: usize,
    /// The index of the row that it multiplies.
    index: usize,
    /// The weight or logit gradient.
    value: f64,
    /// How far another right one may be from it.
    left: f64,
}

/// The sums of one gradient over a tile.
struct Sums<'a> {
    /// The terms of each sum, with the index of its row in the gradient.
    of_rows: Vec<(usize, Vec<Term>)>,
    /// The rows that terms multiply.
    others: &'a Codes,
    magnitudes: &'a Array2<f64>,
    /// The format of terms, and the number that makes codes of them; `None` where sums are not made by the unit.
    codes: Option<(Format, f64)>,
    after: Option<NonZeroUsize>,
    /// The factor of all sums, apart from descales.
    scale: f64,
}

impl Context<'_, '_, '_> {
    /// Returns what [`Context::piece`] does, for all queries of a head, with the roundings of its tiles replayed.
    pub(super) fn followed(
        &self,
        piece: &QueryRange,
        (followed, keys): (Followed<'_>, &GroupCodes),
    ) -> (PieceGradients, Option<Errors<PieceGradients>>, SinkSum) {
        let new = || PieceGradients::new(self.problem, self.sides, piece.rows.len(), 0..self.group.kv.len());
        let (mut exact, mut linear, mut sink) = (new(), new(), SinkSum::default());
        let queries = self.query_tile(piece.head, piece.rows.clone());
        self.add_sink(piece.head, &queries, &mut sink);
        let Some(model) = self.of.model else { return (exact, None, sink) };
        let of = |tensor| Codes::of(self.of.inputs, tensor, self.group, piece.head);
        let head = Head {
            context: self,
            model,
            followed,
            keys,
            codes: [TensorName::Q, TensorName::Dout].map(of),
            magnitudes: [&queries.q, &queries.dout].map(|of| of.mapv(|input| model.magnitude(input))),
            queries,
            // All keys of a whole group have as many queries.
            query_sums: model.replayed_query_sums(self.group.queries_of(0)),
        };
        let visit = |tile: &Tile| head.add_tile(tile, &mut exact, &mut linear);
        if !each_tile(followed.tiles, (self.group, piece.head), visit) {
            [&mut linear.dq, &mut linear.dk, &mut linear.dv]
                .into_iter()
                .for_each(|bound| bound.fill(f64::INFINITY));
        }
        (exact, Some(Errors { linear, dithered: None }), sink)
    }
}

impl Head<'_, '_, '_, '_> {
    fn add_tile(&self, tile: &Tile, exact: &mut PieceGradients, linear: &mut PieceGradients) {
        let mut pairs = self.pairs(tile);
        let Followed { rule, profile, .. } = self.followed;
        let scaled = self.model.replayed_tile((rule, profile), pairs.amax);
        for (row, seen) in tile.seen.iter().enumerate() {
            for &column in seen {
                let at = [row, column];
                (pairs.ds[at], pairs.ds_left[at]) = scaled.rounded(pairs.ds[at], pairs.ds_left[at]);
            }
        }
        self.add_ds(tile, &pairs, &scaled, [exact, linear]);
        self.add_weights(tile, &pairs, [exact, linear]);
    }

    /// Adds a tile's share of dq and of dk.
    fn add_ds(
        &self,
        tile: &Tile,
        pairs: &Pairs,
        scaled: &ReplayedTile<'_>,
        [exact, linear]: [&mut PieceGradients; 2],
    ) {
        let Promotion { after, ds, .. } = self.followed.promotion;
        let scale = f64::from(self.context.problem.softmax.scale);
        let sums = |of_rows, others, magnitudes, is_own: bool| {
            let codes = scaled.factor.filter(|_| is_own).map(|factor| (ds, factor));
            Sums { of_rows, others, magnitudes, codes, after, scale }
        };
        let error = |g: f64, steps: usize, &Term { value, left, .. }: &Term| {
            scaled.error(g, value, left) + scaled.cuts(steps, value, left)
        };
        let of_sums =
            |g: f64, steps: usize, term: &Term| error(g, if scaled.has_own_dk { steps } else { 0 }, term);
        let ([q, _], [q_magnitudes, _]) = (&self.codes, &self.magnitudes);
        let [_, by_query] = self.query_sums;
        let by_key = |query| self.model.replayed_key_sum(self.context.group.keys_of(query));
        let of_queries = tile.over_columns(&pairs.ds, &pairs.ds_left);
        sums(of_queries, &self.keys.k, &self.keys.k_magnitudes, true).add(
            [&mut exact.dq, &mut linear.dq],
            by_key,
            error,
        );
        let of_keys = tile.over_rows(&pairs.ds, &pairs.ds_left);
        let to = [&mut exact.dk, &mut linear.dk];
        sums(of_keys, q, q_magnitudes, scaled.has_own_dk).add(to, |_| by_query, of_sums);
    }

    /// Adds a tile's share of dv.
    fn add_weights(&self, tile: &Tile, pairs: &Pairs, [exact, linear]: [&mut PieceGradients; 2]) {
        let Promotion { after, p, .. } = self.followed.promotion;
        let ([_, others], [_, magnitudes]) = (&self.codes, &self.magnitudes);
        let of_rows = tile.over_rows(&pairs.p, &pairs.p_left);
        // What is never promoted may pass from tile to tile, and has the unit's error throughout.
        let codes = after.map(|_| (p, self.model.weight_scale()));
        let error = |g: f64, steps: usize, &Term { value, left, .. }: &Term| {
            let steps = if after.is_some() { steps } else { 0 };
            self.model.replayed_weight_error(g, value, left) + self.model.weight_cuts(steps, value, left)
        };
        let [by_query, _] = self.query_sums;
        let to = [&mut exact.dv, &mut linear.dv];
        Sums { of_rows, others, magnitudes, codes, after, scale: 1.0 }.add(to, |_| by_query, error);
    }

    /// Returns the weights of a tile, rounded, and its dS before that is rounded.
    fn pairs(&self, tile: &Tile) -> Pairs {
        let zeros = || Array2::zeros((tile.rows.len(), tile.columns.len()));
        let mut pairs = Pairs { p: zeros(), p_left: zeros(), ds: zeros(), ds_left: zeros(), amax: [0.0; 2] };
        for (row, seen) in tile.seen.iter().enumerate() {
            // What sees nothing has an LSE of −∞, and no weights.
            if self.queries.statistics[tile.rows[row].index].lse > f64::NEG_INFINITY {
                self.weigh_row((tile, row), seen, &mut pairs);
            }
        }
        pairs
    }

    /// Writes the weights and dS of a row of a tile, with the keys that it sees.
    fn weigh_row(&self, (tile, row): (&Tile, usize), seen: &[usize], pairs: &mut Pairs) {
        let query = tile.rows[row].index;
        let softmax = &self.context.problem.softmax;
        let statistics = self.queries.statistics[query];
        let keys = seen.iter().map(|column| tile.columns[*column].index);
        let hull = keys.clone().min().unwrap_or(0)..keys.clone().max().map_or(0, |last| last + 1);
        let [products, dp] = [0, 1].map(|of| self.products(of, query, &hull));
        let logit = |key: usize| softmax.cap(f64::from(softmax.scale) * products[key - hull.start]);
        let mut weights: Vec<f64> =
            keys.clone().map(|key| (logit(key) - statistics.lse).min(EXPONENT_MAX)).collect();
        exponential::exp(&mut weights);
        for ((&column, key), p) in seen.iter().zip(keys).zip(weights) {
            let pair = GradientPair {
                logit: logit(key),
                lse: statistics.lse,
                lse_error: statistics.lse_error,
                p,
                x: dp[key - hull.start] - statistics.d,
                derivative: softmax.cap_derivative(logit(key)),
                a: products[key - hull.start].abs(),
                b: dp[key - hull.start].abs(),
                d_error: statistics.d_error,
                ds_most: 0.0,
            };
            let weighed = self.model.replayed_tile_pair(self.followed.profile, &pair);
            let at = [row, column];
            (pairs.p[at], pairs.p_left[at]) = (weighed.p, weighed.p_left);
            (pairs.ds[at], pairs.ds_left[at]) = (weighed.ds, weighed.ds_error);
            let [least, most] = &mut pairs.amax;
            *least = least.max(weighed.ds.abs() - weighed.ds_error);
            *most = most.max(weighed.ds.abs() + weighed.ds_error);
        }
    }

    /// Returns the products of a query with some keys (0), or of its dout with values (1), as the unit makes them, with
    /// descales.
    fn products(&self, of: usize, query: usize, keys: &Range<usize>) -> Vec<f64> {
        let (rows, lanes) = (&self.codes[of], &self.keys.lanes[of]);
        let format = lanes.format;
        let codes: Vec<Code> =
            rows.row(query).iter().map(|value| Code::new((*value).into(), rows.format)).collect();
        let after = self.followed.promotion.after.map_or(usize::MAX, NonZeroUsize::get);
        let mut sums = vec![0.0f32; keys.len()];
        let mut unit = vec![0.0f32; keys.len()];
        for (part, codes) in codes.chunks(STEP.saturating_mul(after)).enumerate() {
            unit.fill(0.0);
            for (step, codes) in codes.chunks(STEP).enumerate() {
                let first = (part * after + step) * STEP;
                let lanes: Vec<&[f32]> =
                    (first..first + codes.len()).map(|lane| &lanes.row(lane)[keys.clone()]).collect();
                steps(&mut unit, codes, &lanes, format);
            }
            sums.iter_mut().zip(&unit).for_each(|(sum, unit)| *sum += unit);
        }
        let descale = rows.descale * lanes.descale;
        sums.into_iter().map(|sum| descale * f64::from(sum)).collect()
    }
}

impl Tile {
    /// Returns the sums over the keys that each query sees.
    fn over_columns(&self, values: &Array2<f64>, left: &Array2<f64>) -> Vec<(usize, Vec<Term>)> {
        let of_row = |(row, seen): (usize, &Vec<usize>)| {
            let terms = seen
                .iter()
                .map(|&column| Term::of(self.columns[column], values[[row, column]], left[[row, column]]));
            (self.rows[row].index, terms.collect())
        };
        self.seen.iter().enumerate().map(of_row).collect()
    }

    /// Returns the sums over the queries that see each key.
    fn over_rows(&self, values: &Array2<f64>, left: &Array2<f64>) -> Vec<(usize, Vec<Term>)> {
        let mut sums: Vec<(usize, Vec<Term>)> =
            self.columns.iter().map(|column| (column.index, Vec::new())).collect();
        for (row, seen) in self.seen.iter().enumerate() {
            for &column in seen {
                let term = Term::of(self.rows[row], values[[row, column]], left[[row, column]]);
                sums[column].1.push(term);
            }
        }
        sums
    }
}

impl Term {
    fn of(Place { place, index }: Place, value: f64, left: f64) -> Term {
        Term { place, index, value, left }
    }
}

impl Sums<'_> {
    /// Adds the sums to the gradient, and to its errors what `error` says of each term: from `g` of its row, and from the
    /// number of steps that may be cut differently because of near-ties.
    fn add(
        &self,
        [exact, linear]: [&mut Array2<f64>; 2],
        g: impl Fn(usize) -> f64,
        error: impl Fn(f64, usize, &Term) -> f64,
    ) {
        let after = self.after.map_or(usize::MAX, NonZeroUsize::get);
        for (index, terms) in &self.of_rows {
            let (to, left, g) = (row_mut(exact, *index), row_mut(linear, *index), g(*index));
            for part in terms.chunk_by(|a, b| a.place / STEP / after == b.place / STEP / after) {
                let steps: Vec<&[Term]> = part.chunk_by(|a, b| a.place / STEP == b.place / STEP).collect();
                self.add_part(&steps, to);
                let is_known = self.codes.is_some() && part.iter().all(|term| term.left == 0.0);
                let uncertain = if is_known { 0 } else { steps.len() };
                for term in part {
                    let error = self.scale * error(g, uncertain, term);
                    add_multiple(left, error, row_of(self.magnitudes, term.index));
                }
            }
        }
    }

    /// Adds the sum of a part between two promotions.
    fn add_part(&self, parts: &[&[Term]], to: &mut [f64]) {
        let scale = self.scale * self.others.descale;
        let Some((format, to_code)) = self.codes else {
            for term in parts.iter().copied().flatten() {
                let row = self.others.row(term.index).iter();
                to.iter_mut().zip(row).for_each(|(to, code)| *to += scale * term.value * f64::from(*code));
            }
            return;
        };
        let mut unit = vec![0.0f32; to.len()];
        for terms in parts {
            let (mut codes, mut rows) = ([Code::ZERO; STEP], [&[][..]; STEP]);
            let mut count = 0;
            for term in terms.iter().filter(|term| term.value != 0.0).take(STEP) {
                codes[count] = Code::new(term.value * to_code, format);
                rows[count] = self.others.row(term.index);
                count += 1;
            }
            steps(&mut unit, &codes[..count], &rows[..count], self.others.format);
        }
        to.iter_mut().zip(unit).for_each(|(to, unit)| *to += scale / to_code * f64::from(unit));
    }
}

/// Adds a multiple of a row.
#[multiversion(targets("x86_64+avx2+fma"))]
fn add_multiple(to: &mut [f64], factor: f64, row: &[f64]) {
    if factor != 0.0 {
        to.iter_mut().zip(row).for_each(|(to, from)| *to += factor * from);
    }
}
