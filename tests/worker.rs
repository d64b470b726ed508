//! Subjects behind worker processes, without a GPU: a mock that fails as it is told.
//!
//! Whatever it does, the failure is recorded as what it was, the other runs go on, and no process is left.

#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process_group};
use seamproof::backend::{Backend, Ended, Outputs, RunError};
use seamproof::backends::{self, Emulated, MISCALLS, Miscalled, miscall};
use seamproof::case::{Case, Earlier, Subject};
use seamproof::evaluate::evaluate;
use seamproof::shrink::size;
use seamproof::values;
use seamproof::verdict::{Cause, Check, Ending, Verdict};
use seamproof::worker::{self, Deadlines, Phase, Pool, Remote, Served, Settings, mock};
use seamproof_oracle::{Pass, Problem, ProblemFields, Sink};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_seamproof");
/// No start of a mock takes nearly this long, whatever else the machine does.
const START: Duration = Duration::from_secs(30);
/// Nor does a run that does not hang.
const RUN: Duration = Duration::from_secs(10);
/// For those that are meant to hang.
const SHORT: Duration = Duration::from_millis(700);

fn settings(phase: Duration) -> Settings {
    Settings {
        program: PROGRAM.into(),
        workers: Some(1),
        deadlines: Deadlines::new(START, phase),
        ..Settings::default()
    }
}

