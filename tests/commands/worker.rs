//! Subjects behind worker processes, without a GPU: the subject is a mock that fails on demand.
//!
//! Whatever the mock does, the failure is recorded as what it was, the other runs continue, and no process is left.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use seamproof::backends;
use seamproof::worker::{self, Deadlines, Pool, Remote, Served, Settings, WorkerCommand, mock};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::Phase;
use seamproof_judge::finding::{Cause, Check, Ending};
use seamproof_judge::subject::Host;
use seamproof_judge::subject::{Backend, Ended, Outputs, RunError};
use seamproof_judge::subjects::{Emulated, MISCALLS, Miscalled, miscall};
use seamproof_judge::values;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{Pass, Problem, Sink};

use super::mocking::{START, capped, is_gone, options, problem, wait_until, with_sink};
use super::{PROGRAM, at_once};

/// Deadline of a run that does not hang, which takes less.
const RUN: Duration = Duration::from_secs(10);
/// Deadline of runs that are meant to hang.
const SHORT: Duration = Duration::from_millis(700);

fn settings(phase: Duration) -> Settings {
    Settings {
        program: PROGRAM.into(),
        workers: Some(1),
        deadlines: Deadlines::new(START, phase),
        ..Settings::default()
    }
}

fn mocked(listed: &[(&str, &str)], settings: Settings) -> (Remote, Arc<Pool>) {
    let pool = Arc::new(Pool::new(settings));
    let served = mock::served(&options(listed)).expect("the mock's options");
    (Remote::new(mock::NAME, served, Arc::clone(&pool)), pool)
}

fn host(subject: &dyn Backend) -> &dyn Host {
    subject.host().expect("it runs in workers")
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

/// Test that the calls go wrong on their way to the worker, which serves the right subject and stays the same from
/// fault to fault.
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
    (&first as &dyn Backend).ready().expect("a worker starts");
    let idle = pool.idle_processes();
    let mut shown = 0;
    for miscall in MISCALLS.iter() {
        let (here, there) = (Miscalled::new(Box::new(Emulated::default()), miscall), behind(miscall));
        // A reader that sees that something is wrong says so, and there is no run.
        let answer = |subject: &Miscalled| run(subject, &padded).map(|outputs| bits(&outputs));
        let [here, there] = [&here, &there].map(|subject| answer(subject).map_err(|error| error.to_string()));
        assert_eq!(here, there, "{}", miscall.id);
        let right = run(&Emulated::default(), &padded).expect("it runs");
        shown += usize::from(here != Ok(bits(&right)));
    }
    assert!(shown > 12, "{shown} of {} faults change a bit", MISCALLS.len());
    // The worker dies of a soft cap, and is not told of this one.
    let dropped = behind(miscall("call-softcap-dropped").expect("a fault"));
    let uncapped = run(&Emulated::default(), &problem(|_| {})).expect("it runs");
    assert_eq!(bits(&run(&dropped, &capped()).expect("it lives")), bits(&uncapped));
    assert_eq!((pool.idle_processes(), host(&first).devices()), (idle, pool.used()));
    assert!(host(&first).devices()[0].runs > 20 && host(&first).lost().is_empty());
    ended(run(&behind(miscall("call-scale-off").expect("a fault")), &capped()));
}

#[test]
fn a_subject_without_a_worker_is_not_called_at_all() {
    let (remote, _) = mocked(&[("bad-device", "0")], settings(RUN));
    let wrong = Miscalled::new(Box::new(remote), &MISCALLS[0]);
    assert!((&wrong as &dyn Backend).ready().expect_err("no device").contains("gone"));
    assert_eq!(host(&wrong).lost().len(), 1);
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
    at_once(table, |(option, cause, phase, text)| {
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
    });
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

/// Test that a lack of memory says nothing about a subject.
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

/// Test of a worker that looks as if it could not be killed: its pipes stay open.
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

/// Test that a device on which nothing starts is given up, and that its work goes to the other devices.
#[test]
fn a_seat_whose_device_is_bad_is_retired() {
    let several = Settings { workers: None, ..settings(RUN) };
    let (remote, pool) = mocked(&[("devices", "3"), ("bad-device", "1")], several);
    // A thread that comes when the first device is busy goes to the second one.
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

/// Test that a subject that does not open where the sentinel has run is at fault itself, and that the seat continues
/// with others.
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
                assert!(said.contains("no worker can be started: device 0: the mock's"), "{said}");
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
    // The very first run is the sentinel's. The judge then takes it for no sentinel, and no other run is affected.
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

/// Test of a device on which the sentinel comes out wrong in fresh workers too. The device went bad, no subject is to
/// blame, and its seat is gone.
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

/// Test of a sentinel that is right in some fresh workers and wrong in others. The device is not at fault: bits of
/// the subject change from run to run.
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
    let emulated = || backends::by_name("emulated", &none).expect("the subject");
    let served = Served {
        declaration: emulated(),
        subject: worker::subject("emulated", &none),
        sentinel: worker::subject("emulated", &none),
        sentinel_declaration: emulated(),
        worker: WorkerCommand::own(&["worker"]),
        start: None,
    };
    let remote = Remote::new("emulated", served, Arc::clone(&pool));
    let problem = problem(|_| {});
    let here = run(&Emulated::default(), &problem).expect("it runs");
    assert_eq!(bits(&run(&remote, &problem).expect("it runs there")), bits(&here));
}

/// Measurement of the cost of the processes: the best of many runs, here and behind a worker, on problems of growing
/// size.
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
