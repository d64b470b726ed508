//! The supervisor: a [`Pool`] of workers, each on its *seat*.
//!
//! A seat is a place at a device that one worker at a time may have. A thread that has something to run waits for a
//! free seat, and then has its worker for itself. A worker that dies, hangs or writes garbage is replaced, after the
//! failure has been confirmed on the same seat ([`super::confirm`]). Workers are started when they are first needed,
//! and die with the pool or with the supervisor. A seat is *retired* if no worker starts on it, [`STARTS_MAX`] times
//! one after the other, or if the sentinel comes out wrong on its device in fresh workers too. Its work goes to the
//! other seats; where none is left, every run says so. A subject that does not open where the sentinel has just run
//! is no failure of the seat.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use seamproof_oracle::{Inputs, Problem};

use super::confirm::{Bench, Drift, Suspicion};
use super::history::{History, PastRun};
use super::lock;
use super::message::Ready;
use super::process::is_abandoned;
use super::questions::Questions;
use super::served::{Served, WorkerCommand};
use super::session::{Session, StartError};
use super::settings::{Deadlines, Settings};
use super::{message, sentinel};
use seamproof_judge::case::Subject;
use seamproof_judge::finding::Cause;
use seamproof_judge::subject::{DeviceRuns, Ended, Outputs, RunError};

/// Number of workers on which the sentinel is tried before a subject counts as having none.
const SENTINEL_TRIES: u32 = 2;
/// How often the time of a phase a worker may take for what is not its subject's, where it answers questions.
const PATIENCE: u32 = 10;
/// Number of workers that fail to start, one after the other, before a seat is given up.
pub const STARTS_MAX: u32 = 2;

/// Workers, and the threads that wait for one.
#[derive(Debug)]
pub struct Pool {
    settings: Settings,
    /// Whether the end of a worker is looked at again in a fresh one.
    confirms: bool,
    seats: Mutex<Seats>,
    free: Condvar,
    /// What is known of the sentinel's results, by subject.
    known: Mutex<HashMap<String, Arc<Mutex<KnownDigest>>>>,
    /// Runs on each device, by the device's ordinal.
    used: Mutex<BTreeMap<usize, DeviceRuns>>,
}

type Digest = [u8; blake3::OUT_LEN];

/// The digest of a sentinel's right results: `None` before they were asked for, and `Some(None)` where the judge does
/// not find them right.
type KnownDigest = Option<Option<Digest>>;

#[derive(Debug)]
struct Seats {
    all: Vec<Place>,
    /// Whether the number of seats is final.
    counted: bool,
}

/// State of a seat.
#[derive(Debug)]
enum Place {
    Free(Box<Seat>),
    /// A seat that a thread has.
    Taken,
    /// A seat that was given up, with the reason.
    Retired(String),
}

/// A place at a device.
#[derive(Debug, Default)]
struct Seat {
    device: usize,
    session: Option<Session>,
    /// Whether the seat's worker has begun, with the sentinel where there is one. One that was only asked for a
    /// declaration has not.
    has_begun: bool,
    history: History,
    since_sentinel: u64,
    /// Whether the seat's worker has run the sentinel. A subject that it cannot open then is no fault of the seat.
    is_proven: bool,
    /// Subjects that a proven worker could not open.
    unopened: Vec<Subject>,
    failed_starts: u32,
    /// Reason why the last start failed.
    failure: String,
}

/// Reason why a seat gave no result.
enum Stop {
    /// A worker that did not start, so nothing was run.
    NotStarted,
    Failed(RunError),
}

impl From<RunError> for Stop {
    fn from(error: RunError) -> Stop {
        Stop::Failed(error)
    }
}

static SHARED: OnceLock<Arc<Pool>> = OnceLock::new();

/// Returns the pool of this process, with default settings unless [`configure`] came first.
pub fn shared() -> Arc<Pool> {
    Arc::clone(SHARED.get_or_init(|| Arc::new(Pool::new(Settings::default()))))
}

