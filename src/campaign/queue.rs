//! Puts finished cases back into the order of their turns.
//!
//! Threads finish cases in any order. Whoever finishes the one that is next folds it, and all that wait behind it, into
//! the ledger, while the others go on. A fold that shrinks takes minutes in which thousands of cases are judged; so
//! nobody runs more than [`RUN_AHEAD_MAX`] cases ahead of it, nor past [`FAILURES_AHEAD_MAX`] failures, which are
//! large, and memory stays bounded.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::ledger::Ledger;
use super::outcome::Outcome;

/// Cases that may be finished before an earlier one is folded.
pub const RUN_AHEAD_MAX: u64 = 1 << 16;
/// Failures that may wait for an earlier case.
const FAILURES_AHEAD_MAX: usize = 4096;

pub(super) struct Queue<'a> {
    line: Mutex<Line>,
    moved: Condvar,
    ledger: Mutex<Ledger<'a>>,
}

struct Line {
    /// The turn that is folded next.
    next: u64,
    waiting: BTreeMap<u64, Outcome>,
    /// Failures among those that wait.
    failures: usize,
    folding: bool,
    closed: bool,
}

impl<'a> Queue<'a> {
    /// Returns the queue of a ledger that has folded the turns before `next`.
    pub(super) fn new(ledger: Ledger<'a>, next: u64) -> Queue<'a> {
        let line = Line { next, waiting: BTreeMap::new(), failures: 0, folding: false, closed: false };
        Queue { line: Mutex::new(line), moved: Condvar::new(), ledger: Mutex::new(ledger) }
    }

    /// Waits until this turn may begin; false when no further case is wanted.
    pub(super) fn begin(&self, turn: u64) -> bool {
        let too_early = |line: &mut Line| line.is_too_early(turn);
        let line = self.moved.wait_while(self.line(), too_early).unwrap_or_else(PoisonError::into_inner);
        !line.closed
    }

    /// Hands a finished case over; every turn that began is handed over once.
    pub(super) fn finish(&self, turn: u64, outcome: Outcome) {
        let mut line = self.line();
        line.failures += usize::from(outcome.is_failure());
        line.waiting.insert(turn, outcome);
        if line.folding {
            return;
        }
        line.folding = true;
        while let Some(outcome) = line.take_next() {
            drop(line);
            let is_over = self.ledger().fold(outcome);
            line = self.line();
            line.next += 1;
            line.closed |= is_over;
            self.moved.notify_all();
        }
        line.folding = false;
    }

    /// The ledger, when all threads are done. Cases past a closed end are as if they had never run.
    pub(super) fn close(self) -> Ledger<'a> {
        let line = self.line.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut ledger = self.ledger.into_inner().unwrap_or_else(PoisonError::into_inner);
        line.waiting.into_values().for_each(|outcome| ledger.discard(&outcome));
        ledger
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger<'a>> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn take_next(&mut self) -> Option<Outcome> {
        let outcome = if self.closed { None } else { self.waiting.remove(&self.next) };
        self.failures -= usize::from(outcome.as_ref().is_some_and(Outcome::is_failure));
        outcome
    }

    /// Whether a turn must wait. The next one never does: all others wait for it.
    fn is_too_early(&self, turn: u64) -> bool {
        let ahead = turn.saturating_sub(self.next);
        !self.closed && ahead > 0 && (ahead >= RUN_AHEAD_MAX || self.failures >= FAILURES_AHEAD_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_turn_never_waits_and_those_far_ahead_do() {
        let line =
            |failures, closed| Line { next: 7, waiting: BTreeMap::new(), failures, folding: true, closed };
        let free = line(0, false);
        assert!(!free.is_too_early(7) && !free.is_too_early(6 + RUN_AHEAD_MAX));
        assert!(free.is_too_early(7 + RUN_AHEAD_MAX));
        let full = line(FAILURES_AHEAD_MAX, false);
        assert!(!full.is_too_early(7) && full.is_too_early(8));
        assert!(!line(FAILURES_AHEAD_MAX, true).is_too_early(8));
    }
}
