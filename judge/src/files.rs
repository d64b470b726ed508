//! Reading of files and folders that anybody may have changed since they were written.
//!
//! Every read ends, whatever lies there, and whatever cannot be read is an error. Only *regular* files are read,
//! after links are followed, because a pipe may never give anything. No more of a file is read than a limit allows.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Opens a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // The check comes before the open, because opening a pipe waits for its writer.
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "is no regular file")),
    }
}

/// Reads a regular file of at most `limit` bytes. A larger one is [`ErrorKind::FileTooLarge`]. The limit is checked
/// while reading, because a file may grow.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("larger than {limit} bytes")));
    }
    Ok(bytes)
}

/// Reads a regular file line by line, without line ends. A line longer than `limit` bytes is
/// [`ErrorKind::FileTooLarge`], and nothing is read after it.
pub fn lines(path: &Path, limit: u64) -> io::Result<impl Iterator<Item = io::Result<Vec<u8>>> + use<>> {
    let mut file = Some(BufReader::new(open(path)?));
    Ok(std::iter::from_fn(move || {
        let mut line = Vec::new();
        let read = file.as_mut()?.take(limit + 1).read_until(b'\n', &mut line);
        match read {
            Ok(0) => return None,
            Ok(_) if line.last() == Some(&b'\n') => drop(line.pop()),
            Ok(_) if line.len() as u64 <= limit => {}
            Ok(_) => {
                file = None;
                let what = format!("a line is longer than {limit} bytes");
                return Some(Err(io::Error::new(ErrorKind::FileTooLarge, what)));
            }
            Err(error) => {
                file = None;
                return Some(Err(error));
            }
        }
        Some(Ok(line))
    }))
}

/// Whether nothing has this name. A dangling link counts as present, and so does a path that may not be inspected.
pub fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Returns the paths in a folder, sorted by name; none where there is no folder.
pub fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    if is_absent(dir) {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path()));
    let mut all = entries.collect::<io::Result<Vec<_>>>()?;
    all.sort();
    Ok(all)
}

/// Whether the path ends in `.json`.
pub fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    /// Test of the check before the open: without it, this waits forever.
    #[test]
    fn a_pipe_and_a_device_are_refused_through_links_too() {
        let place = tempfile::tempdir().unwrap();
        let [pipe, link, null] = ["pipe", "link", "null"].map(|name| place.path().join(name));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        symlink(&pipe, &link).unwrap();
        symlink("/dev/null", &null).unwrap();
        for path in [&pipe, &link, &null, &place.path().to_owned()] {
            let error = read(path, 1).unwrap_err().to_string();
            assert_eq!(error, "is no regular file", "{}", path.display());
        }
    }

    #[test]
    fn reading_is_bounded() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [b' '; 11]).unwrap();
        assert_eq!(read(file.path(), 11).unwrap().len(), 11);
        assert_eq!(read(file.path(), 10).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn lines_are_bounded_and_the_last_one_may_lack_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            fs::write(file.path(), text).unwrap();
            lines(file.path(), 3).unwrap().map(|line| line.map_err(|error| error.kind())).collect::<Vec<_>>()
        };
        let line = |text: &str| Ok(text.as_bytes().to_vec());
        assert_eq!(read(""), []);
        assert_eq!(read("abc\n\nde"), [line("abc"), line(""), line("de")]);
        assert_eq!(read("abc\nabc"), [line("abc"), line("abc")]);
        assert_eq!(read("a\nabcd\nb\n"), [line("a"), Err(ErrorKind::FileTooLarge)]);
        assert_eq!(read("abcd"), [Err(ErrorKind::FileTooLarge)]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_empty_and_a_link_that_leads_nowhere_is_not() {
        let place = tempfile::tempdir().unwrap();
        let [absent, link, file] = ["absent", "link", "file"].map(|name| place.path().join(name));
        symlink(place.path().join("nowhere"), &link).unwrap();
        fs::write(&file, "").unwrap();
        assert!(list(&absent).unwrap().is_empty());
        assert!(list(&link).is_err() && list(&file).is_err() && list(&file.join("below")).is_err());
        assert_eq!(list(place.path()).unwrap(), [file, link]);
    }
}
