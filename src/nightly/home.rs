//! Folders of nights: their names, what they hold, and what nights that were killed left behind.
//!
//! A *home* holds all nights. The folder of a night is `night-` and its number from 1, in at least four digits. Each
//! folder in it is a run's ([`crate::record`]), so the findings of a night are the case files in `*/findings`. A night
//! has ended once its `report.json` is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::NightError;
use crate::paste::replay_command;
use crate::record::FINDINGS;
use seamproof_judge::files;
use seamproof_judge::prose::counted;

/// Name of the file that ends a night.
pub(super) const REPORT: &str = "report.json";
/// Size of the largest file that is read of a night or of all nights, cases apart, in bytes.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// Returns the numbers of the nights in a home, in order.
pub(super) fn numbers(home: &Path) -> Result<BTreeSet<u32>, NightError> {
    let all = files::list(home).map_err(NightError::unread(home))?;
    Ok(all.iter().filter_map(|path| number_of(path)).collect())
}

/// Returns the newest night of a home; `None` where the directory holds none.
pub(crate) fn newest_of(home: &Path) -> Option<PathBuf> {
    numbers(home).ok()?.last().map(|&number| dir_of(home, number))
}

/// Returns the number in the name of a night's folder; `None` for other names, such as `night-1` and `night-0000`.
fn number_of(dir: &Path) -> Option<u32> {
    let name = dir.file_name()?.to_str()?;
    let number = name.strip_prefix("night-")?.parse().ok()?;
    (number > 0 && dir_of(Path::new(""), number) == Path::new(name)).then_some(number)
}

/// Returns the folder of a night.
pub(super) fn dir_of(home: &Path, number: u32) -> PathBuf {
    home.join(format!("night-{number:04}"))
}

/// Returns the folder of a subject's run in a night.
pub(super) fn run_of(night: &Path, subject: &str, run: &str) -> PathBuf {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "+~=_.".contains(letter);
    let name: String = subject.chars().map(|letter| if is_plain(letter) { letter } else { '-' }).collect();
    night.join(format!("{name}-{run}"))
}

/// What a night found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundBy {
    /// Case files.
    pub(crate) cases: Vec<PathBuf>,
    /// Files and folders that cannot be read and may hold more, each with the reason.
    pub(crate) unread: Vec<String>,
}

/// Returns what the night in this directory found, whether it has ended or not; `None` where the directory is no
/// night's.
pub(crate) fn found_by(dir: &Path) -> Option<FoundBy> {
    number_of(&dir.canonicalize().ok()?)?;
    dir.is_dir().then(|| found_in(dir))
}

fn found_in(night: &Path) -> FoundBy {
    let mut found = FoundBy::default();
    let mut list = |dir: &Path| {
        files::list(dir).unwrap_or_else(|error| {
            found.unread.push(format!("{}: cannot be read and may hold findings: {error}", dir.display()));
            Vec::new()
        })
    };
    // A link that leads nowhere may have led to a folder of findings: reading it tells why it does not.
    let is_file = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_file());
    let is_dir = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_dir());
    let mut cases = Vec::new();
    for path in list(night).into_iter().filter(|path| !is_file(path)) {
        cases.extend(list(&if is_dir(&path) { path.join(FINDINGS) } else { path }));
    }
    found.cases = cases.into_iter().filter(|path| files::is_json(path)).collect();
    found
}

/// What a night found that has no report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Left {
    /// Number of the night.
    pub(crate) night: u32,
    /// Number of its findings.
    pub(crate) findings: usize,
    /// Files and folders that cannot be read and may hold more, each with the reason.
    pub(crate) unread: Vec<String>,
    /// Command that judges its findings again.
    pub(crate) replay: String,
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "night {} has no report and left {}", self.night, counted(self.findings, "finding"))?;
        self.unread.iter().try_for_each(|what| write!(f, "; {what}"))
    }
}

