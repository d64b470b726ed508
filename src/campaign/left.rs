//! What a part of a campaign found that did not end: findings on disk that no sum tells of.
//!
//! A part that was killed leaves complete findings (crate::record) and no sums; of one whose sums or event log cannot be read
//! the same is as good as true. Nobody knows how many cases such findings are of, so they are in no summary. The claim: each
//! of them is told of once, and so is what cannot be read and may be one or hold some.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use serde::Serialize;

use crate::paste::{replay_command, typed};
use crate::record::FINDINGS;
use seamproof_judge::case::{Case, Found};
use seamproof_judge::failure::FailureKey;
use seamproof_judge::files;
use seamproof_judge::prose::describe;

/// A finding that no sum tells of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftFinding {
    /// The directory of the part that found it.
    pub shard: String,
    /// The file of its case, or what cannot be read.
    pub file: String,
    /// What that holds.
    #[serde(flatten)]
    pub holds: Holds,
    /// The command that shows it again.
    pub replay: String,
}

/// What a file of a finding holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Holds {
    /// A failing case.
    Finding {
        /// What makes it different from others, with all features of the case where that was not shrunk.
        key: FailureKey,
        /// What was found.
        #[serde(flatten)]
        found: Box<Found>,
        /// The case in words.
        problem: String,
    },
    /// Nothing that can be read.
    Unread {
        /// Why not, with the file.
        unread: String,
    },
}

impl LeftFinding {
    fn new(shard: &Path, path: &Path, holds: Holds) -> LeftFinding {
        let [shard, file] = [shard, path].map(|path| path.display().to_string());
        LeftFinding { shard, file, holds, replay: replay_command(path, None) }
    }

    /// Whether it is the subject's end for sure, and no wrong result.
    pub fn is_end(&self) -> bool {
        matches!(&self.holds, Holds::Finding { found, .. } if found.finding.check.is_end())
    }
}

/// The findings of a part that did not end, by name.
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
        write!(f, "          replay: {}", typed(&self.replay))
    }
}
