//! Identities that ask the same question twice.

use super::twin::{Twin, everything, same};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Asks the same run again.
pub(crate) fn rerun(evidence: &Evidence<'_>) -> Option<Look> {
    let twin = Twin::of(evidence);
    Some(twin.agrees(evidence, Relation::Rerun, &same(&everything(evidence))))
}

/// Asks the same run after a run with another geometry and other values: without the last sequence, with q and v
/// negated, and with everything else as it is.
pub(super) fn history(evidence: &Evidence<'_>) -> Option<Look> {
    let mut other = Twin::of(evidence);
    let mut fields: seamproof_oracle::ProblemFields = evidence.problem.clone().into();
    fields.sequences.pop();
    let kept = (0..fields.sequences.len()).map(Some).collect();
    if let Some(fewer) =
        Twin::new(evidence, fields, super::twin::TwinOrigin::sequences(evidence.problem, kept))
    {
        other = fewer;
    }
    other.inputs.q.mapv_inplace(|q| -q);
    other.inputs.v.mapv_inplace(|v| -v);
    if let Err(look) = other.answer(evidence, Relation::History) {
        return Some(look);
    }
    Some(Twin::of(evidence).agrees(evidence, Relation::History, &same(&everything(evidence))))
}
