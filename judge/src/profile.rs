//! A locked numeric profile: which roundings a subject was found to make, and in which order, kept as a file.
//!
//! [`crate::calibrate`] finds a profile. The file is committed under `judge/profiles/` and built into this program.
//! From then on the judge replays the subject's roundings (tier R), and a result outside them means that its numerics
//! have changed. A subject without a file is judged by tiers W and T alone.

use seamproof_oracle::Problem;
use seamproof_oracle::envelope::{
    Arithmetic, Delta, GroupSums, KeyOrder, Merges, NumericProfile, Partition, WeightRounding,
};
use seamproof_oracle::replay::{Replay, ReplayedLaunch};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::{MergeOrder, build_with};
use serde::{Deserialize, Serialize};

/// Version of the format that this program reads and writes.
pub const LOCK_VERSION: u32 = 3;

/// Profile files by the name of the subject.
const LOCKED: [(&str, &str); 1] = [("emulated", include_str!("../profiles/emulated.json"))];

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
    /// Keys of a tile; `null` where each instance declares its own. The options of the emulated backend choose it.
    pub kv_tile: Option<usize>,
    /// Order in which a launch takes its tiles, [`NumericProfile::kv_order`].
    pub kv_order: KeyOrder,
    /// Time at which partial results of several launches are merged, which decides what is rounded on the way; `null`
    /// where each instance declares it.
    pub merge: Option<MergeOrder>,
    /// Seed of the calibration.
    pub seed: u64,
    /// Number of cases in the calibration.
    pub cases: u64,
}

impl Lock {
    /// Returns the profile of an instance that declares this arithmetic and tiles of `declared` keys; `None` where the
    /// lock leaves a choice to the instance, and the instance does not declare it.
    pub fn profile(&self, arithmetic: &Arithmetic, declared: usize) -> Option<NumericProfile> {
        let weights = self.weights.unwrap_or(arithmetic.weights);
        let delta = self.delta.unwrap_or(arithmetic.delta);
        let group_sums = self.group_sums.unwrap_or(arithmetic.group_sums);
        let is_known = weights != WeightRounding::Unknown
            && delta != Delta::Unknown
            && group_sums != GroupSums::Unknown;
        is_known.then(|| NumericProfile {
            rounds_weights: self.rounds_weights,
            scales_logit_gradients: self.scales_logit_gradients,
            scales_queries: self.scales_queries,
            kv_tile: self.kv_tile.unwrap_or(declared),
            kv_order: self.kv_order,
            weights,
            delta,
            group_sums,
        })
    }
}

/// Returns how a problem's schedule merges in this order; `None` where there is no such schedule.
pub fn merges(problem: &Problem, order: MergeOrder) -> Option<Merges> {
    Some(build_with(problem, order).ok()?.partition(Tiles { q: 1, kv: 1 }).merges)
}

/// Returns what tier R replays for a subject of this name, with its arithmetic, partition and launches; `None` without a
/// locked profile or without launches.
pub fn replay(
    backend: &str,
    problem: &Problem,
    arithmetic: &Arithmetic,
    partition: Partition,
    launches: impl FnOnce() -> Option<Vec<ReplayedLaunch>>,
) -> Option<Replay> {
    let lock = locked(backend)?;
    let merges = lock.merge.and_then(|order| merges(problem, order));
    let profile = lock.profile(arithmetic, partition.kv_tile)?;
    Some(Replay { profile, launches: launches()?, merges })
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
    fn every_locked_profile_can_be_read() {
        for (name, _) in LOCKED {
            assert!(locked(name).is_some(), "{name}");
        }
    }
}
