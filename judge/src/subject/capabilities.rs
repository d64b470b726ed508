//! The capability table: what a subject takes, as data.
//!
//! A subject refuses a problem with a reason, or is right. There is no third answer: a table that promises too much
//! is a fault, and so is one that promises too little.

use std::ops::RangeInclusive;

use seamproof_oracle::{
    Algorithm, ContextParallel, Dims, Format, Pass, Precision, Problem, ProblemFields, Scaling, Sink,
    TensorName,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::parallel::{ParallelRule, broken_rule};

/// A word from this program's own vocabulary.
pub type Word = &'static str;

/// Reason for a refusal: the row of the capability table that says no.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// A format that the subject has no code for, or a mix of formats.
    #[error("{quantity} in {format} is not supported")]
    Format {
        /// Name of the quantity in `Precision`.
        #[serde(deserialize_with = "known_word")]
        quantity: Word,
        /// Format of that quantity.
        #[serde(deserialize_with = "known_word")]
        format: Word,
    },
    /// A quantity that is stored as scaled codes.
    #[error("{quantity} is scaled; only unscaled formats are supported")]
    Scaling {
        /// Name of the quantity in `Precision`.
        #[serde(deserialize_with = "known_word")]
        quantity: Word,
    },
    /// A head dimension outside the range.
    #[error("head dimension {dim} of {which} is outside {min} to {max}")]
    HeadDim {
        /// Name of the dimension, `qk` or `v`.
        #[serde(deserialize_with = "known_word")]
        which: Word,
        /// Size of the dimension.
        dim: usize,
        /// Smallest accepted size.
        min: usize,
        /// Largest accepted size.
        max: usize,
    },
    /// A context-parallel algorithm that the subject does not run.
    #[error("context-parallel algorithm {0} is not supported")]
    Algorithm(#[serde(deserialize_with = "known_word")] Word),
    /// A group smaller than its world.
    #[error("a group inside a larger world is not supported")]
    World,
    /// A problem that the context-parallel algorithm cannot cut or deal.
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

/// Reads a word of a refusal. A refusal from another process may use no other words.
fn known_word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Word, D::Error> {
    let word = String::deserialize(deserializer)?;
    let quantities = Precision::uniform(Format::F32).elements().map(|(name, _)| name);
    let names = Format::ALL.map(Format::name).into_iter().chain(Algorithm::ALL.map(Algorithm::name));
    let mut known = quantities.into_iter().chain(names).chain(["qk", "v"]);
    known.find(|known| *known == word).ok_or_else(|| D::Error::custom("a word that no refusal has"))
}

impl Refusal {
    /// Returns the row of the table without the case's values. Refusals are counted by it.
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

/// Capability table of a subject, as data: it can be printed, checked, and compared with the subject's behaviour.
///
/// No table refuses masks and windows, lengths, padding, gaps and steps of rows, groups of heads, differing head
/// dimensions of keys and values, or scales. A kernel that lacks one of these must narrow what it is asked about, in
/// [`Backend::fitted`](super::Backend::fitted).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Formats of q, k, v, out, dout, dS and gradients. A problem has one format for all of them, apart from f32 results.
    pub formats: Vec<Format>,
    /// Whether out and gradients are in f32, whatever the format of the inputs.
    pub f32_results: bool,
    /// Formats of P, the weights.
    pub weight_formats: Vec<Format>,
    /// Head dimensions of queries and keys, and of values.
    pub head_dims: RangeInclusive<usize>,
    /// Algorithms, by [`Algorithm::name`].
    pub algorithms: Vec<&'static str>,
    /// Whether a group may be a part of a larger world.
    pub sub_groups: bool,
    /// Whether a soft cap is accepted.
    pub softcap: bool,
    /// Accepted kinds of sink.
    pub sinks: Vec<Sink>,
    /// Whether the backward pass is accepted; the forward always is.
    pub backward: bool,
    /// Statistics (lse, max_logit) that the subject returns on every run. A subject cannot show a statistic when it
    /// is right and hide it when it is wrong.
    pub statistics: Vec<TensorName>,
}

impl Capabilities {
    /// Returns the first row of the table that refuses a problem, if any.
    pub fn refusal(&self, problem: &Problem) -> Option<Refusal> {
        self.refused_element(&problem.precision).or_else(|| self.refused_shape(problem))
    }

    /// Refuses a problem as the table says. Call it in the first line of [`Backend::run`](super::Backend::run).
    pub fn check(&self, problem: &Problem) -> Result<(), Refusal> {
        self.refusal(problem).map_or(Ok(()), Err)
    }

    /// Returns the nearest problem that no row of the table refuses. It changes only what a row refuses: formats
    /// become the first ones of the table, a head dimension moves to the nearest end of the range, and context
    /// parallelism becomes one rank, also where its algorithm cannot cut the problem. A soft cap or the backward pass
    /// is left out, and a sink becomes the first one of the table.
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
        let fitted = legal(fields);
        match broken_rule(&fitted) {
            None => fitted,
            Some(_) => legal(ProblemFields { parallel: ContextParallel::single(), ..fitted.into() }),
        }
    }

    fn nearest_precision(&self, drawn: Precision) -> Precision {
        let first = |formats: &[Format]| formats.first().copied().unwrap_or(Format::F32);
        let kept =
            |format, formats: &[Format]| if formats.contains(&format) { format } else { first(formats) };
        let io = kept(drawn.q.format, &self.formats);
        let result = self.result(io).into();
        Precision {
            p: kept(drawn.p.format, &self.weight_formats).into(),
            out: result,
            gradients: result,
            ..Precision::uniform(io)
        }
    }

    /// Returns the format of out and gradients, where the inputs are in `io`.
    fn result(&self, io: Format) -> Format {
        if self.f32_results { Format::F32 } else { io }
    }

    fn refused_element(&self, precision: &Precision) -> Option<Refusal> {
        let io = precision.q.format;
        for (quantity, element) in precision.elements() {
            if element.scaling != Scaling::None {
                return Some(Refusal::Scaling { quantity });
            }
            let taken = match quantity {
                "p" => self.weight_formats.contains(&element.format),
                "out" | "gradients" => element.format == self.result(io),
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

fn legal(fields: ProblemFields) -> Problem {
    Problem::new(fields).expect("each field that was fitted is legal with all others")
}
