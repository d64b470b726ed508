//! Files of a campaign on disk, written so that a kill at any moment loses no finding.
//!
//! ```text
//! DIR/seamproof.lock      held while a campaign writes here; released by the system when the campaign dies
//! DIR/run.json            what was run and, once the campaign has ended, its summary
//! DIR/events.jsonl        one event a line (docs/events.md)
//! DIR/sums.json           once the campaign has ended, the sums that `seamproof merge` adds up
//! DIR/checkpoint.json     how far a campaign without a limit of time is, for whoever goes on with it
//! DIR/findings/NAME.json  a finding: a case to replay; with NAME.txt (one line of words and what replays it) and
//!                         NAME.rs (a test to paste) once it is minimal. A subject in a Python file has no NAME.rs, and
//!                         gets NAME.py after the last case: a script that shows the finding without this project
//! DIR/canary/NAME.json    the planted fault, found
//! ```
//!
//! Every file but the event log is written whole: into a hidden temporary file beside its place, synchronised, then
//! renamed. A `.json` in `findings` is therefore complete at any time. A directory of an earlier campaign is renamed
//! to `DIR.1`, `DIR.2`, …, and never overwritten or removed. A directory that holds anything else is refused.
//!
//! A finding's subject is *foreign* where this program cannot make it by its name, because another crate ran a
//! campaign of its own. No command judges such a case on its subject, and the test to paste leaves a place for it.

mod findings;
mod writing;

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Serialize;

use seamproof_judge::files;

pub use findings::Findings;
use writing::TEMPORARY_PREFIX;
pub use writing::{EventLog, clash, is_stdout, write_whole};

/// Default directory of a campaign.
pub const DEFAULT_DIR: &str = "seamproof.out";
/// Largest number of earlier campaigns' directories that are kept beside a new one, under the numbers 1 to this.
pub const EARLIER_RUNS_MAX: usize = 999;

const LOCK: &str = "seamproof.lock";
/// Name of the folder of findings in a campaign's directory.
pub const FINDINGS: &str = "findings";
/// Name of the file that says what was run in a campaign's directory.
pub const RUN: &str = "run.json";
/// Name of the event log in a campaign's directory.
pub const EVENTS: &str = "events.jsonl";
/// Length of the longest line of an event log that is read, in bytes. An event holds one case.
pub const EVENT_BYTES_MAX: u64 = 64 << 20;
/// Name of the file of sums in the directory of a campaign that has ended.
pub const SUMS: &str = "sums.json";
/// Name of the file that tells how far a campaign is.
pub const CHECKPOINT: &str = "checkpoint.json";

/// Reason why something could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A refusal by the file system.
    #[error("{}: cannot be {what}: {source}", path.display())]
    Io {
        /// Path of the file or directory.
        path: PathBuf,
        /// Step that was tried, as in "written".
        what: &'static str,
        /// Error of the file system.
        source: io::Error,
    },
    /// A directory to which another campaign writes.
    #[error("{}: another campaign is writing here; choose another directory with --out", path.display())]
    Busy {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A directory that belongs to something else.
    #[error("{}: holds files that are no campaign's; choose a new or empty directory with --out", path.display())]
    NotOurs {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A directory with too many earlier campaigns.
    #[error("{}.1 to {}.{EARLIER_RUNS_MAX} all exist; remove some", path.display(), path.display())]
    TooManyEarlier {
        /// Path of the directory.
        path: PathBuf,
    },
}

/// Conversion of an I/O error, which adds the path and the step.
trait At<T> {
    fn at(self, path: &Path, what: &'static str) -> Result<T, RecordError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path, what: &'static str) -> Result<T, RecordError> {
        self.map_err(|source| RecordError::Io { path: path.to_owned(), what, source })
    }
}

/// The directory of a campaign, locked for as long as this value lives.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// New path of an earlier campaign's directory.
    earlier: Option<PathBuf>,
    _lock: File,
}

