//! Events that a campaign tells while it runs; `docs/events.md` is their schema.
//!
//! Events come in the order of cases. Everything that depends on the clock is in a field named `times`.

use serde::{Deserialize, Serialize};

use super::left::Left;
use super::plan::{Plan, Shard};
use super::subjects::Options;
use super::summary::{Canary, Distinct, SummaryEvent, Sums};
use seamproof_judge::case::Case;
use seamproof_judge::finding::{Check, Ending, Relation};
use seamproof_judge::subject::TensorName;
use seamproof_judge::subjects::SubjectName;
use seamproof_oracle::Problem;

/// Index of the first case that need not have an event. From there on only those that did not hold have one. A log
/// stays bounded, and so do those of all shards together, as the index is that in the whole campaign.
pub const CASE_EVENTS_MAX: u64 = 1 << 16;

/// One event of a campaign.
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

/// Description of a campaign.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Version of this program.
    pub program: String,
    /// Seed in hex, as a JSON reader may not hold 64 bits.
    pub seed: String,
    /// Name of the subject.
    pub backend: String,
    /// Options of the subject that are the same for every case.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub options: Options,
    /// Sizes of the cases.
    pub profile: String,
    /// Number of cases of the whole campaign.
    pub cases: Option<u64>,
    /// Limit of its time in seconds.
    pub seconds: Option<f64>,
    /// Part of the campaign.
    pub shard: Shard,
    /// Threads.
    pub jobs: usize,
}

impl Start {
    /// Returns the description of a plan on a subject of this name, with these options fixed.
    pub fn of(plan: &Plan, backend: &str, options: &Options) -> Start {
        Start {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            seed: format!("{:#x}", plan.seed),
            backend: backend.to_owned(),
            options: options.clone(),
            profile: plan.profile.name().to_owned(),
            cases: plan.cases,
            seconds: plan.time.map(|time| time.as_secs_f64()),
            shard: plan.shard,
            jobs: plan.jobs,
        }
    }

    /// Returns the subject as a person names it, with the options that are the same for every case.
    pub fn subject(&self) -> SubjectName {
        SubjectName::new(&self.backend, self.options.clone())
    }
}

/// One case's verdict in short.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CaseEvent<'a> {
    /// Index in the whole campaign.
    pub index: u64,
    /// Verdict: `held`, `refused`, `malformed`, `finding` or `infrastructure`.
    pub verdict: &'a str,
    /// Largest error ÷ bound of a case that held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// Row of the table, or rule that a malformed problem breaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// Check that broke.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
    /// Identity that does not hold, where the check is `identity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Relation>,
    /// Ending of the subject's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
    /// Tensor on which the check broke.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorName>,
}

impl CaseEvent<'_> {
    /// Whether the case held, or was refused as it has to be.
    pub(super) fn is_passed(&self) -> bool {
        !matches!(self.verdict, "finding" | "infrastructure")
    }
}

/// Smaller case that a failing case was shrunk to, so that whoever merges parts of a campaign need not do it again.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ShrunkEvent<'a> {
    /// Index in the whole campaign.
    pub index: u64,
    /// The smaller case.
    pub case: &'a Case,
    /// Problems on the way to it, from the drawn one on; none where it was not shrunk here.
    #[serde(skip_serializing_if = "<[Problem]>::is_empty")]
    pub steps: &'a [Problem],
}

/// The same, as it is read.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Shrunk {
    pub(crate) case: Case,
    #[serde(default)]
    pub(crate) steps: Vec<Problem>,
}

/// Receiver of events.
pub trait Observer: Sync {
    /// Receives an event.
    fn event(&self, event: &Event);

    /// Hears that the events so far tell of as many cases as these sums, and of no others. It comes after a case, some
    /// seconds after the last time, and after the last case, but not once the campaign was asked to stop. The sums lack
    /// the census.
    fn reached(&self, _sums: &Sums) {}
}

/// Observer that does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _event: &Event) {}
}