fn options(listed: &[(&str, &str)]) -> BTreeMap<String, String> {
    listed.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn mocked(listed: &[(&str, &str)], settings: Settings) -> (Remote, Arc<Pool>) {
    let pool = Arc::new(Pool::new(settings));
    let served = mock::served(&options(listed)).expect("the mock's options");
    (Remote::new(mock::NAME, served, Arc::clone(&pool)), pool)
}

/// The sentinel's problem with other numbers: small, legal, and not the sentinel.
fn plain() -> ProblemFields {
    let problem = worker::sentinel_problem().expect("a problem");
    ProblemFields { data_seed: 1, pass: Pass::Backward, ..problem.into() }
}

fn problem(edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let mut fields = plain();
    edit(&mut fields);
    Problem::new(fields).expect("a problem")
}

fn capped() -> Problem {
    problem(|fields| fields.softmax.softcap = Some(4.0))
}

fn with_sink() -> Problem {
    problem(|fields| fields.softmax.sink = Sink::OffByOne)
}

fn run(backend: &dyn Backend, problem: &Problem) -> Result<Outputs, RunError> {
    backend.run(problem, &values::inputs(problem))
}

fn ended(result: Result<Outputs, RunError>) -> Ended {
    match result {
        Err(RunError::Ended(ended)) => *ended,
        other => panic!("{other:?}"),
    }
}

fn bits(outputs: &Outputs) -> Vec<u32> {
    let rank = &outputs.ranks[0];
    let gradients = rank.gradients.iter().flat_map(|of| of.dq.iter().chain(&of.dk).chain(&of.dv));
    rank.out.iter().chain(rank.lse.iter().flatten()).chain(gradients).map(|value| value.to_bits()).collect()
}

fn is_gone(group: u32) -> bool {
    let group = Pid::from_raw(group as i32).expect("a process");
    test_kill_process_group(group).is_err()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < START, "{what}");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_worker_gives_the_bits_of_this_process() {
    let (remote, pool) = mocked(&[("print", "always")], settings(RUN));
    for problem in [problem(|_| {}), capped(), with_sink(), problem(|fields| fields.pass = Pass::Forward)] {
        let here = run(&Emulated::default(), &problem).expect("it runs");
        let there = run(&remote, &problem).expect("it runs there");
        assert_eq!(bits(&here), bits(&there));
    }
    let refused = problem(|fields| fields.precision.q = seamproof_oracle::Format::F32.into());
    assert_eq!(run(&remote, &refused).unwrap_err(), run(&Emulated::default(), &refused).unwrap_err());
    let idle = pool.idle_processes();
    assert_eq!(idle.len(), 1);
    drop((remote, pool));
    assert!(idle.into_iter().all(is_gone), "the worker outlives its pool");
}

/// The calls are wrong on their way to the worker, which serves the right subject and stays the same from fault to fault.
#[test]
fn a_subject_behind_a_worker_is_called_wrongly_by_the_supervisor() {
    let pool = Arc::new(Pool::new(settings(RUN)));
    let behind = |miscall| {
        let served = mock::served(&options(&[("crash", "softcap")])).expect("the mock's options");
        Miscalled::new(Box::new(Remote::new(mock::NAME, served, Arc::clone(&pool))), miscall)
    };
    let padded = problem(|fields| {
        let sequence = &mut fields.sequences[0];
        (sequence.q.len, sequence.kv.len) = (sequence.q.len - 1, sequence.kv.len - 2);
        fields.softmax.sink = Sink::Learnable;
        fields.mask.left = Some(7);
    });
    let first = behind(&MISCALLS[0]);
    first.ready().expect("a worker starts");
    let idle = pool.idle_processes();
    let mut shown = 0;
    for miscall in &MISCALLS {
        let (here, there) = (Miscalled::new(Box::new(Emulated::default()), miscall), behind(miscall));
        let [here, there] = [&here, &there].map(|subject| run(subject, &padded).expect("it runs"));
        assert_eq!(bits(&here), bits(&there), "{}", miscall.id);
        let right = run(&Emulated::default(), &padded).expect("it runs");
        shown += usize::from(bits(&here) != bits(&right));
    }
    assert!(shown > 12, "{shown} of {} faults change a bit", MISCALLS.len());
    // The worker dies of a soft cap, and is not told of this one.
    let dropped = behind(miscall("call-softcap-dropped").expect("a fault"));
    let uncapped = run(&Emulated::default(), &problem(|_| {})).expect("it runs");
    assert_eq!(bits(&run(&dropped, &capped()).expect("it lives")), bits(&uncapped));
    assert_eq!((pool.idle_processes(), first.devices()), (idle, pool.used()));
    assert!(first.devices()[0].runs > 20 && first.lost().is_empty());
    ended(run(&behind(miscall("call-scale-off").expect("a fault")), &capped()));
}

#[test]
fn a_subject_without_a_worker_is_not_called_at_all() {
    let (remote, _) = mocked(&[("bad-device", "0")], settings(RUN));
    let wrong = Miscalled::new(Box::new(remote), &MISCALLS[0]);
    assert!(wrong.ready().expect_err("no device").contains("gone"));
    assert_eq!(wrong.lost().len(), 1);
    assert!(matches!(run(&wrong, &problem(|_| {})), Err(RunError::Infrastructure(_))));
}

#[test]
fn each_end_of_a_worker_is_what_it_was_and_the_next_run_holds() {
    let table = [
        ("crash", Cause::Signal(11), Phase::Launched, "SIGSEGV after launched"),
        ("exit", Cause::Exit(7), Phase::Launched, "exit code 7 after launched"),
        ("error", Cause::Failed, Phase::Launched, "the mock's driver failed"),
        ("oom-killed", Cause::Signal(9), Phase::Uploaded, "SIGKILL after uploaded"),
        ("garbage", Cause::Garbage, Phase::Done, "????"),
        ("wrong-digest", Cause::Digest, Phase::Done, "wrong digest after done"),
        ("mute", Cause::Hang, Phase::Done, "hung after done"),
        ("hang", Cause::Hang, Phase::Launched, "no sign of life"),
    ];
    for (option, cause, phase, text) in table {
        let deadline = if cause == Cause::Hang { SHORT } else { RUN };
        let (remote, pool) = mocked(&[(option, "softcap"), ("print", "softcap")], settings(deadline));
        run(&remote, &problem(|_| {})).expect("it runs");
        let before = pool.idle_processes();
        let ended = ended(run(&remote, &capped()));
        assert_eq!(ended.ending, Ending { cause, after: Some(phase) }, "{option}");
        let said = ended.to_string();
        for text in [text, "again alone in a fresh worker", "its stderr ends: a subject prints"] {
            assert!(said.contains(text), "{option}: {text} is not in {said}");
        }
        assert!(before.into_iter().all(is_gone), "{option}: the dead worker's group is left");
        run(&remote, &with_sink()).expect("the next run holds");
    }
}

#[test]
fn the_verdict_of_an_end_is_its_check_and_its_ending() {
    for (option, check) in [("crash", Check::Crash), ("hang", Check::Timeout)] {
        let (remote, _) =
            mocked(&[(option, "softcap")], settings(if option == "hang" { SHORT } else { RUN }));
        let Verdict::Finding(finding) = evaluate(&remote, &capped()) else { panic!("{option} holds") };
        assert_eq!(finding.check, check);
        assert_eq!(finding.ending.and_then(|ending| ending.after), Some(Phase::Launched));
        assert!(finding.what.contains("after launched"), "{}", finding.what);
        assert!(matches!(evaluate(&remote, &problem(|_| {})), Verdict::Pass(_)));
    }
}

/// Nothing is known of a subject for which there was no memory.
#[test]
fn memory_that_a_device_lacks_is_no_finding() {
    let (remote, pool) = mocked(&[("oom", "softcap")], settings(RUN));
    run(&remote, &problem(|_| {})).expect("it runs");
    let before = pool.idle_processes();
    let Err(RunError::OutOfMemory(said)) = run(&remote, &capped()) else { panic!("it is something else") };
    for text in ["the mock wants more", "again alone in a fresh worker"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    assert!(before.into_iter().all(is_gone), "the worker goes on");
    let Verdict::Infrastructure(what) = evaluate(&remote, &capped()) else { panic!("it is a verdict") };
    assert!(what.contains("out of memory"), "{what}");
    run(&remote, &with_sink()).expect("the next run holds");
}

/// A worker that cannot be killed looks like this: its pipes stay open.
#[test]
fn pipes_that_stay_open_hold_nobody_up() {
    let (remote, _) = mocked(&[("escape", "softcap")], settings(SHORT));
    run(&remote, &problem(|_| {})).expect("it runs");
    let start = Instant::now();
    let ended = ended(run(&remote, &capped()));
    assert_eq!(ended.ending, Ending { cause: Cause::Hang, after: Some(Phase::Launched) });
    assert!(start.elapsed() < START, "{:?}", start.elapsed());
    run(&remote, &with_sink()).expect("the next run holds");
}

/// A device on which nothing starts is given up; what it was to run goes to the others.
#[test]
fn a_seat_whose_device_is_bad_is_retired() {
    let several = Settings { workers: None, ..settings(RUN) };
    let (remote, pool) = mocked(&[("devices", "3"), ("bad-device", "1")], several);
    // Whoever comes when the first device is busy goes to the second one.
    let busy = || {
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for other in [problem(|_| {}), capped(), with_sink()] {
                        run(&remote, &other).expect("another device has it");
                    }
                });
            }
        });
        !pool.retired().is_empty()
    };
    wait_until("the bad device is not given up", busy);
    assert_eq!(pool.retired(), ["device 1: the mock's device 1 is gone"]);
    assert_eq!(remote.lost(), pool.retired());
    run(&remote, &with_sink()).expect("the others go on");
}

