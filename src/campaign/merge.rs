//! Joins the parts of a campaign into the result that the whole would have had.
//!
//! What a campaign says of the cases that held does not depend on their order, and is in each part's [`Sums`]. The
//! cases that did not hold go through the ledger once more, in the order of the whole campaign, from the parts' events.
//! As a rule, the part that ran a case has shrunk it already where the ledger wants it shrunk, because a part's first
//! cases of a symptom are among the whole's first ones. Otherwise the case is drawn, judged and shrunk here.
//!
//! A directory is a *part* if its sums can be read and its event log tells of all their cases. Nothing of any other
//! directory is counted; [`Left`](super::Left) tells what it found.
//!
//! Logs are read line by line and hold few lines of cases that passed ([`CASE_EVENTS_MAX`]). So memory grows with the
//! parts alone, and time with the parts and the cases that did not pass.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Display;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{CASE_EVENTS_MAX, CaseEvent, Shrunk, Start};
use super::ledger::Ledger;
use super::outcome::{Failed, Judged, Recorded};
use super::plan::{Plan, Shard};
use super::summary::{Summary, Sums};
use super::{Sinks, Subjects, case_of, merged};
use crate::backends::{Changes, Identity};
use crate::record::{CHECKPOINT, EVENT_BYTES_MAX, EVENTS, RecordError, RunDir, SUMS};
use seamproof_judge::asked::Asked;
use seamproof_judge::evaluate::evaluate_malformed;
use seamproof_judge::files;
use seamproof_judge::finding::{Check, Ending, Finding, Relation};
use seamproof_judge::subject::TensorName;
use seamproof_judge::subjects::listed;
use seamproof_judge::verdict::Verdict;

/// Size of the largest file of sums that is read, in bytes.
const SUMS_BYTES_MAX: u64 = 64 << 20;
/// Largest total of all counts of a part, products apart, so that the counts of a thousand parts can be added.
const COUNTS_MAX: u64 = 1 << 53;
/// Fields of sums whose numbers may be larger: they are added up to the largest number that there is.
const PRODUCTS: [&str; 2] = ["products", "product_count"];

