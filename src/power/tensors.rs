//! [`Tensors`]: out and the gradients, as a subject returned them or as they should be.

use ndarray::{Array3, s};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{ForwardResults, Gradients, Inputs, Problem, Saved, Side, blocked};

use seamproof_judge::subject::RankOutputs;

/// Out and the gradients, in the problem's own layout.
#[derive(Clone, Debug)]
pub struct Tensors {
    pub(super) out: Array3<f64>,
    pub(super) gradients: Option<[Array3<f64>; 3]>,
}

impl Tensors {
    /// Returns a subject's results.
    pub fn of(results: &RankOutputs) -> Tensors {
        let wide = |array: &Array3<f32>| array.mapv(f64::from);
        let gradients = results.gradients.as_ref().map(|g| [wide(&g.dq), wide(&g.dk), wide(&g.dv)]);
        Tensors { out: wide(&results.out), gradients }
    }

    /// Returns the exact answer, with gradients where they are asked for.
    pub fn exact(problem: &Problem, inputs: &Inputs, gradients: bool) -> Tensors {
        let ForwardResults { out, lse, .. } = blocked::forward(problem, inputs, None).exact;
        let backward = |saved: &Saved| {
            let Gradients { dq, dk, dv, .. } = blocked::backward(problem, inputs, saved, None).exact;
            [dq, dk, dv]
        };
        let saved = Saved { out, lse };
        let gradients = gradients.then(|| backward(&saved));
        Tensors { out: saved.out, gradients }
    }

    /// Returns the tensors with the side whose rows they have.
    fn sides(&self) -> Vec<(Side, &Array3<f64>)> {
        let mut all = vec![(Side::Q, &self.out)];
        if let Some([dq, dk, dv]) = &self.gradients {
            all.extend([(Side::Q, dq), (Side::Kv, dk), (Side::Kv, dv)]);
        }
        all
    }

    /// Calls `visit([tensor, sequence], got, right)` for every element of every real row.
    pub fn each(&self, right: &Tensors, problem: &Problem, mut visit: impl FnMut([usize; 2], f64, f64)) {
        for (tensor, ((side, got), (_, right))) in self.sides().into_iter().zip(right.sides()).enumerate() {
            for (index, sequence) in problem.sequences.iter().enumerate() {
                for row in run_of(sequence, side).real_rows() {
                    let lanes = got.slice(s![row, .., ..]).into_iter();
                    for (got, right) in lanes.zip(right.slice(s![row, .., ..])) {
                        visit([tensor, index], *got, *right);
                    }
                }
            }
        }
    }

    /// Returns for each tensor the largest error against `right`.
    pub(super) fn largest_errors(&self, right: &Tensors, problem: &Problem) -> [f64; 4] {
        let mut largest = [0.0; 4];
        self.each(right, problem, |[tensor, _], got, right| {
            let error = (got - right).abs();
            largest[tensor] = if error.is_nan() { f64::INFINITY } else { f64::max(largest[tensor], error) };
        });
        largest
    }
}
