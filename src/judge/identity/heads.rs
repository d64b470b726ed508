//! Identities of heads.

use seamproof_oracle::{ProblemFields, TensorName};

use super::super::{Evidence, Look};
use super::Relation;
use super::twin::{Source, Twin, everything, same};

/// Every query head with a KV head of its own, which holds what the group's held. dk and dv of a group are then sums of
/// numbers rounded apart, and are left to the envelope.
pub(super) fn repeated_kv_heads(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let group = problem.group();
    if group == 1 {
        return None;
    }
    let mut fields: ProblemFields = problem.clone().into();
    fields.heads.kv = fields.heads.q;
    let kv_heads = (0..problem.heads.q).map(|head| head / group).collect();
    let twin = Twin::new(evidence, fields, Source { kv_heads, ..Source::same(problem) })?;
    let mut tensors = everything(evidence);
    tensors.retain(|tensor| !matches!(tensor, TensorName::Dk | TensorName::Dv));
    Some(twin.agrees(evidence, Relation::RepeatedKvHeads, &same(&tensors)))
}

/// The groups in the opposite order; where there is one group, its query heads, and then dk and dv are sums in another
/// order.
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
        Source { q_heads, kv_heads, ..Source::same(problem) }
    } else {
        tensors.retain(|tensor| !matches!(tensor, TensorName::Dk | TensorName::Dv));
        Source { q_heads: (0..heads.q).rev().collect(), ..Source::same(problem) }
    };
    let twin = Twin::new(evidence, problem.clone().into(), source)?;
    Some(twin.agrees(evidence, Relation::HeadOrder, &same(&tensors)))
}
