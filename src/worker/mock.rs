//! A subject that fails on demand. Tests of the supervisor run it instead of a GPU.
//!
//! It is the emulated kernel in a worker of its own kind (`worker --mock`), with failures planted around it: in its
//! runner where a subject fails, and in the pipe where a worker does. Its options select them:
//!
//! | option | what happens | value |
//! |---|---|---|
//! | `crash` | the process gets a SIGSEGV after the launch | when |
//! | `exit` | the process ends with code 7 | when |
//! | `error` | the runner answers that its driver failed | when |
//! | `oom` | the runner answers that memory ran out | when |
//! | `oom-killed` | the process gets a SIGKILL after the upload | when |
//! | `hang` | nothing more is heard after the launch | when |
//! | `garbage` | the answer is no frame | when |
//! | `wrong-digest` | a byte of the answer changes on its way | when |
//! | `print` | the runner writes to stdout | when |
//! | `history` | as `crash`, on a problem with a sink that follows one with a soft cap, at any distance | `always` |
//! | `mute` | the pipe is closed in place of an answer, and nothing more happens | when |
//! | `drift` | the sentinel's results change from this run on | when |
//! | `spoilt` | the sentinel's results change wherever this file exists; `drift` makes it | path |
//! | `once` | as `crash`, if this file does not exist yet; the file is then made | path |
//! | `escape` | as `hang`, and a process outside of its group holds its pipes | when |
//! | `unsteady` | the sentinel's results change in the second and third process that opens the subject; the file counts | path |
//! | `slow-start` | opening the subject takes this long | milliseconds |
//! | `devices` | there are this many devices, 1 if not given | number |
//! | `bad-device` | opening the subject on this device fails | ordinal |
//! | `narrow` | the subject's table has no sink | `always` |
//! | `closed` | opening the subject fails if this file exists; `crash` makes it | path |
//!
//! *when* is `always`, `others` (every run but the sentinel), the number of a run of the process (1 is the first; the
//! sentinel counts too), or `sink` or `softcap` (the runs whose problem has one).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use seamproof_judge::finding::Phase;
use seamproof_oracle::{Inputs, Problem, Sink};

use super::frame::HEAD;
use super::runner::{OpenError, Opened, Runner};
use super::sentinel::SENTINEL_SEED;
use super::serve::{self, leashed, pipes};
use super::served::{Served, WorkerCommand};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::subjects::OptionError;

/// Name of the subject.
pub const NAME: &str = "mock";
const KNOWN: &str = "crash, exit, error, oom, oom-killed, hang, garbage, wrong-digest, print, history, drift, once, escape, \
    mute, spoilt, unsteady, slow-start, devices, bad-device, narrow, closed";
/// Time for which a process that escaped holds the pipes.
const ESCAPED_SECONDS: &str = "60";
/// Pipe for the answers.
static PIPE: Mutex<Option<File>> = Mutex::new(None);
/// Exit code of a mock that exits.
const EXIT: i32 = 7;

/// Returns the mock as a pool serves it.
pub fn served(options: &BTreeMap<String, String>) -> Result<Served, OptionError> {
    let plan = Plan::of(options)?;
    let subject = super::subject(NAME, options);
    let declaration: Box<dyn Backend> = match plan.is_narrow {
        true => Box::new(Narrow(Emulated::default())),
        false => Box::new(Emulated::default()),
    };
    Ok(Served {
        declaration,
        sentinel: subject.clone(),
        sentinel_declaration: Box::new(Emulated::default()),
        subject,
        worker: WorkerCommand::own(&["worker", "--mock"]),
        start: None,
    })
}

/// The emulated kernel, declared to take no sink.
struct Narrow(Emulated);

impl Backend for Narrow {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn declaration(&self) -> Declaration {
        let mut declaration = self.0.declaration();
        declaration.table.sinks = vec![Sink::None];
        declaration
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.0.run(problem, inputs)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.0)
    }
}

/// Runs a mock's worker to its end, and returns the exit code.
pub fn live() -> u8 {
    let life = || {
        let (requests, answers) = pipes()?;
        *pipe() = Some(answers);
        serve::serve(leashed(requests), &mut Wire, open)
    };
    serve::end(life())
}

/// Time at which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Always,
    Others,
    Run(u64),
    Sink,
    Softcap,
}

impl When {
    fn of(text: &str) -> Option<When> {
        match text {
            "always" => Some(When::Always),
            "others" => Some(When::Others),
            "sink" => Some(When::Sink),
            "softcap" => Some(When::Softcap),
            number => number.parse().ok().map(When::Run),
        }
    }