/// Where the sentinel has run, a subject that does not open is its own failure: the seat goes on with others.
#[test]
fn a_subject_that_does_not_open_costs_no_seat() {
    let pool = Arc::new(Pool::new(settings(RUN)));
    let subject = |listed: &[(&str, &str)]| {
        let plain = mock::served(&options(&[])).expect("no options");
        let served = mock::served(&options(listed)).expect("the mock's options");
        Remote::new(mock::NAME, Served { sentinel: plain.sentinel, ..served }, Arc::clone(&pool))
    };
    for _ in 0..3 {
        match run(&subject(&[("bad-device", "0")]), &problem(|_| {})) {
            Err(RunError::Infrastructure(said)) => assert!(said.contains("mock does not open"), "{said}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pool.retired(), [""; 0]);
    run(&subject(&[]), &problem(|_| {})).expect("another subject opens");
}

#[test]
fn where_no_seat_is_left_every_run_says_so() {
    let (remote, pool) = mocked(&[("bad-device", "0")], settings(RUN));
    for _ in 0..2 {
        match run(&remote, &problem(|_| {})) {
            Err(RunError::Infrastructure(said)) => {
                assert!(said.contains("no worker can be started any more: device 0: the mock's"), "{said}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pool.retired().len(), 1);
}

#[test]
fn a_failure_that_needs_an_earlier_run_names_it() {
    let (remote, _) = mocked(&[("history", "always")], settings(RUN));
    for other in [problem(|_| {}), capped(), problem(|fields| fields.data_seed = 2)] {
        run(&remote, &other).expect("it runs");
    }
    let ended = ended(run(&remote, &with_sink()));
    let [earlier] = &ended.before[..] else { panic!("{:?}", ended.before) };
    assert_eq!(earlier.problem, capped());
    let said = ended.to_string();
    for text in
        ["alone in a fresh worker it does not fail", "after 1 of the 4 runs", "3 of 3 times", "softcap 4"]
    {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    run(&remote, &with_sink()).expect("a fresh worker knows nothing of it");
}

#[test]
fn a_failure_that_needs_many_runs_says_how_many() {
    // The sentinel is the first run; the fourth dies.
    let (remote, _) = mocked(&[("crash", "4")], settings(RUN));
    run(&remote, &problem(|_| {})).expect("it runs");
    run(&remote, &problem(|_| {})).expect("it runs");
    let said = ended(run(&remote, &problem(|_| {}))).to_string();
    assert!(said.contains("after 3 of the 3 runs before it, 3 of 3 times"), "{said}");
}

#[test]
fn a_failure_that_never_comes_again_says_so() {
    let place = tempfile::tempdir().expect("a directory");
    let mark = place.path().join("mark");
    let (remote, _) = mocked(&[("once", mark.to_str().expect("text"))], settings(RUN));
    // The very first run is the sentinel's, which the judge then takes for no sentinel; nobody else is concerned.
    run(&remote, &problem(|_| {})).expect("it runs");
    fs::remove_file(&mark).expect("the mark is there");
    let said = ended(run(&remote, &problem(|_| {}))).to_string();
    assert!(said.contains("not reproduced, 1 of 5 times in all"), "{said}");
}

#[test]
fn a_worker_that_does_not_start_is_no_finding() {
    let slow = Settings { deadlines: Deadlines::new(SHORT, RUN), ..settings(RUN) };
    let (remote, _) = mocked(&[("slow-start", "600000")], slow);
    match run(&remote, &problem(|_| {})) {
        Err(RunError::Infrastructure(said)) => assert!(said.contains("did not start in 700ms"), "{said}"),
        other => panic!("{other:?}"),
    }
    let (remote, _) = mocked(&[], Settings { program: "/nowhere".into(), ..settings(RUN) });
    let Err(said) = remote.ready() else { panic!("it starts from nowhere") };
    assert!(said.contains("/nowhere"), "{said}");
    let (remote, _) = mocked(&[], Settings { program: "/bin/true".into(), ..settings(RUN) });
    let Err(said) = remote.ready() else { panic!("another program is taken for a worker") };
    assert!(said.contains("exit code 0"), "{said}");
}

#[test]
fn a_start_that_is_slow_but_in_time_is_a_start() {
    let (remote, _) = mocked(&[("slow-start", "100")], settings(RUN));
    run(&remote, &problem(|_| {})).expect("it runs");
}

#[test]
fn a_sentinel_that_changes_names_the_run_that_spoilt_it() {
    let often = Settings { sentinel_every: 4, ..settings(RUN) };
    let (remote, _) = mocked(&[("drift", "softcap")], often);
    for other in [problem(|_| {}), with_sink(), capped(), problem(|fields| fields.data_seed = 2)] {
        run(&remote, &other).expect("it runs");
    }
    let Err(RunError::Sentinel(said)) = run(&remote, &with_sink()) else { panic!("nobody saw it") };
    for text in ["the 4 runs", "in a fresh worker it is right", "after 1 of the 4 runs", "softcap 4"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    run(&remote, &with_sink()).expect("a fresh worker is right");
}

/// A device on which the sentinel comes out wrong in fresh workers too went bad: no subject is to blame, and its seat is gone.
#[test]
fn a_device_that_goes_bad_is_no_finding() {
    let place = tempfile::tempdir().expect("a directory");
    let mark = place.path().join("mark");
    let often = Settings { sentinel_every: 2, ..settings(RUN) };
    let (remote, pool) = mocked(&[("drift", "softcap"), ("spoilt", mark.to_str().expect("text"))], often);
    run(&remote, &problem(|_| {})).expect("it runs");
    run(&remote, &capped()).expect("it runs");
    match run(&remote, &with_sink()) {
        Err(RunError::Infrastructure(said)) => {
            assert!(said.contains("the device went bad") && said.contains("the 2 runs"), "{said}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.retired().len(), 1);
}

/// Where fresh workers are right now and wrong then, it is no device's end: bits of the subject change from run to run.
#[test]
fn a_sentinel_that_is_wrong_now_and_then_is_a_finding() {
    let place = tempfile::tempdir().expect("a directory");
    let count = place.path().join("count");
    let (remote, pool) = mocked(&[("unsteady", count.to_str().expect("text"))], settings(RUN));
    match run(&remote, &problem(|_| {})) {
        Err(RunError::Sentinel(said)) => assert!(said.contains("wrong 1 of 3 times"), "{said}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.retired(), [""; 0]);
    run(&remote, &problem(|_| {})).expect("the next worker is right");
}

#[test]
fn what_each_device_ran_is_counted() {
    let several = Settings { workers: None, ..settings(RUN) };
    let (remote, pool) = mocked(&[("devices", "2")], several);
    run(&remote, &problem(|_| {})).expect("it runs");
    let mut runs = 1;
    let both = || {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| run(&remote, &capped()).expect("it runs"));
            }
        });
        runs += 4;
        let used = remote.devices();
        assert_eq!(used, pool.used());
        assert_eq!(used.iter().map(|device| device.runs).sum::<u64>(), runs);
        used.len() == 2 && used.iter().all(|device| device.runs > 0)
    };
    wait_until("one device has nothing to do", both);
    let names: Vec<_> = pool.used().into_iter().map(|device| (device.device, device.name)).collect();
    assert_eq!(names, [(0, "mock 0".to_owned()), (1, "mock 1".to_owned())]);
}

#[test]
fn several_workers_serve_several_threads() {
    let (remote, pool) = mocked(&[("crash", "softcap")], Settings { workers: Some(3), ..settings(RUN) });
    let problems = [problem(|_| {}), capped(), with_sink()];
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for problem in &problems {
                    let crashes = problem.softmax.softcap.is_some();
                    assert_eq!(run(&remote, problem).is_err(), crashes);
                }
            });
        }
    });
    assert!((1..=3).contains(&pool.idle_processes().len()));
}

#[test]
fn one_worker_for_each_device_where_nobody_says_otherwise() {
    let pool = Arc::new(Pool::new(Settings { workers: None, ..settings(RUN) }));
    let none = BTreeMap::new();
    let emulated = || backends::in_process("emulated", &none).expect("the subject");
    let served = Served {
        declaration: emulated(),
        subject: worker::subject("emulated", &none),
        sentinel: worker::subject("emulated", &none),
        sentinel_declaration: emulated(),
        arguments: vec!["worker".into()],
    };
    let remote = Remote::new("emulated", served, Arc::clone(&pool));
    let problem = problem(|_| {});
    let here = run(&Emulated::default(), &problem).expect("it runs");
    assert_eq!(bits(&run(&remote, &problem).expect("it runs there")), bits(&here));
}

/// What the processes cost: the best of many runs, here and behind a worker, of problems of growing size.
#[test]
#[ignore = "a measurement: run it alone, with --nocapture"]
fn what_a_run_behind_a_worker_costs() {
    let (remote, _) = mocked(&[], settings(RUN));
    let best = |backend: &dyn Backend, problem: &Problem| {
        let inputs = values::inputs(problem);
        let once = |_| {
            let start = Instant::now();
            backend.run(problem, &inputs).expect("it runs");
            start.elapsed()
        };
        (0..200).map(once).min().expect("a time")
    };
    for (len, heads) in [(1, 1), (16, 2), (64, 4), (256, 8)] {
        let problem = problem(|fields| {
            fields.sequences.truncate(1);
            (fields.rows.q, fields.rows.kv) = (len, len);
            let run = seamproof_oracle::Run { offset: 0, step: 1, len, span: len };
            (fields.sequences[0].q, fields.sequences[0].kv) = (run, run);
            (fields.heads.q, fields.heads.kv) = (heads, heads);
            fields.pass = Pass::Forward;
        });
        let bytes = 16 * len * heads * 64;
        let (here, there) = (best(&Emulated::default(), &problem), best(&remote, &problem));
        eprintln!("{bytes:>8} bytes of tensors: {here:?} here, {there:?} behind a worker");
    }
}

// The command line.

fn seamproof(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(PROGRAM).current_dir(dir).args(arguments).output().expect("the program runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("an exit code")
}

fn events(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("the events");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn campaign<'a>(backend: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let usual =
        ["run", "--backend", backend, "--cases", "60", "--seed", "3", "--workers", "1", "--jobs", "2"];
    [&usual, more].concat()
}

#[test]
fn a_campaign_goes_on_past_crashes() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let output = seamproof(dir, &campaign("mock:crash=sink", &["--json", "e.jsonl", "--junit", "j.xml"]));
    let said = stdout(&output);
    assert_eq!(code(&output), 3, "{said}");
    assert!(said.contains("SIGSEGV after launched"), "{said}");
    let runs =
        said.lines().find(|line| line.starts_with("device    0: ") && line.ends_with(" runs · mock 0"));
    assert!(runs.is_some(), "{said}");
    let events = events(&dir.join("e.jsonl"));
    assert!(events.iter().filter(|event| event["verdict"] == "held").count() > 5, "{said}");
    assert!(events.iter().all(|event| event["check"] == "crash" || event["check"].is_null()), "{said}");
    let found = events.iter().find(|event| event["event"] == "finding").expect("a finding");
    assert_eq!(found["key"]["ending"]["after"], "launched");
    let junit = fs::read_to_string(dir.join("j.xml")).expect("the report");
    assert!(junit.contains("SIGSEGV after launched"), "{junit}");
    let replayed = seamproof(dir, &["replay", "seamproof.out", "--workers", "1"]);
    assert_eq!(code(&replayed), 3, "{}", stdout(&replayed));
}

/// A campaign whose last worker is gone ends there, and says so; what it has judged counts.
#[test]
fn a_campaign_without_workers_ends() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let closed = format!("mock:crash=9,closed={}", dir.join("closed").display());
    let output = seamproof(dir, &campaign(&closed, &["--json", "e.jsonl"]));
    let said = stdout(&output);
    assert_eq!(code(&output), 3, "{said}");
    for text in ["no worker can be started any more", "the mock's device 0 is gone", "interrupted after"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let cases = events(&dir.join("e.jsonl"));
    let judged = cases.iter().filter(|event| event["event"] == "case").count();
    assert!((1..60).contains(&judged), "{judged} cases");
}

/// A failure that an earlier run causes is stored with that run, and replayed with it.
#[test]
fn a_failure_in_company_is_replayed_in_company() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let subject = Subject { name: mock::NAME.to_owned(), options: options(&[("history", "always")]) };
    let alone = Case::new(subject, 0, with_sink());
    let before = vec![Earlier { options: alone.subject.options.clone(), problem: capped() }];
    let together = Case { before, ..alone.clone() };
    for (name, case) in [("alone", &alone), ("together", &together)] {
        assert_eq!(Case::parse(case.to_json().as_bytes()).as_ref(), Ok(case));
        fs::write(dir.join(name).with_extension("json"), case.to_json()).expect("the case is written");
    }
    let replayed = |name: &str| seamproof(dir, &["replay", name, "--workers", "1"]);
    assert_eq!(code(&replayed("alone.json")), 0);
    let output = replayed("together.json");
    assert_eq!(code(&output), 3, "{}", stdout(&output));
    assert!(stdout(&output).contains("after 1 of the"), "{}", stdout(&output));

    let shrunk = |name: &str| {
        seamproof(dir, &["shrink", name, "--out", "small.json", "--budget", "30", "--workers", "1"])
    };
    assert_eq!(code(&shrunk("alone.json")), 0);
    let output = shrunk("together.json");
    assert_eq!(code(&output), 3, "{}", stdout(&output));
    let small = Case::load(&dir.join("small.json")).expect("a case");
    assert_eq!(small.before, together.before);
    assert!(size(&small.problem) < size(&together.problem), "{}", stdout(&output));
    assert_eq!(code(&replayed("small.json")), 3);

    let output = seamproof(dir, &campaign("mock:history=always", &[]));
    assert_eq!(code(&output), 3, "{}", stdout(&output));
    let found = fs::read_dir(dir.join("seamproof.out/findings")).expect("findings");
    let cases = found.map(|entry| entry.expect("an entry").path());
    let case = cases.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "json"));
    let case = Case::load(&case.expect("a case")).expect("a case");
    assert!(case.before.iter().any(|earlier| earlier.problem.softmax.softcap.is_some()));
    assert_eq!(code(&seamproof(dir, &["replay", "seamproof.out", "--workers", "1"])), 3);
}

/// The runs before a failure are stored as they were made: they are not made wrong once more.
#[test]
fn the_runs_before_a_wrong_call_are_replayed_as_they_were() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let name = format!("{}~call-softcap-dropped", mock::NAME);
    let subject = Subject { name, options: options(&[("history", "always")]) };
    let before = vec![Earlier { options: subject.options.clone(), problem: capped() }];
    let case = Case { before, ..Case::new(subject, 0, with_sink()) };
    fs::write(dir.join("case.json"), case.to_json()).expect("the case is written");
    let output = seamproof(dir, &["replay", "case.json", "--workers", "1"]);
    assert_eq!(code(&output), 3, "{}", stdout(&output));
}

/// What a campaign finds of a subject that is called wrongly replays by that name.
#[test]
fn a_campaign_on_a_subject_that_is_called_wrongly_finds_it() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let output = seamproof(dir, &campaign("mock~call-lse-in-bf16", &[]));
    assert_eq!(code(&output), 2, "{}", stdout(&output));
    assert_eq!(code(&seamproof(dir, &["replay", "seamproof.out", "--workers", "1"])), 2);
    let right = ["replay", "seamproof.out", "--workers", "1", "--backend", "mock"];
    assert_eq!(code(&seamproof(dir, &right)), 0);
}

