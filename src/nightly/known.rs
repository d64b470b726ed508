//! Known failures, from `corpus/known.toml`: each with its key, a stored case that shows it, a reason and a public
//! source.
//!
//! A failure of a listed key is no news, nor is one of the same check and tensor that needs more features. The list must
//! stay true: an entry whose case does not fail by its key any more fails the night, because a list that nobody prunes
//! hides the next failure of the same key. A key names its subject, and the entry's case is judged on that one, whatever
//! subject the file names: a stored regression is the same file for every subject.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::home::read_toml;
use super::{NightError, Watch};
use crate::campaign::{Options, Registered};
use crate::replay::replay;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;

/// The list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Known {
    #[serde(default)]
    pub(crate) known: Vec<Entry>,
}

/// A known failure.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Its [`FailureKey`], as reports write it.
    pub(crate) key: String,
    /// Other failures with the same cause, which no case shows.
    #[serde(default)]
    pub(crate) also: Vec<Kin>,
    /// File of a case that fails so on the key's subject; its path in the list begins at the list's folder.
    pub(crate) case: PathBuf,
    /// The reason why it is not repaired.
    pub(crate) reason: String,
    /// Where that is said in public.
    pub(crate) source: String,
}

/// Failures with the cause of an entry, whichever check sees them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kin {
    /// Their subjects; that of the entry's key where none is named.
    #[serde(default)]
    pub(crate) subjects: Vec<String>,
    /// Their tensors; failures without one where none is named.
    #[serde(default)]
    pub(crate) tensors: Vec<String>,
    /// Features that they all need, as keys write them.
    pub(crate) features: Vec<String>,
}

/// An entry, and whether it is still true.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Listed {
    pub(crate) key: String,
    pub(crate) standing: Standing,
}

/// Whether an entry is still true.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    /// Its case fails as the entry says.
    True,
    /// Its case does something else, which is told; the entry has to go.
    Stale(String),
    /// Its case could not be judged, for this reason.
    Unchecked(String),
}

/// Whether a name is that of a subject outside of this project.
fn is_outside(subject: &str) -> bool {
    SubjectName::new(subject, Options::new()).is_outside()
}

impl Known {
    /// Reads a list, and checks its entries before anything is run; the list is empty where there is no file.
    pub(crate) fn read(path: &Path) -> Result<Known, NightError> {
        if files::is_absent(path) {
            return Ok(Known::default());
        }
        let mut known: Known = read_toml(path)?;
        for entry in &mut known.known {
            entry.case = path.with_file_name(&entry.case);
        }
        for (number, entry) in known.known.iter().enumerate() {
            let wrong = match known.known[..number].iter().any(|other| other.key == entry.key) {
                true => Some("is there twice".to_owned()),
                false => entry.wrong(),
            };
            if let Some(what) = wrong {
                return Err(NightError::Known { path: path.to_owned(), key: entry.key.clone(), what });
            }
        }
        Ok(known)
    }

    /// Returns the entry of a failure: that of its own key, or one that needs fewer features. A case that was not shrunk
    /// to the end, or not at all, has features that its failure does not need.
    pub(crate) fn of(&self, key: &FailureKey) -> Option<&Entry> {
        let words = key.to_string();
        let own = self.known.iter().find(|entry| entry.key == words);
        own.or_else(|| self.known.iter().find(|entry| entry.names(key)))
    }

    /// Judges the cases of all entries again, but of subjects from outside that the night does not run.
    pub(super) fn listed(&self, subjects: &[String], watch: &Watch) -> Vec<Listed> {
        let control = watch.begin("known failures");
        let listed = |entry: &Entry| {
            let standing = match control.stopped() {
                true => Standing::Unchecked("the night was interrupted".to_owned()),
                false => entry.standing(),
            };
            Listed { key: entry.key.clone(), standing }
        };
        self.known.iter().filter(|entry| entry.is_asked(subjects)).map(listed).collect()
    }
}