/// Reason why parts cannot be joined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum MergeError {
    /// No directory at all.
    #[error("{}: there is no such directory", path.display())]
    Missing { path: PathBuf },
    /// Something else in the place of a directory.
    #[error("{}: is no directory", path.display())]
    NoDirectory { path: PathBuf },
    /// A directory without sums: its campaign still runs, was killed, or missed its canary.
    #[error("{}: has no {SUMS}: it has not ended, or is no campaign's directory", path.display())]
    NotEnded { path: PathBuf },
    /// A file that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file that holds something else.
    #[error("{}:{line}: {what}", path.display())]
    Text { path: PathBuf, line: usize, what: String },
    /// Sums that no campaign has.
    #[error("{}: its counts come to more than {COUNTS_MAX} or than its cases, or its time to less than none: no campaign's do", path.display())]
    Impossible { path: PathBuf },
    /// Parts of different campaigns.
    #[error("{}: {field} {got}, and {other} has {expected}: not parts of one campaign", path.display())]
    Different { path: PathBuf, other: String, field: &'static str, got: String, expected: String },
    /// A part that is there twice.
    #[error("{}: is shard {shard} once more", path.display())]
    Twice { path: PathBuf, shard: Shard },
    /// An event log that lacks cases.
    #[error("{}: tells of {got} of {expected} {what}", path.display())]
    Incomplete { path: PathBuf, what: &'static str, got: u64, expected: u64 },
    /// An event log with more cases than the sums beside it.
    #[error("{}: tells of {got} {what}, and the sums beside it of {expected}", path.display())]
    More { path: PathBuf, what: &'static str, got: u64, expected: u64 },
    /// An event log with a case where none of its part can be.
    #[error("{}:{line}: case {index} is none of shard {shard}, or is not behind the case before it", path.display())]
    Foreign { path: PathBuf, line: usize, index: u64, shard: Shard },
    /// A directory of which no case is known to have been told.
    #[error("{}: has no {CHECKPOINT}: no case of it counts", path.display())]
    NotReached { path: PathBuf },
    /// A subject that is not the one of the first cases.
    #[error("{}: the subject is not the one that was cut off: {changes}; put that one back to go on, or leave out --resume to begin anew", path.display())]
    OtherSubject { path: PathBuf, changes: Changes },
    /// A directory in which nothing can be gone on with.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// What a campaign leaves for whoever merges it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stored {
    /// What was run.
    pub start: Start,
    /// Its sums.
    pub sums: Sums,
}

/// What a running campaign leaves for whoever goes on with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Checkpoint {
    /// What is run.
    pub(super) start: Start,
    /// What it is run on; empty in a checkpoint of an older build, which nobody goes on with.
    #[serde(default)]
    pub(super) identity: Identity,
    /// Sums of the first cases, without their census.
    pub(super) sums: Sums,
    /// Size of the event log that tells of these cases and of no others, in bytes.
    pub(super) events: u64,
}

/// A part of a campaign: a directory that [`super::run`]'s caller wrote.
#[derive(Clone, Debug)]
pub struct Part {
    /// Path of the directory.
    pub dir: PathBuf,
    /// What was run, and its sums.
    pub stored: Stored,
    /// Size of the beginning of the event log that tells of these cases, in bytes.
    pub events: u64,
}

impl Part {
    /// Reads the sums of a directory, and checks that its event log tells of all their cases.
    pub fn read(dir: &Path) -> Result<Part, MergeError> {
        let path = dir.to_owned();
        match fs::metadata(dir) {
            Ok(found) if !found.is_dir() => return Err(MergeError::NoDirectory { path }),
            Ok(_) if files::is_absent(&dir.join(SUMS)) => return Err(MergeError::NotEnded { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(MergeError::Missing { path });
            }
            _ => {}
        }
        let path = dir.join(SUMS);
        let stored: Stored = parsed(&path, 1, &text_of(&path)?)?;
        possible(&path, &stored.sums)?;
        Part { dir: dir.to_owned(), stored, events: u64::MAX }.whole()
    }

    /// Returns the first cases of a campaign that was cut off in this directory, as its last checkpoint tells of them.
    /// Nothing is changed there; whoever goes on cuts the event log ([`RunDir::cut`]) behind [`Part::events`] bytes.
    pub fn cut_off(dir: &RunDir, start: &Start, identity: &Identity) -> Result<Part, MergeError> {
        let path = dir.path().join(CHECKPOINT);
        if files::is_absent(&path) {
            return Err(MergeError::NotReached { path: dir.path().to_owned() });
        }
        let Checkpoint { start: found, identity: was, sums, events } = parsed(&path, 1, &text_of(&path)?)?;
        possible(&path, &sums)?;
        // The version of this program is part of the identity.
        let start = &Start { program: found.program.clone(), ..start.clone() };
        same_campaign((&path, &found), (&"this one", start))?;
        if found.shard != start.shard {
            return Err(different(&path, &"this one", "shard", [found.shard, start.shard]));
        }
        if let Some(changes) = was.changes(identity) {
            return Err(MergeError::OtherSubject { path, changes });
        }
        let log = dir.path().join(EVENTS);
        let got = fs::metadata(&log).map_err(|source| MergeError::Read { path: log.clone(), source })?.len();
        if got < events {
            return Err(MergeError::Incomplete { path: log, what: "bytes", got, expected: events });
        }
        Part { dir: dir.path().to_owned(), stored: Stored { start: found, sums }, events }.whole()
    }

    /// Returns the part if its event log tells of all its cases.
    fn whole(self) -> Result<Part, MergeError> {
        let mut log = Log::open(&self)?;
        while log.next()?.is_some() {}
        log.whole()?;
        Ok(self)
    }
}

/// Reads a file of sums.
fn text_of(path: &Path) -> Result<Vec<u8>, MergeError> {
    files::read(path, SUMS_BYTES_MAX).map_err(|source| MergeError::Read { path: path.to_owned(), source })
}

/// Checks that a campaign may have these sums.
fn possible(path: &Path, sums: &Sums) -> Result<(), MergeError> {
    let counts = counts_in(&serde_json::to_value(sums).unwrap_or_default());
    if counts > COUNTS_MAX || sums.passed() > sums.cases || sums.seconds < 0.0 {
        return Err(MergeError::Impossible { path: path.to_owned() });
    }
    Ok(())
}

/// Returns the total of all counts in a value.
fn counts_in(value: &Value) -> u64 {
    match value {
        Value::Array(parts) => parts.iter().map(counts_in).fold(0, u64::saturating_add),
        Value::Object(fields) => {
            let counts = fields.iter().filter(|(name, _)| !PRODUCTS.contains(&name.as_str()));
            counts.map(|(_, part)| counts_in(part)).fold(0, u64::saturating_add)
        }
        other => other.as_u64().unwrap_or(0),
    }
}

/// Reads a value that begins on this line of a file.
fn parsed<T: DeserializeOwned>(path: &Path, line: usize, text: &[u8]) -> Result<T, MergeError> {
    serde_json::from_slice(text).map_err(|error| MergeError::Text {
        path: path.to_owned(),
        line: line + error.line().saturating_sub(1),
        what: error.to_string(),
    })
}

/// Returns the campaign of these parts and its missing shards; `None` where there is no part.
pub fn campaign_of(parts: &[Part]) -> Result<Option<(Start, Vec<Shard>)>, MergeError> {
    let Some(first) = parts.first() else { return Ok(None) };
    let mut missing: Vec<Shard> = first.stored.start.shard.siblings().collect();
    for part in parts {
        same_campaign((&part.dir, &part.stored.start), (&first.dir.display(), &first.stored.start))?;
        let shard = part.stored.start.shard;
        let at = missing.iter().position(|&other| other == shard);
        missing.remove(at.ok_or_else(|| MergeError::Twice { path: part.dir.clone(), shard })?);
    }
    let jobs = parts.iter().fold(0, |jobs: usize, part| jobs.saturating_add(part.stored.start.jobs));
    Ok(Some((Start { shard: Shard::WHOLE, jobs, ..first.stored.start.clone() }, missing)))
}

/// Returns the fixed options in words.
fn options_of(start: &Start) -> String {
    if start.options.is_empty() { "none".to_owned() } else { listed(&start.options) }
}

/// Returns the error of a part that has another value in this field than one before.
fn different<T: Display>(
    path: &Path,
    other: &dyn Display,
    field: &'static str,
    [got, expected]: [T; 2],
) -> MergeError {
    let (path, other) = (path.to_owned(), other.to_string());
    MergeError::Different { path, other, field, got: got.to_string(), expected: expected.to_string() }
}

/// Checks that what was run in this place is of the campaign that was run in another.
fn same_campaign(
    (path, got): (&Path, &Start),
    (other, expected): (&dyn Display, &Start),
) -> Result<(), MergeError> {
    let fields = |start: &Start| {
        let limit = |limit: Option<f64>| limit.map_or("none".to_owned(), |limit| limit.to_string());
        [
            ("version", start.program.clone()),
            ("seed", start.seed.clone()),
            ("backend", start.backend.clone()),
            ("options", options_of(start)),
            ("profile", start.profile.clone()),
            ("cases", limit(start.cases.map(|cases| cases as f64))),
            ("seconds", limit(start.seconds)),
            ("shards", start.shard.count().to_string()),
        ]
    };
    let mut both = fields(got).into_iter().zip(fields(expected));
    match both.find(|(got, expected)| got != expected) {
        None => Ok(()),
        Some(((field, got), (_, expected))) => Err(different(path, other, field, [got, expected])),
    }
}

/// Joins parts that have no case in common; `missed` says what is not there. Parts ran side by side, so the time of the
/// longest is that of the whole.
pub fn merge(
    plan: &Plan,
    subjects: &dyn Subjects,
    parts: &[Part],
    missed: Vec<String>,
    sinks: &Sinks,
) -> Result<Summary, MergeError> {
    let mut ledger = Ledger::new(plan, subjects, sinks);
    let mut logs = parts.iter().map(Log::open).collect::<Result<Vec<_>, _>>()?;
    let ahead = |at: usize, log: &Log| log.ahead.as_ref().map(|record| Reverse((record.index, at)));
    let mut next: BinaryHeap<_> = logs.iter().enumerate().filter_map(|(at, log)| ahead(at, log)).collect();
    while let Some(Reverse((_, at))) = next.pop() {
        let log = &mut logs[at];
        let Some(Taken { record, shrunk }) = log.next()? else { break };
        next.extend(ahead(at, log));
        ledger.note(record.event());
        settle(&mut ledger, plan, subjects, &record, Recorded::Earlier(shrunk));
    }
    logs.iter().try_for_each(Log::whole)?;
    parts.iter().for_each(|part| ledger.add(&part.stored.sums));
    missed.into_iter().for_each(|what| ledger.missed(what));
    let censuses: Vec<_> = parts.iter().map(|part| part.stored.sums.census.clone()).collect();
    let seconds = parts.iter().map(|part| part.stored.sums.seconds).fold(0.0, f64::max);
    let elapsed = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    Ok(ledger.finish(merged(&censuses), Vec::new(), elapsed))
}

/// Returns the ledger of a campaign after its first cases, which ran before the campaign was cut off and are told to
/// `of_earlier`. What was found in haste as the campaign ended is no longer on disk.
pub(super) fn gone_on<'a>(
    plan: &'a Plan,
    subjects: &'a dyn Subjects,
    earlier: &Part,
    sinks: &'a Sinks<'a>,
    of_earlier: &'a Sinks<'a>,
) -> Result<Ledger<'a>, MergeError> {
    let mut ledger = Ledger::new(plan, subjects, of_earlier);
    let mut log = Log::open(earlier)?;
    while let Some(Taken { record, shrunk }) = log.next()? {
        settle(&mut ledger, plan, subjects, &record, Recorded::Before(shrunk));
    }
    ledger.tidy()?;
    Ok(ledger.go_on(&earlier.stored.sums, sinks))
}

