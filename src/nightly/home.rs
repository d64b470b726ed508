//! Where nights lie, and what their files are called.
//!
//! A *home* is the directory of all nights; a night's is `night-` and its number, from 1, in at least four digits. The claim:
//! a name is one night's or none's, and names that are nearly those of nights are told, so that nobody takes such a folder
//! for one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{NightError, Unread};
use seamproof_judge::files;

/// What a night is to do, on disk.
pub(super) const ORDERS: &str = "night.json";
/// What nights came to, in their home.
pub(super) const TREND: &str = "trend.jsonl";
/// The largest file that is read of a night or of all of them, but for cases and event logs.
pub(super) const JSON_BYTES_MAX: u64 = 64 << 20;

/// What a home holds of nights, by name.
pub(super) struct Nights {
    pub(super) numbers: BTreeSet<u32>,
    /// Names that are nearly those of nights.
    pub(super) others: Vec<String>,
}

pub(super) fn nights(home: &Path) -> Result<Nights, NightError> {
    let all = files::list(home)
        .map_err(|error| NightError::Read { path: home.to_owned(), what: error.to_string() })?;
    let numbers = all.iter().filter_map(|path| number_of(path)).collect();
    let is_other = |path: &&PathBuf| name(path).starts_with("night-") && number_of(path).is_none();
    let others = all.iter().filter(is_other).map(|path| name(path).to_owned()).collect();
    Ok(Nights { numbers, others })
}

/// The newest night of a home; `None` where the directory is none's.
pub fn newest_of(home: &Path) -> Option<PathBuf> {
    let last = nights(home).ok()?.numbers.last().copied()?;
    Some(dir_of(home, last))
}

/// The number of the night whose directory has this name; `night-1` and `night-0000` are none's.
pub(super) fn number_of(dir: &Path) -> Option<u32> {
    let number = name(dir).strip_prefix("night-")?.parse().ok()?;
    (number > 0 && dir_of(Path::new(""), number) == Path::new(name(dir))).then_some(number)
}

/// The directory of a night of a home.
pub(super) fn dir_of(home: &Path, number: u32) -> PathBuf {
    home.join(format!("night-{number:04}"))
}

/// What a directory holds, by name; that it cannot be read is added to `unread`.
pub(super) fn entries(dir: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    files::list(dir).unwrap_or_else(|error| {
        unread.push(Unread::new(dir, &error));
        Vec::new()
    })
}

pub(super) fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// A subject's text as the name of a directory.
pub(super) fn file_name(subject: &str) -> String {
    subject.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect()
}
