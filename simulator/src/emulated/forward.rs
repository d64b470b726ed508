//! The forward of a [`TiledKernel`].

use std::ops::Range;

use seamproof_oracle::{Format, Pass, Quantity, Softmax};

use super::arithmetic::{HeadRows, UnitArithmetic, Weights};
use super::columns::{Columns, Operand, padded};
use super::roundings::Factor;
use super::row::{Finished, Online};
use super::stages::Stages;
use super::{ForwardLaunch, Placed, ScaledHead, TiledKernel, clip, sink};
use crate::{GuardedTensor, Real};

/// A tile of queries of one head, whose scores are asked for.
struct ScoredRows<'a> {
    placed: &'a Placed<'a>,
    head: usize,
    rows: &'a Range<usize>,
    /// The tiles of keys that the rows see.
    tiles: &'a [Range<usize>],
    softmax: &'a Softmax,
}

/// Memory that all tiles of a launch use, one after the other.
pub(super) struct Buffers<T> {
    /// Scores of one row, and those of them that belong to one tile of keys.
    scores: [Vec<T>; 2],
    /// Rows of a tile while keys come, their largest scores, and the rows after the last key.
    states: Vec<Online<T>>,
    maxima: Vec<T>,
    tile: Vec<Finished<T>>,
    /// Memory for the weighted values of rows.
    accs: Vec<Vec<T>>,
}

impl<T> Buffers<T> {
    /// Returns empty buffers.
    pub(super) fn new() -> Buffers<T> {
        Buffers {
            scores: [Vec::new(), Vec::new()],
            states: Vec::new(),
            maxima: Vec::new(),
            tile: Vec::new(),
            accs: Vec::new(),
        }
    }
}

