//! The exact answer, in plain loops.
//!
//! Definitions, for query `i` and visible key `j` of one sequence and head (source: the softmax's definition; the
//! backward is its derivative):
//!
//! ```text
//! s_ij = cap(scale · ⟨q_i, k_j⟩)                  the logit
//! lse_i = ln( Σ_j exp(s_ij) + exp(sink) )         −∞ when there is neither key nor sink
//! p_ij = exp(s_ij − lse_i)                        the weight
//! out_i = Σ_j p_ij · v_j
//!
//! D_i = ⟨dout_i, out_i⟩
//! ds_ij = p_ij · (⟨dout_i, v_j⟩ − D_i) · cap'(s_ij)
//! dq_i = scale · Σ_j ds_ij · k_j      dk_j = scale · Σ_i ds_ij · q_i      dv_j = Σ_i p_ij · dout_i
//! dsink = −Σ_i exp(sink − lse_i) · D_i
//! ```
//!
//! dk and dv of a row that [several sequences share](crate::Sharing) are the sums over these sequences.
//!
//! The backward takes `out` and `lse` as given. From the exact ones it computes the gradient. From a subject's own it
//! computes what that subject's backward should have returned. Sums run in order of position. Nothing is reordered,
//! blocked or parallel here, and a reader can see that the result is right. [`crate::blocked`] computes the same answer
//! fast.

use ndarray::{Array1, Array2, Array3, ArrayView1, s};

use crate::{ForwardResults, Gradients, InputViews, Inputs, Pass, Problem, Saved, SavedViews, Sequence};

/// Returns the results of the forward pass. `inputs` must have the problem's shapes ([`Inputs::check`]).
pub fn forward(problem: &Problem, inputs: &Inputs) -> ForwardResults {
    InputViews::from(inputs).assert_shapes(problem, Pass::Forward);
    let mut forward = ForwardResults {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), f64::NEG_INFINITY),
        max_logit: Array1::from_elem(problem.heads.q, f64::NEG_INFINITY),
    };
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            for i in 0..sequence.q.len {
                forward_row(problem, inputs, sequence, head, i, &mut forward);
            }
        }
    }
    forward
}

fn forward_row(
    problem: &Problem,
    inputs: &Inputs,
    sequence: &Sequence,
    head: usize,
    i: usize,
    forward: &mut ForwardResults,
) {
    let row = sequence.q.row(i);
    let visible = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
    let logits: Vec<f64> =
        visible.clone().map(|j| logit(problem, inputs, head, row, sequence.kv.row(j))).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    forward.max_logit[head] = forward.max_logit[head].max(largest);

    let lse = log_sum_exp(&logits, problem.sink(head, &inputs.sink));
    forward.lse[[head, row]] = lse;
    for (j, logit) in visible.zip(logits) {
        let weight = libm::exp(logit - lse);
        let v = inputs.v.slice(s![sequence.kv.row(j), head / problem.group(), ..]);
        for (out, v) in forward.out.slice_mut(s![row, head, ..]).iter_mut().zip(v) {
            *out += weight * f64::from(*v);
        }
    }
}

/// Returns `ln(Σ exp(logits) + exp(sink))`. The largest term is taken out, and nothing overflows.
pub fn log_sum_exp(logits: &[f64], sink: Option<f64>) -> f64 {
    let largest = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let sum: f64 = logits.iter().copied().chain(sink).map(|logit| libm::exp(logit - largest)).sum();
    largest + libm::log(sum)
}

/// Returns the gradients, given the forward's `out` and `lse`. A row whose lse is −∞ saw no key and adds nothing.
pub fn backward(problem: &Problem, inputs: &Inputs, saved: &Saved) -> Gradients {
    InputViews::from(inputs).assert_shapes(problem, Pass::Backward);
    SavedViews::from(saved).assert_shapes(problem);
    let mut gradients = Gradients {
        dq: Array3::zeros(problem.q_shape()),
        dk: Array3::zeros(problem.k_shape()),
        dv: Array3::zeros(problem.v_shape()),
        dsink: Array1::zeros(problem.learnable_sinks()),
    };
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            for i in 0..sequence.q.len {
                backward_row(problem, inputs, saved, sequence, head, i, &mut gradients);
            }
        }
    }
    problem.sum_shared(&mut gradients);
    gradients
}

fn backward_row(
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    sequence: &Sequence,
    head: usize,
    i: usize,
    gradients: &mut Gradients,
) {
    let (row, kv_head) = (sequence.q.row(i), head / problem.group());
    let lse = saved.lse[[head, row]];
    if lse == f64::NEG_INFINITY {
        return;
    }
    let scale = f64::from(problem.softmax.scale);
    let q = inputs.q.slice(s![row, head, ..]);
    let dout = inputs.dout.slice(s![row, head, ..]);
    let out = saved.out.slice(s![row, head, ..]);
    let d: f64 = dout.iter().zip(out).map(|(dout, out)| f64::from(*dout) * out).sum();

    for j in problem.mask.visible(i, sequence.q.len, sequence.kv.len) {
        let key = sequence.kv.row(j);
        let k = inputs.k.slice(s![key, kv_head, ..]);
        let v = inputs.v.slice(s![key, kv_head, ..]);
        let s = logit(problem, inputs, head, row, key);
        let p = libm::exp(s - lse);
        let ds = p * (dot(dout, v) - d) * problem.softmax.cap_derivative(s) * scale;
        add_scaled(&mut gradients.dq, [row, head], ds, k);
        add_scaled(&mut gradients.dk, [key, kv_head], ds, q);
        add_scaled(&mut gradients.dv, [key, kv_head], p, dout);
    }
    if let Some(dsink) = gradients.dsink.get_mut(head) {
        *dsink -= libm::exp(f64::from(inputs.sink[head]) - lse) * d;
    }
}

/// Returns the logit of one query row and one key row, for a query head.
fn logit(problem: &Problem, inputs: &Inputs, head: usize, row: usize, key: usize) -> f64 {
    let q = inputs.q.slice(s![row, head, ..]);
    let k = inputs.k.slice(s![key, head / problem.group(), ..]);
    problem.softmax.cap(f64::from(problem.softmax.scale) * dot(q, k))
}

fn dot(a: ArrayView1<'_, f32>, b: ArrayView1<'_, f32>) -> f64 {
    debug_assert_eq!(a.len(), b.len(), "lanes of a product");
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Adds a multiple of a lane: `to[row, head, ..] += factor · lane`.
fn add_scaled(to: &mut Array3<f64>, [row, head]: [usize; 2], factor: f64, lane: ArrayView1<'_, f32>) {
    for (to, value) in to.slice_mut(s![row, head, ..]).iter_mut().zip(lane) {
        *to += factor * f64::from(*value);
    }
}
