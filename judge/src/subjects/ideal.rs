//! An ideal subject: it returns the exact answer, each element rounded once to its format.
//!
//! It declares what the subject that it stands for declares. A change that leaves every bit of the ideal subject as
//! it was changes nothing that a judge could hold against that subject, in whatever order the subject sums.

use ndarray::{Array, Dimension};
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{ForwardResults, Inputs, Pass, Problem, Saved, TensorName, blocked};

use crate::subject::{Backend, Declaration, Outputs, RankGradients, RankOutputs, RunError};

/// The ideal form of a subject. Its results are in the problem's own layout: whatever ranks there are, one holds
/// everything.
pub(super) struct Ideal<'a>(pub(super) &'a dyn Backend);

impl Backend for Ideal<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn declaration(&self) -> Declaration {
        self.0.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.0)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        inputs.check(problem).map_err(|error| RunError::Infrastructure(error.to_string()))?;
        let mut inputs = inputs.clone();
        problem.repeat_shared(&mut inputs.k, &mut inputs.v);
        let inputs = &inputs;
        let exact = blocked::forward(problem, inputs, None).exact;
        let returned = self.declaration().table.statistics;
        let rank = RankOutputs {
            gradients: (problem.pass == Pass::Backward).then(|| gradients(problem, inputs, &exact)),
            lse: returned.contains(&TensorName::Lse).then(|| narrow(&exact.lse)),
            max_logit: returned.contains(&TensorName::MaxLogit).then(|| narrow(&exact.max_logit)),
            out: exact.out.mapv(|value| inputs.scales.stored(problem, TensorName::Out).round(value) as f32),
            amax: Amaxes::default(),
        };
        Ok(rank.into())
    }
}

fn gradients(problem: &Problem, inputs: &Inputs, exact: &ForwardResults) -> RankGradients {
    let exact = blocked::backward(problem, inputs, &Saved::from(exact), None).exact;
    let round = |gradient| {
        let stored = inputs.scales.stored(problem, gradient);
        move |value| stored.round(value) as f32
    };
    RankGradients {
        dq: exact.dq.mapv(round(TensorName::Dq)),
        dk: exact.dk.mapv(round(TensorName::Dk)),
        dv: exact.dv.mapv(round(TensorName::Dv)),
        dsink: narrow(&exact.dsink),
    }
}

fn narrow<D: Dimension>(exact: &Array<f64, D>) -> Array<f32, D> {
    exact.mapv(|value| value as f32)
}
