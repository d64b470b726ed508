//! Subjects inside a worker process: a [`Runner`] is a subject without its declaration.

use std::collections::BTreeMap;

use std::num::NonZero;
use std::thread::available_parallelism;

use seamproof_judge::finding::Phase;
use seamproof_oracle::{Inputs, Problem};

use seamproof_judge::subject::{Backend, Outputs, RunError};

/// A subject as a worker process holds it.
///
/// `run` calls `reached` with each phase after [`Phase::Received`], in order, as soon as the run reaches it. After a
/// [`RunError::Crash`] or [`RunError::OutOfMemory`] the runner is not asked again, because the worker ends.
pub trait Runner {
    /// Runs the problem.
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError>;
}

/// A runner, and the number of devices that there are for it.
pub struct Opened {
    /// Runner on the device that was asked for.
    pub runner: Box<dyn Runner>,
    /// Number of devices that the runner could have been opened on. Ordinals are below it.
    pub devices: usize,
    /// Name of the device, which tells it from the others; empty for a CPU core.
    pub name: String,
}

/// Reason why a runner cannot be opened, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// Function that opens a subject by its name and options on the device of an ordinal.
pub type Open = fn(&str, &BTreeMap<String, String>, usize) -> Result<Opened, OpenError>;

impl Opened {
    /// Returns the runner of a subject that needs no device of its own, so that a CPU core counts as a device.
    pub fn on_core(subject: Box<dyn Backend>) -> Opened {
        let devices = available_parallelism().map_or(1, NonZero::get);
        Opened { runner: Box::new(InProcess(subject)), devices, name: String::new() }
    }
}

/// A subject that runs in the worker's own process.
struct InProcess(Box<dyn Backend>);

impl Runner for InProcess {
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        reached(Phase::Uploaded);
        reached(Phase::Launched);
        let outputs = self.0.run(problem, inputs)?;
        reached(Phase::Done);
        Ok(outputs)
    }
}
