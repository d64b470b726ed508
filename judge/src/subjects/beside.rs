//! Two subjects on one problem: a new path beside the older one.

use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, Problem};

use crate::subject::{Backend, Declaration, Other, Outputs, RunError};

/// A subject with another one beside it. It is judged as it is alone, and its results are held to the other's: within
/// the bounds of both, or bit for bit.
pub struct Beside<'a> {
    one: Box<dyn Backend + 'a>,
    other: Box<dyn Backend + 'a>,
    bits: bool,
}

impl<'a> Beside<'a> {
    /// Returns a subject with another one beside it. With `bits`, both are to give the same bits.
    pub fn new(one: Box<dyn Backend + 'a>, other: Box<dyn Backend + 'a>, bits: bool) -> Beside<'a> {
        Beside { one, other, bits }
    }
}

impl Backend for Beside<'_> {
    fn name(&self) -> &str {
        self.one.name()
    }

    fn declaration(&self) -> Declaration {
        self.one.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.one.as_ref())
    }

    fn beside(&self) -> Option<Other<'_>> {
        Some(Other { subject: self.other.as_ref(), bits: self.bits })
    }

    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.one.replay(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.one.run(problem, inputs)
    }
}