/// A supervisor goes on with workers of its own build, whatever lies in its program's place by now.
#[cfg(target_os = "linux")]
#[test]
fn workers_are_of_the_supervisors_build() {
    let place = tempfile::tempdir().expect("a directory");
    let program = place.path().join("seamproof");
    fs::copy(PROGRAM, &program).expect("the program is copied");
    let mut child = Command::new(&program)
        .current_dir(place.path())
        .args(campaign("mock:crash=sink", &["--json", "e.jsonl"]))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let log = place.path().join("e.jsonl");
    let begun = || fs::read_to_string(&log).is_ok_and(|text| text.contains("\"start\""));
    wait_until("the campaign does not begin", begun);
    fs::remove_file(&program).expect("the program is removed");
    fs::write(&program, "another build").expect("another is written");
    let mut said = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert_eq!(child.wait().expect("it ends").code(), Some(3), "{said}");
    assert!(said.contains("SIGSEGV") && said.contains("internal 0"), "{said}");
}

#[test]
fn the_case_after_a_hang_is_judged() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    for (name, problem) in [("a", with_sink()), ("b", problem(|_| {}))] {
        let subject = Subject { name: mock::NAME.to_owned(), options: BTreeMap::new() };
        let text = Case::new(subject, 0, problem).to_json();
        fs::write(dir.join(name).with_extension("json"), text).expect("the case is written");
    }
    let hanging = ["--backend", "mock:hang=sink", "--workers", "1", "--deadline", "1500ms"];
    let replayed = seamproof(dir, &[&["replay", "a.json", "b.json"][..], &hanging].concat());
    let said = stdout(&replayed);
    assert_eq!(code(&replayed), 3, "{said}");
    for text in ["timeout: hung after launched", "held     b.json", "held 1", "crashed 1"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let shrunk = seamproof(dir, &[&["shrink", "a.json", "--budget", "2"][..], &hanging].concat());
    assert_eq!(code(&shrunk), 3, "{}", stdout(&shrunk));
}

