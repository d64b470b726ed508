//! Worker processes: a subject that can take its whole process with it runs in another process.
//!
//! The *supervisor* is the process that judges. It holds a [`Pool`] of *workers*, which run subjects and nothing
//! else. The two exchange [`frame`]s over the worker's stdin and stdout. A run goes through [`Phase`]s, each with its
//! own deadline. The last phase that was reached says where a dead worker stood. Inside a worker a subject is a
//! [`Runner`]. In the supervisor it is a [`Remote`], a backend whose declaration is made here and whose runs are made
//! there.
//!
//! Whatever a subject does (crash, hang, run out of memory, write garbage, spoil its device), the supervisor
//! continues. A failure belongs to the run that made it, and is confirmed in a fresh worker. No process outlives the
//! supervisor, except one that a driver protects from being killed. A device that lacks memory, or does not work at
//! all, is not held against the subject.

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
    /// Declaration of the subject.
    pub declaration: Box<dyn Backend>,
    /// Subject that a worker opens.
    pub subject: Arc<Subject>,
    /// Subject that the sentinel runs on, the same for every case: the subject with default options, or without its
    /// fault.
    pub sentinel: Arc<Subject>,
    /// Declaration of the sentinel's subject.
    pub sentinel_declaration: Box<dyn Backend>,
    /// Arguments of the worker's program.
    pub arguments: Vec<String>,
}

impl Served {
    /// Returns a subject that a worker opens by its name and options, with the sentinel on its default options.
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

    /// Returns the subject with the sentinel on a subject of another name, with default options.
    pub fn watched_by(self, name: &str) -> Served {
        Served { sentinel: subject(name, &BTreeMap::new()), ..self }
    }

    fn launch(&self, settings: &Settings) -> Launch {
        Launch { program: settings.program.clone(), arguments: self.arguments.clone() }
    }
}

/// Returns the name and the options of a subject as one value.
pub fn subject(name: &str, options: &BTreeMap<String, String>) -> Arc<Subject> {
    Arc::new(Subject { name: name.to_owned(), options: options.clone() })
}

/// Runs a worker to its end: it answers the requests on stdin until the supervisor is gone. Returns the exit code.
pub fn live() -> u8 {
    let life = || {
        let (requests, mut answers) = pipes()?;
        serve(leashed(requests), &mut answers, open)
    };
    serve::end(life())
}
