//! A [`Backend`] is a whole subject: what is compared with the oracle.
//!
//! It declares what it can do (a [`Capabilities`] table), how it treats padding and how it accumulates; then it either
//! refuses a problem with a reason, or is right. There is no third answer: a table that promises too much and one that
//! promises too little are both faults.

use std::ops::RangeInclusive;

use ndarray::{Array1, Array2, Array3};
pub use seamproof_oracle::TensorName;
use seamproof_oracle::envelope::{Accumulation, Partition};
use seamproof_oracle::replay::{Launch, Replay};
use seamproof_oracle::{Algorithm, Balance, Format, Inputs, Precision, Problem, Scaling, Sequence, Sink};
use seamproof_simulator::Damage;
use seamproof_simulator::schedule::{BuildError, Schedule, build};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::case::Earlier;
use crate::profile;
use crate::verdict::Ending;

/// A word of this program.
pub type Word = &'static str;

/// Why a subject does not take a problem: the row of the capability table that says no.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// A format that the subject has no code for, or a mix of formats.
    #[error("{quantity} in {format} is not supported")]
    Format {
        /// The quantity of `Precision`.
        #[serde(deserialize_with = "known_word")]
        quantity: Word,
        /// Its format.
        #[serde(deserialize_with = "known_word")]
        format: Word,
    },
    /// Scaled codes.
    #[error("{quantity} is scaled; only unscaled formats are supported")]
    Scaling {
        /// The quantity of `Precision`.
        #[serde(deserialize_with = "known_word")]
        quantity: Word,
    },
    /// A head dimension outside the range.
    #[error("head dimension {dim} of {which} is outside {min} to {max}")]
    HeadDim {
        /// `qk` or `v`.
        #[serde(deserialize_with = "known_word")]
        which: Word,
        /// The dimension.
        dim: usize,
        /// Least.
        min: usize,
        /// Most.
        max: usize,
    },
    /// A context-parallel algorithm that the subject does not run.
    #[error("context-parallel algorithm {0} is not supported")]
    Algorithm(#[serde(deserialize_with = "known_word")] Word),
    /// A group smaller than its world.
    #[error("a group inside a larger world is not supported")]
    World,
    /// What an algorithm cannot cut or deal.
    #[error("{0}")]
    Parallel(ParallelRule),
    /// A soft cap.
    #[error("softcap is not supported")]
    Softcap,
    /// A sink.
    #[error("this kind of sink is not supported")]
    Sink,
}

/// The words that refusals are made of: a refusal that comes from another process has no others.
fn known_word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Word, D::Error> {
    let word = String::deserialize(deserializer)?;
    let quantities = Precision::uniform(Format::F32).elements().map(|(name, _)| name);
    let mut known =
        quantities.into_iter().chain(Format::ALL.map(Format::name)).chain(ALGORITHMS).chain(["qk", "v"]);
    known.find(|known| *known == word).ok_or_else(|| D::Error::custom("a word that no refusal has"))
}

impl Refusal {
    /// The row of the table, without the case's values: what refusals are counted by.
    pub fn row(&self) -> &'static str {
        match self {
            Refusal::Format { .. } => "format",
            Refusal::Scaling { .. } => "scaling",
            Refusal::HeadDim { .. } => "head dim",
            Refusal::Algorithm(_) => "algorithm",
            Refusal::World => "world",
            Refusal::Parallel(rule) => rule.row(),
            Refusal::Softcap => "softcap",
            Refusal::Sink => "sink",
        }
    }
}

/// What a context-parallel algorithm needs of a problem; a problem without it is refused because it is impossible.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error, Serialize, Deserialize,
)]
pub enum ParallelRule {
    /// Every span is a multiple of what the balance cuts it into.
    #[error("a sequence's span is not a multiple of what the sharding cuts it into")]
    SpanMultiple,
    /// Only consecutive rows are cut.
    #[error("rows with a step are not cut over ranks")]
    ConsecutiveRows,
    /// Query heads are dealt evenly.
    #[error("the query heads are not a multiple of the all-to-all's ranks")]
    QueryHeads,
    /// KV heads are dealt evenly, or replicated evenly.
    #[error("the kv heads are neither a multiple nor a divisor of the all-to-all's ranks")]
    KvHeads,
    /// A ring's step must be a band.
    #[error("a ring does not take stripes of more than one row")]
    RingStripe,
    /// Super-chunks exist for these cuts only.
    #[error("the hierarchical algorithm takes contiguous and dual-chunk balance only")]
    HierarchicalBalance,
}

