//! One worker process as the supervisor holds it: pipes, a deadline, the end of its stderr, and its death.
//!
//! The process leads a *process group* of its own, which is killed as a whole, so whatever a subject starts dies with
//! it. No read and no write waits past the *deadline*: the group is killed when the deadline passes and nothing has
//! come. A process that a driver holds may not die even then, and its pipes stay open. After a *grace* it is left
//! alone, and the supervisor continues without it. If the supervisor dies in any way, the worker's stdin ends, and
//! the worker kills itself (see [`super::serve`]).

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

/// Number of bytes that are kept of a worker's stderr, from its end.
pub const STDERR_MAX: usize = 4096;
/// Time in which a worker whose pipe ended must end itself, so that its own signal or exit code is seen. The pipe of
/// a killed worker has the same time to end.
const GRACE: Duration = Duration::from_secs(2);
/// Time in which a killed process must be gone. A process that waits for a device may not go at all, and is left.
const REAP_MAX: Duration = Duration::from_secs(10);
/// Time for which the rest of the worker's stderr is awaited.
const STDERR_WAIT: Duration = Duration::from_millis(500);
/// Time between two checks whether a process is gone.
const PAUSE: Duration = Duration::from_millis(1);

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    /// Child process; `None` once its status was taken, or once it was left.
    child: Option<Child>,
    stdin: ChildStdin,
    stdout: ChildStdout,
    stderr: Tail,
    watch: Watch,
}

/// A deadline, and whether it has passed.
#[derive(Debug)]
struct Watch {
    group: Pid,
    deadline: Option<Instant>,
    /// Time at which the group was killed because of the deadline.
    fired: Option<Instant>,
}

/// Ending of a worker.
pub(super) struct End {
    pub(super) cause: Cause,
    /// End of the worker's stderr, and a note where its process did not go.
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
        // Without this, writing more than the pipe has room for would wait for the worker, whatever the deadline.
        ioctl_fionbio(&stdin, true)?;
        let watch = Watch { group: Pid::from_child(&child), deadline: None, fired: None };
        Ok(Process { child: Some(child), stdin, stdout, stderr, watch })
    }

    /// Returns the id of the process, which is also its group's.
    pub(super) fn id(&self) -> u32 {
        self.watch.group.as_raw_nonzero().get().unsigned_abs()
    }

    /// Gives the worker this long from now on, until [`Process::rest`].
    pub(super) fn arm(&mut self, time: Duration) {
        self.watch.deadline = Instant::now().checked_add(time);
    }

    /// Removes the deadline. Returns whether it had passed, so that the worker is as good as dead.
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

    /// Ends a worker that broke the protocol, or that ended by itself.
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
            // It closed its pipe and did not end in time. It wrote nothing wrong, and the signal came from this
            // supervisor.
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

    /// Waits until the process has ended, without taking its status, so that its group's number stays its own.
    /// Returns whether it has ended.
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

    /// Kills the whole group and takes the process's exit status; `None` where the process does not go, or went
    /// before.
    fn kill(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        kill_group(self.watch.group);
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

impl Watch {
    /// Waits until the pipe is ready. Past the deadline it kills the group; it returns an error if even that does not
    /// end the pipe.
    fn wait(&mut self, pipe: BorrowedFd<'_>, ready: PollFlags) -> io::Result<()> {
        loop {
            let limit = self.fired.and_then(|fired| fired.checked_add(GRACE)).or(self.deadline);
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            // Bytes that are there count, however late, so the pipe is checked before the time is.
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

/// A pipe on which no wait is longer than the worker's deadline.
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
    // A group that is gone already needs no signal.
    let _ = kill_process_group(group, Signal::KILL);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// End of a process's stderr. A thread of its own reads it, so that the process never waits.
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

    /// Returns the bytes that are there when the pipe ends, as one line.
    fn text(&self) -> String {
        // The sender sends nothing; it is dropped when the pipe ends.
        let _ = self.done.recv_timeout(STDERR_WAIT);
        let bytes: Vec<u8> = lock(&self.bytes).iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().replace('\n', " | ")
    }
}
