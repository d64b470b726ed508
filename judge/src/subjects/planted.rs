//! The emulated kernel with a planted bug. Its schedule is edited, or stages of its kernel are exchanged; the kernel
//! and the executor themselves are untouched.

use std::rc::Rc;

use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, LseLayout, Problem};
use seamproof_simulator::faults::{Fault, Plant};
use seamproof_simulator::schedule::{BuildError, Schedule};

use super::emulated::read;
use super::{Emulated, SubjectName, World, in_steps};
use crate::subject::{Backend, Declaration, Outputs, RunError};

/// [`Emulated`] on schedules that a fault has edited, or with a kernel that a fault has made wrong. It merges in the
/// fault's own order ([`Fault::order`]).
#[derive(Clone, Debug)]
pub struct Planted {
    /// Emulated kernel that is made wrong.
    pub inner: Emulated,
    /// Planted fault.
    pub fault: Fault,
    name: String,
}

impl Planted {
    /// Returns the kernel with a fault, under the name `emulated+ID`.
    pub fn new(inner: Emulated, fault: Fault) -> Planted {
        let inner = Emulated { merge: fault.order(), lse: LseLayout::default(), ..inner };
        let name = SubjectName::planted(inner.name(), fault.id).name();
        Planted { inner, fault, name }
    }

    /// Returns the kernel with a fault, under the fault's id alone.
    pub fn canary(inner: Emulated, fault: Fault) -> Planted {
        Planted { name: fault.id.to_owned(), ..Planted::new(inner, fault) }
    }
}

impl Backend for Planted {
    fn declaration(&self) -> Declaration {
        self.inner.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.inner.replay(problem)
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        let mut schedule = self.inner.schedule(problem)?;
        self.fault.plant(problem, &mut schedule);
        Ok(schedule)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if !problem.steps.is_empty() {
            return in_steps(self, problem, inputs);
        }
        let problem = &*read(problem)?;
        let world = World::new(problem, |problem| {
            let mut schedule = (*self.inner.launchable(problem)?).clone();
            self.fault.plant(problem, &mut schedule);
            Ok(Rc::new(schedule))
        })?;
        let device = match self.fault.edit {
            Plant::Schedule(_) => self.inner.device(problem),
            Plant::Kernel(kernel) => self.inner.variant(problem, kernel),
        };
        self.inner.run_world(problem, inputs, &world, &device)
    }
}
