//! Pairs: the queries and keys of one sequence, with the logit, the weight and the gradient of any pair, one by one and in
//! f64. A pair is a query, a query head and a key. Inputs are [values](Inputs::values): their scales are in the elements.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::Array3;
use seamproof_oracle::exact::log_sum_exp;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Inputs, Problem, SavedViews, Sequence, Side};

use super::compare::lanes;
use super::stories::LANES_MIN;

/// Largest number of pairs of rows, whether they see each other or not, times query heads of a case in which mistakes of
/// all pairs are asked for. Each one takes some hundredths of a second there.
pub(super) const PAIRS_MAX: usize = 1 << 18;

/// A row of a tensor, and a head.
pub(super) type RowOfHead = (usize, usize);

/// Returns the logit of a row of q with a row of k, whichever sequences they are of.
pub(super) fn logit(problem: &Problem, inputs: &Inputs, query: RowOfHead, key: RowOfHead) -> f64 {
    let product = dot(&lanes(&inputs.q, query.0, query.1), &lanes(&inputs.k, key.0, key.1));
    problem.softmax.cap(f64::from(problem.softmax.scale) * product)
}

/// Returns LSE, the keys' share of the weights, and out of a query of a head, of these logits and rows of v.
pub(super) fn weighed(
    (problem, inputs): (&Problem, &Inputs),
    head: usize,
    logits: &[f64],
    values: impl Iterator<Item = RowOfHead>,
) -> (f64, f64, Vec<f64>) {
    let lse = log_sum_exp(logits, problem.sink(head, &inputs.sink));
    let (mut share, mut out) = (0.0, vec![0.0; problem.dims.v]);
    for ((row, kv_head), logit) in values.zip(logits) {
        let weight = libm::exp(logit - lse);
        share += weight;
        let value = lanes(&inputs.v, row, kv_head);
        out.iter_mut().zip(widened(&value)).for_each(|(out, v)| *out += weight * v);
    }
    (lse, share, out)
}

/// The pairs of a sequence of a case.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    pub(super) problem: &'a Problem,
    pub(super) inputs: &'a Inputs,
    /// Index of the sequence.
    pub(super) sequence: usize,
    pub(super) both: &'a Sequence,
}

impl<'a> Pairs<'a> {
    /// Returns the pairs of a sequence; `None` where rows of so few lanes tell nothing.
    pub(super) fn new(
        problem: &'a Problem,
        inputs: &'a Inputs,
        sequence: usize,
        dim: usize,
    ) -> Option<Pairs<'a>> {
        let both = problem.sequences.get(sequence).filter(|_| dim >= LANES_MIN)?;
        Some(Pairs { problem, inputs, sequence, both })
    }

    /// Returns the number of real rows of a side.
    pub(super) fn len(&self, side: Side) -> usize {
        run_of(self.both, side).len
    }

    /// Returns the query heads of a KV head.
    pub(super) fn heads(&self, kv_head: usize) -> Range<usize> {
        kv_head * self.problem.group()..(kv_head + 1) * self.problem.group()
    }

    pub(super) fn of_query<'t>(&self, tensor: &'t Array3<f32>, query: usize, head: usize) -> Cow<'t, [f32]> {
        lanes(tensor, self.both.q.row(query), head)
    }

    pub(super) fn of_key<'t>(&self, tensor: &'t Array3<f32>, key: usize, head: usize) -> Cow<'t, [f32]> {
        lanes(tensor, self.both.kv.row(key), head / self.problem.group())
    }

    pub(super) fn sees(&self, query: usize, key: usize) -> bool {
        self.problem.mask.visible(query, self.both.q.len, self.both.kv.len).contains(&key)
    }

    /// Returns the logit of a query, for a head, and a key.
    pub(super) fn logit(&self, query: usize, head: usize, key: usize) -> f64 {
        self.logit_of(query, head, key, head / self.problem.group())
    }

    /// Returns the logit with a key of any KV head.
    fn logit_of(&self, query: usize, head: usize, key: usize, kv_head: usize) -> f64 {
        let [of_query, of_key] = [(self.both.q.row(query), head), (self.both.kv.row(key), kv_head)];
        logit(self.problem, self.inputs, of_query, of_key)
    }

    /// Returns LSE, the keys' share of the weights, and out of a query, with the visible keys of one KV head and the
    /// values of another.
    pub(super) fn attended(
        &self,
        query: usize,
        head: usize,
        [of_keys, of_values]: [usize; 2],
    ) -> (f64, f64, Vec<f64>) {
        let keys = self.problem.mask.visible(query, self.both.q.len, self.both.kv.len);
        let logit = |key: usize| self.logit_of(query, head, key, of_keys);
        let logits: Vec<f64> = keys.clone().map(logit).collect();
        let values = keys.map(|key| (self.both.kv.row(key), of_values));
        weighed((self.problem, self.inputs), head, &logits, values)
    }

    /// Returns the right LSE of a query.
    pub(super) fn lse(&self, query: usize, head: usize) -> f64 {
        let keys = self.problem.mask.visible(query, self.both.q.len, self.both.kv.len);
        let logits: Vec<f64> = keys.clone().map(|key| self.logit(query, head, key)).collect();
        log_sum_exp(&logits, self.problem.sink(head, &self.inputs.sink))
    }

    /// Returns the LSE that a backward begins with.
    pub(super) fn saved_lse(&self, query: usize, head: usize, saved: &SavedViews<'_>) -> f64 {
        saved.lse[[head, self.both.q.row(query)]]
    }

    /// Returns the weight of the pair of a query, for a head, and a key.
    pub(super) fn weight(&self, (query, head, key): (usize, usize, usize), lse: f64) -> f64 {
        libm::exp(self.logit(query, head, key) - lse)
    }

    /// Returns the weight of the sink, 0 where there is none.
    pub(super) fn sink_weight(&self, head: usize, lse: f64) -> f64 {
        self.problem.sink(head, &self.inputs.sink).map_or(0.0, |sink| libm::exp(sink - lse))
    }

    /// Returns `scale · dS` of the pair of a query, for a head, and a key, from the saved out.
    pub(super) fn logit_gradient(&self, pair: (usize, usize, usize), saved: &SavedViews<'_>) -> f64 {
        let (query, head, key) = pair;
        let weight = self.weight(pair, self.saved_lse(query, head, saved));
        let dout = self.of_query(&self.inputs.dout, query, head);
        let out = saved.out.lanes(self.both.q.row(query), head);
        let d: f64 = dout.iter().zip(&out).map(|(dout, out)| f64::from(*dout) * out).sum();
        let softmax = &self.problem.softmax;
        let derivative = softmax.cap_derivative(self.logit(query, head, key));
        let dp = dot(&dout, &self.of_key(&self.inputs.v, key, head));
        f64::from(softmax.scale) * weight * (dp - d) * derivative
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub(super) fn widened(row: &[f32]) -> impl Iterator<Item = f64> {
    row.iter().map(|x| f64::from(*x))
}
