//! A locked numeric profile: which roundings a subject was found to make, and in which order, kept as a file.
//!
//! [`crate::calibrate`] finds a profile. The file of a built-in subject is committed under `judge/profiles/` and built
//! into this program. That of a subject from elsewhere lies [`beside`] its adapter, with the versions for which it
//! holds. From then on the judge replays the subject's roundings (tier R), and a result outside them means that its
//! numerics have changed. A subject without a file is judged by tiers W and T alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use seamproof_oracle::envelope::{
    Arithmetic, Delta, DsWeights, GroupSums, Joints, KeyOrder, NumericProfile, Partition, TileFactor,
    WeightRounding,
};
use seamproof_oracle::replay::{Replay, ReplayedKeys, ReplayedLaunch, ReplayedTiles};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{Band, Pass, Positions, Problem, Quantity, Side};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{MergeOrder, build_with};
use serde::{Deserialize, Serialize};

/// Version of the format that this program reads and writes.
pub const LOCK_VERSION: u32 = 3;

/// Profile files by the name of the subject, with the option that names a profile where it has several.
const LOCKED: [(&str, &str); 5] = [
    ("emulated", include_str!("../profiles/emulated.json")),
    ("emulated-fp8", include_str!("../profiles/emulated-fp8.json")),
    ("emulated-fp8:sequence=cudnn", include_str!("../profiles/emulated-fp8-cudnn.json")),
    ("cuda", include_str!("../profiles/cuda.json")),
    ("cuda-fp8", include_str!("../profiles/cuda-fp8.json")),
];

/// A profile as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Version of the format, [`LOCK_VERSION`].
    pub version: u32,
    /// Name of the subject.
    pub backend: String,
    /// Whether weights are rounded, [`NumericProfile::rounds_weights`].
    pub rounds_weights: bool,
    /// Whether logit gradients are scaled before they are rounded, [`NumericProfile::scales_logit_gradients`].
    pub scales_logit_gradients: bool,
    /// Whether queries are scaled and rounded before the product, [`NumericProfile::scales_queries`].
    pub scales_queries: bool,
    /// Order of rounding weights and normalising them; `null` where each instance declares its own.
    pub weights: Option<WeightRounding>,
    /// Source of D; `null` where each instance declares its own.
    pub delta: Option<Delta>,
    /// Format of the gradients of one query head; `null` where each instance declares its own.
    pub group_sums: Option<GroupSums>,
    /// Weights that dS is made of; `null` where each instance declares its own. A file without this field was written
    /// when all were taken to be unrounded.
    #[serde(default = "unrounded")]
    pub ds_weights: Option<DsWeights>,
    /// Keys of a tile; `null` where each instance declares its own. The options of the emulated backend choose it.
    pub kv_tile: Option<usize>,
    /// Order in which a launch takes its tiles, [`NumericProfile::kv_order`].
    pub kv_order: KeyOrder,
    /// Time at which partial results of several launches are merged, which decides what is rounded on the way; `null`
    /// where each instance declares it.
    pub merge: Option<MergeOrder>,
    /// Rule of the factor that a tile's dS has, [`NumericProfile::tile_factor`]; `null` where tiles have none. In FP8,
    /// gradients of tiles with factors are replayed only where a rule is locked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile_factor: Option<TileFactor>,
    /// Seed of the calibration.
    pub seed: u64,
    /// Number of cases in the calibration.
    pub cases: u64,
    /// Versions of what ran, by name: the profile holds for no others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, String>,
}

fn unrounded() -> Option<DsWeights> {
    Some(DsWeights::Unrounded)
}

/// Reason why a lock file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// A file that cannot be read.
    #[error("{}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Reason of the system.
        source: std::io::Error,
    },
    /// A text that is no profile.
    #[error("{}: no numeric profile: {source}; run `seamproof calibrate` with --lock again", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// Place and reason.
        source: serde_json::Error,
    },
    /// A profile in another version of the format.
    #[error(
        "{}: version {version} of the format, and this program reads {LOCK_VERSION}; run `seamproof calibrate` with \
         --lock again", file.display()
    )]
    Version {
        /// The file.
        file: PathBuf,
        /// Version of the file.
        version: u32,
    },
}

