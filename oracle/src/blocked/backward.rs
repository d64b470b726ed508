//! The backward pass of one group: a sequence, a KV head and that head's query heads.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1, ArrayView2, Axis, Zip, s};

use super::answer::Tiers;
use super::exponential;
use super::pieces::{
    Group, KEY_TILE, Keys, QueryRange, Sides, clear_others, clip, gather, lanes_hash, map,
    product_transposed, row_mut, tiles,
};
use crate::envelope::dither::{Spread, copies_of, fill_enough, shared_share};
use crate::envelope::{GradientPair, Model, NOISE, NumericProfile, Rounding};
use crate::{Gradients, InputViews, Intervals, Problem, SavedErrors, SavedViews, Softmax, TensorName, amax};

/// `Σ p_sink · D` of one head, with the quantities that its bound needs.
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
    /// dq of each piece, in the order of [`Group::pieces`].
    dq: Vec<(QueryRange, Array2<f64>)>,
    dk: Array2<f64>,
    dv: Array2<f64>,
}

/// The results of a group: gradients, their bounds, and each piece's sum for dsink with its head.
pub(super) struct GroupBackward {
    pub(super) exact: GroupGradients,
    pub(super) bound: Option<GroupBounds>,
    pub(super) sinks: Vec<(usize, SinkSum)>,
}

/// The bounds of a group's gradients.
pub(super) struct GroupBounds {
    worst: GroupGradients,
    /// Those of tier T; `None` where nothing is dithered.
    dithered: Option<GroupGradients>,
}

impl GroupBounds {
    /// Writes the bounds of the group's rows to their places in the results.
    pub(super) fn store(&self, group: &Group<'_>, to: &mut Tiers<Gradients>) {
        self.worst.store(group, &mut to.worst);
        match &self.dithered {
            Some(dithered) => dithered.store(group, &mut to.dithered),
            None => self.worst.fill(group, &mut to.dithered, f64::INFINITY),
        }
    }
}

impl GroupGradients {
    /// Writes a number to the places of the group's rows in the results.
    fn fill(&self, group: &Group<'_>, to: &mut Gradients, value: f64) {
        for (piece, _) in self.dq.iter().filter(|(_, dq)| !dq.is_empty()) {
            let mut of_head = to.dq.index_axis_mut(Axis(1), piece.head);
            piece.rows.clone().for_each(|query| of_head.row_mut(group.q.place(query)).fill(value));
        }
        for (from, to) in [(&self.dk, &mut to.dk), (&self.dv, &mut to.dv)] {
            let mut of_head = to.index_axis_mut(Axis(1), group.kv_head);
            (0..from.nrows()).for_each(|key| of_head.row_mut(group.kv.place(key)).fill(value));
        }
    }

    /// Returns gradients of the same shapes that are 0.
    fn zeros(&self) -> GroupGradients {
        let zeros = |gradient: &Array2<f64>| Array2::zeros(gradient.raw_dim());
        GroupGradients {
            dq: self.dq.iter().map(|(piece, dq)| (piece.clone(), zeros(dq))).collect(),
            dk: zeros(&self.dk),
            dv: zeros(&self.dv),
        }
    }

    /// Writes the group's rows to their places in the results.
    pub(super) fn store(&self, group: &Group<'_>, to: &mut Gradients) {
        let dims = group.problem.dims;
        assert_gradient("dk", &self.dk, (group.kv.len(), dims.qk));
        assert_gradient("dv", &self.dv, (group.kv.len(), dims.v));
        for (piece, dq) in &self.dq {
            assert_gradient("dq", dq, (piece.rows.len(), dims.qk));
            let mut of_head = to.dq.index_axis_mut(Axis(1), piece.head);
            for (query, dq) in piece.rows.clone().zip(dq.outer_iter()) {
                of_head.row_mut(group.q.place(query)).assign(&dq);
            }
        }
        for (from, to) in [(&self.dk, &mut to.dk), (&self.dv, &mut to.dv)] {
            let mut of_head = to.index_axis_mut(Axis(1), group.kv_head);
            for (key, from) in from.outer_iter().enumerate() {
                of_head.row_mut(group.kv.place(key)).assign(&from);
            }
        }
    }
}

