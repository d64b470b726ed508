//! One worker process as the supervisor holds it: pipes, a deadline, the end of its stderr, and its death.
//!
//! The process leads a *process group* of its own, which is killed as a whole: whatever a subject starts dies with it. No
//! read and no write waits past the *deadline*: when it passes and nothing has come, the group is killed. A process that a
//! driver holds may not die even so, and then its pipes stay open; after a *grace* it is left to itself, and everything
//! here goes on without it. Should the supervisor die, in whatever way, the worker's stdin ends, and the worker kills
//! itself (see [`super::serve`]).

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::frame::{self, BODY_MAX, Frame, FrameError, Kind};
use super::settings::Launch;
use seamproof_judge::finding::Cause;

/// Bytes of a worker's stderr that are kept: its end.
pub const STDERR_MAX: usize = 4096;
/// How long a worker whose pipe ended has to end itself, so that its own signal or exit code is seen; and how long the pipe
/// of one that was killed has to end.
const GRACE: Duration = Duration::from_secs(2);
/// How long a killed process has to go: one that waits for a device may not go at all, and is left.
const REAP_MAX: Duration = Duration::from_secs(10);
/// How long the rest of its stderr is waited for.
const STDERR_WAIT: Duration = Duration::from_millis(500);
/// Between two looks whether a process is gone.
const PAUSE: Duration = Duration::from_millis(1);

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    /// Absent once it is buried, or left.
    child: Option<Child>,
    stdin: ChildStdin,
    stdout: ChildStdout,
    stderr: Tail,
    watch: Watch,
}

/// The deadline, and what came of it.
#[derive(Debug)]
struct Watch {
    group: Pid,
    deadline: Option<Instant>,
    /// When the group was killed because of it.
    fired: Option<Instant>,
}

/// How a worker ended.
pub(super) struct End {
    pub(super) cause: Cause,
    /// The end of its stderr; that it did not go, where it did not.
    pub(super) said: String,
}

impl Process {
    /// Starts the worker's program.
    pub(super) fn spawn(launch: &Launch) -> io::Result<Process> {
        let mut child = Command::new(&launch.program)
            .args(&launch.arguments)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let missing = || io::Error::other("a pipe is missing");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = Tail::of(child.stderr.take().ok_or_else(missing)?);
        // Else a write of more than the pipe has room for would wait for the worker, deadline or not.
        ioctl_fionbio(&stdin, true)?;
        let watch = Watch { group: Pid::from_child(&child), deadline: None, fired: None };
        Ok(Process { child: Some(child), stdin, stdout, stderr, watch })
    }

    /// The process, which is also its group's number.
    pub(super) fn id(&self) -> u32 {
        self.watch.group.as_raw_nonzero().get().unsigned_abs()
    }

    /// From now on the worker has this long, until [`Process::rest`].
    pub(super) fn arm(&mut self, time: Duration) {
        self.watch.deadline = Instant::now().checked_add(time);
    }

    /// No deadline any more; whether it was over before, so that the worker is as good as dead.
    pub(super) fn rest(&mut self) -> bool {
        self.watch.deadline = None;
        self.watch.fired.is_some()
    }

