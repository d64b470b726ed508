//! The acceptance rules of the field, to measure what they see: an absolute and relative tolerance, twice the error of a
//! reference in the same precision, and in FP8 the root mean square of the errors.
//!
//! All rules get the best reference that they could have, the exact answer. The test suites that use them have less.

use ndarray::{Array3, ArrayView1, s};
use seamproof_oracle::{Inputs, Problem, Sequence};

use super::tensors::Tensors;

/// Tolerance of TransformerEngine's context-parallel suite in bf16, absolute and relative. Source: `get_tols` of
/// `tests/pytorch/attention/run_attention_with_cp.py`.
pub const TOLERANCE: f64 = 2.5e-2;
/// Tolerance of cuDNN's own tests in FP8, absolute and relative. Source: `test/python/sdpa` of
/// <https://github.com/NVIDIA/cudnn-frontend>.
pub const FP8_ABSOLUTE: f64 = 0.08;
/// The relative part of that tolerance.
pub const FP8_RELATIVE: f64 = 0.2;
/// Largest root mean square of errors of TransformerEngine's context-parallel suite in FP8, in units of the range of
/// the elements. Source: `rmse_tol` of the same file.
pub const FP8_MEAN_SQUARE: f64 = 0.1;
/// Factor of flash-attention's rule. Source: `rtol` of `hopper/test_flash_attn.py`.
pub const FACTOR: f64 = 2.0;

/// An acceptance rule.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Name in a table.
    pub name: &'static str,
    /// Whether it accepts results.
    pub accepts: fn(&Compared<'_>) -> bool,
}

/// Results beside the exact answer, in the problem's own layout.
#[derive(Clone, Copy, Debug)]
pub struct Compared<'a> {
    /// The subject's results.
    pub got: &'a Tensors,
    /// The exact answer.
    pub exact: &'a Tensors,
    /// The problem.
    pub problem: &'a Problem,
    /// Its inputs.
    pub inputs: &'a Inputs,
}

/// The rules in bf16.
pub const BF16_RULES: [Rule; 2] = [
    Rule { name: "atol = rtol = 2.5e-2", accepts: |compared| compared.is_within(TOLERANCE, TOLERANCE) },
    Rule { name: "twice the reference's error", accepts: |compared| compared.is_within_twice_reference() },
];

/// The rules in FP8.
pub const FP8_RULES: [Rule; 2] = [
    Rule { name: "atol 0.08, rtol 0.2", accepts: |compared| compared.is_within(FP8_ABSOLUTE, FP8_RELATIVE) },
    Rule { name: "RMS error ≤ 0.1 of the range", accepts: |compared| compared.is_within_mean_square() },
];

impl Compared<'_> {
    /// Whether every element is within a tolerance, absolute plus relative.
    fn is_within(&self, absolute: f64, relative: f64) -> bool {
        let mut within = true;
        self.got.each(self.exact, self.problem, |_, got, right| {
            within &= (got - right).abs() <= absolute + relative * right.abs();
        });
        within
    }

    /// Whether each tensor's largest error is at most [`FACTOR`] times that of the same computation in the storage
    /// format, plus twice the loss from adding and subtracting 0.3 in f32.
    fn is_within_twice_reference(&self) -> bool {
        let Compared { got, exact, problem, inputs } = *self;
        let same = same_precision(problem, inputs, got.gradients.is_some());
        let (errors, allowed) = (got.largest_errors(exact, problem), same.largest_errors(exact, problem));
        let mut floor = [0.0_f64; 4];
        exact.each(exact, problem, |[tensor, _], value, _| {
            let value = value as f32;
            floor[tensor] = floor[tensor].max(f64::from((value + 0.3 - 0.3 - value).abs()));
        });
        (0..4).all(|tensor| errors[tensor] <= FACTOR * allowed[tensor] + 2.0 * floor[tensor])
    }

    /// Whether the root of each tensor's mean squared error is at most [`FP8_MEAN_SQUARE`] of the range of its elements.
    fn is_within_mean_square(&self) -> bool {
        let (mut squares, mut counts) = ([0.0; 4], [0.0; 4]);
        let mut ranges = [(f64::INFINITY, f64::NEG_INFINITY); 4];
        self.got.each(self.exact, self.problem, |[tensor, _], got, right| {
            squares[tensor] += (got - right).powi(2);
            counts[tensor] += 1.0;
            let (low, high) = ranges[tensor];
            ranges[tensor] = (low.min(got).min(right), high.max(got).max(right));
        });
        // The root of a sum with NaN is NaN, which is within nothing.
        (0..4).filter(|tensor| counts[*tensor] > 0.0).all(|tensor| {
            let (low, high) = ranges[tensor];
            (squares[tensor] / counts[tensor]).sqrt() <= FP8_MEAN_SQUARE * (high - low)
        })
    }
}

