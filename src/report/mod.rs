//! What a campaign, a night or a recording found, as plain data: what `seamproof report` shows, and what a machine
//! reads in its page.
//!
//! A *folder* is what `seamproof run`, `seamproof merge` or `seamproof nightly` left, or a recording. Reading trusts
//! nothing in it: files are bounded, a file that is no case is told of and hides no other, and a folder that did not
//! end is read as far as it came. An [`Entry`] is a failure; its [`State`] says whether it is news.
//!
//! Nothing depends on the clock: the same folder gives the same report. A subject is run in [`again`] alone.

mod again;
mod campaign;
mod lines;
mod measure;
mod night;
mod recording;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::campaign::Tone;
use crate::nightly::{NightError, Point, is_night, newest_of};
use crate::recording::{MANIFEST, RecordingError};
use seamproof_judge::case::{Case, Found};
use seamproof_judge::files;
use seamproof_judge::finding::{Finding, LOOKS};
use seamproof_judge::ladder::ErrorMap;
use seamproof_oracle::Problem;
use seamproof_oracle::sharding::RankLayout;

pub(crate) use again::{Again, Runs, again, run};
pub(crate) use measure::{ClassCount, Measured, TensorMargin};
pub(crate) use recording::of_recording;

/// Name of the form of the data.
const SCHEMA: &str = "seamproof-report";
/// Version of the form of the data. Fields are added without a new one.
const VERSION: u32 = 1;
/// Largest number of failures that are shown; the others are counted.
pub(crate) const ENTRIES_MAX: usize = 256;
/// Size of the largest file that is read of a folder, cases and lines of events apart, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Size of the largest script that is shown, in bytes.
const SCRIPT_BYTES_MAX: u64 = 64 << 10;

/// Reason why a folder gives no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ReportError {
    /// A path that leads nowhere.
    #[error("{}: there is no such folder", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A file in the place of a folder.
    #[error(
        "{}: is a file; name the folder of a campaign, a night or a recording, or show a case with \
         `seamproof explain FILE --html F`", path.display()
    )]
    NoFolder {
        /// The path.
        path: PathBuf,
    },
    /// A folder of nights.
    #[error("{}: holds nights; name one of them, such as {}", path.display(), night.display())]
    Nights {
        /// The path.
        path: PathBuf,
        /// The newest night.
        night: PathBuf,
    },
    /// A folder of something else.
    #[error(
        "{}: is no folder of a campaign (`seamproof run --out`, `seamproof merge`), of a night (`seamproof nightly`) or \
         of a recording", path.display()
    )]
    Unknown {
        /// The path.
        path: PathBuf,
    },
    /// A file that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Reason of the system.
        source: std::io::Error,
    },
    /// A file that does not hold what it should.
    #[error("{}, line {line}: {what}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A trend that cannot be read.
    #[error("{0}")]
    Trend(String),
    /// A recording that cannot be read.
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

impl From<NightError> for ReportError {
    fn from(error: NightError) -> ReportError {
        ReportError::Trend(error.to_string())
    }
}

/// Kind of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// What a campaign, or a merge of its shards, left.
    Campaign,
    /// What a night left.
    Night,
    /// A run that was recorded.
    Recording,
}

/// What a folder tells.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Name of the form, always the same.
    pub(crate) schema: &'static str,
    /// Version of the form.
    pub(crate) version: u32,
    /// Version of this program.
    pub(crate) program: &'static str,
    /// Kind of the folder.
    pub(crate) kind: Kind,
    /// Path of the folder.
    pub(crate) folder: String,
    /// What it is, in a few words.
    pub(crate) title: String,
    /// What came of it, in one sentence.
    pub(crate) sentence: String,
    /// How the sentence is meant.
    pub(crate) tone: Tone,
    /// What makes the result doubtful, in words.
    pub(crate) doubts: Vec<String>,
    /// Failures, news first. At most [`ENTRIES_MAX`].
    pub(crate) findings: Vec<Entry>,
    /// Number of further failures.
    pub(crate) findings_left: usize,
    /// Failures of before that were not seen any more, in words.
    pub(crate) gone: Vec<String>,
    /// Facts by name.
    pub(crate) facts: Vec<(String, String)>,
    /// Margins and census of each campaign.
    pub(crate) measured: Vec<Measured>,
    /// Campaigns of all nights up to this one, in order.
    pub(crate) trend: Vec<Point>,
    /// A recorded run that holds, with the errors of its results.
    #[serde(skip)]
    pub(crate) held: Option<(Box<Case>, Vec<RankLayout>, Vec<ErrorMap>)>,
}