/// Has the ledger settle the case behind a record.
fn settle(ledger: &mut Ledger, plan: &Plan, subjects: &dyn Subjects, record: &Record, recorded: Recorded) {
    match record.verdict.as_str() {
        "finding" => match drawn_again(plan, subjects, record, recorded) {
            Ok(judged) => ledger.settle(record.index, judged),
            Err(what) => ledger.trouble(what),
        },
        "infrastructure" => {
            let what = record.reason.clone().unwrap_or_default();
            ledger.settle(record.index, Judged::Infrastructure(what));
        }
        _ => {}
    }
}

/// Returns the failing case behind a record. A subject from outside has a say in what is drawn, and may panic.
fn drawn_again(
    plan: &Plan,
    subjects: &dyn Subjects,
    record: &Record,
    recorded: Recorded,
) -> Result<Judged, String> {
    let attempt = panic::catch_unwind(AssertUnwindSafe(|| failed(plan, subjects, record, recorded)));
    attempt.unwrap_or_else(|_| Err(format!("case {}: drawing it again panicked", record.index)))
}

fn failed(
    plan: &Plan,
    subjects: &dyn Subjects,
    record: &Record,
    recorded: Recorded,
) -> Result<Judged, String> {
    let index = record.index;
    match super::asked(plan, subjects, index).map_err(|error| error.to_string())? {
        Asked::Malformed(malformed) => match evaluate_malformed(&malformed) {
            Verdict::Finding(finding) => Ok(Judged::Accepted(malformed.rule, finding)),
            _ => Err(format!("case {index} failed in its part of the campaign and does not fail here")),
        },
        Asked::Problem(problem) | Asked::Probe(problem) => {
            let check = record.check.ok_or_else(|| format!("case {index} failed in no check"))?;
            let Record { tensor, identity, ending, .. } = *record;
            Ok(Judged::Failed(Box::new(Failed {
                name: super::name_of(index),
                case: case_of(plan, subjects, index, problem),
                finding: Finding { identity, ending, ..Finding::new(check, tensor, String::new()) },
                recall: None,
                recorded,
            })))
        }
    }
}

