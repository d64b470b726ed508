//! What a campaign says while it runs, one event at a time; `docs/events.md` is the schema.
//!
//! Events come in the order of cases. Everything that depends on the clock is in a field named `times`.

use serde::Serialize;

use super::plan::Shard;
use super::summary::{Canary, Distinct, SummaryEvent};
use crate::backend::TensorName;
use crate::verdict::Check;

/// Cases that have an event of their own; later ones are in the summary only, so that logs stay bounded.
pub const CASE_EVENTS_MAX: u64 = 1 << 20;

/// Something that happened.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event<'a> {
    /// The campaign begins.
    Start(&'a Start),
    /// The canary was looked for.
    Canary(&'a Canary),
    /// A case was judged.
    Case(CaseEvent<'a>),
    /// A failure of a new kind, or a smaller case of a known one.
    Finding(&'a Distinct),
    /// The campaign is over.
    Summary(&'a SummaryEvent<'a>),
}

/// What is run.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// Version of this program.
    pub program: &'static str,
    /// The seed, in hex: a JSON reader may not hold 64 bits.
    pub seed: String,
    /// The subject.
    pub backend: String,
    /// Sizes.
    pub profile: &'static str,
    /// Cases of the whole campaign.
    pub cases: Option<u64>,
    /// Longest duration.
    pub seconds: Option<f64>,
    /// Which part.
    pub shard: Shard,
    /// Threads.
    pub jobs: usize,
}

/// One case's verdict in short.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CaseEvent<'a> {
    /// Index in the whole campaign.
    pub index: u64,
    /// `held`, `refused`, `malformed`, `finding` or `infrastructure`.
    pub verdict: &'static str,
    /// Worst error ÷ bound of a case that held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// The row of the capability table, or the rule that a malformed problem breaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// The check that broke.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
    /// The tensor that it broke on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorName>,
}

/// Receives events.
pub trait Observer: Sync {
    /// Something happened.
    fn event(&self, event: &Event);
}

/// Receives events and does nothing with them.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _event: &Event) {}
}
