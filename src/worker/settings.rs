//! How workers are started and how long they may take.

use std::path::PathBuf;
use std::time::Duration;

use seamproof_judge::finding::Phase;

/// Runs of a worker between two sentinels.
pub const SENTINEL_EVERY: u64 = 256;
/// What is started as a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// How a pool is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The program that is started as `PROGRAM worker`: this one.
    pub program: PathBuf,
    /// So many workers, all on the first device; one on each device of the subject where absent.
    pub workers: Option<usize>,
    /// How long a worker may take.
    pub deadlines: Deadlines,
    /// Runs of a worker between two sentinels.
    pub sentinel_every: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            program: own_program(),
            workers: None,
            deadlines: Deadlines::default(),
            sentinel_every: SENTINEL_EVERY,
        }
    }
}

/// This program, and not what lies in its place by now: a supervisor and its workers are of one build.
pub(crate) fn own_program() -> PathBuf {
    let running = PathBuf::from("/proc/self/exe");
    // Where the program does not know its own place, the start of a worker says so.
    if running.exists() { running } else { std::env::current_exe().unwrap_or_default() }
}

/// How long a worker may take for each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// From its start, or from the request to open another subject, until the subject is open: a driver and a device are
    /// set up, kernels may be compiled.
    pub start: Duration,
    /// From a request until its inputs are on the device.
    pub upload: Duration,
    /// From then until everything is launched.
    pub launch: Duration,
    /// From then until the results are here: the kernels themselves.
    pub finish: Duration,
}

impl Default for Deadlines {
    fn default() -> Deadlines {
        let minute = Duration::from_secs(60);
        Deadlines { start: 2 * minute, upload: minute, launch: 2 * minute, finish: minute }
    }
}

impl Deadlines {
    /// One time for each phase of a run, and one for the start.
    pub fn new(start: Duration, phase: Duration) -> Deadlines {
        Deadlines { start, upload: phase, launch: phase, finish: phase }
    }

    /// The time until the phase after this one.
    pub(super) fn after(&self, phase: Option<Phase>) -> Duration {
        match phase {
            None | Some(Phase::Received) => self.upload,
            Some(Phase::Uploaded) => self.launch,
            Some(Phase::Launched | Phase::Done) => self.finish,
        }
    }
}
