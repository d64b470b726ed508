//! A night: stored regressions, then campaigns of several sizes over the subjects that are there, then one report.
//!
//! ```text
//! HOME/trend.jsonl                     one line a night and campaign
//! HOME/night-0007/night.json           what it is to do, from its first moment
//! HOME/night-0007/NAME-regressions.jsonl   a line for each stored case that was judged
//! HOME/night-0007/NAME/slice-0003/     a slice of a campaign, a run's directory (crate::record)
//! HOME/night-0007/NAME/whole/          the slices joined
//! HOME/night-0007/report.json          there once the night has ended; report.md and junit.xml beside it
//! ```
//!
//! The claim: a kill at any moment costs the slice or the stored cases in flight and nothing else. A campaign is cut into
//! *slices*, each of which begins at the case at which the one before ended; a slice counts once its sums are on disk, and
//! [`merge`](crate::campaign::merge) joins them into what one run of the same cases would say. A night without a report is
//! gone on with by the next start, which says what was lost. Where the next start begins another night, that one's report
//! tells what the unfinished one found ([`Left`]). Every file is written whole or by appending complete lines, and nothing
//! but the night's own directory and the trend is ever written.

mod campaign;
mod home;
mod known;
mod left;
mod orders;
mod regressions;
mod report;
mod slices;
mod trend;
mod watch;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use campaign::NightCampaign;
pub use home::newest_of;
pub use known::{Entry, Known, KnownError, Standing};
pub use left::{FoundBy, Left, Unread, found_by};
pub use orders::Orders;
pub use regressions::{Regressed, Regressions, Unjudged, regressions_of};
pub use report::{Report, ReportedFailure};
pub use trend::{Point, Trend};
pub use watch::{Progress, Watch};

use crate::backends::BackendError;
use crate::campaign::{Canary, MergeError, Plan, Shard};
use crate::record::{Findings, Home, RecordError, make_dir, write_whole};
use home::{Nights, ORDERS, TREND, dir_of, file_name, nights};
use orders::{Newest, going_on, newest};
use seamproof_judge::case::CaseError;
use seamproof_judge::generate::Profile;

/// Share of the budget of each profile: small cases find most, large ones are judged by identities too.
const SHARES: [(Profile, f64); 3] = [(Profile::Quick, 0.5), (Profile::Seams, 0.25), (Profile::Large, 0.25)];

