//! What a campaign is to do: everything that decides its cases, and when it ends.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use seamproof_judge::generate::Profile;

/// Parts of a campaign, at most: whoever joins them names those that are missing.
pub const SHARDS_MAX: u64 = 1 << 20;

/// One of `count` parts of a campaign: the cases whose index is `index` modulo `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shard {
    index: u64,
    count: u64,
}

/// A text that names no [`Shard`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no shard; write I/N with I below N and N at most {SHARDS_MAX}, as in 0/4")]
pub struct ShardError(String);

impl Shard {
    /// The whole campaign.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    /// How many parts there are.
    pub fn count(self) -> u64 {
        self.count
    }

    /// Every part of as many.
    pub fn siblings(self) -> impl Iterator<Item = Shard> {
        (0..self.count).map(move |index| Shard { index, count: self.count })
    }

    /// The index of the shard's `turn`-th case; `None` when it overflows.
    fn case(self, turn: u64) -> Option<u64> {
        turn.checked_mul(self.count)?.checked_add(self.index)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Shard, ShardError> {
        let parts = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, count)) if index < count && count <= SHARDS_MAX => Ok(Shard { index, count }),
            _ => Err(ShardError(text.to_owned())),
        }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl Serialize for Shard {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Shard {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shard, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A campaign's seed, cases and end. The same plan gives the same cases and verdicts on every machine.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Seed of every case's geometry and of its subject's options.
    pub seed: u64,
    /// Sizes.
    pub profile: Profile,
    /// The case to end before, of which a shard runs its part; no limit when absent.
    pub cases: Option<u64>,
    /// No case begins after this long; no limit when absent.
    pub time: Option<Duration>,
    /// Which part of the campaign.
    pub shard: Shard,
    /// Threads.
    pub jobs: usize,
}

impl Plan {
    /// The index of the `turn`-th case; `None` past the last one.
    pub(super) fn case(&self, turn: u64) -> Option<u64> {
        let index = self.shard.case(turn)?;
        self.cases.is_none_or(|cases| index < cases).then_some(index)
    }

    /// Cases that this shard will run, where that is known.
    pub fn turns(&self) -> Option<u64> {
        self.cases.map(|cases| cases.saturating_sub(self.shard.index).div_ceil(self.shard.count))
    }

    /// Whether this many cases in this time are all that was asked for. A plan without limits ends when somebody says so.
    pub(super) fn fulfilled(&self, cases: u64, elapsed: Duration) -> bool {
        let enough = self.turns().is_some_and(|turns| cases >= turns);
        let long_enough = self.time.is_some_and(|time| elapsed >= time);
        enough || long_enough || (self.cases.is_none() && self.time.is_none())
    }

    /// A number drawn from the seed, a case and a purpose: the purposes of one case share nothing.
    pub(super) fn draw(&self, index: u64, purpose: &str) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&index.to_le_bytes()).update(purpose.as_bytes());
        let mut first = [0; 8];
        hasher.finalize_xof().fill(&mut first);
        u64::from_le_bytes(first)
    }

    /// Options of `seamproof run` that run exactly one case of this campaign.
    pub fn options_of_case(&self, index: u64) -> String {
        let cases = index.saturating_add(1);
        format!(
            "--seed {:#x} --profile {} --cases {cases} --shard {index}/{cases}",
            self.seed,
            self.profile.name()
        )
    }
}

/// What goes between a running campaign and whoever watches it: a request to stop, and counts.
#[derive(Debug, Default)]
pub struct Control {
    stop: Arc<AtomicBool>,
    /// Cases judged.
    pub cases: AtomicU64,
    /// Cases that failed.
    pub failed: AtomicU64,
}

impl Control {
    /// Counts of their own that begin at zero, and the same request to stop.
    pub fn sibling(&self) -> Control {
        Control { stop: Arc::clone(&self.stop), ..Control::default() }
    }

    /// Asks the campaign to end after the cases in flight. Safe at any time, from any thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A time after which no case begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    pub(super) fn after(time: Option<Duration>) -> Deadline {
        Deadline(time.and_then(|time| Instant::now().checked_add(time)))
    }

    pub(super) fn passed(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(cases: Option<u64>, shard: &str) -> Plan {
        let shard = shard.parse().expect("a shard");
        Plan { seed: 1, profile: Profile::Quick, cases, time: None, shard, jobs: 1 }
    }

    #[test]
    fn shards_partition_the_campaign() {
        for cases in [0, 1, 2, 3, 10, 11] {
            let mut all = Vec::new();
            for shard in ["0/3", "1/3", "2/3"] {
                let plan = plan(Some(cases), shard);
                let mine: Vec<u64> = (0..).map_while(|turn| plan.case(turn)).collect();
                assert_eq!(plan.turns(), Some(mine.len() as u64));
                all.extend(mine);
            }
            all.sort_unstable();
            assert_eq!(all, (0..cases).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_shard_is_below_its_count() {
        for wrong in ["", "1", "1/1", "0/0", "-1/2", "1/2/3", "a/b"] {
            assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
        }
        assert_eq!(plan(None, "2/3").case(u64::MAX), None);
    }

    #[test]
    fn a_plan_is_fulfilled_by_its_cases_or_its_time() {
        let second = Duration::from_secs(1);
        assert!(plan(Some(4), "0/2").fulfilled(2, Duration::ZERO));
        assert!(!plan(Some(4), "0/2").fulfilled(1, second));
        assert!(plan(None, "0/1").fulfilled(0, Duration::ZERO));
        let timed = Plan { time: Some(second), ..plan(Some(4), "0/1") };
        assert!(timed.fulfilled(1, second));
        assert!(!timed.fulfilled(3, second / 2));
    }

    #[test]
    fn one_case_can_be_run_by_itself() {
        let plan = plan(Some(413), "412/413");
        assert_eq!(plan.case(0), Some(412));
        assert_eq!(plan.case(1), None);
        assert!(plan.options_of_case(412).ends_with("--cases 413 --shard 412/413"));
    }
}
