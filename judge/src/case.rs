//! The case, which is what is stored and replayed, as readable JSON ([`Case`]).
//!
//! Case files come from people and other machines, so the reader trusts nothing. It bounds the bytes while it reads
//! them, checks the version before anything else, bounds the nesting, and refuses unknown fields. The problem inside
//! is validated like any other. Each error is one line that names the file and the field.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use seamproof_oracle::Problem;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::finding::{Earlier, Finding, LOOKS};

/// Version of the format that this program writes.
pub const CASE_VERSION: u32 = 1;
/// Size of the largest case file that is read, in bytes. The longest legal list of sequences takes about half of it.
pub const CASE_BYTES_MAX: u64 = 64 << 20;
/// Largest number of characters in an error's text. Names in a hostile file may be as long as the file.
pub const ERROR_TEXT_MAX: usize = 300;

/// Origin of a stored case, for a reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Story {
    /// The bug in the field, or the reason why the case is kept.
    pub text: String,
    /// Public sources.
    pub sources: Vec<String>,
}

/// A backend and its setup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// Name of the backend.
    pub name: String,
    /// Options of the backend, as text. A backend refuses options that it does not know.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// Source of the input values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum InputSource {
    /// Values drawn from the problem's mode and data seed.
    Generated,
    /// Values of a recorded run beside the case.
    Recorded {
        /// Name of the recording's directory.
        file: String,
        /// Blake3 digest of its manifest, in hex.
        digest: String,
        /// Rows that were judged; absent where it was every row.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sample: Option<Sample>,
    },
}

/// A sample of rows to judge in place of every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Number of rows to draw on each side.
    pub rows: u64,
    /// Seed of the draw.
    pub seed: u64,
}

/// Largest number of earlier runs in a case.
pub const EARLIER_MAX: usize = 16;

/// One problem on one subject: what is stored and replayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Version of the case format, [`CASE_VERSION`].
    pub version: u32,
    /// Reason why the case is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub story: Option<Story>,
    /// Subject that the case runs on by default.
    pub subject: Subject,
    /// Seed of everything that a schedule leaves open, such as the order of the ranks' steps.
    pub schedule_seed: u64,
    /// Source of the inputs.
    pub inputs: InputSource,
    /// The problem.
    pub problem: Problem,
    /// Runs that are made first, in this order, on the same worker. Their results do not count.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "few")]
    pub before: Vec<Earlier>,
    /// The finding and its history, where the case is a finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
}

/// Largest number of characters kept of the finding before shrinking. The text passes from file to file, and a file
/// may hold anything.
pub const UNSHRUNK_MAX: usize = 4096;

/// A campaign's finding in a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The broken check.
    pub finding: Finding,
    /// Whether the shrinker has finished with the case.
    pub minimal: bool,
    /// Evaluations that the shrinker used.
    pub evaluations: usize,
    /// The finding before shrinking, in words; kept where the final finding says less or something different. A
    /// minimal case often has too few lanes, heads or rows to tell faults apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unshrunk: Option<String>,
    /// How often the failure was looked for again and not seen, in words; absent where it was seen again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unconfirmed: Option<String>,
}

impl Found {
    /// Returns a finding in a case that nobody has shrunk.
    pub fn drawn(finding: Finding) -> Found {
        Found { finding, minimal: false, evaluations: 0, unshrunk: None, unconfirmed: None }
    }

    /// Keeps the words of the finding before shrinking, unless some are kept already or they say no more than the
    /// present ones.
    pub fn remember(&mut self, before: &str) {
        if self.unshrunk.is_none() && says_more(before, &self.finding.what) {
            self.unshrunk = Some(before.chars().take(UNSHRUNK_MAX).collect());
        }
    }
}

/// Whether the words before shrinking say more than the present ones, or something different: whether some of them
/// are missing now, or stand in another order, or whether several explanations stand now in place of fewer. Words with
/// a digit are not compared, since a smaller case has other rows, keys and weights.
fn says_more(before: &str, now: &str) -> bool {
    let choices = |text: &str| text.matches(", or ").count();
    if before.contains(LOOKS) && choices(before) < choices(now) {
        return true;
    }
    let mut now = words(now);
    !words(before).all(|word| now.any(|other| other == word))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    words.filter(|word| !word.is_empty() && !has_digit(word))
}

