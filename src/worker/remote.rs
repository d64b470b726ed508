//! A subject behind worker processes, as a backend.

use std::sync::Arc;

use seamproof_oracle::replay::Replay;
use seamproof_oracle::{Inputs, Problem};

use super::confirm;
use super::pool::Pool;
use super::served::Served;
use seamproof_judge::subject::{Backend, Declaration, DeviceRuns, Host, Outputs, Recall, RunError};

/// A subject whose declaration is made here, and whose runs are made in a worker of a pool.
///
/// The supervisor computes everything that a [`Backend`] declares. The worker only makes the runs.
pub struct Remote {
    name: String,
    served: Served,
    pool: Arc<Pool>,
}

impl Remote {
    /// Returns a subject under its name, behind the workers of a pool.
    pub fn new(name: &str, served: Served, pool: Arc<Pool>) -> Remote {
        Remote { name: name.to_owned(), served, pool }
    }
}

impl Backend for Remote {
    fn name(&self) -> &str {
        &self.name
    }

    fn declaration(&self) -> Declaration {
        self.served.declaration.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.served.declaration.as_ref())
    }

    /// Returns the replay of the served subject: the kernel is the same, wherever it runs.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        self.served.declaration.replay(problem)
    }

    fn host(&self) -> Option<&dyn Host> {
        Some(self)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.pool.run(&self.served, problem, inputs)
    }
}

impl Host for Remote {
    /// Starts a worker with the subject.
    fn ready(&self) -> Result<(), String> {
        self.pool.start(&self.served)
    }

    fn lost(&self) -> Vec<String> {
        self.pool.retired()
    }

    fn devices(&self) -> Vec<DeviceRuns> {
        self.pool.used()
    }

    fn recall(&self) -> Option<Recall> {
        let runs = self.pool.runs();
        Some(Box::new(move || confirm::told(&runs)))
    }
}
