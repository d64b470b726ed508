//! A night: the canary, stored regressions and campaigns over all subjects that are there, then one report.
//!
//! ```text
//! HOME/trend.jsonl                      a line for each night and campaign
//! HOME/night-0007/canary/               the planted fault, found
//! HOME/night-0007/SUBJECT-regressions/  folder of a run (crate::record) with the stored cases that failed
//! HOME/night-0007/SUBJECT-PROFILE/      folder of a run, as `seamproof run --out` makes it
//! HOME/night-0007/report.json           there once the night has ended; report.md and junit.xml beside it
//! ```
//!
//! A night that is killed loses no finding, because a failing case is on disk before its thread takes the next one. The
//! next start begins the next night, whose report names what nights without a report left behind
//! ([`campaign::Left`]).

mod conditions;
mod home;
mod known;
mod outside;
mod regressions;
mod report;
mod trend;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use home::{
    REPORT as NIGHT_REPORT, earlier as earlier_nights, found_by, is_night, newest_of, number_of,
};
use known::{Excusing, Failure};
pub(crate) use known::{Known, Listed, Standing};
pub(crate) use outside::outside_of;
pub(crate) use regressions::{Regressions, StoredCases, regressions_of};
pub(crate) use report::{NightCampaign, Report, ReportedFailure};
pub(crate) use trend::{Point, has_moved, trend_of};
pub(crate) use watch::Watch;

use serde::Serialize;

use crate::backends::BackendError;
use crate::campaign::{
    self, Distinct, Event, Logs, Observer, Plan, Registered, Shard, Sinks, Start, Subjects as _, Summary,
    Wrong, conclude,
};
use crate::record::{Findings, Home, RecordError, RunDir, make_dir, write_whole};
use seamproof_judge::case::CaseError;
use seamproof_judge::generate::Profile;
use trend::Trend;

/// Share of the budget of each profile. Small cases find most; large ones are judged by identities too.
const SHARES: [(Profile, f64); 3] = [(Profile::Quick, 0.5), (Profile::Seams, 0.25), (Profile::Large, 0.25)];
/// Shortest campaign of large cases, one of which may take a CPU tens of seconds.
const LARGE_SECONDS_MIN: f64 = 60.0;

/// Least and most seconds in which stored cases are begun on a subject.
const STORED_SECONDS: (f64, f64) = (10.0, 120.0);

/// Reason why a night cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NightError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Case(#[from] CaseError),
    #[error("subject: {0}")]
    Subject(#[from] BackendError),
    #[error("{}: the entry '{key}' {what}", path.display())]
    Known { path: PathBuf, key: String, what: String },
    #[error("{}: {what}", path.display())]
    Read { path: PathBuf, what: String },
}

impl NightError {
    fn unread<E: ToString>(path: &Path) -> impl Fn(E) -> NightError {
        let path = path.to_owned();
        move |error| NightError::Read {
            path: path.clone(),
            what: format!("cannot be read: {}", error.to_string()),
        }
    }
}

/// Contents of `report.json`.
#[derive(Serialize)]
struct Told<'a> {
    /// What came of the night, in a few words.
    title: String,
    #[serde(flatten)]
    report: &'a Report,
}

/// What a night is to do.
#[derive(Clone, Debug)]
pub(crate) struct Orders {
    pub(crate) seed: u64,
    /// Time of all campaigns together.
    pub(crate) seconds: f64,
    /// Subjects, as `--backend` takes them.
    pub(crate) subjects: Vec<String>,
    /// Subjects that are not there, each with the reason.
    pub(crate) absent: Vec<(String, String)>,
    /// Number of threads.
    pub(crate) jobs: usize,
}

/// A night that has begun.
#[derive(Debug)]
pub(crate) struct Night {
    home: Home,
    number: u32,
    dir: PathBuf,
    orders: Orders,
    trend: Trend,
}

impl Night {
    /// Begins the next night of a home.
    pub(crate) fn begin(home: &Path, orders: Orders) -> Result<Night, NightError> {
        let home = Home::open(home)?;
        let trend = Trend::read(home.path())?;
        let last = home::numbers(home.path())?.last().copied().unwrap_or(0);
        let number = last.checked_add(1).ok_or_else(|| NightError::Read {
            path: home::dir_of(home.path(), last),
            what: "no number is left after it; rename or remove it".to_owned(),
        })?;
        let dir = home::dir_of(home.path(), number);
        make_dir(&dir)?;
        Ok(Night { home, number, dir, orders, trend })
    }

