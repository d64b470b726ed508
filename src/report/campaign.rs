//! The folder of a campaign, or of a merge of its shards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::measure::{Measured, measured};
use super::{
    Entry, Kind, Pasted, Report, ReportError, SCRIPT_BYTES_MAX, State, Waypoint, json, parsed, sentence,
};
use crate::campaign::{Ended, Left, Shrunk, Start, Stored, Tone, total};
use crate::paste::{replay_command, try_command};
use crate::record::{EVENT_BYTES_MAX, EVENTS, FINDINGS, RUN, SUMS, findings_of};
use crate::script;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::finding::Finding;
use seamproof_judge::prose::{self, counted};
use seamproof_oracle::Problem;

/// Name of the folder of the canary's findings.
const CANARY: &str = "canary";

/// A failure's event.
#[derive(Deserialize)]
struct Told {
    key: FailureKey,
    finding: Finding,
    #[serde(default)]
    unshrunk: Option<String>,
    #[serde(default)]
    unconfirmed: Option<String>,
    minimal: bool,
    evaluations: usize,
    problem: String,
    name: Option<String>,
    replay: String,
    #[serde(rename = "try", default)]
    try_command: Option<String>,
    #[serde(default)]
    script: Option<ToldScript>,
}

#[derive(Deserialize)]
struct ToldScript {
    doubt: Option<String>,
}

/// What any event says.
#[derive(Deserialize)]
struct Event {
    event: String,
}

/// `run.json`.
#[derive(Default, Deserialize)]
struct Run {
    canary: Option<Canary>,
    summary: Option<Summary>,
}

#[derive(Deserialize)]
struct Canary {
    cases: u64,
    finding: Option<Told>,
    #[serde(default)]
    own: Vec<Told>,
    #[serde(default)]
    not_told: Option<String>,
    #[serde(default)]
    infrastructure: Vec<String>,
}

/// The summary in `run.json`.
#[derive(Deserialize)]
struct Summary {
    #[serde(flatten)]
    ended: Ended,
    refused: BTreeMap<String, u64>,
    malformed: BTreeMap<String, u64>,
    failures: Vec<Count>,
    not_shrunk: u64,
    kept: u64,
    dropped: u64,
    infrastructure: Vec<String>,
}

#[derive(Deserialize)]
struct Count {
    key: FailureKey,
    cases: u64,
    seen: u64,
}

/// Events of a campaign that tell of failures.
#[derive(Default)]
struct Log {
    start: Option<Start>,
    /// The last event of each failure, by its key.
    told: Vec<Told>,
    shrunk: Vec<Shrunk>,
    left: Vec<Left>,
    /// What of the log cannot be read.
    torn: Option<String>,
}

/// A campaign's folder, as it was read.
pub(super) struct Campaign {
    pub(super) entries: Vec<Entry>,
    pub(super) measured: Option<Measured>,
    start: Option<Start>,
    run: Run,
    left: Vec<Left>,
    /// Files that could not be read, in words.
    unread: Vec<String>,
}

/// Whether a folder is a campaign's.
pub(super) fn is_campaign(dir: &Path) -> bool {
    findings_of(dir).is_some_and(|findings| findings.is_dir()) && dir.join(EVENTS).is_file()
}

/// Returns the report of a campaign's folder.
pub(super) fn read(dir: &Path) -> Result<Report, ReportError> {
    let Campaign { entries, measured, start, run, left, unread } = Campaign::read(dir, None)?;
    let subject = start.as_ref().map_or("an unknown subject".to_owned(), |start| start.subject().to_string());
    let title = format!("Campaign on {subject}");
    let (tone, said) = concluded(&run, entries.len());
    let mut report = Report::new(Kind::Campaign, dir, title, (tone, said));
    report.facts = facts(start.as_ref(), &run);
    report.doubts = doubts(&run, &left);
    report.doubts.extend(unread);
    report.measured.extend(measured);
    Ok(report.with_findings(entries))
}

