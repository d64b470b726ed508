//! A subject that is called wrongly, by a fault of [`MISCALLS`](super::MISCALLS).
//!
//! A subject behind worker processes is called wrongly by the supervisor. Its workers serve the right subject, since
//! the call and not the subject has the fault, and they keep it open from one fault to the next. The runs of a worker
//! before it dies are therefore the wrong calls themselves, on the subject that is [called](SubjectName::called).

use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, Problem};

use super::difference;
use super::ideal::Ideal;
use super::miscalls::Miscall;
use super::name::SubjectName;
use crate::subject::{Backend, Declaration, Outputs, RunError};

/// A subject with a fault at its call. It declares what the subject declares.
pub struct Miscalled<'a> {
    inner: Box<dyn Backend + 'a>,
    miscall: &'static Miscall,
    name: String,
}

impl<'a> Miscalled<'a> {
    /// Returns the subject `inner~ID`.
    pub fn new(inner: Box<dyn Backend + 'a>, miscall: &'static Miscall) -> Miscalled<'a> {
        let name = SubjectName::from(inner.name()).called_wrongly(miscall).name();
        Miscalled { inner, miscall, name }
    }

    /// Whether the fault changes the exact answer, as the problem's formats hold it. Where it does not, it is
    /// equivalent to the right call. The subject itself is not run, because two runs of one that sums in any order
    /// differ by themselves.
    pub fn shows(&self, problem: &Problem, inputs: &Inputs) -> bool {
        let ideal = Ideal(self.inner.as_ref());
        match (Backend::run(&ideal, problem, inputs), (self.miscall.edit)(&ideal, problem, inputs)) {
            (Ok(right), Ok(wrong)) => difference(&wrong, &right).is_some(),
            (Ok(_), Err(_)) => true,
            (Err(_), _) => false,
        }
    }
}

impl Backend for Miscalled<'_> {
    fn declaration(&self) -> Declaration {
        self.inner.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.inner.as_ref())
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the replay of the called subject: the kernel is the same, whatever it is told.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.inner.replay(problem)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        (self.miscall.edit)(self.inner.as_ref(), problem, inputs)
    }
}
