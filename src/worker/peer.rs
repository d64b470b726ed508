//! The other side of the pipes, as the supervisor holds it: a process that it started, or the one that started it. And
//! the deadline that no read and no write waits past.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::frame::{Frame, FrameError, Kind};
use seamproof_judge::finding::Cause;

/// Time in which a worker whose pipe ended must end itself, so that its own signal or exit code is seen. The pipe of
/// a killed worker has the same time to end.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// Ending of a worker.
pub(super) struct End {
    pub(super) cause: Cause,
    /// End of the worker's stderr, and a note where its process did not go.
    pub(super) said: String,
}

/// A worker at the other end of two pipes.
pub(super) trait Peer: fmt::Debug + Send {
    /// Returns the id of the process, which is also its group's, where this supervisor started it.
    fn id(&self) -> Option<u32>;

    /// Returns the deadline of reads and writes.
    fn watch(&mut self) -> &mut Watch;

    /// Writes a request.
    fn write(&mut self, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()>;

    /// Reads an answer.
    fn read(&mut self) -> Result<Frame, FrameError>;

    /// Ends a worker that broke the protocol, or that ended by itself.
    fn end(self: Box<Self>, error: &FrameError) -> End;

    /// Ends a worker that has said why it ends, and returns the end of its stderr.
    fn dismiss(self: Box<Self>) -> String;
}

/// Returns the cause of an end that is an answer which breaks the protocol; `None` where there was no answer.
pub(super) fn broken(error: &FrameError) -> Option<Cause> {
    match error {
        FrameError::Garbage(_) | FrameError::Version(_) => Some(Cause::Garbage),
        FrameError::Digest => Some(Cause::Digest),
        FrameError::Ended | FrameError::Io(_) => None,
    }
}

/// A deadline, and whether it has passed.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Group of processes that is killed at the deadline; `None` where the worker is not this supervisor's to kill.
    group: Option<Pid>,
    deadline: Option<Instant>,
    /// Time at which the deadline passed and nothing had come.
    fired: Option<Instant>,
}

impl Watch {
    /// Returns a watch that kills a group at the deadline.
    pub(super) fn killing(group: Pid) -> Watch {
        Watch { group: Some(group), ..Watch::default() }
    }

    /// Gives the worker this long from now on, until [`Watch::rest`].
    pub(super) fn arm(&mut self, time: Duration) {
        self.deadline = Instant::now().checked_add(time);
    }

    /// Removes the deadline. Returns whether it had passed, so that the worker is as good as dead.
    pub(super) fn rest(&mut self) -> bool {
        self.deadline = None;
        self.has_fired()
    }

    /// Whether the deadline has passed with nothing heard.
    pub(super) fn has_fired(&self) -> bool {
        self.fired.is_some()
    }

    /// Waits until the pipe is ready. Past the deadline it asks the group where it is, and kills it; it returns an error
    /// if even that does not end the pipe.
    fn wait(&mut self, pipe: BorrowedFd<'_>, ready: PollFlags) -> io::Result<()> {
        loop {
            let limit = self.fired.and_then(|fired| fired.checked_add(GRACE)).or(self.deadline);
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            // Bytes that are there count, however late, so the pipe is checked before the time is.
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match poll(&mut [PollFd::from_borrowed_fd(pipe, ready)], left.as_ref()) {
                Ok(0) if self.has_fired() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) => {
                    self.fired = Some(Instant::now());
                    let Some(group) = self.group else { return Err(io::ErrorKind::TimedOut.into()) };
                    ask_where(group);
                    kill_group(group);
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A pipe on which no wait is longer than the worker's deadline.
pub(super) struct Watched<'a, P> {
    pub(super) pipe: &'a mut P,
    pub(super) watch: &'a mut Watch,
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

/// Time that a worker has for the answer to [`ask_where`].
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Asks the first process of a group what it is doing, before it is killed: one in Python writes its stack to stderr.
fn ask_where(group: Pid) {
    if kill_process(group, Signal::USR1).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
}

/// Kills every process of a group.
pub(super) fn kill_group(group: Pid) {
    // A group that is gone already needs no signal.
    let _ = kill_process_group(group, Signal::KILL);
}
