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

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::replay::is_foreign;
use crate::script::{Script, is_python};
use seamproof_judge::case::Case;
use seamproof_judge::files;
use seamproof_judge::prose;

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
const TEMPORARY_PREFIX: &str = ".tmp-";

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

/// A folder of findings.
#[derive(Debug)]
pub struct Findings {
    dir: PathBuf,
}

impl Findings {
    /// Makes the directory where it is missing.
    pub fn create(dir: &Path) -> Result<Findings, RecordError> {
        fs::create_dir_all(dir).at(dir, "created")?;
        Ok(Findings { dir: dir.to_owned() })
    }

    /// Returns the file of a finding.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    /// Writes a case as a whole. It is on disk when this returns.
    pub fn record(&self, name: &str, case: &Case) -> Result<(), RecordError> {
        write_whole(&self.path(name), &case.to_json())
    }

    /// Writes the files that a reader needs beside the case: a description, and a test to paste, unless the subject is
    /// in a Python file, whose script comes later ([`Findings::tell_script`]).
    pub fn explain(&self, name: &str, case: &Case) -> Result<(), RecordError> {
        if !is_python(case) {
            write_whole(&self.test(name), &test_to_paste(name, case))?;
        }
        self.describe(name, case, None)
    }

    /// Adds a finding's script to its description.
    pub fn tell_script(&self, name: &str, case: &Case, script: &Script) -> Result<(), RecordError> {
        self.describe(name, case, Some(script))
    }

    fn describe(&self, name: &str, case: &Case, script: Option<&Script>) -> Result<(), RecordError> {
        let script = script.map_or(String::new(), |script| format!("script: {script}\n"));
        write_whole(&self.dir.join(format!("{name}.txt")), &(self.words(name, case) + &script))
    }

    /// Removes a finding that another one stands for.
    pub fn remove(&self, name: &str) -> Result<(), RecordError> {
        for extension in ["json", "rs", "txt", "py"] {
            let path = self.dir.join(format!("{name}.{extension}"));
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).at(&path, "removed"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the findings whose names are not wanted.
    pub fn retain(&self, is_wanted: impl Fn(&str) -> bool) -> Result<(), RecordError> {
        let paths = files::list(&self.dir).at(&self.dir, "read")?;
        let names = paths.iter().filter_map(|path| path.file_stem()?.to_str());
        names.filter(|name| !is_wanted(name)).try_for_each(|name| self.remove(name))
    }

    /// Returns the words that say how to judge a finding again: a command, or the test to paste for a foreign
    /// subject.
    pub fn replay(&self, name: &str, case: &Case) -> String {
        if is_foreign(case) {
            let (test, subject) = (self.test(name), &case.subject.name);
            let test = test.display();
            return format!(
                "paste the test {test} into the crate that has {subject:?}; seamproof itself has no such subject"
            );
        }
        crate::paste::replay_command(&self.path(name), None)
    }

    /// Returns the file of a finding's test.
    fn test(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.rs"))
    }

    fn words(&self, name: &str, case: &Case) -> String {
        let finding = case.found.as_ref().map(ToString::to_string).unwrap_or_default();
        let problem = prose::describe(&case.problem);
        // A command that was not seen to show anything would send its reader on a false trail.
        if case.found.as_ref().is_some_and(|found| found.unconfirmed.is_some()) {
            return format!("{problem}: {finding}\n");
        }
        format!("{problem}: {finding}\nreplay: {}\n", self.replay(name, case))
    }
}

/// Returns the case as a test. It fails as long as the fault is there, and is a regression test afterwards.
fn test_to_paste(name: &str, case: &Case) -> String {
    let json = case.to_json();
    let mut hashes = "#".to_owned();
    while json.contains(&format!("\"{hashes}")) {
        hashes.push('#');
    }
    let subject = &case.subject.name;
    let (note, judge) = match is_foreign(case) {
        false => (String::new(), REPLAYED),
        true => (
            format!(
                "///\n/// Seamproof has no subject {subject:?} of its own: paste this into the crate that has it, and make its\n\
                 /// backend where `your_backend` stands.\n"
            ),
            JUDGED_HERE,
        ),
    };
    format!(
        "/// {}.\n{note}#[test]\nfn {}() {{\n    let case = seamproof_judge::case::Case::parse(r{hashes}\"{json}\"{hashes}.as_bytes());\n\
         \x20   let case = case.expect(\"the case is valid\");\n{judge}\
         \x20   assert!(matches!(verdict, seamproof_judge::verdict::Verdict::Pass(_)), \"{{verdict}}\");\n}}\n",
        prose::describe(&case.problem),
        name.replace('-', "_"),
    )
}

/// Lines of a test to paste that judge a case on its own subject.
const REPLAYED: &str =
    "    let verdict = seamproof::replay::replay(&case).expect(\"the subject is known\");\n";
/// Lines of a test to paste that judge a case on a subject of another crate.
const JUDGED_HERE: &str =
    "    let backend = your_backend(&case.subject.options); // your `Backend`, made with these options
    let verdict = seamproof_judge::evaluate::evaluate(&backend, &case.problem);
";

/// Name that stands for standard output in the place of a file's.
const STDOUT: &str = "-";

/// Whether a file's name stands for standard output.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new(STDOUT)
}

/// Returns the first of these named files in whose place there is, or will be, a file of a campaign's directory or
/// one of those named before it, with that one's name.
pub fn clash<'a>(dir: &Path, files: &[(&'a str, Option<&Path>)]) -> Option<(&'a str, String)> {
    let own = [EVENTS, RUN, SUMS, CHECKPOINT, LOCK];
    let mut taken: Vec<(PathBuf, String)> =
        own.iter().map(|name| (place(&dir.join(name)), format!("the campaign's own {name}"))).collect();
    for &(option, file) in files {
        let Some(file) = file.filter(|file| !is_stdout(file)) else { continue };
        let place = place(file);
        if let Some((_, of)) = taken.iter().find(|(other, _)| *other == place) {
            return Some((option, of.clone()));
        }
        taken.push((place, format!("the file of {option}")));
    }
    None
}