impl RunDir {
    /// Makes the directory, after renaming an earlier campaign's.
    pub fn create(path: &Path) -> Result<RunDir, RecordError> {
        // The path gets no slash at its end, which would put the renamed directory inside itself.
        let path: PathBuf = path.components().collect();
        let (earlier, _old) = set_aside(&path)?.unzip();
        fs::create_dir_all(&path).at(&path, "created")?;
        let lock = lock(&path)?;
        let dir = RunDir { path, earlier, _lock: lock };
        dir.findings()?;
        Ok(dir)
    }

    /// Opens the directory of a campaign that was cut off; `None` where there is none.
    pub fn reopen(path: &Path) -> Result<Option<RunDir>, RecordError> {
        let path: PathBuf = path.components().collect();
        if !path.join(LOCK).is_file() {
            return Ok(None);
        }
        let lock = lock(&path)?;
        let dir = RunDir { path, earlier: None, _lock: lock };
        dir.remove_temporaries()?;
        Ok(Some(dir))
    }

    /// Removes the files that a killed campaign was about to give a name.
    fn remove_temporaries(&self) -> Result<(), RecordError> {
        for folder in [self.path.clone(), self.findings()?.dir, self.canary()?.dir] {
            for path in files::list(&folder).at(&folder, "read")? {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if name.starts_with(TEMPORARY_PREFIX) && path.is_file() {
                    fs::remove_file(&path).at(&path, "removed")?;
                }
            }
        }
        Ok(())
    }

    /// Cuts the event log behind this many bytes, and removes the sums, as the campaign has not ended.
    pub fn cut(&self, bytes: u64) -> Result<(), RecordError> {
        let sums = self.path.join(SUMS);
        if !files::is_absent(&sums) {
            fs::remove_file(&sums).at(&sums, "removed")?;
        }
        let events = self.path.join(EVENTS);
        let log = File::options().write(true).open(&events).at(&events, "written")?;
        log.set_len(bytes).at(&events, "written")
    }

    /// Undoes [`RunDir::create`] for a campaign that cannot be started, before anything is written. The earlier
    /// campaign's directory gets its name back. A directory into which others have put files stays.
    pub fn abandon(self) {
        // Whatever cannot be undone stays as a campaign's directory. The caller reports why the campaign cannot be
        // started, which matters more.
        let _ = fs::remove_file(self.path.join(EVENTS));
        let _ = fs::remove_dir(self.path.join(FINDINGS));
        let is_bare = fs::read_dir(&self.path).is_ok_and(|entries| entries.count() == 1);
        if is_bare && fs::remove_file(self.path.join(LOCK)).is_ok() {
            let removed = fs::remove_dir(&self.path);
            if let (Ok(()), Some(earlier)) = (removed, &self.earlier) {
                let _ = fs::rename(earlier, &self.path);
            }
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of findings.
    pub fn findings(&self) -> Result<Findings, RecordError> {
        Findings::create(&self.path.join(FINDINGS))
    }

    /// Returns the folder of the canary's finding.
    pub fn canary(&self) -> Result<Findings, RecordError> {
        Findings::create(&self.path.join("canary"))
    }

    /// Returns the event log.
    pub fn events(&self) -> Result<EventLog, RecordError> {
        EventLog::create(&self.path.join(EVENTS))
    }

    /// Returns the event log behind its contents.
    pub fn further_events(&self) -> Result<EventLog, RecordError> {
        EventLog::append(&self.path.join(EVENTS))
    }

    /// Returns the size of the event log in bytes, which are all on disk when this returns.
    pub fn events_size(&self) -> Result<u64, RecordError> {
        let path = self.path.join(EVENTS);
        let size = || {
            let log = File::options().append(true).open(&path)?;
            log.sync_data()?;
            Ok(log.metadata()?.len())
        };
        size().at(&path, "read")
    }

    /// Writes or replaces `checkpoint.json`.
    pub fn check_in(&self, checkpoint: &impl Serialize) -> Result<(), RecordError> {
        self.write(CHECKPOINT, checkpoint)
    }

    /// Writes or replaces `run.json`.
    pub fn describe(&self, run: &impl Serialize) -> Result<(), RecordError> {
        self.write(RUN, run)
    }

    /// Writes `sums.json`.
    pub fn sum(&self, sums: &impl Serialize) -> Result<(), RecordError> {
        self.write(SUMS, sums)
    }

    fn write(&self, name: &str, run: &impl Serialize) -> Result<(), RecordError> {
        let path = self.path.join(name);
        let text = serde_json::to_string_pretty(run).map_err(io::Error::from).at(&path, "written")?;
        write_whole(&path, &(text + "\n"))
    }
}

/// Renames an earlier campaign's directory out of the way. Returns its new path, and its lock, which is held until
/// the new directory is made.
fn set_aside(path: &Path) -> Result<Option<(PathBuf, File)>, RecordError> {
    let mut entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).at(path, "read as a directory"),
    };
    if entries.next().is_none() {
        return Ok(None);
    }
    if !path.join(LOCK).is_file() {
        return Err(RecordError::NotOurs { path: path.to_owned() });
    }
    let old = lock(path)?;
    Ok(Some((move_aside(path)?, old)))
}

