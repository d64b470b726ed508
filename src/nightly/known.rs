//! Known failures, from `corpus/known.toml`: each with its key, a stored case that shows it, a reason and a public
//! source.
//!
//! An entry excuses a failure that is one of its ways to show: of this subject or kin, in one of these checks and
//! tensors, under these conditions, with these words, and not far above the ratios that were seen. Anything else is
//! new. An entry excuses nothing unless its case still fails by its exact key. One whose case fails otherwise, or
//! holds, fails the night, because a list that nobody prunes hides the next failure. A key names its subject, and the
//! entry's case is judged on that one, whatever subject the file names: a stored regression is the same file for every
//! subject.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::conditions::{is_condition, meets};
use super::home::read_toml;
use super::{NightError, Watch};
use crate::backends::BackendError;
use crate::campaign::{Distinct, Fresh, Options, Registered, Subjects};
use crate::replay::replay;
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::failure::{FailureKey, ratio};
use seamproof_judge::files;
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::subject::{Backend, TensorName};
use seamproof_judge::subjects::SubjectName;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::Problem;

/// Multiple of the largest ratio that was seen of a known failure, above which a failure is another one.
const RATIO_MARGIN: f64 = 2.0;

/// The list.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Known {
    #[serde(default)]
    pub(crate) known: Vec<Entry>,
}

/// A known failure.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// The [`FailureKey`] of its case, as reports write it.
    pub(crate) key: String,
    /// Other keys of its case, where it reads memory that holds now this, now that.
    #[serde(default)]
    pub(crate) at_times: Vec<String>,
    /// Other subjects with the same cause.
    #[serde(default)]
    pub(crate) kin: Vec<String>,
    /// Ways in which the cause shows, that of the case among them.
    pub(crate) shows: Vec<Way>,
    /// File of a case that fails so on the key's subject; its path in the list begins at the list's folder.
    pub(crate) case: PathBuf,
    /// The reason why it is not repaired.
    pub(crate) reason: String,
    /// Where that is said in public.
    pub(crate) source: String,
}

/// A way in which a cause shows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Way {
    /// The checks that break.
    pub(crate) checks: Vec<Check>,
    /// The tensors that are wrong; where none is named, the failure has none.
    #[serde(default)]
    pub(crate) tensors: Vec<TensorName>,
    /// Conditions that the problem meets: features of keys, and those of [`conditions`](super::conditions). One on a
    /// sequence is asked of the sequence that failed.
    pub(crate) needs: Vec<String>,
    /// Words in the finding.
    #[serde(default)]
    pub(crate) says: String,
    /// Largest error ÷ bound that was seen. A failure above [`RATIO_MARGIN`] times it is another one, as is one without
    /// a ratio.
    pub(crate) ratio: Option<f64>,
}

/// A failure that may be known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure<'a> {
    key: &'a FailureKey,
    finding: &'a Finding,
    /// Its smallest problem; absent where the failure is no problem.
    problem: Option<&'a Problem>,
    /// Largest error ÷ bound among its cases.
    worst: f64,
}

/// An entry, and whether it is still true.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listed {
    pub(crate) key: String,
    pub(crate) standing: Standing,
}

/// Whether an entry is still true.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    /// Its case fails as the entry says.
    True,
    /// Its case does something else, which is told; the entry has to go.
    Stale(String),
    /// Its case could not be judged, for this reason.
    Unchecked(String),
}

/// A subject whose known failures a campaign counts as they were drawn.
pub(super) struct Excusing<'a> {
    pub(super) subject: &'a Registered,
    pub(super) known: &'a Known,
}

