//! A fault at the call, and what its edits are made of.

use seamproof_oracle::{Inputs, Problem, ProblemFields};
use seamproof_simulator::faults::Catcher::{self, Crash, Envelope, Exact, Identity, Poison, Structure};
use seamproof_simulator::faults::Fault;

use crate::subject::{Backend, Outputs, RunError};

/// A wrong call of a subject.
pub type WrongCall = fn(&dyn Backend, &Problem, &Inputs) -> Result<Outputs, RunError>;

/// A fault at the call.
pub type Miscall = Fault<WrongCall>;

/// Catchers of a fault that moves values. Any check that compares values may be the first to see it.
pub(super) const VALUES: &[Catcher] = &[Envelope, Exact, Identity];
/// Catchers of a fault that moves values, and may also make padding visible or leave real rows unwritten.
pub(super) const ROWS: &[Catcher] = &[Envelope, Exact, Identity, Poison, Structure, Crash];

/// Runs another problem with the same tensors; the right one where the other is not legal or not taken.
pub(super) fn told(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    edit: impl Fn(&mut ProblemFields),
) -> Result<Outputs, RunError> {
    let mut fields: ProblemFields = problem.clone().into();
    edit(&mut fields);
    let other = Problem::new(fields.sayable()).ok();
    let other = other.filter(|other| backend.declaration().table.refusal(other).is_none());
    backend.run(other.as_ref().unwrap_or(problem), inputs)
}