fn has_digit(text: &str) -> bool {
    text.contains(|letter: char| letter.is_ascii_digit())
}

/// Returns the words before shrinking without the leading clauses that the present words share. A clause that names a
/// place stays.
fn beyond<'a>(before: &'a str, now: &str) -> &'a str {
    let mut rest = before;
    for clause in now.split(CLAUSE).take_while(|clause| !has_digit(clause)) {
        let Some(more) = rest.strip_prefix(clause).and_then(|more| more.strip_prefix(CLAUSE)) else { break };
        rest = more;
    }
    rest
}

/// Separator between the clauses of a finding's words. The most general clause comes first.
const CLAUSE: &str = ": ";

impl Found {
    /// Returns what was found and what was said of it before it was shrunk. An error of a subject brings lines of its own, such
    /// as those of a traceback.
    pub fn text(&self) -> String {
        let mut text = self.finding.to_string();
        if let Some(before) = &self.unshrunk {
            text += "; before shrinking: ";
            text += beyond(before, &self.finding.what);
        }
        text
    }
}

impl fmt::Display for Found {
    /// Writes one line, whatever texts a file held.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text().replace(['\n', '\r'], " "))
    }
}

/// Reads at most [`EARLIER_MAX`] earlier runs.
fn few<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Earlier>, D::Error> {
    let all = Vec::deserialize(deserializer)?;
    if all.len() > EARLIER_MAX {
        let what = format!("{} earlier runs; at most {EARLIER_MAX} are taken", all.len());
        return Err(serde::de::Error::custom(what));
    }
    Ok(all)
}

/// Reason why bytes are not a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Bytes that are not UTF-8 text.
    #[error("byte {at} is not UTF-8; a case file is JSON text")]
    NotText {
        /// Offset of the first wrong byte.
        at: usize,
    },
    /// Text that is not JSON, or has no version.
    #[error("no case file: {what}")]
    NotACase {
        /// Message of the parser, with line and column.
        what: String,
    },
    /// A case in a version that this program does not read.
    #[error("version: {got} is not supported; this program reads version {CASE_VERSION}")]
    Version {
        /// Version in the file.
        got: u64,
    },
    /// A field that is missing, unknown, of the wrong type, or out of range.
    #[error("{field}: {what}")]
    Field {
        /// Path of the field, such as `problem.sequences[3].q.len`.
        field: String,
        /// Description of the error, with line and column.
        what: String,
    },
}

/// Reason why a file gives no case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A file that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        source: io::Error,
    },
    /// A file over the size limit.
    #[error("{}: larger than {CASE_BYTES_MAX} bytes, the limit of a case file", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// A file that holds no case.
    #[error("{}: {source}", path.display())]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser.
        source: ParseError,
    },
}

impl Case {
    /// Returns the case with what was found in it as it was drawn, and with the runs that came before.
    pub fn as_drawn(self, finding: &Finding) -> Case {
        let found = Found::drawn(finding.clone().storable());
        Case { before: finding.before.clone(), found: Some(found), ..self }
    }

    /// Returns a case in the current version, with generated inputs.
    pub fn new(subject: Subject, schedule_seed: u64, problem: Problem) -> Case {
        let (story, found) = (None, None);
        Case {
            version: CASE_VERSION,
            story,
            subject,
            schedule_seed,
            inputs: InputSource::Generated,
            problem,
            before: Vec::new(),
            found,
        }
    }

    /// Reads a case file.
    pub fn load(path: &Path) -> Result<Case, CaseError> {
        let path_of = || path.to_owned();
        let bytes = files::read(path, CASE_BYTES_MAX).map_err(|source| match source.kind() {
            io::ErrorKind::FileTooLarge => CaseError::TooLarge { path: path_of() },
            _ => CaseError::Read { path: path_of(), source },
        })?;
        Case::parse(&bytes).map_err(|source| CaseError::Parse { path: path_of(), source })
    }