/// Sets up the pool of this process. Returns false, and changes nothing, once the pool is in use.
pub fn configure(settings: Settings) -> bool {
    SHARED.set(Arc::new(Pool::new(settings))).is_ok()
}

impl Pool {
    /// Returns a pool without a worker yet.
    pub fn new(settings: Settings) -> Pool {
        let count = settings.workers.unwrap_or(1).max(1);
        let all = (0..count).map(|_| Place::Free(Box::default())).collect();
        let seats = Mutex::new(Seats { all, counted: settings.workers.is_some() });
        let (free, known, used) = (Condvar::new(), Mutex::default(), Mutex::default());
        Pool { settings, confirms: true, seats, free, known, used }
    }

    /// Takes seats back into use that were given up. Another subject than the one that did not start there may start.
    pub fn restore(&self) {
        let mut seats = lock(&self.seats);
        seats.all.iter_mut().filter(|place| matches!(place, Place::Retired(_))).for_each(|place| {
            *place = Place::Free(Box::default());
        });
    }

    /// Makes it take the end of a worker as it was seen.
    pub fn hasty(self) -> Pool {
        Pool { confirms: false, ..self }
    }

    /// Runs a problem on a worker, when one is free. An ending of the worker is confirmed before this returns.
    pub fn run(&self, served: &Served, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let body = Arc::new(message::encode_run(problem, inputs));
        self.on_seat(|seat| seat.run(self, served, &body))
    }

    /// Starts a worker with this subject, unless there is one. An error says why none could be started.
    pub fn start(&self, served: &Served) -> Result<(), StartError> {
        self.on_seat(|seat| seat.ready(self, served)).map_err(|error| match error {
            // The words need not say that this is no fault of the subject, since nothing was run.
            RunError::Infrastructure(what) => what,
            error => error.to_string(),
        })
    }

    /// Returns the answer of a worker that opens a subject of which nothing is known yet. The worker stays on its seat,
    /// where it will run the subject.
    pub fn describe(&self, worker: &WorkerCommand, subject: &Subject) -> Result<Ready, StartError> {
        let mut taken = self.take().map_err(|error| error.to_string())?;
        // What a worker declares comes with its first answer, and another worker may leave no room for it.
        taken.seat.replace();
        let device = taken.seat.device;
        let mut session = Session::start(&worker.launch(&self.settings), device, self.settings.deadlines)?;
        let ready = session.open(subject)?.unwrap_or_default();
        taken.seat.session = Some(session);
        drop(taken);
        self.opened(device, ready.clone());
        Ok(ready)
    }

    /// Returns a worker of its own, on the first device, that answers other questions than runs. It is started when it
    /// is first asked. Opening its subject takes this long at most, unless a person said how long. What it does before
    /// and after the subject's calls is no time of the subject, and may take longer than the same phases of a run.
    pub fn questions(&self, worker: &WorkerCommand, subject: Subject, start: Duration) -> Questions {
        let fixed = self.settings.is_start_fixed;
        let start = if fixed { self.settings.deadlines.start } else { start };
        let Deadlines { upload, launch, finish, .. } = self.settings.deadlines;
        let patient = |phase: Duration| phase.saturating_mul(PATIENCE);
        let deadlines = Deadlines { start, upload: patient(upload), launch, finish: patient(finish) };
        Questions::new(Bench { launch: worker.launch(&self.settings), device: 0, deadlines }, subject)
    }

    /// Returns a pool of one worker, which is started afresh. What the sentinel must give is known there as well.
    pub fn aside(&self) -> Pool {
        let pool = Pool::new(Settings { workers: Some(1), ..self.settings.clone() });
        lock(&pool.known).clone_from(&lock(&self.known));
        pool
    }