    fn is_now(self, run: u64, problem: &Problem) -> bool {
        match self {
            When::Always => true,
            When::Others => problem.data_seed != SENTINEL_SEED,
            When::Run(at) => run == at,
            When::Sink => problem.softmax.sink != Sink::None,
            When::Softcap => problem.softmax.softcap.is_some(),
        }
    }
}

/// Failure that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Crash,
    Exit,
    Error,
    OutOfMemory,
    Killed,
    Hang,
    Escape,
    Garbage,
    Digest,
    Mute,
    Print,
    History,
    Drift,
}

const FAULTS: [(&str, Fault); 13] = [
    ("crash", Fault::Crash),
    ("exit", Fault::Exit),
    ("error", Fault::Error),
    ("oom", Fault::OutOfMemory),
    ("oom-killed", Fault::Killed),
    ("hang", Fault::Hang),
    ("escape", Fault::Escape),
    ("garbage", Fault::Garbage),
    ("wrong-digest", Fault::Digest),
    ("mute", Fault::Mute),
    ("print", Fault::Print),
    ("history", Fault::History),
    ("drift", Fault::Drift),
];

#[derive(Debug, Default)]
struct Plan {
    faults: Vec<(Fault, When)>,
    slow_start: Duration,
    once: Option<PathBuf>,
    devices: Option<usize>,
    bad_device: Option<usize>,
    closed: Option<PathBuf>,
    spoilt: Option<PathBuf>,
    unsteady: Option<PathBuf>,
    is_narrow: bool,
}

impl Plan {
    fn of(options: &BTreeMap<String, String>) -> Result<Plan, OptionError> {
        let mut plan = Plan::default();
        for (option, value) in options {
            let fault = FAULTS.iter().find(|(name, _)| name == option).map(|(_, fault)| *fault);
            let taken = match fault {
                Some(fault) => When::of(value).map(|when| plan.faults.push((fault, when))),
                None if option == "slow-start" => {
                    value.parse().ok().map(|time| plan.slow_start = Duration::from_millis(time))
                }
                None if option == "devices" => value.parse().ok().map(|count| plan.devices = Some(count)),
                None if option == "bad-device" => value.parse().ok().map(|at| plan.bad_device = Some(at)),
                None if option == "narrow" => (value == "always").then(|| plan.is_narrow = true),
                None if option == "once" => {
                    plan.once = Some(value.into());
                    Some(())
                }
                None if option == "closed" => {
                    plan.closed = Some(value.into());
                    Some(())
                }
                None if option == "spoilt" => {
                    plan.spoilt = Some(value.into());
                    Some(())
                }
                None if option == "unsteady" => {
                    plan.unsteady = Some(value.into());
                    Some(())
                }
                None => {
                    let option = option.clone();
                    return Err(OptionError::Unknown { backend: NAME, option, known: KNOWN });
                }
            };
            taken.ok_or_else(|| OptionError::Value {
                backend: NAME,
                option: option.clone(),
                value: value.clone(),
                expected: "always, others, the number of a run, sink or softcap; a number",
            })?;
        }
        Ok(plan)
    }
}

fn open(name: &str, options: &BTreeMap<String, String>, device: usize) -> Result<Opened, OpenError> {
    if name != NAME {
        return Err(OpenError(format!("a mock's worker runs {NAME} alone, not {name}")));
    }
    let plan = Plan::of(options).map_err(|error| OpenError(error.to_string()))?;
    thread::sleep(plan.slow_start);
    let closed = plan.closed.as_ref().is_some_and(|path| path.exists());
    if closed || plan.bad_device == Some(device) {
        return Err(OpenError(format!("the mock's device {device} is gone")));
    }
    let devices = plan.devices.unwrap_or(1);
    let spoilt = plan.unsteady.as_deref().is_some_and(|path| matches!(counted(path), Ok(2 | 3)));
    let runner = Box::new(Mock { plan, runs: 0, capped: false, spoilt });
    Ok(Opened { runner, devices, name: format!("mock {device}") })
}

/// Returns how many processes have come here, this one included.
fn counted(path: &Path) -> io::Result<u64> {
    let mut file = File::options().append(true).create(true).open(path)?;
    file.write_all(b"x")?;
    Ok(file.metadata()?.len())
}

struct Mock {
    plan: Plan,
    runs: u64,
    /// Whether a problem with a soft cap came before.
    capped: bool,
    /// Whether the sentinel comes out differently from now on.
    spoilt: bool,
}

impl Mock {
    fn has(&self, fault: Fault, problem: &Problem) -> bool {
        self.plan.faults.iter().any(|&(planned, when)| planned == fault && when.is_now(self.runs, problem))
    }