impl ParallelRule {
    fn row(self) -> &'static str {
        match self {
            ParallelRule::SpanMultiple => "span multiple",
            ParallelRule::ConsecutiveRows => "consecutive rows",
            ParallelRule::QueryHeads => "query heads",
            ParallelRule::KvHeads => "kv heads",
            ParallelRule::RingStripe => "ring stripe",
            ParallelRule::HierarchicalBalance => "hierarchical balance",
        }
    }
}

/// What a subject declares that it can do. Data, so that it can be printed, checked and compared with what it does.
///
/// What has no row here nobody refuses: masks and windows, lengths, padding, gaps and steps of rows, groups of heads, head
/// dimensions of values other than those of keys, scales, the backward. A kernel without one of these is asked about fitted
/// problems only (`tests/own_kernel.rs` fits what is drawn).
#[derive(Clone, Debug, PartialEq)]
pub struct Capabilities {
    /// Formats of q, k, v, out, dout, ds and gradients; all of them the same one.
    pub formats: Vec<Format>,
    /// Formats of P.
    pub weight_formats: Vec<Format>,
    /// Head dimensions of queries and keys, and of values.
    pub head_dims: RangeInclusive<usize>,
    /// Algorithms by [`algorithm_name`].
    pub algorithms: Vec<&'static str>,
    /// Whether a group may be a part of a larger world.
    pub sub_groups: bool,
    /// Whether a soft cap is taken.
    pub softcap: bool,
    /// The sinks taken.
    pub sinks: Vec<Sink>,
    /// Which of lse and max_logit it returns, on every run: a statistic cannot be shown when it is right and hidden
    /// when it is not.
    pub statistics: Vec<TensorName>,
}

/// Every algorithm, by [`algorithm_name`].
pub const ALGORITHMS: [&str; 5] = ["single", "ring", "all-gather", "all-to-all", "hierarchical"];

/// The name of an algorithm, without its parameters.
pub fn algorithm_name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Single => "single",
        Algorithm::Ring => "ring",
        Algorithm::AllGather => "all-gather",
        Algorithm::AllToAll => "all-to-all",
        Algorithm::Hierarchical { .. } => "hierarchical",
    }
}

impl Capabilities {
    /// What the table says of a problem: the first row that refuses it, if any.
    pub fn refusal(&self, problem: &Problem) -> Option<Refusal> {
        self.refused_element(problem).or_else(|| self.refused_shape(problem))
    }

    fn refused_element(&self, problem: &Problem) -> Option<Refusal> {
        let io = problem.precision.q.format;
        for (quantity, element) in problem.precision.elements() {
            if element.scaling != Scaling::None {
                return Some(Refusal::Scaling { quantity });
            }
            let taken = match quantity {
                "p" => self.weight_formats.contains(&element.format),
                _ => element.format == io && self.formats.contains(&element.format),
            };
            if !taken {
                return Some(Refusal::Format { quantity, format: element.format.name() });
            }
        }
        None
    }

    fn refused_shape(&self, problem: &Problem) -> Option<Refusal> {
        let (min, max) = (*self.head_dims.start(), *self.head_dims.end());
        for (which, dim) in [("qk", problem.dims.qk), ("v", problem.dims.v)] {
            if !self.head_dims.contains(&dim) {
                return Some(Refusal::HeadDim { which, dim, min, max });
            }
        }
        let algorithm = algorithm_name(problem.parallel.algorithm);
        if !self.algorithms.contains(&algorithm) {
            return Some(Refusal::Algorithm(algorithm));
        }
        if !self.sub_groups && problem.parallel.world != problem.parallel.size() {
            return Some(Refusal::World);
        }
        if let Some(rule) = broken_rule(problem) {
            return Some(Refusal::Parallel(rule));
        }
        if problem.softmax.softcap.is_some() && !self.softcap {
            return Some(Refusal::Softcap);
        }
        (!self.sinks.contains(&problem.softmax.sink)).then_some(Refusal::Sink)
    }
}