/// Asserts that a gradient has the shape of its rows, or no rows, as on a side that is not wanted. Without the check, a
/// gradient with fewer rows would be stored in part, and a single column would be repeated, both without an error.
fn assert_gradient(name: &str, gradient: &Array2<f64>, shape: (usize, usize)) {
    let (rows, columns) = gradient.dim();
    let is_unwanted = (rows, columns) == (0, shape.1);
    assert!(is_unwanted || (rows, columns) == shape, "shape of {name}: {rows} × {columns}, not {shape:?}");
}

/// The sums that make a group's bounds: coefficients times magnitudes.
struct Errors<T> {
    /// The errors that add up.
    linear: T,
    /// Roundings of P and dS that are noise; `None` where there is none.
    dithered: Option<Dithered<T>>,
}

/// Sums of roundings that are noise.
struct Dithered<T> {
    /// Their magnitudes, added up.
    rounding: T,
    /// The sum of the squares of eight standard deviations.
    noise: T,
}

impl<T> Dithered<T> {
    fn of(make: impl Fn() -> T) -> Dithered<T> {
        Dithered { rounding: make(), noise: make() }
    }
}

/// The gradients that one piece adds: its own dq, and partial sums of dk and dv for the keys that it sees.
struct PieceGradients {
    dq: Array2<f64>,
    keys: Range<usize>,
    dk: Array2<f64>,
    dv: Array2<f64>,
}

impl PieceGradients {
    fn new(problem: &Problem, sides: Sides, rows: usize, keys: Range<usize>) -> PieceGradients {
        let (rows, keys) = (if sides.q { rows } else { 0 }, if sides.kv { keys } else { 0..0 });
        PieceGradients {
            dq: Array2::zeros((rows, problem.dims.qk)),
            dk: Array2::zeros((keys.len(), problem.dims.qk)),
            dv: Array2::zeros((keys.len(), problem.dims.v)),
            keys,
        }
    }

    /// Returns gradients of the same shapes that are 0.
    fn zeros(&self) -> PieceGradients {
        let zeros = |gradient: &Array2<f64>| Array2::zeros(gradient.raw_dim());
        PieceGradients {
            dq: zeros(&self.dq),
            keys: self.keys.clone(),
            dk: zeros(&self.dk),
            dv: zeros(&self.dv),
        }
    }
}

/// The largest error of D, and the largest dS, that is told apart from none at all. Larger ones would make infinities,
/// and no number of an infinity times 0.
const ERROR_MAX: f64 = 1e100;

/// The logarithm of the largest weight that is told apart from any larger one. A saved LSE that leaves such a weight is
/// further from the logits than the row has keys, and says nothing about them.
const EXPONENT_MAX: f64 = 230.0;

/// The most pieces whose gradients are held before they are added. Each holds the gradients of all keys that it sees.
const HELD: usize = 16;

/// What the gradients of all groups are made of.
#[derive(Clone, Copy)]
pub(super) struct Backward<'a, 'i, 's> {
    pub(super) inputs: &'a InputViews<'i>,
    pub(super) saved: &'a SavedViews<'s>,
    pub(super) errors: SavedErrors<'a>,
    pub(super) model: Option<&'a Model>,
    /// The profile whose roundings are replayed. The bounds are then the errors that are left.
    pub(super) replay: Option<&'a NumericProfile>,
}