    /// Reads a case from bytes.
    pub fn parse(bytes: &[u8]) -> Result<Case, ParseError> {
        parse_versioned(bytes)
    }

    /// Returns the case as readable JSON. Equal cases give equal bytes on every machine.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a case has text keys and finite numbers");
        text.push('\n');
        text
    }

    /// Returns a short name of the problem on its subject: the first 8 hex digits of the digest of their JSON.
    pub fn id(&self) -> String {
        let canonical = serde_json::to_vec(&(&self.subject, &self.problem))
            .expect("a case has text keys and finite numbers");
        blake3::hash(&canonical).to_hex()[..8].to_owned()
    }
}

/// Reads JSON of the current version.
pub(crate) fn parse_versioned<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, ParseError> {
    let text = std::str::from_utf8(bytes).map_err(|error| ParseError::NotText { at: error.valid_up_to() })?;
    check_version(text)?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| ParseError::Field {
        field: field_of(error.path()),
        what: one_line(error.inner()),
    })?;
    deserializer.end().map_err(|error| ParseError::NotACase { what: one_line(&error) })?;
    Ok(read)
}

/// Returns the name of a field by its path; of none, that of the whole.
fn field_of(path: &serde_path_to_error::Path) -> String {
    match path.iter().len() {
        0 => "the file".to_owned(),
        _ => one_line(&path.to_string()),
    }
}

/// Checks the version before anything else. A file of another version then says so, whatever else has changed in it.
fn check_version(text: &str) -> Result<(), ParseError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object with a 'version'")]
    struct Head {
        version: u64,
    }
    match serde_json::from_str::<Head>(text) {
        Ok(Head { version }) if version == u64::from(CASE_VERSION) => Ok(()),
        Ok(Head { version }) => Err(ParseError::Version { got: version }),
        Err(error) => Err(ParseError::NotACase { what: one_line(&error) }),
    }
}

/// Returns a text on one line and of bounded length. Errors quote names from the file, which may hold anything.
fn one_line(text: &impl ToString) -> String {
    text.to_string()
        .chars()
        .take(ERROR_TEXT_MAX)
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_wrong_before_says_more_where_its_words_are_others_and_not_where_its_numbers_are() {
        const NONE: &str = "further from the exact value than rounding explains";
        let missed = format!("{NONE}: looks as if query 237 of sequence 0 missed key 227 (weight 3.9e-1)");
        let again = format!("{NONE}: looks as if query 0 of sequence 3 missed key 1 (weight 1.0e0)");
        let read = format!("{NONE}: looks as if query 0 of sequence 0 took the values of KV head 1");
        assert!(says_more(&missed, NONE) && says_more(&missed, &read) && says_more(&read, &missed));
        assert!(!says_more(&missed, &again) && !says_more(&missed, &missed));
        assert!(!says_more(NONE, &missed) && !says_more(NONE, NONE), "what is wrong now says more");
        let base = format!("{NONE}: looks as if the LSE had base 2");
        let any = format!("{base}, or as if logits were larger");
        assert!(says_more(&base, &any) && says_more(&any, &base) && !says_more(NONE, &any));
        let [saw, as_if] = ["query 1: saw keys 0..9", "query 0: as if it saw keys 0..1"];
        assert!(!says_more(saw, as_if) && says_more(as_if, saw));

        let finding = crate::finding::Finding::new(crate::finding::Check::Envelope, None, NONE.to_owned());
        let mut found = Found::drawn(finding);
        assert_eq!(found.to_string(), format!("envelope: {NONE}"));
        [NONE, &missed, &read].iter().for_each(|before| found.remember(before));
        assert_eq!(found.unshrunk.as_ref(), Some(&missed), "the first");
        let mut found = Found { unshrunk: None, ..found };
        found.remember(&"±".repeat(UNSHRUNK_MAX + 1));
        assert_eq!(found.unshrunk, None, "no word");
        found.remember(&"ß".repeat(UNSHRUNK_MAX + 1));
        assert_eq!(found.unshrunk, Some("ß".repeat(UNSHRUNK_MAX)));
    }
}
