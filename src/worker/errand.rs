//! A program that does one thing beside the workers, and says its result on one line.

use std::io::{self, Read};
use std::thread;
use std::time::{Duration, Instant};

use super::peer::{GRACE, Watched};
use super::process::Process;
use super::served::WorkerCommand;
use super::settings::Settings;

/// Time between two looks at a program that runs.
const PAUSE: Duration = Duration::from_millis(20);
/// Largest number of bytes that are read of what a program says.
const SAID_MAX: u64 = 64 << 10;

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
    let said = said(&mut process);
    if said.is_empty() { Err(ErrandError::Failed(process.stderr.text())) } else { Ok(said) }
}

/// Returns what a program that is gone has said. Its pipe may be open still in a process that left its group.
fn said(process: &mut Process) -> String {
    process.watch.arm(GRACE);
    let mut said = Vec::new();
    let pipe = Watched { pipe: &mut process.stdout, watch: &mut process.watch };
    // What came before an error counts.
    let _ = pipe.take(SAID_MAX).read_to_end(&mut said);
    String::from_utf8_lossy(&said).trim().to_owned()
}
