//! The subject: a kernel, or a whole context-parallel program, that is judged against the oracle.
//!
//! A [`Backend`] declares what it takes, how it treats padding, what it promises and how it rounds and sums (a
//! [`Declaration`]). It then either refuses a problem with a reason, or is right.

mod declared;
pub mod lse;
mod outputs;
mod parallel;
mod partials;
mod promises;
mod table;

use std::collections::BTreeMap;

use seamproof_oracle::envelope::{Accumulation, Arithmetic, Partition};
use seamproof_oracle::replay::{Replay, ReplayedLaunch, ReplayedTiles};
use seamproof_oracle::{Format, Inputs, Precision, Problem};
use seamproof_simulator::schedule::{BuildError, Schedule, build};
use serde::{Deserialize, Serialize};

pub use declared::DeclarationError;
pub use outputs::{ChangedInput, Costs, Ended, Outputs, RankGradients, RankOutputs, RunError};
pub(crate) use parallel::Needs;
pub use parallel::{ParallelRule, broken_rule};
pub use partials::{Partials, Stored};
pub use promises::{
    BACKWARD_ON_TENSOR_CORES, FORWARD_ON_TENSOR_CORES, PaddingContract, PaddingInputs, PaddingOutputs,
    Promises, SEVERAL_FOR_A_PLANNER, SEVERAL_FOR_A_PLANNER_FP8, SEVERAL_IN_A_BLOCK, SEVERAL_IN_A_BLOCK_FP8,
    SEVERAL_LATE_TURNS, SEVERAL_TURNS, Way,
};
pub use seamproof_oracle::TensorName;
pub use table::{
    BalanceKind, HeadCounts, HeadDims, Layouts, Lengths, MaskForm, MaskKind, Masks, Parallelism, Refusal,
    SideLayout, Sizes, SizesError, Table, TableError, Unpadded,
};

use crate::finding::Earlier;
use crate::profile::{self, Lock};

/// A word from this program's own vocabulary.
pub type Word = &'static str;

/// A subject's statement about itself, which holds for each of its runs. It begins as [`Declaration::single_rank`] or
/// as the declaration of another subject, and its fields are edited, so that a field may be added later.
///
/// In JSON it is the declaration of `docs/protocol.md`. [`Declaration::from_json`] says where a text is wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "declared::Declared", into = "declared::Declared")]
#[non_exhaustive]
pub struct Declaration {
    /// Table of the problems that the subject takes.
    pub table: Table,
    /// Padding contract of the subject.
    pub padding: PaddingContract,
    /// Promises about the bits of the results. [`Promises::default`] promises nothing.
    pub promises: Promises,
    /// Choices of the subject's arithmetic: how it sums, and what it rounds when. What is not declared has the weakest
    /// bounds.
    pub arithmetic: Arithmetic,
    /// Formats in which the ranks of a group store what they join.
    pub partials: Partials,
    /// Whether the subject itself refuses what its table does not take. Only then is it asked for such problems.
    pub refuses: bool,
    /// Number of seconds that opening the subject may take.
    pub start_seconds: u16,
}

/// Number of seconds that opening a subject may take, where it does not say.
pub const START_SECONDS: u16 = 120;

impl Declaration {
    /// Returns the declaration of a kernel that runs on one rank and promises nothing more. It takes all tensors in
    /// one format, weights (P) in another, and any geometry and mask, forward and backward. It takes no soft cap and
    /// no sink, returns an LSE, and refuses everything else by itself. Padding rows of its inputs hold finite numbers,
    /// and it may write anything into those of its outputs. Its sums are f32, in any order, and its
    /// roundings are a FlashAttention's ([`Arithmetic::flash_attention`]).
    pub fn single_rank(tensors: Format, weights: Format) -> Declaration {
        let precision = Precision { p: weights.into(), ..Precision::uniform(tensors) };
        Declaration {
            table: Table { precisions: vec![precision], ..Table::default() },
            padding: PaddingContract::default(),
            promises: Promises::default(),
            arithmetic: Arithmetic::flash_attention(Accumulation::F32Serial),
            partials: Partials::default(),
            refuses: true,
            start_seconds: START_SECONDS,
        }
    }

    /// Returns the declaration without the backward pass.
    pub fn forward_only(mut self) -> Declaration {
        self.table.backward = false;
        self
    }

    /// Returns the declaration with another table.
    pub fn with_table(self, table: Table) -> Declaration {
        Declaration { table, ..self }
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
        Declaration { arithmetic: Arithmetic { accumulation, ..self.arithmetic }, ..self }
    }