/// Returns what the nights before this one left behind and no report names yet.
pub(super) fn left(home: &Path, night: u32) -> Result<Vec<Left>, NightError> {
    let (mut named, mut left) = (BTreeSet::new(), Vec::new());
    for number in numbers(home)?.into_iter().take_while(|&number| number < night) {
        let dir = dir_of(home, number);
        match named_by(&dir.join(REPORT)) {
            Some(others) => named.extend(others),
            None => {
                let FoundBy { cases, unread } = found_in(&dir);
                left.push(Left {
                    night: number,
                    findings: cases.len(),
                    unread,
                    replay: replay_command(&dir, None),
                });
            }
        }
    }
    left.retain(|left| !named.contains(&left.night) && left.findings + left.unread.len() > 0);
    Ok(left)
}

/// Returns the nights that a report names as left behind; `None` where there is no report.
fn named_by(report: &Path) -> Option<Vec<u32>> {
    #[derive(Deserialize)]
    struct Told {
        left: Vec<Night>,
    }
    #[derive(Deserialize)]
    struct Night {
        night: u32,
    }
    let told: Told = serde_json::from_slice(&files::read(report, FILE_BYTES_MAX).ok()?).ok()?;
    Some(told.left.into_iter().map(|left| left.night).collect())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_a_night_without_a_report_found_is_left_until_a_report_names_it() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path();
        let findings = dir_of(home, 1).join("emulated-quick/findings");
        fs::create_dir_all(&findings).unwrap();
        fs::create_dir_all(dir_of(home, 2).join("emulated-quick/findings")).unwrap();
        for name in ["a.json", "a.txt", "b.json"] {
            fs::write(findings.join(name), "").unwrap();
        }
        let [one] = &left(home, 3).unwrap()[..] else { panic!("night 1 alone found something") };
        assert_eq!((one.night, one.findings, one.unread.len()), (1, 2, 0));
        assert_eq!(one.to_string(), "night 1 has no report and left 2 findings");
        assert_eq!(one.replay, format!("seamproof replay {}", dir_of(home, 1).display()));
        assert_eq!(
            found_by(&dir_of(home, 1)).unwrap().cases,
            ["a", "b"].map(|name| findings.join(name).with_extension("json"))
        );
        let report = dir_of(home, 2).join(REPORT);
        fs::write(&report, "{\"left\": [").unwrap();
        assert_eq!(left(home, 3).unwrap().len(), 1, "a torn report names nothing");
        fs::write(&report, "{\"left\": [{\"night\": 1}]}").unwrap();
        assert_eq!(left(home, 3).unwrap(), []);
        fs::write(&report, "{\"left\": []}").unwrap();
        assert_eq!(left(home, 3).unwrap().len(), 1);
        fs::write(dir_of(home, 1).join(REPORT), "{\"left\": []}").unwrap();
        assert_eq!(left(home, 3).unwrap(), [], "it has ended");
    }

    #[test]
    fn what_cannot_be_read_is_told_of() {
        let place = tempfile::tempdir().unwrap();
        let night = dir_of(place.path(), 1);
        fs::create_dir_all(night.join("whole/findings")).unwrap();
        fs::create_dir_all(night.join("file")).unwrap();
        fs::write(night.join("file/findings"), "").unwrap();
        fs::write(night.join("report.md"), "").unwrap();
        std::os::unix::fs::symlink("nowhere", night.join("link")).unwrap();
        let [left] = &left(place.path(), 2).unwrap()[..] else { panic!("one night") };
        let told: Vec<&str> = left.unread.iter().filter_map(|what| what.split(": ").next()).collect();
        let expected = ["file/findings", "link"].map(|path| night.join(path).display().to_string());
        assert_eq!(told, expected);
        assert!(left.findings == 0 && left.to_string().contains("cannot be read and may hold findings"));
    }

    #[test]
    fn a_name_is_of_one_night_or_of_none() {
        for name in ["night-0", "night-0000", "night-1", "night-00001", "night--001", "night", "night-0001.1"]
        {
            assert_eq!(number_of(Path::new(name)), None, "{name}");
        }
        let place = tempfile::tempdir().unwrap();
        for number in [2, 10_000, 9999] {
            fs::create_dir(dir_of(place.path(), number)).unwrap();
        }
        assert_eq!(newest_of(place.path()), Some(place.path().join("night-10000")));
        assert_eq!(
            run_of(Path::new("n"), "emulated:q_tile=2", "quick"),
            Path::new("n/emulated-q_tile=2-quick")
        );
    }
}
