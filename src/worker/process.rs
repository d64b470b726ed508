//! One worker process as the supervisor holds it: pipes, a deadline, the end of its stderr, and its death.
//!
//! The process leads a *process group* of its own, which is killed as a whole: whatever a subject starts dies with it. A
//! thread watches the *deadline*: when it passes, the group is killed, and every read and write here ends by itself. Should the
//! supervisor die, in whatever way, the worker's stdin ends, and the worker kills itself (see [`super::serve`]).

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::frame::{self, BODY_MAX, Frame, FrameError, Kind};
use super::pool::Launch;
use crate::verdict::Cause;

/// Bytes of a worker's stderr that are kept: its end.
pub const STDERR_MAX: usize = 4096;
/// Between two looks at a deadline.
const TICK: Duration = Duration::from_millis(20);
/// How long a worker whose pipe ended has to end itself, so that its own signal or exit code is seen.
const GRACE: Duration = Duration::from_secs(2);
/// How long a killed process has to go: one that waits for a device may not go at all.
const REAP_MAX: Duration = Duration::from_secs(10);
/// How long the rest of its stderr is waited for.
const STDERR_WAIT: Duration = Duration::from_millis(500);
/// Between two looks whether a process is gone.
const PAUSE: Duration = Duration::from_millis(1);

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: Tail,
    watch: Arc<Mutex<Watch>>,
}

/// What the watching thread knows.
#[derive(Debug)]
struct Watch {
    group: Pid,
    deadline: Option<Instant>,
    /// Whether the group was killed because of it.
    fired: bool,
    /// Whether the process is over; its number may belong to another one then.
    over: bool,
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
        let stdout = BufReader::new(child.stdout.take().ok_or_else(missing)?);
        let stderr = Tail::of(child.stderr.take().ok_or_else(missing)?);
        let group = Pid::from_child(&child);
        let watch = Arc::new(Mutex::new(Watch { group, deadline: None, fired: false, over: false }));
        let process = Process { child, stdin, stdout, stderr, watch: Arc::clone(&watch) };
        thread::spawn(move || keep_watch(&watch));
        Ok(process)
    }

    /// The process, which is also its group's number.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// From now on the worker has this long, until [`Process::rest`].
    pub(super) fn arm(&self, time: Duration) {
        lock(&self.watch).deadline = Instant::now().checked_add(time);
    }

    /// No deadline any more; whether it was over before, so that the worker is as good as dead.
    pub(super) fn rest(&self) -> bool {
        let mut watch = lock(&self.watch);
        watch.deadline = None;
        watch.fired
    }

    pub(super) fn write(&mut self, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()> {
        frame::write(&mut self.stdin, kind, sequence, body)
    }

    pub(super) fn read(&mut self) -> Result<Frame, FrameError> {
        frame::read(&mut self.stdout, BODY_MAX)
    }

    /// Ends a worker that did what it must not, or that ended by itself: what its end was, and the end of its stderr.
    pub(super) fn end(mut self, error: &FrameError) -> (Cause, String) {
        let known = match error {
            FrameError::Garbage(_) => Some(Cause::Garbage),
            FrameError::Digest => Some(Cause::Digest),
            FrameError::Ended | FrameError::Io(_) => None,
        };
        if known.is_none() {
            self.wait_for_exit(GRACE);
        }
        let status = self.kill();
        let cause = match (lock(&self.watch).fired, known) {
            (true, _) => Cause::Hang,
            (false, Some(cause)) => cause,
            (false, None) => status.map_or(Cause::Garbage, cause_of),
        };
        (cause, self.stderr.text())
    }

    /// Ends a worker that has said why it ends.
    pub(super) fn dismiss(mut self) -> String {
        self.wait_for_exit(GRACE);
        self.kill();
        self.stderr.text()
    }

    /// Waits until the process has ended, and leaves it unburied: its group's number stays its own.
    fn wait_for_exit(&self, time: Duration) {
        let start = Instant::now();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let fired = || lock(&self.watch).fired;
        while start.elapsed() < time && !fired() {
            match waitid(WaitId::Pid(Pid::from_child(&self.child)), options) {
                Ok(None) => thread::sleep(PAUSE),
                Ok(Some(_)) | Err(_) => return,
            }
        }
    }

    /// Kills the whole group and takes the process's exit status; none where it does not go.
    fn kill(&mut self) -> Option<ExitStatus> {
        {
            let mut watch = lock(&self.watch);
            if !watch.over {
                watch.over = true;
                kill_group(watch.group);
            }
        }
        let start = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < REAP_MAX => thread::sleep(PAUSE),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
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

fn keep_watch(watch: &Mutex<Watch>) {
    loop {
        {
            let mut watch = lock(watch);
            if watch.over {
                return;
            }
            if watch.deadline.is_some_and(|deadline| deadline <= Instant::now()) && !watch.fired {
                watch.fired = true;
                kill_group(watch.group);
            }
        }
        thread::sleep(TICK);
    }
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