impl<T: Real, A: UnitArithmetic<T>, S: Stages<T, A> + ?Sized> TiledKernel<'_, T, A, S> {
    /// Attends with one tile of query rows to all keys that any of them sees.
    pub(super) fn forward_tile(
        &self,
        placed: &Placed<'_>,
        scaled: &ScaledHead,
        (rows, tiles): &(Range<usize>, Vec<Range<usize>>),
        keys: &mut Columns<T>,
        tensors: &mut ForwardLaunch<'_, T>,
        Buffers { scores, states, maxima, tile, accs }: &mut Buffers<T>,
    ) {
        let TiledKernel { units, stages, roundings, .. } = self;
        let &ScaledHead { head, ref softmax, .. } = scaled;
        let dim = tensors.v.shape()[2];
        let state = |_| Online::new(dim, accs.pop().unwrap_or_default());
        states.extend(rows.clone().map(state));
        let mut largest = T::NEG_INFINITY;
        let scored = ScoredRows { placed, head, rows, tiles, softmax };
        self.each_scored(&scored, keys, tensors, scores, |local, columns, seen, scores, values| {
            let state: &mut Online<T> = &mut states[local];
            let max = scores.iter().copied().fold(T::NEG_INFINITY, T::larger);
            largest = largest.larger(max);
            stages.grow(units, softmax, state, max);
            stages.weights(units, softmax, scores, state.max);
            stages.add_weights(units, &mut state.sum, columns.start + seen.start, scores);
            if !roundings.normalises_first {
                self.add_weighted(&mut state.acc, scores, seen.start, values);
            }
        });
        let max_logit = &mut tensors.max_logit.lane_mut(head, 0)[0];
        *max_logit = stages.max_logit(*max_logit, units.logit(softmax, largest));
        maxima.clear();
        maxima.extend(states.iter().map(|state| state.max));
        tile.extend(states.drain(..).map(|state| self.finish(scaled, state, tensors.sink)));
        self.count_weights(scaled, maxima, tile);
        if roundings.normalises_first {
            self.each_scored(&scored, keys, tensors, scores, |local, _, seen, scores, values| {
                let (max, row) = (maxima[local], &mut tile[local]);
                // The sink may be larger than every logit.
                let share = units.exp(units.logit(softmax, max) - row.max) * (T::ONE / row.sum);
                stages.weights(units, softmax, scores, max);
                scores.iter_mut().for_each(|weight| *weight *= share);
                self.add_weighted(&mut row.acc, scores, seen.start, values);
            });
        }
        self.write_tile(placed, scaled, rows, tile, tensors);
        accs.extend(tile.drain(..).map(|row| row.acc));
    }

    /// Calls `visit` with the scores of each row of a tile of queries against each tile of keys: the row's place in the
    /// tile, the tile's columns, those from the first that the row sees to the last, their scores, and their values.
    /// The score of a column that the row does not see is −∞.
    fn each_scored(
        &self,
        &ScoredRows { placed, head, rows, tiles, softmax }: &ScoredRows<'_>,
        keys: &mut Columns<T>,
        tensors: &ForwardLaunch<'_, T>,
        [scores, of_tile]: &mut [Vec<T>; 2],
        mut visit: impl FnMut(usize, &Range<usize>, &Range<usize>, &mut [T], HeadRows<'_, T>),
    ) {
        let (pass, kv_head) = (Pass::Forward, keys.head);
        let formats = [tensors.q, tensors.k].map(GuardedTensor::format);
        let operand = Operand { tensor: tensors.k, rows: &placed.k };
        scores.clear();
        scores.resize(padded(placed.k.len()), T::ZERO);
        for (local, i) in rows.clone().enumerate() {
            let seen = &placed.seen[i];
            if seen.is_empty() {
                continue;
            }
            let q = tensors.q.lane(placed.q[i], head);
            self.products((pass, formats), q, (&mut *keys, &operand), seen, scores);
            seen.parts().for_each(|part| self.score(pass, softmax, &mut scores[part]));
            scores[seen.gap()].fill(T::NEG_INFINITY);
            for columns in tiles {
                let hull = clip(seen, columns).hull();
                if hull.is_empty() {
                    continue;
                }
                let here = columns.start + hull.start..columns.start + hull.end;
                let values = HeadRows { tensor: tensors.v, rows: &placed.v[here.clone()], head: kv_head };
                of_tile.clear();
                of_tile.extend_from_slice(&scores[here]);
                visit(local, columns, &hull, of_tile, values);
            }
        }
    }

    /// Rounds weights and adds the weighted values to a row. The first weight is that of column `first` of the tile.
    fn add_weighted(&self, acc: &mut [T], weights: &mut [T], first: usize, values: HeadRows<'_, T>) {
        let format = self.roundings.p;
        self.round_weights(Pass::Forward, weights);
        self.stages.add_values(&self.units, acc, Weights { values: weights, format, first }, values);
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
        rows: &Range<usize>,
        tile: &mut [Finished<T>],
        tensors: &mut ForwardLaunch<'_, T>,
    ) {
        let stages = self.stages;
        let (format, of_out) = (tensors.out.format(), self.roundings.factors.out);
        let is_scaled = descales.is_some() || of_out != Factor::ONE || self.roundings.keeps_amax;
        let unscaled = if is_scaled { Format::F32 } else { format };
        for (local, i) in rows.clone().enumerate() {
            tensors.lse.lane_mut(head, placed.segment.q.row(i))[0] = stages.lse(tile, local);
        }
        if self.roundings.normalises_first {
            // Weights that were divided first leave nothing to divide by.
            tile.iter_mut().for_each(|row| row.sum = T::ONE);
        }
        for (local, i) in rows.clone().enumerate() {
            let out = tensors.out.lane_mut(placed.segment.q.row(i), head);
            stages.out(tile, local, unscaled, out);
            if is_scaled {
                let v = descales.map_or(1.0, |descales| descales.v);
                out.iter_mut().for_each(|out| *out *= T::from_f32(v));
                self.count(Quantity::Out, out);
                of_out.quantise(out, format);
            }
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
}
