//! What a campaign says while it runs, one event at a time; `docs/events.md` is the schema.
//!
//! Events come in the order of cases. Everything that depends on the clock is in a field named `times`.

use serde::{Deserialize, Serialize};

use super::left::Left;
use super::plan::{Plan, Shard};
use super::subjects::{Options, Registered, Subjects};
use super::summary::{Canary, Distinct, SummaryEvent};
use seamproof_judge::case::Case;
use seamproof_judge::finding::{Check, Ending, Relation};
use seamproof_judge::subject::TensorName;

/// Cases that have an event of their own; of later ones only those that did not hold have, so that logs stay bounded.
pub const CASE_EVENTS_MAX: u64 = 1 << 20;

/// Something that happened.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event<'a> {
    /// The campaign begins.
    Start(&'a Start),
    /// A part that did not end has findings; whoever joins the others tells of them.
    Left(&'a Left),
    /// The canary was looked for.
    Canary(&'a Canary),
    /// A case was judged.
    Case(CaseEvent<'a>),
    /// A failing case was shrunk.
    Shrunk(ShrunkEvent<'a>),
    /// A failure of a new kind, or a smaller case of a known one.
    Finding(&'a Distinct),
    /// The campaign is over.
    Summary(&'a SummaryEvent<'a>),
}

/// What is run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Version of this program.
    pub program: String,
    /// The seed, in hex: a JSON reader may not hold 64 bits.
    pub seed: String,
    /// The subject.
    pub backend: String,
    /// Its options that are the same for every case.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub options: Options,
    /// Sizes.
    pub profile: String,
    /// Cases of the whole campaign.
    pub cases: Option<u64>,
    /// Longest duration.
    pub seconds: Option<f64>,
    /// Which part.
    pub shard: Shard,
    /// Threads.
    pub jobs: usize,
}

impl Start {
    /// What a plan runs.
    pub fn of(plan: &Plan, subjects: &Registered) -> Start {
        Start {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            seed: format!("{:#x}", plan.seed),
            backend: subjects.name().to_owned(),
            options: subjects.fixed().clone(),
            profile: plan.profile.name().to_owned(),
            cases: plan.cases,
            seconds: plan.time.map(|time| time.as_secs_f64()),
            shard: plan.shard,
            jobs: plan.jobs,
        }
    }
}

/// One case's verdict in short.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CaseEvent<'a> {
    /// Index in the whole campaign.
    pub index: u64,
    /// `held`, `refused`, `malformed`, `finding` or `infrastructure`.
    pub verdict: &'a str,
    /// Worst error ÷ bound of a case that held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// The row of the capability table, or the rule that a malformed problem breaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// The check that broke.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
    /// The identity that does not hold, for that check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Relation>,
    /// How the subject's process ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
    /// The tensor that it broke on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorName>,
}

/// What a failing case was shrunk to; whoever merges parts of a campaign need not do it again.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ShrunkEvent<'a> {
    /// Index in the whole campaign.
    pub index: u64,
    /// The smaller case.
    pub case: &'a Case,
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
