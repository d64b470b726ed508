//! A subject that fails most cases, for tests of a campaign's findings.

use seamproof::backends::{self, BackendError};
use seamproof::campaign::{Options, Subjects};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_oracle::{Inputs, Problem};

/// Largest number of tokens of a problem on which the subject does not crash.
const TOKENS_MAX: usize = 3;

/// The emulated subject, which crashes on all but the smallest problems.
struct Broken(Box<dyn Backend>);

impl Backend for Broken {
    fn declaration(&self) -> Declaration {
        self.0.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.0.as_ref())
    }

    fn name(&self) -> &str {
        "broken"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if let Some(refusal) = self.0.declaration().table.refusal(problem) {
            return Err(refusal.into());
        }
        if problem.tokens() > TOKENS_MAX {
            return Err(RunError::Crash(format!("more than {TOKENS_MAX} tokens")));
        }
        self.0.run(problem, inputs)
    }
}

/// Registration that makes the broken subject, with tiles drawn for each case.
pub(crate) struct Crashing;

impl Subjects for Crashing {
    fn name(&self) -> &str {
        "broken"
    }

    fn options(&self, seed: u64) -> Options {
        backends::draw_options("emulated", seed)
    }

    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(Broken(backends::by_name("emulated", options)?)))
    }
}
