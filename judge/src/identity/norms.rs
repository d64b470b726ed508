//! Norms of the inputs of a case.

use ndarray::Array3;
use seamproof_oracle::{Inputs, Problem};

use crate::ladder::compare::lanes;

/// Largest norms of the keys and values of a sequence and KV head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyNorms {
    /// Largest norm of a key, `max_j |k_j|`.
    pub(super) k: f64,
    /// Largest element of a key, `|k_jc|`.
    pub(super) k_max: f64,
    /// Largest norm of a value, `max_j |v_j|`.
    pub(super) v: f64,
    /// Largest element of a value, `|v_jc|`.
    pub(super) v_max: f64,
}

/// Norms of all keys of a problem.
pub(crate) struct Norms {
    pub(super) keys: Vec<Vec<KeyNorms>>,
    pub(super) q: Vec<f64>,
}

/// Returns the Euclidean norm of a row's lanes.
pub(super) fn norm(tensor: &Array3<f32>, row: usize, head: usize) -> f64 {
    let squares = lanes(tensor, row, head).iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
    squares.sqrt()
}

impl Norms {
    pub(super) fn new(problem: &Problem, inputs: &Inputs) -> Norms {
        let largest = |tensor: &Array3<f32>, row: usize, head: usize| {
            lanes(tensor, row, head).iter().fold(0.0, |most: f64, &x| most.max(f64::from(x.abs())))
        };
        let of = |sequence: &seamproof_oracle::Sequence, head: usize| {
            sequence.kv.real_rows().fold(KeyNorms::default(), |most, row| KeyNorms {
                k: most.k.max(norm(&inputs.k, row, head)),
                k_max: most.k_max.max(largest(&inputs.k, row, head)),
                v: most.v.max(norm(&inputs.v, row, head)),
                v_max: most.v_max.max(largest(&inputs.v, row, head)),
            })
        };
        let keys = problem.sequences.iter().map(|s| (0..problem.heads.kv).map(|h| of(s, h)).collect());
        let q = (0..problem.heads.q).map(|head| {
            let rows = problem.sequences.iter().flat_map(|sequence| sequence.q.real_rows());
            rows.map(|row| norm(&inputs.q, row, head)).fold(0.0, f64::max)
        });
        Norms { keys: keys.collect(), q: q.collect() }
    }

    /// Returns a bound that no logit of the problem exceeds.
    pub(super) fn largest_logit(&self, problem: &Problem) -> f64 {
        let q = self.q.iter().copied().fold(0.0, f64::max);
        let k = self.keys.iter().flatten().map(|keys| keys.k).fold(0.0, f64::max);
        capped(problem, f64::from(problem.softmax.scale) * q * k)
    }
}

pub(super) fn capped(problem: &Problem, logit: f64) -> f64 {
    problem.softmax.softcap.map_or(logit, |cap| logit.min(f64::from(cap)))
}
