//! How files are written: whole or line by line, to a place that no other file has, or to standard output.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{At, CHECKPOINT, EVENTS, LOCK, RUN, RecordError, SUMS};

/// Beginning of the names of files that are not whole yet.
pub(super) const TEMPORARY_PREFIX: &str = ".tmp-";
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
