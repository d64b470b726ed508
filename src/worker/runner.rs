//! What runs inside a worker process: a [`Runner`] is a subject without its declaration.

use std::collections::BTreeMap;

use std::num::NonZero;
use std::thread::available_parallelism;

use seamproof_judge::finding::Phase;
use seamproof_oracle::{Inputs, Problem};

use seamproof_judge::subject::{Backend, Outputs, RunError};

/// A subject as a worker process holds it.
///
/// `run` calls `reached` with each phase after [`Phase::Received`], in order, as soon as it is reached. After a
/// [`RunError::Crash`] or [`RunError::OutOfMemory`] the runner is not asked again: the worker ends.
pub trait Runner {
    /// Runs the problem.
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError>;
}

/// A runner, and how many devices there are for it.
pub struct Opened {
    /// The runner, on the device that was asked for.
    pub runner: Box<dyn Runner>,
    /// Devices that it could have been opened on: ordinals below this.
    pub devices: usize,
    /// What the one that it is on is called, by which it is told from the others; empty for a core.
    pub name: String,
}

/// Why a runner cannot be opened, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// Opens a subject by its name and options on the device of an ordinal.
pub type Open = fn(&str, &BTreeMap<String, String>, usize) -> Result<Opened, OpenError>;

impl Opened {
    /// The runner of a subject that needs no device of its own: a core is as good as a device.
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