impl Subjects for Excusing<'_> {
    fn name(&self) -> &str {
        self.subject.name()
    }

    fn options(&self, seed: u64) -> Options {
        self.subject.options(seed)
    }

    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        self.subject.backend(options)
    }

    fn fresh(&self) -> Option<Fresh> {
        self.subject.fresh()
    }

    fn known(&self, finding: &Finding, problem: &Problem) -> Option<&str> {
        let key = FailureKey::of(finding, self.name(), problem);
        self.known.of(Failure::of(&key, finding, problem)).map(|entry| entry.key.as_str())
    }
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

    /// Returns the entry that excuses a failure.
    pub(crate) fn of(&self, failure: Failure<'_>) -> Option<&Entry> {
        self.known.iter().find(|entry| entry.has(failure))
    }

    /// Judges the cases of all entries again, several at a time, but of those from outside of which the night runs
    /// neither the subject nor kin.
    pub(super) fn listed(&self, subjects: &[String], watch: &Watch) -> Vec<Listed> {
        let control = watch.begin("known failures");
        let listed = |entry: &Entry| {
            let standing = match control.stopped() {
                true => Standing::Unchecked("the night was interrupted".to_owned()),
                false => entry.standing(),
            };
            Listed { key: entry.key.clone(), standing }
        };
        self.known.par_iter().filter(|entry| entry.is_asked(subjects)).map(listed).collect()
    }

    /// Returns the entries that are still true, which alone excuse failures.
    pub(super) fn still_true(&self, listed: &[Listed]) -> Known {
        let is_true = |entry: &&Entry| {
            listed.iter().any(|listed| listed.key == entry.key && listed.standing == Standing::True)
        };
        Known { known: self.known.iter().filter(is_true).cloned().collect() }
    }
}

