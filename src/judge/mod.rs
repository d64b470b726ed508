//! The judge: is a subject right on one problem?
//!
//! A ladder of checks, the cheapest and sharpest first; the first one that breaks is the finding. *Capability*: it
//! refuses what its table refuses, for that reason, and nothing else. *Structure*: shapes, guard bands, every real
//! row written, padding rows as the subject's contract says, rows that nobody owns untouched. *Poison*: two runs that
//! differ only in what padding and slack rows of the inputs hold agree in every bit of every real row. *Envelope*:
//! each element within the largest honest error of the exact answer, the LSE first; the backward is judged on the out
//! and lse that the subject itself returned.

mod assemble;
mod compare;
mod envelope;
mod poison;
mod structure;

use std::panic::{AssertUnwindSafe, catch_unwind};

use seamproof_oracle::{Inputs, Problem};

use crate::backend::{Backend, Outputs, PaddingInputs, RunError};
use crate::generate::Malformed;
use crate::layout;
use crate::values::{self, Poison};
use crate::verdict::{Check, Finding, Verdict};

/// Most elements of all tensors that a case may have: about 50 bytes each in inputs, results, exact answer and bounds.
pub const ELEMENTS_MAX: u64 = 1 << 27;
/// Most visible pairs × query heads × head dimension: about ten minutes on two cores.
pub const PRODUCTS_MAX: u64 = 1 << 41;

/// Judges `backend` on `problem`, with the inputs that the problem's mode and data seed give.
pub fn judge(backend: &dyn Backend, problem: &Problem) -> Verdict {
    if let Some(reason) = too_large(problem) {
        return Verdict::TooLarge(reason);
    }
    let inputs = values::inputs(problem);
    let fills = match backend.padding().inputs {
        PaddingInputs::Anything => [Poison::Nan, Poison::Large],
        PaddingInputs::Finite => [Poison::Large, Poison::Zero],
    };
    let first = match (
        run(backend, problem, &poisoned(&inputs, problem, fills[0])),
        expected_refusal(backend, problem),
    ) {
        (Ok(outputs), None) => outputs,
        (Err(RunError::Refused(got)), Some(expected)) if got == expected => return Verdict::Refused(got),
        (result, expected) => return capability_verdict(result, expected),
    };
    let layouts = match layout::layouts(problem) {
        Ok(layouts) => layouts,
        Err(error) => return Verdict::Infrastructure(format!("the subject ran what cannot be cut: {error}")),
    };
    if let Some(finding) = structure::check(backend, problem, &layouts, &first) {
        return finding.into();
    }
    let second = match run(backend, problem, &poisoned(&inputs, problem, fills[1])) {
        Ok(outputs) => outputs,
        Err(error) => return capability_verdict(Err(error), None),
    };
    if let Some(finding) = structure::check(backend, problem, &layouts, &second) {
        return finding.into();
    }
    let assembled = [first, second].map(|outputs| assemble::assemble(problem, &layouts, outputs.ranks));
    let [first, second] = match assembled {
        [Ok(first), Ok(second)] => [first, second],
        [Err(finding), _] | [_, Err(finding)] => return (*finding).into(),
    };
    let whole = layout::whole(problem);
    if let Some(finding) = poison::check(&whole, &first, &second) {
        return finding.into();
    }
    envelope::check(backend, problem, &whole, &inputs, &first)
}

/// Judges the validation: fields with one planted rule broken must be refused by exactly that rule.
pub fn judge_malformed(malformed: &Malformed) -> Verdict {
    match malformed.check() {
        Ok(()) => Verdict::RefusedMalformed(malformed.rule),
        Err(what) => {
            let what = format!("a problem that breaks the rule {} was {what}", malformed.rule);
            whole_case(Check::Validation, what).into()
        }
    }
}

fn expected_refusal(backend: &dyn Backend, problem: &Problem) -> Option<crate::backend::Refusal> {
    backend.capabilities().refusal(problem)
}

fn too_large(problem: &Problem) -> Option<String> {
    let elements = problem.elements();
    if elements > ELEMENTS_MAX {
        return Some(format!("the case has {elements} tensor elements; at most {ELEMENTS_MAX} are judged"));
    }
    let width = (problem.heads.q * problem.dims.qk.max(problem.dims.v)) as u64;
    let products = problem.pairs().saturating_mul(width);
    (products > PRODUCTS_MAX)
        .then(|| format!("the case has {products} visible products; at most {PRODUCTS_MAX} are judged"))
}

fn poisoned(inputs: &Inputs, problem: &Problem, poison: Poison) -> Inputs {
    let mut inputs = inputs.clone();
    values::poison(&mut inputs, problem, poison);
    inputs
}

/// Runs the subject; its panic is a crash of the subject, not of the judge.
fn run(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    catch_unwind(AssertUnwindSafe(|| backend.run(problem, inputs))).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied());
        Err(RunError::Crash(format!("panicked: {}", text.unwrap_or("without a message"))))
    })
}

/// Whatever is not "refused exactly as the table says" and not "ran, as the table says".
fn capability_verdict(
    result: Result<Outputs, RunError>,
    expected: Option<crate::backend::Refusal>,
) -> Verdict {
    let what = match (result, expected) {
        (Err(RunError::Crash(what)), _) => return whole_case(Check::Crash, what).into(),
        (Err(RunError::Infrastructure(what)), _) => return Verdict::Infrastructure(what),
        (Err(RunError::Refused(got)), None) => format!("refused what its table takes: {got}"),
        (Err(RunError::Refused(got)), Some(expected)) => {
            format!("refused because «{got}»; its table says «{expected}»")
        }
        (Ok(_), Some(expected)) => format!("ran what its table refuses: {expected}"),
        (Ok(_), None) => return Verdict::Infrastructure("a run was judged twice".into()),
    };
    whole_case(Check::Capability, what).into()
}

/// A finding about the case as a whole.
fn whole_case(check: Check, what: String) -> Finding {
    Finding::new(check, None, what)
}

impl From<Finding> for Verdict {
    fn from(finding: Finding) -> Verdict {
        Verdict::Finding(Box::new(finding))
    }
}
