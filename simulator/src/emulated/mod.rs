//! A FlashAttention-style tiled attention kernel on the CPU, with the roundings of a real kernel.
//!
//! Inputs are in a narrow format, and products and sums are in f32 one after the other. The softmax is online over
//! tiles of keys, and P is rounded before the product with the values. The backward recomputes P from the saved LSE,
//! takes `D = rowsum(dout · out)` from the stored out, and rounds dS. A kernel with other [`Roundings`] normalises P
//! before it rounds it, makes D as `Σ P·dP`, or stores gradients of single heads. Codes in FP8 have [`Descales`], and dS
//! in FP8 may have a power of two for each tile, which is undone when the tile's products are added. What the kernel
//! quantises may have a [`Factor`] that is given. Rows are addressed only through runs (offset, step, real length,
//! span). Padding rows are never read; they are zeroed or left, as the call says. Production kernels are compared with
//! this CPU twin. The twin is itself compared with the oracle and shares no code with it.
//!
//! A [`TiledKernel`] is a loop over tiles. Its [`Stages`] say what is done, and its [`UnitArithmetic`] says on which
//! units.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;

use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Format, Intervals, Pass, Quantity, Run, Sink, Softmax, TensorName};

use crate::schedule::Descales;
use crate::{AttentionCall, GuardedTensor, Real, RowPolicy, Segment};

mod amax;
mod arithmetic;
mod columns;
pub mod hopper;
mod right;
mod roundings;
mod row;
mod stages;
mod tensor_core;

use amax::Maxima;
pub use arithmetic::{HeadRows, RowSum, Serial, TileWeights, UnitArithmetic, Weights};
use columns::Columns;
pub use hopper::Hopper;
pub use roundings::{Factor, Factors, Roundings};
use row::tiles_of;
pub use row::{Finished, Online};
pub use stages::{Pair, Right, Stages};
pub use tensor_core::TensorCore;

/// Tile sizes. They are parameters, and small ones put tile edges among few tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Query rows of a tile, at least 1.
    pub q: usize,
    /// Keys of a tile, at least 1.
    pub kv: usize,
}

/// Tensors of a forward launch: q and out `[rows, heads, dim]`, lse `[heads, rows, 1]`, max_logit `[heads, 1, 1]`.
pub struct ForwardLaunch<'a, T> {
    /// Queries.
    pub q: &'a GuardedTensor<T>,
    /// Keys.
    pub k: &'a GuardedTensor<T>,
    /// Values.
    pub v: &'a GuardedTensor<T>,
    /// Learnable sink of each query head; empty without one.
    pub sink: &'a [T],
    /// Descales of the codes of each segment and query head; empty where nothing is scaled.
    pub descales: &'a [Vec<Descales>],
    /// The output.
    pub out: &'a mut GuardedTensor<T>,
    /// The log-sum-exp.
    pub lse: &'a mut GuardedTensor<T>,
    /// The largest logit of each head. The buffer is filled before, and a launch raises its values and never lowers
    /// them.
    pub max_logit: &'a mut GuardedTensor<T>,
}

/// Tensors of a backward launch.
pub struct BackwardLaunch<'a, T> {
    /// Queries.
    pub q: &'a GuardedTensor<T>,
    /// Keys.
    pub k: &'a GuardedTensor<T>,
    /// Values.
    pub v: &'a GuardedTensor<T>,
    /// Learnable sink of each query head; empty without one.
    pub sink: &'a [T],
    /// Descales of the codes of each segment and query head; empty where nothing is scaled.
    pub descales: &'a [Vec<Descales>],
    /// Gradient of the output.
    pub dout: &'a GuardedTensor<T>,
    /// The forward's output.
    pub out: &'a GuardedTensor<T>,
    /// The forward's LSE.
    pub lse: &'a GuardedTensor<T>,
    /// Gradient of the queries.
    pub dq: &'a mut GuardedTensor<T>,
    /// Gradient of the keys.
    pub dk: &'a mut GuardedTensor<T>,
    /// Gradient of the values.
    pub dv: &'a mut GuardedTensor<T>,
    /// Gradient of the learnable sink, `[heads, 1, 1]`; no heads without one.
    pub dsink: &'a mut GuardedTensor<T>,
}