/// Returns what came of a campaign.
fn concluded(run: &Run, entries: usize) -> (Tone, String) {
    match (&run.summary, &run.canary) {
        (Some(summary), _) => {
            let (tone, said) = summary.ended.verdict();
            (tone, capital(&format!("{said}.")))
        }
        (None, Some(canary)) if canary.finding.is_none() => (
            Tone::Bad,
            "The canary was missed: the campaign was not begun, as it would prove nothing.".into(),
        ),
        (None, _) => {
            let found = counted(entries, "finding");
            let tone = if entries > 0 { Tone::Bad } else { Tone::Doubt };
            (tone, format!("The campaign did not end; {found} lie in its folder."))
        }
    }
}

/// Returns a sentence that begins with a capital.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

fn facts(start: Option<&Start>, run: &Run) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
    if let Some(start) = start {
        fact("subject", start.backend.clone());
        let options: Vec<String> =
            start.options.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if !options.is_empty() {
            fact("options", options.join(", "));
        }
        fact("sizes", start.profile.clone());
        fact("seed", start.seed.clone());
        fact("shard", start.shard.to_string());
        fact("program", format!("seamproof {}", start.program));
    }
    if let Some(summary) = &run.summary {
        let sum = |counts: &BTreeMap<String, u64>| total(counts.values()).to_string();
        fact("cases", summary.ended.cases.to_string());
        fact("held", summary.ended.held.to_string());
        fact("refused", sum(&summary.refused));
        fact("malformed", sum(&summary.malformed));
        fact("failed", sum(&summary.ended.failed));
        fact("different failures", summary.ended.distinct.to_string());
        fact("seconds", format!("{:.1}", summary.ended.times.seconds));
        fact("cases a second", format!("{:.1}", summary.ended.times.cases_per_second));
    }
    if let Some(canary) = &run.canary {
        let told = match (&canary.finding, &canary.not_told) {
            (Some(found), _) => format!("found, shrunk to {}", found.problem),
            (None, Some(why)) => format!("inconclusive: {why}"),
            (None, None) => format!("not found in {}", counted(canary.cases, "case")),
        };
        fact("canary", told);
    }
    facts
}

fn doubts(run: &Run, left: &[Left]) -> Vec<String> {
    let mut doubts: Vec<String> = Vec::new();
    if let Some(summary) = &run.summary {
        let counts = [
            (summary.not_shrunk, "with all that a failure below needs: only counted"),
            (summary.kept, "like none of them: kept as drawn"),
            (summary.dropped, "like none of them: only counted, as too many are kept"),
        ];
        let told = counts.into_iter().filter(|(count, _)| *count > 0);
        doubts.extend(told.map(|(count, what)| format!("{} {what}.", counted(count, "more failing case"))));
        doubts.extend(
            summary
                .infrastructure
                .iter()
                .map(|what| format!("A fault of this program or of a device: {what}")),
        );
        doubts.extend(summary.ended.adapter.iter().cloned());
        doubts.extend(summary.ended.missed.iter().map(|what| format!("Too little run: {what}")));
    }
    doubts.extend(run.canary.iter().flat_map(|canary| canary.infrastructure.clone()));
    doubts.extend(left.iter().map(|left| format!("{left}: {}", left.replay)));
    doubts
}

