//! Failures that are known: each with its key, a stored case that shows it, a reason and a public source.
//!
//! A key names its subject, on which the entry's case is judged, whatever subject the file names for itself: a stored
//! regression is the same file for every subject of a night.
//!
//! The list must stay true. A finding of a known key is no news; an entry whose case does not fail by that key any more is
//! an error, since a list that nobody prunes hides the next failure of the same key.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::home::JSON_BYTES_MAX;
use crate::campaign::{Options, Registered, Subjects};
use crate::replay::replay;
use seamproof_judge::case::{Case, CaseError, Subject};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::verdict::Verdict;

/// Why a list cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is no list.
    #[error("{}: {what}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong, on one line.
        what: String,
    },
    /// An entry whose case is none.
    #[error("{}: the entry '{key}': {source}", path.display())]
    Case {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// What is wrong with its case.
        source: CaseError,
    },
    /// An entry that says nothing.
    #[error("{}: the entry '{key}' has no {field}; say it", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// What it lacks.
        field: &'static str,
    },
    /// An entry whose key is none.
    #[error("{}: the entry '{key}': name its subject as reports do: CHECK · SUBJECT · …", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
    },
    /// An entry whose subject there is not.
    #[error("{}: the entry '{key}': {what}", path.display())]
    Subject {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// Why there is none.
        what: String,
    },
    /// Two entries of one key.
    #[error("{}: '{key}' is there twice", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
}

/// The list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Its entries.
    #[serde(default)]
    pub known: Vec<Entry>,
    #[serde(skip)]
    folder: PathBuf,
}

/// A known failure.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its [`FailureKey`], as reports write it.
    pub key: String,
    /// A stored case that fails so on the key's subject; its path begins at the list.
    pub case: PathBuf,
    /// Why it is not repaired.
    pub reason: String,
    /// Where that is said in public.
    pub source: String,
}

/// What became of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Its case fails as the entry says.
    True,
    /// It does not, and what it does instead: the entry has to go.
    Stale(String),
    /// Its subject cannot be had here.
    Unchecked(String),
}

impl Known {
    /// Reads a list; none where there is no file.
    pub fn read(path: &Path) -> Result<Known, KnownError> {
        if files::is_absent(path) {
            return Ok(Known::default());
        }
        let unread = |source| KnownError::Read { path: path.to_owned(), source };
        let bytes = files::read(path, JSON_BYTES_MAX).map_err(unread)?;
        let text = String::from_utf8(bytes).map_err(|_| unread(io::Error::other("is no text")))?;
        let wrong = |error: toml::de::Error| KnownError::Text {
            path: path.to_owned(),
            what: error.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
        };
        let mut known: Known = toml::from_str(&text).map_err(wrong)?;
        known.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        known.check(path)?;
        Ok(known)
    }

    /// Now, and not when the night is over.
    fn check(&self, path: &Path) -> Result<(), KnownError> {
        let mut keys = BTreeSet::new();
        for entry in &self.known {
            self.check_entry(entry, path)?;
            if !keys.insert(&entry.key) {
                return Err(KnownError::Twice { path: path.to_owned(), key: entry.key.clone() });
            }
        }
        Ok(())
    }

    fn check_entry(&self, entry: &Entry, path: &Path) -> Result<(), KnownError> {
        let Entry { key, reason, source, case } = entry;
        let (path, key) = (path.to_owned(), key.clone());
        let fields = [("reason", reason), ("source", source)];
        if let Some((field, _)) = fields.into_iter().find(|(_, text)| text.trim().is_empty()) {
            return Err(KnownError::Empty { path, key, field });
        }
        let Some(subject) = FailureKey::subject_of(&key) else { return Err(KnownError::Key { path, key }) };
        if let Err(error) = Registered::with(subject.to_owned(), Options::new()) {
            return Err(KnownError::Subject { path, key, what: error.to_string() });
        }
        match Case::load(&self.folder.join(case)) {
            Ok(_) => Ok(()),
            Err(source) => Err(KnownError::Case { path, key, source }),
        }
    }

    /// The entry of a key.
    pub fn of(&self, key: &str) -> Option<&Entry> {
        self.known.iter().find(|entry| entry.key == key)
    }

    /// Judges every entry's case again, on the subject of its key; `night` are the subjects of the night.
    pub fn standings(&self, night: &[Registered]) -> Result<Vec<(&Entry, Standing)>, CaseError> {
        self.known.iter().map(|entry| Ok((entry, self.standing(entry, night)?))).collect()
    }

    /// True if the case fails so on any of its subjects; what the last of them says otherwise.
    fn standing(&self, entry: &Entry, night: &[Registered]) -> Result<Standing, CaseError> {
        let mut case = Case::load(&self.folder.join(&entry.case))?;
        let mut standing = Standing::Unchecked("the key names no subject".to_owned());
        for subject in subjects(entry, &case, night) {
            case.subject = subject;
            standing = standing_of(&entry.key, &case);
            if standing == Standing::True {
                break;
            }
        }
        Ok(standing)
    }
}

/// The subjects on which an entry's case is judged: the one that its key names, with the case's own options where the case
/// is that subject's, and otherwise with those that the night fixes, as its stored regressions are judged.
fn subjects(entry: &Entry, case: &Case, night: &[Registered]) -> Vec<Subject> {
    let Some(name) = FailureKey::subject_of(&entry.key) else { return Vec::new() };
    if case.subject.name == name {
        return vec![case.subject.clone()];
    }
    let of = |options: &Options| Subject { name: name.to_owned(), options: options.clone() };
    let of_night = night.iter().filter(|subject| subject.name() == name);
    let subjects: Vec<Subject> = of_night.map(|subject| of(subject.fixed())).collect();
    if subjects.is_empty() { vec![of(&Options::new())] } else { subjects }
}