/// A case's event, as it was read.
#[derive(Clone, Debug, Deserialize)]
struct Record {
    index: u64,
    verdict: String,
    margin: Option<f64>,
    reason: Option<String>,
    check: Option<Check>,
    identity: Option<Relation>,
    ending: Option<Ending>,
    tensor: Option<TensorName>,
}

impl Record {
    fn event(&self) -> CaseEvent<'_> {
        let Record { index, margin, check, identity, ending, tensor, .. } = *self;
        let reason = self.reason.as_deref();
        CaseEvent { index, verdict: &self.verdict, margin, reason, check, identity, ending, tensor }
    }
}

/// A case, and what it was shrunk to.
struct Taken {
    record: Record,
    shrunk: Option<Box<Shrunk>>,
}

/// Returns the lines in the first bytes of a log, which end with a line.
fn first_bytes(
    lines: impl Iterator<Item = io::Result<Vec<u8>>>,
    mut left: u64,
) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    lines.map_while(move |line| {
        let bytes = line.as_ref().map_or(0, |line| line.len() as u64 + 1);
        let (had, is_cut) = (left > 0, bytes > left);
        left = left.saturating_sub(bytes);
        let error = || io::Error::new(io::ErrorKind::InvalidData, "the last case that counts is cut");
        had.then(|| if is_cut { Err(error()) } else { line })
    })
}