/// Code that a launch runs.
pub trait Kernel<T: Real>: Sync {
    /// Runs the forward.
    fn forward(&self, call: &AttentionCall, tensors: ForwardLaunch<'_, T>);
    /// Runs the backward.
    fn backward(&self, call: &AttentionCall, tensors: BackwardLaunch<'_, T>);
    /// Folds a step's row of out and its LSE into the running ones by a difference
    /// ([`MergeStyle::Difference`](crate::schedule::MergeStyle::Difference)). Both LSEs are finite. The running out is
    /// rounded to `format`.
    fn merge_by_difference(&self, running: (&mut [T], &mut T), step: (&[T], T), format: Format);
    /// Returns the factor that turns the launches' codes of out into values; 1 where they are values.
    fn descale_of_out(&self) -> T {
        T::ONE
    }
    /// Returns the largest magnitudes of what the launches so far have quantised, if the kernel keeps them
    /// ([`Roundings::keeps_amax`]).
    fn amaxes(&self) -> Amaxes {
        Amaxes::default()
    }
}

/// Stages that run on either arithmetic in f32: those of the right kernel, or of another that differs in some.
pub trait Variant: Stages<f32, Serial> + Stages<f32, Hopper> + Debug {}

impl<S: Stages<f32, Serial> + Stages<f32, Hopper> + Debug> Variant for S {}

/// The units of a kernel in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// [`Serial`].
    F32,
    /// [`Hopper`] arithmetic in 16-bit factors. The number draws its order of dq.
    Hopper(u64),
    /// [`Hopper`] arithmetic in FP8, promoted after so many steps, with tiles of dq in the order of the keys.
    HopperFp8(Option<NonZeroUsize>),
}

impl Units {
    /// Returns the right kernel on these units.
    pub fn right(self, tiles: Tiles, roundings: Roundings) -> Box<dyn Kernel<f32>> {
        self.kernel_of(tiles, roundings, &Right)
    }

    /// Returns a kernel with other stages on these units.
    pub fn variant(
        self,
        tiles: Tiles,
        roundings: Roundings,
        stages: &'static dyn Variant,
    ) -> Box<dyn Kernel<f32>> {
        self.kernel_of(tiles, roundings, stages)
    }

    /// Returns a kernel on these units. Only this crate names the stages' type, so no other crate compiles the kernel
    /// once more.
    fn kernel_of<S>(self, tiles: Tiles, roundings: Roundings, stages: &'static S) -> Box<dyn Kernel<f32>>
    where
        S: Stages<f32, Serial> + Stages<f32, Hopper> + ?Sized,
    {
        match self {
            Units::F32 => Box::new(TiledKernel::new(tiles, roundings, Serial, stages)),
            Units::Hopper(order) => Box::new(TiledKernel::new(tiles, roundings, Hopper::wide(order), stages)),
            Units::HopperFp8(promoted_after) => {
                let units = Hopper { order: None, core: TensorCore::FP8, promoted_after };
                Box::new(TiledKernel::new(tiles, roundings, units, stages))
            }
        }
    }
}

/// The tiled kernel: a loop over tiles of queries and keys.
#[derive(Debug)]
pub struct TiledKernel<'a, T, A, S: ?Sized> {
    tiles: Tiles,
    roundings: Roundings,
    units: A,
    stages: &'a S,
    maxima: Maxima,
    real: PhantomData<fn() -> T>,
}

/// A tile of queries of one head, whose scores are asked for.
struct ScoredRows<'a> {
    placed: &'a Placed<'a>,
    head: usize,
    rows: Range<usize>,
    softmax: &'a Softmax,
}

/// A query head of a segment.
struct ScaledHead {
    head: usize,
    /// The softmax, whose scale takes the descales of q and k as factors.
    softmax: Softmax,
    /// The scale without them.
    bare_scale: f32,
    /// The descales, if the codes have any.
    descales: Option<Descales>,
}