impl Campaign {
    /// Reads a campaign's folder. `before` is the same campaign of an earlier night.
    pub(super) fn read(dir: &Path, before: Option<(u32, &Path)>) -> Result<Campaign, ReportError> {
        let mut log = Log::read(&dir.join(EVENTS))?;
        let mut unread: Vec<String> = log.torn.into_iter().collect();
        let run: Run = there(&dir.join(RUN), &mut unread).unwrap_or_default();
        let stored: Option<Stored> = there(&dir.join(SUMS), &mut unread);
        let missed: &[String] = run.summary.as_ref().map_or(&[], |summary| &summary.ended.missed);
        let measured = stored.as_ref().map(|stored| measured(stored, missed, before));
        let start = log.start.or(stored.map(|stored| stored.start));
        let mut entries = Vec::new();
        let findings = dir.join(FINDINGS);
        let mut seen = BTreeSet::new();
        let failures = run.summary.as_ref().map_or(&[][..], |summary| &summary.failures);
        let place = |told: &Told| failures.iter().position(|count| count.key == told.key);
        // In the order of the summary.
        log.told.sort_by_key(|told| place(told).unwrap_or(failures.len()));
        for told in log.told {
            seen.extend(told.name.clone());
            let met = place(&told).map(|place| (failures[place].cases, failures[place].seen));
            entries.push(Entry { met, ..told.entry(&findings, State::New, &mut unread) });
        }
        // A failure of the campaign says it better than one that the search for the canary met.
        let is_begun = run.summary.as_ref().is_some_and(|summary| !summary.ended.failed.is_empty());
        let own = run.canary.iter().filter(|_| !is_begun);
        for told in own.flat_map(|canary| &canary.own) {
            entries.push(told.entry(&dir.join(CANARY), State::Own, &mut unread));
        }
        let of_file = Entry::of_files(&findings, State::Kept, &seen, &mut unread);
        entries.extend(of_file);
        for entry in &mut entries {
            entry.way = way(&log.shrunk, entry);
        }
        Ok(Campaign { entries, measured, start, run, left: log.left, unread })
    }

    /// Returns what makes it doubtful, beyond what a night's report says.
    pub(super) fn unread(&self) -> &[String] {
        &self.unread
    }
}

impl Log {
    /// Reads an event log as far as it can be read: that of a campaign that was killed may be torn at its end.
    fn read(path: &Path) -> Result<Log, ReportError> {
        let unread = |source| ReportError::Read { path: path.to_owned(), source };
        let mut log = Log::default();
        let mut last: BTreeMap<FailureKey, usize> = BTreeMap::new();
        for (at, text) in files::lines(path, EVENT_BYTES_MAX).map_err(unread)?.enumerate() {
            let read = text.map_err(unread).and_then(|text| log.add(path, at + 1, &text, &mut last));
            if let Err(why) = read {
                log.torn = Some(why.to_string());
                break;
            }
        }
        Ok(log)
    }