impl Kin {
    /// Whether a failure is among them; `own` is the subject where none is named.
    fn has(&self, failure: &FailureKey, own: &str) -> bool {
        let subject = match &self.subjects[..] {
            [] => failure.backend == own,
            named => named.contains(&failure.backend),
        };
        let tensor = match failure.tensor {
            None => self.tensors.is_empty(),
            Some(tensor) => self.tensors.contains(&tensor.to_string()),
        };
        let needs = |feature: &String| failure.features.contains(feature.as_str());
        subject && tensor && self.features.iter().all(needs)
    }
}

impl Entry {
    /// Returns what is wrong with the entry itself, if anything is.
    fn wrong(&self) -> Option<String> {
        let fields = [("reason", &self.reason), ("source", &self.source)];
        if let Some((field, _)) = fields.into_iter().find(|(_, text)| text.trim().is_empty()) {
            return Some(format!("has no {field}; say it"));
        }
        let Some(subject) = FailureKey::subject_of(&self.key) else {
            return Some("names no subject; write its key as reports do: CHECK · SUBJECT · …".to_owned());
        };
        // A subject from outside need not be installed here.
        if !is_outside(subject)
            && let Err(error) = Registered::with(subject.to_owned(), Options::new())
        {
            return Some(format!("names a subject that cannot be made: {error}"));
        }
        Case::load(&self.case).err().map(|error| format!("has a case that cannot be read: {error}"))
    }

    /// Whether a failure is one that the entry names.
    fn names(&self, failure: &FailureKey) -> bool {
        failure.shows(&self.key) || self.is_kin(failure)
    }

    fn is_kin(&self, failure: &FailureKey) -> bool {
        let own = FailureKey::subject_of(&self.key).unwrap_or_default();
        self.also.iter().any(|kin| kin.has(failure, own))
    }

    /// Whether a night of these subjects can judge the entry.
    fn is_asked(&self, subjects: &[String]) -> bool {
        FailureKey::subject_of(&self.key)
            .is_none_or(|subject| !is_outside(subject) || subjects.iter().any(|name| name == subject))
    }