/// Computes attention as a framework does without a fused kernel: every product, the weights and the logit gradients
/// are stored in the format of the inputs.
fn same_precision(problem: &Problem, inputs: &Inputs, gradients: bool) -> Tensors {
    let mut out = Array3::zeros(problem.out_shape());
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
    let mut sums = shapes.map(Array3::zeros);
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            for i in 0..sequence.q.len {
                let row = Row { problem, inputs, sequence, head, i };
                row.compute(&mut out, gradients.then_some(&mut sums));
            }
        }
    }
    let format = problem.precision.out.format;
    sums.iter_mut().for_each(|sum| sum.mapv_inplace(|value| format.round(value)));
    Tensors { out, gradients: gradients.then_some(sums) }
}

/// One query row of one head.
struct Row<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    sequence: &'a Sequence,
    head: usize,
    i: usize,
}

impl Row<'_> {
    fn round(&self, value: f64) -> f64 {
        self.problem.precision.out.format.round(value)
    }

    fn compute(&self, out: &mut Array3<f64>, gradients: Option<&mut [Array3<f64>; 3]>) {
        let (problem, inputs, sequence) = (self.problem, self.inputs, self.sequence);
        let (row, kv_head) = (sequence.q.row(self.i), self.head / problem.group());
        let visible = problem.mask.visible(self.i, sequence.q.len, sequence.kv.len);
        let keys: Vec<usize> = visible.map(|j| sequence.kv.row(j)).collect();
        let q = inputs.q.slice(s![row, self.head, ..]);
        let scale = f64::from(problem.softmax.scale);
        let logit = |key: &usize| {
            let product = dot(q, inputs.k.slice(s![*key, kv_head, ..]));
            problem.softmax.cap(self.round(scale * product))
        };
        let weights = self.softmax(&keys.iter().map(logit).collect::<Vec<f64>>());
        let mut lanes = out.slice_mut(s![row, self.head, ..]);
        for (key, p) in keys.iter().zip(&weights) {
            let v = inputs.v.slice(s![*key, kv_head, ..]);
            lanes.iter_mut().zip(v).for_each(|(out, v)| *out += p * f64::from(*v));
        }
        lanes.mapv_inplace(|value| self.round(value));
        let Some([dq, dk, dv]) = gradients else { return };
        let dout = inputs.dout.slice(s![row, self.head, ..]);
        let dp: Vec<f64> =
            keys.iter().map(|key| self.round(dot(dout, inputs.v.slice(s![*key, kv_head, ..])))).collect();
        let mean: f64 = weights.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for ((key, p), dp) in keys.iter().zip(&weights).zip(&dp) {
            let ds = self.round(p * (dp - mean)) * scale;
            add(dq, [row, self.head], ds, inputs.k.slice(s![*key, kv_head, ..]));
            add(dk, [*key, kv_head], ds, q);
            add(dv, [*key, kv_head], *p, dout);
        }
    }

    /// Returns the weights of a row's logits, rounded.
    fn softmax(&self, logits: &[f64]) -> Vec<f64> {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| libm::exp(logit - largest)).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| self.round(weight / sum)).collect()
    }
}

fn dot(a: ArrayView1<'_, f32>, b: ArrayView1<'_, f32>) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn add(to: &mut Array3<f64>, [row, head]: [usize; 2], factor: f64, lane: ArrayView1<'_, f32>) {
    for (to, value) in to.slice_mut(s![row, head, ..]).iter_mut().zip(lane) {
        *to += factor * f64::from(*value);
    }
}
