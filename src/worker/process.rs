//! One worker process as the supervisor holds it: pipes, a deadline, the end of its stderr, and its death.
//!
//! The process leads a *process group* of its own, which is killed as a whole, so whatever a subject starts dies with
//! it. No read and no write waits past the *deadline*: the group is killed when the deadline passes and nothing has
//! come. A process that a driver holds may not die even then, and its pipes stay open. After a *grace* it is left
//! alone, and the supervisor continues without it. If the supervisor dies in any way, the worker's stdin ends, and
//! the worker kills itself (see [`super::serve`]).

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::frame::{self, BODY_MAX, Frame, FrameError, Kind};
use super::lock;
use super::peer::{End, GRACE, Peer, Watch, Watched, broken, kill_group};
use super::settings::Launch;
use seamproof_judge::finding::Cause;

/// Number of bytes that are kept of a worker's stderr, from its end.
pub const STDERR_MAX: usize = 4096;
/// Time in which a killed process must be gone. A process that waits for a device may not go at all, and is left.
const REAP_MAX: Duration = Duration::from_secs(10);
/// Time for which the rest of the worker's stderr is awaited.
const STDERR_WAIT: Duration = Duration::from_millis(500);
/// Time between two checks whether a process is gone.
const PAUSE: Duration = Duration::from_millis(1);

/// Groups of the workers that run.
static LIVE: Mutex<Vec<Pid>> = Mutex::new(Vec::new());
/// Whether no run is waited for any more.
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// Kills every worker of this process, and starts no other. Runs in flight give no result that counts. It is called
/// where this process ends without waiting for them: a worker that reads nothing more would not notice the end of its
/// stdin.
pub fn abandon_all() {
    ABANDONED.store(true, Ordering::SeqCst);
    lock(&LIVE).iter().for_each(|group| kill_group(*group));
}

/// Whether the workers were killed by [`abandon_all`].
pub fn is_abandoned() -> bool {
    ABANDONED.load(Ordering::SeqCst)
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    /// Child process; `None` once its status was taken, or once it was left.
    child: Option<Child>,
    stdin: ChildStdin,
    pub(super) stdout: ChildStdout,
    pub(super) stderr: Tail,
    group: Pid,
    pub(super) watch: Watch,
}

impl Process {
    /// Starts the worker's program.
    pub(super) fn spawn(launch: &Launch) -> io::Result<Process> {
        let mut child = Command::new(&launch.program)
            .args(&launch.arguments)
            .envs(launch.environment.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let missing = || io::Error::other("a pipe is missing");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let pipe = child.stderr.take().ok_or_else(missing)?;
        let stderr = match launch.shows_prints {
            true => Tail::of(Shown(pipe), STDERR_MAX),
            false => Tail::of(pipe, STDERR_MAX),
        };
        // Without this, writing more than the pipe has room for would wait for the worker, whatever the deadline.
        ioctl_fionbio(&stdin, true)?;
        let group = Pid::from_child(&child);
        lock(&LIVE).push(group);
        if is_abandoned() {
            kill_group(group);
        }
        Ok(Process { child: Some(child), stdin, stdout, stderr, group, watch: Watch::killing(group) })
    }

    /// Waits until the process has ended, without taking its status, so that its group's number stays its own.
    /// Returns whether it has ended.
    fn wait_for_exit(&self, time: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < time {
            if self.has_ended() {
                return true;
            }
            thread::sleep(PAUSE);
        }
        false
    }

    /// Whether the process has ended. Its status is not taken, so that its group's number stays its own.
    pub(super) fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(self.group), options), Ok(None))
    }

    /// Kills the whole group and takes the process's exit status; `None` where the process does not go, or went
    /// before.
    pub(super) fn kill(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        kill_group(self.group);
        // Its number may be another group's once the status is taken.
        lock(&LIVE).retain(|group| *group != self.group);
        let start = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < REAP_MAX => thread::sleep(PAUSE),
                Ok(None) => {
                    // Some thread has to take the status whenever the process goes.
                    thread::spawn(move || child.wait());
                    return None;
                }
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Peer for Process {
    fn id(&self) -> Option<u32> {
        Some(self.group.as_raw_nonzero().get().unsigned_abs())
    }

    fn watch(&mut self) -> &mut Watch {
        &mut self.watch
    }

    fn write(&mut self, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()> {
        frame::write(&mut Watched { pipe: &mut self.stdin, watch: &mut self.watch }, kind, sequence, body)
    }

    fn read(&mut self) -> Result<Frame, FrameError> {
        frame::read(&mut Watched { pipe: &mut self.stdout, watch: &mut self.watch }, BODY_MAX)
    }

    fn end(mut self: Box<Self>, error: &FrameError) -> End {
        let known = broken(error);
        let ended = known.is_none() && !self.watch.has_fired() && self.wait_for_exit(GRACE);
        let status = self.kill();
        let cause = match (self.watch.has_fired(), known, status) {
            (true, ..) => Cause::Hang,
            (false, Some(cause), _) => cause,
            (false, None, Some(status)) if ended => cause_of(status),
            // It closed its pipe and did not end in time. It wrote nothing wrong, and the signal came from this
            // supervisor.
            (false, None, _) => Cause::Hang,
        };
        let left = if status.is_none() { "its process does not go though killed, and is left; " } else { "" };
        End { cause, said: format!("{left}{}", self.stderr.text()) }
    }

    fn dismiss(mut self: Box<Self>) -> String {
        self.wait_for_exit(GRACE);
        self.kill();
        self.stderr.text()
    }
}

fn cause_of(status: ExitStatus) -> Cause {
    match (status.signal(), status.code()) {
        (Some(signal), _) => Cause::Signal(signal),
        (None, code) => Cause::Exit(code.unwrap_or_default()),
    }
}

/// A pipe of which everything that is read is written to stderr.
struct Shown<R>(R);

impl<R: Read> Read for Shown<R> {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(block)?;
        // Where stderr is gone, nobody looks, and the process must not wait for that.
        let _ = io::stderr().write_all(&block[..count]);
        Ok(count)
    }
}

/// End of what a process writes into a pipe. A thread of its own reads it, so that the process never waits.
#[derive(Debug)]
pub(super) struct Tail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    done: mpsc::Receiver<()>,
}

impl Tail {
    /// Reads a pipe to its end, and keeps at most `most` bytes.
    pub(super) fn of(mut pipe: impl Read + Send + 'static, most: usize) -> Tail {
        let bytes = Arc::new(Mutex::new(VecDeque::new()));
        let (ending, done) = mpsc::channel();
        let kept = Arc::clone(&bytes);
        thread::spawn(move || {
            let _ending: mpsc::Sender<()> = ending;
            let mut block = [0; 1024];
            while let Ok(count @ 1..) = pipe.read(&mut block) {
                let mut kept = lock(&kept);
                kept.extend(&block[..count]);
                let over = kept.len().saturating_sub(most);
                kept.drain(..over);
            }
        });
        Tail { bytes, done }
    }

    /// Returns the bytes that are there when the pipe ends, as one line.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes(STDERR_WAIT)).trim().replace('\n', " | ")
    }

    /// Returns the bytes that are there when the pipe ends, or after `wait`.
    pub(super) fn bytes(&self, wait: Duration) -> Vec<u8> {
        // The sender sends nothing; it is dropped when the pipe ends.
        let _ = self.done.recv_timeout(wait);
        lock(&self.bytes).iter().copied().collect()
    }
}