/// What any event says.
#[derive(Deserialize)]
struct Kind {
    event: String,
}

/// The cases of a part's event log, in order.
struct Log<'a> {
    path: PathBuf,
    lines: Box<dyn Iterator<Item = io::Result<Vec<u8>>>>,
    line: usize,
    /// The case after those that were taken.
    ahead: Option<Record>,
    /// The least index that it may have.
    least: u64,
    /// Number of cases that were taken and have an event in any case.
    taken: u64,
    /// Number of cases that were taken and did not pass.
    not_passed: u64,
    stored: &'a Stored,
}

impl<'a> Log<'a> {
    fn open(part: &'a Part) -> Result<Log<'a>, MergeError> {
        let (path, stored) = (part.dir.join(EVENTS), &part.stored);
        let lines = files::lines(&path, EVENT_BYTES_MAX)
            .map_err(|source| MergeError::Read { path: path.clone(), source })?;
        let lines = Box::new(first_bytes(lines, part.events));
        let mut log = Log { path, lines, line: 0, ahead: None, least: 0, taken: 0, not_passed: 0, stored };
        log.advance()?;
        Ok(log)
    }

    /// Returns the next case and what it was shrunk to.
    fn next(&mut self) -> Result<Option<Taken>, MergeError> {
        let Some(record) = self.ahead.take() else { return Ok(None) };
        self.taken += u64::from(record.index < CASE_EVENTS_MAX);
        self.not_passed += u64::from(!record.event().is_passed());
        let shrunk = self.advance()?;
        Ok(Some(Taken { record, shrunk }))
    }

    /// Goes on to the next case. Returns the shrunk case that lies before it, if there is one.
    fn advance(&mut self) -> Result<Option<Box<Shrunk>>, MergeError> {
        let mut shrunk = None;
        while let Some(text) = self.lines.next() {
            self.line += 1;
            let text = text.map_err(|source| MergeError::Read { path: self.path.clone(), source })?;
            let kind: Kind = parsed(&self.path, self.line, &text)?;
            match kind.event.as_str() {
                "start" => self.is_of(&parsed(&self.path, self.line, &text)?)?,
                "case" => {
                    self.ahead = Some(self.in_turn(parsed(&self.path, self.line, &text)?)?);
                    break;
                }
                "shrunk" => shrunk = Some(parsed(&self.path, self.line, &text)?),
                _ => {}
            }
        }
        Ok(shrunk)
    }

    /// Checks that the log is that of its sums.
    fn is_of(&self, told: &Start) -> Result<(), MergeError> {
        let start = &self.stored.start;
        same_campaign((&self.path, told), (&"its sums", start))?;
        match told.shard == start.shard {
            true => Ok(()),
            false => Err(different(&self.path, &"its sums", "shard", [told.shard, start.shard])),
        }
    }

    /// Returns a case that may come next.
    fn in_turn(&mut self, record: Record) -> Result<Record, MergeError> {
        let (index, shard) = (record.index, self.stored.start.shard);
        if index < self.least || !shard.has(index) {
            return Err(MergeError::Foreign { path: self.path.clone(), line: self.line, index, shard });
        }
        self.least = index.saturating_add(1);
        Ok(record)
    }

    /// Checks that the log told of all cases of which it has to, and of no others.
    fn whole(&self) -> Result<(), MergeError> {
        let Stored { start, sums } = self.stored;
        let told = start.shard.turns_before(CASE_EVENTS_MAX).min(sums.cases);
        let checks =
            [("cases", self.taken, told), ("cases that did not pass", self.not_passed, sums.not_passed())];
        match checks.into_iter().find(|(_, got, expected)| got != expected) {
            None => Ok(()),
            Some((what, got, expected)) if got < expected => {
                Err(MergeError::Incomplete { path: self.path.clone(), what, got, expected })
            }
            Some((what, got, expected)) => {
                Err(MergeError::More { path: self.path.clone(), what, got, expected })
            }
        }
    }
}