#[test]
fn a_crash_shrinks_to_what_it_needs() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let output = seamproof(dir, &campaign("mock:crash=sink", &[]));
    let found = fs::read_dir(dir.join("seamproof.out/findings")).expect("findings");
    let cases = found.map(|entry| entry.expect("an entry").path());
    let case = cases.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "json"));
    let case = case.expect("a case").display().to_string();
    assert!(stdout(&output).contains("minimal after"), "{}", stdout(&output));
    let shrunk = seamproof(dir, &["shrink", &case, "--out", "small.json", "--workers", "1"]);
    assert_eq!(code(&shrunk), 3, "{}", stdout(&shrunk));
    let small = fs::read_to_string(dir.join("small.json")).expect("the case");
    assert!(small.contains("\"signal\": 11") && small.contains("\"sink\""), "{small}");
    let healthy = seamproof(dir, &["replay", "small.json", "--backend", "mock"]);
    assert_eq!(code(&healthy), 0, "{}", stdout(&healthy));
}

#[test]
fn behind_a_worker_the_emulated_kernel_is_judged_as_without() {
    let place = tempfile::tempdir().expect("a directory");
    let cases = |backend: &str| {
        let output = seamproof(place.path(), &campaign(backend, &["--json", "e.jsonl"]));
        assert!([0, 4].contains(&code(&output)), "{}", stdout(&output));
        let mut events = events(&place.path().join("e.jsonl"));
        events.retain(|event| event["event"] == "case");
        events
    };
    assert_eq!(cases("emulated"), cases("emulated@worker"));
    let planted = seamproof(place.path(), &campaign("emulated+window-off-by-one@worker", &[]));
    assert_eq!(code(&planted), 2, "{}", stdout(&planted));
}