impl<'a, 'i, 's> Backward<'a, 'i, 's> {
    /// Returns the gradients of exact arithmetic from saved values without errors.
    pub(super) fn new(inputs: &'a InputViews<'i>, saved: &'a SavedViews<'s>) -> Backward<'a, 'i, 's> {
        Backward { inputs, saved, errors: SavedErrors::default(), model: None, replay: None }
    }

    /// Returns the range of the largest magnitude of dS in a group.
    pub(super) fn largest_gradient(&self, group: &Group<'_>, sides: Sides) -> amax::Range {
        let Some(model) = self.model else { return amax::Range::default() };
        let keys = &Keys::new(*group, self.inputs, self.model);
        let (copies, query_sums, ds_most) = (&[][..], &[][..], Vec::new());
        let context =
            Context { of: self, problem: group.problem, group, sides, keys, copies, query_sums, ds_most };
        let pieces = group.pieces();
        pieces
            .iter()
            .map(|piece| context.largest_gradient(model, piece))
            .fold(amax::Range::default(), amax::Range::or)
    }

    /// Returns a group's gradients. Pieces are computed by themselves and then added in order.
    pub(super) fn group(&self, group: &Group<'_>, sides: Sides, parallel: bool) -> GroupBackward {
        let problem = group.problem;
        // Nothing is dithered where roundings are replayed.
        let dithers = self.model.filter(|_| self.replay.is_none());
        let mut context = Context {
            of: self,
            problem,
            group,
            sides,
            keys: &Keys::new(*group, self.inputs, dithers),
            copies: &if dithers.is_some() && sides.kv {
                query_copies(self.inputs, group)
            } else {
                Vec::new()
            },
            query_sums: &self.model.map_or(Vec::new(), |model| query_sums(model, group, sides)),
            ds_most: Vec::new(),
        };
        if let Some(model) = self.model.filter(|model| model.scales_tiles() && self.errors.ds_most.is_none())
        {
            context.ds_most = context.largest_gradients(model, parallel);
        }
        let rows = if sides.kv { group.kv.len() } else { 0 };
        let empty = || GroupGradients {
            dq: Vec::new(),
            dk: Array2::zeros((rows, problem.dims.qk)),
            dv: Array2::zeros((rows, problem.dims.v)),
        };
        let (mut exact, mut errors) =
            (empty(), self.model.map(|_| Errors { linear: empty(), dithered: None }));
        let mut sinks = Vec::new();
        for held in group.pieces().chunks(HELD) {
            let results = map(parallel, held.to_vec(), |piece| (context.piece(&piece), piece));
            for ((from, from_errors, sink), piece) in results {
                sinks.push((piece.head, sink));
                exact.add(&piece, from);
                if let (Some(to), Some(from)) = (&mut errors, from_errors) {
                    to.add(&piece, from);
                }
            }
        }
        let bound = self.model.zip(errors).map(|(model, errors)| bounds(group, model, &exact, errors));
        GroupBackward { exact, bound, sinks }
    }
}

/// Returns the number of copies of each query of a group, head after head.
fn query_copies(inputs: &InputViews<'_>, group: &Group<'_>) -> Vec<f64> {
    let of_head = |head: usize| {
        (0..group.q.len()).map(move |query| lanes_hash(inputs, TensorName::Q, group, query, head))
    };
    copies_of(group.heads().flat_map(of_head))
}

/// Returns `g` of the sums over queries, for each key of a group; none where these sums are not wanted.
fn query_sums(model: &Model, group: &Group<'_>, sides: Sides) -> Vec<f64> {
    let keys = if sides.kv { 0..group.kv.len() } else { 0..0 };
    keys.map(|key| model.query_sum(group.queries_of(key))).collect()
}

impl Errors<GroupGradients> {
    fn add(&mut self, piece: &QueryRange, from: Errors<PieceGradients>) {
        if self.dithered.is_none() && from.dithered.is_some() {
            self.dithered = Some(Dithered::of(|| self.linear.zeros()));
        }
        if let Some(to) = &mut self.dithered {
            // Every piece has a dq of its own, one of zeros where it has no noise.
            let Dithered { rounding, noise } =
                from.dithered.unwrap_or_else(|| Dithered::of(|| from.linear.zeros()));
            to.rounding.add(piece, rounding);
            to.noise.add(piece, noise);
        }
        self.linear.add(piece, from.linear);
    }
}

impl GroupGradients {
    fn add(&mut self, piece: &QueryRange, from: PieceGradients) {
        let mut dk = self.dk.slice_mut(s![from.keys.clone(), ..]);
        // A sum with a single row or column would repeat that row or column.
        assert_eq!(dk.dim(), from.dk.dim(), "shape of a piece's dk");
        dk += &from.dk;
        let mut dv = self.dv.slice_mut(s![from.keys, ..]);
        assert_eq!(dv.dim(), from.dv.dim(), "shape of a piece's dv");
        dv += &from.dv;
        self.dq.push((piece.clone(), from.dq));
    }

