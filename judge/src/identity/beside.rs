//! The identity of two subjects: both have one answer to a problem.

use super::sums::within_errors_of;
use super::twin::{Twin, results_of, same};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Asks the subject beside this one. The results are within the errors of both, or have the same bits where the caller
/// says so; dsink is then left out, and the gradients are where one of them has other bits on every run.
pub(super) fn beside(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, relation) = (evidence.problem, Relation::Beside);
    let other = evidence.backend.beside()?;
    let declared = other.subject.declaration();
    if declared.table.refusal(problem).is_some() {
        evidence.told.outside.set(true);
        return None;
    }
    let theirs = Evidence { backend: other.subject, ..*evidence };
    let twin = Twin::of(&theirs);
    if other.bits {
        let both = [evidence.backend.declaration().promises, declared.promises];
        let gradients = both.iter().all(|promises| promises.deterministic_backward);
        return Some(twin.agrees(&theirs, relation, &same(&results_of(gradients))));
    }
    // The bounds of gradients are those of one sequence.
    if !problem.sharing.is_empty() {
        return None;
    }
    let what = [
        "further from the other subject's result than the roundings of both explain",
        "further from the other subject's gradient than the errors of both explain",
    ];
    within_errors_of([evidence, &theirs], relation, &twin, what)
}
