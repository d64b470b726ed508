//! A subject as the supervisor serves it from worker processes.

use std::collections::BTreeMap;
use std::sync::Arc;

use seamproof_judge::case::Subject;
use seamproof_judge::subject::Backend;

use super::settings::{Launch, Settings};

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

    pub(super) fn launch(&self, settings: &Settings) -> Launch {
        Launch { program: settings.program.clone(), arguments: self.arguments.clone() }
    }
}

/// Returns the name and the options of a subject as one value.
pub fn subject(name: &str, options: &BTreeMap<String, String>) -> Arc<Subject> {
    Arc::new(Subject { name: name.to_owned(), options: options.clone() })
}