    /// Returns the declaration with another arithmetic.
    pub fn with_arithmetic(self, arithmetic: Arithmetic) -> Declaration {
        Declaration { arithmetic, ..self }
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
    /// Where the declaration says that the subject `refuses`, the judge also runs problems that the table refuses. The
    /// subject refuses these here, before anything else, for a row of its table: usually
    /// `self.declaration().table.check(problem)?`. [`RankOutputs`] and [`RankGradients`] say what the results must
    /// hold.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError>;

    /// Returns the promises that hold for this problem. The default is what the declaration says, or the wrapped
    /// subject of the same declared promises.
    fn promises(&self, problem: &Problem) -> Promises {
        let declared = self.declaration().promises;
        let inner = self.inner().filter(|inner| inner.declaration().promises == declared);
        inner.map_or(declared, |inner| inner.promises(problem))
    }

    /// Returns the subject that this one wraps, if it wraps one.
    fn inner(&self) -> Option<&dyn Backend> {
        None
    }

    /// Returns the subject that this one's results are held to, if there is one.
    fn beside(&self) -> Option<Other<'_>> {
        self.inner().and_then(Backend::beside)
    }

    /// Returns how this problem's sums are cut into separately rounded pieces. The default has no tiles, and on several
    /// ranks the joints that the declaration says.
    fn partition(&self, problem: &Problem) -> Partition {
        match self.inner() {
            Some(inner) => inner.partition(problem),
            None => self.declaration().partials.partition(problem),
        }
    }

    /// Returns the keys that each launch processes together, so that its roundings can be replayed; `None` where they
    /// are not known. The default is one launch for all keys of a sequence, on one rank, and unknown on several.
    fn launches(&self, problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
        match self.inner() {
            Some(inner) => inner.launches(problem),
            None => profile::whole_launches(problem),
        }
    }

    /// Returns the tiles of a backward that gives each tile of dS a factor, so that its roundings can be replayed; `None`
    /// where they are not known, which is the default.
    fn tiles(&self, problem: &Problem) -> Option<ReplayedTiles> {
        self.inner().and_then(|inner| inner.tiles(problem))
    }

    /// Returns the versions of what runs, by name, for which a profile is locked; empty where this program's own
    /// version says it all.
    fn versions(&self) -> BTreeMap<String, String> {
        self.inner().map_or(BTreeMap::new(), Backend::versions)
    }

    /// Returns the numeric profile that was locked for the subject. The default is the one that is built into this
    /// program for its name: a wrapper has a name of its own, so it has no profile unless one is locked for that name.
    /// A subject with a lock file of its own returns that one ([`Lock::read`]).
    fn lock(&self) -> Option<Lock> {
        profile::locked(self.name())
    }

    /// Returns the replay behind tier R: that of the locked profile, where it holds for the versions that run and the
    /// launches are known.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        let lock = self.lock().filter(|lock| lock.versions == self.versions())?;
        let (arithmetic, partition) = (self.declaration().arithmetic, self.partition(problem));
        let (launches, tiles) = (|| self.launches(problem), || self.tiles(problem));
        lock.replay(problem, &arithmetic, partition, launches, tiles)
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

/// A subject beside another one.
#[derive(Clone, Copy)]
pub struct Other<'a> {
    /// The subject.
    pub subject: &'a dyn Backend,
    /// Whether both are to give the same bits. Otherwise they agree within the bounds of both.
    pub bits: bool,
}

/// Processes and devices of a subject that does not run in this process.
pub trait Host {
    /// Prepares what runs need. An error says why it is not available.
    fn ready(&self) -> Result<(), String>;

    /// Returns the devices that were given up, each with the reason.
    fn lost(&self) -> Vec<String>;

    /// Returns the devices that ran something.
    fn devices(&self) -> Vec<DeviceRuns>;

    /// Returns what the process has run that served this thread last; `None` where that is not kept.
    fn recall(&self) -> Option<Recall> {
        None
    }
}

/// The runs that a process has made, which are written out only if somebody asks. Runs of the same problem one after
/// the other are one.
pub type Recall = Box<dyn FnOnce() -> Vec<Earlier> + Send>;

/// A device, and the number of runs on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceRuns {
    /// Ordinal of the device among those that a worker sees.
    pub device: usize,
    /// Name and UUID of a GPU; empty for a CPU core.
    pub name: String,
    /// Number of runs since the program's start, without sentinels.
    pub runs: u64,
    /// Versions of what runs there, by name, where the worker says so.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, String>,
}
