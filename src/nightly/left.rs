//! What killed starts left behind: findings on disk that no report tells of.
//!
//! A night is *unfinished* as long as it has no report. The next start goes on with it or begins another one; then the findings
//! in the unfinished night's slices, and the stored cases that failed in it, are in no campaign's sums. The next report tells
//! of them, and none after it, as that report's JSON names the night. Of the report's own night the same is asked of slices
//! that were cut off, as a slice that is run again may end before it comes to the same case.
//!
//! The claim: what was found and on disk when a process was killed is in a report, by its key; what of a night cannot be read
//! is in it too, as it may hold findings. A case that was not shrunk yet counts for a failure that needs nothing that it lacks,
//! as in a campaign, or for its check on its tensor where there is none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::home::{JSON_BYTES_MAX, ORDERS, dir_of, entries, name, number_of};
use super::slices::{cut_off_of, is_campaign, slices_of};
use super::{Known, Night, Regressed, ReportedFailure, regressions, report};
use crate::paste::replay_command;
use crate::record::FINDINGS;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::prose;
use seamproof_judge::shrink::{Size, size};

/// What of a night no campaign of any report counts.
#[derive(Clone, Debug, Serialize)]
pub struct Left {
    /// The night's number.
    pub night: u32,
    /// The command that judges again all that it found.
    pub replay: String,
    /// The findings, each key once.
    pub findings: Vec<ReportedFailure>,
    /// Stored cases that failed.
    pub regressions: Vec<Regressed>,
}

/// What of a night cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// A file or folder.
    pub path: PathBuf,
    /// Why not.
    pub what: String,
}

impl Unread {
    /// This file or folder, for this reason.
    pub(super) fn new(path: &Path, why: &impl ToString) -> Unread {
        Unread { path: path.to_owned(), what: format!("cannot be read: {}", why.to_string()) }
    }
}

/// What earlier nights left behind that no report tells of, then what slices of this night did that were cut off. `own` are
/// the failures of this night.
pub(super) fn left(night: &Night, known: &Known, own: &[ReportedFailure]) -> Vec<Left> {
    let home = night.home.path();
    let ending = |&number: &u32| (number, ending(&dir_of(home, number)).ok().flatten());
    let endings: BTreeMap<u32, Option<EndedNight>> = night.nights.iter().map(ending).collect();
    let told: BTreeSet<u32> = endings.values().flatten().flat_map(EndedNight::told).collect();
    let is_untold =
        |(number, ending): &(&u32, &Option<EndedNight>)| !told.contains(number) && ending.is_none();
    let earlier = endings.range(..night.number).filter(is_untold).map(|(&number, _)| {
        let dir = dir_of(home, number);
        let FoundBy { cases, regressions, unread } = stored(&dir);
        let findings = [grouped(&cases, known, &[]), unread.into_iter().map(unreadable).collect()].concat();
        Left { night: number, replay: replay_command(&dir, None), findings, regressions }
    });
    let FoundBy { cases, unread, .. } = cut_off(&night.dir);
    let findings = [grouped(&cases, known, own), unread.into_iter().map(unreadable).collect()].concat();
    let this = Left {
        night: night.number,
        replay: replay_command(&night.dir, None),
        findings,
        regressions: Vec::new(),
    };
    let is_some = |left: &Left| !left.findings.is_empty() || !left.regressions.is_empty();
    earlier.chain([this]).filter(is_some).collect()
}

/// What a night found: case files, and stored cases with their subjects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundBy {
    /// Case files.
    pub cases: Vec<PathBuf>,
    /// Stored cases that failed.
    pub regressions: Vec<Regressed>,
    /// What cannot be read, and may hold more.
    pub unread: Vec<Unread>,
}

/// What the night of this directory found: of one that has ended what its campaigns came to, and what slices that were cut
/// off left; of another one all that its slices hold. `None` where the directory is no night's.
pub fn found_by(dir: &Path) -> Option<FoundBy> {
    let is_night = number_of(dir).is_some() || !files::is_absent(&dir.join(ORDERS));
    (is_night && dir.is_dir()).then(|| stored(dir))
}

fn stored(night: &Path) -> FoundBy {
    let has_ended = matches!(ending(night), Ok(Some(_)));
    let mut found = FoundBy::default();
    for path in entries(night, &mut found.unread) {
        if name(&path).ends_with(regressions::LOG) {
            match regressions::failed_in(&path) {
                Ok(failed) => found.regressions.extend(failed),
                Err(error) => found.unread.push(Unread::new(&path, &error)),
            }
        } else if is_campaign(&path) {
            let runs = match has_ended {
                true => [vec![path.join(WHOLE)], cut_off_of(&path, &mut found.unread)].concat(),
                false => slices_of(&path, &mut found.unread),
            };
            found.cases.extend(runs.iter().flat_map(|run| cases_in(run, &mut found.unread)));
        }
    }
    found
}

