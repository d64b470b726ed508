//! The subject: a kernel, or a whole context-parallel program, that is held against the oracle.
//!
//! A [`Backend`] declares what it takes, how it treats padding, what it promises and how it accumulates (a
//! [`Declaration`]); then it either refuses a problem with a reason, or is right.

mod capabilities;
mod outputs;
mod parallel;
mod promises;

use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::limits::HEAD_DIM_MAX;
use seamproof_oracle::replay::{Launch, Replay};
use seamproof_oracle::{Format, Inputs, Problem, Sink};
use seamproof_simulator::schedule::{BuildError, Schedule, build};
use serde::Serialize;

pub use capabilities::{Capabilities, Refusal, Word};
pub use outputs::{Ended, Outputs, RankGradients, RankOutputs, RunError};
pub(crate) use parallel::Needs;
pub use parallel::{ParallelRule, broken_rule};
pub use promises::{
    BACKWARD_ON_TENSOR_CORES, FORWARD_ON_TENSOR_CORES, PaddingContract, PaddingInputs, PaddingOutputs,
    Promises, Way,
};
pub use seamproof_oracle::TensorName;

use crate::profile;

/// A subject's word about itself: everything that holds for each of its runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Declaration {
    /// The problems that it takes.
    pub capabilities: Capabilities,
    /// Its padding contract.
    pub padding: PaddingContract,
    /// Its promises about the bits of its results; [`Promises::default`] promises nothing.
    pub promises: Promises,
    /// How its sums are accumulated: [`Accumulation::F32Serial`] for f32 on ordinary units, in whatever order.
    pub accumulation: Accumulation,
}

impl Declaration {
    /// The declaration of a kernel that runs on one rank and promises nothing more: all tensors in one format, weights
    /// (P) in another, any head dimension, forward and backward, no soft cap, no sink, an LSE. Padding rows of its inputs hold finite numbers, and
    /// it may write anything into those of its outputs. Sums are f32, in any order.
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

    /// The declaration without the backward pass.
    pub fn forward_only(mut self) -> Declaration {
        self.capabilities.backward = false;
        self
    }
}

/// A whole subject.
///
/// A subject that wraps another one (in worker processes, or with a planted fault) returns it from [`Backend::inner`]; each
/// method that it leaves out is then answered by the wrapped one.
pub trait Backend: Sync {
    /// The name, as `--backend` takes it.
    fn name(&self) -> &str;

    /// The subject's word about itself.
    fn declaration(&self) -> Declaration;

    /// Runs the problem, forward and backward where it asks for both. Padding and slack rows of `inputs` hold what the
    /// padding contract allows.
    ///
    /// The judge also runs problems that the capability table refuses. The subject refuses these here, before anything else,
    /// for the reason that its table gives: usually `self.declaration().capabilities.refusal(problem)`. [`RankOutputs`] and
    /// [`RankGradients`] say what the results must hold.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError>;

    /// The subject that this one wraps.
    fn inner(&self) -> Option<&dyn Backend> {
        None
    }

    /// The nearest problem that the subject takes: what a property or a campaign in memory judges in place of a drawn one.
    /// The default is the nearest one that the capability table takes. A subject that is narrower (without a backward, a
    /// window, or empty sequences) narrows it further.
    fn fitted(&self, problem: Problem) -> Problem {
        match self.inner() {
            Some(inner) => inner.fitted(problem),
            None => self.declaration().capabilities.fitted(problem),
        }
    }

    /// How this problem's sums are cut into separately rounded pieces. The default is that of one rank without tiles.
    fn partition(&self, problem: &Problem) -> Partition {
        match self.inner() {
            Some(inner) => inner.partition(problem),
            None => Partition::single(problem.rows.q, problem.rows.kv),
        }
    }

    /// The keys that each launch shows together, for a replay of its roundings; `None` where that is not known.
    fn launches(&self, problem: &Problem) -> Option<Vec<Launch>> {
        self.inner().and_then(|inner| inner.launches(problem))
    }

    /// The replay behind tier R: the profile that was locked for a subject of this name, where its launches are known.
    /// A wrapper has a name of its own, and so no profile unless one is locked for it.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        profile::replay(self.name(), problem, self.partition(problem), || self.launches(problem))
    }

    /// The schedule that it runs. The default is that of the problem's own algorithm.
    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        match self.inner() {
            Some(inner) => inner.schedule(problem),
            None => build(problem),
        }
    }

    /// The ways that runs of a problem could go, and whether they do; empty where all problems go the same way.
    fn ways(&self, problem: &Problem) -> Vec<Way> {
        self.inner().map_or(Vec::new(), |inner| inner.ways(problem))
    }

    /// The host of the processes that it runs in; `None` where it runs in this one.
    fn host(&self) -> Option<&dyn Host> {
        self.inner().and_then(Backend::host)
    }
}

impl dyn Backend + '_ {
    /// Makes ready what runs need; nothing where the subject runs in this process.
    pub fn ready(&self) -> Result<(), String> {
        self.host().map_or(Ok(()), Host::ready)
    }
}

/// The processes and devices that a subject runs on, where it does not run in this process.
pub trait Host {
    /// Makes ready what runs need; an error says why it cannot be had.
    fn ready(&self) -> Result<(), String>;

    /// Returns the devices that were given up, each with the reason.
    fn lost(&self) -> Vec<String>;

    /// Returns the devices that ran something.
    fn devices(&self) -> Vec<DeviceRuns>;
}

/// A device, and the runs on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceRuns {
    /// Its ordinal among those that a worker sees.
    pub device: usize,
    /// A GPU's name and UUID; empty for a core.
    pub name: String,
    /// Runs since the program's start, sentinels apart.
    pub runs: u64,
}