    /// Returns its directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs the night; `note` hears how it goes. Returns `None` where somebody stopped it before the canary was found.
    pub(crate) fn run(
        &self,
        stored: &StoredCases,
        known: &Known,
        watch: &Watch,
        note: &dyn Fn(&str),
    ) -> Result<Option<Report>, NightError> {
        let left = home::left(self.home.path(), self.number)?;
        left.iter().for_each(|left| note(&format!("{left}: {}", left.replay)));
        let findings = Findings::create(&self.dir.join("canary"))?;
        let plan = Plan { time: None, ..self.plan(Profile::Quick, 0.0) };
        let canary = campaign::canary(&plan, &Wrong::planted(), &findings, &watch.begin("canary"));
        let permits = canary.permits();
        if !permits && watch.stopped() {
            return Ok(None);
        }
        note(&canary.to_string());
        let mut report = Report::new(self, left, canary);
        // Before anything is judged: what does not show any more excuses nothing.
        report.add_known(known.listed(&self.orders.subjects, watch), known);
        if permits {
            self.run_all(&mut report, stored, watch, note)?;
        }
        report.finish();
        Ok(Some(report))
    }

    fn run_all(
        &self,
        report: &mut Report,
        stored: &StoredCases,
        watch: &Watch,
        note: &dyn Fn(&str),
    ) -> Result<(), NightError> {
        // One subject after the other: its workers, which take seconds to start, stay for all that it is asked.
        for subject in &self.orders.subjects {
            let dir = home::run_of(&self.dir, subject, "regressions");
            let judged = regressions::judge(subject, stored, report.excusing(), &dir, self.stored(), watch)?;
            note(&judged.to_string());
            report.add_regressions(judged);
            for (profile, seconds) in self.shares() {
                if watch.stopped() {
                    report
                        .missed
                        .push(format!("{subject} {profile}: not begun, as the night was interrupted"));
                    continue;
                }
                let summary = self.campaign(subject, profile, seconds, report, watch)?;
                let campaign = NightCampaign { subject: subject.clone(), profile, summary };
                note(&campaign.to_string());
                report.add_campaign(campaign, &self.trend);
            }
        }
        Ok(())
    }

    /// Returns the seconds of campaigns that each subject has.
    fn seconds_each(&self) -> f64 {
        self.orders.seconds / self.orders.subjects.len().max(1) as f64
    }

    /// Returns the part of the night that stored cases have on each subject: as long as its campaigns, within bounds.
    fn stored(&self) -> regressions::Part {
        let (least, most) = STORED_SECONDS;
        let time = Duration::from_secs_f64(self.seconds_each().clamp(least, most));
        regressions::Part { time, night: self.number, jobs: self.orders.jobs }
    }

    /// Returns the profiles that are run, with the seconds of each subject. Large cases wait for a longer night.
    fn shares(&self) -> Vec<(Profile, f64)> {
        let seconds = self.seconds_each();
        let is_run = |&(profile, share): &(Profile, f64)| {
            profile != Profile::Large || seconds * share >= LARGE_SECONDS_MIN
        };
        let run: Vec<_> = SHARES.into_iter().filter(is_run).collect();
        let whole: f64 = run.iter().map(|(_, share)| share).sum();
        run.into_iter().map(|(profile, share)| (profile, seconds * share / whole)).collect()
    }

    /// Returns what this budget leaves out, in words.
    fn left_out(&self) -> Option<String> {
        let least = LARGE_SECONDS_MIN / SHARES[2].1 * self.orders.subjects.len().max(1) as f64;
        let is_left_out = self.shares().len() < SHARES.len();
        is_left_out.then(|| format!("large cases, which are run with a budget of {least} s or more"))
    }

    fn campaign(
        &self,
        subject: &str,
        profile: Profile,
        seconds: f64,
        report: &Report,
        watch: &Watch,
    ) -> Result<Summary, NightError> {
        let control = watch.begin(&format!("{subject} {profile}"));
        let (plan, subjects) = (self.plan(profile, seconds), Registered::new(subject)?);
        let canary = &report.canary;
        let dir = RunDir::create(&home::run_of(&self.dir, subject, profile.name()))?;
        let (findings, start) = (dir.findings()?, Start::of(&plan, subjects.name(), subjects.fixed()));
        let logs = Logs::new(vec![dir.events()?], &control);
        logs.event(&Event::Start(&start));
        logs.event(&Event::Canary(canary));
        let sinks = Sinks { findings: &findings, observer: &logs, control: &control };
        warm_up(&subjects, plan.jobs);
        let excusing = Excusing { subject: &subjects, known: report.excusing() };
        let mut summary = campaign::run(&plan, &excusing, &sinks);
        if profile == Profile::Large {
            lift_floors(&mut summary);
        }
        // Scripts cost a minute. What is known has one beside its story.
        let is_new = |distinct: &Distinct| report.excusing().of(Failure::of_distinct(distinct)).is_none();
        campaign::write_scripts(&mut summary, &sinks, campaign::SCRIPTS_MAX, &is_new, &|_, _| {});
        conclude(&dir, &start, canary, Some(&summary), &logs)?;
        Ok(summary)
    }