#[test]
fn a_subject_that_cannot_be_started_is_one_line() {
    let place = tempfile::tempdir().expect("a directory");
    let late = ["--start-deadline", "300ms"];
    let output = seamproof(place.path(), &campaign("mock:slow-start=600000", &late));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.lines().count() == 1 && said.contains("mock") && said.contains("300ms"), "{said}");
    assert!(!place.path().join("seamproof.out").exists());
    for wrong in ["mock:crash", "mock:crash=never", "mock:fly=1", "abacus@worker", "emulated@worker:q_tile=0"]
    {
        let output = seamproof(place.path(), &campaign(wrong, &[]));
        assert_eq!(code(&output), 1, "{wrong}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{wrong}");
    }
}

#[test]
fn a_worker_without_a_supervisor_ends() {
    let output = Command::new(PROGRAM).arg("worker").stdin(Stdio::null()).output().expect("it runs");
    assert_eq!((code(&output), output.stdout.len()), (i32::from(worker::EXIT_FAILED), 0));
    let mut child = Command::new(PROGRAM)
        .arg("worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    let mut pipe = child.stdin.take().expect("a pipe");
    pipe.write_all(&[b'x'; 100]).expect("it reads");
    assert_eq!(child.wait().expect("it ends").code(), Some(i32::from(worker::EXIT_FAILED)));
}

/// Processes whose parent this is.
#[cfg(target_os = "linux")]
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent_of = |process: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    numbers.filter(|&process| parent_of(process) == Some(parent)).collect()
}

