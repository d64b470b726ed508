//! What passes between a running night and whoever watches it.
//!
//! A *stage* is a part of a night with counts of its own: the canary, stored cases, a campaign. A request to stop
//! reaches the stage that runs at that moment and every later one. A campaign that stops itself does not end the night.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::campaign::Control;

/// A request to stop a night, and how far the night is.
#[derive(Debug)]
pub(crate) struct Watch {
    asked: AtomicBool,
    stage: Mutex<Stage>,
}

#[derive(Debug)]
struct Stage {
    what: String,
    begun: Instant,
    control: Arc<Control>,
}

/// How far a night's stage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The stage in words; empty before the first.
    pub(crate) what: String,
    /// Number of cases judged in it.
    pub(crate) cases: u64,
    /// Number of those that failed.
    pub(crate) failed: u64,
    /// Time since it was begun.
    pub(crate) elapsed: Duration,
}

impl Default for Watch {
    fn default() -> Watch {
        let stage = Stage { what: String::new(), begun: Instant::now(), control: Arc::default() };
        Watch { asked: AtomicBool::default(), stage: Mutex::new(stage) }
    }
}

impl Watch {
    /// Asks the night to end after the cases in flight. Returns whether that was asked before.
    pub(crate) fn stop(&self) -> bool {
        let before = self.asked.swap(true, Ordering::Relaxed);
        self.stage().control.stop();
        before
    }

    /// Whether somebody asked the night to end.
    pub(crate) fn stopped(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns what the night does now.
    pub(crate) fn progress(&self) -> Progress {
        let stage = self.stage();
        let [cases, failed] =
            [&stage.control.cases, &stage.control.failed].map(|count| count.load(Ordering::Relaxed));
        Progress { what: stage.what.clone(), cases, failed, elapsed: stage.begun.elapsed() }
    }

    /// Begins a stage and returns its control.
    pub(super) fn begin(&self, what: &str) -> Arc<Control> {
        let mut stage = self.stage();
        *stage = Stage { what: what.to_owned(), begun: Instant::now(), control: Arc::default() };
        if self.stopped() {
            stage.control.stop();
        }
        Arc::clone(&stage.control)
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
