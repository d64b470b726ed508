//! Puts finished cases back into the order of their turns.
//!
//! Threads finish cases in any order. Whoever finishes the one that is next folds it, and all that wait behind it, into
//! the ledger, while the others go on; nobody runs more than [`RUN_AHEAD_MAX`] cases ahead of the fold, so that a slow
//! case (or a long shrink) cannot make memory grow.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::ledger::{Ledger, Outcome};

/// Cases that may be finished before an earlier one is.
pub const RUN_AHEAD_MAX: u64 = 4096;

pub(super) struct Queue<'a> {
    line: Mutex<Line>,
    moved: Condvar,
    ledger: Mutex<Ledger<'a>>,
}

struct Line {
    /// The turn that is folded next.
    next: u64,
    waiting: BTreeMap<u64, Outcome>,
    folding: bool,
    closed: bool,
}

impl<'a> Queue<'a> {
    pub(super) fn new(ledger: Ledger<'a>) -> Queue<'a> {
        let line = Line { next: 0, waiting: BTreeMap::new(), folding: false, closed: false };
        Queue { line: Mutex::new(line), moved: Condvar::new(), ledger: Mutex::new(ledger) }
    }

    /// Waits until this turn may begin; false when no further case is wanted.
    pub(super) fn begin(&self, turn: u64) -> bool {
        let too_early = |line: &mut Line| !line.closed && turn >= line.next + RUN_AHEAD_MAX;
        let line = self.moved.wait_while(self.line(), too_early).unwrap_or_else(PoisonError::into_inner);
        !line.closed
    }

    /// Hands a finished case over; every turn that began is handed over once.
    pub(super) fn finish(&self, turn: u64, outcome: Outcome) {
        let mut line = self.line();
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
        if self.closed { None } else { self.waiting.remove(&self.next) }
    }
}
