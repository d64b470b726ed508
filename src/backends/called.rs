//! The subject in the process that started this program.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use seamproof_judge::subject::{Backend, Declaration, DeviceRuns, Host, Outputs, RunError};
use seamproof_judge::subjects::{Borrowed, Miscall, Miscalled, Options, SubjectName};
use seamproof_oracle::{Inputs, Problem};

use super::BackendError;
use super::outside::{Declared, Itself};
use crate::campaign::{Subjects, Wrong};
use crate::worker::{Caller, Ready};

/// A subject whose runs are made by the process that started this one.
pub struct Called {
    itself: Itself,
    caller: Caller,
    ready: Ready,
    runs: AtomicU64,
    /// What is done once the process has ended: a campaign ends with it.
    on_end: Box<dyn Fn() + Send + Sync>,
}

impl Called {
    /// Opens the subject under a name; an error says why it cannot be judged.
    pub fn open(name: &str, caller: Caller, on_end: Box<dyn Fn() + Send + Sync>) -> Result<Called, String> {
        let ready = caller.open(name)?;
        let declared = Arc::new(Declared::read(&ready)?);
        let itself = Itself { name: name.to_owned(), declared };
        Ok(Called { itself, caller, ready, runs: AtomicU64::new(0), on_end })
    }

    /// Returns the worker's answer that the subject is open.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Returns how the process ended, once it has.
    pub fn ended(&self) -> Option<String> {
        self.caller.ended()
    }
}

impl Backend for Called {
    fn name(&self) -> &str {
        self.itself.name()
    }

    fn declaration(&self) -> Declaration {
        self.itself.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.itself)
    }

    fn host(&self) -> Option<&dyn Host> {
        Some(self)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.itself.declared.asked(self, problem, inputs, || {
            self.runs.fetch_add(1, Ordering::Relaxed);
            let result = self.caller.run(problem, inputs);
            if self.ended().is_some() {
                (self.on_end)();
            }
            result
        })
    }
}

impl Host for Called {
    fn ready(&self) -> Result<(), String> {
        self.ended().map_or(Ok(()), Err)
    }

    fn lost(&self) -> Vec<String> {
        Vec::new()
    }

    fn devices(&self) -> Vec<DeviceRuns> {
        let runs = self.runs.load(Ordering::Relaxed);
        let Ready { name, versions, .. } = self.ready.clone();
        vec![DeviceRuns { device: 0, name, runs, versions }]
    }
}

impl Subjects for &Called {
    fn name(&self) -> &str {
        self.itself.name()
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(Borrowed(*self)))
    }
}

/// The subject in the calling process, called wrongly: its canary.
pub struct WronglyCalled<'a> {
    called: &'a Called,
    call: &'static Miscall,
    name: String,
}

impl<'a> WronglyCalled<'a> {
    /// Returns the subject with a fault at its call, and the subject.
    pub fn of(called: &'a Called, call: &'static Miscall) -> Wrong<'a> {
        let name = SubjectName::from(called.itself.name()).called_wrongly(call).name();
        let wrong = Box::new(WronglyCalled { called, call, name });
        Wrong { wrong, right: Box::new(called), call: Some(call) }
    }
}

impl Subjects for WronglyCalled<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(Miscalled::new(Box::new(Borrowed(self.called)), self.call)))
    }
}
