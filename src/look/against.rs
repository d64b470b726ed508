//! What the checker says against a schedule, for readers who have never seen one: a sentence, and the first errors.

use maud::{Markup, html};
use seamproof_judge::prose::counted;
use seamproof_simulator::check::{CheckError, CoverKind, Needed, OperationId};
use seamproof_simulator::schedule::Schedule;

use super::svg::told;
use crate::explain::operation_words;

/// Largest number of errors that are shown.
const SHOWN: usize = 3;

/// Whether an error is about the order of operations or about messages, which a picture of pairs cannot show.
pub(super) fn is_of_order(error: &CheckError) -> bool {
    matches!(error, CheckError::Race { .. } | CheckError::Deadlock { .. } | CheckError::Disagree { .. })
}

/// Returns the error that says most: one about the order of operations before one that follows from it.
fn first(errors: &[CheckError]) -> Option<&CheckError> {
    errors.iter().find(|error| is_of_order(error)).or(errors.first())
}

/// Returns in a sentence what an error means.
fn sentence(error: &CheckError) -> String {
    match error {
        CheckError::Deadlock { .. } => "An operation waits for something that never comes.".to_owned(),
        CheckError::Disagree { .. } => "Two ends of a message do not agree.".to_owned(),
        CheckError::Race { .. } => {
            "Two operations use the same rows, at least one writes them, and neither waits for the other: a wait is missing."
                .to_owned()
        }
        CheckError::Malformed { fault, .. } | CheckError::Table { fault, .. } => {
            format!("It asks for what cannot be right: {fault}.")
        }
        CheckError::Content { buffer, found, needed, .. } => {
            format!("An operation reads rows with something else in them: {buffer} holds {found}; {needed}.")
        }
        CheckError::Result { tensor, found, needed, .. } => {
            format!("A result is not what it should be: {tensor} holds {found}; {needed}.")
        }
        CheckError::Ownership { .. } => "Rows of a result belong to no rank, or to several.".to_owned(),
        CheckError::Growth(_) => "The schedule takes more than it may as problems grow.".to_owned(),
        CheckError::Cover { at, tensor, kind, .. } => of_pairs(*at, &tensor.to_string(), *kind),
        _ => "The schedule is wrong.".to_owned(),
    }
}

fn of_pairs(at: Needed, tensor: &str, kind: CoverKind) -> String {
    match (at, kind) {
        (Needed::Operation(_), CoverKind::Missing) => {
            format!(
                "An operation takes {tensor} of a part of the pairs, such as those of one step, in place of all."
            )
        }
        (_, CoverKind::Missing) => {
            format!("What some pairs of query and key add to {tensor} never gets into the result.")
        }
        (_, CoverKind::Twice) => format!("Some pairs of query and key count twice in {tensor}."),
        (_, CoverKind::Invisible) => format!("Pairs that the mask hides count in {tensor}."),
        (_, CoverKind::Irregular) => format!("The pairs in {tensor} are too irregular to prove."),
    }
}

/// Returns the operations that an error names.
fn operations(error: &CheckError) -> Vec<OperationId> {
    let (own, other) = match error {
        CheckError::Malformed { at, .. }
        | CheckError::Deadlock { at, .. }
        | CheckError::Content { at, .. } => (Some(*at), None),
        CheckError::Disagree { at, peer, .. } => (Some(*at), Some(*peer)),
        CheckError::Race { first, second, .. } => (Some(*first), Some(*second)),
        CheckError::Cover { at: Needed::Operation(at), launch, .. } => (Some(*at), *launch),
        CheckError::Cover { launch, .. } => (None, *launch),
        _ => (None, None),
    };
    own.into_iter().chain(other).collect()
}

/// Returns in a sentence what is wrong with a schedule; `None` where nothing is.
pub(super) fn in_short(errors: &[CheckError]) -> Option<String> {
    first(errors).map(sentence)
}

/// Returns what the checker says against a schedule; nothing where it is proved.
pub(super) fn against(schedule: &Schedule, errors: &[CheckError]) -> Markup {
    let Some(first) = first(errors) else { return html! {} };
    let others = errors.iter().filter(|error| !std::ptr::eq(*error, first));
    let shown = std::iter::once(first).chain(others).take(SHOWN);
    html! {
        div class="found" {
            p { strong { "The schedule is wrong. " } (told(&sentence(first))) }
            ul class="faint" {
                @for error in shown {
                    li {
                        (told(error)) ". "
                        @for at in operations(error) {
                            "Operation " (at.operation) " of rank " (at.rank) ": " (told(&operation_words(schedule, at))) ". "
                        }
                    }
                }
                @if errors.len() > SHOWN { li { "… and " (counted(errors.len() - SHOWN, "more error")) } }
            }
        }
    }
}