/// What the slices of a night found that were cut off.
fn cut_off(night: &Path) -> FoundBy {
    let mut found = FoundBy::default();
    for campaign in entries(night, &mut found.unread).iter().filter(|path| is_campaign(path)) {
        let slices = cut_off_of(campaign, &mut found.unread);
        found.cases.extend(slices.iter().flat_map(|slice| cases_of_slice(slice, &mut found.unread)));
    }
    found
}

/// What of a report says that its night has ended, and which others it tells of.
#[derive(Deserialize)]
pub(super) struct EndedNight {
    night: u32,
    #[serde(rename = "program")]
    _program: String,
    #[serde(default)]
    left: Vec<Told>,
}

#[derive(Deserialize)]
struct Told {
    night: u32,
}

impl EndedNight {
    fn told(&self) -> impl Iterator<Item = u32> {
        self.left.iter().map(|left| left.night)
    }
}

/// The report that ended a night; `None` where it has none, and why where what is in its place is none of this night's.
pub(super) fn ending(night: &Path) -> Result<Option<EndedNight>, String> {
    let path = night.join(report::JSON);
    if files::is_absent(&path) {
        return Ok(None);
    }
    let text = files::read(&path, JSON_BYTES_MAX).map_err(|error| error.to_string())?;
    let ending: EndedNight = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    match number_of(night) {
        Some(number) if number != ending.night => Err(format!("it is that of night {}", ending.night)),
        _ => Ok(Some(ending)),
    }
}

/// The joined slices of a campaign.
pub(super) const WHOLE: &str = "whole";

/// The case files of a run's directory.
fn cases_in(run: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    entries(&run.join(FINDINGS), unread).into_iter().filter(|path| files::is_json(path)).collect()
}

/// The case files of a slice that was cut off, but for those that the joined campaign keeps as they were drawn, too.
fn cases_of_slice(slice: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    let kept: Vec<PathBuf> = cases_in(&slice.with_file_name(WHOLE), unread);
    let is_kept = |path: &PathBuf| kept.iter().any(|kept| name(kept) == name(path));
    cases_in(slice, unread).into_iter().filter(|path| !is_kept(path)).collect()
}

/// A key's cases so far, and the smallest of them.
struct Group {
    cases: u64,
    shrunk: u64,
    smallest: (Size, PathBuf, Case, Found),
}

/// Every key once, with its smallest case; those that a failure of `own` explains are left out. A file that cannot be read is
/// a failure of its own, so that nothing is lost.
fn grouped(files: &[PathBuf], known: &Known, own: &[ReportedFailure]) -> Vec<ReportedFailure> {
    let (mut minimal, mut drawn, mut unread) = (Vec::new(), Vec::new(), Vec::new());
    for path in files {
        match Case::load(path).map_err(|error| error.to_string()).and_then(found) {
            Ok((case, found)) => {
                let key = FailureKey::of(&found.finding, &case.subject.name, &case.problem);
                let explained = own.iter().any(|failure| key.explained_by(&failure.key));
                let kind = if found.minimal { &mut minimal } else { &mut drawn };
                kind.extend((!explained).then_some((key, path, case, found)));
            }
            Err(what) => unread.push(unreadable(Unread { path: path.clone(), what })),
        }
    }
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for (key, path, case, found) in minimal {
        add(&mut groups, key.to_string(), true, (size(&case.problem), path.clone(), case, found));
    }
    for (key, path, case, found) in drawn {
        let listed = known.known.iter().map(|entry| &entry.key);
        let words = groups.keys().chain(listed).find(|words| key.explained_by(words)).cloned();
        let words = words.unwrap_or_else(|| key.without_features().to_string());
        add(&mut groups, words, false, (size(&case.problem), path.clone(), case, found));
    }
    groups.into_iter().map(|(words, group)| failure(words, group, known)).chain(unread).collect()
}

fn found(case: Case) -> Result<(Case, Found), String> {
    case.found.clone().map(|found| (case, found)).ok_or_else(|| "says of no finding".to_owned())
}

fn add(groups: &mut BTreeMap<String, Group>, words: String, shrunk: bool, new: (Size, PathBuf, Case, Found)) {
    match groups.get_mut(&words) {
        None => drop(groups.insert(words, Group { cases: 1, shrunk: u64::from(shrunk), smallest: new })),
        Some(group) => {
            group.cases += 1;
            group.shrunk += u64::from(shrunk);
            if new.0 < group.smallest.0 {
                group.smallest = new;
            }
        }
    }
}