    /// Judges the case on the subject that the key names, with the case's own options where it is of that subject.
    fn standing(&self) -> Standing {
        let mut case = match Case::load(&self.case) {
            Ok(case) => case,
            Err(error) => return Standing::Unchecked(error.to_string()),
        };
        let name = FailureKey::subject_of(&self.key).unwrap_or_default();
        if case.subject.name != name {
            case.subject = Subject { name: name.to_owned(), options: Options::new() };
        }
        let subject = Registered::with(name.to_owned(), case.subject.options.clone());
        let subject = subject.map_err(|error| error.to_string());
        if let Err(why) = subject.and_then(|subject| subject.ready()) {
            return Standing::Unchecked(why);
        }
        match replay(&case) {
            Ok(Verdict::Finding(finding)) => {
                let failure = FailureKey::of(&finding, name, &case.problem);
                match failure.to_string() {
                    own if own == self.key || self.is_kin(&failure) => Standing::True,
                    other => Standing::Stale(format!("fails as '{other}'")),
                }
            }
            Ok(Verdict::Infrastructure(why)) => Standing::Unchecked(why),
            Ok(verdict) => Standing::Stale(format!("does not fail any more: {verdict}")),
            Err(error) => Standing::Unchecked(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::finding::{Check, Finding};
    use seamproof_judge::subject::TensorName;

    /// Returns a stored defect in a folder of its own, and the list that names it after an edit.
    fn listed(edit: impl Fn(String) -> String) -> (tempfile::TempDir, Result<Known, NightError>) {
        let place = tempfile::tempdir().unwrap();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/te-reorder-tail.json");
        let case = Case::load(&file).unwrap();
        let Ok(Verdict::Finding(finding)) = replay(&case) else { panic!("a defect fails") };
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem).to_string();
        std::fs::write(place.path().join("case.json"), case.to_json()).unwrap();
        let entry = format!(
            "[[known]]\nkey = \"{key}\"\ncase = \"case.json\"\nreason = \"planted\"\nsource = \"https://example.org\"\n"
        );
        let path = place.path().join("known.toml");
        std::fs::write(&path, edit(entry)).unwrap();
        (place, Known::read(&path))
    }

    fn standing(known: &Known) -> Standing {
        let [listed] = &known.listed(&[], &Watch::default())[..] else { panic!("one entry") };
        listed.standing.clone()
    }

    #[test]
    fn an_entry_is_true_while_its_case_fails_by_its_key() {
        let (place, known) = listed(|text| text);
        let known = known.unwrap();
        assert_eq!(standing(&known), Standing::True);
        let case = Case::load(&place.path().join("case.json")).unwrap();
        let Ok(Verdict::Finding(finding)) = replay(&case) else { panic!("a defect fails") };
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem);
        assert!(known.of(&key).is_some() && known.of(&key.without_features()).is_none());
        // The file may name any subject for itself.
        let path = place.path().join("case.json");
        let mut case = Case::load(&path).unwrap();
        case.subject.name = "emulated".to_owned();
        std::fs::write(&path, case.to_json()).unwrap();
        assert_eq!(standing(&known), Standing::True);
        // The subject is right on this problem.
        let held = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions/fa-2515-no-sequences.json");
        std::fs::copy(held, &path).unwrap();
        let said = standing(&known);
        assert!(matches!(&said, Standing::Stale(what) if what.ends_with("every check holds")), "{said:?}");
        let (_place, known) = listed(|text| text.replace("key = \"", "key = \"other "));
        assert!(matches!(standing(&known.unwrap()), Standing::Stale(_)));
    }

    #[test]
    fn an_entry_may_name_other_failures_of_its_cause() {
        let also = "also = [{ subjects = [\"cuda\"], tensors = [\"dk\"], features = [\"slack\"] }]\n";
        let known = listed(|text| format!("{text}{also}")).1.unwrap();
        let of = |backend: &str, tensor, feature| {
            let finding = Finding::new(Check::Exact, Some(tensor), String::new());
            let key = FailureKey::without_problem(&finding, backend);
            known.of(&FailureKey { features: [feature, "causal"].into(), ..key }).is_some()
        };
        assert!(of("cuda", TensorName::Dk, "slack"));
        assert!(!of("cuda", TensorName::Dk, "sink") && !of("cuda", TensorName::Dq, "slack"));
        assert!(!of("emulated", TensorName::Dk, "slack"));
    }

    #[test]
    fn the_case_of_an_entry_may_fail_in_any_of_its_ways() {
        let other = |also: &str| {
            listed(|text| {
                let (_, key) = text.split_once("key = ").unwrap();
                let (key, rest) = key.split_once('\n').unwrap();
                let subject = FailureKey::subject_of(key).unwrap();
                format!("[[known]]\nkey = \"exact · {subject} · dk\"\nalso = [{also}]\n{rest}")
            })
        };
        let (_place, known) = other("{ tensors = [\"out\"], features = [] }");
        assert_eq!(standing(&known.unwrap()), Standing::True);
        let (_place, known) = other("{ features = [] }");
        assert!(matches!(standing(&known.unwrap()), Standing::Stale(_)));
    }

    #[test]
    fn an_entry_that_says_too_little_is_refused() {
        let refused = |edit: fn(String) -> String| listed(edit).1.unwrap_err().to_string();
        assert!(refused(|text| text.replace("planted", " ")).contains("has no reason"));
        assert!(refused(|text| text.replace("https://example.org", "")).contains("has no source"));
        assert!(refused(|text| text.replace("source", "sauce")).contains("known.toml"));
        assert!(refused(|text| format!("{text}\n{text}")).contains("is there twice"));
        assert!(refused(|text| text.replace("case.json", "nowhere.json")).contains("nowhere.json"));
        assert!(refused(|text| text.replace(" · ", ", ")).contains("names no subject"));
        let unknown = refused(|text| text.replace(" · emulated", " · abacus"));
        assert!(unknown.contains("write emulated+reorder-writes-rows-twice"), "{unknown}");
        assert_eq!(Known::read(Path::new("/nowhere/known.toml")).unwrap(), Known::default());
        let device = Known::read(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(device.contains("is no regular file"), "{device}");
    }
}
