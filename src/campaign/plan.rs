//! The plan of a campaign: everything that decides its cases, and when it ends.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use seamproof_judge::generate::Profile;

/// Parts of a campaign, at most: whoever joins them names those that are missing.
pub const SHARDS_MAX: u64 = 1 << 20;

/// Most cases that the search for the canary runs.
pub const CANARY_CASES_MAX: u64 = 500;

/// Work that one thread does in a second, until cases have shown it: about that of a core with the emulated subject.
const WORK_PER_SECOND: f64 = 4e7;
/// The sizes of cases are looked at where the time left is less than this many of the longest case so far.
const TIGHT: u32 = 16;
/// Least and most time after its end that a campaign goes on shrinking what it found. In between it may take as long
/// again as its cases.
const SHRINKING: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(120)];

/// One of `count` parts of a campaign: the cases whose index is `index` modulo `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shard {
    index: u64,
    count: u64,
}

/// Error of a text that names no [`Shard`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no shard; write I/N with I below N and N at most {SHARDS_MAX}, as in 0/4")]
pub struct ShardError(String);

impl Shard {
    /// The whole campaign.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    /// Returns the number of parts.
    pub fn count(self) -> u64 {
        self.count
    }

    /// Returns every part of the campaign.
    pub fn siblings(self) -> impl Iterator<Item = Shard> {
        (0..self.count).map(move |index| Shard { index, count: self.count })
    }

    /// Whether a case is one of this share.
    pub(super) fn has(self, case: u64) -> bool {
        case % self.count == self.index
    }

    /// Returns the number of the shard's cases before this one of the whole campaign.
    pub(super) fn turns_before(self, case: u64) -> u64 {
        case.saturating_sub(self.index).div_ceil(self.count)
    }

    /// Returns the index of the shard's `turn`-th case; `None` when it overflows.
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
    /// Sizes of the cases.
    pub profile: Profile,
    /// The case to end before, of which a shard runs its part; no limit when absent.
    pub cases: Option<u64>,
    /// No case begins after this long, nor one that the time left clearly cannot hold; no limit when absent.
    pub time: Option<Duration>,
    /// Part of the campaign.
    pub shard: Shard,
    /// Number of threads.
    pub jobs: usize,
}

impl Plan {
    /// Returns the index of the `turn`-th case; `None` past the last one.
    pub(super) fn case(&self, turn: u64) -> Option<u64> {
        let index = self.shard.case(turn)?;
        self.cases.is_none_or(|cases| index < cases).then_some(index)
    }

    /// Returns how long shrinking may go on from now, at the campaign's beginning; no limit without a limit of time.
    pub(super) fn shrinking(&self) -> Option<Duration> {
        self.time.map(|time| time.saturating_add(shrinking_after(time)))
    }

    /// Returns the number of cases that this shard will run, where that is known.
    pub fn turns(&self) -> Option<u64> {
        self.cases.map(|cases| self.shard.turns_before(cases))
    }

    /// Returns the plan of the search for the canary.
    pub(super) fn of_canary(&self) -> Plan {
        let profile = if self.profile == Profile::Large { Profile::Quick } else { self.profile };
        let cases = Some(CANARY_CASES_MAX);
        Plan { profile, cases, time: None, shard: Shard::WHOLE, ..self.clone() }
    }

    /// Returns the plan after the search for the canary, which took some of its time. Half of the time stays for the
    /// cases, and four fifths where the subject has failed by itself: the cases show more of that.
    pub fn after_search(&self, took: Duration, has_failed: bool) -> Plan {
        let least = |time: Duration| if has_failed { time * 4 / 5 } else { time / 2 };
        let left = |time: Duration| time.saturating_sub(took).max(least(time));
        Plan { time: self.time.map(left), ..self.clone() }
    }

    /// Whether this many cases in this time are all that was asked for. A plan without limits ends on request.
    pub(super) fn fulfilled(&self, cases: u64, elapsed: Duration) -> bool {
        let enough = self.turns().is_some_and(|turns| cases >= turns);
        let long_enough = self.time.is_some_and(|time| elapsed >= time);
        enough || long_enough || (self.cases.is_none() && self.time.is_none())
    }

    /// Returns a number drawn from the seed, a case and a purpose. The purposes of one case share nothing.
    pub(super) fn draw(&self, index: u64, purpose: &str) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&index.to_le_bytes()).update(purpose.as_bytes());
        let mut first = [0; 8];
        hasher.finalize_xof().fill(&mut first);
        u64::from_le_bytes(first)
    }

    /// Returns the options of `seamproof run` that run exactly one case of this campaign.
    pub fn options_of_case(&self, index: u64) -> String {
        let cases = index.saturating_add(1);
        format!(
            "--seed {:#x} --profile {} --cases {cases} --shard {index}/{cases}",
            self.seed,
            self.profile.name()
        )
    }
}

/// Returns how long shrinking may go on behind cases that took this long.
pub(super) fn shrinking_after(cases: Duration) -> Duration {
    let [least, most] = SHRINKING;
    cases.clamp(least, most)
}

/// Link between a running campaign and whoever watches it: a request to stop, and counts.
#[derive(Debug, Default)]
pub struct Control {
    stop: Arc<AtomicBool>,
    /// Number of judged cases.
    pub cases: AtomicU64,
    /// Number of failed cases.
    pub failed: AtomicU64,
}

impl Control {
    /// Returns a control with the same request to stop, and counts of its own that begin at zero.
    pub fn sibling(&self) -> Control {
        Control { stop: Arc::clone(&self.stop), ..Control::default() }
    }

