//! What goes between a running night and whoever watches it.
//!
//! A *stage* is a part of a night that is told of as one: the canary, stored cases, a campaign, or joining its slices. It may
//! have several *controls* in turn, one for each campaign that it runs. The claim: a request to stop reaches whatever runs at
//! that moment and all that comes after it, and what is told counts every case of the stage once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::campaign::Control;

/// What goes between a running night and whoever watches it: a request to stop, and what is done at present.
#[derive(Debug, Default)]
pub struct Watch {
    asked: AtomicBool,
    stage: Mutex<Stage>,
}

/// A stage of a night: the canary, stored cases, a campaign, or joining its slices.
#[derive(Debug)]
struct Stage {
    what: String,
    begun: Instant,
    /// What its earlier controls counted.
    cases: u64,
    failed: u64,
    control: Arc<Control>,
}

impl Default for Stage {
    fn default() -> Stage {
        Stage { what: String::new(), begun: Instant::now(), cases: 0, failed: 0, control: Arc::default() }
    }
}

/// How far a night's stage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The stage in words; empty before the first.
    pub what: String,
    /// Cases judged in it.
    pub cases: u64,
    /// Those of them that failed.
    pub failed: u64,
    /// Time since it was begun.
    pub elapsed: Duration,
}

impl Watch {
    /// Asks the night to end after the cases in flight; the next start goes on. True if that was asked before.
    pub fn stop(&self) -> bool {
        let before = self.asked.swap(true, Ordering::Relaxed);
        self.stage().control.stop();
        before
    }

    /// Whether somebody asked.
    pub fn stopped(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// What the night does now.
    pub fn progress(&self) -> Progress {
        let stage = self.stage();
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Progress {
            what: stage.what.clone(),
            cases: stage.cases + count(&stage.control.cases),
            failed: stage.failed + count(&stage.control.failed),
            elapsed: stage.begun.elapsed(),
        }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stage begins.
    pub(super) fn begin(&self, what: String) {
        *self.stage() = Stage { what, ..Stage::default() };
    }

    /// A control of its own for the next part of the stage: a campaign that stops itself does not end the night.
    pub(super) fn next(&self) -> Arc<Control> {
        let Progress { cases, failed, .. } = self.progress();
        let control = Arc::new(Control::default());
        let mut stage = self.stage();
        (stage.cases, stage.failed, stage.control) = (cases, failed, Arc::clone(&control));
        if self.stopped() {
            control.stop();
        }
        control
    }
}