    fn drifts(&mut self, problem: &Problem) -> bool {
        if self.has(Fault::Drift, problem) {
            self.spoilt = true;
            let _ = self.plan.spoilt.as_ref().map(File::create);
        }
        self.spoilt |= self.plan.spoilt.as_ref().is_some_and(|path| path.exists());
        self.spoilt && problem.data_seed == SENTINEL_SEED
    }

    /// Whether no run has come here before, in any process.
    fn is_first(&self) -> bool {
        self.plan.once.as_ref().is_some_and(|path| File::create_new(path).is_ok())
    }

    /// Whether this problem has a sink and follows one with a soft cap.
    fn meets(&mut self, problem: &Problem) -> bool {
        let meets = self.capped && When::Sink.is_now(self.runs, problem);
        self.capped |= When::Softcap.is_now(self.runs, problem);
        meets && self.has(Fault::History, problem)
    }
}

impl Runner for Mock {
    fn run(
        &mut self,
        problem: &Problem,
        inputs: &Inputs,
        reached: &mut dyn FnMut(Phase),
    ) -> Result<Outputs, RunError> {
        self.runs += 1;
        let meets = self.meets(problem);
        if self.has(Fault::Print, problem) {
            let _ = writeln!(io::stdout(), "a subject prints").and_then(|()| io::stdout().flush());
        }
        reached(Phase::Uploaded);
        if self.has(Fault::Killed, problem) {
            die(Signal::KILL);
        }
        if self.has(Fault::OutOfMemory, problem) {
            return Err(RunError::OutOfMemory("the mock wants more".into()));
        }
        reached(Phase::Launched);
        if meets || self.has(Fault::Crash, problem) || self.is_first() {
            let _ = self.plan.closed.as_ref().map(File::create);
            die(Signal::SEGV);
        }
        if self.has(Fault::Exit, problem) {
            std::process::exit(EXIT);
        }
        if self.has(Fault::Error, problem) {
            return Err(RunError::Crash("the mock's driver failed".into()));
        }
        if self.has(Fault::Escape, problem) {
            escape();
        }
        if self.has(Fault::Hang, problem) || self.has(Fault::Escape, problem) {
            hang();
        }
        let mut outputs = Emulated::default().run(problem, inputs)?;
        if self.drifts(problem) {
            outputs.ranks.iter_mut().for_each(|rank| rank.out.mapv_inplace(|value| -value));
        }
        reached(Phase::Done);
        for (fault, tampering) in [(Fault::Garbage, GARBAGE), (Fault::Digest, DIGEST), (Fault::Mute, MUTE)] {
            if self.has(fault, problem) {
                NEXT.store(tampering, Ordering::Relaxed);
            }
        }
        Ok(outputs)
    }
}

/// Kills this process with a signal. The runtime takes the first SIGSEGV for a stack overflow and lets the
/// instruction fail again. No instruction fails here, so a second signal is sent.
fn die(signal: Signal) -> ! {
    loop {
        let _ = kill_process(getpid(), signal);
    }
}

/// Starts a process in a group of its own that keeps the pipe of the answers open.
fn escape() {
    let pipe = pipe().as_ref().and_then(|pipe| pipe.try_clone().ok());
    let mut command = Command::new("sleep");
    command.arg(ESCAPED_SECONDS).process_group(0).stdin(Stdio::null()).stderr(Stdio::null());
    let _ = command.stdout(pipe.map_or_else(Stdio::null, Stdio::from)).spawn();
}

fn hang() -> ! {
    loop {
        thread::park();
    }
}

/// Treatment of the next frame on the wire.
static NEXT: AtomicU8 = AtomicU8::new(WHOLE);
const WHOLE: u8 = 0;
const GARBAGE: u8 = 1;
const DIGEST: u8 = 2;
const MUTE: u8 = 3;

fn pipe() -> MutexGuard<'static, Option<File>> {
    PIPE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pipe of a worker that does not keep to the protocol.
struct Wire;

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        match NEXT.swap(WHOLE, Ordering::Relaxed) {
            GARBAGE => bytes.fill(b'?'),
            // A changed byte of the head would be another fault.
            DIGEST if bytes.len() <= HEAD => NEXT.store(DIGEST, Ordering::Relaxed),
            DIGEST => bytes.iter_mut().next_back().into_iter().for_each(|last| *last ^= 1),
            MUTE => {
                *pipe() = None;
                hang();
            }
            _ => {}
        }
        pipe().as_mut().map_or(Ok(()), |pipe| pipe.write_all(&bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        pipe().as_mut().map_or(Ok(()), Write::flush)
    }
}
