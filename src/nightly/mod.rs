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
//! [`campaign::merge`] joins them into what one run of the same cases would say. A night without a report is gone on with by
//! the next start, which says what was lost. Where the next start begins another night, that one's report tells what the
//! unfinished one found ([`Left`]). Every file is written whole or by appending complete lines, and nothing but the night's
//! own directory and the trend is ever written.

mod known;
mod left;
mod regressions;
mod report;
mod trend;

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use known::{Entry, Known, KnownError, Standing};
pub use left::{FoundBy, Left, Unread, found_by};
pub use regressions::{Regressed, Regressions, Unjudged, regressions_of};
pub use report::{Failure, Report};
pub use trend::{Point, Trend};

use crate::backends::BackendError;
use crate::campaign::{
    self, Canary, Control, Event, Logs, MergeError, Observer, Part, Plan, Registered, Shard, Sinks, Start,
    Stored, Summary,
};
use crate::case::CaseError;
use crate::files;
use crate::generate::Profile;
use crate::prose::counted;
use crate::record::{EVENTS, Findings, Home, RecordError, RunDir, SUMS, make_dir, move_aside, write_whole};

/// Share of the budget of each profile: small cases find most, large ones are judged by identities too.
const SHARES: [(Profile, f64); 3] = [(Profile::Quick, 0.5), (Profile::Seams, 0.25), (Profile::Large, 0.25)];
/// Slices that a campaign is cut into, within [`SLICE`].
const SLICES: f64 = 8.0;
/// Shortest and longest slice: what a kill costs.
const SLICE: (f64, f64) = (1.0, 60.0);

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

/// What a night is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The version of this program.
    pub program: String,
    /// Which build of it: slices of different programs make no campaign.
    pub build: String,
    /// Seed of all cases.
    pub seed: u64,
    /// Time of all campaigns together.
    pub seconds: f64,
    /// The subjects, as `--backend` takes them.
    pub subjects: Vec<String>,
    /// Subjects that are not there, and why.
    pub absent: Vec<(String, String)>,
}

impl Orders {
    /// Why a night that was begun by these orders cannot be gone on with by others, with what differs; empty where it can.
    fn differences(&self, others: &Orders) -> Vec<String> {
        let program = |orders: &Orders| format!("Seamproof {}, build {}", orders.program, orders.build);
        let subjects = |orders: &Orders| orders.subjects.join(";");
        let mut all = Vec::new();
        let mut compare = |what: &str, own: String, other: String| {
            all.extend((own != other).then(|| format!("is {what} '{own}' and not '{other}'")));
        };
        compare("of", program(self), program(others));
        compare("for", subjects(self), subjects(others));
        all
    }
}

/// What goes between a running night and whoever watches it: a request to stop, and what is done at present.
#[derive(Debug, Default)]
pub struct Watch {
    asked: AtomicBool,
    stage: Mutex<Stage>,
}

/// A stage of a night: the canary, stored cases, a campaign, or joining its slices.
#[derive(Debug)]
struct Stage {
    what: String,
    begun: Instant,
    /// What its earlier controls counted.
    cases: u64,
    failed: u64,
    control: Arc<Control>,
}

impl Default for Stage {
    fn default() -> Stage {
        Stage { what: String::new(), begun: Instant::now(), cases: 0, failed: 0, control: Arc::default() }
    }
}

/// How far a night's stage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The stage in words; empty before the first.
    pub what: String,
    /// Cases judged in it.
    pub cases: u64,
    /// Those of them that failed.
    pub failed: u64,
    /// Time since it was begun.
    pub elapsed: Duration,
}

impl Watch {
    /// Asks the night to end after the cases in flight; the next start goes on. True if that was asked before.
    pub fn stop(&self) -> bool {
        let before = self.asked.swap(true, Ordering::Relaxed);
        self.stage().control.stop();
        before
    }