    /// Asks the campaign to end after the cases in flight. Safe at any time, from any thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the campaign was asked to end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A point in time, if there is one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the point that lies this long from now.
    pub(super) fn after(time: Option<Duration>) -> Deadline {
        Deadline(time.and_then(|time| Instant::now().checked_add(time)))
    }

    /// Returns the earlier of two points.
    pub(super) fn or_sooner(self, other: Deadline) -> Deadline {
        Deadline(self.0.into_iter().chain(other.0).min())
    }

    /// Whether it lies in the past.
    pub(super) fn passed(self) -> bool {
        self.left() == Some(Duration::ZERO)
    }

    /// Returns the time that is left.
    fn left(self) -> Option<Duration> {
        self.0.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

/// An end that may come sooner than was planned.
#[derive(Debug, Default)]
pub(super) struct Term(Mutex<Deadline>);

impl Term {
    /// Returns the end at this time.
    pub(super) fn new(deadline: Deadline) -> Term {
        Term(Mutex::new(deadline))
    }

    /// Ends it at this time, unless its end comes sooner.
    pub(super) fn bring_forward(&self, deadline: Deadline) {
        let mut end = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *end = end.or_sooner(deadline);
    }

    /// Whether it has come.
    pub(super) fn passed(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).passed()
    }
}

/// The time of a campaign, and what its cases have taken of it so far.
///
/// The pace is seconds for each unit of work, a rough measure by which a case's time is foretold. A case is turned away
/// where its work at that pace takes longer than the time left. The caller lets the first case begin whatever its work
/// is, so that a short campaign is not turned away as a whole.
#[derive(Debug)]
pub(super) struct Budget {
    deadline: Deadline,
    spent: Mutex<Spent>,
}

/// Seconds and work of the cases that have ended, and the time of the longest.
#[derive(Clone, Copy, Debug)]
struct Spent {
    seconds: f64,
    work: f64,
    longest: Duration,
}

impl Budget {
    /// Begins to count now.
    pub(super) fn begin(time: Option<Duration>) -> Budget {
        // What no case has shown yet is taken from a usual machine.
        let spent = Spent { seconds: 1.0, work: WORK_PER_SECOND, longest: Duration::ZERO };
        Budget { deadline: Deadline::after(time), spent: Mutex::new(spent) }
    }

    /// Whether its time is over.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.passed()
    }

    /// Whether the size of the next case must be looked at before it begins: not while the longest one so far would
    /// fit many times.
    pub(super) fn is_tight(&self) -> bool {
        let Some(left) = self.deadline.left() else { return false };
        let longest = self.spent().longest;
        longest.is_zero() || left < longest.saturating_mul(TIGHT)
    }

    /// Whether a case of so much work may end in the time left.
    pub(super) fn holds(&self, work: u64) -> bool {
        let Some(left) = self.deadline.left() else { return true };
        let Spent { seconds, work: so_far, .. } = *self.spent();
        work as f64 * seconds / so_far <= left.as_secs_f64()
    }

    /// Counts a case that has ended.
    pub(super) fn add(&self, work: u64, time: Duration) {
        let mut spent = self.spent();
        spent.seconds += time.as_secs_f64();
        spent.work += work as f64;
        spent.longest = spent.longest.max(time);
    }

    fn spent(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
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
                let early = mine.iter().filter(|&&case| case < 7).count();
                assert_eq!(plan.shard.turns_before(7).min(mine.len() as u64), early as u64);
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
    fn no_case_begins_that_the_time_left_cannot_hold() {
        let minute = Duration::from_secs(60);
        let budget = Budget::begin(Some(minute));
        assert!(budget.is_tight(), "nothing is known yet");
        assert!(budget.holds(1) && !budget.holds(u64::MAX));
        // On a slow machine a thousand units take a second, so a minute does not hold a million.
        budget.add(1_000_000_000, Duration::from_secs(1_000_000));
        assert!(budget.holds(10_000) && !budget.holds(1_000_000));
        let quick = Budget::begin(Some(minute));
        quick.add(1_000, Duration::from_millis(1));
        assert!(!quick.is_tight());
        assert!(Budget::begin(Some(Duration::ZERO)).is_over());
        let endless = Budget::begin(None);
        assert!(!endless.is_over() && !endless.is_tight() && endless.holds(u64::MAX));
    }

    #[test]
    fn shrinking_ends_some_time_after_the_cases() {
        let timed = |seconds| Plan { time: Some(Duration::from_secs(seconds)), ..plan(None, "0/1") };
        let ends = |seconds| timed(seconds).shrinking().map(|time| time.as_secs());
        assert_eq!([1, 15, 3600].map(ends), [Some(11), Some(30), Some(3720)]);
        assert_eq!(plan(Some(4), "0/1").shrinking(), None);
    }

    #[test]
    fn a_term_is_brought_forward_and_never_put_off() {
        let term = Term::default();
        assert!(!term.passed());
        term.bring_forward(Deadline::after(Some(Duration::ZERO)));
        term.bring_forward(Deadline::after(Some(Duration::from_secs(60))));
        assert!(term.passed());
    }

    #[test]
    fn one_case_can_be_run_by_itself() {
        let plan = plan(Some(413), "412/413");
        assert_eq!(plan.case(0), Some(412));
        assert_eq!(plan.case(1), None);
        assert!(plan.options_of_case(412).ends_with("--cases 413 --shard 412/413"));
    }
}
