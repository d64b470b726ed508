//! The slices of a night's campaign on disk: which count, and which were cut off.
//!
//! A *slice* is a run's directory (crate::record), `slice-` and its number; it *has ended* once its sums are there and its
//! event log tells of all their cases. One that *was cut off* has not, and lies where it was begun or was *set aside*:
//! renamed to `slice-NNNN.1` and so on. The claim: a slice counts only where it begins at the case at which the one before it
//! ended; any other that is there is told of, and set aside with all that it found before its place is used.

use std::io;
use std::path::{Path, PathBuf};

use super::home::{entries, name};
use super::{NightError, SHARES, Unread};
use crate::campaign::{MergeError, Part};
use crate::record::{EVENT_BYTES_MAX, EVENTS, SUMS, move_aside};
use seamproof_judge::files;
use seamproof_judge::prose::counted;

/// Whether a path of a night is that of a campaign.
pub(super) fn is_campaign(path: &Path) -> bool {
    SHARES.iter().any(|(profile, _)| name(path).ends_with(&format!("-{}", profile.name())))
}

/// The slices of a campaign, those that were set aside too.
pub(super) fn slices_of(campaign: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    let is_slice = |path: &PathBuf| name(path).starts_with("slice-");
    entries(campaign, unread).into_iter().filter(is_slice).collect()
}

pub(super) fn slice_of(campaign: &Path, number: usize) -> PathBuf {
    campaign.join(format!("slice-{number:04}"))
}

/// A slice that ended and begins at case `first`. Another one that has sums, or that cannot be read, is set aside: it is run
/// again, and what it found is told of as what any slice found that was cut off.
pub(super) fn ended(path: &Path, first: u64) -> Result<Option<Part>, NightError> {
    match Part::read_whole(path) {
        Ok(part) if part.stored.start.first == first => return Ok(Some(part)),
        Err(MergeError::NotEnded { .. } | MergeError::Missing { .. }) => {}
        _ => drop(move_aside(path)?),
    }
    Ok(None)
}

/// The first case of a slice that ended.
pub(super) fn begin_of(path: &Path) -> Option<u64> {
    Part::read(path).ok().map(|part| part.stored.start.first)
}

/// Sets slices aside that ended and do not count, as one before them is not there any more and no time is left for it.
pub(super) fn set_aside_from(campaign: &Path, number: usize) -> Result<(), NightError> {
    // What cannot be read is in the report anyway.
    for path in slices_of(campaign, &mut Vec::new()) {
        let counts = (0..number).any(|number| path == slice_of(campaign, number));
        if !counts && !is_aside(&path) && !files::is_absent(&path.join(SUMS)) {
            move_aside(&path)?;
        }
    }
    Ok(())
}

/// Those that did not end: they were set aside when they were run again, or lie where they were begun if the budget, which a
/// later start may make smaller, has no time left for them.
pub(super) fn cut_off_of(campaign: &Path, unread: &mut Vec<Unread>) -> Vec<PathBuf> {
    let is_cut_off = |path: &PathBuf| is_aside(path) || !path.join(SUMS).exists();
    slices_of(campaign, unread).into_iter().filter(is_cut_off).collect()
}

fn is_aside(slice: &Path) -> bool {
    name(slice).contains('.')
}

/// What was lost with those slices of a campaign.
pub(super) fn lost(campaign: &Path) -> Vec<String> {
    let told = |path: &PathBuf| {
        let cases = match cases_told(&path.join(EVENTS)) {
            Ok(cases) => counted(cases, "case"),
            Err(error) => format!("an unknown number of cases ({error})"),
        };
        let then = match is_aside(path) && path.with_extension("").exists() {
            true => "and run again",
            false => "and no time is left to run it again",
        };
        format!("{} was cut off after {cases} {then}", path.display())
    };
    // What cannot be read is in the report anyway.
    cut_off_of(campaign, &mut Vec::new()).iter().map(told).collect()
}

/// Of how many cases an event log tells.
fn cases_told(log: &Path) -> io::Result<u64> {
    if files::is_absent(log) {
        return Ok(0);
    }
    let mut cases = 0;
    for line in files::lines(log, EVENT_BYTES_MAX)? {
        cases += u64::from(line?.starts_with(b"{\"event\":\"case\""));
    }
    Ok(cases)
}
