//! The emulated kernel with a planted bug: the calls of its schedule are edited, the kernel is untouched.

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Inputs, Problem};
use seamproof_simulator::faults::Fault;
use seamproof_simulator::schedule::{BuildError, Schedule, Work, build};

use super::Emulated;
use crate::backend::{Backend, Capabilities, Outputs, PaddingContract, RunError};

/// [`Emulated`] on schedules whose calls a fault has edited.
#[derive(Clone, Copy, Debug)]
pub struct Planted {
    /// The kernel.
    pub inner: Emulated,
    /// The edit.
    pub fault: Fault,
}

impl Backend for Planted {
    fn name(&self) -> &str {
        self.fault.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn padding(&self) -> PaddingContract {
        self.inner.padding()
    }

    fn accumulation(&self) -> Accumulation {
        self.inner.accumulation()
    }

    fn partition(&self, problem: &Problem) -> Partition {
        self.inner.partition(problem)
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        let mut schedule = build(problem)?;
        self.plant(&mut schedule);
        Ok(schedule)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut schedule = super::emulated::schedule(problem)?;
        self.plant(&mut schedule);
        self.inner.run_schedule(problem, inputs, &schedule)
    }
}

impl Planted {
    fn plant(&self, schedule: &mut Schedule) {
        for operation in schedule.ranks.iter_mut().flat_map(|program| &mut program.operations) {
            match &mut operation.work {
                Work::Attend(attend) => (self.fault.edit)(&mut attend.call),
                Work::AttendBackward(attend) => (self.fault.edit)(&mut attend.call),
                _ => {}
            }
        }
    }
}
