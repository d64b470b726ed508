//! Runs of the subject, and the findings about runs without results.

use std::panic::{AssertUnwindSafe, catch_unwind};

use seamproof_oracle::{Inputs, Problem};

use crate::finding::{Check, Finding};
use crate::subject::{Backend, Outputs, Refusal, RunError, lse};
use crate::values::{self, Poison};
use crate::verdict::Verdict;

/// Returns every row of the subject's table that refuses a problem. The subject may name any of them, because nobody
/// says in which order it looks.
pub(crate) fn expected_refusals(backend: &dyn Backend, problem: &Problem) -> Vec<Refusal> {
    backend.declaration().table.refusals(problem).collect()
}

/// Returns the two fills that a subject's padding contract allows, the stronger one first.
pub(crate) fn fills(backend: &dyn Backend, problem: &Problem) -> [Poison; 2] {
    Poison::fills(backend.declaration().padding.inputs, problem)
}

pub(crate) fn poisoned(inputs: &Inputs, problem: &Problem, poison: Poison) -> Inputs {
    let mut inputs = inputs.clone();
    values::poison(&mut inputs, problem, poison);
    inputs
}

/// Runs the subject, and reads its LSE in the layout that it declares. Its panic is a crash of the subject, not of the
/// judge.
pub(crate) fn run(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let ran = catch_unwind(AssertUnwindSafe(|| backend.run(problem, inputs))).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied());
        Err(RunError::Crash(format!("panicked: {}", text.unwrap_or("without a message"))))
    });
    ran.and_then(|outputs| lse::in_rows(backend, problem, outputs))
}

/// Beginning of the words of a finding about a refusal that no row of the table explains.
const REFUSED_INSIDE: &str = "refused what its table takes";

impl Finding {
    /// Whether the subject refused a problem that its table takes.
    pub fn is_refusal_inside(&self) -> bool {
        self.check == Check::Capability && self.what.starts_with(REFUSED_INSIDE)
    }
}

/// Returns the verdict on a run that was neither refused exactly as the table says nor made as the table says.
pub(crate) fn capability_verdict(result: Result<Outputs, RunError>, expected: Option<Refusal>) -> Verdict {
    let what = match (result, expected) {
        (Err(RunError::Infrastructure(what)), _) => return Verdict::Infrastructure(what),
        (Err(error @ RunError::OutOfMemory(_)), _) => return Verdict::Infrastructure(error.to_string()),
        (Err(RunError::Refused(got)), None) => format!("{REFUSED_INSIDE}: {got}"),
        (Err(RunError::Refused(got)), Some(expected)) => {
            format!("refused because «{got}»; its table says «{expected}»")
        }
        (Err(RunError::RefusedByName(got)), None) => format!("{REFUSED_INSIDE}: {got}"),
        (Err(RunError::RefusedByName(got)), Some(expected)) => {
            format!("refused because of «{got}»; its table says «{expected}»")
        }
        (Err(error), _) => return death(error).into(),
        (Ok(_), Some(expected)) => format!("ran what its table refuses: {expected}"),
        (Ok(_), None) => return Verdict::Infrastructure("a run was judged twice".into()),
    };
    whole_case(Check::Capability, what).into()
}

/// Returns the finding about a run that ended without results, whatever was asked of it.
pub(crate) fn death(error: RunError) -> Finding {
    match error {
        RunError::Crash(what) => whole_case(Check::Crash, what),
        RunError::Sentinel(what) => whole_case(Check::Sentinel, what),
        RunError::Ended(ended) => {
            let finding = whole_case(ended.ending.check(), ended.to_string());
            Finding { ending: Some(ended.ending), before: ended.before, ..finding }
        }
        error => whole_case(Check::Crash, error.to_string()),
    }
}

/// Returns a finding about the case as a whole.
pub(crate) fn whole_case(check: Check, what: String) -> Finding {
    Finding::new(check, None, what)
}
