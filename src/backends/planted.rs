//! The emulated kernel with a planted bug: its schedule is edited, kernel and executor are untouched.

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Inputs, Problem};
use seamproof_simulator::faults::Fault;
use seamproof_simulator::schedule::{BuildError, Schedule, build};

use super::Emulated;
use crate::backend::{Backend, Capabilities, Outputs, PaddingContract, Promises, RunError};

/// Before the id of a fault: the name of the subject with that fault.
pub(super) const PREFIX: &str = "emulated+";

/// [`Emulated`] on schedules that a fault has edited.
#[derive(Clone, Debug)]
pub struct Planted {
    /// The kernel.
    pub inner: Emulated,
    /// The edit.
    pub fault: Fault,
    name: String,
}

impl Planted {
    /// The kernel with a fault, under the name `emulated+ID`.
    pub fn new(inner: Emulated, fault: Fault) -> Planted {
        Planted { inner, fault, name: format!("{PREFIX}{}", fault.id) }
    }

    /// The same, under the fault's id alone.
    pub fn canary(inner: Emulated, fault: Fault) -> Planted {
        Planted { name: fault.id.to_owned(), ..Planted::new(inner, fault) }
    }
}

impl Backend for Planted {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn padding(&self) -> PaddingContract {
        self.inner.padding()
    }

    fn promises(&self) -> Promises {
        self.inner.promises()
    }

    fn accumulation(&self) -> Accumulation {
        self.inner.accumulation()
    }

    fn partition(&self, problem: &Problem) -> Partition {
        self.inner.partition(problem)
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        let mut schedule = build(problem)?;
        self.fault.plant(problem, &mut schedule);
        Ok(schedule)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut schedule = super::emulated::schedule(problem)?;
        self.fault.plant(problem, &mut schedule);
        self.inner.run_schedule(problem, inputs, &schedule)
    }
}
