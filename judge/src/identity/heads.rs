//! Identities of heads.

use seamproof_oracle::{ProblemFields, TensorName};

use super::bound::{Against, Bounds};
use super::gradients::{self, Runs};
use super::twin::{Twin, TwinOrigin, everything, same};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Asks the same problem with a copy of its KV head for every query head. out and lse stay as they are, and so does
/// dq where the subject promises it. The dk and dv of a group are the sums of its heads', which are rounded
/// separately and added in another order. They agree within both errors; so does dq where nothing is promised.
pub(super) fn repeated_kv_heads(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let group = problem.group();
    if group == 1 {
        return None;
    }
    let mut fields: ProblemFields = problem.clone().into();
    fields.heads.kv = fields.heads.q;
    let kv_heads = (0..problem.heads.q).map(|head| head / group).collect();
    let twin = Twin::new(evidence, fields, TwinOrigin { kv_heads, ..TwinOrigin::same(problem) })?;
    let relation = Relation::RepeatedKvHeads;
    let answer = match twin.answer(evidence, relation) {
        Ok(answer) => answer,
        Err(look) => return Some(look),
    };
    let mut tensors = everything(evidence);
    let dq_too = evidence.backend.declaration().promises.groups_alone;
    tensors.retain(|tensor| match tensor {
        TensorName::Dq => dq_too,
        other => !matches!(other, TensorName::Dk | TensorName::Dv),
    });
    let apart = twin.compare(evidence, relation, &answer, &same(&tensors), None);
    let gradients = || {
        let (own, apart) = (evidence.first.gradients.as_ref()?, answer.gradients.as_ref()?);
        let here = Bounds::new(evidence, problem, evidence.inputs);
        let there = Bounds::new(evidence, &twin.problem, &twin.inputs);
        let what = "the gradient of a group is not the sum of its heads'";
        // out and lse are known to be the same here, where both are shown.
        let against = if answer.lse.is_some() { Against::Saved } else { Against::Exact };
        let (bounds, kv_heads) = ([&here, &there], group);
        let floor = gradients::floor(bounds);
        Runs { evidence, relation, what, bounds, kv_heads, against, floor }.compare(own, apart)
    };
    Some(apart.or_else(gradients).into())
}

/// Asks the same problem with the groups in the opposite order. Where there is one group, its query heads are
/// reversed, and dk and dv are left out, since they are sums in another order.
pub(super) fn head_order(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let (heads, group) = (problem.heads, problem.group());
    if heads.q == 1 {
        return None;
    }
    let mut tensors = everything(evidence);
    let source = if heads.kv > 1 {
        let kv_heads: Vec<usize> = (0..heads.kv).rev().collect();
        let q_heads = kv_heads.iter().flat_map(|kv| kv * group..(kv + 1) * group).collect();
        TwinOrigin { q_heads, kv_heads, ..TwinOrigin::same(problem) }
    } else {
        tensors.retain(|tensor| !matches!(tensor, TensorName::Dk | TensorName::Dv));
        TwinOrigin { q_heads: (0..heads.q).rev().collect(), ..TwinOrigin::same(problem) }
    };
    let twin = Twin::new(evidence, problem.clone().into(), source)?;
    Some(twin.agrees(evidence, Relation::HeadOrder, &same(&tensors)))
}
