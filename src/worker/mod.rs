//! Worker processes: a subject that can take its whole process with it runs in another process.
//!
//! The *supervisor* is the process that judges. It holds a [`Pool`] of *workers*, which run subjects and nothing
//! else. The two exchange [`frame`]s over the worker's stdin and stdout. A run goes through phases, each with its
//! own deadline. The last phase that was reached says where a dead worker stood. Inside a worker of this program a
//! subject is a [`Runner`]; workers in other languages speak the same protocol (`docs/protocol.md`). In the supervisor
//! a subject is a [`Remote`], a backend whose declaration is here and whose runs are made there. A [`Caller`] is the
//! protocol turned round: the worker is the process that started this program.
//!
//! Whatever a subject does (crash, hang, run out of memory, write garbage, spoil its device), the supervisor
//! continues. No process outlives the supervisor, except one that a driver protects from being killed. A device that
//! lacks memory, or does not work at all, is not held against the subject.
//!
//! Two things are *confirmed* in a fresh worker: the end of a worker during a run (a crash, a hang, garbage in place
//! of an answer), and a sentinel that came out differently. A campaign confirms wrong results in the same way before it
//! shrinks them, by a pool [aside](Pool::aside).

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod frame;
pub mod message;
pub mod mock;

mod caller;
mod confirm;
mod errand;
mod history;
mod peer;
mod pool;
mod process;
mod questions;
mod remote;
mod runner;
mod sentinel;
mod serve;
mod served;
mod session;
mod settings;

pub use caller::Caller;
pub use errand::{ErrandError, errand};
pub use history::{BYTES_MAX, RUNS_MAX, smallest};
pub use message::Ready;
pub use pool::{Pool, STARTS_MAX, configure, shared};
pub use process::{STDERR_MAX, abandon_all, is_abandoned};
pub use questions::Questions;
pub use remote::Remote;
pub use runner::{Open, OpenError, Opened, Runner};
pub use sentinel::{SENTINEL_SEED, problem as sentinel_problem};
pub use serve::{EXIT_FAILED, ServeError, leashed, pipes, serve};
pub use served::{Served, WorkerCommand, subject};
pub(crate) use settings::own_program;
pub use settings::{Deadlines, Launch, SENTINEL_EVERY, Settings};

/// Whether a subject cannot be made because this machine lacks its library or device: `seamproof.NotHere` in Python, or
/// a Python without the package itself.
pub fn is_lacking(why: &str) -> bool {
    const PACKAGE: [&str; 2] = ["No module named 'seamproof'", "No module named 'numpy'"];
    let no_package =
        why.contains("the worker did not start") && PACKAGE.iter().any(|words| why.contains(words));
    no_package || why.contains("NotHere: not here: ")
}

/// Returns what a mutex guards, also after a thread panicked with it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers requests from stdin until the supervisor is gone, for subjects that `open` makes. Returns the exit code.
pub fn live(open: Open) -> u8 {
    let life = || {
        let (requests, mut answers) = pipes()?;
        serve(leashed(requests), &mut answers, open)
    };
    serve::end(life())
}
