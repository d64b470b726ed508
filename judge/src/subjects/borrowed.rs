//! A subject that is owned elsewhere.

use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, Problem};

use crate::subject::{Backend, Declaration, Outputs, RunError};

/// A borrowed subject. It gives every answer of the subject that was lent.
pub struct Borrowed<'a>(pub &'a dyn Backend);

impl Backend for Borrowed<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn declaration(&self) -> Declaration {
        self.0.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.0)
    }

    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.0.replay(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.0.run(problem, inputs)
    }
}
