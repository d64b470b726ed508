//! Probes: one key, or one row of dout, is changed. Exactly the rows that the mask connects with it change their
//! results.

use ndarray::{Array2, s};
use seamproof_oracle::envelope::GradientPair;
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Pass, Side, TensorName};

use super::asked::pick;
use super::bound::{Bounds, moved_lse};
use super::sums::Bounded;
use super::twin::{Twin, same};
use crate::finding::Relation;
use crate::finding::{Finding, Place};
use crate::ladder::evidence::{Evidence, Look};
use crate::subject::{RankGradients, RankOutputs};

/// Largest weight that says anything. A larger one comes from an LSE that says nothing.
const WEIGHT_MAX: f64 = 1e30;

/// Returns a sequence that has both queries and keys, if there is one.
fn sequence(evidence: &Evidence<'_>, relation: Relation) -> Option<usize> {
    let both = |index: &usize| {
        let sequence = &evidence.problem.sequences[*index];
        sequence.q.len > 0 && sequence.kv.len > 0
    };
    let full: Vec<usize> = (0..evidence.problem.sequences.len()).filter(both).collect();
    full.get(pick(evidence, relation, full.len())).copied()
}

/// Asks about the negation of one key and its value. The rows that do not see the key keep their bits, and the LSEs
/// of the others move as the weight of that key does.
pub(super) fn influence(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, relation) = (evidence.problem, Relation::Influence);
    let index = sequence(evidence, relation)?;
    let both = problem.sequences[index];
    let key = pick(evidence, Relation::Prefix, both.kv.len);
    let mut twin = Twin::forward_of(evidence)?;
    for tensor in [&mut twin.inputs.k, &mut twin.inputs.v] {
        tensor.slice_mut(s![both.kv.row(key), .., ..]).mapv_inplace(|x| -x);
    }
    let answer = match twin.answer(evidence, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let sees = |i: usize| problem.mask.visible(i, both.q.len, both.kv.len).contains(&key);
    let claims = same(&[TensorName::Out, TensorName::Lse]);
    let untouched = |side, at, i| side == Side::Q && !(at == index && sees(i));
    let leaked = twin.compare(evidence, relation, &answer, &claims, Some(&untouched));
    let moved = || moved_weights(evidence, &twin, answer.lse.as_ref()?, (index, key), &sees);
    Some(leaked.or_else(moved).into())
}

fn moved_weights(
    evidence: &Evidence<'_>,
    twin: &Twin,
    after: &Array2<f32>,
    (index, key): (usize, usize),
    sees: &dyn Fn(usize) -> bool,
) -> Option<Finding> {
    let (problem, before) = (evidence.problem, evidence.first.lse.as_ref()?);
    let here = Bounds::new(evidence, problem, evidence.inputs);
    let there = Bounds::new(evidence, &twin.problem, &twin.inputs);
    let what = "a row that sees a key does not follow that key";
    let mut worst = Bounded::new(Relation::Influence, TensorName::Lse, what);
    let run = problem.sequences[index].q;
    for i in (0..run.len).filter(|&i| sees(i)) {
        for head in 0..problem.heads.q {
            let lse = f64::from(before[[head, run.row(i)]]);
            let (old, _) = here.logit(index, i, key, head);
            let (new, _) = there.logit(index, i, key, head);
            let (old, new) = (libm::exp(old - lse), libm::exp(new - lse));
            let (a, b) = (here.row(index, i, head).lse, there.row(index, i, head).lse);
            if old.max(new) > WEIGHT_MAX {
                continue;
            }
            if let Some((moved, error)) = moved_lse(new - old, a) {
                let place = Place { sequence: Some(index), head: Some(head), row: Some(i), lane: None };
                let got = f64::from(after[[head, run.row(i)]]);
                worst.compare(place, got, lse + moved, a + b + error);
            }
        }
    }
    worst.finding()
}

