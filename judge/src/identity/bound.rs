//! Bounds of a row's results without the exact answer: the envelope's own terms, evaluated with norms of the inputs.
//!
//! For query row i and the keys of its sequence, `Σ_c |q_ic||k_jc| ≤ |q_i|·max_j |k_j|` (Cauchy and Schwarz). No
//! logit therefore exceeds `M = scale · |q_i| · max_j |k_j|` (or the soft cap, or the sink), and none lies further
//! than `2·M` from another. The weights of a row add up to 1 at most, so a term that is linear in the weight `p` is
//! at most its value at `p = 1`. The error that a format's floor adds is counted once for each key. A bound that
//! would say nothing is infinite.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::rc::Rc;

use ndarray::Array3;
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::envelope::{
    BoundTier, Delta, F32_ROUNDOFF, GradientPair, Merges, Model, Partition, RowStatistics,
};
use seamproof_oracle::{Format, Inputs, Problem, Quantity, Scales, TensorName};

use super::norms::{KeyNorms, Norms, capped, norm};
use crate::ladder::compare::lanes;
use crate::ladder::evidence::Evidence;

/// Largest error of an exponent that is bounded to first order.
const EXPONENT_ERROR_MAX: f64 = 0.25;

/// Errors of one row of one head.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowError {
    /// Error of the row's LSE.
    pub(super) lse: f64,
    /// Error of an element of the row's out.
    pub(super) out: f64,
}

impl RowError {
    /// Error of a row about which nothing can be said.
    const UNKNOWN: RowError = RowError { lse: f64::INFINITY, out: f64::INFINITY };
}

/// Right value that gradients are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Against {
    /// Gradients of the exact function. The errors of the saved out and lse count.
    Exact,
    /// Gradients that follow from the saved out and lse.
    Saved,
}

/// Errors of one query's contributions in the backward, added up over its keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct GivenError {
    /// Error of the query's weights, as they enter dv.
    pub(super) weights: f64,
    /// Error of the query's logit gradients without the scale, as they enter dq and dk.
    pub(super) logit_gradients: f64,
}

impl GivenError {
    /// Error of a query about which nothing can be said.
    const UNKNOWN: GivenError = GivenError { weights: f64::INFINITY, logit_gradients: f64::INFINITY };
}

/// Bounds for the rows of a problem on given inputs.
pub(super) struct Bounds<'a> {
    problem: &'a Problem,
    /// The inputs as values.
    pub(super) inputs: Cow<'a, Inputs>,
    norms: OnceCell<Rc<Norms>>,
    pub(super) model: Model,
    /// Shared place for the norms of the case itself, which the next user finds there.
    shared: Option<&'a OnceCell<Rc<Norms>>>,
    partition: Partition,
    scales: &'a Scales,
    underflow: f64,
    /// The numbers of [`Bounds::ds_most`], by sequence and head.
    largest: OnceCell<Vec<Vec<f64>>>,
}