    /// Returns the runs of the worker that this thread would get.
    pub(super) fn runs(&self) -> Vec<PastRun> {
        let seats = lock(&self.seats);
        let first = rayon::current_thread_index().unwrap_or(0) % seats.all.len();
        match &seats.all[first] {
            Place::Free(seat) => seat.history.entries(),
            Place::Taken | Place::Retired(_) => Vec::new(),
        }
    }

    /// Returns the seats that were given up: the device of each, and the reason.
    pub fn retired(&self) -> Vec<String> {
        let retired = |place: &Place| if let Place::Retired(why) = place { Some(why.clone()) } else { None };
        lock(&self.seats).all.iter().filter_map(retired).collect()
    }

    /// Returns the runs on each device where a worker started, in order of ordinals.
    pub fn used(&self) -> Vec<DeviceRuns> {
        lock(&self.used).values().cloned().collect()
    }

    /// Notes that a worker on a device has opened something.
    fn opened(&self, device: usize, ready: Ready) {
        self.count(ready.devices);
        let Ready { name, versions, .. } = ready;
        lock(&self.used).entry(device).or_insert(DeviceRuns { device, name, runs: 0, versions });
    }

    /// Counts a run on a device.
    fn ran(&self, device: usize) {
        lock(&self.used).entry(device).and_modify(|used| used.runs += 1);
    }

    /// Returns the processes of the workers that wait for work now.
    pub fn idle_processes(&self) -> Vec<u32> {
        let seats = lock(&self.seats);
        let id =
            |place: &Place| if let Place::Free(seat) = place { seat.session.as_ref()?.id() } else { None };
        seats.all.iter().filter_map(id).collect()
    }

    /// Returns the result of work on a seat where a worker starts.
    fn on_seat<T>(&self, work: impl Fn(&mut Seat) -> Result<T, Stop>) -> Result<T, RunError> {
        loop {
            let mut taken = self.take()?;
            match work(&mut taken.seat) {
                Ok(done) => return Ok(done),
                Err(Stop::Failed(error)) => return Err(error),
                // The loop ends: a seat that fails again is retired, and a subject that fails again is given up
                // there.
                Err(Stop::NotStarted) => {}
            }
        }
    }

    /// Returns the next free seat; an error where none is left.
    fn take(&self) -> Result<Taken<'_>, RunError> {
        let mut seats = lock(&self.seats);
        loop {
            if let Some(why) = seats.exhausted() {
                return Err(RunError::Infrastructure(format!("no worker can be started: {why}")));
            }
            // A thread goes back to the seat that it had, so that a case's runs stay on one worker.
            let first = rayon::current_thread_index().unwrap_or(0) % seats.all.len();
            let order = (first..seats.all.len()).chain(0..first);
            for index in order {
                if let Place::Free(seat) = &mut seats.all[index] {
                    let seat = std::mem::take(seat);
                    seats.all[index] = Place::Taken;
                    return Ok(Taken { pool: self, index, seat });
                }
            }
            seats = self.free.wait(seats).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes a seat for each device, once their number is known.
    fn count(&self, devices: usize) {
        let mut seats = lock(&self.seats);
        if !seats.counted {
            seats.counted = true;
            seats
                .all
                .extend((1..devices).map(|device| Place::Free(Box::new(Seat { device, ..Seat::default() }))));
            self.free.notify_all();
        }
    }

    /// Returns the digest of the sentinel's results. They are judged when they are first asked for, on a worker of
    /// their own. The answer is `None` where the judge finds them wrong, or where there are none twice. Such a
    /// subject has no sentinel, and its cases show what is wrong with it.
    fn known(&self, served: &Served, bench: &Bench) -> Result<Option<Digest>, StartError> {
        let key = format!("{:?}", served.sentinel);
        let known = Arc::clone(lock(&self.known).entry(key).or_default());
        // Who asks for the same subject waits. Who asks for another one does not: to find out takes seconds.
        let mut known = lock(&known);
        if let Some(digest) = *known {
            return Ok(digest);
        }
        for _ in 0..SENTINEL_TRIES {
            let mut session = bench.session(&served.sentinel)?;
            let digest = match sentinel::is_right(served.sentinel_declaration.as_ref(), &mut session) {
                Some(true) => sentinel::run(served.sentinel_declaration.as_ref(), &mut session),
                Some(false) => break,
                None => None,
            };
            if digest.is_some() {
                *known = Some(digest);
                return Ok(digest);
            }
        }
        *known = Some(None);
        Ok(None)
    }
}

impl Seats {
    /// Returns why there is no seat left; `None` while there is one.
    fn exhausted(&self) -> Option<String> {
        let why = |place: &Place| if let Place::Retired(why) = place { Some(why.clone()) } else { None };
        self.all.iter().map(why).collect::<Option<Vec<String>>>().map(|all| all.join("; "))
    }
}

/// Returns the end of a run that nobody waits for.
fn abandoned() -> Stop {
    RunError::Infrastructure("the program was asked to end, and does not wait for the run".into()).into()
}

/// A seat that a thread holds.
struct Taken<'a> {
    pool: &'a Pool,
    index: usize,
    seat: Box<Seat>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let seat = std::mem::take(&mut self.seat);
        let retired = seat.failed_starts >= STARTS_MAX;
        lock(&self.pool.seats).all[self.index] = match retired {
            true => Place::Retired(format!("device {}: {}", seat.device, seat.failure)),
            false => Place::Free(seat),
        };
        // Threads that wait may wait for nothing now.
        if retired { self.pool.free.notify_all() } else { self.pool.free.notify_one() }
    }
}

