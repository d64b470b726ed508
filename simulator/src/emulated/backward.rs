//! The backward of a [`TiledKernel`].

use std::ops::Range;

use seamproof_oracle::{Format, Intervals, Pass, Quantity, Run, Softmax, TensorName};

use super::arithmetic::{HeadRows, RowSum, TileWeights, UnitArithmetic};
use super::columns::{Columns, Operand, padded};
use super::roundings::{Factor, Roundings};
use super::stages::{Pair, Stages};
use super::{BackwardLaunch, Placed, ScaledHead, TiledKernel, clip};
use crate::schedule::Descales;
use crate::{AttentionCall, GuardedTensor, Real};

/// Memory that all tiles of a launch use, one after the other.
pub(super) struct Buffers<T> {
    /// P and dS of a tile's queries against all keys, `[queries][keys]`, with 0 where a query does not see a key.
    weights: [Vec<T>; 2],
    /// Scores and dP of one query.
    of_row: [Vec<T>; 2],
    /// P and dS of one tile of keys.
    of_tile: [TileWeights<T>; 2],
    /// The sums of dq.
    dq: Vec<T>,
}

impl<T: Real> Buffers<T> {
    /// Returns empty buffers for a kernel with these roundings.
    pub(super) fn new(Roundings { p, ds, .. }: &Roundings) -> Buffers<T> {
        let of_tile = [*p, *ds].map(|format| TileWeights::new(0, 0, format));
        let pair = || [Vec::new(), Vec::new()];
        Buffers { weights: pair(), of_row: pair(), of_tile, dq: Vec::new() }
    }
}

/// Replaces what a buffer holds by zeros.
fn refill<T: Real>(buffer: &mut Vec<T>, count: usize) {
    buffer.clear();
    buffer.resize(count, T::ZERO);
}