/// What a problem's algorithm needs and the problem has not: the mathematics of the algorithms, the same for every
/// subject, and written without the builders that it is held against.
pub fn broken_rule(problem: &Problem) -> Option<ParallelRule> {
    let (parallel, heads) = (&problem.parallel, problem.heads);
    let (size, balance) = (parallel.size(), parallel.balance);
    let all_to_all = match parallel.algorithm {
        Algorithm::Single => return None,
        Algorithm::Ring if matches!(balance, Balance::Striped { stripe } if stripe > 1) => {
            return Some(ParallelRule::RingStripe);
        }
        Algorithm::Hierarchical { .. } if matches!(balance, Balance::Striped { .. }) => {
            return Some(ParallelRule::HierarchicalBalance);
        }
        Algorithm::Ring | Algorithm::AllGather => 1,
        Algorithm::AllToAll => size,
        Algorithm::Hierarchical { all_to_all } => all_to_all,
    };
    if heads.q % all_to_all != 0 {
        return Some(ParallelRule::QueryHeads);
    }
    if heads.kv % all_to_all != 0 && all_to_all % heads.kv != 0 {
        return Some(ParallelRule::KvHeads);
    }
    let unit = match balance {
        Balance::Contiguous => size,
        Balance::DualChunk => 2 * size,
        Balance::Striped { stripe } => size.saturating_mul(stripe),
    };
    for run in
        [|s: &Sequence| s.q, |s: &Sequence| s.kv].iter().flat_map(|side| problem.sequences.iter().map(side))
    {
        if run.step != 1 {
            return Some(ParallelRule::ConsecutiveRows);
        }
        if run.span % unit != 0 {
            return Some(ParallelRule::SpanMultiple);
        }
    }
    None
}

/// What a subject lets padding and slack rows of its inputs hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingInputs {
    /// Anything, NaN and infinities included.
    Anything,
    /// Any finite number.
    Finite,
}

/// What a subject puts into padding rows of its outputs (the owned rows past the real ones). Rows that no sequence owns are
/// not among them: under each of these they stay as [`RankOutputs`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingOutputs {
    /// Exact zeros; −∞ in the LSE.
    Zero,
    /// Not one bit changes.
    Untouched,
    /// Anything.
    Unspecified,
}

/// Both sides of a subject's padding contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingContract {
    /// Of inputs.
    pub inputs: PaddingInputs,
    /// Of outputs.
    pub outputs: PaddingOutputs,
}

/// One rank's results in the rank's own layout, padding included.
///
/// The subject makes these arrays, and fills out, lse, dq, dk and dv with [`UNWRITTEN_BITS`] before its kernel writes to
/// them. Afterwards no real row may hold these bits, and rows that no sequence owns must hold nothing else, whatever the
/// subject's [`PaddingOutputs`]: so the judge sees what was forgotten, and what was written outside. A kernel that adds to
/// zeroed memory does that elsewhere, and its owned rows are copied here.
///
/// [`UNWRITTEN_BITS`]: seamproof_simulator::UNWRITTEN_BITS
#[derive(Clone, Debug)]
pub struct RankOutputs {
    /// `[q rows, q heads, v dim]`; 0 for a row that sees no key.
    pub out: Array3<f32>,
    /// `[q heads, q rows]`, where the subject shows it: the natural logarithm of the row's sum, the sink included, and −∞
    /// for a row that sees neither key nor sink. A kernel that has +∞ there, or logarithms of base 2, converts them.
    pub lse: Option<Array2<f32>>,
    /// `[q heads]`, where the subject shows it: the largest logit of all ranks' visible pairs, without the sink; −∞ where
    /// there is none.
    pub max_logit: Option<Array1<f32>>,
    /// The gradients, for a backward pass.
    pub gradients: Option<RankGradients>,
}

/// One rank's gradients: those of the out and lse that the same run returned, as it returned them.
///
/// For query i and key j, with `out_i` in its stored format and `lse_i` in f32:
///
/// ```text
/// D_i = ⟨dout_i, out_i⟩
/// p_ij = exp(s_ij − lse_i)
/// ds_ij = p_ij · (⟨dout_i, v_j⟩ − D_i) · cap'(s_ij)
/// dq_i = scale · Σ_j ds_ij · k_j      dk_j = scale · Σ_i ds_ij · q_i      dv_j = Σ_i p_ij · dout_i
/// ```
///
/// The bounds hold the errors of f32 in that, the rounding of p to its format (for dv), that of ds or of `scale · ds`, and
/// that of the result. A kernel that takes `D` from an out before it was rounded, or as `Σ_j p_ij · ⟨dout_i, v_j⟩`, is off
/// from these gradients by the rounding of out. No bound has room for that, and the judge condemns it, although the gradients
/// of an exact out may be nearer: the bounds are not for such a kernel. Where the subject hides its LSE, the exact one
/// takes its place, and the bounds grow by the error that the forward may have.
#[derive(Clone, Debug)]
pub struct RankGradients {
    /// `[q rows, q heads, qk dim]`.
    pub dq: Array3<f32>,
    /// `[kv rows, kv heads, qk dim]`, summed over the group's query heads.
    pub dk: Array3<f32>,
    /// `[kv rows, kv heads, v dim]`, summed over the group's query heads.
    pub dv: Array3<f32>,
    /// `[q heads]`, this rank's partial sum; empty without a learnable sink.
    pub dsink: Array1<f32>,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// In group order. One rank holds the problem's own layout.
    pub ranks: Vec<RankOutputs>,
    /// Guard bands that were written.
    pub damage: Vec<Damage>,
}