/// Returns the one path of a file that may not be there yet.
fn place(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let beside = || Some(fs::canonicalize(absolute.parent()?).ok()?.join(absolute.file_name()?));
    fs::canonicalize(path).ok().or_else(beside).unwrap_or_else(|| absolute.clone())
}

/// A log with one JSON value a line. Each line is handed to the system as soon as it is complete.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    to: Destination,
}

/// Place that an event log is written to.
#[derive(Debug)]
enum Destination {
    File(BufWriter<File>),
    Stdout,
    /// Standard output whose reader went away, which is no error.
    Gone,
}

impl EventLog {
    /// Makes the file, or empties it. The name `-` stands for standard output.
    pub fn create(path: &Path) -> Result<EventLog, RecordError> {
        let to = match is_stdout(path) {
            true => Destination::Stdout,
            false => Destination::File(BufWriter::new(created(path).at(path, "written")?)),
        };
        Ok(EventLog { path: path.to_owned(), to })
    }

    /// Opens the file behind its contents, or makes it. A line that was cut off is ended.
    pub fn append(path: &Path) -> Result<EventLog, RecordError> {
        let torn = fs::read(path).is_ok_and(|text| text.last().is_some_and(|&last| last != b'\n'));
        let file = File::options().append(true).create(true).open(path).at(path, "written")?;
        let mut file = BufWriter::new(file);
        if torn {
            file.write_all(b"\n").and_then(|()| file.flush()).at(path, "written")?;
        }
        Ok(EventLog { path: path.to_owned(), to: Destination::File(file) })
    }

    /// Appends the contents of another log.
    pub fn copy(&mut self, from: &Path) -> Result<(), RecordError> {
        let mut from = File::open(from).at(from, "read")?;
        let copied = match &mut self.to {
            Destination::File(file) => io::copy(&mut from, file).and_then(|_| file.flush()),
            Destination::Stdout => io::copy(&mut from, &mut io::stdout().lock()).map(drop),
            Destination::Gone => Ok(()),
        };
        self.told(copied)
    }

    /// Appends one event.
    pub fn write(&mut self, event: &impl Serialize) -> Result<(), RecordError> {
        let written = match &mut self.to {
            Destination::File(file) => write_line(file, event),
            Destination::Stdout => write_line(&mut io::stdout().lock(), event),
            Destination::Gone => Ok(()),
        };
        self.told(written)
    }

    /// Takes how writing ended.
    fn told(&mut self, written: io::Result<()>) -> Result<(), RecordError> {
        match written {
            Err(error) if matches!(self.to, Destination::Stdout) && error.kind() == ErrorKind::BrokenPipe => {
                self.to = Destination::Gone;
                Ok(())
            }
            written => written.at(&self.path, "written"),
        }
    }
}

fn write_line(to: &mut impl Write, event: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, event)?;
    to.write_all(b"\n")?;
    to.flush()
}

/// Makes a file, or empties it. A pipe that nobody reads is an error, where opening it would wait for a reader for ever.
fn created(path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    let _reader = {
        use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
        let is_pipe = fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
        let open =
            || File::options().write(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path);
        let tell = |error: io::Error| match error.raw_os_error() == Some(nix::errno::Errno::ENXIO as i32) {
            true => io::Error::new(error.kind(), "is a pipe that nobody reads"),
            false => error,
        };
        // It stays open until the file below is, so that a reader does not see an end between them.
        if is_pipe { Some(open().map_err(tell)?) } else { None }
    };
    File::create(path)
}

/// Writes a file so that it is there whole or not at all. A path that leads to something other than a regular file,
/// such as a device or a pipe, is refused, because a rename would put the file in its place.
pub fn write_whole(path: &Path, contents: &(impl AsRef<[u8]> + ?Sized)) -> Result<(), RecordError> {
    let dir = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let write = || {
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "is no regular file"));
        }
        let mut file = temporary_file(dir)?;
        file.write_all(contents.as_ref())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        sync_directory(dir)
    };
    write().map_err(without_temporary_name).at(path, "written")
}

/// Returns an error of a temporary file without the file's name, which says nothing to whoever named another file. The
/// crate `tempfile` puts it at the end.
fn without_temporary_name(error: io::Error) -> io::Error {
    match error.to_string().rsplit_once(" at path \"") {
        Some((what, _)) => io::Error::new(error.kind(), what.to_owned()),
        None => error,
    }
}

/// Makes a hidden file with the mode that the umask gives any other file (the crate's own default hides it from
/// others).
fn temporary_file(dir: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY_PREFIX);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(dir)
}

/// Makes a rename last through a loss of power.
fn sync_directory(dir: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
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
