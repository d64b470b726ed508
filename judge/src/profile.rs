//! A locked numeric profile: what a subject was found to round, and in which order, kept as a file.
//!
//! [`crate::calibrate`] finds a profile; the file is committed under `judge/profiles/` and built into this program.
//! From then on the judge replays the subject's roundings (tier R), and a result outside them means that its numerics
//! changed. A subject without a file is judged by the tiers W and T alone.

use seamproof_oracle::Problem;
use seamproof_oracle::envelope::{KeyOrder, Merges, Partition, Profile};
use seamproof_oracle::replay::{Launch, Replay};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{MergeOrder, build_with};
use serde::{Deserialize, Serialize};

/// The version that this program reads and writes.
pub const LOCK_VERSION: u32 = 2;

/// The files, by the name of the subject.
const LOCKED: [(&str, &str); 1] = [("emulated", include_str!("../profiles/emulated.json"))];

/// A profile as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// [`LOCK_VERSION`].
    pub version: u32,
    /// The subject's name.
    pub backend: String,
    /// See [`Profile::rounds_weights`].
    pub rounds_weights: bool,
    /// See [`Profile::scales_logit_gradients`].
    pub scales_logit_gradients: bool,
    /// See [`Profile::scales_queries`].
    pub scales_queries: bool,
    /// Keys of a tile; `null` where each instance declares its own (the emulated backend's options choose it).
    pub kv_tile: Option<usize>,
    /// See [`Profile::kv_order`].
    pub kv_order: KeyOrder,
    /// When partial results of several launches are merged, and so what is rounded on the way; `null` where each instance
    /// declares it.
    pub merge: Option<MergeOrder>,
    /// The seed of the calibration.
    pub seed: u64,
    /// Its cases.
    pub cases: u64,
}

impl Lock {
    /// The profile of an instance that declares tiles of so many keys.
    pub fn profile(&self, declared: usize) -> Profile {
        Profile {
            rounds_weights: self.rounds_weights,
            scales_logit_gradients: self.scales_logit_gradients,
            scales_queries: self.scales_queries,
            kv_tile: self.kv_tile.unwrap_or(declared),
            kv_order: self.kv_order,
        }
    }
}

/// How the schedule of a problem merges in this order; `None` where there is no such schedule.
pub fn merges(problem: &Problem, order: MergeOrder) -> Option<Merges> {
    Some(build_with(problem, order).ok()?.partition(Tiles { q: 1, kv: 1 }).merges)
}

/// What tier R replays of a subject of this name, partition and launches: nothing without a locked profile.
pub fn replay(
    backend: &str,
    problem: &Problem,
    partition: Partition,
    launches: impl FnOnce() -> Option<Vec<Launch>>,
) -> Option<Replay> {
    let lock = locked(backend)?;
    let merges = lock.merge.and_then(|order| merges(problem, order));
    Some(Replay { profile: lock.profile(partition.kv_tile), launches: launches()?, merges })
}

/// The locked profile of a subject of this name. A file of another version counts as none; a test reads them all.
pub fn locked(backend: &str) -> Option<Lock> {
    let (_, text) = LOCKED.iter().find(|(name, _)| *name == backend)?;
    let lock: Lock = serde_json::from_str(text).ok()?;
    (lock.version == LOCK_VERSION && lock.backend == backend).then_some(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_locked_profile_can_be_read() {
        for (name, _) in LOCKED {
            assert!(locked(name).is_some(), "{name}");
        }
    }
}