    pub(super) fn write(&mut self, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()> {
        frame::write(&mut Watched { pipe: &mut self.stdin, watch: &mut self.watch }, kind, sequence, body)
    }

    pub(super) fn read(&mut self) -> Result<Frame, FrameError> {
        frame::read(&mut Watched { pipe: &mut self.stdout, watch: &mut self.watch }, BODY_MAX)
    }

    /// Ends a worker that did what it must not, or that ended by itself.
    pub(super) fn end(mut self, error: &FrameError) -> End {
        let known = match error {
            FrameError::Garbage(_) => Some(Cause::Garbage),
            FrameError::Digest => Some(Cause::Digest),
            FrameError::Ended | FrameError::Io(_) => None,
        };
        let ended = known.is_none() && self.watch.fired.is_none() && self.wait_for_exit(GRACE);
        let status = self.kill();
        let cause = match (self.watch.fired, known, status) {
            (Some(_), ..) => Cause::Hang,
            (None, Some(cause), _) => cause,
            (None, None, Some(status)) if ended => cause_of(status),
            // It closed its pipe and did not come to its end: it wrote nothing wrong, and the signal was ours.
            (None, None, _) => Cause::Hang,
        };
        let left = if status.is_none() { "its process does not go though killed, and is left; " } else { "" };
        End { cause, said: format!("{left}{}", self.stderr.text()) }
    }

    /// Ends a worker that has said why it ends.
    pub(super) fn dismiss(mut self) -> String {
        self.wait_for_exit(GRACE);
        self.kill();
        self.stderr.text()
    }

    /// Waits until the process has ended, and leaves it unburied: its group's number stays its own. Whether it has.
    fn wait_for_exit(&self, time: Duration) -> bool {
        let start = Instant::now();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        while start.elapsed() < time {
            match waitid(WaitId::Pid(self.watch.group), options) {
                Ok(None) => thread::sleep(PAUSE),
                Ok(Some(_)) | Err(_) => return true,
            }
        }
        false
    }

    /// Kills the whole group and takes the process's exit status; none where it does not go, or went before.
    fn kill(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        kill_group(self.watch.group);
        let start = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < REAP_MAX => thread::sleep(PAUSE),
                Ok(None) => {
                    // Whenever it goes, somebody has to take its status.
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

impl Watch {
    /// Waits until the pipe is ready. Past the deadline the group is killed; an error if even that does not end the pipe.
    fn wait(&mut self, pipe: BorrowedFd<'_>, ready: PollFlags) -> io::Result<()> {
        loop {
            let limit = self.fired.and_then(|fired| fired.checked_add(GRACE)).or(self.deadline);
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            // What is there counts, however late: it is looked for before the time is.
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match poll(&mut [PollFd::from_borrowed_fd(pipe, ready)], left.as_ref()) {
                Ok(0) if self.fired.is_some() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) => {
                    self.fired = Some(Instant::now());
                    kill_group(self.group);
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A pipe that nobody waits for longer than the worker has.
struct Watched<'a, P> {
    pipe: &'a mut P,
    watch: &'a mut Watch,
}

impl<P: Read + AsFd> Read for Watched<'_, P> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.watch.wait(self.pipe.as_fd(), PollFlags::IN)?;
        self.pipe.read(bytes)
    }
}

impl<P: Write + AsFd> Write for Watched<'_, P> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.watch.wait(self.pipe.as_fd(), PollFlags::OUT)?;
            match self.pipe.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.pipe.flush()
    }
}

fn cause_of(status: ExitStatus) -> Cause {
    match (status.signal(), status.code()) {
        (Some(signal), _) => Cause::Signal(signal),
        (None, code) => Cause::Exit(code.unwrap_or_default()),
    }
}

fn kill_group(group: Pid) {
    // A group that is gone already is as dead as it should be.
    let _ = kill_process_group(group, Signal::KILL);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of what a process writes to its stderr, read by a thread of its own so that the process never waits.
#[derive(Debug)]
struct Tail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    done: mpsc::Receiver<()>,
}

impl Tail {
    fn of(mut pipe: impl Read + Send + 'static) -> Tail {
        let bytes = Arc::new(Mutex::new(VecDeque::new()));
        let (ending, done) = mpsc::channel();
        let kept = Arc::clone(&bytes);
        thread::spawn(move || {
            let _ending: mpsc::Sender<()> = ending;
            let mut block = [0; 1024];
            while let Ok(count @ 1..) = pipe.read(&mut block) {
                let mut kept = lock(&kept);
                kept.extend(&block[..count]);
                let over = kept.len().saturating_sub(STDERR_MAX);
                kept.drain(..over);
            }
        });
        Tail { bytes, done }
    }

    /// What is there when the pipe ends, as one line.
    fn text(&self) -> String {
        // The sender sends nothing: it goes when the pipe ends.
        let _ = self.done.recv_timeout(STDERR_WAIT);
        let bytes: Vec<u8> = lock(&self.bytes).iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().replace('\n', " | ")
    }
}