    fn add(
        &mut self,
        path: &Path,
        line: usize,
        text: &[u8],
        last: &mut BTreeMap<FailureKey, usize>,
    ) -> Result<(), ReportError> {
        let event: Event = parsed(path, line, text)?;
        match event.event.as_str() {
            "start" => self.start = Some(parsed(path, line, text)?),
            "left" => self.left.push(parsed(path, line, text)?),
            "shrunk" => self.shrunk.push(parsed(path, line, text)?),
            "finding" => {
                let told: Told = parsed(path, line, text)?;
                match last.get(&told.key) {
                    Some(&at) => self.told[at] = told,
                    None => {
                        last.insert(told.key.clone(), self.told.len());
                        self.told.push(told);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Told {
    /// Returns the failure, with its case where that lies in the folder.
    fn entry(&self, folder: &Path, state: State, unread: &mut Vec<String>) -> Entry {
        let found = Found {
            finding: self.finding.clone(),
            minimal: self.minimal,
            evaluations: self.evaluations,
            unshrunk: self.unshrunk.clone(),
            unconfirmed: self.unconfirmed.clone(),
        };
        let file = self.name.as_ref().map(|name| folder.join(format!("{name}.json")));
        let case = file
            .as_ref()
            .and_then(|file| Case::load(file).map_err(|why| unread.push(why.to_string())).ok().map(Box::new));
        let file = file.filter(|_| case.is_some());
        // The folder may have been moved since.
        let replay = match &file {
            Some(file) if self.replay.starts_with(REPLAY) => replay_command(file, None),
            _ => self.replay.clone(),
        };
        let doubt = self.script.as_ref().and_then(|script| script.doubt.clone());
        let script = file.as_ref().and_then(|file| pasted(file)).map(|script| Pasted { doubt, ..script });
        Entry {
            file: file.map(|file| file.display().to_string()),
            try_command: self.try_command.clone(),
            script,
            case,
            ..Entry::of_found(found, self.key.to_string(), state, self.problem.clone(), replay)
        }
    }
}

/// Beginning of a command that judges a file again.
const REPLAY: &str = "seamproof replay ";

impl Entry {
    /// Returns a failure of which no more is known than what was found; `problem` tells it in words. One that was not
    /// seen again is flaky, whatever `state` says.
    pub(super) fn of_found(
        found: Found,
        key: String,
        state: State,
        problem: String,
        replay: String,
    ) -> Entry {
        let state = if found.unconfirmed.is_some() { State::Flaky } else { state };
        Entry {
            sentence: sentence(&found),
            minimal: found.minimal,
            evaluations: found.evaluations,
            finding: Some(found.finding.clone()),
            ..Entry::told(key, state, problem, found.text(), replay)
        }
    }

    /// Returns the failure that a stored case shows.
    pub(super) fn of_file(file: &Path, case: Case, state: State) -> Option<Entry> {
        let found = case.found.clone()?;
        let key = FailureKey::of(&found.finding, &case.subject.name, &case.problem).to_string();
        let problem = prose::describe(&case.problem);
        Some(Entry {
            file: Some(file.display().to_string()),
            try_command: try_command(&case),
            script: pasted(file),
            case: Some(Box::new(case)),
            ..Entry::of_found(found, key, state, problem, replay_command(file, None))
        })
    }

    /// Returns the failures in a folder of cases, without those of these names.
    pub(super) fn of_files(
        folder: &Path,
        state: State,
        seen: &BTreeSet<String>,
        unread: &mut Vec<String>,
    ) -> Vec<Entry> {
        let listed = files::list(folder).map_err(|why| unread.push(format!("{}: {why}", folder.display())));
        let is_other = |path: &&std::path::PathBuf| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            files::is_json(path) && !seen.contains(name.as_ref())
        };
        let mut entries = Vec::new();
        let listed = listed.unwrap_or_default();
        let others: Vec<_> = listed.iter().filter(is_other).collect();
        if let Some(more) = others.get(super::ENTRIES_MAX..).map(<[_]>::len).filter(|more| *more > 0) {
            let cases = counted(more as u64, "more case");
            unread.push(format!(
                "{}: {cases}, not told here; seamproof replay judges the folder",
                folder.display()
            ));
        }
        for path in others.into_iter().take(super::ENTRIES_MAX) {
            match Case::load(path) {
                Ok(case) => entries.extend(Entry::of_file(path, case, state)),
                Err(why) => unread.push(why.to_string()),
            }
        }
        entries
    }
}

/// Returns what a JSON file holds. One that is there and cannot be read is told in `unread`.
fn there<T: DeserializeOwned>(path: &Path, unread: &mut Vec<String>) -> Option<T> {
    let told = json(path);
    told.map_err(|why| {
        if !files::is_absent(path) {
            unread.push(why.to_string());
        }
    })
    .ok()
}

/// Returns the script beside a case.
fn pasted(file: &Path) -> Option<Pasted> {
    let path = script::beside(file);
    if files::is_absent(&path) {
        return None;
    }
    let text = files::read(&path, SCRIPT_BYTES_MAX).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    Some(Pasted { path: path.display().to_string(), doubt: None, text })
}

/// Returns the way on which a case was shrunk, where the log tells it.
fn way(shrunk: &[Shrunk], entry: &Entry) -> Vec<Waypoint> {
    let Some(case) = &entry.case else { return Vec::new() };
    let own = shrunk.iter().rev().find(|shrunk| shrunk.case.problem == case.problem);
    own.map_or(Vec::new(), |shrunk| shrunk.steps.iter().map(waypoint).collect())
}

fn waypoint(problem: &Problem) -> Waypoint {
    Waypoint {
        problem: prose::describe(problem),
        sequences: problem.sequences.len(),
        queries: problem.tokens(),
        keys: problem.sequences.iter().map(|both| both.kv.len).sum(),
        ranks: problem.parallel.size(),
        of: Box::new(problem.clone()),
    }
}
