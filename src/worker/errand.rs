//! A program that does one thing beside the workers, and says its result on one line.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use super::peer::GRACE;
use super::process::{Process, Tail};
use super::served::WorkerCommand;
use super::settings::Settings;

/// Time between two looks at a program that runs.
const PAUSE: Duration = Duration::from_millis(20);
/// Number of bytes that are kept of what a program says, from its end.
const SAID_MAX: usize = 64 << 10;

/// Reason why a program gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ErrandError {
    /// A program that cannot be started.
    #[error("it cannot be started: {0}")]
    Start(io::Error),
    /// A program that was ended because it took too long.
    #[error("it did not end within {} s", .0.as_secs())]
    Late(Duration),
    /// A program that was ended on request.
    #[error("it was interrupted")]
    Stopped,
    /// A program that ended and said nothing, with the end of its stderr.
    #[error("it failed: {0}")]
    Failed(String),
}

/// Runs a program to its end, and returns what it said on its stdout. With it ends every process of its group, however
/// it ends: after `limit` at the latest, or as soon as `stop` says so.
pub fn errand(
    command: &WorkerCommand,
    limit: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<String, ErrandError> {
    let launch = command.launch(&Settings::default());
    let mut process = Process::spawn(&launch).map_err(ErrandError::Start)?;
    // A program that says more than a pipe holds would never end if nobody read it.
    let said = process.stdout.as_fd().try_clone_to_owned().map_err(ErrandError::Start)?;
    let said = Tail::of(File::from(said), SAID_MAX);
    let start = Instant::now();
    while !process.has_ended() {
        if stop() {
            return Err(ErrandError::Stopped);
        }
        if start.elapsed() >= limit {
            return Err(ErrandError::Late(limit));
        }
        thread::sleep(PAUSE);
    }
    process.kill();
    // Its pipe may be open still in a process that left its group.
    let said = String::from_utf8_lossy(&said.bytes(GRACE)).trim().to_owned();
    if said.is_empty() { Err(ErrandError::Failed(process.stderr.text())) } else { Ok(said) }
}