    /// Returns every matrix, in the same order for any gradients of one group.
    fn matrices(&mut self) -> impl Iterator<Item = &mut Array2<f64>> {
        [&mut self.dk, &mut self.dv].into_iter().chain(self.dq.iter_mut().map(|(_, dq)| dq))
    }
}

/// Turns summed errors into both tiers' bounds.
fn bounds(
    group: &Group<'_>,
    model: &Model,
    exact: &GroupGradients,
    errors: Errors<GroupGradients>,
) -> GroupBounds {
    let Errors { linear: mut worst, dithered } = errors;
    let mut dithered = dithered.map(|Dithered { mut rounding, noise: mut dithered }| {
        let pieces = [&worst, &rounding, &dithered].map(|errors| errors.dq.len());
        assert_eq!(pieces, [exact.dq.len(); 3], "pieces with errors of dq");
        let sums = worst.matrices().zip(rounding.matrices()).zip(dithered.matrices());
        for ((linear, rounding), noise) in sums {
            Zip::from(noise).and(&mut *linear).and(&*rounding).for_each(|noise, linear, &rounding| {
                *noise = if rounding == 0.0 { f64::INFINITY } else { *linear + noise.sqrt().min(rounding) };
                *linear += rounding;
            });
        }
        dithered
    });
    for bound in [Some(&mut worst), dithered.as_mut()].into_iter().flatten() {
        finish_bounds(group, model, exact, bound);
    }
    GroupBounds { worst, dithered }
}

/// Adds underflow and the final rounding, which needs the whole sum.
fn finish_bounds(group: &Group<'_>, model: &Model, exact: &GroupGradients, bound: &mut GroupGradients) {
    use TensorName::{Dk, Dq, Dv};
    let finish =
        |name: TensorName, bound: &mut Array2<f64>, exact: &Array2<f64>, terms: &dyn Fn(usize) -> usize| {
            assert_eq!(bound.dim(), exact.dim(), "shape of a gradient's bounds");
            for (row, (mut bound, exact)) in bound.outer_iter_mut().zip(exact.outer_iter()).enumerate() {
                let of_row = model.gradient_row(name, terms(row));
                bound.zip_mut_with(&exact, |bound, exact| {
                    // Nothing widens an infinity.
                    if *bound != 0.0 && *bound != f64::INFINITY {
                        *bound = of_row.bound(*exact, *bound);
                    }
                });
            }
        };
    finish(Dk, &mut bound.dk, &exact.dk, &|key| group.queries_of(key));
    finish(Dv, &mut bound.dv, &exact.dv, &|key| group.queries_of(key));
    for ((piece, bound), (_, exact)) in bound.dq.iter_mut().zip(&exact.dq) {
        finish(Dq, bound, exact, &|row| group.keys_of(piece.rows.start + row));
    }
}

/// The data that every tile of a piece reads.
struct Context<'a, 'i, 's> {
    of: &'a Backward<'a, 'i, 's>,
    problem: &'a Problem,
    group: &'a Group<'a>,
    sides: Sides,
    keys: &'a Keys<'a, 'i>,
    /// The numbers of [`query_copies`], where sums over queries are wanted.
    copies: &'a [f64],
    /// The numbers of [`query_sums`].
    query_sums: &'a [f64],
    /// The numbers of [`Context::largest_gradients`], where they are needed and not given.
    ds_most: Vec<f64>,
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
struct Statistics {
    lse: f64,
    /// The most by which the subject's own LSE may differ from `lse`; 0 where `lse` is the subject's own.
    lse_error: f64,
    d: f64,
    d_error: f64,
    /// The largest magnitude of dS in a tile that the row has a part of, where bounds need it.
    ds_most: f64,
}

/// The query side of one tile of rows.
struct QueryTile {
    rows: Range<usize>,
    q: Array2<f64>,
    dout: Array2<f64>,
    statistics: Vec<Statistics>,
    /// The number of copies of each query in its group.
    copies: Vec<f64>,
}

/// Neighbouring columns of a tile that one of its rows sees.
struct Stretch {
    local: usize,
    visible: Range<usize>,
}

