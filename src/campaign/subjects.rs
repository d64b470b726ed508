//! What a campaign is run against: a subject whose options are drawn for each case.

use std::collections::BTreeMap;

use crate::backend::Backend;
use crate::backends::{self, BackendError};

/// Options of a subject, as text.
pub type Options = BTreeMap<String, String>;

/// Makes the subject of each case.
pub trait Subjects: Sync {
    /// The name that stored cases carry.
    fn name(&self) -> &str;

    /// A case's options, a function of the seed alone.
    fn options(&self, seed: u64) -> Options;

    /// The subject with these options.
    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError>;
}

/// A subject that the command line knows by name.
#[derive(Clone, Debug)]
pub struct Registered(String);

impl Registered {
    /// The subject of this name, if there is one and it can be made.
    pub fn new(name: &str) -> Result<Registered, BackendError> {
        backends::by_name(name, &backends::draw_options(name, 0))?;
        Ok(Registered(name.to_owned()))
    }
}

impl Subjects for Registered {
    fn name(&self) -> &str {
        &self.0
    }

    fn options(&self, seed: u64) -> Options {
        backends::draw_options(&self.0, seed)
    }

    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        backends::by_name(&self.0, options)
    }
}

/// The canary: the emulated subject with a planted fault.
#[derive(Clone, Debug)]
pub struct PlantedSubjects(String);

impl Default for PlantedSubjects {
    fn default() -> PlantedSubjects {
        PlantedSubjects(backends::canary().name().to_owned())
    }
}

impl Subjects for PlantedSubjects {
    fn name(&self) -> &str {
        &self.0
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(backends::canary())
    }
}