impl Seat {
    fn run(&mut self, pool: &Pool, served: &Served, body: &Arc<Vec<u8>>) -> Result<Outputs, Stop> {
        self.ready(pool, served)?;
        if self.since_sentinel >= pool.settings.sentinel_every {
            self.watch(pool, served)?;
        }
        self.since_sentinel += 1;
        pool.ran(self.device);
        let entry = PastRun { subject: Arc::clone(&served.subject), body: Arc::clone(body) };
        self.attempt(pool, served, entry)
    }

    /// Makes sure that there is a worker with the subject open.
    fn ready(&mut self, pool: &Pool, served: &Served) -> Result<(), Stop> {
        if is_abandoned() {
            return Err(abandoned());
        }
        let launch = served.launch(&pool.settings);
        if self.session.as_ref().is_some_and(|session| !session.is_of(&launch)) {
            self.replace();
        }
        if self.session.is_none() || !self.has_begun {
            self.begin(pool, served)?;
        }
        self.open(pool, &served.subject)?;
        self.failed_starts = 0;
        Ok(())
    }

    /// Returns the source of fresh workers for this seat's device.
    fn bench(&self, pool: &Pool, served: &Served) -> Bench {
        Bench {
            launch: served.launch(&pool.settings),
            device: self.device,
            deadlines: served.deadlines(&pool.settings),
        }
    }

    /// Starts a worker, unless one is there that has only declared its subject. Its first run is the sentinel.
    fn begin(&mut self, pool: &Pool, served: &Served) -> Result<(), Stop> {
        let bench = self.bench(pool, served);
        let known = self.started(pool.known(served, &bench))?;
        if self.session.is_none() {
            let session = Session::start(&bench.launch, self.device, bench.deadlines);
            self.session = Some(self.started(session)?);
        }
        self.has_begun = true;
        if known.is_some() {
            self.watch(pool, served)?;
            self.is_proven = true;
        }
        Ok(())
    }

    fn open(&mut self, pool: &Pool, subject: &Subject) -> Result<(), Stop> {
        let Some(session) = &mut self.session else {
            return Err(RunError::Infrastructure("there is no worker".into()).into());
        };
        let opened = session.open(subject);
        if let (true, Err(what)) = (self.is_proven, &opened) {
            let stop = self.unopened(subject, what);
            self.replace();
            return Err(stop);
        }
        if let Some(ready) = self.started(opened)? {
            self.unopened.retain(|other| other != subject);
            pool.opened(self.device, ready);
        }
        Ok(())
    }