/// A row in the terms of the envelope, with the errors of its logits and the number of its keys.
#[derive(Clone, Copy)]
struct Worst {
    row: RowStatistics,
    a: f64,
    keys: usize,
    norms: KeyNorms,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(evidence: &Evidence<'a>, problem: &'a Problem, inputs: &'a Inputs) -> Bounds<'a> {
        let backend = evidence.backend;
        let own = std::ptr::eq(problem, evidence.problem) && std::ptr::eq(inputs, evidence.inputs);
        let shared = own.then_some(&evidence.told.norms);
        let partition = if own { evidence.partition() } else { evidence.partition_of(problem) };
        let model =
            Model::new(problem, backend.declaration().arithmetic, partition).with_scales(&inputs.scales);
        let underflow = backend.declaration().arithmetic.accumulation.underflow();
        let (scales, inputs) = (&inputs.scales, inputs.values(problem));
        let (norms, largest) = (OnceCell::new(), OnceCell::new());
        Bounds { problem, inputs, norms, shared, model, partition, scales, underflow, largest }
    }

    /// Returns the bounds of the case's own run for a law between its results; `None` where its partial results may have
    /// been cut, of which no law knows.
    pub(super) fn of_law(evidence: &Evidence<'a>) -> Option<Bounds<'a>> {
        let bounds = Bounds::new(evidence, evidence.problem, evidence.inputs);
        (!bounds.may_be_cut(Some(&evidence.first.amax))).then_some(bounds)
    }

    /// Returns the norms. They are computed when the first row is asked for, because most sums are explained without
    /// them.
    fn norms(&self) -> &Norms {
        let make = || Rc::new(Norms::new(self.problem, &self.inputs));
        self.norms.get_or_init(|| self.shared.map_or_else(make, |shared| shared.get_or_init(make).clone()))
    }

    /// Returns the most that roundings of partial gradients, and of single heads' gradients, may lose below the normal
    /// range of their format.
    pub(super) fn sum_floor(&self) -> f64 {
        self.model.largest_sum_floor() + self.model.heads_floor()
    }

    /// Whether partial results may have been cut to the range of their codes, which no result shows. What quantises them
    /// may tell their largest magnitudes.
    pub(super) fn may_be_cut(&self, told: Option<&Amaxes>) -> bool {
        let is_cut = |result: TensorName| {
            let amax = Quantity::of(result).and_then(|quantity| told?.of(quantity));
            let most = self.scales.stored(self.problem, result).most();
            amax.is_none_or(|amax| f64::from(amax) > most)
        };
        let results = [TensorName::Out, TensorName::Dq, TensorName::Dk, TensorName::Dv];
        self.model.makes_partial_codes() && results.into_iter().any(is_cut)
    }

    /// Returns the error of a row's D against the value that follows from the saved out and lse. It is that of
    /// `Σ dout·out` where D comes from an out, and otherwise that of `Σ P·dP`, whose right value follows from the saved
    /// lse alone. Two runs of a subject make D in the same way, so an unknown way has the larger of both errors.
    fn d_error(&self, worst: &Worst, error: &RowError, dout: f64, out: f64) -> f64 {
        let lanes = self.problem.dims.v as f64;
        let stored = self.model.stored(TensorName::Out);
        // Half spacings of a row are its unit roundoffs, and at least half a smallest spacing each.
        let wide = stored.through.map_or(0.0, Format::unit_roundoff);
        let unit = stored.format.unit_roundoff() + 2.0 * wide;
        let roundings = 1.01 * unit * out + 2.0 * stored.tiny_half() * lanes.sqrt();
        let of_out = self.model.out_dot_error(dout * out, dout * roundings);
        let of_dots = || {
            let b = dout * worst.norms.v;
            let total = libm::exp(error.lse);
            let pair = GradientPair { x: b, b, ..whole_weight(&worst.row, worst.a) };
            let (magnitude, errors) = self.model.weighted_dot(&pair);
            // A weight that was rounded before may have lost as much again below its format's normal range.
            let floor = 4.0 * self.underflow * (1.0 + b) + self.model.weight_floor() * b;
            let floor = worst.keys as f64 * floor;
            self.model.weighted_dots_error(worst.keys, total * magnitude, total * 1.01 * errors) + floor
        };
        match self.model.delta() {
            Delta::StoredOut | Delta::UnroundedOut => of_out,
            Delta::WeightedDots => of_dots(),
            Delta::Unknown => of_out.max(of_dots()),
        }
    }

    /// Returns the most by which D of a row may lie from `Σ dout·out` of the out that the subject returned, whatever D
    /// is made of. `Σ P·dP` is there where the out and lse are within their own bounds: it is `dout` times the exact
    /// out at the returned lse, and the error of the sum.
    pub(super) fn delta_apart(
        &self,
        sequence: usize,
        position: usize,
        head: usize,
        out: &Array3<f32>,
    ) -> f64 {
        let Some(worst) = self.worst(sequence, position, head) else { return f64::INFINITY };
        let at = self.problem.sequences[sequence].q.row(position);
        let (norm_dout, norm_out) = (norm(&self.inputs.dout, at, head), norm(out, at, head));
        let norm_dout = norm_dout + self.raise(self.problem.dims.v);
        let dout_sum = lanes(&self.inputs.dout, at, head).iter().map(|&x| f64::from(x.abs())).sum::<f64>();
        let error = self.row_of(&worst);
        let apart = dout_sum * error.out + libm::expm1(error.lse) * norm_dout * worst.norms.v;
        apart + self.d_error(&worst, &error, norm_dout, norm_out)
    }

    /// Returns the largest magnitude of dS of a query head in a sequence, errors included, or more; 0 where no bound needs
    /// it.
    pub(super) fn ds_most(&self, sequence: usize, head: usize) -> f64 {
        if !self.model.scales_tiles() {
            return 0.0;
        }
        let of_sequence = |sequence| {
            let of_head = |head| self.largest_gradient(sequence, head);
            (0..self.problem.heads.q).map(of_head).collect()
        };
        self.largest.get_or_init(|| (0..self.problem.sequences.len()).map(of_sequence).collect())[sequence]
            [head]
    }

    fn largest_gradient(&self, sequence: usize, head: usize) -> f64 {
        let run = self.problem.sequences[sequence].q;
        let of_row = |position| {
            let Some(worst) = self.worst(sequence, position, head) else { return f64::INFINITY };
            let (error, lanes) = (self.row_of(&worst), self.problem.dims.v);
            let dout = norm(&self.inputs.dout, run.row(position), head) + self.raise(lanes);
            // The out that a subject stores is off by an error in each lane.
            let out = worst.norms.v + error.out * (lanes as f64).sqrt();
            let (x, b) = (dout * (worst.norms.v + out), dout * worst.norms.v);
            let d_error = self.d_error(&worst, &error, dout, out);
            let pair = GradientPair { x, b, d_error, ..whole_weight(&worst.row, worst.a) };
            let (ds, ds_error) = self.model.logit_gradient(&pair);
            1.01 * libm::exp(error.lse) * (ds + ds_error)
        };
        (0..run.len).map(of_row).fold(0.0, f64::max)
    }

    /// Returns how far the D that follows from the saved out and lse may lie from the exact one.
    fn saved_d_error(&self, worst: &Worst, error: &RowError, dout: f64, dout_sum: f64) -> f64 {
        let of_out = dout_sum * error.out;
        let of_dots = libm::expm1(error.lse) * dout * worst.norms.v;
        match self.model.delta() {
            Delta::StoredOut | Delta::UnroundedOut => of_out,
            Delta::WeightedDots => of_dots,
            Delta::Unknown => of_out.max(of_dots),
        }
    }

    /// Returns the most that roundings of partial outs, and of their merged sums, may lose below the normal range.
    fn merge_floor(&self) -> f64 {
        let Merges { count, step, running, .. } = self.partition.merges;
        if count == 0 { 0.0 } else { step.tiny_half() + 2.0 * count as f64 * running.tiny_half() }
    }

    /// Returns the most that one gradient's operations may lose below the normal range, the roundings of partial
    /// gradients included.
    pub(super) fn gradient_floor(&self) -> f64 {
        let most = |len: fn(&seamproof_oracle::Sequence) -> usize| {
            self.problem.sequences.iter().map(len).max().unwrap_or(0)
        };
        let terms = (self.problem.group() * most(|s| s.q.len)).max(most(|s| s.kv.len));
        self.sum_floor() + (terms + 8) as f64 * self.underflow
    }

    /// Returns the norms of a sequence's keys and values.
    pub(super) fn keys(&self, sequence: usize, head: usize) -> KeyNorms {
        self.norms().keys[sequence][head / self.problem.group()]
    }

    /// Returns the most that an aligning unit adds to a norm. Such a unit takes no factor for less than the smallest
    /// normal number of its format.
    fn raise(&self, lanes: usize) -> f64 {
        self.model.magnitude(f64::MIN_POSITIVE) * (lanes as f64).sqrt()
    }

    fn raised(&self, KeyNorms { k, k_max, v, v_max }: KeyNorms) -> KeyNorms {
        let (dims, lane) = (self.problem.dims, self.raise(1));
        let (k, v) = (k + self.raise(dims.qk), v + self.raise(dims.v));
        KeyNorms { k, k_max: k_max + lane, v, v_max: v_max + lane }
    }

    /// Returns the worst that a row can be; `None` where the errors of its exponents are not bounded to first order.
    fn worst(&self, sequence: usize, position: usize, head: usize) -> Option<Worst> {
        let both = &self.problem.sequences[sequence];
        let keys = self.problem.mask.visible(position, both.q.len, both.kv.len).len();
        let norms = self.raised(self.keys(sequence, head));
        let q = norm(&self.inputs.q, both.q.row(position), head) + self.raise(self.problem.dims.qk);
        let a = q * norms.k;
        let sink = self.problem.sink(head, &self.inputs.sink);
        let logit = capped(self.problem, f64::from(self.problem.softmax.scale) * a);
        let max = logit.max(sink.map_or(0.0, f64::abs));
        let log_keys = libm::log(keys as f64 + 1.0);
        let exponent = self.model.logit_error(a, max) + F32_ROUNDOFF * 8.0 * (max + log_keys);
        let sum = keys as f64 + 1.0;
        // The sink's own error is no larger than a key's, whose share is 1 in the terms below.
        let row =
            RowStatistics { keys, max, max_abs: max, range: 2.0 * max, sum, lse: max + log_keys, sink: None };
        (exponent <= EXPONENT_ERROR_MAX).then_some(Worst { row, a, keys, norms })
    }

    /// Returns the errors of a row.
    pub(super) fn row(&self, sequence: usize, position: usize, head: usize) -> RowError {
        self.worst(sequence, position, head).map_or(RowError::UNKNOWN, |worst| self.row_of(&worst))
    }

    fn row_of(&self, Worst { row, a, keys, norms }: &Worst) -> RowError {
        let (a, keys, g) = (*a, *keys, self.model.value_sum(*keys));
        let pair = self.model.of_row(row).pair(-row.max, 1.0, a, g);
        let denominator = self.model.denominator(row, pair.weight + F32_ROUNDOFF * row.max, BoundTier::Worst);
        let floor = self.model.weight_floor().max(self.underflow);
        let values = (pair.value + pair.rounding.most + keys as f64 * floor * (1.0 + g)) * norms.v_max;
        RowError {
            lse: self.model.lse_bound(row, denominator),
            out: self.model.out_row(row, denominator, norms.v_max).bound(norms.v_max, values)
                + self.merge_floor(),
        }
    }

    /// Returns the error of `Σ_j p_ij` as it enters `Σ_j dv_j`, relative to dout. The weights are recomputed,
    /// normalised with the row's own LSE, rounded and summed.
    pub(super) fn weights_in_dv(&self, sequence: usize, position: usize, head: usize) -> f64 {
        let Some(worst) = self.worst(sequence, position, head) else { return f64::INFINITY };
        let Worst { row, a, keys, .. } = worst;
        let sums = self.sums(sequence, keys);
        let pair = self.model.gradient_pair(&whole_weight(&row, a), sums);
        let floor = self.model.weight_floors(sums) + 2.0 * self.underflow;
        1.01 * (pair.dv + pair.p.most) + keys as f64 * floor + libm::expm1(self.row_of(&worst).lse)
    }

    /// Returns the largest `|Σ_j dS_ij|` of a right subject, from the norms of the row's dout and of the out that the
    /// subject returned.
    pub(super) fn residue_in_dk(
        &self,
        sequence: usize,
        position: usize,
        head: usize,
        (dout, dout_sum, out): (f64, f64, f64),
    ) -> f64 {
        let Some(worst) = self.worst(sequence, position, head) else { return f64::INFINITY };
        let Worst { row, a, keys, norms } = worst;
        let dout = dout + self.raise(self.problem.dims.v);
        // D is a product with out, or a mean of products with values.
        let mean = if self.model.weighs_dots() { out.max(norms.v) } else { out };
        let (x, b) = (dout * (norms.v + mean), dout * norms.v);
        let error = self.row_of(&worst);
        let sums = self.sums(sequence, keys);
        let d_error = self.d_error(&worst, &error, dout, out);
        let ds_most = self.ds_most(sequence, head);
        let pair = GradientPair { x, b, d_error, ds_most, ..whole_weight(&row, a) };
        let pair = self.model.gradient_pair(&pair, sums);
        let floor = self.model.logit_gradient_floors(sums, ds_most) + 4.0 * self.underflow * (1.0 + x);
        let total = libm::exp(error.lse);
        // D does not come from the exact out, so the error of what it comes from counts.
        let saved = self.saved_d_error(&worst, &error, dout, dout_sum);
        total * (1.01 * (pair.dk + pair.ds.most) + saved) + keys as f64 * floor
    }

    /// Returns the errors of one query's contributions in the backward, from the norms of its dout and of the `out`
    /// that the subject returned.
    pub(super) fn given(
        &self,
        sequence: usize,
        position: usize,
        head: usize,
        out: &Array3<f32>,
        against: Against,
    ) -> GivenError {
        let Some(worst) = self.worst(sequence, position, head) else { return GivenError::UNKNOWN };
        let Worst { row, a, keys, norms } = worst;
        let at = self.problem.sequences[sequence].q.row(position);
        let (dout, out) = (norm(&self.inputs.dout, at, head), norm(out, at, head));
        let dout = dout + self.raise(self.problem.dims.v);
        // The exact out lies in the convex hull of the values.
        let x = dout * (norms.v + out.max(norms.v));
        let error = self.row_of(&worst);
        let d_error = self.d_error(&worst, &error, dout, out);
        let (ds_most, sums) = (self.ds_most(sequence, head), self.sums(sequence, keys));
        let pair = GradientPair { x, b: dout * norms.v, d_error, ds_most, ..whole_weight(&row, a) };
        let pair = self.model.gradient_pair(&pair, sums);
        let total = libm::exp(error.lse);
        let floor = |of_format: f64, x: f64| keys as f64 * (of_format + 4.0 * self.underflow * (1.0 + x));
        let own = GivenError {
            weights: total * 1.01 * (pair.dv + pair.p.most) + floor(self.model.weight_floors(sums), 0.0),
            logit_gradients: total * 1.01 * (pair.dk.max(pair.dq) + pair.ds.most)
                + floor(self.model.logit_gradient_floors(sums, ds_most), x),
        };
        let dout_sum = lanes(&self.inputs.dout, at, head).iter().map(|&x| f64::from(x.abs())).sum::<f64>();
        match against {
            Against::Saved => own,
            Against::Exact => GivenError {
                weights: own.weights + libm::expm1(error.lse),
                logit_gradients: own.logit_gradients
                    + libm::expm1(error.lse) * x
                    + total * self.saved_d_error(&worst, &error, dout, dout_sum),
            },
        }
    }

    /// Returns bounds of `Σ_c |q_ic||k_jc|` and of `Σ_c |dout_ic||v_jc|` for a query and any key of its sequence.
    pub(super) fn products(&self, sequence: usize, position: usize, head: usize) -> [f64; 2] {
        let row = self.problem.sequences[sequence].q.row(position);
        let KeyNorms { k, v, .. } = self.raised(self.keys(sequence, head));
        let q = norm(&self.inputs.q, row, head) + self.raise(self.problem.dims.qk);
        let dout = norm(&self.inputs.dout, row, head) + self.raise(self.problem.dims.v);
        [q * k, dout * v]
    }

    fn sums(&self, sequence: usize, keys: usize) -> (f64, f64) {
        self.model.gradient_sums(self.problem.group() * self.problem.sequences[sequence].q.len, keys)
    }

    /// Returns the exact logit of a pair, and `Σ_c |q_ic||k_jc|`.
    pub(super) fn logit(&self, sequence: usize, position: usize, key: usize, head: usize) -> (f64, f64) {
        let both = &self.problem.sequences[sequence];
        let q = lanes(&self.inputs.q, both.q.row(position), head);
        let k = lanes(&self.inputs.k, both.kv.row(key), head / self.problem.group());
        let products = q.iter().zip(&*k).map(|(&q, &k)| (f64::from(q), f64::from(k)));
        let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, all), (q, k)| {
            (sum + q * k, all + self.model.magnitude(q) * self.model.magnitude(k))
        });
        (self.problem.softmax.cap(f64::from(self.problem.softmax.scale) * sum), magnitude)
    }
}

/// Returns the pair of a row that has all of its weight on one key.
fn whole_weight(row: &RowStatistics, a: f64) -> GradientPair {
    GradientPair::of_weight(-row.max, row.lse, 1.0, a)
}

/// Returns `ln(1 + share)` and its error. The share is a difference of weights that come from an LSE with the given
/// error. The answer is `None` where the row is nearly empty afterwards, or the weights say nothing.
pub(super) fn moved_lse(share: f64, lse_error: f64) -> Option<(f64, f64)> {
    let (rest, error) = (1.0 + share, share.abs() * libm::expm1(lse_error));
    let known = share.is_finite() && rest >= 0.25 && error <= rest / 2.0;
    known.then(|| (libm::log(rest), error / (rest - error)))
}