fn failure(key: String, group: Group, known: &Known) -> ReportedFailure {
    let Group { cases, shrunk, smallest: (_, path, case, found) } = group;
    let symptom = FailureKey::without_problem(&found.finding, &case.subject.name).to_string();
    ReportedFailure {
        known: known.of(&key).map(|entry| (entry.reason.clone(), entry.source.clone())),
        key,
        symptom,
        cases,
        shrunk,
        is_end: found.finding.check.is_end(),
        problem: prose::describe(&case.problem),
        finding: found.to_string(),
        replay: replay_command(&path, None),
    }
}

/// In the place of a key.
const UNREADABLE: &str = "cannot be read and may hold findings";

/// A failure of its own, so that nothing is lost.
fn unreadable(Unread { path, what }: Unread) -> ReportedFailure {
    ReportedFailure {
        key: UNREADABLE.to_owned(),
        symptom: UNREADABLE.to_owned(),
        cases: 0,
        shrunk: 0,
        is_end: false,
        problem: path.display().to_string(),
        finding: what,
        replay: replay_command(&path, None),
        known: None,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::nightly::Orders;
    use crate::record::{Findings, RunDir};
    use seamproof_judge::verdict::Verdict;

    /// A case that fails, with what is found in it.
    fn failing(minimal: bool) -> (Case, FailureKey) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects");
        let mut case = Case::load(&folder.join("te-reorder-tail.json")).unwrap();
        let Ok(Verdict::Finding(finding)) = crate::replay::replay(&case) else { panic!("a defect fails") };
        let key = FailureKey::of(&finding, &case.subject.name, &case.problem);
        case.found = Some(Found { minimal, ..Found::drawn(*finding) });
        (case, key)
    }

    fn begin(home: &Path, subject: &str) -> (Night, String) {
        let orders = Orders {
            program: "1".to_owned(),
            build: "a".to_owned(),
            seed: 1,
            seconds: 1.0,
            subjects: vec![subject.to_owned()],
            absent: Vec::new(),
        };
        Night::begin(home, orders, 1).unwrap()
    }

    /// A slice without sums, and what it holds.
    fn slice(night: &Night, name: &str) -> Findings {
        RunDir::create(&night.dir.join("emulated-quick").join(name)).unwrap().findings().unwrap()
    }

    /// A failure of this key that the night's own campaigns found.
    fn own(key: &str) -> ReportedFailure {
        ReportedFailure { key: key.to_owned(), ..unreadable(Unread::new(Path::new("own.json"), &"")) }
    }

    #[test]
    fn what_is_on_disk_and_in_no_report_is_told_by_its_key() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("nights");
        let (night, _) = begin(&home, "emulated");
        let (minimal, key) = failing(true);
        let findings = slice(&night, "slice-0000");
        findings.record("minimal", &minimal).unwrap();
        findings.record("case-00000001", &failing(false).0).unwrap();
        std::fs::write(findings.path("torn"), "{").unwrap();
        let known = Known::default();
        // Of the night itself, as its slice was cut off.
        let told = left(&night, &known, &[]);
        let [this] = &told[..] else { panic!("{told:?}") };
        let counts: Vec<_> = this.findings.iter().map(|f| (&*f.key, f.cases, f.shrunk)).collect();
        assert_eq!(counts, [(&*key.to_string(), 2, 1), (UNREADABLE, 0, 0)]);
        assert_eq!(this.replay, format!("seamproof replay {}", night.dir.display()));
        std::fs::remove_file(findings.path("torn")).unwrap();
        assert!(left(&night, &known, &[own(&key.to_string())]).is_empty(), "it was found again");
        assert!(left(&night, &known, &[own(&key.without_features().to_string())]).is_empty());
        assert_eq!(left(&night, &known, &[own("envelope · cuda")]).len(), 1);
        drop(night);

        // Of an earlier night, which is told of by the next report and by none after it.
        let (night, _) = begin(&home, "cuda");
        let told = left(&night, &known, &[own(&key.to_string())]);
        let [earlier] = &told[..] else { panic!("{told:?}") };
        assert_eq!((earlier.night, earlier.findings.len()), (1, 1), "whatever this night found");
        let report = format!(
            "{{\"night\": 2, \"program\": \"1\", \"left\": {}}}",
            serde_json::to_string(&told).unwrap()
        );
        std::fs::write(night.dir.join(report::JSON), report).unwrap();
        drop(night);
        let (night, _) = begin(&home, "cuda");
        assert_eq!(night.number, 3);
        assert!(left(&night, &known, &[]).is_empty());
    }

    /// Whatever of a night cannot be read is told of, by the next report and by `replay`.
    #[test]
    fn what_cannot_be_read_is_told() {
        // Each makes one thing of a night's slice unreadable, and says which.
        type Spoil = fn(&Path) -> PathBuf;
        let spoils: [Spoil; 5] = [
            |campaign| {
                let findings = campaign.join("slice-0000/findings");
                std::fs::remove_dir_all(&findings).unwrap();
                std::os::unix::fs::symlink("nowhere", &findings).unwrap();
                findings
            },
            |campaign| {
                let findings = campaign.join("slice-0000/findings");
                std::fs::remove_dir_all(&findings).unwrap();
                std::fs::write(&findings, "").unwrap();
                findings
            },
            |campaign| {
                std::fs::write(campaign.join("slice-0001"), "").unwrap();
                campaign.join("slice-0001/findings")
            },
            |campaign| {
                let finding = campaign.join("slice-0000/findings/null.json");
                std::os::unix::fs::symlink("/dev/null", &finding).unwrap();
                finding
            },
            |campaign| {
                let log = campaign.with_file_name("emulated-regressions.jsonl");
                std::fs::create_dir(&log).unwrap();
                log
            },
        ];
        for spoil in spoils {
            let place = tempfile::tempdir().unwrap();
            let home = place.path().join("nights");
            let (night, _) = begin(&home, "emulated");
            drop(slice(&night, "slice-0000"));
            let dir = night.dir.clone();
            drop(night);
            let path = spoil(&dir.join("emulated-quick"));
            let (night, _) = begin(&home, "cuda");
            let told = left(&night, &Known::default(), &[]);
            let [Left { night: 1, findings, .. }] = &told[..] else { panic!("{told:?}") };
            let [ReportedFailure { key, problem, .. }] = &findings[..] else { panic!("{findings:?}") };
            assert_eq!((&**key, &**problem), (UNREADABLE, &*path.display().to_string()));
            let found = found_by(&dir).unwrap();
            let unread = found.unread.iter().map(|unread| unread.path.clone()).chain(found.cases);
            assert_eq!(unread.collect::<Vec<_>>(), [path], "replay comes to it too");
        }
    }

    /// Another file in the place of a report, or the report of another night, ends nothing.
    #[test]
    fn only_its_own_report_ends_a_night() {
        let place = tempfile::tempdir().unwrap();
        let night = place.path().join("night-0002");
        let path = night.join(report::JSON);
        std::fs::create_dir_all(&path).unwrap();
        assert!(ending(&night).is_err(), "a directory");
        std::fs::remove_dir(&path).unwrap();
        assert!(matches!(ending(&night), Ok(None)), "none at all");
        let of = |number: u32| format!("{{\"night\": {number}, \"program\": \"1\"}}");
        for text in ["", "null", "{}", "{\"night\": 2", &of(3)] {
            std::fs::write(&path, text).unwrap();
            assert!(ending(&night).is_err(), "{text}");
        }
        std::fs::write(&path, of(2)).unwrap();
        assert!(matches!(ending(&night), Ok(Some(_))));
    }

    /// A case that nobody has shrunk counts for what explains it, in the list of known failures too, or for its check.
    #[test]
    fn a_case_as_it_was_drawn_counts_for_what_explains_it() {
        let place = tempfile::tempdir().unwrap();
        let findings = Findings::create(place.path()).unwrap();
        let (drawn, key) = failing(false);
        findings.record("case-00000001", &drawn).unwrap();
        let files = [findings.path("case-00000001")];
        let [bare] = &grouped(&files, &Known::default(), &[])[..] else { panic!("one failure") };
        assert_eq!(
            (&*bare.key, bare.shrunk, bare.known.as_ref()),
            (&*key.without_features().to_string(), 0, None)
        );
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/te-reorder-tail.json");
        let list = place.path().join("known.toml");
        let entry = format!(
            "[[known]]\nkey = \"{key}\"\ncase = \"{}\"\nreason = \"planted\"\nsource = \"https://example.org\"\n",
            folder.display()
        );
        std::fs::write(&list, entry).unwrap();
        let [listed] = &grouped(&files, &Known::read(&list).unwrap(), &[])[..] else { panic!("one failure") };
        assert!(listed.known.is_some() && listed.key == key.to_string());
    }

    #[test]
    fn a_stored_case_that_failed_is_left_behind_too() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("nights");
        let (night, _) = begin(&home, "window-off-by-one");
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("corpus/regressions/te-1212-window-one-key-short.json");
        let log = night.dir.join("window-off-by-one-regressions.jsonl");
        let watch = crate::nightly::Watch::default();
        regressions::judge("window-off-by-one", &[file], &log, &watch).unwrap();
        assert_eq!(left(&night, &Known::default(), &[]).len(), 0, "the night itself reports it");
        drop(night);
        let (night, _) = begin(&home, "emulated");
        let told = left(&night, &Known::default(), &[]);
        assert_eq!(told[0].regressions[0].subject, "window-off-by-one");
        assert!(
            told[0].findings.is_empty()
                && told[0].regressions[0].replay.ends_with("--backend window-off-by-one")
        );
    }
}
