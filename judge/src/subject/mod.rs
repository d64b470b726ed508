//! The subject: a kernel, or a whole context-parallel program, that is judged against the oracle.
//!
//! A [`Backend`] declares what it takes, how it treats padding, what it promises and how it accumulates (a
//! [`Declaration`]). It then either refuses a problem with a reason, or is right.

mod capabilities;
mod outputs;
mod parallel;
mod promises;

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::limits::HEAD_DIM_MAX;
use seamproof_oracle::replay::{Replay, ReplayedLaunch};
use seamproof_oracle::{Format, Inputs, Problem, Sink};
use seamproof_simulator::schedule::{BuildError, Schedule, build};
use serde::Serialize;

pub use capabilities::{Capabilities, Refusal, Word};
pub use outputs::{Costs, Ended, Outputs, RankGradients, RankOutputs, RunError};
pub(crate) use parallel::Needs;
pub use parallel::{ParallelRule, broken_rule};
pub use promises::{
    BACKWARD_ON_TENSOR_CORES, FORWARD_ON_TENSOR_CORES, PaddingContract, PaddingInputs, PaddingOutputs,
    Promises, Way,
};
pub use seamproof_oracle::TensorName;

use crate::profile;

/// A subject's statement about itself, which holds for each of its runs. It begins as [`Declaration::single_rank`] or as
/// the declaration of another subject, and its fields are edited, so that a field may be added later.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Declaration {
    /// Table of the problems that the subject takes.
    pub capabilities: Capabilities,
    /// Padding contract of the subject.
    pub padding: PaddingContract,
    /// Promises about the bits of the results. [`Promises::default`] promises nothing.
    pub promises: Promises,
    /// Accumulation of the subject's sums. [`Accumulation::F32Serial`] stands for f32 on ordinary units, in any
    /// order.
    pub accumulation: Accumulation,
}

impl Declaration {
    /// Returns the declaration of a kernel that runs on one rank and promises nothing more. It takes all tensors in
    /// one format, weights (P) in another, any head dimension, forward and backward, no soft cap and no sink, and it
    /// returns an LSE. Padding rows of its inputs hold finite numbers, and it may write anything into those of its
    /// outputs. Its sums are f32, in any order.
    pub fn single_rank(tensors: Format, weights: Format) -> Declaration {
        Declaration {
            capabilities: Capabilities {
                formats: vec![tensors],
                weight_formats: vec![weights],
                head_dims: 1..=HEAD_DIM_MAX,
                algorithms: vec!["single"],
                sub_groups: false,
                softcap: false,
                sinks: vec![Sink::None],
                backward: true,
                statistics: vec![TensorName::Lse],
            },
            padding: PaddingContract { inputs: PaddingInputs::Finite, outputs: PaddingOutputs::Unspecified },
            promises: Promises::default(),
            accumulation: Accumulation::F32Serial,
        }
    }

    /// Returns the declaration without the backward pass.
    pub fn forward_only(mut self) -> Declaration {
        self.capabilities.backward = false;
        self
    }

    /// Returns the declaration with another padding contract.
    pub fn with_padding(self, padding: PaddingContract) -> Declaration {
        Declaration { padding, ..self }
    }

    /// Returns the declaration with other promises.
    pub fn with_promises(self, promises: Promises) -> Declaration {
        Declaration { promises, ..self }
    }

    /// Returns the declaration with another accumulation.
    pub fn with_accumulation(self, accumulation: Accumulation) -> Declaration {
        Declaration { accumulation, ..self }
    }
}

/// A whole subject.
///
/// A subject that wraps another one (in worker processes, or with a planted fault) returns it from
/// [`Backend::inner`]. The wrapped one then answers each method that the wrapper does not implement.
pub trait Backend: Sync {
    /// Returns the name, as `--backend` takes it.
    fn name(&self) -> &str;

    /// Returns the subject's statement about itself.
    fn declaration(&self) -> Declaration;

    /// Runs the problem: the forward pass, and the backward pass where the problem asks for it. Padding and slack
    /// rows of `inputs` hold what the padding contract allows.
    ///
    /// The judge also runs problems that the capability table refuses. The subject refuses these here, before
    /// anything else, for the reason that its table gives: usually
    /// `self.declaration().capabilities.refusal(problem)`. [`RankOutputs`] and [`RankGradients`] say what the results
    /// must hold.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError>;

    /// Returns the subject that this one wraps, if it wraps one.
    fn inner(&self) -> Option<&dyn Backend> {
        None
    }

    /// Returns the nearest problem that the subject takes. A property or a campaign in memory judges it in place of
    /// the drawn one. The default is the nearest problem that the capability table takes. A subject whose limits the
    /// table cannot express (no window, no empty sequences) narrows the problem further.
    fn fitted(&self, problem: Problem) -> Problem {
        match self.inner() {
            Some(inner) => inner.fitted(problem),
            None => self.declaration().capabilities.fitted(problem),
        }
    }

    /// Returns how this problem's sums are cut into separately rounded pieces. The default is one rank without tiles.
    fn partition(&self, problem: &Problem) -> Partition {
        match self.inner() {
            Some(inner) => inner.partition(problem),
            None => Partition::single(problem.rows.q, problem.rows.kv),
        }
    }

    /// Returns the keys that each launch processes together, so that its roundings can be replayed; `None` where they
    /// are not known.
    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        self.inner().and_then(|inner| inner.launches(problem))
    }

    /// Returns the replay behind tier R: the profile that was locked for a subject of this name, where the launches
    /// are known. A wrapper has a name of its own, so it has no profile unless one is locked for that name.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        profile::replay(self.name(), problem, self.partition(problem), || self.launches(problem))
    }

    /// Returns the schedule that the subject runs. The default is the schedule of the problem's own algorithm.
    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        match self.inner() {
            Some(inner) => inner.schedule(problem),
            None => build(problem),
        }
    }

    /// Returns the ways that runs of a problem could take, and whether they take them; empty where all problems take
    /// the same way.
    fn ways(&self, problem: &Problem) -> Vec<Way> {
        self.inner().map_or(Vec::new(), |inner| inner.ways(problem))
    }

    /// Returns the host of the processes that the subject runs in; `None` where it runs in this process.
    fn host(&self) -> Option<&dyn Host> {
        self.inner().and_then(Backend::host)
    }
}

impl dyn Backend + '_ {
    /// Prepares what runs need. It does nothing where the subject runs in this process.
    pub fn ready(&self) -> Result<(), String> {
        self.host().map_or(Ok(()), Host::ready)
    }
}

/// Processes and devices of a subject that does not run in this process.
pub trait Host {
    /// Prepares what runs need. An error says why it is not available.
    fn ready(&self) -> Result<(), String>;

    /// Returns the devices that were given up, each with the reason.
    fn lost(&self) -> Vec<String>;

    /// Returns the devices that ran something.
    fn devices(&self) -> Vec<DeviceRuns>;
}

/// A device, and the number of runs on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceRuns {
    /// Ordinal of the device among those that a worker sees.
    pub device: usize,
    /// Name and UUID of a GPU; empty for a CPU core.
    pub name: String,
    /// Number of runs since the program's start, without sentinels.
    pub runs: u64,
}