/// Whether a failure is news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// Nobody knew it.
    New,
    /// Not on the list of known failures, and the night before had it too.
    Again,
    /// A failing case like no failure that was shrunk, as it was drawn.
    Kept,
    /// In the search for the canary, a failure that is the subject's own.
    Own,
    /// It was looked for again and not seen.
    Flaky,
    /// It is on the list of known failures.
    Known,
}

impl State {
    /// Returns the state in a word, where a report of this kind tells several apart.
    pub(crate) fn mark(self, kind: Kind) -> Option<&'static str> {
        match self {
            State::New if kind == Kind::Night => Some("new"),
            State::New => None,
            State::Again => Some("also the night before"),
            State::Kept => Some("as drawn"),
            State::Own => Some("by itself"),
            State::Flaky => Some("flaky"),
            State::Known => Some("known"),
        }
    }
}

/// A failure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    /// Whether it is news.
    pub(crate) state: State,
    /// What is wrong, in one sentence.
    pub(crate) sentence: String,
    /// What makes two failures the same, in words.
    pub(crate) key: String,
    /// Campaign of a night that found it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) campaign: Option<String>,
    /// The case in words.
    pub(crate) problem: String,
    /// What was found, in words.
    pub(crate) words: String,
    /// The broken check of the smallest case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) finding: Option<Finding>,
    /// Whether the shrinker has finished with the case.
    pub(crate) minimal: bool,
    /// Evaluations of the shrinker.
    pub(crate) evaluations: usize,
    /// Failing cases of it, and how many of them were shrunk, where that was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) met: Option<(u64, u64)>,
    /// File of the case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<String>,
    /// Command that judges it again, or words that say why there is none.
    pub(crate) replay: String,
    /// Command that judges the problem without its file.
    #[serde(rename = "try", skip_serializing_if = "Option::is_none")]
    pub(crate) try_command: Option<String>,
    /// Script that shows it without this project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) script: Option<Pasted>,
    /// Why it is known, and the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) known: Option<(String, String)>,
    /// Sizes on the way from the drawn case to the smallest.
    pub(crate) way: Vec<Waypoint>,
    /// The case.
    #[serde(skip)]
    pub(crate) case: Option<Box<Case>>,
    /// Errors of results that are at hand without another run.
    #[serde(skip)]
    pub(crate) errors: Vec<ErrorMap>,
}

/// A script to paste.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pasted {
    /// Its path.
    pub(crate) path: String,
    /// What is to be said about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) doubt: Option<String>,
    /// The script, where it can be read and is short enough to be shown.
    #[serde(skip)]
    pub(crate) text: Option<String>,
}

/// A problem on the way from the drawn case to the smallest.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Waypoint {
    /// The problem in words.
    pub(crate) problem: String,
    /// Number of sequences.
    pub(crate) sequences: usize,
    /// Number of queries.
    pub(crate) queries: usize,
    /// Number of keys.
    pub(crate) keys: usize,
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// The problem.
    #[serde(skip)]
    pub(crate) of: Box<Problem>,
}

/// Reads the folder of a campaign or a night. A recording has to be judged first ([`of_recording`]).
pub(crate) fn read(path: &Path) -> Result<Report, ReportError> {
    let path_of = || path.to_owned();
    if files::is_absent(path) {
        return Err(ReportError::Missing { path: path_of() });
    }
    if !path.is_dir() {
        return Err(ReportError::NoFolder { path: path_of() });
    }
    if is_night(path) {
        return night::read(path);
    }
    if let Some(night) = newest_of(path) {
        return Err(ReportError::Nights { path: path_of(), night });
    }
    if campaign::is_campaign(path) {
        return campaign::read(path);
    }
    Err(ReportError::Unknown { path: path_of() })
}

/// Whether a folder holds a recording.
pub(crate) fn is_recording(path: &Path) -> bool {
    path.join(MANIFEST).is_file()
}

impl Report {
    /// Returns a report of a folder, with a sentence and nothing else.
    fn new(kind: Kind, folder: &Path, title: String, (tone, sentence): (Tone, String)) -> Report {
        Report {
            schema: SCHEMA,
            version: VERSION,
            program: env!("CARGO_PKG_VERSION"),
            kind,
            folder: folder.display().to_string(),
            title,
            sentence,
            tone,
            doubts: Vec::new(),
            findings: Vec::new(),
            findings_left: 0,
            gone: Vec::new(),
            facts: Vec::new(),
            measured: Vec::new(),
            trend: Vec::new(),
            held: None,
        }
    }

