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
//! q, k, v and dout are the inputs' elements, times their scales where they have any: exact products in f64. dk and dv
//! of a row that [several sequences share](crate::Sharing) are the sums over these sequences. A result whose format
//! saturates is cut to the format's range, [times its descale](Stored).
//!
//! The backward takes `out` and `lse` as given. From the exact ones it computes the gradient. From a subject's own it
//! computes what that subject's backward should have returned. Sums run in order of position. Nothing is reordered,
//! blocked or parallel here, and a reader can see that the result is right. [`crate::blocked`] computes the same answer
//! fast.

use ndarray::{Array1, Array2, Array3, ArrayView1, Axis, s};

use crate::sharding::run_of;
use crate::{
    ForwardResults, Gradients, InputViews, Inputs, Pass, Problem, Saved, SavedViews, Scales, Sequence,
    Stored, TensorName,
};

/// Returns the results of the forward pass. `inputs` must have the problem's shapes ([`Inputs::check`]).
pub fn forward(problem: &Problem, inputs: &Inputs) -> ForwardResults {
    InputViews::from(inputs).assert_shapes(problem, Pass::Forward);
    let values = Values::of(problem, inputs);
    let mut forward = ForwardResults {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), f64::NEG_INFINITY),
        max_logit: Array1::from_elem(problem.heads.q, f64::NEG_INFINITY),
    };
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            for i in 0..sequence.q.len {
                forward_row(problem, &values, sequence, head, i, &mut forward);
            }
        }
    }
    saturate(&mut forward.out, inputs.scales.stored(problem, TensorName::Out));
    forward
}

/// Cuts values to the range of the numbers in which they are stored, if a conversion to these saturates.
pub(crate) fn saturate(values: &mut Array3<f64>, stored: Stored) {
    if stored.format.saturates() {
        values.mapv_inplace(|value| stored.saturated(value));
    }
}

/// Cuts the gradients of a problem.
pub(crate) fn saturate_gradients(gradients: &mut Gradients, problem: &Problem, scales: &Scales) {
    let Gradients { dq, dk, dv, .. } = gradients;
    for (tensor, values) in [(TensorName::Dq, dq), (TensorName::Dk, dk), (TensorName::Dv, dv)] {
        saturate(values, scales.stored(problem, tensor));
    }
}

/// The values of the inputs, of the problem's shapes. Rows that are not real hold NaN: nothing may read them.
struct Values<'a> {
    q: Array3<f64>,
    k: Array3<f64>,
    v: Array3<f64>,
    dout: Array3<f64>,
    sink: &'a Array1<f32>,
}

impl Values<'_> {
    fn of<'a>(problem: &Problem, inputs: &'a Inputs) -> Values<'a> {
        let views = InputViews::from(inputs);
        let values = |tensor: TensorName| {
            let mut values = Array3::from_elem(views.of(tensor).dim(), f64::NAN);
            // A forward has no dout.
            let sequences = if values.is_empty() { &[][..] } else { &problem.sequences };
            for (index, both) in sequences.iter().enumerate() {
                for (position, row) in run_of(both, tensor.side()).real_rows().enumerate() {
                    for (head, mut lanes) in values.index_axis_mut(Axis(0), row).outer_iter_mut().enumerate()
                    {
                        let exact = views.values(tensor, [index, position, row, head]);
                        lanes.iter_mut().zip(exact).for_each(|(to, value)| *to = value);
                    }
                }
            }
            values
        };
        let [q, k, v, dout] = Scales::TENSORS.map(values);
        Values { q, k, v, dout, sink: &inputs.sink }
    }
}

fn forward_row(
    problem: &Problem,
    values: &Values<'_>,
    sequence: &Sequence,
    head: usize,
    i: usize,
    forward: &mut ForwardResults,
) {
    let row = sequence.q.row(i);
    let visible = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
    let logits: Vec<f64> =
        visible.clone().map(|j| logit(problem, values, head, row, sequence.kv.row(j))).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    forward.max_logit[head] = forward.max_logit[head].max(largest);

    let lse = log_sum_exp(&logits, problem.sink(head, values.sink));
    forward.lse[[head, row]] = lse;
    for (j, logit) in visible.zip(logits) {
        let weight = libm::exp(logit - lse);
        let v = values.v.slice(s![sequence.kv.row(j), head / problem.group(), ..]);
        for (out, v) in forward.out.slice_mut(s![row, head, ..]).iter_mut().zip(v) {
            *out += weight * v;
        }
    }
}

