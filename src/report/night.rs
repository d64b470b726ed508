//! The folder of a night.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::campaign::{Campaign, is_campaign};
use super::{Entry, Kind, Report, ReportError, State, json};
use crate::campaign::{Left, Tone};
use crate::nightly::{Listed, NIGHT_REPORT, ReportedFailure, Standing, earlier_nights, number_of, trend_of};
use crate::paste::replay_command;
use crate::record::FINDINGS;
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::prose::counted;
use seamproof_judge::shrink::size;

/// `report.json`, as far as a page shows it.
#[derive(Deserialize)]
struct Stored {
    #[serde(default)]
    title: Option<String>,
    program: String,
    seed: String,
    seconds: f64,
    absent: Vec<(String, String)>,
    regressions: Vec<Regressions>,
    failures: Vec<ReportedFailure>,
    left: Vec<Left>,
    known: Vec<Listed>,
    left_out: Option<String>,
    missed: Vec<String>,
    internal: Vec<String>,
    passed_over: Option<String>,
}

/// Stored cases that were judged on a subject.
#[derive(Deserialize)]
struct Regressions {
    subject: String,
    held: Vec<String>,
    failed: Vec<ReportedFailure>,
}

impl Stored {
    /// Returns the failures of campaigns and those of stored cases.
    fn all(&self) -> impl Iterator<Item = &ReportedFailure> {
        self.failures.iter().chain(self.regressions.iter().flat_map(|all| &all.failed))
    }
}

/// What lies in the folders of a night's runs.
#[derive(Default)]
struct Runs {
    entries: Vec<Entry>,
    measured: Vec<super::Measured>,
    unread: Vec<String>,
}

/// Returns the report of a night's folder.
pub(super) fn read(dir: &Path) -> Result<Report, ReportError> {
    let whole = dir.canonicalize().map_err(|source| ReportError::Read { path: dir.to_owned(), source })?;
    let number = number_of(&whole).unwrap_or_default();
    let home = whole.parent().unwrap_or(Path::new("/"));
    let stored: Option<Stored> = match dir.join(NIGHT_REPORT) {
        path if files::is_absent(&path) => None,
        path => Some(json(&path)?),
    };
    let before = earlier_nights(home, number)?.into_iter().rev().find_map(|(number, dir)| {
        let stored: Stored = json(&dir.join(NIGHT_REPORT)).ok()?;
        Some((number, dir, stored))
    });
    let folder_before = before.as_ref().map(|(number, dir, _)| (*number, dir.as_path()));
    let mut runs = Runs::read(dir, folder_before)?;
    let earlier: BTreeSet<&str> =
        before.iter().flat_map(|(_, _, stored)| stored.all()).map(|failure| &*failure.key).collect();
    let title = format!("Night {number}");
    let Some(stored) = stored else {
        let found = counted(runs.entries.len(), "finding");
        let said = format!("Night {number} did not end; {found} lie in its folders.");
        let mut report = Report::new(Kind::Night, dir, title, (Tone::Doubt, said));
        (report.doubts, report.measured) = (runs.unread, runs.measured);
        return Ok(report.with_findings(runs.entries));
    };
    let entries = runs.take(&stored, &earlier);
    let gone = gone(&stored, before.as_ref().map(|(number, _, stored)| (*number, stored)));
    let doubts = doubts(&stored, runs.unread);
    let tone = if entries.iter().any(|entry| entry.state < State::Flaky) {
        Tone::Bad
    } else if doubts.is_empty() {
        Tone::Good
    } else {
        Tone::Doubt
    };
    let said = stored.title.clone().unwrap_or_else(|| counted(stored.failures.len(), "failure"));
    let mut report = Report::new(Kind::Night, dir, title, (tone, format!("Night {number}: {said}.")));
    report.facts = facts(&stored);
    report.trend = trend_of(home)?.into_iter().filter(|point| point.night <= number).collect();
    (report.doubts, report.gone, report.measured) = (doubts, gone, runs.measured);
    Ok(report.with_findings(entries))
}

fn facts(stored: &Stored) -> Vec<(String, String)> {
    let mut facts = vec![
        ("program".to_owned(), format!("seamproof {}", stored.program)),
        ("seed".to_owned(), stored.seed.clone()),
        ("campaigns".to_owned(), format!("{:.0} s", stored.seconds)),
    ];
    facts.extend(stored.regressions.iter().map(|all| {
        let told = format!("held {}, failed {}", all.held.len(), all.failed.len());
        (format!("{} regressions", all.subject), told)
    }));
    facts
}

