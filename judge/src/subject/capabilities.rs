//! The capability table: what a subject takes, as data.
//!
//! A subject refuses a problem with a reason, or is right. There is no third answer: a table that promises too much and one
//! that promises too little are both faults.

use std::ops::RangeInclusive;

use seamproof_oracle::{
    Algorithm, ContextParallel, Dims, Format, Pass, Precision, Problem, ProblemFields, Scaling, Sink,
    TensorName,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::parallel::{ParallelRule, broken_rule};

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
    /// A backward pass.
    #[error("the backward pass is not supported")]
    Backward,
}

/// The words that refusals are made of: a refusal that comes from another process has no others.
fn known_word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Word, D::Error> {
    let word = String::deserialize(deserializer)?;
    let quantities = Precision::uniform(Format::F32).elements().map(|(name, _)| name);
    let mut known = quantities
        .into_iter()
        .chain(Format::ALL.map(Format::name))
        .chain(Algorithm::ALL.map(Algorithm::name))
        .chain(["qk", "v"]);
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
            Refusal::Parallel(rule) => rule.name(),
            Refusal::Softcap => "softcap",
            Refusal::Sink => "sink",
            Refusal::Backward => "backward",
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
    /// Algorithms by [`Algorithm::name`].
    pub algorithms: Vec<&'static str>,
    /// Whether a group may be a part of a larger world.
    pub sub_groups: bool,
    /// Whether a soft cap is taken.
    pub softcap: bool,
    /// The sinks taken.
    pub sinks: Vec<Sink>,
    /// Whether the backward pass is taken; the forward always is.
    pub backward: bool,
    /// Which of lse and max_logit it returns, on every run: a statistic cannot be shown when it is right and hidden
    /// when it is not.
    pub statistics: Vec<TensorName>,
}

impl Capabilities {
    /// What the table says of a problem: the first row that refuses it, if any.
    pub fn refusal(&self, problem: &Problem) -> Option<Refusal> {
        self.refused_element(&problem.precision).or_else(|| self.refused_shape(problem))
    }

    /// Refuses a problem as the table says: the first line of [`Backend::run`](super::Backend::run).
    pub fn check(&self, problem: &Problem) -> Result<(), Refusal> {
        self.refusal(problem).map_or(Ok(()), Err)
    }

    /// The nearest problem that no row of the table refuses. It changes what a row refuses and nothing else: formats to the
    /// first ones of the table, head dimensions to the nearest end of the range, context parallelism to one rank; a soft cap,
    /// a sink or the backward is left out. A problem that its algorithm cannot cut stays as it is: every subject refuses it.
    pub fn fitted(&self, problem: Problem) -> Problem {
        let mut fields: ProblemFields = problem.into();
        if self.refused_element(&fields.precision).is_some() {
            fields.precision = self.nearest_precision(fields.precision);
        }
        let (min, max) = (*self.head_dims.start(), *self.head_dims.end());
        fields.dims = Dims { qk: fields.dims.qk.clamp(min, max), v: fields.dims.v.clamp(min, max) };
        let parallel = &fields.parallel;
        let is_sub_group = parallel.world != parallel.size() && !self.sub_groups;
        if is_sub_group || !self.algorithms.contains(&parallel.algorithm.name()) {
            fields.parallel = ContextParallel::single();
        }
        fields.softmax.softcap = fields.softmax.softcap.filter(|_| self.softcap);
        if !self.sinks.contains(&fields.softmax.sink) {
            fields.softmax.sink = self.sinks.first().copied().unwrap_or(Sink::None);
        }
        if !self.backward {
            fields.pass = Pass::Forward;
        }
        Problem::new(fields).expect("each of these fields is legal with all others")
    }

    fn nearest_precision(&self, drawn: Precision) -> Precision {
        let first = |formats: &[Format]| formats.first().copied().unwrap_or(Format::F32);
        let kept =
            |format, formats: &[Format]| if formats.contains(&format) { format } else { first(formats) };
        let io = kept(drawn.q.format, &self.formats);
        Precision { p: kept(drawn.p.format, &self.weight_formats).into(), ..Precision::uniform(io) }
    }

    fn refused_element(&self, precision: &Precision) -> Option<Refusal> {
        let io = precision.q.format;
        for (quantity, element) in precision.elements() {
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
        let algorithm = problem.parallel.algorithm.name();
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
        if !self.sinks.contains(&problem.softmax.sink) {
            return Some(Refusal::Sink);
        }
        (problem.pass == Pass::Backward && !self.backward).then_some(Refusal::Backward)
    }
}