    /// Whether somebody asked.
    pub fn stopped(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// What the night does now.
    pub fn progress(&self) -> Progress {
        let stage = self.stage();
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Progress {
            what: stage.what.clone(),
            cases: stage.cases + count(&stage.control.cases),
            failed: stage.failed + count(&stage.control.failed),
            elapsed: stage.begun.elapsed(),
        }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stage begins.
    fn begin(&self, what: String) {
        *self.stage() = Stage { what, ..Stage::default() };
    }

    /// A control of its own for the next part of the stage: a campaign that stops itself does not end the night.
    fn next(&self) -> Arc<Control> {
        let Progress { cases, failed, .. } = self.progress();
        let control = Arc::new(Control::default());
        let mut stage = self.stage();
        (stage.cases, stage.failed, stage.control) = (cases, failed, Arc::clone(&control));
        if self.stopped() {
            control.stop();
        }
        control
    }
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

/// A campaign of a night.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The subject.
    pub subject: String,
    /// Sizes.
    pub profile: Profile,
    /// Its sum.
    pub summary: Summary,
    /// What was lost by an earlier end of the night.
    pub lost: Vec<String>,
}

/// What a night came to.
#[derive(Debug)]
pub struct Outcome {
    /// The planted fault.
    pub canary: Canary,
    /// Stored cases.
    pub regressions: Vec<Regressions>,
    /// Campaigns.
    pub campaigns: Vec<Campaign>,
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
    ) -> Result<Option<Outcome>, NightError> {
        watch.begin("canary".to_owned());
        let findings = Findings::create(&self.dir.join("canary"))?;
        let canary = campaign::canary(&self.plan(Profile::Quick), &findings, &watch.next());
        // Whoever stops the search has not shown that there is nothing to find.
        if canary.finding.is_some() || !watch.stopped() {
            note(&canary.to_string());
        }
        let mut outcome = Outcome { canary, regressions: Vec::new(), campaigns: Vec::new() };
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
    pub fn report(&self, outcome: &Outcome, known: &Known) -> Result<Report, NightError> {
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

    /// Runs what is left of a campaign, and joins its slices; `None` where somebody stopped it.
    fn campaign(
        &self,
        subject: &str,
        profile: Profile,
        seconds: f64,
        watch: &Watch,
        note: &dyn Fn(&str),
    ) -> Result<Option<Campaign>, NightError> {
        watch.begin(format!("{subject} {profile}"));
        let subjects = Registered::new(subject)?;
        let dir = self.dir.join(format!("{}-{}", file_name(subject), profile.name()));
        make_dir(&dir)?;
        let (mut parts, mut spent) = (Vec::new(), 0.0);
        let slice = (seconds / SLICES).clamp(SLICE.0, SLICE.1);
        loop {
            let path = slice_of(&dir, parts.len());
            let first =
                parts.last().map_or(0, |part: &Part| part.stored.start.first + part.stored.sums.cases);
            let part = match ended(&path, first)? {
                // What was run before counts, whatever the budget is now.
                Some(part) => {
                    spent += part.stored.sums.seconds;
                    part
                }
                None if spent >= seconds => break,
                None => {
                    if watch.stopped() {
                        return Ok(None);
                    }
                    let time = Duration::from_secs_f64(slice.min(seconds - spent));
                    // Up to the slice behind it, where that is there: it goes on counting.
                    let plan = match begin_of(&slice_of(&dir, parts.len() + 1)).filter(|&next| next > first) {
                        Some(next) => Plan { first, cases: Some(next), ..self.plan(profile) },
                        None => Plan { first, time: Some(time), ..self.plan(profile) },
                    };
                    let part = self.slice(&plan, &subjects, &path, watch)?;
                    spent += part.stored.sums.seconds.max(slice / 2.0);
                    part
                }
            };
            // A slice whose campaign stopped itself has nothing left that runs its cases.
            let over = part.stored.sums.interrupted;
            parts.push(part);
            if over {
                break;
            }
        }
        set_aside_from(&dir, parts.len())?;
        let lost = lost(&dir);
        lost.iter().for_each(|what| note(what));
        watch.begin(format!("{subject} {profile}, joining {}", counted(parts.len(), "slice")));
        let mut summary = self.join(&dir, &subjects, profile, &parts, watch)?;
        if profile == Profile::Large {
            lift_floors(&mut summary);
        }
        if watch.stopped() {
            return Ok(None);
        }
        note(&format!("{subject} {profile}: {}", counts(&summary)));
        Ok(Some(Campaign { subject: subject.to_owned(), profile, summary, lost }))
    }

    /// Runs a slice; it counts from the moment at which its sums are on disk.
    fn slice(
        &self,
        plan: &Plan,
        subjects: &Registered,
        path: &Path,
        watch: &Watch,
    ) -> Result<Part, NightError> {
        let (dir, control) = (RunDir::create(path)?, watch.next());
        let logs = Logs::new(vec![dir.events()?], &control);
        let start = Start::of(plan, subjects);
        logs.event(&Event::Start(&start));
        let findings = dir.findings()?;
        let summary =
            campaign::run(plan, subjects, &Sinks { findings: &findings, observer: &logs, control: &control });
        if let Some(error) = logs.trouble() {
            return Err(error.into());
        }
        let mut sums = summary.sums();
        // What was asked to stop is as good as one that ended in time: the next slice goes on behind it.
        sums.interrupted &= !watch.stopped();
        let stored = Stored { start, sums };
        dir.sum(&stored)?;
        Ok(Part { dir: path.to_owned(), stored })
    }

    fn join(
        &self,
        dir: &Path,
        subjects: &Registered,
        profile: Profile,
        parts: &[Part],
        watch: &Watch,
    ) -> Result<Summary, NightError> {
        let (whole, control) = (RunDir::create(&dir.join(left::WHOLE))?, watch.next());
        let logs = Logs::new(vec![whole.events()?], &control);
        let (plan, findings) = (self.plan(profile), whole.findings()?);
        logs.event(&Event::Start(&Start::of(&plan, subjects)));
        let seconds: f64 = parts.iter().map(|part| part.stored.sums.seconds).sum();
        let elapsed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let sinks = Sinks { findings: &findings, observer: &logs, control: &control };
        let summary = campaign::merge(&plan, subjects, parts, (elapsed, Vec::new()), &sinks)?;
        logs.event(&Event::Summary(&summary.event()));
        logs.trouble().map_or(Ok(summary), |error| Err(error.into()))
    }
}

/// What a night is to do, on disk.
const ORDERS: &str = "night.json";

/// What nights came to, in their home.
const TREND: &str = "trend.jsonl";
/// The largest file that is read of a night or of all of them, but for cases and event logs.
const JSON_BYTES_MAX: u64 = 64 << 20;

/// How the newest night stands to a start.
enum Newest {
    /// There is none.
    None,
    /// It has its report.
    Ended,
    /// It is gone on with, as it was begun by these orders.
    Unfinished(Orders),
    /// It is not, as it … .
    GivenUp(String),
}

fn newest(dir: &Path, orders: &Orders) -> Newest {
    if files::is_absent(dir) {
        return Newest::None;
    }
    if !dir.is_dir() {
        return Newest::GivenUp("is no directory".to_owned());
    }
    match left::ending(dir) {
        Ok(Some(_)) => return Newest::Ended,
        Err(what) => return Newest::GivenUp(format!("has a {} that does not end it ({what})", report::JSON)),
        Ok(None) => {}
    }
    let text = files::read(&dir.join(ORDERS), JSON_BYTES_MAX).map_err(|error| error.to_string());
    let stored = text.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    let why = match stored.map(|stored: Orders| (stored.differences(orders), stored)) {
        Ok((differences, stored)) if differences.is_empty() => return Newest::Unfinished(stored),
        Ok((differences, _)) => differences.join(" and "),
        Err(what) => format!("has a {ORDERS} that cannot be read ({what})"),
    };
    Newest::GivenUp(format!("has no report and {why}"))
}

fn going_on(number: u32, before: f64, now: f64) -> String {
    let mut said = format!("goes on with night {number}, which has no report, as it was begun");
    if before != now {
        said += &format!(", but for {now} s and not {before} s in all");
    }
    said
}

/// What a home holds of nights, by name.
struct Nights {
    numbers: BTreeSet<u32>,
    /// Names that are nearly those of nights.
    others: Vec<String>,
}

fn nights(home: &Path) -> Result<Nights, NightError> {
    let all = files::list(home)
        .map_err(|error| NightError::Read { path: home.to_owned(), what: error.to_string() })?;
    let numbers = all.iter().filter_map(|path| number_of(path)).collect();
    let is_other = |path: &&PathBuf| name(path).starts_with("night-") && number_of(path).is_none();
    let others = all.iter().filter(is_other).map(|path| name(path).to_owned()).collect();
    Ok(Nights { numbers, others })
}

/// The newest night of a home; `None` where the directory is none's.
pub fn newest_of(home: &Path) -> Option<PathBuf> {
    let last = nights(home).ok()?.numbers.last().copied()?;
    Some(dir_of(home, last))
}

/// The number of the night whose directory has this name; `night-1` and `night-0000` are none's.
fn number_of(dir: &Path) -> Option<u32> {
    let number = name(dir).strip_prefix("night-")?.parse().ok()?;
    (number > 0 && dir_of(Path::new(""), number) == Path::new(name(dir))).then_some(number)
}

/// The directory of a night of a home.
fn dir_of(home: &Path, number: u32) -> PathBuf {
    home.join(format!("night-{number:04}"))
}

/// What a directory holds, by name; that it cannot be read is added to `unread`.
fn entries(dir: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    files::list(dir).unwrap_or_else(|error| {
        unread.push(Unread::new(dir, &error));
        Vec::new()
    })
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Whether a path of a night is that of a campaign.
fn is_campaign(path: &Path) -> bool {
    SHARES.iter().any(|(profile, _)| name(path).ends_with(&format!("-{}", profile.name())))
}

/// The slices of a campaign, those that were set aside too.
fn slices_of(campaign: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    let is_slice = |path: &PathBuf| name(path).starts_with("slice-");
    entries(campaign, unread).into_iter().filter(is_slice).collect()
}

fn slice_of(campaign: &Path, number: usize) -> PathBuf {
    campaign.join(format!("slice-{number:04}"))
}

/// A slice that ended and begins at case `first`. Another one that has sums, or that cannot be read, is set aside: it is run
/// again, and what it found is told of as what any slice found that was cut off.
fn ended(path: &Path, first: u64) -> Result<Option<Part>, NightError> {
    match Part::read(path).and_then(|part| part.check().map(|()| part)) {
        Ok(part) if part.stored.start.first == first => return Ok(Some(part)),
        Err(MergeError::NotEnded { .. } | MergeError::Missing { .. }) => {}
        _ => move_aside(path)?,
    }
    Ok(None)
}

/// The first case of a slice that ended.
fn begin_of(path: &Path) -> Option<u64> {
    Part::read(path).ok().map(|part| part.stored.start.first)
}

/// Sets slices aside that ended and do not count, as the one before them is not there any more and no time is left for it.
fn set_aside_from(campaign: &Path, number: usize) -> Result<(), NightError> {
    for number in number.. {
        let path = slice_of(campaign, number);
        if !files::is_absent(&path.join(SUMS)) {
            move_aside(&path)?;
        } else if files::is_absent(&slice_of(campaign, number + 1)) {
            break;
        }
    }
    Ok(())
}

/// Those that did not end: they were set aside when they were run again, or lie where they were begun if the budget, which a
/// later start may make smaller, has no time left for them.
fn cut_off_of(campaign: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    let is_cut_off = |path: &PathBuf| is_aside(path) || !path.join(SUMS).exists();
    slices_of(campaign, unread).into_iter().filter(is_cut_off).collect()
}

fn is_aside(slice: &Path) -> bool {
    name(slice).contains('.')
}

/// What was lost with those slices of a campaign.
fn lost(campaign: &Path) -> Vec<String> {
    let told = |path: &PathBuf| {
        let cases = match cases_told(&path.join(EVENTS)) {
            Ok(cases) => counted(cases, "case"),
            Err(error) => format!("an unknown number of cases ({error})"),
        };
        let then = match is_aside(path) && path.with_extension("").exists() {
            true => "and run again",
            false => "and no time is left to run it again",
        };
        format!("{} was cut off after {cases} {then}", path.display())
    };
    // What cannot be read is in the report anyway.
    cut_off_of(campaign, &mut Vec::new()).iter().map(told).collect()
}

/// Of how many cases an event log tells.
fn cases_told(log: &Path) -> io::Result<u64> {
    if files::is_absent(log) {
        return Ok(0);
    }
    let mut cases = 0;
    for line in BufReader::new(files::open(log)?).split(b'\n') {
        cases += u64::from(line?.starts_with(b"{\"event\":\"case\""));
    }
    Ok(cases)
}

/// A subject's text as the name of a directory.
fn file_name(subject: &str) -> String {
    subject.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect()
}

/// Forgives what the census missed of large cases: its floors are for hundreds, and a night on a CPU runs some tens. A subject
/// that refuses its way through, or an end before the time, is still too little run.
fn lift_floors(summary: &mut Summary) {
    let floors: BTreeSet<String> =
        summary.census.missed(Profile::Large).iter().map(ToString::to_string).collect();
    summary.missed.retain(|what| !floors.contains(what));
}

fn counts(summary: &Summary) -> String {
    format!(
        "{} · held {} · failed {} ({} distinct) · {:.0} cases/s",
        counted(summary.cases, "case"),
        summary.held,
        summary.failed_count(),
        summary.distinct.len(),
        summary.per_second(summary.cases)
    )
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

    /// What a start says of the newest night: that it goes on with it, or the reason why it does not.
    #[test]
    fn a_night_that_is_not_gone_on_with_says_why() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("nights");
        let orders = |build: &str, subjects: &[&str]| Orders {
            program: "1".to_owned(),
            build: build.to_owned(),
            seed: 1,
            seconds: 60.0,
            subjects: subjects.iter().copied().map(str::to_owned).collect(),
            absent: Vec::new(),
        };
        let said = |orders: Orders| Night::begin(&home, orders, 1).unwrap().1;
        assert_eq!(said(orders("a", &["emulated"])), "begins night 1");
        let again = said(Orders { seconds: 5.0, ..orders("a", &["emulated"]) });
        assert_eq!(
            again,
            "goes on with night 1, which has no report, as it was begun, but for 5 s and not 60 s in all"
        );
        let found = "; what it found will be in the report";
        let subjects = "is for 'emulated' and not 'emulated;cuda'";
        let begins = format!("begins night 2, as night 1 has no report and {subjects}{found}");
        assert_eq!(said(orders("a", &["emulated", "cuda"])), begins);
        let build = "is of 'Seamproof 1, build a' and not 'Seamproof 1, build b'";
        let begins = format!("begins night 3, as night 2 has no report and {build}{found}");
        assert_eq!(said(orders("b", &["emulated", "cuda"])), begins);
        assert!(said(orders("c", &["emulated"])).contains(" and is for 'emulated;cuda' and not 'emulated'"));
        fs::write(dir_of(&home, 4).join(ORDERS), "{").unwrap();
        assert!(
            said(orders("c", &["emulated"]))
                .starts_with("begins night 5, as night 4 has no report and has a night.json")
        );
        let ended = "{\"night\": 5, \"program\": \"1\"}";
        fs::write(dir_of(&home, 5).join(report::JSON), ended).unwrap();
        assert_eq!(said(orders("c", &["emulated"])), "begins night 6, as night 5 has ended");
        fs::write(dir_of(&home, 6).join(report::JSON), ended).unwrap();
        let begins =
            "begins night 7, as night 6 has a report.json that does not end it (it is that of night 5)";
        assert_eq!(said(orders("c", &["emulated"])), format!("{begins}{found}"));
        fs::write(home.join("night-0008"), "").unwrap();
        fs::create_dir(home.join("night-9")).unwrap();
        let begins = "begins night 9, as night 8 is no directory";
        let others = "; no nights by their names: night-9";
        assert_eq!(said(orders("c", &["emulated"])), format!("{begins}{found}{others}"));
        fs::create_dir(home.join(format!("night-{}", u32::MAX))).unwrap();
        let again = Night::begin(&home, orders("c", &["emulated"]), 1);
        assert!(matches!(again, Err(NightError::Last { .. })), "no number is left");
    }

    fn night(home: &Path) -> Night {
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

    /// A slice whose files are not whole, or that is no slice at all, is run again up to the one behind it.
    #[test]
    fn a_slice_that_cannot_be_read_is_run_again() {
        let place = tempfile::tempdir().unwrap();
        let night = night(&place.path().join("nights"));
        let run = |seconds: f64| {
            let profile = Profile::Seams;
            let campaign =
                night.campaign("emulated", profile, seconds, &Watch::default(), &|_| {}).unwrap().unwrap();
            let events = fs::read_to_string(night.dir.join("emulated-seams/whole/events.jsonl")).unwrap();
            let told = events.lines().filter(|line| line.starts_with("{\"event\":\"case\""));
            assert_eq!(told.count() as u64, campaign.summary.cases);
            (campaign.summary.cases, campaign.lost.len())
        };
        let (cases, lost) = run(2.0);
        assert_eq!(lost, 0);
        let slices = night.dir.join("emulated-seams");
        let cut = |file: &str| {
            let text = fs::read(slices.join(file)).unwrap();
            fs::write(slices.join(file), &text[..text.len() - 9]).unwrap();
        };
        cut("slice-0000/sums.json");
        let begin = begin_of(&slices.join("slice-0001")).unwrap();
        let (again, lost) = run(2.0);
        assert!(again >= cases && lost == 1);
        let [first, second] = [0, 1].map(|number| Part::read(&slice_of(&slices, number)).unwrap().stored);
        assert_eq!((first.sums.cases, second.start.first), (begin, begin), "what is behind it still counts");
        cut("slice-0000/events.jsonl");
        // No time is left for it, and what is behind it begins nowhere: all of them are told of.
        let (none, lost) = run(0.0);
        assert!(none == 0 && lost >= 3, "{none} {lost}");
        let log = night.dir.join("emulated-seams/slice-0000.1/sums.json");
        assert!(log.exists() && !slices.join("slice-0001").exists());
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
        let report = begun.report(&Outcome { canary, regressions: Vec::new(), campaigns }, &Known::default());
        let [what] = &report.unwrap().internal[..] else { panic!("one fault") };
        assert!(what.contains("trend.jsonl: cannot be written"), "{what}");
        let text = fs::read_to_string(begun.dir.join("report.md")).unwrap();
        assert!(text.contains(what), "{text}");
        let orders = begun.orders.clone();
        drop(begun);
        assert!(Night::begin(&home, orders, 1).is_err(), "the next start is refused at once");
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