/// What became of an entry of this key whose case, on its subject, is this.
fn standing_of(key: &str, case: &Case) -> Standing {
    let Subject { name, options } = &case.subject;
    let subject = Registered::with(name.clone(), options.clone()).map_err(|error| error.to_string());
    if let Err(why) = subject.and_then(|subject| subject.ready()) {
        return Standing::Unchecked(why);
    }
    match replay(case) {
        Ok(Verdict::Finding(finding)) => match FailureKey::of(&finding, name, &case.problem).to_string() {
            other if other != key => Standing::Stale(format!("fails as '{other}'")),
            _ => Standing::True,
        },
        Ok(Verdict::Infrastructure(why)) => Standing::Unchecked(why),
        Ok(verdict) => Standing::Stale(format!("does not fail any more: {verdict}")),
        Err(error) => Standing::Unchecked(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stored defect, its key, and the list that says so.
    fn listed(edit: impl Fn(String) -> String) -> (tempfile::TempDir, Result<Known, KnownError>) {
        let place = tempfile::tempdir().expect("a temporary directory");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects");
        let case = Case::load(&folder.join("te-reorder-tail.json")).expect("the case is there");
        let Ok(Verdict::Finding(finding)) = replay(&case) else { panic!("a defect fails") };
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem).to_string();
        std::fs::write(place.path().join("case.json"), case.to_json()).expect("a file");
        let entry = format!(
            "[[known]]\nkey = \"{key}\"\ncase = \"case.json\"\nreason = \"planted\"\nsource = \"https://example.org\"\n"
        );
        let path = place.path().join("known.toml");
        std::fs::write(&path, edit(entry)).expect("a file");
        (place, Known::read(&path))
    }

    fn standings(known: &Known) -> Vec<Standing> {
        known.standings(&[]).expect("the cases read").into_iter().map(|(_, standing)| standing).collect()
    }

    #[test]
    fn an_entry_is_true_while_its_case_fails_by_its_key() {
        let (place, known) = listed(|text| text);
        let known = known.expect("a list");
        assert_eq!(standings(&known), [Standing::True]);
        assert!(known.of(&known.known[0].key).is_some() && known.of("another").is_none());
        // The file may name any subject for itself.
        let path = place.path().join("case.json");
        let mut case = Case::load(&path).expect("the case");
        case.subject.name = "emulated".to_owned();
        std::fs::write(&path, case.to_json()).expect("a file");
        assert_eq!(standings(&known), [Standing::True]);
        // A problem on which that subject is right.
        let held = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions/fa-2515-no-sequences.json");
        std::fs::copy(held, &path).expect("a copy");
        let said = standings(&known);
        assert!(
            matches!(&said[..], [Standing::Stale(what)] if what.ends_with("every check holds")),
            "{said:?}"
        );
        let (_place, known) = listed(|text| text.replace("key = \"", "key = \"other "));
        assert!(matches!(&standings(&known.expect("a list"))[..], [Standing::Stale(_)]));
    }

    /// A subject of a night may have options that an entry cannot name: it is judged as the night's regressions are.
    #[test]
    fn an_entry_is_judged_with_the_options_of_the_night_s_subject() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
        let case = Case::load(&folder.join("te-1212-window-one-key-short.json")).expect("the case is there");
        let entry = |key: &str| Entry {
            key: key.to_owned(),
            case: PathBuf::from("case.json"),
            reason: "planted".to_owned(),
            source: "https://example.org".to_owned(),
        };
        let night =
            ["emulated:q_tile=2", "emulated:q_tile=4", "cuda"].map(|text| Registered::new(text).unwrap());
        let named = |key: &str| -> Vec<String> {
            let tile = |subject: Subject| subject.options.get("q_tile").cloned().unwrap_or_default();
            subjects(&entry(key), &case, &night).into_iter().map(tile).collect()
        };
        assert_eq!(named("exact · emulated · out"), [""], "the case's own subject, with its own options");
        let mut other = case.clone();
        other.subject.name = "cuda".to_owned();
        let tiles = subjects(&entry("exact · emulated · out"), &other, &night);
        assert_eq!(
            tiles.iter().map(|subject| subject.options["q_tile"].as_str()).collect::<Vec<_>>(),
            ["2", "4"]
        );
        let planted = subjects(&entry("exact · window-off-by-one · out"), &case, &night);
        assert!(planted.len() == 1 && planted[0].options.is_empty());
    }

    #[test]
    fn an_entry_says_why_and_a_key_is_there_once() {
        let of = |edit: fn(String) -> String| listed(edit).1.map(|_| ()).expect_err("refused").to_string();
        assert!(of(|text| text.replace("planted", " ")).contains("has no reason"));
        assert!(of(|text| text.replace("https://example.org", "")).contains("has no source"));
        assert!(of(|text| text.replace("source", "sauce")).contains("known.toml"));
        assert!(of(|text| format!("{text}\n{text}")).contains("twice"));
        assert!(of(|text| text.replace(" · ", ", ")).contains("name its subject"));
        assert!(
            of(|text| text.replace(" · emulated", " · abacus"))
                .contains("write emulated+reorder-writes-rows-twice")
        );
        let nowhere = Known::read(Path::new("/nowhere/known.toml"));
        assert_eq!(nowhere.expect("no list is an empty one"), Known::default());
        let device = Known::read(Path::new("/dev/null")).map(|_| ()).expect_err("refused").to_string();
        assert!(device.contains("is no regular file"), "{device}");
    }
}
