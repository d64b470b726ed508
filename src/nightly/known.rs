//! Failures that are known: each with its key, a stored case that shows it, a reason and a public source.
//!
//! The list must stay true. A finding of a known key is no news; an entry whose case does not fail by that key any more is
//! an error, since a list that nobody prunes hides the next failure of the same key.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::campaign::{FailureKey, Registered};
use crate::case::{Case, CaseError};
use crate::evaluate::replay;
use crate::verdict::Verdict;

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
    /// A stored case that fails so, beside the list.
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
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Known::default()),
            Err(source) => return Err(KnownError::Read { path: path.to_owned(), source }),
        };
        let wrong = |error: toml::de::Error| KnownError::Text {
            path: path.to_owned(),
            what: error.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
        };
        let mut known: Known = toml::from_str(&text).map_err(wrong)?;
        known.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        known.check(path)?;
        Ok(known)
    }

    fn check(&self, path: &Path) -> Result<(), KnownError> {
        let mut keys = BTreeSet::new();
        for Entry { key, reason, source, case } in &self.known {
            let empty =
                [("reason", reason), ("source", source)].into_iter().find(|(_, text)| text.trim().is_empty());
            if let Some((field, _)) = empty {
                return Err(KnownError::Empty { path: path.to_owned(), key: key.clone(), field });
            }
            if !keys.insert(key) {
                return Err(KnownError::Twice { path: path.to_owned(), key: key.clone() });
            }
            // Now, and not when the night is over.
            Case::load(&self.folder.join(case)).map_err(|source| KnownError::Case {
                path: path.to_owned(),
                key: key.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// The entry of a key.
    pub fn of(&self, key: &str) -> Option<&Entry> {
        self.known.iter().find(|entry| entry.key == key)
    }

    /// Judges every entry's case again.
    pub fn standings(&self) -> Result<Vec<(&Entry, Standing)>, CaseError> {
        self.known.iter().map(|entry| Ok((entry, self.standing(entry)?))).collect()
    }

    fn standing(&self, entry: &Entry) -> Result<Standing, CaseError> {
        let case = Case::load(&self.folder.join(&entry.case))?;
        let (name, options) = (&case.subject.name, case.subject.options.clone());
        let ready = Registered::with(name.clone(), options).map_err(|error| error.to_string());
        if let Err(why) = ready.and_then(|subject| subject.ready()) {
            return Ok(Standing::Unchecked(why));
        }
        Ok(match replay(&case) {
            Ok(Verdict::Finding(finding)) => {
                let key = FailureKey::of(&finding, name, &case.problem).to_string();
                if key == entry.key { Standing::True } else { Standing::Stale(format!("fails as '{key}'")) }
            }
            Ok(Verdict::Infrastructure(why)) => Standing::Unchecked(why),
            Ok(verdict) => Standing::Stale(format!("does not fail any more: {}", short(&verdict))),
            Err(error) => Standing::Unchecked(error.to_string()),
        })
    }
}

fn short(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Pass(_) => "every check holds".to_owned(),
        Verdict::Refused(refusal) => format!("refused: {refusal}"),
        other => format!("{other:?}"),
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
        known.standings().expect("the cases read").into_iter().map(|(_, standing)| standing).collect()
    }

    #[test]
    fn an_entry_is_true_while_its_case_fails_by_its_key() {
        let (place, known) = listed(|text| text);
        let known = known.expect("a list");
        assert_eq!(standings(&known), [Standing::True]);
        assert!(known.of(&known.known[0].key).is_some() && known.of("another").is_none());
        // On the right kernel it does not fail.
        let path = place.path().join("case.json");
        let mut case = Case::load(&path).expect("the case");
        case.subject.name = "emulated".to_owned();
        std::fs::write(&path, case.to_json()).expect("a file");
        assert!(matches!(&standings(&known)[..], [Standing::Stale(_)]));
        let (_place, known) = listed(|text| text.replace("key = \"", "key = \"other "));
        assert!(matches!(&standings(&known.expect("a list"))[..], [Standing::Stale(_)]));
    }

    #[test]
    fn an_entry_says_why_and_a_key_is_there_once() {
        let of = |edit: fn(String) -> String| listed(edit).1.map(|_| ()).expect_err("refused").to_string();
        assert!(of(|text| text.replace("planted", " ")).contains("has no reason"));
        assert!(of(|text| text.replace("https://example.org", "")).contains("has no source"));
        assert!(of(|text| text.replace("source", "sauce")).contains("known.toml"));
        assert!(of(|text| format!("{text}\n{text}")).contains("twice"));
        let nowhere = Known::read(Path::new("/nowhere/known.toml"));
        assert_eq!(nowhere.expect("no list is an empty one"), Known::default());
    }
}