    /// Writes the trend and the report for people.
    pub(crate) fn tell(&self, report: &mut Report) -> Result<(), NightError> {
        // The report is worth more than the trend.
        let written = trend::append(self.home.path(), &report.points);
        report.internal.extend(written.err().map(|error| error.to_string()));
        Ok(write_whole(&self.dir.join("report.md"), &report.to_string())?)
    }

    /// Ends the night with the report for machines, which must be the last file.
    pub(crate) fn end(&self, report: &Report) -> Result<(), NightError> {
        let path = self.dir.join(home::REPORT);
        let told = Told { title: report.title(), report };
        let text = serde_json::to_string_pretty(&told)
            .map_err(|error| NightError::Read { path: path.clone(), what: error.to_string() })?;
        Ok(write_whole(&path, &(text + "\n"))?)
    }

    fn plan(&self, profile: Profile, seconds: f64) -> Plan {
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let Orders { seed, jobs, .. } = self.orders;
        Plan { seed, profile, cases: None, time: Some(time), shard: Shard::WHOLE, jobs }
    }
}

/// Starts the workers of a subject, so that what follows has all of its time. What does not start is for that to tell.
fn warm_up(subject: &Registered, jobs: usize) {
    if let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(jobs).build() {
        pool.broadcast(|_| subject.ready().ok());
    }
}

/// Takes the floors of the census off what was missed. They are for hundreds of cases, and a night on a CPU runs some
/// tens of large ones. A subject that refuses most cases, or an end before the time, is still too little run.
fn lift_floors(summary: &mut Summary) {
    let floors: Vec<String> = summary.missed_floors(Profile::Large).iter().map(ToString::to_string).collect();
    summary.missed.retain(|what| !floors.contains(what));
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    pub(super) fn night(home: &Path, seconds: f64) -> Night {
        let (subjects, absent) = (vec!["emulated".to_owned()], Vec::new());
        Night::begin(home, Orders { seed: 1, seconds, subjects, absent, jobs: 1 }).unwrap()
    }

    /// Test that the trend is read before anything is run, and that the report does not depend on whether it can be
    /// written.
    #[test]
    fn a_bad_trend_costs_no_report() {
        let place = tempfile::tempdir().unwrap();
        let begun = night(place.path(), 60.0);
        fs::create_dir(place.path().join("trend.jsonl")).unwrap();
        let canary = campaign::Canary::default();
        let mut report = Report::new(&begun, Vec::new(), canary);
        begun.tell(&mut report).unwrap();
        let [what] = &report.internal[..] else { panic!("one fault") };
        assert!(what.contains("trend.jsonl: cannot be written"), "{what}");
        assert!(fs::read_to_string(begun.dir.join("report.md")).unwrap().contains(what));
        let orders = begun.orders.clone();
        drop(begun);
        assert!(Night::begin(place.path(), orders).is_err(), "the next start is refused at once");
    }

    #[test]
    fn a_start_begins_the_next_night_while_a_number_is_left() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!([1, 2].map(|_| night(place.path(), 60.0).number), [1, 2]);
        let begun = night(place.path(), 60.0);
        let orders = begun.orders.clone();
        assert!(Night::begin(place.path(), orders.clone()).is_err(), "another night is running");
        drop(begun);
        fs::create_dir(place.path().join(format!("night-{}", u32::MAX))).unwrap();
        let error = Night::begin(place.path(), orders).unwrap_err().to_string();
        assert!(error.contains("no number is left"), "{error}");
    }

    #[test]
    fn a_short_night_leaves_large_cases_out_and_says_so() {
        let place = tempfile::tempdir().unwrap();
        let mut night = night(place.path(), 60.0);
        assert_eq!(night.shares(), [(Profile::Quick, 40.0), (Profile::Seams, 20.0)]);
        assert!(night.left_out().is_some_and(|what| what.contains("240 s")));
        night.orders.seconds = 240.0;
        assert_eq!(night.shares(), [(Profile::Quick, 120.0), (Profile::Seams, 60.0), (Profile::Large, 60.0)]);
        assert_eq!(night.left_out(), None);
    }

    #[test]
    fn of_large_cases_the_floors_are_lifted_and_nothing_else() {
        let others = ["judged: 3 of 40 legal cases; at least 50 % is enough", "interrupted after 40 cases"];
        let mut summary = Summary::default();
        let floors = summary.census.missed(Profile::Large);
        assert!(!floors.is_empty(), "nothing was drawn");
        let all = others.iter().copied().map(str::to_owned).chain(floors.iter().map(ToString::to_string));
        summary.missed = all.collect();
        lift_floors(&mut summary);
        assert_eq!(summary.missed, others);
    }
}