fn doubts(stored: &Stored, unread: Vec<String>) -> Vec<String> {
    let mut doubts = unread;
    doubts.extend(stored.left.iter().map(|left| format!("{left}: {}", left.replay)));
    doubts.extend(stored.absent.iter().map(|(name, why)| format!("{name} is not there: {why}")));
    doubts.extend(stored.internal.iter().map(|what| format!("A fault of Seamproof or of a device: {what}")));
    doubts.extend(stored.missed.iter().map(|what| format!("Too little was run: {what}")));
    doubts.extend(stored.left_out.iter().map(|what| format!("Left out: {what}.")));
    doubts.extend(stored.passed_over.iter().map(|what| format!("The trend has {what}.")));
    doubts
}

/// Returns the failures of the night before on the same subjects that this one has not, and the known ones that are
/// none any more.
fn gone(stored: &Stored, before: Option<(u32, &Stored)>) -> Vec<String> {
    let now: BTreeSet<&str> = stored.all().map(|failure| &*failure.key).collect();
    let run: BTreeSet<&str> = stored.regressions.iter().map(|all| &*all.subject).collect();
    let mut gone = Vec::new();
    if let Some((night, before)) = before {
        let missing: BTreeSet<&str> = before.all().map(|failure| &*failure.key).collect();
        let missing = missing
            .difference(&now)
            .filter(|key| FailureKey::subject_of(key).is_some_and(|subject| run.contains(subject)));
        gone.extend(missing.map(|key| format!("{key}: was there in night {night}")));
    }
    gone.extend(stored.known.iter().filter_map(|listed| match &listed.standing {
        Standing::Stale(what) => Some(format!("{}: known, and {what}", listed.key)),
        Standing::True | Standing::Unchecked(_) => None,
    }));
    gone
}

impl Runs {
    /// Reads the folders of a night's runs; `before` is the night before.
    fn read(night: &Path, before: Option<(u32, &Path)>) -> Result<Runs, ReportError> {
        let mut runs = Runs::default();
        let listed =
            files::list(night).map_err(|source| ReportError::Read { path: night.to_owned(), source })?;
        for dir in listed.into_iter().filter(|path| path.join(FINDINGS).is_dir()) {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut entries = if is_campaign(&dir) {
                let earlier: Option<(u32, PathBuf)> = before.map(|(number, dir)| (number, dir.join(&name)));
                let earlier = earlier.as_ref().map(|(number, dir)| (*number, dir.as_path()));
                let campaign = Campaign::read(&dir, earlier)?;
                runs.unread.extend_from_slice(campaign.unread());
                runs.measured.extend(campaign.measured);
                campaign.entries
            } else {
                Entry::of_files(&dir.join(FINDINGS), State::New, &BTreeSet::new(), &mut runs.unread)
            };
            entries.iter_mut().for_each(|entry| entry.campaign = Some(name.clone()));
            runs.entries.extend(entries);
        }
        Ok(runs)
    }

    /// Takes the failures that a night's report tells, each with its smallest case, and the cases that it only counts.
    fn take(&mut self, stored: &Stored, earlier: &BTreeSet<&str>) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        for failure in &stored.failures {
            let mut own: Vec<usize> = (0..self.entries.len())
                .filter(|&at| self.entries[at].key == failure.key && self.entries[at].state != State::Kept)
                .collect();
            own.sort_by_key(|&at| self.entries[at].case.as_ref().map(|case| size(&case.problem)));
            let entry = own.first().map(|&at| self.entries.remove(at));
            entries.push(of_failure(failure, entry, earlier));
        }
        for failure in stored.regressions.iter().flat_map(|all| &all.failed) {
            let name = Path::new(&failure.problem).file_stem();
            let is_own = |entry: &Entry| {
                let file = entry.file.as_ref().map(|file| Path::new(file).file_stem());
                entry.key == failure.key && file == Some(name)
            };
            let own = self.entries.iter().position(is_own).map(|at| self.entries.remove(at));
            let entry = of_failure(failure, own, earlier);
            entries.push(Entry {
                sentence: format!("Stored case {}: {}", failure.problem, entry.sentence),
                ..entry
            });
        }
        let kept = std::mem::take(&mut self.entries).into_iter();
        entries.extend(kept.filter(|entry| entry.state == State::Kept));
        entries
    }
}

/// Returns a failure of a night's report, with what its folder says of it.
fn of_failure(failure: &ReportedFailure, own: Option<Entry>, earlier: &BTreeSet<&str>) -> Entry {
    let mut entry = own.unwrap_or_else(|| {
        let ReportedFailure { key, problem, finding, replay, .. } = failure.clone();
        Entry::told(key, State::New, problem, finding, replay)
    });
    entry.met = Some((failure.cases, failure.shrunk));
    entry.known = failure.known.clone();
    entry.state = match entry.state {
        _ if entry.known.is_some() => State::Known,
        State::Flaky => State::Flaky,
        _ if earlier.contains(&*failure.key) => State::Again,
        _ => State::New,
    };
    if let Some(file) = entry.file.as_ref().filter(|_| entry.state != State::Flaky) {
        entry.replay = replay_command(Path::new(file), None);
    }
    entry
}
