//! The end of a campaign whose cases all fail, and say nothing new.
//!
//! A subject that is wrong everywhere spends its time on cases that fail like those before. So a campaign with a limit
//! of time ends early where each of its first [`FAILING_MIN`] judged cases failed, and the last [`ALIKE_MIN`] of them
//! had a symptom that others had before: the same check, identity and tensor, or the same end of the process. A case
//! that holds keeps the campaign going, unless no query sees a key in it; and so does a failure that the list of known
//! ones expects.
//!
//! Symptoms are known as soon as a case is judged, so that the rule waits for no shrinking.

use std::collections::BTreeSet;

use seamproof_judge::failure::Symptom;

/// Fewest judged cases, all of which failed, that end a campaign with a limit of time.
pub const FAILING_MIN: u64 = 200;
/// Fewest failing cases in a row, the last ones, that must show no new symptom.
pub const ALIKE_MIN: u64 = 100;

/// What the judged cases of a campaign have shown so far.
#[derive(Debug, Default)]
pub(super) struct Streak {
    symptoms: BTreeSet<Symptom>,
    failed: u64,
    /// Number of failing cases when the last new symptom came.
    new_at: u64,
    is_broken: bool,
}

impl Streak {
    /// Counts a case that failed.
    pub(super) fn add(&mut self, symptom: Symptom) {
        self.failed += 1;
        if self.symptoms.insert(symptom) {
            self.new_at = self.failed;
        }
    }

    /// Notes a case that did not fail, or was expected to.
    pub(super) fn end(&mut self) {
        self.is_broken = true;
    }

    /// Whether further cases would say nothing new.
    pub(super) fn is_long(&self) -> bool {
        !self.is_broken && self.failed >= FAILING_MIN && self.failed - self.new_at >= ALIKE_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_judge::finding::{Check, Finding};

    fn symptom(check: Check) -> Symptom {
        Symptom::of(&Finding::new(check, None, String::new()))
    }

    fn streak(before: u64, then: &[(Check, u64)]) -> Streak {
        let mut streak = Streak::default();
        for (check, count) in [(Check::Exact, before)].iter().chain(then) {
            (0..*count).for_each(|_| streak.add(symptom(*check)));
        }
        streak
    }

    #[test]
    fn a_streak_is_long_where_all_cases_fail_and_the_last_ones_alike() {
        assert!(!Streak::default().is_long());
        assert!(!streak(FAILING_MIN - 1, &[]).is_long());
        assert!(streak(FAILING_MIN, &[]).is_long());
        let new = streak(FAILING_MIN - 1, &[(Check::Crash, ALIKE_MIN)]);
        assert!(!new.is_long(), "the crash is new");
        assert!(streak(FAILING_MIN, &[(Check::Crash, 1), (Check::Exact, ALIKE_MIN)]).is_long());
    }

    #[test]
    fn a_case_that_holds_ends_a_streak_for_good() {
        let mut streak = streak(FAILING_MIN, &[]);
        streak.end();
        (0..FAILING_MIN).for_each(|_| streak.add(symptom(Check::Exact)));
        assert!(!streak.is_long());
    }
}