/// Why a night could not go on.
#[derive(Debug, thiserror::Error)]
pub enum NightError {
    /// Something could not be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Slices could not be joined.
    #[error(transparent)]
    Merge(#[from] MergeError),
    /// A stored case is none.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// The list of known failures is none.
    #[error(transparent)]
    Known(#[from] KnownError),
    /// A subject that cannot be made.
    #[error("subject: {0}")]
    Subject(#[from] BackendError),
    /// No number is left.
    #[error("{}: after night {} there is none; rename or remove it", path.display(), u32::MAX)]
    Last {
        /// The directory of nights.
        path: PathBuf,
    },
    /// A file that cannot be read.
    #[error("{}: cannot be read: {what}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        what: String,
    },
}

/// A night's directory.
#[derive(Debug)]
pub struct Night {
    home: Home,
    /// Its number, from 1.
    pub number: u32,
    dir: PathBuf,
    /// What it is to do.
    pub orders: Orders,
    jobs: usize,
    /// The numbers of the nights that were there when it was begun.
    nights: BTreeSet<u32>,
    /// What earlier nights came to.
    trend: Trend,
}

/// What a night came to.
#[derive(Debug)]
pub struct NightOutcome {
    /// The planted fault.
    pub canary: Canary,
    /// Stored cases.
    pub regressions: Vec<Regressions>,
    /// Campaigns.
    pub campaigns: Vec<NightCampaign>,
}

impl Night {
    /// Goes on with the last night of a home if it has not ended and is of these orders, or begins one; what is said of that.
    /// A night that is gone on with keeps its seed and takes the new budget: of its whole time, what was spent before included.
    pub fn begin(home: &Path, orders: Orders, jobs: usize) -> Result<(Night, String), NightError> {
        let home = Home::open(home)?;
        let Nights { numbers, others } = nights(home.path())?;
        let trend = Trend::read(&home.path().join(TREND))?;
        let last = numbers.last().copied().unwrap_or(0);
        let (number, orders, mut said) = match newest(&dir_of(home.path(), last), &orders) {
            Newest::None => (1, orders, "begins night 1".to_owned()),
            Newest::Unfinished(stored) => {
                let said = going_on(last, stored.seconds, orders.seconds);
                (last, Orders { seconds: orders.seconds, ..stored }, said)
            }
            other => {
                let next =
                    last.checked_add(1).ok_or_else(|| NightError::Last { path: home.path().into() })?;
                let why = match other {
                    Newest::GivenUp(why) => format!("{why}; what it found will be in the report"),
                    _ => "has ended".to_owned(),
                };
                (next, orders, format!("begins night {next}, as night {last} {why}"))
            }
        };
        if !others.is_empty() {
            said += &format!("; no nights by their names: {}", others.join(", "));
        }
        if let Some(what) = trend.passed_over() {
            said += &format!("; {TREND} has {what}");
        }
        let dir = dir_of(home.path(), number);
        make_dir(&dir)?;
        write_json(&dir.join(ORDERS), &orders)?;
        Ok((Night { home, number, dir, orders, jobs, nights: numbers, trend }, said))
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Does all that is left, of the stored cases `regressions` too; `None` where somebody stopped it. `note` hears how it
    /// goes.
    pub fn run(
        &self,
        regressions: &[PathBuf],
        watch: &Watch,
        note: &dyn Fn(&str),
    ) -> Result<Option<NightOutcome>, NightError> {
        watch.begin("canary".to_owned());
        let findings = Findings::create(&self.dir.join("canary"))?;
        let canary = crate::campaign::canary(&self.plan(Profile::Quick), &findings, &watch.next());
        // Whoever stops the search has not shown that there is nothing to find.
        if canary.finding.is_some() || !watch.stopped() {
            note(&canary.to_string());
        }
        let mut outcome = NightOutcome { canary, regressions: Vec::new(), campaigns: Vec::new() };
        if outcome.canary.finding.is_none() {
            return Ok((!watch.stopped()).then_some(outcome));
        }
        for subject in &self.orders.subjects {
            watch.begin(format!("{subject} regressions"));
            let log = self.dir.join(file_name(subject) + regressions::LOG);
            let Some(judged) = regressions::judge(subject, regressions, &log, watch)? else {
                return Ok(None);
            };
            note(&judged.to_string());
            outcome.regressions.push(judged);
        }
        for (profile, share) in SHARES {
            for subject in &self.orders.subjects {
                let seconds = self.orders.seconds * share / self.orders.subjects.len() as f64;
                match self.campaign(subject, profile, seconds, watch, note)? {
                    Some(campaign) => outcome.campaigns.push(campaign),
                    None => return Ok(None),
                }
            }
        }
        Ok(Some(outcome))
    }

    /// Writes the reports; the one that ends the night is the last.
    pub fn report(&self, outcome: &NightOutcome, known: &Known) -> Result<Report, NightError> {
        let mut report = Report::new(self, outcome, known)?;
        let path = self.home.path().join(TREND);
        // The report is worth more than the trend.
        let written = self.trend.clone().write(self.number, &report.points, &path);
        report.internal.extend(written.err().map(|error| error.to_string()));
        write_whole(&self.dir.join("report.md"), &report.to_string())?;
        Ok(report)
    }

    /// Ends the night.
    pub fn end(&self, report: &Report) -> Result<(), NightError> {
        write_json(&self.dir.join(report::JSON), report)
    }

    fn plan(&self, profile: Profile) -> Plan {
        Plan {
            seed: self.orders.seed,
            profile,
            first: 0,
            cases: None,
            time: None,
            shard: Shard::WHOLE,
            jobs: self.jobs,
        }
    }
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), NightError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| NightError::Read { path: path.to_owned(), what: error.to_string() })?;
    Ok(write_whole(path, &(text + "\n"))?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    pub(super) fn night(home: &Path) -> Night {
        let orders = Orders {
            program: "1".to_owned(),
            build: "a".to_owned(),
            seed: 1,
            seconds: 60.0,
            subjects: vec!["emulated".to_owned()],
            absent: Vec::new(),
        };
        Night::begin(home, orders, 1).unwrap().0
    }

    /// The trend is read before anything is run, and the report does not depend on whether it can be written.
    #[test]
    fn a_bad_trend_costs_no_report() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("nights");
        let begun = night(&home);
        fs::create_dir(home.join(TREND)).unwrap();
        let (canary, campaigns) =
            (Canary { cases: 0, finding: None, infrastructure: Vec::new() }, Vec::new());
        let report =
            begun.report(&NightOutcome { canary, regressions: Vec::new(), campaigns }, &Known::default());
        let [what] = &report.unwrap().internal[..] else { panic!("one fault") };
        assert!(what.contains("trend.jsonl: cannot be written"), "{what}");
        let text = fs::read_to_string(begun.dir.join("report.md")).unwrap();
        assert!(text.contains(what), "{text}");
        let orders = begun.orders.clone();
        drop(begun);
        assert!(Night::begin(&home, orders, 1).is_err(), "the next start is refused at once");
    }
}