impl<'a> Failure<'a> {
    /// Returns the failure of one case.
    pub(crate) fn of(key: &'a FailureKey, finding: &'a Finding, problem: &'a Problem) -> Failure<'a> {
        Failure { key, finding, problem: Some(problem), worst: ratio(finding) }
    }

    /// Returns a failure of a campaign.
    pub(crate) fn of_distinct(distinct: &'a Distinct) -> Failure<'a> {
        let Distinct { key, found, worst, smallest, .. } = distinct;
        Failure { key, finding: &found.finding, problem: smallest.as_deref(), worst: *worst }
    }
}

impl Way {
    /// Returns what is wrong with it, if anything is.
    fn wrong(&self) -> Option<String> {
        if self.checks.is_empty() {
            return Some("shows in no check; name those that break".to_owned());
        }
        if let Some(words) = self.needs.iter().find(|words| !is_condition(words)) {
            return Some(format!("needs '{words}', which is no feature of a key and no other condition"));
        }
        let sound = self.ratio.is_none_or(|ratio| ratio.is_finite() && ratio > 0.0);
        (!sound).then(|| "has a ratio that no error can have; write error ÷ bound".to_owned())
    }

    /// Whether a failure shows so, whatever its subject.
    fn has(&self, failure: Failure<'_>) -> bool {
        let Failure { key, finding, problem, worst } = failure;
        let (sequence, is_near) =
            (finding.place.sequence, self.ratio.is_none_or(|seen| worst <= RATIO_MARGIN * seen));
        let tensor = match key.tensor {
            None => self.tensors.is_empty(),
            Some(tensor) => self.tensors.contains(&tensor),
        };
        let needs =
            problem.is_some_and(|problem| self.needs.iter().all(|words| meets(problem, sequence, words)));
        self.checks.contains(&key.check)
            && tensor
            && needs
            && is_near
            && finding.to_string().contains(&self.says)
    }
}

impl Entry {
    /// Returns what is wrong with the entry itself, if anything is.
    fn wrong(&self) -> Option<String> {
        let fields = [("reason", &self.reason), ("source", &self.source)];
        if let Some((field, _)) = fields.into_iter().find(|(_, text)| text.trim().is_empty()) {
            return Some(format!("has no {field}; say it"));
        }
        if self.shows.is_empty() {
            return Some("shows in no way; describe that of its case".to_owned());
        }
        if let Some(what) = self.shows.iter().find_map(Way::wrong) {
            return Some(what);
        }
        let Some(subject) = FailureKey::subject_of(&self.key) else {
            return Some("names no subject; write its key as reports do: CHECK · SUBJECT · …".to_owned());
        };
        if let Some(other) = self.at_times.iter().find(|key| FailureKey::subject_of(key) != Some(subject)) {
            return Some(format!("is of another subject than '{other}', which its case shows at times"));
        }
        // A subject from outside need not be installed here.
        let named = std::iter::once(subject).chain(self.kin.iter().map(String::as_str));
        for subject in named.filter(|subject| !is_outside(subject)) {
            if let Err(error) = Registered::with(subject.to_owned(), Options::new()) {
                return Some(format!("names a subject that cannot be made: {error}"));
            }
        }
        Case::load(&self.case).err().map(|error| format!("has a case that cannot be read: {error}"))
    }

    /// Whether a failure is one that the entry names.
    fn has(&self, failure: Failure<'_>) -> bool {
        self.names(&failure.key.backend) && self.shows.iter().any(|way| way.has(failure))
    }

    /// Whether a subject is its own, or kin.
    fn names(&self, subject: &str) -> bool {
        FailureKey::subject_of(&self.key) == Some(subject) || self.kin.iter().any(|kin| kin == subject)
    }

    /// Whether a night of these subjects can judge the entry, and may have use for it.
    fn is_asked(&self, subjects: &[String]) -> bool {
        let is_own = FailureKey::subject_of(&self.key).is_some_and(|subject| !is_outside(subject));
        is_own || subjects.iter().any(|subject| self.names(subject))
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
            Ok(Verdict::Finding(finding)) => self.standing_of(&finding, &case.problem, name),
            Ok(Verdict::Infrastructure(why)) => Standing::Unchecked(why),
            Ok(verdict) => Standing::Stale(format!("does not fail any more: {verdict}")),
            Err(error) => Standing::Unchecked(error.to_string()),
        }
    }

    /// Compares what the case shows with the keys, and with the ways to show.
    fn standing_of(&self, finding: &Finding, problem: &Problem, name: &str) -> Standing {
        let key = FailureKey::of(finding, name, problem);
        let words = key.to_string();
        if words != self.key && !self.at_times.contains(&words) {
            return Standing::Stale(format!("fails as '{words}'"));
        }
        match self.has(Failure::of(&key, finding, problem)) {
            true => Standing::True,
            false => Standing::Stale(format!("fails in none of the ways that it names: {finding}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a stored defect with its finding, on the subject that it names.
    fn defect(name: &str) -> (Case, Finding) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("corpus/defects/{name}.json"));
        let case = Case::load(&file).unwrap();
        let Ok(Verdict::Finding(finding)) = replay(&case) else { panic!("a defect fails") };
        (case, *finding)
    }

    /// Returns a stored defect in a folder of its own, and the list that names it after an edit.
    fn listed(edit: impl Fn(String) -> String) -> (tempfile::TempDir, Result<Known, NightError>) {
        let place = tempfile::tempdir().unwrap();
        let (case, finding) = defect("te-reorder-tail");
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem).to_string();
        std::fs::write(place.path().join("case.json"), case.to_json()).unwrap();
        let (check, tensor) = (finding.check, finding.tensor.unwrap());
        let entry = format!(
            "[[known]]\nkey = \"{key}\"\nshows = [{{ checks = [\"{check}\"], tensors = [\"{tensor}\"], needs = [] }}]\n\
             case = \"case.json\"\nreason = \"planted\"\nsource = \"https://example.org\"\n"
        );
        let path = place.path().join("known.toml");
        std::fs::write(&path, edit(entry)).unwrap();
        (place, Known::read(&path))
    }

    fn judged(known: &Known) -> Vec<Listed> {
        known.listed(&[], &Watch::default())
    }

    fn standing(known: &Known) -> Standing {
        let [listed] = &judged(known)[..] else { panic!("one entry") };
        listed.standing.clone()
    }

    #[test]
    fn an_entry_is_true_while_its_case_fails_by_its_exact_key() {
        let (place, known) = listed(|text| text);
        let known = known.unwrap();
        assert_eq!(standing(&known), Standing::True);
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
        // A key without one of the features, and one with another check.
        let of = |edit: fn(String) -> String| {
            let (_place, known) = listed(edit);
            standing(&known.unwrap())
        };
        let fewer = of(|text| text.replacen("backward, ", "", 1).replacen("causal, ", "", 1));
        assert!(matches!(&fewer, Standing::Stale(what) if what.starts_with("fails as '")), "{fewer:?}");
        let other = of(|text| text.replace("key = \"", "key = \"other "));
        assert!(matches!(&other, Standing::Stale(what) if what.starts_with("fails as '")), "{other:?}");
    }

    #[test]
    fn a_case_may_fail_by_other_keys_that_are_named_and_in_no_way_that_is_not() {
        let of = |edit: &dyn Fn(String) -> String| {
            let (_place, known) = listed(edit);
            standing(&known.unwrap())
        };
        let at_times = |text: String| {
            let key = text.lines().find_map(|line| line.strip_prefix("key = ")).unwrap();
            let other =
                format!("key = \"sentinel · {}\"\nat_times = [{key}]", key.split(" · ").nth(1).unwrap());
            text.replace(&format!("key = {key}"), &other)
        };
        assert_eq!(of(&at_times), Standing::True);
        let narrow = of(&|text| text.replace("needs = []", "needs = [\"softcap\"]"));
        assert!(matches!(&narrow, Standing::Stale(what) if what.contains("none of the ways")), "{narrow:?}");
    }

    /// Test with a failure that the list names, and with ones that differ from it in one thing each.
    #[test]
    fn an_entry_excuses_what_it_names_and_nothing_else() {
        let edit = |text: String| {
            let (before, rest) = text.split_once("shows = ").unwrap();
            let (_, after) = rest.split_once('\n').unwrap();
            let way =
                "checks = ['envelope'], tensors = ['dq', 'dk'], needs = ['backward', 'queries without keys']";
            format!("{before}kin = ['cuda']\nshows = [{{ {way}, says = 'got 0,', ratio = 2.1 }}]\n{after}")
        };
        let known = listed(edit).1.unwrap();
        let case = "corpus/defects/torch-efficient-no-keys.json";
        let problem = Case::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(case)).unwrap().problem;
        let forward = seamproof_oracle::ProblemFields {
            pass: seamproof_oracle::Pass::Forward,
            ..problem.clone().into()
        };
        let forward = Problem::new(forward).unwrap();
        let seen = Finding {
            ratio: Some(4.1),
            got: Some("0".to_owned()),
            expected: Some("1".to_owned()),
            ..Finding::new(Check::Envelope, Some(TensorName::Dq), String::new())
        };
        let of = |subject: &str, finding: &Finding, problem: &Problem| {
            let key = FailureKey::of(finding, subject, problem);
            known.of(Failure::of(&key, finding, problem)).is_some()
        };
        let at = |sequence| Finding {
            place: seamproof_judge::finding::Place { sequence: Some(sequence), ..Default::default() },
            ..seen.clone()
        };
        let own = FailureKey::subject_of(&known.known[0].key).unwrap();
        assert!(of("cuda", &seen, &problem) && of(own, &seen, &problem) && of("cuda", &at(0), &problem));
        assert!(of("cuda", &Finding { tensor: Some(TensorName::Dk), ..seen.clone() }, &problem));
        assert!(!of("emulated", &seen, &problem), "another subject");
        assert!(!of("cuda", &Finding { check: Check::Exact, ..seen.clone() }, &problem), "another check");
        assert!(
            !of("cuda", &Finding { tensor: Some(TensorName::Dv), ..seen.clone() }, &problem),
            "another tensor"
        );
        assert!(!of("cuda", &Finding { tensor: None, ..seen.clone() }, &problem), "no tensor");
        assert!(!of("cuda", &seen, &forward), "without a feature that it needs");
        assert!(!of("cuda", &at(1), &problem), "in a sequence with keys");
        assert!(!of("cuda", &Finding { got: Some("2".to_owned()), ..seen.clone() }, &problem), "other words");
        assert!(
            !of("cuda", &Finding { ratio: Some(4.3), ..seen.clone() }, &problem),
            "far above what was seen"
        );
        assert!(!of("cuda", &Finding { ratio: None, ..seen.clone() }, &problem), "no ratio");
        let key = FailureKey::of(&seen, "cuda", &problem);
        let lone = Failure { problem: None, ..Failure::of(&key, &seen, &problem) };
        assert!(known.of(lone).is_none(), "no problem");
    }

    #[test]
    fn what_does_not_show_any_more_or_could_not_be_tried_excuses_nothing() {
        let (place, known) = listed(|text| text);
        let known = known.unwrap();
        let (case, finding) = defect("te-reorder-tail");
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem);
        let is_known = |known: &Known| {
            known.still_true(&judged(known)).of(Failure::of(&key, &finding, &case.problem)).is_some()
        };
        assert!(is_known(&known));
        let held = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions/fa-2515-no-sequences.json");
        std::fs::copy(held, place.path().join("case.json")).unwrap();
        assert!(!is_known(&known) && matches!(standing(&known), Standing::Stale(_)));
        std::fs::remove_file(place.path().join("case.json")).unwrap();
        assert!(!is_known(&known) && matches!(standing(&known), Standing::Unchecked(_)));
        assert!(known.still_true(&[]).known.is_empty(), "it was not asked");
    }

