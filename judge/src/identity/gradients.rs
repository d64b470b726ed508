//! Gradients of two runs of one function, which are the same except for both runs' errors.
//!
//! The weights of a query add up to 1 at most, so the errors that it adds to *all* keys are bounded at once. For each
//! lane of dk and dv, take the differences of all keys, each beyond its own final roundings. They add up to no more
//! than `Σ_i (error of query i) · |q_ic|` (or `|dout_ic|`). That is far less than the number of keys times the error
//! that one key may have. A row of dq is bounded by itself.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::ops::Range;

use ndarray::Array3;
use seamproof_oracle::envelope::F32_ROUNDOFF;
use seamproof_oracle::{Run, Side, Stored};

use super::bound::{Against, Bounds, GivenError};
use super::readers::{Readers, moved_by, seeing};
use crate::finding::Relation;
use crate::finding::{Finding, Place};
use crate::ladder::compare::{Worst, lanes, times_bound};
use crate::ladder::evidence::Evidence;
use crate::subject::{RankGradients, TensorName};
use seamproof_oracle::sharding::run_of;

/// Two runs whose gradients must agree.
pub(super) struct Runs<'a> {
    pub(super) evidence: &'a Evidence<'a>,
    pub(super) relation: Relation,
    /// Words for runs that do not agree.
    pub(super) what: &'static str,
    /// Bounds of the case's own run, and of the other run.
    pub(super) bounds: [&'a Bounds<'a>; 2],
    /// Number of KV heads of the other run whose gradients add up to those of one KV head here.
    pub(super) kv_heads: usize,
    /// Right value of the gradients: that of the saved out and lse where both runs saved the same, otherwise the
    /// exact one.
    pub(super) against: Against,
    /// Largest loss of a gradient's operations below the normal range, as [`floor`] returns it.
    pub(super) floor: f64,
}

/// Returns the most that the operations of one gradient may lose below the normal range in either of two runs.
pub(super) fn floor(bounds: [&Bounds<'_>; 2]) -> f64 {
    bounds.map(Bounds::gradient_floor).into_iter().fold(0.0, f64::max)
}

/// Largest sums that the queries of a KV head may add to the differences of its keys, of dk and of dv, lane by lane.
struct KeyErrors {
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Sum of a lane's differences beyond their roundings.
struct Excess {
    sum: f64,
    /// Key that is furthest off, with its excess and its two values.
    worst: Option<(f64, usize, [f64; 2])>,
}

impl Runs<'_> {
    /// Returns the first gradient in which the runs differ. Nothing is said of runs whose partial gradients may be cut:
    /// those of one run are not those of the other.
    pub(super) fn compare(&self, here: &RankGradients, there: &RankGradients) -> Option<Finding> {
        let problem = self.evidence.problem;
        if self.bounds.iter().any(|bounds| bounds.may_be_cut(None)) {
            return None;
        }
        let mut worst = [TensorName::Dv, TensorName::Dk, TensorName::Dq]
            .map(|tensor| Worst::of_relation(self.relation, tensor, self.what));
        for sequence in 0..problem.sequences.len() {
            let queries = seeing(self.evidence, sequence);
            for kv_head in 0..problem.heads.kv {
                let readers = Readers { sequence, kv_head, queries: &queries, group: problem.group() };
                let [dv, dk, dq] = &mut worst;
                let of = |gradient| Compared { runs: self, readers: &readers, stored: self.stored(gradient) };
                of(TensorName::Dq).queries([&here.dq, &there.dq], dq);
                let errors = LazyCell::new(|| self.key_errors(&readers));
                let (of_dv, of_dk) = (of(TensorName::Dv), of(TensorName::Dk));
                if !of_dv.near([&here.dv, &there.dv], dv) {
                    of_dv.keys([&here.dv, &there.dv], &errors.dv, dv);
                }
                if !of_dk.near([&here.dk, &there.dk], dk) {
                    of_dk.keys([&here.dk, &there.dk], &errors.dk, dk);
                }
            }
        }
        worst.into_iter().find_map(Worst::finding)
    }

    /// Returns the numbers in which both runs store a gradient, which may be rounded to a wider format first in either.
    fn stored(&self, gradient: TensorName) -> Stored {
        let [here, there] = self.bounds.map(|bounds| bounds.model.stored(gradient));
        Stored { through: here.through.or(there.through), ..here }
    }

    /// Returns the errors of a query's contributions, in both runs.
    fn given(&self, readers: &Readers<'_>, position: usize, head: usize) -> GivenError {
        let [here, there] = self.bounds.map(|bounds| {
            bounds.given(readers.sequence, position, head, &self.evidence.first.out, self.against)
        });
        here.and(&there)
    }

    /// Returns the scale with the roundings of products with it.
    fn scale(&self) -> f64 {
        f64::from(self.evidence.problem.softmax.scale) * (1.0 + 8.0 * F32_ROUNDOFF)
    }

    /// Returns the errors that all queries add to the keys.
    fn key_errors(&self, readers: &Readers<'_>) -> KeyErrors {
        let (problem, inputs) = (self.evidence.problem, &self.bounds[0].inputs);
        let mut errors = KeyErrors { dk: vec![0.0; problem.dims.qk], dv: vec![0.0; problem.dims.v] };
        let model = &self.bounds[0].model;
        let add = |to: &mut [f64], row: &[f32], error: f64| {
            for (to, &x) in to.iter_mut().zip(row) {
                *to += moved_by(model.magnitude(f64::from(x)), error);
            }
        };
        readers.each(|position, head| {
            let row = problem.sequences[readers.sequence].q.row(position);
            let given = self.given(readers, position, head);
            add(&mut errors.dk, &lanes(&inputs.q, row, head), self.scale() * given.logit_gradients);
            add(&mut errors.dv, &lanes(&inputs.dout, row, head), given.weights);
        });
        errors
    }
}

/// One gradient of a KV head, in both runs.
struct Compared<'a> {
    runs: &'a Runs<'a>,
    readers: &'a Readers<'a>,
    stored: Stored,
}