/// Returns the largest weight of each row, `[heads, rows]`; 0 where a row sees no key.
pub fn largest_weights(problem: &Problem, inputs: &Inputs) -> Array2<f64> {
    let values = Values::of(problem, inputs);
    let mut largest = Array2::zeros(problem.lse_shape());
    for sequence in &problem.sequences {
        for (head, i) in (0..problem.heads.q).flat_map(|head| (0..sequence.q.len).map(move |i| (head, i))) {
            let row = sequence.q.row(i);
            let visible = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
            let logits: Vec<f64> =
                visible.map(|j| logit(problem, &values, head, row, sequence.kv.row(j))).collect();
            let lse = log_sum_exp(&logits, problem.sink(head, values.sink));
            let weights = logits.iter().map(|logit| libm::exp(logit - lse));
            largest[[head, row]] = weights.fold(0.0, f64::max);
        }
    }
    largest
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
    let values = Values::of(problem, inputs);
    let mut gradients = Gradients {
        dq: Array3::zeros(problem.q_shape()),
        dk: Array3::zeros(problem.k_shape()),
        dv: Array3::zeros(problem.v_shape()),
        dsink: Array1::zeros(problem.learnable_sinks()),
    };
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            for i in 0..sequence.q.len {
                backward_row(problem, &values, saved, sequence, head, i, &mut gradients);
            }
        }
    }
    problem.sum_shared(&mut gradients);
    saturate_gradients(&mut gradients, problem, &inputs.scales);
    gradients
}

fn backward_row(
    problem: &Problem,
    values: &Values<'_>,
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
    let q = values.q.slice(s![row, head, ..]);
    let dout = values.dout.slice(s![row, head, ..]);
    let out = saved.out.slice(s![row, head, ..]);
    let d: f64 = dout.iter().zip(out).map(|(dout, out)| dout * out).sum();

    for j in problem.mask.visible(i, sequence.q.len, sequence.kv.len) {
        let key = sequence.kv.row(j);
        let k = values.k.slice(s![key, kv_head, ..]);
        let v = values.v.slice(s![key, kv_head, ..]);
        let s = logit(problem, values, head, row, key);
        let p = libm::exp(s - lse);
        let ds = p * (dot(dout, v) - d) * problem.softmax.cap_derivative(s) * scale;
        add_scaled(&mut gradients.dq, [row, head], ds, k);
        add_scaled(&mut gradients.dk, [key, kv_head], ds, q);
        add_scaled(&mut gradients.dv, [key, kv_head], p, dout);
    }
    if let Some(dsink) = gradients.dsink.get_mut(head) {
        *dsink -= libm::exp(f64::from(values.sink[head]) - lse) * d;
    }
}

/// Returns the logit of one query row and one key row, for a query head.
fn logit(problem: &Problem, values: &Values<'_>, head: usize, row: usize, key: usize) -> f64 {
    let q = values.q.slice(s![row, head, ..]);
    let k = values.k.slice(s![key, head / problem.group(), ..]);
    problem.softmax.cap(f64::from(problem.softmax.scale) * dot(q, k))
}

fn dot(a: ArrayView1<'_, f64>, b: ArrayView1<'_, f64>) -> f64 {
    debug_assert_eq!(a.len(), b.len(), "lanes of a product");
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds a multiple of a lane: `to[row, head, ..] += factor · lane`.
fn add_scaled(to: &mut Array3<f64>, [row, head]: [usize; 2], factor: f64, lane: ArrayView1<'_, f64>) {
    for (to, value) in to.slice_mut(s![row, head, ..]).iter_mut().zip(lane) {
        *to += factor * value;
    }
}