impl<T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> TiledKernel<'_, T, A, S> {
    /// Runs all query heads of one KV head. dk and dv are summed over them and rounded once, or rounded for each head
    /// and then summed. Where heads have descales, those of each are in its own dk and dv before these are summed.
    pub(super) fn backward_segment(
        &self,
        call: &AttentionCall,
        (index, placed): (usize, &Placed<'_>),
        kv_head: usize,
        tensors: &mut BackwardLaunch<'_, T>,
        buffers: &mut Buffers<T>,
    ) {
        let stages = self.stages;
        let group = tensors.q.shape()[1] / tensors.k.shape()[1];
        let mut dk = vec![T::ZERO; placed.k.len() * tensors.k.shape()[2]];
        let mut dv = vec![T::ZERO; placed.v.len() * tensors.v.shape()[2]];
        let mut columns = [(); 2].map(|()| Columns::new());
        columns.iter_mut().for_each(|columns| columns.turn_to(kv_head));
        let is_descaled = !tensors.descales.is_empty();
        let stored = self.roundings.stored_heads.filter(|_| group > 1);
        let stored = stored.or(is_descaled.then_some(Format::F32));
        let mut of_group = stored.map(|_| [vec![T::ZERO; dk.len()], vec![T::ZERO; dv.len()]]);
        for head in stages.query_heads(kv_head, group) {
            let scaled = ScaledHead::new(head, call.softmax, tensors.descales, index);
            for tile in &placed.tiles {
                let (heads, sums) = ((&scaled, kv_head), [&mut dk[..], &mut dv[..]]);
                self.backward_tile(call, placed, heads, tile, &mut columns, sums, tensors, buffers);
            }
            if let Some((format, of_group)) = stored.zip(of_group.as_mut()) {
                self.store_head(call, &scaled, format, [&mut dk, &mut dv], of_group);
            }
        }
        let is_scaled = of_group.is_some();
        let [dk, dv] = of_group.unwrap_or([dk, dv]);
        let keys = placed.segment.kv.iter().flat_map(Run::real_rows);
        for (j, row) in keys.enumerate() {
            for (name, sums, to) in
                [(TensorName::Dk, &dk, &mut *tensors.dk), (TensorName::Dv, &dv, &mut *tensors.dv)]
            {
                let factor = if is_scaled { T::ONE } else { self.factor(name, call, 1.0) };
                self.store((name, factor), sums, j, to.format(), to.lane_mut(row, kv_head));
            }
        }
    }

    /// Returns the factor by which a summed gradient is multiplied at the end: the softmax's scale if dS lacks it, the
    /// descale of the codes, and that of weights or of dS.
    fn factor(&self, gradient: TensorName, call: &AttentionCall, descale: f32) -> T {
        let Roundings { folds_scale, factors, .. } = self.roundings;
        // A scale that dS has already is left out.
        let softmax = if folds_scale { Softmax { scale: 1.0, ..call.softmax } } else { call.softmax };
        let factor = self.stages.factor(gradient, &softmax) * T::from_f32(descale);
        factor
            * if gradient == TensorName::Dv { self.weight_descale() } else { T::from_f32(factors.ds.descale) }
    }

    /// Writes a gradient of one row, as codes where it has a factor.
    fn store(&self, (name, factor): (TensorName, T), sums: &[T], index: usize, format: Format, to: &mut [T]) {
        let own = self.roundings.factors.of_gradient(name);
        if own == Factor::ONE && !self.roundings.keeps_amax {
            return self.stages.store(name, factor, sums, index, format, to);
        }
        self.stages.store(name, factor, sums, index, Format::F32, to);
        self.count(Quantity::of(name).unwrap_or(Quantity::Dv), to);
        own.quantise(to, format);
    }

    /// Stores dk and dv of one query head in a format, adds them to those of its group, and clears them for the next
    /// head.
    fn store_head(
        &self,
        call: &AttentionCall,
        scaled: &ScaledHead,
        format: Format,
        [dk, dv]: [&mut Vec<T>; 2],
        [dk_of_group, dv_of_group]: &mut [Vec<T>; 2],
    ) {
        for (name, sums, to) in [(TensorName::Dk, dk, dk_of_group), (TensorName::Dv, dv, dv_of_group)] {
            let factor = self.factor(name, call, scaled.of_gradient(name));
            for (sum, to) in sums.iter_mut().zip(to) {
                *to += (factor * *sum).round(format);
                *sum = T::ZERO;
            }
        }
    }

    fn backward_tile(
        &self,
        call: &AttentionCall,
        placed: &Placed<'_>,
        (scaled, kv_head): (&ScaledHead, usize),
        (rows, tiles): &(Range<usize>, Vec<Range<usize>>),
        columns: &mut [Columns<T>; 2],
        [dk, dv]: [&mut [T]; 2],
        tensors: &mut BackwardLaunch<'_, T>,
        buffers: &mut Buffers<T>,
    ) {
        let TiledKernel { units, stages, .. } = self;
        let (head, dim_qk, dim_v) = (scaled.head, tensors.k.shape()[2], tensors.v.shape()[2]);
        let real = &placed.q[rows.clone()];
        let q = HeadRows { tensor: tensors.q, rows: real, head };
        let dout = HeadRows { tensor: tensors.dout, rows: &placed.dout[rows.clone()], head };
        let mut row_dots = stages.row_dots(units, dout, HeadRows { tensor: tensors.out, rows: real, head });
        if let Some(Descales { dout, .. }) = scaled.descales {
            stages.descale_dots(&mut row_dots, T::from_f32(dout));
        }
        let of_out = self.roundings.factors.out;
        if of_out != Factor::ONE {
            row_dots.iter_mut().for_each(|dot| *dot *= T::from_f32(of_out.descale));
        }
        let lse = stages.saved_lse(tensors.lse, head, real);
        let queries = Queries {
            scaled,
            seen: &placed.seen[rows.clone()],
            tiles,
            left: [q, dout],
            right: [(tensors.k, &placed.k), (tensors.v, &placed.v)]
                .map(|(tensor, rows)| Operand { tensor, rows }),
            lse: &lse,
        };
        self.weigh(&queries, columns, &mut row_dots, buffers);
        let Buffers { weights: all, of_tile, dq, .. } = buffers;
        let mut tiles = tiles.clone();
        units.order([head, rows.start], &mut tiles);
        refill(dq, rows.len() * dim_qk);
        for columns in tiles {
            let k = HeadRows { tensor: tensors.k, rows: &placed.k[columns.clone()], head: kv_head };
            for (tile, all) in of_tile.iter_mut().zip(&*all) {
                tile.load(all.chunks_exact(placed.k.len()), &columns, &placed.seen[rows.clone()]);
            }
            let [p, ds] = &mut *of_tile;
            let factor = self.scale_tile(ds);
            self.add_in_units(dq, factor, |to| stages.add_dq(units, to, ds, k));
            let to = &mut dk[columns.start * dim_qk..columns.end * dim_qk];
            self.add_in_units(to, factor, |to| stages.add_dk(units, to, ds, q));
            stages.add_dv(units, &mut dv[columns.start * dim_v..columns.end * dim_v], p, dout);
        }
        let factor = self.factor(TensorName::Dq, call, scaled.of_gradient(TensorName::Dq));
        let format = tensors.dq.format();
        for (local, i) in rows.clone().enumerate() {
            let to = tensors.dq.lane_mut(placed.segment.q.row(i), head);
            self.store((TensorName::Dq, factor), dq, local, format, to);
            let lse = lse[local];
            if let Some(dsink) = tensors.dsink.values_mut().get_mut(head).filter(|_| lse != T::NEG_INFINITY) {
                *dsink -= stages.sink_gradient(units, tensors.sink[head], lse, row_dots[local]);
            }
        }
    }

    /// Adds sums of a tile that were made in units of its factor of dS. The tile has an accumulator of its own.
    fn add_in_units(&self, to: &mut [T], factor: Option<T>, add: impl Fn(&mut [T])) {
        let Some(factor) = factor else { return add(to) };
        let (mut own, undone) = (vec![T::ZERO; to.len()], self.stages.undone(factor));
        add(&mut own);
        to.iter_mut().zip(own).for_each(|(to, own)| *to += own * undone);
    }

    /// Makes P and dS of a tile's queries against all keys ([`Buffers::weights`]). P is rounded, and dS too unless its
    /// factor is a tile's. Where D is a sum over keys, the queries' row dots become it.
    fn weigh(
        &self,
        queries: &Queries<'_, T>,
        columns: &mut [Columns<T>; 2],
        row_dots: &mut [T],
        Buffers { weights: [p, ds], of_row: [scores, dp], .. }: &mut Buffers<T>,
    ) {
        let Roundings { rounds_ds_weights, weighs_dots, .. } = self.roundings;
        let keys = queries.right[0].rows.len();
        [&mut *p, &mut *ds].into_iter().for_each(|all| refill(all, queries.seen.len() * keys));
        [&mut *scores, &mut *dp].into_iter().for_each(|of_row| refill(of_row, padded(keys)));
        for (local, seen) in queries.seen.iter().enumerate().filter(|(_, seen)| !seen.is_empty()) {
            self.dot(queries, (local, seen), columns, [scores, dp]);
            let row = local * keys..(local + 1) * keys;
            let weights = &mut p[row.clone()];
            for part in seen.parts() {
                let (softmax, lse) = (&queries.scaled.softmax, queries.lse[local]);
                let weights = &mut weights[part.clone()];
                weights.copy_from_slice(&scores[part]);
                self.stages.probabilities(&self.units, softmax, weights, lse);
            }
            if rounds_ds_weights {
                self.round_weights(Pass::Backward, &mut weights[seen.hull()]);
            }
            if weighs_dots {
                row_dots[local] = self.weighed_dot(queries, local, weights, dp);
            }
            let pairs = Pairs { weights, scores, dp, d: row_dots[local] };
            self.write_ds(queries.scaled, seen, &pairs, &mut ds[row]);
            if !rounds_ds_weights {
                self.round_weights(Pass::Backward, &mut weights[seen.hull()]);
            }
        }
    }

    /// Writes the scores and dP of a row with the keys that it sees, with descales in them. dP is 0 between two stretches
    /// of these keys.
    fn dot(
        &self,
        Queries { scaled, left: [q, dout], right: [k, v], .. }: &Queries<'_, T>,
        (local, seen): (usize, &Intervals),
        [keys, values]: &mut [Columns<T>; 2],
        [scores, dp]: [&mut [T]; 2],
    ) {
        let pass = |tensors: [&GuardedTensor<T>; 2]| (Pass::Backward, tensors.map(GuardedTensor::format));
        self.products(pass([q.tensor, k.tensor]), q.lane(local), (keys, k), seen, scores);
        self.products(pass([dout.tensor, v.tensor]), dout.lane(local), (values, v), seen, dp);
        seen.parts().for_each(|part| self.score(Pass::Backward, &scaled.softmax, &mut scores[part]));
        dp[seen.gap()].fill(T::ZERO);
        if let Some(Descales { v, dout, .. }) = scaled.descales {
            let descale = T::from_f32(dout * v);
            dp[seen.hull()].iter_mut().for_each(|dp| *dp *= descale);
        }
    }

    /// Returns `Σ P·dP` of a row, of the weights that dS is made of, added tile by tile.
    fn weighed_dot(&self, queries: &Queries<'_, T>, local: usize, weights: &[T], dp: &[T]) -> T {
        let mut sum: RowSum<T> = [T::ZERO; 4];
        for columns in queries.tiles {
            let hull = clip(&queries.seen[local], columns).hull();
            let keys = columns.start + hull.start..columns.start + hull.end;
            let dots: Vec<T> = keys.clone().map(|key| self.ds_weight(weights[key]) * dp[key]).collect();
            self.units.add_weights(&mut sum, keys.start, &dots);
        }
        self.units.total(&sum)
    }

    /// Returns the weight that dS is made of, where `weight` is rounded if dS is made of rounded ones.
    fn ds_weight(&self, weight: T) -> T {
        if self.roundings.rounds_ds_weights { weight * self.weight_descale() } else { weight }
    }

    /// Writes a row's dS, rounded unless its factor is a tile's.
    fn write_ds(&self, scaled: &ScaledHead, seen: &Intervals, pairs: &Pairs<'_, T>, to: &mut [T]) {
        let folded = if self.roundings.folds_scale { T::from_f32(scaled.bare_scale) } else { T::ONE };
        let Pairs { weights, scores, dp, d } = *pairs;
        for key in seen.parts().flatten() {
            let pair = Pair { weight: self.ds_weight(weights[key]), dp: dp[key], d, score: scores[key] };
            to[key] = self.stages.logit_gradient(&self.units, &scaled.softmax, pair) * folded;
        }
        let to = &mut to[seen.hull()];
        self.count(Quantity::Ds, to);
        if !self.roundings.scales_tiles {
            self.round_ds(to, T::ONE);
        }
    }

    /// Multiplies and rounds dS of a tile where its factor is the tile's. Returns the factor.
    fn scale_tile(&self, ds: &mut TileWeights<T>) -> Option<T> {
        let factor = self.roundings.scales_tiles.then(|| self.stages.tile_factor(ds, self.roundings.ds))?;
        for local in 0..ds.seen.len() {
            let seen = ds.seen[local].clone();
            self.round_ds(&mut ds.row_mut(local)[seen], factor);
        }
        Some(factor)
    }

    /// Multiplies dS by a factor and by its given scale, and rounds it.
    fn round_ds(&self, ds: &mut [T], factor: T) {
        let given = T::from_f32(self.roundings.factors.ds.scale);
        if [factor, given] != [T::ONE; 2] {
            ds.iter_mut().for_each(|ds| *ds = *ds * factor * given);
        }
        self.stages.round(Pass::Backward, ds, self.roundings.ds);
    }
}

/// A tile of queries of one head, with all keys of their segment.
struct Queries<'a, T> {
    scaled: &'a ScaledHead,
    /// The keys that each query sees.
    seen: &'a [Intervals],
    /// Tiles of keys.
    tiles: &'a [Range<usize>],
    /// q and dout.
    left: [HeadRows<'a, T>; 2],
    /// k and v.
    right: [Operand<'a, T>; 2],
    lse: &'a [T],
}

/// Pairs of one query with all keys.
struct Pairs<'a, T> {
    /// The weights that dS is made of.
    weights: &'a [T],
    scores: &'a [T],
    dp: &'a [T],
    /// D of the query.
    d: T,
}