    /// Puts these failures in, news first.
    fn with_findings(mut self, mut entries: Vec<Entry>) -> Report {
        entries.sort_by_key(|entry| entry.state);
        self.findings_left = entries.len().saturating_sub(ENTRIES_MAX);
        entries.truncate(ENTRIES_MAX);
        self.findings = entries;
        self
    }
}

impl Entry {
    /// Returns a failure of which nothing is known but these words.
    fn told(key: String, state: State, problem: String, words: String, replay: String) -> Entry {
        Entry {
            state,
            sentence: words.replace(['\n', '\r'], " "),
            key,
            campaign: None,
            problem,
            words,
            finding: None,
            minimal: false,
            evaluations: 0,
            met: None,
            file: None,
            replay,
            try_command: None,
            script: None,
            known: None,
            way: Vec::new(),
            case: None,
            errors: Vec::new(),
        }
    }
}

/// Reads a file of a folder as JSON.
fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ReportError> {
    let bytes = files::read(path, FILE_BYTES_MAX)
        .map_err(|source| ReportError::Read { path: path.to_owned(), source })?;
    parsed(path, 1, &bytes)
}

/// Reads a value that begins on this line of a file.
fn parsed<T: serde::de::DeserializeOwned>(path: &Path, line: usize, text: &[u8]) -> Result<T, ReportError> {
    serde_json::from_slice(text).map_err(|error| ReportError::Text {
        path: path.to_owned(),
        line: line + error.line().saturating_sub(1),
        what: error.to_string(),
    })
}

/// Returns what is wrong, in one sentence: the mistake that would explain it where one is named, else the finding's own
/// words. That of the case as it was drawn comes first: a smallest case has so few numbers that several mistakes
/// explain it.
fn sentence(found: &Found) -> String {
    let Finding { check, identity, tensor, what, .. } = &found.finding;
    let of = |words: &String| words.find(LOOKS).map(|at| words[at..].trim_end_matches('.').to_owned());
    let of_drawn =
        found.unshrunk.as_ref().and_then(of).map(|looks| format!("before it was shrunk, it {looks}"));
    // Lines that begin further in are the places where an error was raised.
    let first = || {
        let lines = what.lines().take_while(|line| !line.starts_with(' '));
        lines.collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
    };
    let why = of_drawn.or_else(|| of(what)).unwrap_or_else(first);
    let about = match (tensor, identity) {
        (Some(tensor), _) => format!("{tensor} is wrong"),
        (None, Some(identity)) => format!("{check} {identity} does not hold"),
        (None, None) => check.to_string(),
    };
    format!("{about}: {why}.").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::finding::Check;
    use seamproof_oracle::TensorName;

    fn found(what: &str, tensor: Option<TensorName>) -> Found {
        Found::drawn(Finding::new(Check::Envelope, tensor, what.to_owned()))
    }

    #[test]
    fn a_sentence_names_the_mistake_wherever_it_stands() {
        let small = found("further from the exact value than rounding explains", Some(TensorName::Lse));
        assert_eq!(sentence(&small), "lse is wrong: further from the exact value than rounding explains.");
        let drawn = Found { unshrunk: Some("x: looks as if the mask was left out".into()), ..small };
        let told = "lse is wrong: before it was shrunk, it looks as if the mask was left out.";
        assert_eq!(sentence(&drawn), told);
        // Of two mistakes, that of the larger case.
        let both = Found { finding: found("looks as if x", Some(TensorName::Lse)).finding, ..drawn };
        assert_eq!(sentence(&both), told);
        let crash = Found::drawn(Finding::new(Check::Crash, None, "it died\nhere.".into()));
        assert_eq!(sentence(&crash), "crash: it died here.");
        let raised = "KeyError: 'x'\n  kernel.py:6 in attention: return scales['x']";
        let raised = Found::drawn(Finding::new(Check::Crash, None, raised.into()));
        assert_eq!(sentence(&raised), "crash: KeyError: 'x'.");
    }

    #[test]
    fn a_path_to_nothing_of_ours_is_an_error_that_says_so() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("case.json");
        std::fs::write(&file, "{}").unwrap();
        let home = place.path().join("nights");
        std::fs::create_dir_all(home.join("night-0003")).unwrap();
        assert!(matches!(read(&place.path().join("no")), Err(ReportError::Missing { .. })));
        assert!(matches!(read(&file), Err(ReportError::NoFolder { .. })));
        assert!(matches!(read(place.path()), Err(ReportError::Unknown { .. })));
        let Err(ReportError::Nights { night, .. }) = read(&home) else { panic!("it holds nights") };
        assert_eq!(night, home.join("night-0003"));
    }
}