    #[test]
    fn an_entry_is_asked_where_the_night_runs_its_subject_or_kin() {
        let edit = |text: String| {
            let subject = FailureKey::subject_of(&text).unwrap().to_owned();
            text.replacen(&subject, "python:own.py:own", 1)
                .replace("shows", "kin = ['python:kin.py:kin']\nshows")
        };
        let known = listed(edit).1.unwrap();
        let asked = |subject: &str| !known.listed(&[subject.to_owned()], &Watch::default()).is_empty();
        assert!(asked("python:own.py:own") && asked("python:kin.py:kin"));
        assert!(!asked("python:other.py:other") && !asked("emulated"));
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
        assert!(refused(|text| text.replace("[{ ", "[] # ")).contains("shows in no way"));
        assert!(refused(|text| text.replace("checks = [\"poison\"], ", "")).contains("checks"));
        assert!(refused(|text| text.replace("[\"poison\"]", "[]")).contains("shows in no check"));
        assert!(refused(|text| text.replace("needs = []", "needs = ['slac']")).contains("needs 'slac'"));
        assert!(refused(|text| text.replace("needs = []", "needs = [], ratio = -1.0")).contains("ratio"));
        assert!(
            refused(|text| text.replace("shows", "at_times = ['a · b']\nshows")).contains("another subject")
        );
        let unknown = refused(|text| text.replace(" · emulated", " · abacus"));
        assert!(unknown.contains("write emulated+reorder-writes-rows-twice"), "{unknown}");
        assert!(refused(|text| text.replace("shows", "kin = ['abacus']\nshows")).contains("cannot be made"));
        assert_eq!(Known::read(Path::new("/nowhere/known.toml")).unwrap(), Known::default());
        let device = Known::read(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(device.contains("is no regular file"), "{device}");
    }

    /// Test that the stored list is sound: each entry names the way in which its own case shows.
    #[test]
    fn the_stored_list_is_read() {
        let known = Known::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/known.toml")).unwrap();
        assert!(!known.known.is_empty());
        for entry in &known.known {
            let problem = Case::load(&entry.case).unwrap().problem;
            let is_met = |way: &Way| way.needs.iter().all(|words| meets(&problem, None, words));
            let is_of_key = |way: &Way| {
                let check = entry.key.split([' ']).next().unwrap_or_default();
                let tensor = entry.key.split(" · ").nth(2).unwrap_or_default();
                let names = |named: &TensorName| named.to_string() == tensor;
                way.checks.iter().any(|named| named.name() == check)
                    && (way.tensors.is_empty() || way.tensors.iter().any(names))
            };
            assert!(entry.shows.iter().any(|way| is_met(way) && is_of_key(way)), "{}", entry.key);
        }
    }
}
