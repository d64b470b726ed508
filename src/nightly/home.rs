//! Folders of nights: their names, what they hold, and what nights that were killed left behind.
//!
//! A *home* holds all nights. The folder of a night is `night-` and its number from 1, in at least four digits. Each
//! folder in it is a run's ([`crate::record`]), so the findings of a night are the case files in `*/findings`. A night
//! has ended once its `report.json` is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::NightError;
use crate::campaign::{Left, OnDisk};
use seamproof_judge::files;

/// Name of the file that ends a night.
pub(crate) const REPORT: &str = "report.json";
/// Size of the largest file that is read of a night or of all nights, cases apart, in bytes.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// Reads a list of a corpus.
pub(super) fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<T, NightError> {
    let bytes = files::read(path, FILE_BYTES_MAX).map_err(NightError::unread(path))?;
    let text = String::from_utf8(bytes).map_err(NightError::unread(path))?;
    toml::from_str(&text).map_err(|error| NightError::Read {
        path: path.to_owned(),
        what: error.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

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
pub(crate) fn number_of(dir: &Path) -> Option<u32> {
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

/// Returns what the night in this directory found, whether it has ended or not; `None` where the directory is no
/// night's.
pub(crate) fn found_by(dir: &Path) -> Option<OnDisk> {
    number_of(&dir.canonicalize().ok()?)?;
    dir.is_dir().then(|| found_in(dir))
}

/// Whether a directory is a night's.
pub(crate) fn is_night(dir: &Path) -> bool {
    dir.is_dir() && dir.canonicalize().is_ok_and(|dir| number_of(&dir).is_some())
}

/// Returns the nights of a home before one, in order, each with its directory.
pub(crate) fn earlier(home: &Path, night: u32) -> Result<Vec<(u32, PathBuf)>, NightError> {
    let before = numbers(home)?.into_iter().take_while(|&number| number < night);
    Ok(before.map(|number| (number, dir_of(home, number))).collect())
}

fn found_in(night: &Path) -> OnDisk {
    let mut found = OnDisk::default();
    match files::list(night) {
        Ok(all) => {
            for path in all {
                match fs::metadata(&path) {
                    Ok(entry) if entry.is_file() => {}
                    Ok(_) => found.add(&path),
                    // A link that leads nowhere may have led to a run's folder.
                    Err(error) => found.cannot_read(&path, &error),
                }
            }
        }
        Err(error) => found.cannot_read(night, &error),
    }
    found
}

/// Returns what the nights before this one found that have no report and that no report names yet.
pub(super) fn left(home: &Path, night: u32) -> Result<Vec<Left>, NightError> {
    let (mut named, mut left) = (BTreeSet::new(), Vec::new());
    for number in numbers(home)?.into_iter().take_while(|&number| number < night) {
        let dir = dir_of(home, number);
        match named_by(&dir.join(REPORT)) {
            Some(others) => named.extend(others),
            None => left.extend(Left::of(&dir, found_in(&dir)).map(|left| (number, left))),
        }
    }
    Ok(left.into_iter().filter(|(number, _)| !named.contains(number)).map(|(_, left)| left).collect())
}

/// Returns the nights that a report names as left behind; `None` where there is no report.
fn named_by(report: &Path) -> Option<Vec<u32>> {
    let report: Value = serde_json::from_slice(&files::read(report, FILE_BYTES_MAX).ok()?).ok()?;
    let left = report["left"].as_array()?.iter();
    Some(left.filter_map(|left| number_of(Path::new(left["dir"].as_str()?))).collect())
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
        let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/te-reorder-tail.json");
        fs::copy(case, findings.join("a.json")).unwrap();
        fs::write(findings.join("a.txt"), "").unwrap();
        fs::write(findings.join("torn.json"), "{").unwrap();
        let [one] = &left(home, 3).unwrap()[..] else { panic!("night 1 alone found something") };
        let dir = dir_of(home, 1).display().to_string();
        assert_eq!((&one.dir, one.findings, one.ends, one.unread.len()), (&dir, 1, 0, 1));
        assert_eq!(one.replay, format!("seamproof replay {dir}"));
        assert!(
            one.to_string().starts_with(&format!("{dir} did not end and left 1 finding; {dir}")),
            "{one}"
        );
        let cases = ["a.json", "torn.json"].map(|name| findings.join(name));
        assert_eq!(found_by(&dir_of(home, 1)).unwrap().cases, cases);
        let report = dir_of(home, 2).join(REPORT);
        fs::write(&report, "{\"left\": [").unwrap();
        assert_eq!(left(home, 3).unwrap().len(), 1, "a torn report names nothing");
        fs::write(&report, format!("{{\"left\": [{{\"dir\": {dir:?}}}]}}")).unwrap();
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
        fs::create_dir_all(night.join("emulated-seams/findings")).unwrap();
        fs::create_dir_all(night.join("file")).unwrap();
        fs::write(night.join("file/findings"), "").unwrap();
        fs::write(night.join("report.md"), "").unwrap();
        std::os::unix::fs::symlink("nowhere", night.join("link")).unwrap();
        let [left] = &left(place.path(), 2).unwrap()[..] else { panic!("one night") };
        let told: Vec<&str> = left.unread.iter().filter_map(|what| what.split(": ").next()).collect();
        let expected = ["file/findings", "link"].map(|path| night.join(path).display().to_string());
        assert_eq!(told, expected);
        assert!(left.count() == 2 && !left.is_end(), "{left}");
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
