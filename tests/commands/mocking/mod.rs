//! Common parts of the tests of subjects behind worker processes: the mock's options, and small problems.
//!
//! Each problem differs from the plain one in the one thing of its name, on which the mock is told to fail. None is
//! the sentinel's.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process_group};
use seamproof::worker;
use seamproof_judge::subject::Table;
use seamproof_oracle::{Pass, Problem, ProblemFields, Sink};

/// Longest time for the start of a mock. No start takes nearly this long, whatever else the machine does.
pub(crate) const START: Duration = Duration::from_secs(30);

/// Returns options of a subject, by name.
pub(crate) fn options(listed: &[(&str, &str)]) -> BTreeMap<String, String> {
    listed.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Returns the sentinel's problem with other numbers: small, legal, and not the sentinel.
fn plain() -> ProblemFields {
    let problem = worker::sentinel_problem(&Table::default()).expect("a problem");
    ProblemFields { data_seed: 1, pass: Pass::Backward, ..problem.into() }
}

/// Returns the plain problem, edited.
pub(crate) fn problem(edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let mut fields = plain();
    edit(&mut fields);
    Problem::new(fields).expect("a problem")
}

/// Returns the plain problem with a soft cap.
pub(crate) fn capped() -> Problem {
    problem(|fields| fields.softmax.softcap = Some(4.0))
}

/// Returns the plain problem with a sink.
pub(crate) fn with_sink() -> Problem {
    problem(|fields| fields.softmax.sink = Sink::OffByOne)
}

/// Whether no process of this group is left.
pub(crate) fn is_gone(group: u32) -> bool {
    let group = Pid::from_raw(group as i32).expect("a process");
    test_kill_process_group(group).is_err()
}

/// Waits for something that takes less than a start.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < START, "{what}");
        sleep(Duration::from_millis(5));
    }
}