/// However a supervisor ends while its worker hangs, the worker ends with it.
#[cfg(target_os = "linux")]
#[test]
fn no_worker_outlives_its_supervisor() {
    for signals in [&["-KILL"][..], &["-INT", "-INT"], &["-TERM", "-TERM"]] {
        let place = tempfile::tempdir().expect("a directory");
        let mut child = Command::new(PROGRAM)
            .current_dir(place.path())
            .args(campaign("mock:hang=others", &["--deadline", "10m", "--json", "e.jsonl"]))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = place.path().join("e.jsonl");
        let begun = || fs::read_to_string(&log).is_ok_and(|text| text.contains("\"canary\""));
        wait_until("the campaign does not begin", begun);
        let workers = children(child.id());
        assert!(!workers.is_empty(), "there is no worker");
        let mut notes = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        for (number, signal) in signals.iter().enumerate() {
            if number > 0 {
                // The first one was taken note of.
                assert!(notes.by_ref().any(|line| line.expect("a line").contains("once more")));
            }
            let killed = Command::new("kill").args([signal, &*child.id().to_string()]).status();
            assert!(killed.expect("kill runs").success());
        }
        child.wait().expect("it ends");
        for worker in workers {
            wait_until("the worker is left", || is_gone(worker));
        }
    }
}
