//! The forward pass of one piece.

use multiversion::multiversion;
use ndarray::{Array1, Array2, ArrayViewMut1, Axis, Zip, s};

use super::answer::{Answer, Tiers};
use super::exponential;
use super::pieces::{
    Group, KEY_TILE, Keys, QueryRange, STRIP_MAX, add_product, clear_others, clip, gather, products_of_tiles,
    row_mut, row_of, tiles,
};
use super::unit::{Codes, Weighed};
use crate::envelope::dither::{Spread, fill_enough, shared_share};
use crate::envelope::{BoundTier, Model, NOISE, PairError, RowStatistics, WeightRounding};
use crate::replay::{Met, Replay, ReplayedLaunch, Walked, of_head};
use crate::{ForwardResults, InputViews, Intervals, Problem, Stored, TensorName};

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

    /// Writes the piece's rows to their places in the results.
    pub(super) fn store(&self, group: &Group<'_>, piece: &QueryRange, to: &mut ForwardResults) {
        let mut out = to.out.index_axis_mut(Axis(1), piece.head);
        // A single column would be repeated without an error.
        assert_eq!(self.out.dim(), (piece.rows.len(), out.ncols()), "shape of a piece's out");
        assert_eq!(self.lse.len(), piece.rows.len(), "length of a piece's lse");
        for (local, query) in piece.rows.clone().enumerate() {
            let row = group.q.place(query);
            out.row_mut(row).assign(&self.out.row(local));
            to.lse[[piece.head, row]] = self.lse[local];
        }
        let max_logit = &mut to.max_logit[piece.head];
        *max_logit = max_logit.max(self.max_logit);
    }
}