impl ScaledHead {
    /// Returns a head of a segment.
    fn new(head: usize, softmax: Softmax, of_segments: &[Vec<Descales>], segment: usize) -> ScaledHead {
        let descales = of_segments.get(segment).and_then(|of_heads| of_heads.get(head)).copied();
        let scale = descales.map_or(softmax.scale, |Descales { q, k, .. }| softmax.scale * q * k);
        ScaledHead { head, softmax: Softmax { scale, ..softmax }, bare_scale: softmax.scale, descales }
    }

    /// Returns the descale of the codes with which the sums of a gradient are made.
    fn of_gradient(&self, gradient: TensorName) -> f32 {
        self.descales.map_or(1.0, |Descales { q, k, dout, .. }| match gradient {
            TensorName::Dq => k,
            TensorName::Dk => q,
            _ => dout,
        })
    }
}

/// A segment with the rows from which its operands are loaded.
struct Placed<'a> {
    segment: &'a Segment,
    q: Vec<usize>,
    dout: Vec<usize>,
    k: Vec<usize>,
    v: Vec<usize>,
}

impl<T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> Kernel<T> for TiledKernel<'_, T, A, S> {
    fn forward(&self, call: &AttentionCall, mut tensors: ForwardLaunch<'_, T>) {
        let heads = tensors.q.shape()[1];
        for (index, segment) in call.segments.iter().enumerate() {
            let placed = self.place(Pass::Forward, segment);
            let mut keys = Columns::new(self.tiles.kv);
            for head in 0..heads {
                keys.turn_to(self.stages.kv_head(head, heads / tensors.k.shape()[1]));
                let scaled = ScaledHead::new(head, call.softmax, tensors.descales, index);
                for rows in tiles_of(0..segment.q.len, self.tiles.q) {
                    self.forward_tile(&placed, &scaled, rows, &mut keys, &mut tensors);
                }
            }
            if call.policy == RowPolicy::Overwrite {
                self.clear_forward(segment, heads, &mut tensors);
            }
        }
    }

    fn backward(&self, call: &AttentionCall, mut tensors: BackwardLaunch<'_, T>) {
        let (heads, kv_heads) = (tensors.q.shape()[1], tensors.k.shape()[1]);
        tensors.dsink.values_mut().fill(T::ZERO);
        for (index, segment) in call.segments.iter().enumerate() {
            let placed = self.place(Pass::Backward, segment);
            for kv_head in 0..kv_heads {
                self.backward_segment(call, (index, &placed), kv_head, &mut tensors);
            }
            if call.policy == RowPolicy::Overwrite {
                self.clear_backward(segment, (heads, kv_heads), &mut tensors);
            }
        }
    }

    fn merge_by_difference(
        &self,
        (out, lse): (&mut [T], &mut T),
        (step, step_lse): (&[T], T),
        format: Format,
    ) {
        let share = self.stages.difference_share(*lse, step_lse);
        for (out, &step) in out.iter_mut().zip(step) {
            *out = self.stages.difference(*out, step, share).round(format);
        }
        *lse = self.stages.difference_lse(*lse, step_lse);
    }

    fn descale_of_out(&self) -> T {
        T::from_f32(self.roundings.factors.out.descale)
    }

    fn amaxes(&self) -> Amaxes {
        if self.roundings.keeps_amax { self.maxima.told() } else { Amaxes::default() }
    }
}

