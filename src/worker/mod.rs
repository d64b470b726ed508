//! Worker processes: a subject that can take its whole process with it runs in another one.
//!
//! The *supervisor* is the process that judges; it holds a [`Pool`] of *workers*, which run subjects and nothing else.
//! The two talk in [`frame`]s over the worker's stdin and stdout. A run goes through [`Phase`]s, each with its own
//! deadline; the last one that was reached says where a dead worker stood. Inside a worker a subject is a [`Runner`]; in the
//! supervisor it is a [`Remote`], a backend whose declaration is made here and whose runs are made there.
//!
//! The claim: whatever a subject does (crash, hang, run out of memory, write garbage, spoil its device), the supervisor
//! goes on, the failure is that of the run that made it, confirmed in a fresh worker, and no process outlives the
//! supervisor, but for one that a driver holds against being killed. What a device lacks (memory, or any life at all) is
//! not held against the subject.

pub mod frame;
pub mod message;
pub mod mock;

mod confirm;
mod history;
mod pool;
mod process;
mod remote;
mod runner;
mod sentinel;
mod serve;
mod session;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use history::{BYTES_MAX, RUNS_MAX, smallest};
pub(crate) use pool::own_program;
pub use pool::{Launch, Pool, SENTINEL_EVERY, STARTS_MAX, Settings, configure, shared};
pub use process::STDERR_MAX;
pub use remote::Remote;
pub use runner::{InProcess, Open, OpenError, Opened, Runner, open};
pub use sentinel::{SENTINEL_SEED, problem as sentinel_problem};
pub use serve::{EXIT_FAILED, ServeError, leashed, pipes, serve};
pub use session::Deadlines;

use seamproof_judge::case::Subject;
use seamproof_judge::subject::Backend;

/// A subject as a pool serves it.
pub struct Served {
    /// What it says of itself.
    pub declaration: Box<dyn Backend>,
    /// What a worker opens.
    pub subject: Arc<Subject>,
    /// What the sentinel runs on, the same for every case: the subject with default options, or without its fault.
    pub sentinel: Arc<Subject>,
    /// What that one says of itself.
    pub sentinel_declaration: Box<dyn Backend>,
    /// Arguments of the worker's program.
    pub arguments: Vec<String>,
}

impl Served {
    /// A subject that a worker opens by its name and options, with the default options on the sentinel.
    pub fn new(
        name: &str,
        options: &BTreeMap<String, String>,
        declaration: Box<dyn Backend>,
        sentinel_declaration: Box<dyn Backend>,
    ) -> Served {
        Served {
            declaration,
            subject: subject(name, options),
            sentinel: subject(name, &BTreeMap::new()),
            sentinel_declaration,
            arguments: vec!["worker".into()],
        }
    }

    /// The same with the sentinel on a subject of another name, with default options.
    pub fn watched_by(self, name: &str) -> Served {
        Served { sentinel: subject(name, &BTreeMap::new()), ..self }
    }

    fn launch(&self, settings: &Settings) -> Launch {
        Launch { program: settings.program.clone(), arguments: self.arguments.clone() }
    }
}

/// The name and the options of a subject, as one.
pub fn subject(name: &str, options: &BTreeMap<String, String>) -> Arc<Subject> {
    Arc::new(Subject { name: name.to_owned(), options: options.clone() })
}

/// A worker's whole life: answers what comes through stdin until the supervisor is gone. The exit code.
pub fn live() -> u8 {
    let life = || {
        let (requests, mut answers) = pipes()?;
        serve(leashed(requests), &mut answers, open)
    };
    serve::end(life())
}
