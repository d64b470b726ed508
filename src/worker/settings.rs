//! Settings of workers: how they are started, and how long they may take.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use seamproof_judge::finding::Phase;

/// Number of runs of a worker between two sentinels.
pub const SENTINEL_EVERY: u64 = 256;

/// Program that is started as a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<String>,
    /// Variables of the program's environment beside those of this process.
    pub environment: Vec<(String, OsString)>,
    /// Whether what the program writes to its stderr is written to that of this process, as it comes.
    pub shows_prints: bool,
}

/// Settings of a pool.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Program that is started as `PROGRAM worker`: this one.
    pub program: PathBuf,
    /// Number of workers, all on the first device; `None` for one on each device of the subject.
    pub workers: Option<usize>,
    /// Times that a worker may take.
    pub deadlines: Deadlines,
    /// Whether the time for a start is one that a person named, so that no declaration changes it.
    pub is_start_fixed: bool,
    /// Number of runs of a worker between two sentinels.
    pub sentinel_every: u64,
    /// Whether what workers and their subjects print is written to the stderr of this process, as it comes.
    pub shows_prints: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            program: own_program(),
            workers: None,
            deadlines: Deadlines::default(),
            is_start_fixed: false,
            sentinel_every: SENTINEL_EVERY,
            shows_prints: false,
        }
    }
}

/// Returns this program itself, not the file that may have taken its place by now. A supervisor and its workers are
/// thus of one build.
pub(crate) fn own_program() -> PathBuf {
    let running = PathBuf::from("/proc/self/exe");
    // Where the program does not know its own path, the start of a worker reports it.
    if running.exists() { running } else { std::env::current_exe().unwrap_or_default() }
}

/// Times that a worker may take for each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Time from the worker's start, or from the request to open another subject, until the subject is open. A driver
    /// and a device are set up in it, and kernels may be compiled. Those with a planted fault are compiled when they are
    /// launched.
    pub start: Duration,
    /// Time from a request until its inputs are on the device.
    pub upload: Duration,
    /// Time from the upload until everything is launched.
    pub launch: Duration,
    /// Time from the launch until the results are here, in which the kernels run.
    pub finish: Duration,
}

impl Default for Deadlines {
    fn default() -> Deadlines {
        let minute = Duration::from_secs(60);
        Deadlines { start: 2 * minute, upload: minute, launch: 2 * minute, finish: minute }
    }
}

impl Deadlines {
    /// Returns one time for each phase of a run, and one for the start.
    pub fn new(start: Duration, phase: Duration) -> Deadlines {
        Deadlines { start, upload: phase, launch: phase, finish: phase }
    }

    /// Returns the time until the phase after this one.
    pub(super) fn after(&self, phase: Option<Phase>) -> Duration {
        match phase {
            None | Some(Phase::Received) => self.upload,
            Some(Phase::Uploaded | Phase::Compiling) => self.launch,
            Some(Phase::Launched | Phase::Done) => self.finish,
        }
    }
}