impl Stretch {
    /// Returns the stretch's part of a strip.
    fn of<'s>(&self, strip: &'s mut Array2<f64>) -> &'s mut [f64] {
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

/// Errors of a tile's weights and logit gradients, for dv, dk and dq each.
struct BoundStrips {
    /// The errors that add up.
    linear: [Array2<f64>; 3],
    /// Roundings that are noise; no columns where there is none.
    rounding: [Array2<f64>; 3],
    /// Whether there is any noise.
    is_dithered: bool,
}

/// The certified sums over a tile.
struct Certificate {
    /// Whether the sum over keys is certified, for each row.
    rows: Vec<bool>,
    /// Whether the sum over queries is certified, for each column.
    columns: Vec<bool>,
}

impl Context<'_, '_, '_> {
    fn piece(&self, piece: &QueryRange) -> (PieceGradients, Option<Errors<PieceGradients>>, SinkSum) {
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
    fn largest_gradients(&self, model: &Model, parallel: bool) -> Vec<f64> {
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

    fn largest_gradient(&self, model: &Model, piece: &QueryRange) -> amax::Range {
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

    fn query_tile(&self, head: usize, rows: Range<usize>) -> QueryTile {
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

    fn add_sink(&self, head: usize, tile: &QueryTile, to: &mut SinkSum) {
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

/// `g` of the sums that the pairs of one row take part in ([`Model::query_sum`], [`Model::key_sum`]).
#[derive(Clone, Copy)]
struct RowSums<'a> {
    /// Those over queries, of each visible key; none where they are not wanted.
    by_query: &'a [f64],
    /// That over keys.
    by_key: f64,
}

impl RowSums<'_> {
    fn of(&self, column: usize) -> (f64, f64) {
        (self.by_query.get(column).copied().unwrap_or(0.0), self.by_key)
    }
}

/// The pairs of one stretch, apart from what its strips hold.
struct Pairs<'a> {
    softmax: &'a Softmax,
    row: Statistics,
    /// The logits and `dP − D`.
    kept: &'a [(f64, f64)],
}

impl Pairs<'_> {
    /// Returns the pair of a column: its weight is `p`, and its products have magnitudes that sum to `a` and `b`.
    #[inline(always)]
    fn at(&self, column: usize, p: f64, [a, b]: [f64; 2]) -> GradientPair {
        let Statistics { lse, lse_error, d_error, ds_most, .. } = self.row;
        let (logit, x) = self.kept[column];
        let derivative = self.softmax.cap_derivative(logit);
        GradientPair { logit, lse, lse_error, p, x, derivative, a, b, d_error, ds_most }
    }
}

/// Turns the magnitudes of one stretch into errors. On entry, the strips of dv and dk hold the magnitudes of `⟨q, k⟩` and
/// of `⟨dout, v⟩`.
fn bound_stretch(
    model: &Model,
    pairs: &Pairs<'_>,
    sums: RowSums<'_>,
    stretch: &Stretch,
    p: &[f64],
    certificate: &Certificate,
    strips: &mut BoundStrips,
) {
    let row = certificate.rows[stretch.local];
    let columns = &certificate.columns[stretch.visible.clone()];
    let [dv, dk, dq] = strips.linear.each_mut().map(|strip| stretch.of(strip));
    if !strips.is_dithered {
        for column in 0..p.len() {
            let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
            let error = model.gradient_pair(&pair, sums.of(column));
            dv[column] = error.dv + error.p.most;
            dk[column] = error.dk + error.ds.most;
            dq[column] = error.dq + error.ds.most;
        }
        return;
    }
    let [dv_rounding, dk_rounding, dq_rounding] = strips.rounding.each_mut().map(|strip| stretch.of(strip));
    let split = |linear: f64, Rounding { most, is_noise }: Rounding, certified: bool| {
        if is_noise && certified { (linear, most) } else { (linear + most, 0.0) }
    };
    for column in 0..p.len() {
        let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
        let error = model.gradient_pair(&pair, sums.of(column));
        (dv[column], dv_rounding[column]) = split(error.dv, error.p, columns[column]);
        (dk[column], dk_rounding[column]) = split(error.dk, error.ds, columns[column]);
        (dq[column], dq_rounding[column]) = split(error.dq, error.ds, row);
    }
}

/// Replays one stretch: rounds its weights and logit gradients, and turns magnitudes into the errors that are left. On
/// entry, the strips of dv and dk hold what those of [`bound_stretch`] do.
fn replay_stretch(
    model: &Model,
    profile: &NumericProfile,
    pairs: &Pairs<'_>,
    sums: RowSums<'_>,
    stretch: &Stretch,
    of_row: [&mut Array2<f64>; 2],
    strips: &mut BoundStrips,
) {
    let [dv, dk, dq] = strips.linear.each_mut().map(|strip| stretch.of(strip));
    let [p, ds] = of_row.map(|strip| stretch.of(strip));
    for column in 0..p.len() {
        let pair = pairs.at(column, p[column], [dv[column], dk[column]]);
        let replayed = model.replayed_gradient_pair(profile, &pair, sums.of(column));
        (p[column], ds[column]) = (replayed.p, replayed.ds);
        (dv[column], dk[column], dq[column]) = (replayed.dv, replayed.dk, replayed.dq);
    }
}

/// Returns the squares of a matrix's elements, each row times its number of copies. A row counts once where copies were
/// not counted.
fn squares(factor: &ArrayView2<'_, f64>, copies: &[f64]) -> Array2<f64> {
    assert!(copies.is_empty() || copies.len() == factor.nrows(), "a count for each row, or none at all");
    let mut squares = factor.mapv(|x| x * x);
    for (mut row, copies) in squares.outer_iter_mut().zip(copies) {
        row *= *copies;
    }
    squares
}

/// The most rows, or columns, of a tile whose weights are compared with each other.
const SAMPLES: usize = 8;

impl Certificate {
    /// Returns the certificate of a tile. Spread is measured for every sum. Weights that are alike are alike
    /// everywhere, by a law of the data and not of one row: the mean over samples is compared with the limit. Copies of
    /// one query or key are counted one by one elsewhere.
    fn new(tile: &QueryTile, seen: &[Stretch], kept: &[Vec<(f64, f64)>], p: &Array2<f64>) -> Certificate {
        let mut columns = vec![Spread::default(); p.ncols()];
        let mut rows = vec![Spread::default(); p.nrows()];
        for (Stretch { local, visible }, kept) in seen.iter().zip(kept) {
            let lse = tile.statistics[*local].lse;
            for (column, (logit, _)) in visible.clone().zip(kept) {
                columns[column].add(logit - lse);
                rows[*local].add(*logit);
            }
        }
        let fill = |axis: Axis| {
            let step = p.len_of(axis).div_ceil(SAMPLES).max(1);
            let seen = |line: ArrayView1<'_, f64>| line.iter().copied().filter(|p| *p != 0.0).collect();
            let lines: Vec<Vec<f64>> = p.axis_iter(axis).step_by(step).map(seen).collect();
            let shares = lines.iter().filter(|line| !line.is_empty()).map(|line| shared_share(line));
            let (count, sum) = shares.fold((0.0, 0.0), |(count, sum), share| (count + 1.0, sum + share));
            fill_enough(sum / count)
        };
        let certified = |sums: &[Spread], axis: Axis| {
            let wide: Vec<bool> = sums.iter().map(Spread::is_wide).collect();
            if wide.contains(&true) && fill(axis) { wide } else { vec![false; sums.len()] }
        };
        Certificate { rows: certified(&rows, Axis(0)), columns: certified(&columns, Axis(1)) }
    }
}

impl BoundStrips {
    /// Returns strips of magnitudes, which become errors row by row.
    fn new([a, b]: [Array2<f64>; 2], certificate: &Certificate) -> BoundStrips {
        let is_dithered = certificate.rows.contains(&true) || certificate.columns.contains(&true);
        let zeros = || Array2::zeros(a.raw_dim());
        let noise = || if is_dithered { zeros() } else { Array2::zeros((a.nrows(), 0)) };
        let (rounding, c) = ([noise(), noise(), noise()], zeros());
        BoundStrips { rounding, linear: [a, b, c], is_dithered }
    }
}