    /// Returns how to go on when a proven worker cannot open a subject. The worker may have gone bad since, so a
    /// fresh one is tried as well. If that one is proven and cannot open the subject either, the subject is at fault.
    fn unopened(&mut self, subject: &Subject, what: &str) -> Stop {
        if !self.unopened.contains(subject) {
            self.unopened.push(subject.clone());
            return Stop::NotStarted;
        }
        RunError::Infrastructure(format!("{} does not open: {what}", subject.name)).into()
    }

    fn started<T>(&mut self, result: Result<T, StartError>) -> Result<T, Stop> {
        result.map_err(|what| {
            self.failed_starts += 1;
            self.failure = what;
            self.replace();
            Stop::NotStarted
        })
    }

    /// Drops the worker, so that the next one starts afresh.
    fn replace(&mut self) {
        self.session = None;
        self.history = History::default();
        self.since_sentinel = 0;
        self.is_proven = false;
        self.has_begun = false;
    }

    /// Makes one run, kept in the worker's history. If the run ends the worker, the ending is confirmed.
    fn attempt(&mut self, pool: &Pool, served: &Served, entry: PastRun) -> Result<Outputs, Stop> {
        self.open(pool, &entry.subject)?;
        let Some(session) = &mut self.session else {
            return Err(RunError::Infrastructure("there is no worker".into()).into());
        };
        match session.run(&entry.body) {
            Ok(answer) => {
                let is_spent = session.is_spent();
                self.history.push(entry);
                if is_spent {
                    self.replace();
                }
                Ok(answer?)
            }
            Err(death) => {
                // This program may have killed the worker itself. A death before that is the run's own, and stays one
                // whatever comes while it is looked at again.
                let is_killed = is_abandoned();
                let history = std::mem::take(&mut self.history);
                self.replace();
                if is_killed {
                    return Err(abandoned());
                }
                let bench = self.bench(pool, served);
                let ended = match pool.confirms {
                    true => Suspicion { bench, history, target: entry }.confirmed(death),
                    false => Ended { ending: death.ending, what: death.said, before: Vec::new() },
                };
                Err(match ended.ending.cause {
                    // The device ran out of memory. A subject is not at fault for memory that others hold.
                    Cause::OutOfMemory => RunError::OutOfMemory(ended.what),
                    _ => RunError::Ended(Box::new(ended)),
                }
                .into())
            }
        }
    }

    /// Runs the sentinel, where it has known results. An error says that the worker went bad.
    fn watch(&mut self, pool: &Pool, served: &Served) -> Result<(), Stop> {
        self.since_sentinel = 0;
        let bench = self.bench(pool, served);
        let Some(known) = self.started(pool.known(served, &bench))? else { return Ok(()) };
        let body = sentinel::body(served.sentinel_declaration.as_ref());
        let body = body.map_err(|error| RunError::Infrastructure(error.to_string()))?;
        let target = PastRun { subject: Arc::clone(&served.sentinel), body: Arc::new(body) };
        // The results of the run that shows the change do not count: the judge sees the error alone.
        match self.attempt(pool, served, target.clone()) {
            Ok(outputs) if sentinel::digest(&outputs) == known => {
                self.history.trust();
                Ok(())
            }
            Ok(_) => {
                let history = std::mem::take(&mut self.history);
                self.replace();
                match (Suspicion { bench, history, target }).drifted(&known) {
                    Drift::Worker(what) => Err(RunError::Sentinel(what).into()),
                    Drift::Device(what) => {
                        (self.failed_starts, self.failure) = (STARTS_MAX, what);
                        Err(Stop::NotStarted)
                    }
                }
            }
            Err(Stop::Failed(RunError::Ended(mut ended))) => {
                ended.what = format!("in the sentinel before this run; {}", ended.what);
                Err(RunError::Ended(ended).into())
            }
            Err(error) => Err(error),
        }
    }
}
