//! The emulated kernel with a planted bug: the call is edited, the kernel is untouched.

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::{Inputs, Problem};
use seamproof_simulator::AttentionCall;
use seamproof_simulator::faults::Fault;

use super::Emulated;
use crate::backend::{Backend, Capabilities, Outputs, PaddingContract, RunError};

/// [`Emulated`] launched with calls that a fault has edited.
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

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut call = AttentionCall::whole(problem);
        (self.fault.edit)(&mut call);
        self.inner.launch(problem, inputs, &call)
    }
}