/// Why a run gave no outputs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The subject does not take this problem.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The subject died, by its own word.
    #[error("crashed: {0}")]
    Crash(String),
    /// The device has no memory left, by the subject's own word: nothing is known of the subject.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The subject's process died, hung, or answered what is no answer.
    #[error("{0}")]
    Ended(Box<Ended>),
    /// The sentinel (a run whose results are known) came out differently: the process or its device went bad.
    #[error("the sentinel: {0}")]
    Sentinel(String),
    /// The harness failed, not the subject.
    #[error("infrastructure: {0}")]
    Infrastructure(String),
}

/// How a subject's process ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{ending}: {what}")]
pub struct Ended {
    /// What makes it the same as another one.
    pub ending: Ending,
    /// What was tried to confirm it, and what the process said.
    pub what: String,
    /// Runs that it needs before it, where it was seen to come after them and not alone; none where they are too many to
    /// be stored.
    pub before: Vec<Earlier>,
}

/// What a subject promises of the bits of its results, beyond being right: what a right subject may leave open. Where
/// it promises nothing, no relation that needs the promise is asked.
///
/// The forward gives the same bits for the same inputs without any promise: every subject must.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// The same inputs give the same bits of the gradients too: no sum in an order that chance decides.
    pub deterministic_backward: bool,
    /// The results of a sequence depend neither on other sequences nor on where rows lie: tiles and splits begin anew
    /// with each sequence, and on several ranks follow from the span alone.
    pub sequences_alone: bool,
    /// The results of a head depend neither on its number nor on the heads of other groups.
    pub heads_alone: bool,
    /// dq of a query head does not depend on which others share its KV head: its sum over keys is made in one order,
    /// however large the group.
    pub groups_alone: bool,
    /// out, lse and dq of a query row depend on the row, on the keys that it sees and on their positions in the
    /// sequence alone: neither on other rows nor on the form in which the mask is given. dk and dv of a key depend in
    /// the same way on the rows that see it.
    pub rows_alone: bool,
}

impl Promises {
    /// All of them.
    pub const ALL: Promises = Promises {
        deterministic_backward: true,
        sequences_alone: true,
        heads_alone: true,
        groups_alone: true,
        rows_alone: true,
    };
}

/// A way that runs of a problem can go through a subject, and whether they do: to these kernels or to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its name.
    pub name: Word,
    /// Whether runs of the problem go there.
    pub taken: bool,
}

/// The way of a problem all of whose forward launches go to tensor cores.
pub const FORWARD_ON_TENSOR_CORES: Word = "forward on tensor cores";
/// The same of its backward launches.
pub const BACKWARD_ON_TENSOR_CORES: Word = "backward on tensor cores";

/// A whole subject.
pub trait Backend: Sync {
    /// The name, as `--backend` takes it.
    fn name(&self) -> &str;

    /// The capability table.
    fn capabilities(&self) -> Capabilities;

    /// The padding contract.
    fn padding(&self) -> PaddingContract;

    /// What it promises of the bits of its results; nothing unless it says so.
    fn promises(&self) -> Promises {
        Promises::default()
    }

    /// How sums are accumulated: [`Accumulation::F32Serial`] for f32 on ordinary units, in whatever order.
    fn accumulation(&self) -> Accumulation;

    /// How this problem's sums are cut into separately rounded pieces: one rank without tiles declares
    /// `Partition::single(problem.rows.q, problem.rows.kv)`.
    fn partition(&self, problem: &Problem) -> Partition;

    /// Which keys its launches show together, for a replay of its roundings; `None` where that is not known.
    fn launches(&self, _problem: &Problem) -> Option<Vec<Launch>> {
        None
    }