/// Renames a file or directory to the first free of `PATH.1`, `PATH.2`, …, and returns the new path.
fn move_aside(path: &Path) -> Result<PathBuf, RecordError> {
    let numbered = |number: usize| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let free = (1..=EARLIER_RUNS_MAX).map(numbered).find(|place| files::is_absent(place));
    let place = free.ok_or_else(|| RecordError::TooManyEarlier { path: path.to_owned() })?;
    fs::rename(path, &place).at(path, "renamed")?;
    Ok(place)
}

/// A directory that stays, locked for as long as this value lives. It holds campaigns' directories and their reports.
#[derive(Debug)]
pub struct Home {
    path: PathBuf,
    _lock: File,
}

impl Home {
    /// Makes the directory, or opens one that an earlier program made.
    pub fn open(path: &Path) -> Result<Home, RecordError> {
        fs::create_dir_all(path).at(path, "created")?;
        let empty = fs::read_dir(path).at(path, "read as a directory")?.next().is_none();
        if !empty && !path.join(LOCK).is_file() {
            return Err(RecordError::NotOurs { path: path.to_owned() });
        }
        Ok(Home { path: path.to_owned(), _lock: lock(path)? })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Makes a directory where it is missing.
pub fn make_dir(path: &Path) -> Result<(), RecordError> {
    fs::create_dir_all(path).at(path, "created")
}

/// Returns the folder of findings in a campaign's directory; `None` where `path` is no campaign's.
pub fn findings_of(path: &Path) -> Option<PathBuf> {
    path.join(LOCK).is_file().then(|| path.join(FINDINGS))
}

fn lock(dir: &Path) -> Result<File, RecordError> {
    let path = dir.join(LOCK);
    // The contents of the file are left alone, since it may be a link.
    let file = File::options().write(true).create(true).truncate(false).open(&path).at(&path, "written")?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(RecordError::Busy { path: dir.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(error).at(&path, "locked"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().expect("a temporary directory");
        let path = parent.path().join("out");
        (parent, path)
    }

    #[test]
    fn an_earlier_campaign_is_renamed() {
        let (_parent, path) = place();
        for number in 0..3 {
            let dir = RunDir::create(&path).expect("the directory is made");
            dir.describe(&number).expect("run.json is written");
        }
        let run = |suffix: &str| fs::read_to_string(path.with_file_name(format!("out{suffix}/run.json")));
        assert_eq!(run(".1").expect("the first run"), "0\n");
        assert_eq!(run(".2").expect("the second run"), "1\n");
        assert_eq!(run("").expect("the last run"), "2\n");
    }

    /// Test that of a campaign that was cut off no half-written file is left, and of its findings those that are wanted.
    #[test]
    fn what_a_cut_off_campaign_left_behind_is_removed() {
        let (_parent, path) = place();
        let findings = RunDir::create(&path).and_then(|dir| dir.findings()).expect("the directory is made");
        for name in [".tmp-abc", "exact-1.json", "exact-1.txt", "exact-2.json", "case-00000007.json"] {
            fs::write(findings.dir.join(name), "{}").expect("a file is written");
        }
        let dir = RunDir::reopen(&path).expect("it can be opened").expect("it is there");
        dir.findings().and_then(|found| found.retain(|name| name != "exact-1")).expect("files are removed");
        let left = files::list(&findings.dir).expect("a directory");
        let left: Vec<_> = left.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(left, ["case-00000007.json", "exact-2.json"]);
    }

    #[test]
    fn a_campaign_that_cannot_be_started_leaves_the_earlier_ones_directory() {
        let (parent, path) = place();
        let listed = || {
            let entries = fs::read_dir(parent.path()).expect("the directory is read");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        RunDir::create(&path).expect("the directory is made").abandon();
        assert!(listed().is_empty());
        RunDir::create(&path).expect("the directory is made").describe(&1).expect("run.json is written");
        let dir = RunDir::create(&path).expect("the directory is made");
        let _events = dir.events().expect("the log is made");
        dir.abandon();
        assert_eq!(listed(), ["out"]);
        assert_eq!(fs::read_to_string(path.join("run.json")).expect("the first run"), "1\n");
        // A file that somebody else put there is not removed, and the directory remains a campaign's.
        let dir = RunDir::create(&path).expect("the directory is made");
        fs::write(path.join("mine"), "").expect("a file");
        dir.abandon();
        assert_eq!(listed(), ["out", "out.1"]);
        RunDir::create(&path).expect("the directory is made");
        assert_eq!(listed(), ["out", "out.1", "out.2"]);
    }

    #[test]
    fn a_directory_in_use_or_of_somebody_else_is_refused() {
        let (parent, path) = place();
        let _dir = RunDir::create(&path).expect("the directory is made");
        assert!(matches!(RunDir::create(&path), Err(RecordError::Busy { .. })));
        assert!(matches!(RunDir::create(parent.path()), Err(RecordError::NotOurs { .. })));
        let file = parent.path().join("file");
        write_whole(&file, "").expect("a file");
        assert!(matches!(RunDir::create(&file), Err(RecordError::Io { .. })));
        assert!(matches!(RunDir::create(&file.join("below")), Err(RecordError::Io { .. })));
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let (parent, _) = place();
        let file = parent.path().join("file");
        for text in ["one", "two"] {
            write_whole(&file, text).expect("the file is written");
            assert_eq!(fs::read_to_string(&file).expect("the file is read"), text);
        }
        assert_eq!(fs::read_dir(parent.path()).expect("the directory is read").count(), 1);
    }

    #[test]
    fn an_error_names_the_file_that_was_asked_for_alone() {
        let (parent, path) = place();
        let error = write_whole(&path.join("file"), "").expect_err("there is no folder").to_string();
        assert!(
            error.starts_with(&format!("{}: cannot be written: ", path.join("file").display())),
            "{error}"
        );
        assert!(!error.contains(TEMPORARY_PREFIX) && !error.contains("at path"), "{error}");
        assert_eq!(fs::read_dir(parent.path()).expect("the directory is read").count(), 0);
    }

    /// Test that not even a program with all rights puts a file in a device's place, whatever link leads there.
    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_not_replaced() {
        let (parent, link) = place();
        let [pipe, folder] = ["pipe", "folder"].map(|name| parent.path().join(name));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
        std::os::unix::fs::symlink(&pipe, &link).expect("a link");
        fs::create_dir(&folder).expect("a directory");
        for path in [&pipe, &link, &folder] {
            let error = write_whole(path, "text").expect_err("it is no file").to_string();
            assert!(error.ends_with(": cannot be written: is no regular file"), "{error}");
        }
        assert!(!fs::metadata(&link).expect("the link leads there still").is_file());
        assert_eq!(fs::read_dir(parent.path()).expect("the directory is read").count(), 3);
    }
}
