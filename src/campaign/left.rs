//! Findings on disk that no sum counts, because the campaign that found them did not end.
//!
//! A campaign that was killed leaves complete findings (crate::record) and no sums. A shard whose sums or event log
//! cannot be read is taken for one. Nobody knows how many cases such findings stand for, so they are in no summary, but
//! they are told of, and so is a file or folder that cannot be read and may hold some.

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::paste::replay_command;
use crate::record::FINDINGS;
use seamproof_judge::case::Case;
use seamproof_judge::files;
use seamproof_judge::prose::counted;

/// Findings of runs, as they lie on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnDisk {
    /// Case files.
    pub cases: Vec<PathBuf>,
    /// Files and folders that cannot be read and may hold more, each with the reason.
    pub unread: Vec<String>,
}

impl OnDisk {
    /// Adds what lies in the folder of a run.
    pub fn add(&mut self, run: &Path) {
        let folder = run.join(FINDINGS);
        match files::list(&folder) {
            Ok(all) => self.cases.extend(all.into_iter().filter(|path| files::is_json(path))),
            Err(error) => self.cannot_read(&folder, &error),
        }
    }

    /// Adds a file or folder that cannot be read.
    pub fn cannot_read(&mut self, path: &Path, why: &dyn Display) {
        self.unread.push(format!("{}: cannot be read and may hold findings: {why}", path.display()));
    }
}

/// What a shard or a night found that did not end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Its directory.
    pub dir: String,
    /// Number of its findings.
    pub findings: usize,
    /// Number of the findings in which the subject crashed or hung.
    pub ends: usize,
    /// Files and folders that cannot be read and may hold more, each with the reason.
    pub unread: Vec<String>,
    /// Command that judges its findings again.
    pub replay: String,
}

impl Left {
    /// Returns what lies in this directory; `None` where nothing was found.
    pub fn of(dir: &Path, OnDisk { cases, mut unread }: OnDisk) -> Option<Left> {
        let (mut findings, mut ends) = (0, 0);
        for path in cases {
            match Case::load(&path) {
                Ok(case) => {
                    findings += 1;
                    ends += usize::from(case.found.is_some_and(|found| found.finding.check.is_end()));
                }
                Err(error) => unread.push(error.to_string()),
            }
        }
        // A shard's folder of findings may be replayed even where the shard lost its other files on the way here.
        let folder = dir.join(FINDINGS);
        let replay = replay_command(if folder.is_dir() { &folder } else { dir }, None);
        let left = Left { dir: dir.display().to_string(), findings, ends, unread, replay };
        (left.count() > 0).then_some(left)
    }

    /// Returns the number of findings, with one for each file or folder that cannot be read.
    pub fn count(&self) -> usize {
        self.findings + self.unread.len()
    }

    /// Whether every finding is surely the subject's crash or hang, and no wrong result.
    pub fn is_end(&self) -> bool {
        self.ends == self.count()
    }
}

impl Display for Left {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} did not end and left {}", self.dir, counted(self.findings as u64, "finding"))?;
        self.unread.iter().try_for_each(|what| write!(f, "; {what}"))
    }
}
