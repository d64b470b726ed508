//! Words and draws that identities share.

use crate::finding::{Check, Finding, Relation};
use crate::hash::mix;
use crate::ladder::evidence::Evidence;
use crate::subject::TensorName;

/// Returns a finding about a relation.
pub(super) fn broken(relation: Relation, tensor: Option<TensorName>, what: String) -> Finding {
    Finding { identity: Some(relation), ..Finding::new(Check::Identity, tensor, what) }
}

/// Returns a number below `n` (at least 1) that follows from the case's data seed and a relation.
pub(super) fn pick(evidence: &Evidence<'_>, relation: Relation, n: usize) -> usize {
    let hash = mix(mix(evidence.problem.data_seed).wrapping_add(relation as u64));
    (hash % n.max(1) as u64) as usize
}
