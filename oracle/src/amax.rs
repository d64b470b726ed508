//! Amax: the largest magnitude of each quantity that a kernel quantises, over the real rows of all ranks, before it is
//! multiplied by a scale. A delayed recipe makes the next step's scales of them.
//!
//! That of weights is of the weights of whole rows, `exp(s − lse)`, as in cuDNN. That of logit gradients is of what is
//! rounded: with the softmax's scale, or without it. A kernel's own is within a [`Range`], which follows from the errors
//! of all elements: the largest of numbers that are each a little off is off no more than one of them. Where several
//! launches make a result, what is quantised is a partial one, and only the least right number is known.

use ndarray::{Array1, Array2, Array3, Zip};

use crate::blocked::{self, Tiers};
use crate::envelope::{Arithmetic, DsFold, EXP_ERROR, F32_ROUNDOFF, Model, Partition};
use crate::{
    Format, ForwardResults, Gradients, Inputs, OwnScales, Problem, ProblemError, ProblemFields, Quantity,
    Saved, exact,
};

/// The amax of each quantity, where a subject tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Amaxes([Option<f32>; 6]);

impl Amaxes {
    /// Returns the amaxes that `of` says.
    pub fn new(of: impl Fn(Quantity) -> Option<f32>) -> Amaxes {
        Amaxes(Quantity::ALL.map(of))
    }

    /// Returns that of a quantity.
    pub fn of(&self, quantity: Quantity) -> Option<f32> {
        self.0[quantity as usize]
    }

    /// Whether none is told.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

/// The range of a right amax.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Range {
    /// The exact amax.
    pub exact: f64,
    /// The least right number.
    pub least: f64,
    /// The largest right number.
    pub most: f64,
}

impl Range {
    /// Adds an element with its error.
    pub fn add(&mut self, magnitude: f64, error: f64) {
        self.exact = self.exact.max(magnitude);
        self.least = self.least.max(magnitude - error);
        self.most = self.most.max(magnitude + error);
    }

    /// Returns the range of the larger one of two amaxes.
    pub fn or(self, other: Range) -> Range {
        Range {
            exact: self.exact.max(other.exact),
            least: self.least.max(other.least),
            most: self.most.max(other.most),
        }
    }

    /// Returns the range of the largest of several launches' numbers, of which each result is a sum of `summands` at
    /// most: one of them is no less than its share of the largest result.
    fn of_summands(self, summands: usize) -> Range {
        Range { least: self.least / summands as f64, most: f64::INFINITY, ..self }
    }

    fn of(exact: &Array3<f64>, bound: &Array3<f64>) -> Range {
        let mut range = Range::default();
        Zip::from(exact).and(bound).for_each(|exact, bound| range.add(exact.abs(), *bound));
        range
    }

    /// Returns the range of these numbers times a factor between two, in f32.
    fn times(self, [least, most]: [f64; 2]) -> Range {
        let rounding = 2.0 * F32_ROUNDOFF;
        let (least, most) = (least * (1.0 - rounding), most * (1.0 + rounding));
        Range { exact: self.exact * most, least: self.least * least, most: self.most * most }
    }
}

/// The oracle of a problem's amaxes: the problem with results that nothing rounds.
pub struct AmaxOracle {
    problem: Problem,
    inputs: Inputs,
    model: Model,
    partition: Partition,
    fold: DsFold,
}

impl AmaxOracle {
    /// Returns the oracle for a subject with this arithmetic and partition.
    pub fn new(
        problem: &Problem,
        inputs: &Inputs,
        arithmetic: Arithmetic,
        partition: Partition,
    ) -> Result<AmaxOracle, ProblemError> {
        let mut fields = ProblemFields::from(problem.clone());
        (fields.precision.out, fields.precision.gradients) = (Format::F32.into(), Format::F32.into());
        let own = OwnScales::new(&fields.precision, |quantity| inputs.scales.own.of(quantity));
        let problem = Problem::new(fields)?;
        let inputs = Inputs { scales: inputs.scales.clone().with_own(own), ..inputs.clone() };
        let model = Model::new(&problem, arithmetic, partition);
        Ok(AmaxOracle { problem, inputs, model, partition, fold: arithmetic.ds_fold })
    }

    /// Returns the ranges of the amaxes of weights and of out.
    pub fn forward(&self) -> Vec<(Quantity, Range)> {
        let answer = blocked::forward(&self.problem, &self.inputs, Some(&self.model));
        let of = |bound: &Tiers<ForwardResults>| {
            let ForwardResults { out, lse, max_logit } = &bound.worst;
            let of_rows = [
                (Quantity::P, self.weights(lse, max_logit)),
                (Quantity::Out, Range::of(&answer.exact.out, out)),
            ];
            // Weights are relative to a launch's own LSE, and a row is a mean of its partial outs.
            let is_merged = self.partition.merges.count > 0;
            let seen = |range: Range| if is_merged { range.of_summands(1) } else { range };
            of_rows.map(|(quantity, range)| (quantity, seen(range))).to_vec()
        };
        answer.bound.as_ref().map_or(Vec::new(), of)
    }

    /// Returns the range of the largest weight, from the errors of LSEs and of each head's logits.
    fn weights(&self, lse: &Array2<f64>, logits: &Array1<f64>) -> Range {
        let mut range = Range::default();
        for ((head, row), weight) in exact::largest_weights(&self.problem, &self.inputs).indexed_iter() {
            // An exponential, the reciprocal of a sum, and products with them.
            let own = EXP_ERROR + 8.0 * F32_ROUNDOFF;
            let exponent = libm::expm1((lse[[head, row]] + logits[head]).min(EXPONENT_MAX));
            // Where an exponential falls below the range of f32, nothing is left of it.
            range.add(*weight, weight * (exponent + own) + self.model.flushed(*weight));
        }
        range
    }

    /// Returns the ranges of the amaxes of logit gradients, dq, dk and dv, given the saved out and LSE.
    pub fn backward(&self, saved: &Saved) -> Vec<(Quantity, Range)> {
        let AmaxOracle { problem, inputs, model, .. } = self;
        let answer = blocked::backward(problem, inputs, saved, Some(model));
        let of = |bound: &Tiers<Gradients>| {
            let (exact, bound) = (&answer.exact, &bound.worst);
            let scale = f64::from(problem.softmax.scale);
            let folded = match self.fold {
                DsFold::Before => [scale; 2],
                DsFold::After => [1.0; 2],
                DsFold::Unknown => [scale.min(1.0), scale.max(1.0)],
            };
            let ds = blocked::largest_logit_gradient(problem, inputs, saved, model).times(folded);
            let seen = |range: Range| match self.partition.sums.count {
                0 => range,
                count => range.of_summands(count),
            };
            vec![
                (Quantity::Ds, ds),
                (Quantity::Dq, seen(Range::of(&exact.dq, &bound.dq))),
                (Quantity::Dk, seen(Range::of(&exact.dk, &bound.dk))),
                (Quantity::Dv, seen(Range::of(&exact.dv, &bound.dv))),
            ]
        };
        answer.bound.as_ref().map_or(Vec::new(), of)
    }
}

/// The largest exponent of an error. Past it nothing is bounded, and the exponential stays finite.
const EXPONENT_MAX: f64 = 60.0;