/// Asks about a dout that is 0 except for one row of one head. All other rows of dq are 0, and so are dk and dv
/// except on the keys that the row sees. The dv of such a key is the row's weight times its dout.
pub(super) fn cotangent(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, relation) = (evidence.problem, Relation::Cotangent);
    if problem.pass == Pass::Forward || !evidence.first.out.iter().all(|out| out.is_finite()) {
        return None;
    }
    let index = sequence(evidence, relation)?;
    let run = problem.sequences[index].q;
    let (i, head) =
        (pick(evidence, Relation::Prefix, run.len), pick(evidence, Relation::HeadOrder, problem.heads.q));
    let mut twin = Twin::of(evidence);
    let one = twin.inputs.dout.slice(s![run.row(i), head, ..]).to_owned();
    twin.inputs.dout.fill(0.0);
    twin.inputs.dout.slice_mut(s![run.row(i), head, ..]).assign(&one);
    let answer = match twin.answer(evidence, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let gradients = answer.gradients.as_ref()?;
    let zeros = elsewhere(evidence, gradients, (index, i, head));
    Some(zeros.or_else(|| weights_times_dout(evidence, &answer, gradients, (index, i, head))).into())
}

/// Checks that everything that one row of dout does not reach is 0.
fn elsewhere(
    evidence: &Evidence<'_>,
    gradients: &RankGradients,
    (index, i, head): (usize, usize, usize),
) -> Option<Finding> {
    let problem = evidence.problem;
    let what = "one row of dout reaches what it must not";
    let sides = [
        (TensorName::Dq, &gradients.dq, Side::Q, head),
        (TensorName::Dk, &gradients.dk, Side::Kv, head / problem.group()),
        (TensorName::Dv, &gradients.dv, Side::Kv, head / problem.group()),
    ];
    sides.into_iter().find_map(|(tensor, gradient, side, own_head)| {
        let mut worst = Bounded::new(Relation::Cotangent, tensor, what);
        for (at, sequence) in problem.sequences.iter().enumerate() {
            let seen =
                problem.mask.visible(i, problem.sequences[index].q.len, problem.sequences[index].kv.len);
            let reached = |row: usize| match side {
                Side::Q => at == index && row == i,
                Side::Kv => at == index && seen.contains(&row),
            };
            for (position, row) in run_of(sequence, side).real_rows().enumerate() {
                for other in (0..gradient.shape()[1]).filter(|&h| h != own_head || !reached(position)) {
                    let place =
                        Place { sequence: Some(at), head: Some(other), row: Some(position), lane: None };
                    for (lane, &value) in gradient.slice(s![row, other, ..]).iter().enumerate() {
                        worst.compare(Place { lane: Some(lane), ..place }, value.into(), 0.0, 0.0);
                    }
                }
            }
        }
        worst.finding()
    })
}

fn weights_times_dout(
    evidence: &Evidence<'_>,
    answer: &RankOutputs,
    gradients: &RankGradients,
    (index, i, head): (usize, usize, usize),
) -> Option<Finding> {
    let problem = evidence.problem;
    let (both, group) = (problem.sequences[index], problem.group());
    let lse = f64::from(answer.lse.as_ref()?[[head, both.q.row(i)]]);
    let bounds = Bounds::new(evidence, problem, evidence.inputs);
    let what = "dv of a key is not the weight of the one row times its dout";
    let stored = evidence.inputs.scales.stored(problem, TensorName::Dv);
    let mut worst = Bounded::new(Relation::Cotangent, TensorName::Dv, what);
    let dout = bounds.inputs.dout.slice(s![both.q.row(i), head, ..]);
    let keys = problem.mask.visible(i, both.q.len, both.kv.len);
    let queries = group * both.q.len;
    let sums = bounds.model.gradient_sums(queries, keys.len());
    let of_row = bounds.model.gradient_row(TensorName::Dv, queries);
    for key in keys {
        let (logit, a) = bounds.logit(index, i, key, head);
        let p = libm::exp(logit - lse);
        let pair = bounds.model.gradient_pair(&GradientPair::of_weight(logit, lse, p, a), sums);
        let coefficient = pair.dv + pair.p.most;
        for (lane, &dout) in dout.iter().enumerate() {
            let exact = stored.saturated(p * f64::from(dout));
            let errors = coefficient * bounds.model.magnitude(f64::from(dout));
            let bound = of_row.bound(p * f64::from(dout), errors) + bounds.sum_floor();
            let place =
                Place { sequence: Some(index), head: Some(head / group), row: Some(key), lane: Some(lane) };
            let got = f64::from(gradients.dv[[both.kv.row(key), head / group, lane]]);
            worst.compare(place, got, exact, bound);
        }
    }
    worst.finding()
}