/// Results that are asked for, with the launches of a replay in order of sequences.
pub(super) struct View<'a> {
    pub(super) model: Option<Model>,
    pub(super) replay: Option<(&'a Replay, &'a [&'a ReplayedLaunch])>,
}

/// Returns the results of a piece's rows in each view, computed tile by tile. Its loops over keys are inlined, so as to
/// be vector code as well.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(super) fn piece(
    inputs: &InputViews<'_>,
    (group, keys): (&Group<'_>, &Keys<'_, '_>),
    piece: &QueryRange,
    views: &[View<'_>],
) -> Vec<Answer<PieceForward>> {
    let problem = group.problem;
    let empty = |statistic: f64| PieceForward::new(piece.rows.len(), problem.dims.v, statistic);
    let tiers = |_: &Model| Tiers {
        worst: empty(0.0),
        dithered: PieceForward { max_logit: f64::INFINITY, ..empty(0.0) },
    };
    let answer =
        |view: &View<'_>| Answer { exact: empty(f64::NEG_INFINITY), bound: view.model.as_ref().map(tiers) };
    let mut answers: Vec<_> = views.iter().map(answer).collect();
    let replay = views.iter().find_map(|view| view.model.as_ref().zip(view.replay));
    let launches = replay.map(|(_, (_, launches))| of_head(launches, group.sequence, piece.head));
    let codes = replay.and_then(|(model, _)| Codes::of(inputs, group, piece.head, model));
    for rows in group.row_tiles(piece.rows.clone(), STRIP_MAX) {
        let at = rows.start - piece.rows.start;
        let q = gather(inputs, TensorName::Q, group, rows.clone(), piece.head);
        let sink = problem.sink(piece.head, inputs.sink);
        let mut tile = Tile::new(group, keys, (&q, codes.as_ref()), rows.clone(), sink);
        // Every model has the same magnitudes.
        let model = views.iter().find_map(|view| view.model.as_ref());
        let mut magnitudes = model.map(|model| tile.magnitudes(keys, &q, model));
        for (index, (view, answer)) in views.iter().zip(&mut answers).enumerate() {
            let is_last = index + 1 == views.len();
            let magnitudes = if is_last { magnitudes.take() } else { magnitudes.clone() };
            let errors = view.model.as_ref().zip(magnitudes).map(|(model, magnitudes)| {
                match (view.replay, &launches) {
                    (Some((replay, _)), Some(launches)) => {
                        let of_rows = (replay, launches.as_slice(), rows.start);
                        tile.replay(keys, codes.as_ref(), model, magnitudes, of_rows)
                    }
                    _ => tile.errors(keys, model, magnitudes),
                }
            });
            tile.write(keys, at, &mut answer.exact);
            if let (Some(model), Some(errors), Some(bound)) = (&view.model, errors, &mut answer.bound) {
                tile.write_bound(keys, at, model, &errors, &answer.exact, bound);
            }
        }
    }
    answers
}

/// Logits and weights of one tile of rows against the keys that any of them sees.
struct Tile {
    /// The keys of the columns.
    keys: std::ops::Range<usize>,
    /// The visible columns of each row.
    visible: Vec<Intervals>,
    rows: Vec<RowStatistics>,
    /// The logits `s`, valid in visible columns only.
    logits: Array2<f64>,
    /// The weights `exp(s − max)`, 0 in hidden columns.
    weights: Array2<f64>,
    /// `|q·k|`, where the products are those of a matrix unit.
    products: Option<Array2<f64>>,
    /// `Σ weights · v`, where that is a matrix unit's sum.
    numerators: Option<Array2<f64>>,
}

impl Tile {
    #[inline(always)]
    fn new(
        group: &Group<'_>,
        operands: &Keys<'_, '_>,
        (q, codes): (&Array2<f64>, Option<&Codes<'_, '_>>),
        rows: std::ops::Range<usize>,
        sink: Option<f64>,
    ) -> Tile {
        let keys = group.seen_by_any(rows.clone());
        let mut logits = match codes {
            None => products_of_tiles(q, keys.clone(), |columns| operands.k(columns)),
            Some(codes) => codes.products(rows.clone(), keys.clone()),
        };
        let products = codes.map(|_| logits.mapv(f64::abs));
        let mut weights = Array2::zeros(logits.raw_dim());
        let mut tile_rows = Vec::with_capacity(rows.len());
        let mut visible = Vec::with_capacity(rows.len());
        for (local, i) in rows.enumerate() {
            let columns = clip(&group.seen(i), &keys);
            let [logits, weights] = [row_mut(&mut logits, local), row_mut(&mut weights, local)];
            tile_rows.push(softmax_row(group.problem, &columns, logits, weights, sink));
            visible.push(columns);
        }
        Tile { keys, visible, rows: tile_rows, logits, weights, products, numerators: None }
    }

    /// Writes out, lse and max_logit of the tile's rows.
    #[inline(always)]
    fn write(&self, operands: &Keys<'_, '_>, at: usize, to: &mut PieceForward) {
        let mut out = to.out.slice_mut(s![at..at + self.rows.len(), ..]);
        match &self.numerators {
            Some(numerators) => out.assign(numerators),
            None => out.assign(&self.weighted_values(operands)),
        }
        for (local, row) in self.rows.iter().enumerate() {
            to.lse[at + local] = row.lse;
            if row.keys > 0 {
                out.row_mut(local).mapv_inplace(|value| value / row.sum);
                let logits = row_of(&self.logits, local);
                to.max_logit =
                    self.visible[local].clone().map(|column| logits[column]).fold(to.max_logit, f64::max);
            }
        }
    }

    /// Returns `Σ weights · v`.
    fn weighted_values(&self, operands: &Keys<'_, '_>) -> Array2<f64> {
        let mut numerators = Array2::zeros((self.rows.len(), operands.dim_v()));
        for tile in tiles(self.keys.clone(), KEY_TILE) {
            let values = operands.v(tile.clone());
            add_product(&mut numerators, &self.weights, &values, (&tile, &self.keys));
        }
        numerators
    }

    /// Returns `Σ|q||k|` of the tile, or `|q·k|` where the products are those of a matrix unit.
    fn magnitudes(&mut self, operands: &Keys<'_, '_>, q: &Array2<f64>, model: &Model) -> Array2<f64> {
        if let Some(products) = self.products.take() {
            return products;
        }
        let magnitude = |input: f64| model.magnitude(input);
        let k_abs = |columns| operands.k(columns).mapv_into(magnitude);
        products_of_tiles(&q.mapv(magnitude), self.keys.clone(), k_abs)
    }

    /// Returns the errors of the tile's weights.
    #[inline(always)]
    fn errors(&self, operands: &Keys<'_, '_>, model: &Model, magnitudes: Array2<f64>) -> Errors {
        let mut errors = Errors::new(magnitudes);
        let copies = &operands.copies[self.keys.clone()];
        for local in 0..self.rows.len() {
            errors.weights[local] = self.bound_row(local, model, copies, &mut errors);
        }
        errors
    }

    /// Rounds the tile's weights as the subject does. Returns the errors that are left.
    #[inline(always)]
    fn replay(
        &mut self,
        operands: &Keys<'_, '_>,
        codes: Option<&Codes<'_, '_>>,
        model: &Model,
        magnitudes: Array2<f64>,
        (replay, launches, first): (&Replay, &[&ReplayedLaunch], usize),
    ) -> Errors {
        let mut errors = Errors::new(magnitudes);
        let codes = codes.filter(|codes| codes.has_numerators());
        let mut partial = model.partial_code().map(|code| PartialOut::new(code, operands, &self.keys, model));
        let zeros = || Array2::zeros((self.rows.len(), operands.dim_v()));
        self.numerators = (codes.is_some() || partial.is_some()).then(zeros);
        errors.codes = partial.as_ref().map(|_| zeros());
        for local in 0..self.rows.len() {
            let seen = self.visible[local].moved(|column| self.keys.start + column);
            let walk = replay.walk(launches, first + local, &seen);
            errors.is_known[local] = walk.is_some();
            let walk = walk.unwrap_or_default();
            self.replay_row(local, (model, codes), replay, (&walk, partial.as_mut()), &mut errors);
        }
        errors
    }

    /// Replays one row of [`Tile::replay`].
    #[inline(always)]
    fn replay_row(
        &mut self,
        local: usize,
        (model, codes): (&Model, Option<&Codes<'_, '_>>),
        replay: &Replay,
        (walk, mut partial): (&[Walked], Option<&mut PartialOut>),
        errors: &mut Errors,
    ) {
        let (row, visible) = (&self.rows[local], self.visible[local].clone());
        let logits = row_of(&self.logits, local);
        let weights = row_mut(&mut self.weights, local);
        let left = row_mut(&mut errors.linear, local);
        clear_others(left, &visible);
        let (g, of_row) = (model.value_sum(row.keys), model.of_row(row));
        let (mut max_error, mut largest) = (0.0f64, 0.0f64);
        let mut weight_errors = 0.0;
        for column in visible.parts().flatten() {
            let weight = weights[column] / row.sum;
            let error = of_row.pair(logits[column], weight, left[column], g).weight;
            weight_errors += error;
            largest = largest.max(if weight > 0.0 { error / weight } else { 0.0 });
            left[column] = model.logit_error(left[column], logits[column]);
            max_error = max_error.max(left[column]);
        }
        errors.weights[local] = weight_errors;
        let tiles = walk.iter().map(|launch| replay.tiles(&launch.keys).count()).sum();
        let relative = model.replayed_row_error(row, max_error, tiles);
        let profile = &replay.profile;
        let sum_error = model.replayed_sum_error(row, largest);
        // A kernel that merges adds the sink after the last merge, and others add it to their only launch.
        let sink = row.sink.filter(|_| !model.merges());
        let mut weighed = Vec::new();
        let mut bases = Bases::default();
        // The out of each launch becomes a code, or nothing is known of the row.
        let are_codes = || walk.iter().all(|launch| launch.makes_code) && Model::knows_shares(sum_error);
        errors.is_known[local] &= partial.is_none() || are_codes();
        for Walked { keys: launch, .. } in walk {
            // Weights are rounded below.
            let launch_sum: f64 = launch.iter().map(|met| weights[met.key - self.keys.start]).sum();
            let seen = || launch.iter().map(|met| logits[met.key - self.keys.start]);
            let own_lse = (profile.weights == WeightRounding::AfterNormalisation)
                .then(|| log_sum_exp(seen().chain(sink)));
            bases.fill(replay.tiles(launch), own_lse, row.max, |met| logits[met.key - self.keys.start]);
            let mut computed = bases.weights.iter();
            for (tile, (base, share)) in replay.tiles(launch).zip(&bases.tiles) {
                let columns = || tile.iter().map(|met| met.key - self.keys.start);
                weighed.clear();
                for (column, &weight) in columns().zip(computed.by_ref()) {
                    let (logit, error) = (logits[column], left[column]);
                    let (weight, tie) = match own_lse {
                        Some(_) => model.replayed_normalised_weight(
                            profile,
                            row,
                            weight,
                            [logit, *base],
                            [error, sum_error],
                        ),
                        None => {
                            model.replayed_weight(profile, row, weight, [logit, *base], [error, max_error])
                        }
                    };
                    if codes.is_some() {
                        let rounded = weight * model.weight_scale();
                        weighed.push(Weighed { rounded, is_near_tie: tie > 0.0 });
                    }
                    weights[column] = weight * share;
                    let near = tie * share / row.sum;
                    let weight = weight * share / row.sum;
                    let most = weight + near;
                    left[column] =
                        near + relative * most + g * model.weight_factor(most, row.sum) + model.flushed(most);
                }
                if let (Some(codes), Some(numerators)) = (codes, &mut self.numerators) {
                    let start = self.keys.start;
                    let uncertain = |key: usize, steps: usize| {
                        let most = (weights[key - start] / row.sum).max(left[key - start]);
                        left[key - start] += model.apart(steps) * model.weight_factor(2.0 * most, row.sum);
                    };
                    let shared = (profile.kv_tile.max(1), *share / model.weight_scale());
                    let to = match &mut partial {
                        Some(partial) => partial.sums.view_mut(),
                        None => numerators.row_mut(local),
                    };
                    codes.add_tile(tile, &weighed, shared, to, uncertain);
                }
            }
            let columns = || launch.iter().map(|met| met.key - self.keys.start);
            if let (Some(partial), Some(numerators), Some(of_codes)) =
                (&mut partial, &mut self.numerators, &mut errors.codes)
            {
                if codes.is_none() {
                    // Sums in f64 stand in for the unit's.
                    let PartialOut { values: [values, _], sums, .. } = &mut **partial;
                    columns().for_each(|column| sums.scaled_add(weights[column], &values.row(column)));
                }
                let of_launch = (model, row, [launch_sum, sum_error]);
                let to = [numerators.row_mut(local), of_codes.row_mut(local)];
                partial.add_to(of_launch, (columns(), left), to);
                // The code has taken up the errors of what it was made of.
                columns().for_each(|column| left[column] = 0.0);
            }
        }
    }

    /// Writes the bounds of the tile's rows, from the errors of their weights.
    #[inline(always)]
    fn write_bound(
        &self,
        operands: &Keys<'_, '_>,
        at: usize,
        model: &Model,
        errors: &Errors,
        exact: &PieceForward,
        to: &mut Tiers<PieceForward>,
    ) {
        to.worst.max_logit = to.worst.max_logit.max(errors.max_logit);
        let ErrorSums { mut worst, dithered, value_max } =
            errors.sums(operands, &self.keys, &self.visible, model);
        if let Some(codes) = &errors.codes {
            worst += codes;
        }
        for (local, row) in self.rows.iter().enumerate() {
            let finish = |tier: BoundTier, sums: &Array2<f64>, bound: &mut PieceForward| {
                let denominator = model.denominator(row, errors.weights[local], tier);
                let outs = exact.out.row(at + local).into_iter().zip(sums.row(local));
                let of_row = model.out_row(row, denominator, value_max[local]);
                for (bound, (&out, &sum)) in bound.out.row_mut(at + local).iter_mut().zip(outs) {
                    *bound = if row.keys == 0 { 0.0 } else { of_row.bound(out, sum) };
                }
                let sees_nothing = row.lse == f64::NEG_INFINITY;
                bound.lse[at + local] = if sees_nothing { 0.0 } else { model.lse_bound(row, denominator) };
            };
            finish(BoundTier::Worst, &worst, &mut to.worst);
            if !errors.is_known[local] {
                to.worst.out.row_mut(at + local).fill(f64::INFINITY);
            }
            match dithered.as_ref().filter(|_| errors.is_dithered[local]) {
                Some(dithered) => finish(BoundTier::Dithered, dithered, &mut to.dithered),
                None => {
                    to.dithered.out.row_mut(at + local).fill(f64::INFINITY);
                    to.dithered.lse[at + local] = f64::INFINITY;
                }
            }
        }
    }

    /// Turns the magnitudes of one row into errors. Returns `Σ p·θ`.
    #[inline(always)]
    fn bound_row(&self, local: usize, model: &Model, copies: &[f64], errors: &mut Errors) -> f64 {
        let row = &self.rows[local];
        let visible = &self.visible[local];
        let [logits, weights] = [&self.logits, &self.weights].map(|strip| row_of(strip, local));
        let is_wide = Spread::of(visible.clone().map(|column| logits[column])).is_wide();
        let of_row = || visible.clone().map(|column| weights[column]).collect::<Vec<_>>();
        let is_dithered = is_wide && fill_enough(shared_share(&of_row()));
        errors.is_dithered[local] = is_dithered;
        if is_dithered && errors.noise.is_empty() {
            errors.rounding = Array2::zeros(errors.linear.raw_dim());
            errors.noise = Array2::zeros(errors.linear.raw_dim());
        }
        let linear = row_mut(&mut errors.linear, local);
        clear_others(linear, visible);
        let (rounded, noise): (&mut [f64], &mut [f64]) = match is_dithered {
            true => (row_mut(&mut errors.rounding, local), row_mut(&mut errors.noise, local)),
            false => (&mut [], &mut []),
        };
        let (g, of_row) = (model.value_sum(row.keys), model.of_row(row));
        let mut weight_errors = 0.0;
        let mut max_logit = errors.max_logit;
        for column in visible.parts().flatten() {
            let (a, logit) = (linear[column], logits[column]);
            max_logit = max_logit.max(model.logit_error(a, logit));
            let PairError { weight, value, rounding } = of_row.pair(logit, weights[column] / row.sum, a, g);
            weight_errors += weight;
            if is_dithered && rounding.is_noise {
                linear[column] = value;
                rounded[column] = rounding.most;
                noise[column] = (NOISE * rounding.most).powi(2) * copies[column];
            } else {
                linear[column] = value + rounding.most;
            }
        }
        errors.max_logit = max_logit;
        weight_errors
    }
}

/// The weights of a launch's keys before they are rounded, each relative to the base of its tile: the running maximum,
/// or the launch's own LSE.
#[derive(Default)]
struct Bases {
    /// The weights, in the order in which the launch takes the keys.
    weights: Vec<f64>,
    /// The base of each tile, and `exp(base − row maximum)`.
    tiles: Vec<(f64, f64)>,
}

impl Bases {
    /// Fills in the weights of a launch whose keys have these logits. Exponentials of all keys are made together.
    fn fill<'m>(
        &mut self,
        tiles: impl Iterator<Item = &'m [Met]>,
        own_lse: Option<f64>,
        row_max: f64,
        logit: impl Fn(&Met) -> f64,
    ) {
        self.weights.clear();
        self.tiles.clear();
        let mut running_max = f64::NEG_INFINITY;
        for tile in tiles {
            running_max = tile.iter().map(&logit).fold(running_max, f64::max);
            let base = own_lse.unwrap_or(running_max);
            self.tiles.push((base, libm::exp(base - row_max)));
            self.weights.extend(tile.iter().map(|met| logit(met) - base));
        }
        exponential::exp(&mut self.weights);
    }
}

/// The out of one launch of a row, which is rounded to a code before it is merged.
struct PartialOut {
    code: Stored,
    /// The values of the tile's keys, and their magnitudes: keys × lanes.
    values: [Array2<f64>; 2],
    /// `Σ weights · v` of the launch, with weights relative to the row's maximum.
    sums: Array1<f64>,
}

impl PartialOut {
    fn new(
        code: Stored,
        operands: &Keys<'_, '_>,
        keys: &std::ops::Range<usize>,
        model: &Model,
    ) -> PartialOut {
        let values = operands.v(keys.clone());
        let magnitudes = values.mapv(|v| model.magnitude(v));
        PartialOut { code, sums: Array1::zeros(values.ncols()), values: [values, magnitudes] }
    }

    /// Adds the launch's out to the row's numerators, rounded, and to their errors how far another right one may be from
    /// it. The next launch begins anew. `left` are the errors of the launch's weights, relative to the row's sum.
    fn add_to(
        &mut self,
        (model, row, [launch_sum, sum_error]): (&Model, &RowStatistics, [f64; 2]),
        (columns, left): (impl Iterator<Item = usize>, &[f64]),
        [mut numerators, mut errors]: [ArrayViewMut1<'_, f64>; 2],
    ) {
        let sums = std::mem::replace(&mut self.sums, Array1::zeros(numerators.len()));
        // A launch whose weights vanish beside the row's has no share.
        if launch_sum == 0.0 {
            return;
        }
        let [_, magnitudes] = &self.values;
        let mut value_errors = Array1::<f64>::zeros(sums.len());
        columns.for_each(|column| value_errors.scaled_add(left[column], &magnitudes.row(column)));
        let (share, of_share) = (launch_sum / row.sum, model.partial_share_error(row, sum_error));
        for lane in 0..sums.len() {
            let out = sums[lane] / launch_sum;
            let error = model.partial_out_error(out, value_errors[lane] / share, (row.keys, sum_error));
            let code = self.code.round(out);
            let apart = [out - error, out + error].map(|other| (self.code.round(other) - code).abs());
            let apart = apart[0].max(apart[1]);
            numerators[lane] += launch_sum * code;
            errors[lane] += share * (apart + of_share * (code.abs() + apart));
        }
    }
}

/// Errors of a tile's weights, rows × keys, as coefficients of `|v|`.
struct Errors {
    /// The errors that add up.
    linear: Array2<f64>,
    /// The roundings of P that are noise; empty where no row is dithered.
    rounding: Array2<f64>,
    /// The squares of eight standard deviations of roundings that are noise; empty where no row is dithered.
    noise: Array2<f64>,
    /// `Σ p·θ` of each row.
    weights: Vec<f64>,
    is_dithered: Vec<bool>,
    /// The errors of merged codes, rows × lanes, where the outs of launches are codes that a replay makes.
    codes: Option<Array2<f64>>,
    /// Whether the bounds of each row are known. They are not where a row cannot be replayed.
    is_known: Vec<bool>,
    /// The largest error of a logit.
    max_logit: f64,
}

impl Errors {
    fn new(magnitudes: Array2<f64>) -> Errors {
        let rows = magnitudes.nrows();
        Errors {
            rounding: Array2::default((0, 0)),
            noise: Array2::default((0, 0)),
            weights: vec![0.0; rows],
            is_dithered: vec![false; rows],
            codes: None,
            is_known: vec![true; rows],
            max_logit: 0.0,
            linear: magnitudes,
        }
    }

    /// Returns the sums over the keys of a tile, of which each row sees its columns of `visible`.
    fn sums(
        &self,
        operands: &Keys<'_, '_>,
        keys: &std::ops::Range<usize>,
        visible: &[Intervals],
        model: &Model,
    ) -> ErrorSums {
        let is_dithered = self.is_dithered.contains(&true);
        for noise in [&self.rounding, &self.noise].into_iter().filter(|_| is_dithered) {
            assert_eq!(noise.dim(), self.linear.dim(), "shape of a dithered tile's roundings");
        }
        let zeros = || Array2::zeros((self.linear.nrows(), operands.dim_v()));
        let none = || if is_dithered { zeros() } else { Array2::default((0, 0)) };
        let (mut worst, mut rounding, mut noise) = (zeros(), none(), none());
        let mut of_keys = Vec::with_capacity(keys.len());
        for tile in tiles(keys.clone(), KEY_TILE) {
            let values = operands.v(tile.clone());
            of_keys.extend(values.rows().into_iter().map(|row| largest(row.iter().map(|v| v.abs()))));
            let v_abs = values.mapv_into(|v| model.magnitude(v));
            add_product(&mut worst, &self.linear, &v_abs, (&tile, keys));
            if is_dithered {
                add_product(&mut rounding, &self.rounding, &v_abs, (&tile, keys));
                add_product(&mut noise, &self.noise, &v_abs.mapv_into(|v| v * v), (&tile, keys));
            }
        }
        let dithered = is_dithered.then(|| {
            Zip::from(&mut noise).and(&worst).and(&rounding).for_each(|noise, linear, rounding| {
                *noise = linear + noise.sqrt().min(*rounding);
            });
            worst += &rounding;
            noise
        });
        let of_row = |seen: &Intervals| largest(seen.clone().map(|column| of_keys[column]));
        ErrorSums { worst, dithered, value_max: visible.iter().map(of_row).collect() }
    }
}

/// The errors of a tile's numerators, rows × lanes.
struct ErrorSums {
    /// In the worst case.
    worst: Array2<f64>,
    /// Where a row is dithered; `None` where none is.
    dithered: Option<Array2<f64>>,
    /// The largest magnitude of a value that each row sees.
    value_max: Vec<f64>,
}

/// Returns the largest of magnitudes, 0 of none.
fn largest(magnitudes: impl Iterator<Item = f64>) -> f64 {
    magnitudes.fold(0.0, f64::max)
}

/// Returns `ln Σ e^x`.
#[inline(always)]
fn log_sum_exp(logits: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = logits.clone().fold(f64::NEG_INFINITY, f64::max);
    max + libm::log(logits.map(|logit| libm::exp(logit - max)).sum::<f64>())
}

/// Turns products of the visible columns into logits, fills the weights and sums them up. The sink enters as a key
/// without a value. Returns the row's statistics.
#[inline(always)]
fn softmax_row(
    problem: &Problem,
    visible: &Intervals,
    logits: &mut [f64],
    weights: &mut [f64],
    sink: Option<f64>,
) -> RowStatistics {
    let scale = f64::from(problem.softmax.scale);
    for part in visible.parts() {
        logits[part].iter_mut().for_each(|logit| *logit = problem.softmax.cap(scale * *logit));
    }
    let extremes = |(low, high): (f64, f64), logit: f64| (low.min(logit), high.max(logit));
    let seen = visible.clone().map(|column| logits[column]);
    let (min, max) = seen.chain(sink).fold((f64::INFINITY, f64::NEG_INFINITY), extremes);
    let keys = visible.len();
    if max == f64::NEG_INFINITY {
        return RowStatistics { keys, max, max_abs: 0.0, range: 0.0, sum: 0.0, lse: f64::NEG_INFINITY, sink };
    }
    let mut sum = 0.0;
    for part in visible.parts() {
        let weights = &mut weights[part.clone()];
        weights.iter_mut().zip(&logits[part]).for_each(|(weight, logit)| *weight = logit - max);
        exponential::exp(weights);
        sum += weights.iter().sum::<f64>();
    }
    sum += sink.map_or(0.0, |sink| libm::exp(sink - max));
    let lse = max + libm::log(sum);
    RowStatistics { keys, max, max_abs: min.abs().max(max.abs()), range: max - min, sum, lse, sink }
}