impl Compared<'_> {
    /// Compares the rows of dq of the queries.
    fn queries(&self, dq: [&Array3<f32>; 2], worst: &mut Worst) {
        let Compared { runs, readers, .. } = self;
        let run = runs.evidence.problem.sequences[readers.sequence].q;
        let k_max =
            LazyCell::new(|| runs.bounds[0].keys(readers.sequence, readers.kv_head * readers.group).k_max);
        readers.each(|position, head| {
            let rows = dq.map(|dq| lanes(dq, run.row(position), head));
            if self.row_is_near(&rows[0], &rows[1..]) {
                worst.held(rows[0].len());
                return;
            }
            let error = runs.scale() * runs.given(readers, position, head).logit_gradients * *k_max;
            let place =
                Place { sequence: Some(readers.sequence), head: Some(head), row: Some(position), lane: None };
            self.query(rows, error, place, worst);
        });
    }

    /// Whether final roundings explain the differences of a row from the sum of others.
    fn row_is_near(&self, own: &[f32], parts: &[Cow<'_, [f32]>]) -> bool {
        own.iter().enumerate().all(|(lane, &own)| {
            let parts = || parts.iter().map(|part| f64::from(part[lane]));
            let rounding = self.rounding(own.into()) + parts().map(|part| self.rounding(part)).sum::<f64>();
            (f64::from(own) - parts().sum::<f64>()).abs() <= rounding
        })
    }

    /// Returns the KV heads of the other run, and the rows of the keys.
    fn others(&self) -> (Range<usize>, Run) {
        let Compared { runs, readers, .. } = self;
        let heads = readers.kv_head * runs.kv_heads..(readers.kv_head + 1) * runs.kv_heads;
        (heads, run_of(&runs.evidence.problem.sequences[readers.sequence], Side::Kv))
    }

    /// Whether final roundings explain the differences of all keys. The errors of the queries, which are expensive, are
    /// then not needed.
    fn near(&self, [here, there]: [&Array3<f32>; 2], worst: &mut Worst) -> bool {
        let (others, run) = self.others();
        let near = run.real_rows().all(|row| {
            let parts: Vec<Cow<'_, [f32]>> = others.clone().map(|head| lanes(there, row, head)).collect();
            self.row_is_near(&lanes(here, row, self.readers.kv_head), &parts)
        });
        if near {
            worst.held(run.len * here.dim().2);
        }
        near
    }

    /// Compares one row of dq.
    fn query(&self, [here, there]: [Cow<'_, [f32]>; 2], error: f64, place: Place, worst: &mut Worst) {
        for (lane, (&here, &there)) in here.iter().zip(&*there).enumerate() {
            let (here, there) = (f64::from(here), f64::from(there));
            let bound = error + self.rounding(here) + self.rounding(there);
            worst.compared();
            if self.overflows(here, bound) && self.overflows(there, bound) {
                continue;
            }
            let ratio = times_bound((here - there).abs(), bound);
            if here != there && ratio > 1.0 {
                let place = Place { lane: Some(lane), ..place };
                worst.past_bound(place, ratio, [here, there], Some(bound));
            }
        }
    }

    /// Compares all keys, lane by lane.
    fn keys(&self, [here, there]: [&Array3<f32>; 2], errors: &[f64], worst: &mut Worst) {
        let (readers, (others, run)) = (self.readers, self.others());
        for (lane, &error) in errors.iter().enumerate() {
            let mut excess = Excess { sum: 0.0, worst: None };
            for (key, row) in run.real_rows().enumerate() {
                worst.compared();
                let own = f64::from(here[[row, readers.kv_head, lane]]);
                let parts = || others.clone().map(|head| f64::from(there[[row, head, lane]]));
                let rounding = self.rounding(own) + parts().map(|part| self.rounding(part)).sum::<f64>();
                let far = error + rounding;
                // Past the largest number an infinity is right, and nothing can be said about a sum with one.
                let parts_overflow = parts().any(|part| self.overflows(part, far));
                if parts_overflow && (self.runs.kv_heads > 1 || self.overflows(own, far)) {
                    continue;
                }
                // A sum past the range of a format that saturates is cut, and no part of it may be.
                let sum = self.stored.saturated(parts().sum());
                excess.add(key, [own, sum], rounding);
            }
            let Excess { sum, worst: Some((_, key, values)) } = excess else { continue };
            if sum > error {
                let (sequence, head) = (Some(readers.sequence), Some(readers.kv_head));
                let place = Place { sequence, head, row: Some(key), lane: Some(lane) };
                worst.past_bound(place, times_bound(sum, error), values, Some(error));
            }
        }
    }

    /// Returns the most that the last rounding of a stored number may have moved it, with underflow before it.
    fn rounding(&self, value: f64) -> f64 {
        self.stored.moved(value) + self.runs.floor
    }

    /// Whether the right value may lie past the largest number, so that an infinity is right too.
    fn overflows(&self, value: f64, bound: f64) -> bool {
        value.abs() + bound >= self.stored.most()
    }
}

impl Excess {
    /// Adds a key's difference beyond its roundings. A NaN is further off than anything.
    fn add(&mut self, key: usize, values: [f64; 2], rounding: f64) {
        let [here, there] = values;
        let off = if here == there { 0.0 } else { (here - there).abs() };
        if off <= rounding {
            return;
        }
        let beyond = if off.is_nan() { f64::INFINITY } else { off - rounding };
        self.sum += beyond;
        if self.worst.is_none_or(|(worst, ..)| beyond > worst) {
            self.worst = Some((beyond, key, values));
        }
    }
}

impl GivenError {
    /// Returns the sum of both runs' errors.
    fn and(&self, other: &GivenError) -> GivenError {
        GivenError {
            weights: self.weights + other.weights,
            logit_gradients: self.logit_gradients + other.logit_gradients,
        }
    }
}
