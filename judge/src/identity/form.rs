//! Identities of forms, of steps and of pages: one problem has one answer, however it is given, in however many calls,
//! and wherever its keys lie.

use std::iter;

use seamproof_oracle::{Form, ProblemFields};

use super::sums::within_both;
use super::twin::{Twin, TwinOrigin, results_of, same};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Asks the same problem in every other form of the subject's that says it. The results have the same bits where
/// sequences are promised to stand alone, and otherwise agree within both errors. dsink is left out: it is a sum over
/// sequences, whose order may change.
pub(super) fn other_forms(evidence: &Evidence<'_>) -> Option<Look> {
    let problem = evidence.problem;
    let taken = evidence.backend.declaration().table.forms;
    let says = |form: &Form| *form != problem.form && taken.contains(form) && form.check(problem).is_ok();
    let mut looks = Form::ALL.into_iter().filter(says).filter_map(|form| {
        let fields = ProblemFields { form, ..problem.clone().into() };
        let twin = Twin::new(evidence, fields, TwinOrigin::same(problem));
        in_another_form(evidence, &twin.filter(|twin| twin.problem.form == form)?)
    });
    let first = looks.next()?;
    let broken = iter::once(first).chain(looks).find(|look| !matches!(look, Look::Held));
    broken.or(Some(Look::Held))
}

/// Compares the results in another form with the case's own.
fn in_another_form(evidence: &Evidence<'_>, twin: &Twin) -> Option<Look> {
    let relation = Relation::OtherForm;
    let promises = evidence.backend.promises(evidence.problem);
    if promises.sequences_alone {
        let claims = same(&results_of(promises.deterministic_backward));
        return Some(twin.agrees(evidence, relation, &claims));
    }
    let what = [
        "further from the result in another form than both roundings explain",
        "further from the gradient in another form than the errors of both runs explain",
    ];
    within_both(evidence, relation, twin, what)
}

/// Asks a problem with steps in one call. Each row has the same bits where rows are promised to stand alone, and
/// otherwise agrees within both errors. Neighbours change from call to call, so sequences must stand alone as well.
pub(super) fn one_call(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, relation) = (evidence.problem, Relation::OneCall);
    if problem.steps.is_empty() {
        return None;
    }
    let twin = Twin::new(evidence, problem.at_once().into(), TwinOrigin::same(problem))?;
    let promises = evidence.backend.promises(problem);
    if promises.rows_alone && promises.sequences_alone {
        return Some(twin.agrees(evidence, relation, &same(&results_of(false))));
    }
    let what = ["further from the result in one call than both roundings explain", ""];
    within_both(evidence, relation, &twin, what)
}

/// Asks a problem in pages with keys and values that lie together. The results have the same bits where sequences are
/// promised to stand alone, wherever they lie, and otherwise agree within both errors.
pub(super) fn out_of_pages(evidence: &Evidence<'_>) -> Option<Look> {
    let (problem, relation) = (evidence.problem, Relation::OutOfPages);
    problem.pages.as_ref()?;
    let twin = Twin::new(evidence, problem.without_pages().into(), TwinOrigin::same(problem))?;
    if evidence.backend.promises(problem).sequences_alone {
        return Some(twin.agrees(evidence, relation, &same(&results_of(false))));
    }
    let what = ["further from the result without pages than both roundings explain", ""];
    within_both(evidence, relation, &twin, what)
}
