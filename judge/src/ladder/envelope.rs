//! Envelope: every element lies within the largest honest error of the exact answer. Tier W holds for any input, tier
//! T where the inputs are certified as dithered. Where the subject's numeric profile is locked, tier R follows: it
//! allows only the error that is left once the roundings are replayed.

use std::cell::LazyCell;

use seamproof_oracle::blocked::{self, Answer};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::replay::Replay;
use seamproof_oracle::{ForwardResults, Gradients, Saved};

use super::bounds::{
    BACKWARD, Comparison, FORWARD, backward, forward, replayed_forward, replayed_gradients, saved,
};
use super::diagnosis::{RightRow, right_lanes};
use super::evidence::{Evidence, Look};
use super::gradient_hypotheses::Wrong;
use super::structure::results;
use super::{amax, diagnosis, gradient_hypotheses, hypotheses, sample};
use crate::verdict::Margin;

/// Examines the forward, LSE first, then the backward on the out and lse that the subject returned. Where the subject
/// hides its LSE, the backward is judged on the exact one, and may be off by as much as the forward may. Where the
/// oracle is too expensive for the case, a sample of its rows is judged in this way.
pub(super) fn look(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    if !evidence.has_oracle() {
        return sample::look(evidence, margin);
    }
    let Evidence { backend, problem, layout, inputs, .. } = *evidence;
    let rank = evidence.first;
    margin.compared = results(rank).len();
    let model = Model::new(problem, backend.declaration().arithmetic, evidence.partition());
    let replay = evidence.replay();
    let (answer, replayed) = evidence.oracle(|| match &replay {
        None => (blocked::forward(problem, inputs, Some(&model)), None),
        Some(replay) => blocked::forward_and_replayed(problem, inputs, &model, replay),
    });
    let right = |row: usize, head: usize| RightRow::of(&answer.exact, row, head);
    let compare = Comparison { problem, layout, ratio: evidence.judge.ratio };
    if let Some(mut finding) = forward(&compare, rank, &answer, &FORWARD, margin) {
        match hypotheses::told(evidence) {
            Some(told) => finding.what += &format!(": {told}"),
            None => diagnosis::explain(evidence, right, &mut finding),
        }
        return Some(finding).into();
    }
    if let Some(replay) = &replay {
        let apart = || evidence.oracle(|| blocked::replayed_forward(problem, inputs, &model, replay));
        let replayed = match replayed.map_or_else(apart, Ok) {
            Ok(answer) => answer,
            Err(error) => return Look::Failed(format!("a replayed problem is none: {error}")),
        };
        if let Some(mut finding) = replayed_forward(&compare, rank, &replayed, margin) {
            diagnosis::explain(evidence, right, &mut finding);
            return Some(finding).into();
        }
    }
    match look_back(evidence, (&compare, &model), &answer, replay, margin) {
        Look::Held => amax::look(evidence, &answer.exact),
        other => other,
    }
}

/// Examines the backward of every run whose gradients count.
fn look_back(
    evidence: &Evidence<'_>,
    (compare, model): (&Comparison<'_>, &Model),
    forward: &Answer<ForwardResults>,
    replay: Option<Replay>,
    margin: &mut Margin,
) -> Look {
    let Evidence { problem, inputs, first, .. } = *evidence;
    let runs = evidence.gradient_runs();
    if runs.is_empty() {
        return Look::Held;
    }
    let saved = saved(first, &forward.exact.lse);
    let answer = backward_of(evidence, model, forward, &saved);
    let replayed = || {
        let replay = replay.as_ref().filter(|_| first.lse.is_some())?;
        evidence.oracle(|| blocked::replayed_backward(problem, inputs, &saved, model, replay))
    };
    let replayed = LazyCell::new(replayed);
    let broken = runs.into_iter().find_map(|gradients| {
        let in_replay = |margin: &mut Margin| {
            replayed.as_ref().and_then(|answer| replayed_gradients(compare, gradients, answer, margin))
        };
        let mut finding =
            backward(compare, gradients, &answer, &BACKWARD, margin).or_else(|| in_replay(margin))?;
        let tensor = finding.tensor;
        let right = |row: usize, head: usize| right_lanes(&answer.exact, tensor, row, head);
        let wrong =
            tensor.map(|tensor| Wrong { got: gradients, tensor, right: &answer, saved: &saved, model });
        match wrong.and_then(|wrong| gradient_hypotheses::told(evidence, &wrong)) {
            Some(told) => finding.what += &format!(": {told}"),
            None => diagnosis::explain_gradient(evidence, gradients, ((&saved).into(), right), &mut finding),
        }
        Some(finding)
    });
    broken.into()
}

/// Returns the exact backward of what the subject saved, with its bounds.
pub(super) fn backward_of(
    evidence: &Evidence<'_>,
    model: &Model,
    forward: &Answer<ForwardResults>,
    saved: &Saved,
) -> Answer<Gradients> {
    let Evidence { problem, inputs, first, .. } = *evidence;
    let lse_error = forward.bound.as_ref().map(|bound| &bound.worst.lse).filter(|_| first.lse.is_none());
    evidence.oracle(|| match lse_error {
        None => blocked::backward(problem, inputs, saved, Some(model)),
        Some(errors) => blocked::backward_of_hidden_lse(problem, inputs, saved, errors, model),
    })
}
