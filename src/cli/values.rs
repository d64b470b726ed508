//! `seamproof values`: cases and bytes of choices as values, for a fuzzer's corpus.

use std::fs;
use std::path::{Path, PathBuf};

use super::CliError;
use super::exit::Exit;
use super::output::{complain, print_line};
use crate::fuzz;
use crate::record::{RecordError, make_dir};
use seamproof_judge::case::{Case, CaseError};
use seamproof_judge::files;
use seamproof_judge::generate::value_of;

/// Length of the largest file of bytes that is read. No fuzzer makes a larger one.
const CHOICES_BYTES_MAX: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  seamproof values corpus/regressions --out corpus/fuzz/case_value      stored cases
  seamproof values fuzz/corpus/case_bytes --out corpus/fuzz/case_value  bytes of choices, as the target case_bytes takes them";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Stored cases (*.json) and files of bytes, or directories of them
    #[arg(required = true, value_name = "FILE|DIR")]
    from: Vec<PathBuf>,
    /// Directory of values; a file's name is the digest of what it holds
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    make_dir(&args.out)?;
    let (mut count, mut new) = (0, 0);
    for path in files_of(&args.from)? {
        let value = value(&path)?;
        let name = blake3::hash(&value).to_hex();
        let place = args.out.join(&name[..16]);
        count += 1;
        if !place.exists() {
            let written = fs::write(&place, &value);
            written.map_err(|source| RecordError::Io { path: place, what: "written", source })?;
            new += 1;
        }
    }
    print_line(&format_args!("values    {count} read, {new} new in {}", args.out.display()));
    if count == 0 {
        complain(
            "no file was there to be read: name stored cases, files of bytes, or directories that hold some",
        );
        return Ok(Exit::TooLittle);
    }
    Ok(Exit::Held)
}

/// Returns the nearest value of a stored case, or the value that the bytes of any other file choose.
fn value(path: &Path) -> Result<Vec<u8>, CliError> {
    if files::is_json(path) {
        return Ok(fuzz::to_bytes(&value_of(&Case::load(path)?.problem)));
    }
    let bytes = files::read(path, CHOICES_BYTES_MAX)
        .map_err(|source| CaseError::Read { path: path.to_owned(), source })?;
    Ok(fuzz::to_bytes(&fuzz::choices(&bytes)))
}

fn files_of(paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    let mut files = Vec::new();
    for path in paths {
        let unread = |source| CaseError::Read { path: path.clone(), source };
        if path.is_dir() {
            let entries = fs::read_dir(path).map_err(unread)?;
            let inside = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
            files.extend(inside.map_err(unread)?.into_iter().filter(|path| path.is_file()));
        } else {
            files.push(path.clone());
        }
    }
    files.sort();
    Ok(files)
}
