//! A campaign that is killed at any moment. It loses no finding and leaves only complete ones.
//!
//! The test starts itself again as a child that runs a campaign against a broken subject, so that findings are
//! written all the time, and kills it. A hash draws the moments, so a run can be repeated as far as a clock allows.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::crashing::Crashing;
use seamproof::backends::BackendError;
use seamproof::campaign::{self, Control, Event, Observer, Options, Plan, Shard, Sinks, Subjects};
use seamproof::record::{EventLog, RunDir};
use seamproof_judge::case::Case;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::Profile;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Inputs, Problem};

const KILLS: u64 = 50;
/// Longest time from the child's first sign of life until it is killed.
const MOMENT_MAX: Duration = Duration::from_millis(250);
/// Longest time without a sign of life before the test fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// Variable that names the directory of the child.
const PLACE: &str = "SEAMPROOF_KILL_TEST_DIR";

/// Variable with the number of crashes of the subject after which the second child ends itself.
const CRASHES: &str = "SEAMPROOF_KILL_TEST_CRASHES";

/// Observer that keeps the events on disk.
struct Log(std::sync::Mutex<EventLog>);

impl Observer for Log {
    fn event(&self, event: &Event) {
        let mut log = self.0.lock().expect("no thread panicked");
        log.write(event).expect("the event is written");
    }
}

#[test]
#[ignore = "the child of the test below, not a test of its own"]
fn child() {
    campaign_of_a_child(&Crashing, 2);
}

fn campaign_of_a_child(subjects: &dyn Subjects, jobs: usize) {
    let Some(place) = env::var_os(PLACE) else { return };
    let dir = RunDir::create(Path::new(&place)).expect("the directory is made");
    let log = Log(dir.events().expect("the log is made").into());
    let findings = dir.findings().expect("the directory is made");
    let (control, shard) = (Control::default(), Shard::WHOLE);
    let plan = Plan { seed: 1, profile: Profile::Quick, cases: None, time: Some(PATIENCE), shard, jobs };
    campaign::run(&plan, subjects, &Sinks { findings: &findings, observer: &log, control: &control });
}

fn spawn(test: &str, place: &Path, crashes: u64) -> Child {
    Command::new(env::current_exe().expect("the test knows itself"))
        .args(["--ignored", "--exact", test])
        .env(PLACE, place)
        .env(CRASHES, crashes.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the child starts")
}

/// Runs a child and kills it at the moment that this number draws.
fn run_and_kill(number: u64, place: &Path) {
    let mut child = spawn("kill::child", place, 0);
    let start = Instant::now();
    while !place.join("events.jsonl").exists() {
        assert!(start.elapsed() < PATIENCE, "the child shows no life");
        sleep(Duration::from_millis(1));
    }
    let drawn = blake3::hash(&number.to_le_bytes()).as_bytes()[0];
    sleep(MOMENT_MAX.mul_f64(f64::from(drawn) / 255.0));
    child.kill().expect("the child is killed");
    child.wait().expect("the child ends");
}

/// Checks every finding that is there, and returns their number.
fn check_findings(dir: &Path) -> usize {
    let mut count = 0;
    for entry in fs::read_dir(dir).expect("the directory of findings is there") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let case = Case::load(&path).unwrap_or_else(|error| panic!("{error}"));
        assert!(case.found.is_some(), "{} does not say what was found", path.display());
        let backend = Crashing.backend(&case.subject.options).expect("the subject is made");
        let verdict = evaluate(backend.as_ref(), &case.problem);
        assert!(matches!(verdict, Verdict::Finding(_)), "{}: {verdict:?}", path.display());
        count += 1;
    }
    count
}

/// Returns the number of different failures in the log, whose last line may be cut.
fn announced(log: &Path) -> usize {
    let text = fs::read_to_string(log).expect("the log is there");
    let events = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let keys: BTreeSet<String> =
        events.filter(|event| event["event"] == "finding").map(|event| event["key"].to_string()).collect();
    keys.len()
}

#[test]
fn a_killed_campaign_leaves_only_complete_findings_and_loses_none() {
    let parent = tempfile::tempdir().expect("a temporary directory");
    let mut total = 0;
    for number in 0..KILLS {
        let place = parent.path().join(number.to_string());
        run_and_kill(number, &place);
        let found = check_findings(&place.join("findings"));
        let announced = announced(&place.join("events.jsonl"));
        assert!(found >= announced, "kill {number}: {announced} failures announced, {found} on disk");
        total += found;
    }
    assert!(total as u64 > KILLS, "only {total} findings in {KILLS} campaigns: nothing was tested");
}

/// The broken subject, which takes the process with it on the first call after a given number of crashes.
struct Deadly {
    crashes: AtomicU64,
    most: u64,
}

struct DeadlyBackend<'a> {
    inner: Box<dyn Backend + 'a>,
    of: &'a Deadly,
}

impl Subjects for Deadly {
    fn name(&self) -> &str {
        Crashing.name()
    }

    fn options(&self, seed: u64) -> Options {
        Crashing.options(seed)
    }

    fn backend(&self, options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(DeadlyBackend { inner: Crashing.backend(options)?, of: self }))
    }
}

impl Backend for DeadlyBackend<'_> {
    fn name(&self) -> &str {
        self.inner.as_ref().name()
    }

    fn declaration(&self) -> Declaration {
        self.inner.as_ref().declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.inner.as_ref())
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if self.of.crashes.load(Ordering::Relaxed) >= self.of.most {
            std::process::abort();
        }
        let result = self.inner.run(problem, inputs);
        if matches!(result, Err(RunError::Crash(_))) {
            self.of.crashes.fetch_add(1, Ordering::Relaxed);
        }
        result
    }
}

#[test]
#[ignore = "the child of the test below, not a test of its own"]
fn deadly_child() {
    let Ok(most) = env::var(CRASHES) else { return };
    let most = most.parse().expect("a number");
    campaign_of_a_child(&Deadly { crashes: AtomicU64::new(0), most }, 1);
}

/// Test that the case is on disk by the subject's next call, as it was drawn, and stays there until its smaller form
/// is on disk. With one thread, the call after the first crash is the shrinker's first candidate of that very case
/// (or the next case, if nothing were shrunk).
#[test]
fn a_failing_case_is_on_disk_before_the_subject_is_called_again() {
    let parent = tempfile::tempdir().expect("a temporary directory");
    for crashes in [1, 2, 3, 5, 8] {
        let place = parent.path().join(crashes.to_string());
        let status = spawn("kill::deadly_child", &place, crashes).wait().expect("the child ends");
        assert!(!status.success(), "the child was to end itself");
        let dir = place.join("findings");
        assert_eq!(check_findings(&dir), 1, "after {crashes} crashes");
        let drawn = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("case-");
        let mut entries =
            fs::read_dir(&dir).expect("the directory is there").map(|entry| entry.expect("an entry"));
        assert!(entries.any(|entry| drawn(&entry)), "after {crashes} crashes the case is not there as drawn");
    }
}