impl Lock {
    /// Reads a lock file; `None` where there is none.
    pub fn read(file: &Path) -> Result<Option<Lock>, LockError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(LockError::Read { file: file.to_owned(), source }),
        };
        let wrong = |source| LockError::Text { file: file.to_owned(), source };
        // The fields of another version are others, so its number is read first.
        let Versioned { version } = serde_json::from_str(&text).map_err(wrong)?;
        if version != LOCK_VERSION {
            return Err(LockError::Version { file: file.to_owned(), version });
        }
        serde_json::from_str(&text).map(Some).map_err(wrong)
    }

    /// Returns the profile as the text of a lock file.
    pub fn text(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("a profile is plain data");
        text + "\n"
    }

    /// Returns what tier R replays for a subject with this profile, from its arithmetic, partition and launches; `None`
    /// where a choice or the launches are not known. The tiles of the backward are asked for where the rule of their
    /// factors is locked, or where factors are given.
    pub fn replay(
        &self,
        problem: &Problem,
        arithmetic: &Arithmetic,
        partition: Partition,
        launches: impl FnOnce() -> Option<Vec<ReplayedLaunch>>,
        tiles: impl FnOnce() -> Option<ReplayedTiles>,
    ) -> Option<Replay> {
        let joints = self.merge.and_then(|order| joints(problem, order));
        let profile = self.profile(arithmetic, partition.kv_tile)?;
        let has_factors = profile.tile_factor.is_some() || Quantity::Ds.is_given(&problem.precision);
        let has_tiles = problem.pass == Pass::Backward && has_factors;
        let tiles = if has_tiles { tiles() } else { None };
        Some(Replay { profile, launches: launches()?, tiles, joints })
    }

    /// Returns the profile of an instance that declares this arithmetic and tiles of `declared` keys; `None` where the
    /// lock leaves a choice to the instance, and the instance does not declare it.
    pub fn profile(&self, arithmetic: &Arithmetic, declared: usize) -> Option<NumericProfile> {
        let weights = self.weights.unwrap_or(arithmetic.weights);
        let delta = self.delta.unwrap_or(arithmetic.delta);
        let group_sums = self.group_sums.unwrap_or(arithmetic.group_sums);
        let ds_weights = self.ds_weights.unwrap_or(arithmetic.ds_weights);
        let is_known = weights != WeightRounding::Unknown
            && delta != Delta::Unknown
            && group_sums != GroupSums::Unknown
            && ds_weights != DsWeights::Unknown;
        is_known.then(|| NumericProfile {
            rounds_weights: self.rounds_weights,
            scales_logit_gradients: self.scales_logit_gradients,
            scales_queries: self.scales_queries,
            kv_tile: self.kv_tile.unwrap_or(declared),
            kv_order: self.kv_order,
            weights,
            delta,
            group_sums,
            ds_weights,
            tile_factor: self.tile_factor,
        })
    }
}

/// Returns how a problem's schedule merges outs and sums gradients in this order; `None` where there is no such
/// schedule.
pub fn joints(problem: &Problem, order: MergeOrder) -> Option<Joints> {
    Some(build_with(problem, order).ok()?.partition(Tiles { q: 1, kv: 1 }).joints())
}

/// Returns the place of the lock file of an adapter: `kernel.lock.json` beside `kernel.py`.
pub fn beside(adapter: &Path) -> PathBuf {
    adapter.with_extension("lock.json")
}

/// Returns the launches of a subject on one rank that shows each query all keys of its sequence together; `None` on
/// several ranks.
pub fn whole_launches(problem: &Problem) -> Option<Vec<ReplayedLaunch>> {
    let launch = |(sequence, both)| {
        let line = |side: Side| Positions { start: 0, step: 1, len: run_of(both, side).len };
        let all = ReplayedKeys { first: 0, line: line(Side::Kv), band: Band { lo: None, hi: None } };
        let (queries, keys) = (line(Side::Q), vec![all]);
        ReplayedLaunch { sequence, heads: 0..problem.heads.q, first: 0, queries, keys, makes_code: false }
    };
    problem.parallel.is_whole().then(|| problem.sequences.iter().enumerate().map(launch).collect())
}

/// Returns the locked profile of a subject of this name. A file of another version counts as none; a test reads all
/// files.
pub fn locked(backend: &str) -> Option<Lock> {
    let (_, text) = LOCKED.iter().find(|(name, _)| *name == backend)?;
    let lock: Lock = serde_json::from_str(text).ok()?;
    (lock.version == LOCK_VERSION && lock.backend == backend).then_some(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_is_read_back_and_others_are_refused() {
        let folder = std::env::temp_dir().join(format!("seamproof-lock-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let file = beside(&folder.join("kernel.py"));
        assert!(file.ends_with("kernel.lock.json"));
        assert!(Lock::read(&file).expect("no file is no error").is_none());
        let versions = BTreeMap::from([("torch".to_owned(), "2.11.0".to_owned())]);
        let lock = Lock { versions, ..locked("emulated").expect("a profile") };
        let read = |text: &str| {
            std::fs::write(&file, text).expect("the file is writable");
            Lock::read(&file)
        };
        assert_eq!(read(&lock.text()).expect("what was written"), Some(lock.clone()));
        let old = lock.text().replace("\"version\": 3", "\"version\": 2");
        assert!(matches!(read(&old), Err(LockError::Version { version: 2, .. })));
        assert!(matches!(read("{}"), Err(LockError::Text { .. })));
        std::fs::remove_dir_all(&folder).expect("the folder is the test's own");
    }

    #[test]
    fn every_locked_profile_can_be_read() {
        for (name, _) in LOCKED {
            assert!(locked(name).is_some(), "{name}");
        }
    }
}
