//! A recorded run as a subject: what ran declares itself, and runs no more.

use seamproof_oracle::envelope::Partition;
use seamproof_oracle::replay::{Replay, ReplayedLaunch};
use seamproof_oracle::{Inputs, Problem};

use crate::profile::Lock;
use crate::subject::{Backend, Declaration, Outputs, RunError};

/// A subject whose only run is over. [`Judge::examine_recorded`](crate::ladder::Judge::examine_recorded) judges what
/// it returned.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Name of what ran.
    pub name: String,
    /// Statement of what ran about itself.
    pub declaration: Declaration,
    /// Cuts of the run's sums.
    pub partition: Partition,
    /// Roundings of the run, where whoever judges knows what ran: a name in a file says nothing about that.
    pub replay: Option<Replay>,
}

impl Backend for Recorded {
    fn name(&self) -> &str {
        &self.name
    }

    fn declaration(&self) -> Declaration {
        self.declaration.clone()
    }

    fn partition(&self, _: &Problem) -> Partition {
        self.partition
    }

    fn launches(&self, _: &Problem) -> Option<Vec<ReplayedLaunch>> {
        None
    }

    fn lock(&self) -> Option<Lock> {
        None
    }

    fn replay(&self, _: &Problem) -> Option<Replay> {
        self.replay.clone()
    }

    fn run(&self, _: &Problem, _: &Inputs) -> Result<Outputs, RunError> {
        Err(RunError::Infrastructure("a recorded run cannot be made again".into()))
    }
}