    /// What tier R replays: the profile that was locked for a subject of this name, where its launches are known.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        profile::replay(self.name(), problem, self.partition(problem), || self.launches(problem))
    }

    /// The schedule that it runs: the problem's own algorithm, unless the subject says otherwise.
    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        build(problem)
    }

    /// The ways that runs of a problem could go, with whether they do; none where all problems go the same.
    fn ways(&self, _problem: &Problem) -> Vec<Way> {
        Vec::new()
    }

    /// Makes ready what runs need, where that takes more than this process: an error says why it cannot be had.
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }

    /// Devices that were given up while it ran, and why.
    fn lost(&self) -> Vec<String> {
        Vec::new()
    }

    /// Devices that ran something, and how much; none where all runs in this process.
    fn devices(&self) -> Vec<DeviceRuns> {
        Vec::new()
    }

    /// Runs the problem, forward and backward where it asks for both. Padding and slack rows of `inputs` hold what the
    /// padding contract allows.
    ///
    /// What the subject does not take it refuses here by itself, before anything else, for the reason that its table has:
    /// usually `self.capabilities().refusal(problem)`. The judge runs problems that the table refuses too. What
    /// the results must hold is said at [`RankOutputs`] and [`RankGradients`].
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError>;
}

/// A device, and the runs on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceRuns {
    /// Its ordinal among those that a worker sees.
    pub device: usize,
    /// What tells it from the others: a GPU's name and UUID; empty for a core.
    pub name: String,
    /// Runs since the program's start, sentinels apart.
    pub runs: u64,
}

/// A subject that is another one but for what it says itself: each method of [`Backend`], forwarded unless written.
///
/// Whatever is a wrapper is a [`Backend`] too. Where both traits are in scope, `self.capabilities()` on it is ambiguous (the
/// compiler's E0034): write `Wrapper::capabilities(self)`.
pub trait Wrapper: Sync {
    /// The other subject.
    fn inner(&self) -> &dyn Backend;

    /// See [`Backend::name`].
    fn name(&self) -> &str {
        self.inner().name()
    }

    /// See [`Backend::capabilities`].
    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    /// See [`Backend::padding`].
    fn padding(&self) -> PaddingContract {
        self.inner().padding()
    }

    /// See [`Backend::promises`].
    fn promises(&self) -> Promises {
        self.inner().promises()
    }

    /// See [`Backend::accumulation`].
    fn accumulation(&self) -> Accumulation {
        self.inner().accumulation()
    }

    /// See [`Backend::partition`].
    fn partition(&self, problem: &Problem) -> Partition {
        self.inner().partition(problem)
    }

    /// See [`Backend::launches`].
    fn launches(&self, problem: &Problem) -> Option<Vec<Launch>> {
        self.inner().launches(problem)
    }

    /// See [`Backend::replay`]: a profile is locked for a name, and a wrapper has its own.
    fn replay(&self, problem: &Problem) -> Option<Replay> {
        profile::replay(self.name(), problem, self.partition(problem), || self.launches(problem))
    }

    /// See [`Backend::schedule`].
    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        self.inner().schedule(problem)
    }

    /// See [`Backend::ways`].
    fn ways(&self, problem: &Problem) -> Vec<Way> {
        self.inner().ways(problem)
    }

    /// See [`Backend::ready`].
    fn ready(&self) -> Result<(), String> {
        self.inner().ready()
    }

    /// See [`Backend::lost`].
    fn lost(&self) -> Vec<String> {
        self.inner().lost()
    }

    /// See [`Backend::devices`].
    fn devices(&self) -> Vec<DeviceRuns> {
        self.inner().devices()
    }

    /// See [`Backend::run`].
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.inner().run(problem, inputs)
    }
}

impl<W: Wrapper> Backend for W {
    fn name(&self) -> &str {
        Wrapper::name(self)
    }

    fn capabilities(&self) -> Capabilities {
        Wrapper::capabilities(self)
    }

    fn padding(&self) -> PaddingContract {
        Wrapper::padding(self)
    }

    fn promises(&self) -> Promises {
        Wrapper::promises(self)
    }

    fn accumulation(&self) -> Accumulation {
        Wrapper::accumulation(self)
    }

    fn partition(&self, problem: &Problem) -> Partition {
        Wrapper::partition(self, problem)
    }

    fn launches(&self, problem: &Problem) -> Option<Vec<Launch>> {
        Wrapper::launches(self, problem)
    }

    fn replay(&self, problem: &Problem) -> Option<Replay> {
        Wrapper::replay(self, problem)
    }

    fn schedule(&self, problem: &Problem) -> Result<Schedule, BuildError> {
        Wrapper::schedule(self, problem)
    }

    fn ways(&self, problem: &Problem) -> Vec<Way> {
        Wrapper::ways(self, problem)
    }

    fn lost(&self) -> Vec<String> {
        Wrapper::lost(self)
    }

    fn devices(&self) -> Vec<DeviceRuns> {
        Wrapper::devices(self)
    }

    fn ready(&self) -> Result<(), String> {
        Wrapper::ready(self)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        Wrapper::run(self, problem, inputs)
    }
}
