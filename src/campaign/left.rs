//! Findings of a part of a campaign that did not end, which no sum counts.
//!
//! A part that was killed leaves complete findings (crate::record) and no sums. A part whose sums or event log cannot be
//! read is taken for one. Nobody knows how many cases such findings stand for, so they are in no summary. Each is told of
//! once, and so is a file or folder that cannot be read and may hold some.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use serde::Serialize;

use crate::paste::replay_command;
use crate::record::FINDINGS;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::prose::describe;

/// A finding that no sum tells of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftFinding {
    /// Directory of the part that found it.
    pub shard: String,
    /// File of its case, or what cannot be read.
    pub file: String,
    /// Contents of the file.
    #[serde(flatten)]
    pub holds: Holds,
    /// Command that shows it again.
    pub replay: String,
}

/// Contents of a finding's file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Holds {
    /// A failing case.
    Finding {
        /// Its key, with all features of the case where that was not shrunk.
        key: FailureKey,
        /// The finding.
        #[serde(flatten)]
        found: Box<Found>,
        /// The case in words.
        problem: String,
    },
    /// Nothing readable.
    Unread {
        /// The reason, with the file.
        unread: String,
    },
}

impl LeftFinding {
    fn new(shard: &Path, path: &Path, holds: Holds) -> LeftFinding {
        let [shard, file] = [shard, path].map(|path| path.display().to_string());
        LeftFinding { shard, file, holds, replay: replay_command(path, None) }
    }

    /// Whether it is surely the subject's end, and no wrong result.
    pub fn is_end(&self) -> bool {
        matches!(&self.holds, Holds::Finding { found, .. } if found.finding.check.is_end())
    }
}

/// Returns the findings of a part that did not end, by name.
pub fn left_in(shard: &Path) -> Vec<LeftFinding> {
    let folder = shard.join(FINDINGS);
    match files::list(&folder) {
        Ok(all) => {
            let cases = all.iter().filter(|path| files::is_json(path));
            cases.map(|path| LeftFinding::new(shard, path, held_by(path))).collect()
        }
        Err(error) => {
            let unread = format!("{}: cannot be read and may hold findings: {error}", folder.display());
            vec![LeftFinding::new(shard, &folder, Holds::Unread { unread })]
        }
    }
}

fn held_by(path: &Path) -> Holds {
    match Case::load(path) {
        Ok(Case { subject, problem, found: Some(found), .. }) => Holds::Finding {
            key: FailureKey::of(&found.finding, &subject.name, &problem),
            problem: describe(&problem),
            found: Box::new(found),
        },
        Ok(_) => Holds::Unread { unread: format!("{}: says of no finding", path.display()) },
        Err(error) => Holds::Unread { unread: error.to_string() },
    }
}

impl Display for LeftFinding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.holds {
            Holds::Finding { problem, found, .. } => writeln!(f, "FAIL      {problem}: {found}")?,
            Holds::Unread { unread } => writeln!(f, "FAIL      {unread}")?,
        }
        write!(f, "          replay: {}", self.replay)
    }
}