impl<'a, T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> TiledKernel<'a, T, A, S> {
    /// Returns a kernel with the given tiles and roundings.
    pub fn new(tiles: Tiles, roundings: Roundings, units: A, stages: &'a S) -> TiledKernel<'a, T, A, S> {
        TiledKernel { tiles, roundings, units, stages, maxima: Maxima::default(), real: PhantomData }
    }

    fn place<'s>(&self, pass: Pass, segment: &'s Segment) -> Placed<'s> {
        let rows = |tensor| self.stages.rows(pass, tensor, segment);
        Placed {
            segment,
            q: rows(TensorName::Q),
            dout: rows(TensorName::Dout),
            k: rows(TensorName::K),
            v: rows(TensorName::V),
        }
    }

    fn clear_forward(&self, segment: &Segment, heads: usize, tensors: &mut ForwardLaunch<'_, T>) {
        for row in self.stages.padding(TensorName::Out, &segment.q) {
            (0..heads).for_each(|head| tensors.out.lane_mut(row, head).fill(T::ZERO));
        }
        for row in self.stages.padding(TensorName::Lse, &segment.q) {
            (0..heads).for_each(|head| tensors.lse.lane_mut(head, row).fill(T::NEG_INFINITY));
        }
    }

    fn clear_backward(
        &self,
        segment: &Segment,
        (heads, kv_heads): (usize, usize),
        tensors: &mut BackwardLaunch<'_, T>,
    ) {
        for row in self.stages.padding(TensorName::Dq, &segment.q) {
            (0..heads).for_each(|head| tensors.dq.lane_mut(row, head).fill(T::ZERO));
        }
        for run in &segment.kv {
            for row in self.stages.padding(TensorName::Dk, run) {
                (0..kv_heads).for_each(|head| tensors.dk.lane_mut(row, head).fill(T::ZERO));
            }
            for row in self.stages.padding(TensorName::Dv, run) {
                (0..kv_heads).for_each(|head| tensors.dv.lane_mut(row, head).fill(T::ZERO));
            }
        }
    }

    /// Attends with one tile of query rows to all keys that any of them sees.
    fn forward_tile(
        &self,
        placed: &Placed<'_>,
        scaled: &ScaledHead,
        rows: Range<usize>,
        keys: &mut Columns<T>,
        tensors: &mut ForwardLaunch<'_, T>,
    ) {
        let TiledKernel { units, stages, roundings, .. } = self;
        let &ScaledHead { head, ref softmax, .. } = scaled;
        let mut states = vec![Online::new(tensors.v.shape()[2]); rows.len()];
        let mut largest = T::NEG_INFINITY;
        let scored = ScoredRows { placed, head, rows: rows.clone(), softmax };
        self.each_scored(&scored, keys, tensors, |local, columns, seen, scores, values| {
            let state: &mut Online<T> = &mut states[local];
            let max = scores.iter().copied().fold(T::NEG_INFINITY, T::larger);
            largest = largest.larger(max);
            stages.grow(units, softmax, state, max);
            scores.iter_mut().for_each(|score| *score = stages.weight(units, softmax, *score, state.max));
            stages.add_weights(units, &mut state.sum, columns.start + seen.start, scores);
            if !roundings.normalises_first {
                self.add_weighted(&mut state.acc, scores, seen.start, values);
            }
        });
        let max_logit = &mut tensors.max_logit.lane_mut(head, 0)[0];
        *max_logit = stages.max_logit(*max_logit, units.logit(softmax, largest));
        let maxima: Vec<T> = states.iter().map(|state| state.max).collect();
        let mut tile: Vec<Finished<T>> =
            states.into_iter().map(|state| self.finish(scaled, state, tensors.sink)).collect();
        self.count_weights(scaled, &maxima, &tile);
        if roundings.normalises_first {
            self.each_scored(&scored, keys, tensors, |local, _, seen, scores, values| {
                let (max, row) = (maxima[local], &mut tile[local]);
                // The sink may be larger than every logit.
                let share = units.exp(units.logit(softmax, max) - row.max) * (T::ONE / row.sum);
                for score in scores.iter_mut() {
                    *score = stages.weight(units, softmax, *score, max) * share;
                }
                self.add_weighted(&mut row.acc, scores, seen.start, values);
            });
        }
        self.write_tile(placed, scaled, rows, &tile, tensors);
    }

    /// Calls `visit` with the scores of each row of a tile of queries against each tile of keys: the row's place in the
    /// tile, the tile's columns, those from the first that the row sees to the last, their scores, and their values.
    /// The score of a column that the row does not see is −∞.
    fn each_scored(
        &self,
        ScoredRows { placed, head, rows, softmax }: &ScoredRows<'_>,
        keys: &mut Columns<T>,
        tensors: &ForwardLaunch<'_, T>,
        mut visit: impl FnMut(usize, &Range<usize>, &Range<usize>, &mut [T], HeadRows<'_, T>),
    ) {
        let TiledKernel { units, stages, .. } = self;
        let kv_head = keys.head;
        let mut scores = vec![T::ZERO; self.tiles.kv];
        for columns in stages.tiles(Pass::Forward, placed.segment, rows, placed.k.len(), self.tiles.kv) {
            let k = keys.tile(tensors.k, &placed.k, &columns);
            let values = HeadRows { tensor: tensors.v, rows: &placed.v[columns.clone()], head: kv_head };
            for (local, i) in rows.clone().enumerate() {
                let seen = clip(&stages.visible(Pass::Forward, placed.segment, i), &columns);
                let hull = seen.hull();
                if seen.is_empty() {
                    continue;
                }
                let (q, formats) =
                    (tensors.q.lane(placed.q[i], *head), [tensors.q, tensors.k].map(GuardedTensor::format));
                stages.products(units, Pass::Forward, formats, q, k, &mut scores[..columns.len()]);
                self.score(Pass::Forward, softmax, &mut scores[hull.clone()]);
                scores[seen.gap()].fill(T::NEG_INFINITY);
                visit(local, &columns, &hull, &mut scores[hull.clone()], values.slice(hull.clone()));
            }
        }
    }

    /// Turns products into scores.
    fn score(&self, pass: Pass, softmax: &Softmax, products: &mut [T]) {
        self.stages.scores(&self.units, pass, softmax, products);
        if self.roundings.coarse_cap && softmax.softcap.is_some() {
            products.iter_mut().for_each(|score| *score = with_eleven_bits(*score));
        }
    }

    /// Rounds weights and adds the weighted values to a row. The first weight is that of column `first` of the tile.
    fn add_weighted(&self, acc: &mut [T], weights: &mut [T], first: usize, values: HeadRows<'_, T>) {
        let TiledKernel { units, stages, roundings: Roundings { p, .. }, .. } = self;
        let scale = self.weight_scale();
        weights.iter_mut().for_each(|weight| *weight = stages.round(Pass::Forward, *weight * scale, *p));
        stages.add_values(units, acc, Weights { values: weights, format: *p, first }, values);
    }

    /// Returns the number with which weights are multiplied before they are rounded.
    fn weight_scale(&self) -> T {
        let Roundings { weight_exponent, factors, .. } = self.roundings;
        T::from_f32(factors.p.scale * f32::from(weight_exponent).exp2())
    }

    /// Returns the number that turns sums of rounded weights back.
    fn weight_descale(&self) -> T {
        let Roundings { weight_exponent, factors, .. } = self.roundings;
        T::from_f32(factors.p.descale / f32::from(weight_exponent).exp2())
    }

    /// Returns a row after all its keys, with the sink.
    fn finish(&self, scaled: &ScaledHead, state: Online<T>, sinks: &[T]) -> Finished<T> {
        let TiledKernel { units, stages, .. } = self;
        let Online { max, sum, acc } = state;
        let (max, sum) = (units.logit(&scaled.softmax, max), units.total(&sum));
        let mut row = Finished { max, sum, acc };
        if self.weight_descale() != T::ONE {
            row.acc.iter_mut().for_each(|acc| *acc *= self.weight_descale());
        }
        if let Some(sink) = sink(scaled.softmax.sink, sinks, scaled.head) {
            stages.sink(units, &mut row, sink);
        }
        row
    }

    /// Writes the rows of a tile once all its keys are added.
    fn write_tile(
        &self,
        placed: &Placed<'_>,
        &ScaledHead { head, descales, .. }: &ScaledHead,
        rows: Range<usize>,
        tile: &[Finished<T>],
        tensors: &mut ForwardLaunch<'_, T>,
    ) {
        let stages = self.stages;
        let (format, of_out) = (tensors.out.format(), self.roundings.factors.out);
        let is_scaled = descales.is_some() || of_out != Factor::ONE || self.roundings.keeps_amax;
        let unscaled = if is_scaled { Format::F32 } else { format };
        // Weights that were divided first leave nothing to divide by.
        let divided = self.roundings.normalises_first.then(|| {
            let undivided = |row: &Finished<T>| Finished { sum: T::ONE, ..row.clone() };
            tile.iter().map(undivided).collect::<Vec<_>>()
        });
        for (local, i) in rows.enumerate() {
            let row = placed.segment.q.row(i);
            let sums = divided.as_deref().unwrap_or(tile);
            let out = tensors.out.lane_mut(row, head);
            stages.out(sums, local, unscaled, out);
            if is_scaled {
                let v = descales.map_or(1.0, |descales| descales.v);
                out.iter_mut().for_each(|out| *out *= T::from_f32(v));
                self.count(Quantity::Out, out);
                of_out.quantise(out, format);
            }
            tensors.lse.lane_mut(head, row)[0] = stages.lse(tile, local);
        }
    }

    /// Runs all query heads of one KV head. dk and dv are summed over them and rounded once, or rounded for each head
    /// and then summed. Where heads have descales, those of each are in its own dk and dv before these are summed.
    fn backward_segment(
        &self,
        call: &AttentionCall,
        (index, placed): (usize, &Placed<'_>),
        kv_head: usize,
        tensors: &mut BackwardLaunch<'_, T>,
    ) {
        let stages = self.stages;
        let group = tensors.q.shape()[1] / tensors.k.shape()[1];
        let mut dk = vec![T::ZERO; placed.k.len() * tensors.k.shape()[2]];
        let mut dv = vec![T::ZERO; placed.v.len() * tensors.v.shape()[2]];
        let mut columns = [(); 2].map(|()| Columns::new(self.tiles.kv));
        columns.iter_mut().for_each(|columns| columns.turn_to(kv_head));
        let is_descaled = !tensors.descales.is_empty();
        let stored = self.roundings.stored_heads.filter(|_| group > 1);
        let stored = stored.or(is_descaled.then_some(Format::F32));
        let mut of_group = stored.map(|_| [vec![T::ZERO; dk.len()], vec![T::ZERO; dv.len()]]);
        for head in stages.query_heads(kv_head, group) {
            let scaled = ScaledHead::new(head, call.softmax, tensors.descales, index);
            for rows in tiles_of(0..placed.segment.q.len, self.tiles.q) {
                let sums = [&mut dk[..], &mut dv[..]];
                self.backward_tile(call, placed, (&scaled, kv_head), rows, &mut columns, sums, tensors);
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

    /// Counts magnitudes of a quantity before they are quantised.
    fn count(&self, quantity: Quantity, values: &[T]) {
        if self.roundings.keeps_amax {
            self.maxima.count(quantity, values);
        }
    }

    /// Counts the largest weights of a tile's rows, which are those of their largest logits.
    fn count_weights(&self, scaled: &ScaledHead, maxima: &[T], tile: &[Finished<T>]) {
        if !self.roundings.keeps_amax {
            return;
        }
        let units = &self.units;
        for (&max, row) in maxima.iter().zip(tile).filter(|(max, _)| **max != T::NEG_INFINITY) {
            let share = units.exp(units.logit(&scaled.softmax, max) - row.max) * (T::ONE / row.sum);
            self.count(Quantity::P, &[share]);
        }
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
        rows: Range<usize>,
        [keys, values]: &mut [Columns<T>; 2],
        [dk, dv]: [&mut [T]; 2],
        tensors: &mut BackwardLaunch<'_, T>,
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
        let mut dq = vec![T::ZERO; rows.len() * dim_qk];
        let segment = placed.segment;
        let formats =
            [[tensors.q, tensors.k], [tensors.dout, tensors.v]].map(|both| both.map(GuardedTensor::format));
        let mut tiles = stages.tiles(Pass::Backward, segment, &rows, placed.k.len(), self.tiles.kv);
        if self.roundings.weighs_dots {
            let mut sums = vec![[T::ZERO; 4]; rows.len()];
            for columns in &tiles {
                let operands =
                    [keys.tile(tensors.k, &placed.k, columns), values.tile(tensors.v, &placed.v, columns)];
                let against = Against { scaled, segment, columns, formats, left: [q, dout], right: operands };
                self.add_dots(&against, rows.clone(), &lse, &mut sums);
            }
            row_dots = sums.iter().map(|sum| units.total(sum)).collect();
        }
        units.order([head, rows.start], &mut tiles);
        for columns in tiles {
            let k = HeadRows { tensor: tensors.k, rows: &placed.k[columns.clone()], head: kv_head };
            let operands =
                [keys.tile(tensors.k, &placed.k, &columns), values.tile(tensors.v, &placed.v, &columns)];
            let against =
                Against { scaled, segment, columns: &columns, formats, left: [q, dout], right: operands };
            let ([p, ds], factor) = self.weigh_tile(&against, rows.clone(), &row_dots, &lse);
            self.add_in_units(&mut dq, factor, |to| stages.add_dq(units, to, &ds, k));
            let to = &mut dk[columns.start * dim_qk..columns.end * dim_qk];
            self.add_in_units(to, factor, |to| stages.add_dk(units, to, &ds, q));
            stages.add_dv(units, &mut dv[columns.start * dim_v..columns.end * dim_v], &p, dout);
        }
        let factor = self.factor(TensorName::Dq, call, scaled.of_gradient(TensorName::Dq));
        let format = tensors.dq.format();
        for (local, i) in rows.enumerate() {
            let to = tensors.dq.lane_mut(segment.q.row(i), head);
            self.store((TensorName::Dq, factor), &dq, local, format, to);
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

    /// Writes the scores and dP of a row of a tile, with descales in them. `hull` are the columns that are read.
    fn dot(&self, against: &Against<'_, T>, local: usize, hull: &Range<usize>, [scores, dp]: [&mut [T]; 2]) {
        let TiledKernel { units, stages, .. } = self;
        let Against { scaled, formats: [of_scores, of_dp], left: [q, dout], right: [k, v], .. } = *against;
        stages.products(units, Pass::Backward, of_scores, q.lane(local), k, scores);
        stages.products(units, Pass::Backward, of_dp, dout.lane(local), v, dp);
        self.score(Pass::Backward, &scaled.softmax, &mut scores[hull.clone()]);
        if let Some(Descales { v, dout, .. }) = scaled.descales {
            let descale = T::from_f32(dout * v);
            dp[hull.clone()].iter_mut().for_each(|dp| *dp *= descale);
        }
    }

    /// Adds `P·dP` of a tile's pairs to the sums of its rows.
    fn add_dots(&self, against: &Against<'_, T>, rows: Range<usize>, lse: &[T], sums: &mut [RowSum<T>]) {
        let TiledKernel { units, stages, .. } = self;
        let Against { scaled: ScaledHead { softmax, .. }, segment, columns, .. } = *against;
        let pass = Pass::Backward;
        let (mut scores, mut dp) = (vec![T::ZERO; columns.len()], vec![T::ZERO; columns.len()]);
        for (local, i) in rows.enumerate() {
            let seen = clip(&stages.visible(pass, segment, i), columns);
            let hull = seen.hull();
            if seen.is_empty() {
                continue;
            }
            self.dot(against, local, &hull, [&mut scores, &mut dp]);
            scores[seen.gap()].fill(T::NEG_INFINITY);
            let scores = &mut scores[hull.clone()];
            for (score, dp) in scores.iter_mut().zip(&dp[hull.clone()]) {
                let weight = stages.probability(units, softmax, *score, lse[local]);
                *score = self.ds_weight(weight, self.rounded_weight(weight)) * *dp;
            }
            units.add_weights(&mut sums[local], columns.start + hull.start, scores);
        }
    }

    /// Returns a weight of the backward as it enters dv: multiplied and rounded.
    fn rounded_weight(&self, weight: T) -> T {
        self.stages.round(Pass::Backward, weight * self.weight_scale(), self.roundings.p)
    }

    /// Returns the weight that dS is made of.
    fn ds_weight(&self, weight: T, rounded: T) -> T {
        if self.roundings.rounds_ds_weights { rounded * self.weight_descale() } else { weight }
    }

    /// Returns P and dS of a tile, rounded, and the factor of dS if it has one.
    fn weigh_tile(
        &self,
        against: &Against<'_, T>,
        rows: Range<usize>,
        row_dots: &[T],
        lse: &[T],
    ) -> ([TileWeights<T>; 2], Option<T>) {
        let TiledKernel { units, stages, roundings, .. } = self;
        let Against { scaled, segment, columns, .. } = *against;
        let softmax = &scaled.softmax;
        let new = |format| TileWeights::new(rows.len(), columns.len(), format);
        let (mut p, mut ds) = (new(roundings.p), new(roundings.ds));
        let folded = if roundings.folds_scale { T::from_f32(scaled.bare_scale) } else { T::ONE };
        let (mut scores, mut dp) = (vec![T::ZERO; columns.len()], vec![T::ZERO; columns.len()]);
        for (local, i) in rows.clone().enumerate() {
            let seen = clip(&stages.visible(Pass::Backward, segment, i), columns);
            let hull = seen.hull();
            if seen.is_empty() {
                continue;
            }
            self.dot(against, local, &hull, [&mut scores, &mut dp]);
            let (p_row, ds_row) = (p.row_mut(local), ds.row_mut(local));
            for j in seen {
                let weight = stages.probability(units, softmax, scores[j], lse[local]);
                p_row[j] = self.rounded_weight(weight);
                let weight = self.ds_weight(weight, p_row[j]);
                let pair = Pair { weight, dp: dp[j], d: row_dots[local], score: scores[j] };
                ds_row[j] = stages.logit_gradient(units, softmax, pair) * folded;
            }
            (p.seen[local], ds.seen[local]) = (hull.clone(), hull);
        }
        self.count(Quantity::Ds, ds.values());
        let factor = roundings.scales_tiles.then(|| stages.tile_factor(&ds, roundings.ds));
        let given = T::from_f32(roundings.factors.ds.scale);
        for local in 0..rows.len() {
            let seen = ds.seen[local].clone();
            for ds in &mut ds.row_mut(local)[seen] {
                let multiplied = factor.map_or(*ds, |factor| *ds * factor) * given;
                *ds = stages.round(Pass::Backward, multiplied, roundings.ds);
            }
        }
        ([p, ds], factor)
    }
}

/// Queries and dout of a tile's rows against the keys and values of its columns.
struct Against<'a, T> {
    scaled: &'a ScaledHead,
    segment: &'a Segment,
    columns: &'a Range<usize>,
    /// Formats of q and k, and of dout and v.
    formats: [[Format; 2]; 2],
    /// q and dout.
    left: [HeadRows<'a, T>; 2],
    /// k and v, as columns.
    right: [&'a [T]; 2],
}

/// Returns an f32 rounded to 11 bits, which changes it by 2^-11 of its magnitude at most. (Veltkamp's splitting.)
fn with_eleven_bits<T: Real>(value: T) -> T {
    let large = T::from_f32(8193.0) * value;
    large - (large - value)
}

/// Returns `keys` as columns of the tile `columns`.
fn clip(keys: &Intervals, columns: &Range<usize>) -> Intervals {
    keys.moved(|key| key.clamp(columns.start, columns.end) - columns.start)
}

fn sink<T: Real>(kind: Sink, learnable: &[T], head: usize) -> Option<T> {
    match kind {
        Sink::None => None,
        Sink::OffByOne => Some(T::ZERO),
        Sink::Learnable => learnable.get(head).copied(),
    }
}
