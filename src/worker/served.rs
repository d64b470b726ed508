//! A subject as the supervisor serves it from worker processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use seamproof_judge::case::Subject;
use seamproof_judge::subject::Backend;

use super::settings::{Deadlines, Launch, Settings};

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
    /// Command of the worker.
    pub worker: WorkerCommand,
    /// Time for the start of a worker, as the subject declares it.
    pub start: Option<Duration>,
}

/// Command that starts a subject's worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerCommand {
    /// Program; `None` for this one.
    pub program: Option<PathBuf>,
    /// Arguments of the program.
    pub arguments: Vec<String>,
    /// Variables of the program's environment beside those of this process.
    pub environment: Vec<(String, OsString)>,
}

impl WorkerCommand {
    /// Returns the command of a worker that is this program.
    pub fn own(arguments: &[&str]) -> WorkerCommand {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        WorkerCommand { arguments, ..WorkerCommand::default() }
    }

    pub(super) fn launch(&self, settings: &Settings) -> Launch {
        Launch {
            program: self.program.clone().unwrap_or_else(|| settings.program.clone()),
            arguments: self.arguments.clone(),
            environment: self.environment.clone(),
            shows_prints: settings.shows_prints,
        }
    }
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
            worker: WorkerCommand::own(&["worker"]),
            start: None,
        }
    }

    /// Returns the subject with the sentinel on a subject of another name, with default options.
    pub fn watched_by(self, name: &str) -> Served {
        Served { sentinel: subject(name, &BTreeMap::new()), ..self }
    }

    pub(super) fn launch(&self, settings: &Settings) -> Launch {
        self.worker.launch(settings)
    }

    /// Returns the times that a worker of this subject may take. A start may take as long as the subject declares,
    /// unless a person said how long.
    pub(super) fn deadlines(&self, settings: &Settings) -> Deadlines {
        let start = self.start.filter(|_| !settings.is_start_fixed).unwrap_or(settings.deadlines.start);
        Deadlines { start, ..settings.deadlines }
    }
}

/// Returns the name and the options of a subject as one value.
pub fn subject(name: &str, options: &BTreeMap<String, String>) -> Arc<Subject> {
    Arc::new(Subject { name: name.to_owned(), options: options.clone() })
}
