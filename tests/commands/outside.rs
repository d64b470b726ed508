//! Subjects outside of this program: a worker in plain Python that fails on demand, behind `exec:` and `python:`, and
//! the turned-round door, where a Python process has its own subject judged.
//!
//! Whatever the worker does is a finding or a clear error, and no process is left.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use seamproof::backends;
use seamproof::worker::{self, Pool, Settings, frame, message};
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::generate::{self, Draw, Profile};
use seamproof_judge::subject::Table;
use seamproof_judge::values;
use seamproof_oracle::{Pass, Problem, ProblemFields, Run, Sequence};
use serde_json::Value;
use tempfile::TempDir;

use super::{PROGRAM, at_once, code, stderr};

/// Longest time that anything here waits for.
const WAIT: Duration = Duration::from_secs(60);

fn workers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python_workers")
}

/// A folder to run in, whose path is in the arguments of every worker that is started there.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the mock with a fault, as `--backend` takes it.
    fn mock(&self, fault: &str, when: &str) -> String {
        let (file, mark) = (workers().join("mock.py"), self.path().display());
        format!("exec:python3 {} {fault} {when} {mark}", file.display())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.current_dir(self.path()).args(arguments).env_remove("SEAMPROOF_PYTHON");
        command.env("PYTHONPATH", workers().join("package")).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the program runs")
    }

    /// Stores a small case, and returns its name.
    fn case(&self, edit: impl FnOnce(&mut ProblemFields)) -> &'static str {
        let subject = Subject { name: "emulated".into(), options: Default::default() };
        fs::write(self.path().join("case.json"), Case::new(subject, 0, small(edit)).to_json())
            .expect("a file");
        "case.json"
    }

    /// Judges the small case on the mock.
    fn replayed(&self, fault: &str, more: &[&str]) -> Output {
        self.replayed_when(fault, "others", more)
    }

    fn replayed_when(&self, fault: &str, when: &str, more: &[&str]) -> Output {
        let (case, mock) = (self.case(|_| {}), self.mock(fault, when));
        self.run(&[&["replay", case, "--backend", &mock, "--workers", "1"], more].concat())
    }

    /// Waits until no worker of this place is left.
    fn is_left_by_all(&self) {
        let mark = self.path().as_os_str().as_encoded_bytes().to_vec();
        let start = Instant::now();
        while let Some(left) = running(&mark) {
            assert!(start.elapsed() < WAIT, "process {left} is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.is_left_by_all();
        }
    }
}

/// Returns a process with this text in its arguments.
fn running(mark: &[u8]) -> Option<String> {
    let processes = fs::read_dir("/proc").expect("the processes").flatten();
    let id = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    processes.filter_map(id).filter(|id| id.bytes().all(|byte| byte.is_ascii_digit())).find(|id| {
        let arguments = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        id.parse() != Ok(std::process::id()) && arguments.windows(mark.len()).any(|part| part == mark)
    })
}

/// Returns a problem that the mock takes, edited.
fn small(edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let run = |len| Run { offset: 0, step: 1, len, span: len };
    let mut fields: ProblemFields = worker::sentinel_problem(&Table::default()).expect("a problem").into();
    fields.sequences = vec![Sequence { id: 0, q: run(5), kv: run(7) }];
    (fields.rows.q, fields.rows.kv, fields.data_seed, fields.pass) = (5, 7, 1, Pass::Backward);
    (fields.dims.qk, fields.dims.v) = (8, 4);
    edit(&mut fields);
    Problem::new(fields).expect("a problem")
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Test that plain Python which is right holds, whatever it prints, through every door.
#[test]
fn a_right_worker_holds_in_a_campaign() {
    let faults = [("print", "always"), ("flood-stderr", "7"), ("none", "always")];
    at_once(faults, |(fault, when)| {
        let place = Place::new();
        let mock = place.mock(fault, when);
        let usual =
            ["run", "--backend", &mock, "--cases", "30", "--seed", "1", "--jobs", "2", "--workers", "1"];
        let output = place.run(&usual);
        let said = said(&output);
        // Thirty cases are too few for most floors of the census.
        assert_eq!(code(&output), 4, "{said}");
        assert!(said.contains("cases     30 · held 30 ·"), "{fault}: {said}");
        let runs = said
            .lines()
            .find(|line| line.starts_with("device    0: ") && line.contains(" runs · python · python 3."));
        assert!(runs.is_some(), "{said}");
    });
}

/// Test that what a subject prints is shown where that is asked for, and nowhere else.
#[test]
fn prints_are_shown_where_they_are_asked_for() {
    let place = Place::new();
    for (option, shown) in [(&[][..], false), (&["--prints"], true)] {
        let output = place.replayed_when("print", "always", option);
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert_eq!(stderr(&output).contains("a kernel's compiler prints\n"), shown, "{}", said(&output));
    }
}

/// Test that a campaign does not go on with another subject of the same name: one whose file was edited, or one of which
/// a build recorded nothing. Once the file is put back, it does.
#[test]
fn a_campaign_goes_on_with_the_subject_of_its_first_cases_alone() {
    let subjects =
        [("kernels.py", "python:kernels.py:Right"), ("mock.py", "exec:python3 mock.py none always x")];
    at_once(subjects, |(name, backend)| {
        let place = Place::new();
        let (file, out) = (place.path().join(name), place.path().join("seamproof.out"));
        fs::copy(workers().join(name), &file).expect("a copy");
        let usual = ["run", "--cases", "20", "--seed", "1", "--jobs", "2", "--workers", "1", "--resume"];
        let run = || place.run(&[&usual[..], &["--backend", backend]].concat());
        let refused = |what: &str| {
            let log = fs::read(out.join("events.jsonl")).expect("a log");
            let output = run();
            let (told, said) = (
                format!("checkpoint.json: the subject is not the one that was cut off: {what}"),
                said(&output),
            );
            assert!(
                code(&output) == 1 && said.contains(&told) && said.lines().count() == 1,
                "{what}: {said}"
            );
            assert_eq!(fs::read(out.join("events.jsonl")).expect("a log"), log, "nothing is changed");
        };
        assert_eq!(code(&run()), 4, "{backend}");
        let before = fs::read_to_string(&file).expect("a file");
        fs::write(&file, format!("{before}# another kernel\n")).expect("a file");
        refused(&format!("{name} was "));
        fs::write(&file, before).expect("a file");
        let output = run();
        assert!(said(&output).contains("going on after 20 cases"), "{}", said(&output));

        let checkpoint = out.join("checkpoint.json");
        let mut older: Value =
            serde_json::from_slice(&fs::read(&checkpoint).expect("a checkpoint")).expect("JSON");
        older.as_object_mut().expect("an object").remove("identity").expect("it was recorded");
        fs::write(&checkpoint, older.to_string()).expect("a file");
        refused(&format!("{name} was not recorded and is "));
    });
}

/// Test that everything which goes wrong with a run is a finding with the right words, and ends with its exit code.
#[test]
fn every_failure_of_a_run_is_a_finding() {
    let findings = [
        ("crash", 3, "crash: SIGSEGV after launched: and again alone in a fresh worker"),
        ("exit", 3, "crash: exit code 7 after launched"),
        ("raise", 3, "crash: ValueError: a mask that nobody knows"),
        ("refuse", 2, "capability: refused what its table takes: the row softcap says no"),
        ("flood-stdout", 3, "crash: garbage after launched"),
        ("shapes", 3, "crash: garbage after done: and again alone in a fresh worker; a tensor of shape"),
        ("transposed", 2, "structure"),
        ("huge", 3, "a body of 4611686018427387904 bytes; at most 1073741824 are taken"),
        ("cut", 3, "crash: exit code 0 after done"),
        ("sequence", 3, "an answer to request"),
        ("order", 3, "phase uploaded too late, or a second time"),
        ("compiling", 3, "phase compiling more than 20 times"),
        ("long-text", 3, "a body of 2097166 bytes; at most 1048576 are taken"),
        ("wrong", 2, "FAIL"),
        ("oom", 70, "out of memory: "),
    ];
    let hung = ["hang", "late"].map(|fault| (fault, 3, "timeout: hung after launched"));
    at_once(hung.into_iter().chain(findings), |(fault, expected, words)| {
        let deadline: &[&str] = if words.starts_with("timeout") { &["--deadline", "700ms"] } else { &[] };
        let output = Place::new().replayed(fault, deadline);
        let said = said(&output);
        assert_eq!(code(&output), expected, "{fault}: {said}");
        assert!(said.contains(words), "{fault}: {said}");
        // Before it is killed it says where it hangs.
        assert!(fault != "hang" || said.contains("most recent call first"), "{said}");
    });
    let output = Place::new().replayed("none", &[]);
    assert_eq!(code(&output), 0, "{}", said(&output));
}

/// Test that a campaign on a subject with accidents finds its canary past them, judges every case, and ends with the
/// accident as its finding.
#[test]
fn accidents_are_findings_of_a_campaign_and_no_canary() {
    let accidents = [
        ("crash", "crash: SIGSEGV after launched"),
        ("kill", "crash: SIGKILL after launched"),
        ("exit", "crash: exit code 7 after launched"),
        ("raise", "crash: ValueError: a mask that nobody knows"),
        ("hang", "timeout: hung after launched"),
    ];
    // Five of these cases have a soft cap.
    let cases = "12";
    at_once(accidents, |(fault, words)| {
        let place = Place::new();
        let mock = place.mock(fault, "softcap");
        let usual = ["--seed", "1", "--jobs", "2", "--workers", "1", "--deadline", "700ms"];
        let output = place.run(&[&["run", "--backend", &mock, "--cases", cases], &usual[..]].concat());
        let said = said(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(code(&output), 3, "{fault}: {said}");
        assert!(said.contains(&format!("cases {cases} · held ")) && said.contains(words), "{fault}: {said}");
        assert!(said.contains("canary found in case "), "{fault}: {said}");
        let canary = cases_in(&place.path().join("seamproof.out/canary"));
        let minimal = |case: &&Case| case.found.as_ref().is_some_and(|found| found.minimal);
        let found: Vec<&Case> = canary.iter().filter(minimal).collect();
        let [found] = found[..] else { panic!("{fault}: one canary") };
        let check = found.found.as_ref().map(|found| found.finding.check);
        assert!(check.is_some_and(|check| !check.is_end()), "{fault}: {check:?}");
    });
}

/// Test that a subject which is wrong everywhere has findings and no canary, and that one which hangs everywhere ends
/// in a verdict all the same.
#[test]
fn a_subject_that_always_fails_has_findings_and_no_canary() {
    at_once([("wrong", 2, "5"), ("hang", 3, "1")], |(fault, expected, cases)| {
        let place = Place::new();
        let mock = place.mock(fault, "others");
        let usual =
            ["--seed", "1", "--jobs", "2", "--workers", "1", "--deadline", "700ms", "--junit", "j.xml"];
        let output = place.run(&[&["run", "--backend", &mock, "--cases", cases], &usual[..]].concat());
        let said = said(&output);
        assert_eq!(code(&output), expected, "{said}");
        let canary = "canary    inconclusive: the subject fails by itself: 4 of 4 cases ";
        assert!(said.contains(canary) && said.contains("FAIL"), "{said}");
        assert_eq!(cases_in(&place.path().join("seamproof.out/canary")).len(), 4, "{said}");
        let events = fs::read_to_string(place.path().join("seamproof.out/events.jsonl")).expect("the events");
        assert!(events.contains("\"not_told\":\"the subject fails by itself"), "{events}");
        let report = fs::read_to_string(place.path().join("j.xml")).expect("the report");
        assert!(report.contains("type=\"not told\""), "{report}");
    });
}

/// Returns the stored cases of a folder.
fn cases_in(folder: &Path) -> Vec<Case> {
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let cases = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    cases.map(|path| Case::load(&path).expect("a case")).collect()
}

/// Test that a worker with which no campaign can begin is an error of the user's, on a line of its own.
#[test]
fn a_subject_that_does_not_open_is_an_error() {
    let place = Place::new();
    let errors = [
        ("version", "the other side speaks version 1 of the worker protocol, and this program version 3"),
        ("undeclared", "its worker declares nothing"),
        ("nonsense", "the declaration's softcaps: unknown field"),
        ("not-json", "key must be a string"),
        (
            "closed",
            "ImportError: no such kernel\n  Traceback (most recent call last):\n    File \"kernel.py\", line 1\n",
        ),
        ("dead", "exit code 1; its stderr ends: the mock is dead"),
        ("never-reads", "did not start in 2s"),
    ];
    at_once(errors, |(fault, words)| {
        let mock = place.mock(fault, "always");
        let output = place.run(&["run", "--backend", &mock, "--cases", "3", "--start-deadline", "2s"]);
        let said = said(&output);
        assert_eq!(code(&output), 1, "{fault}: {said}");
        assert!(
            said.starts_with("error: --backend: exec:python3 ") && said.contains(words),
            "{fault}: {said}"
        );
        assert!(!place.path().join("seamproof.out").exists(), "{fault}");
    });
    for wrong in ["exec:", "exec:no-such-program", "exec:python3 'x", "exec:true"] {
        let output = place.run(&["run", "--backend", wrong, "--cases", "3"]);
        assert_eq!(code(&output), 1, "{wrong}: {}", said(&output));
        assert_eq!(said(&output).lines().count(), 1, "{wrong}: {}", said(&output));
    }
}

#[test]
fn a_python_file_is_a_subject() {
    let place = Place::new();
    let kernels = workers().join("kernels.py").display().to_string();
    let broken = place.path().join("broken.py");
    fs::write(&broken, "import numpee\n").expect("a file");
    let run = |backend: &str, more: &[&str]| {
        place.run(
            &[&["run", "--backend", backend, "--cases", "40", "--seed", "2", "--workers", "1"], more]
                .concat(),
        )
    };
    let right = run(&format!("python:{kernels}:Right"), &[]);
    assert!(said(&right).contains("held 37 · refused 0 · malformed 3 · failed 0"), "{}", said(&right));
    let short = run(&format!("python:{kernels}:Short"), &["--json", "e.jsonl"]);
    assert_eq!(code(&short), 2, "{}", said(&short));
    assert!(said(&short).contains("minimal after"), "{}", said(&short));
    let again = place.run(&["replay", "seamproof.out", "--workers", "1"]);
    assert_eq!(code(&again), 2, "{}", said(&again));
    for (backend, words) in [
        (format!("python:{kernels}"), "has 2 subjects; name one of Right, Short"),
        (format!("python:{kernels}:Wrong"), "has no subject Wrong; it has Right, Short"),
        (
            format!("python:{}", broken.display()),
            "ModuleNotFoundError: No module named 'numpee'\n  Traceback",
        ),
        ("python:none.py".to_owned(), "there is no file none.py"),
        ("python:".to_owned(), "write python:FILE or python:FILE:NAME"),
        (format!("python:{kernels}:Right:tile"), "write python:FILE or python:FILE:NAME"),
    ] {
        let output = run(&backend, &[]);
        assert_eq!(code(&output), 1, "{backend}: {}", said(&output));
        assert!(said(&output).contains(words), "{backend}: {}", said(&output));
    }
}

/// Test that what this machine lacks is skipped with its reason, and that an adapter with a fault is not.
#[test]
fn a_case_of_a_library_that_is_not_installed_is_skipped() {
    let place = Place::new();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/fa-2515-no-sequences.json");
    let text = fs::read_to_string(stored).expect("a stored case");
    let write = |name: &str, subject: &str| {
        let mut case: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        case["subject"] = serde_json::json!({ "name": subject });
        fs::write(place.path().join(name), case.to_string()).expect("a file");
    };
    fs::write(
        place.path().join("lacking.py"),
        "class NotHere(Exception): pass\nraise NotHere('not here: no such library')\n",
    )
    .expect("a file");
    fs::write(place.path().join("broken.py"), "raise ValueError('not here: /etc/x')\n").expect("a file");
    fs::create_dir(place.path().join("cases")).expect("a folder");
    write("cases/a.json", "python:lacking.py");
    write("cases/b.json", "python:lacking.py");
    write("cases/right.json", "emulated");
    let skipped = place.run(&["replay", "cases", "--workers", "1"]);
    assert_eq!(code(&skipped), 0, "{}", said(&skipped));
    for words in ["skipped  cases/a.json · ", "not here: no such library", "held 1 ", " · skipped 2"] {
        assert!(said(&skipped).contains(words), "{words}: {}", said(&skipped));
    }
    // Neither is a Python without the package.
    let command = &mut place.command(&["replay", "cases/a.json", "--workers", "1"]);
    let bare = command.env("PYTHONPATH", place.path()).output().expect("the program runs");
    assert!(said(&bare).contains("skipped  cases/a.json · "), "{}", said(&bare));
    let alone = place.run(&["replay", "cases/a.json", "--workers", "1"]);
    assert_eq!(code(&alone), 4, "{}", said(&alone));
    let asked =
        place.run(&["replay", "cases/right.json", "--backend", "python:lacking.py", "--workers", "1"]);
    assert_eq!(code(&asked), 1, "{}", said(&asked));
    write("broken.json", "python:broken.py");
    let broken = place.run(&["replay", "broken.json", "--workers", "1"]);
    assert_eq!(code(&broken), 1, "{}", said(&broken));
}

#[test]
fn try_asks_a_subject_for_what_it_takes() {
    let place = Place::new();
    let backend = format!("python:{}:Right", workers().join("kernels.py").display());
    let tried =
        place.run(&["try", "--lengths", "3,5", "--dim", "4", "--workers", "1", "--backend", &backend]);
    assert_eq!(code(&tried), 0, "{}", said(&tried));
}

#[test]
fn a_python_that_is_not_there_is_named() {
    let place = Place::new();
    let backend = format!("python:{}:Right", workers().join("kernels.py").display());
    let started = |python: &str| {
        let mut command = place.command(&["run", "--backend", &backend, "--cases", "3"]);
        command.env("SEAMPROOF_PYTHON", python).output().expect("the program runs")
    };
    for (python, words) in
        [("no-such-python", "no-such-python cannot be started"), ("false", "is no Python that runs")]
    {
        let output = started(python);
        assert_eq!(code(&output), 1, "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    let nowhere = place.command(&["run", "--backend", &backend]).env("PATH", "").output().expect("it runs");
    assert!(said(&nowhere).contains("there is no Python"), "{}", said(&nowhere));
}

/// Test that a result which is wrong only after another run is stored with that run, and replays; and that nothing is
/// promised about one that is not seen again.
#[test]
fn a_wrong_result_is_looked_at_again_in_a_fresh_worker() {
    let place = Place::new();
    let run = |fault: &str, when: &str, cases: &str| {
        let mock = place.mock(fault, when);
        let usual =
            ["run", "--backend", &mock, "--cases", cases, "--seed", "1", "--workers", "1", "--jobs", "1"];
        place.run(&usual)
    };
    let output = run("history", "always", "2");
    let told = said(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code(&output), 2, "{told}");
    assert!(told.contains("alone in a fresh worker it is right; it fails after 1 of the"), "{told}");
    let cases = cases_in(&place.path().join("seamproof.out/findings"));
    let needs = cases.iter().find(|case| case.before.len() == 1).expect("a case with the run that it needs");
    assert!(needs.before[0].problem.softmax.softcap.is_some());
    let again = place.run(&["replay", "seamproof.out", "--workers", "1"]);
    assert_eq!(code(&again), 2, "{}", said(&again));
    let drawn = |index| match generate::draw(1, index, &Profile::Quick.limits()) {
        Draw::Problem(problem) => Some(problem.data_seed),
        Draw::Malformed(_) => None,
    };
    // A case behind those that the search for the canary takes.
    let seed = (20..30).find_map(drawn).expect("a case");
    let output = run("wrong", &format!("once:{seed}"), "30");
    let told = said(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code(&output), 2, "{told}");
    assert!(
        told.contains("replay: none, as it was not seen to fail again: not reproducible alone"),
        "{told}"
    );
}

/// Measurement of the protocol: a small run on a worker in Python that computes nothing, and 100 MB from one process
/// to another.
#[test]
#[ignore = "a measurement: run it alone, with --nocapture"]
fn what_the_protocol_costs() {
    let place = Place::new();
    let pool = Arc::new(Pool::new(Settings { workers: Some(1), ..Settings::default() }));
    let idle = backends::in_pool(&place.mock("idle", "always"), &Default::default(), pool);
    let backend = idle.expect("it opens");
    let best = |problem: &Problem, count: usize| {
        let inputs = values::inputs(problem);
        let once = |_| {
            let start = Instant::now();
            let _ = backend.run(problem, &inputs);
            start.elapsed()
        };
        (0..count).map(once).min().expect("a time")
    };
    eprintln!("a small run: {:?}", best(&small(|fields| fields.pass = Pass::Forward), 300));
    let large = small(|fields| {
        (fields.rows.q, fields.rows.kv, fields.pass) = (5000, 5000, Pass::Forward);
        (fields.heads.q, fields.heads.kv) = (16, 2);
        (fields.dims.qk, fields.dims.v) = (256, 8);
    });
    let bytes = message::encode_run(&large, &values::inputs(&large));
    eprintln!(
        "{} MB there and {} MB back: {:?}",
        bytes.len() >> 20,
        (4 * 5000 * 16 * 8) >> 20,
        best(&large, 5)
    );
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    let times = std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let mut ends = Vec::new();
            while frame::read(&mut reader, frame::BODY_MAX).is_ok() {
                ends.push(Instant::now());
            }
            ends
        });
        let starts: Vec<Instant> = (0..5)
            .map(|sequence| {
                let start = Instant::now();
                frame::write(&mut writer, frame::Kind::Run, sequence, &bytes).expect("it is written");
                std::thread::sleep(Duration::from_millis(200));
                start
            })
            .collect();
        drop(writer);
        let ends = reading.join().expect("it reads");
        starts.into_iter().zip(ends).map(|(start, end)| end - start).min()
    });
    eprintln!("{} MB one way between two threads of this program: {times:?}", bytes.len() >> 20);
}

/// Test that the other commands take such a subject, with a fault at its call too.
#[test]
fn every_command_takes_a_subject_outside() {
    let place = Place::new();
    let (case, right) = (place.case(|_| {}), place.mock("none", "always"));
    let wrong = format!("{right}~call-scale-off");
    let output = place.run(&["replay", case, "--backend", &wrong, "--workers", "1"]);
    assert_eq!(code(&output), 2, "{}", said(&output));
    let output = place.run(&["shrink", case, "--backend", &wrong, "--workers", "1", "--budget", "40"]);
    assert_eq!(code(&output), 2, "{}", said(&output));
    let stored = Case::load(&place.path().join("case.min.json")).expect("a case");
    assert_eq!(stored.subject.name, wrong);
    let output = place.run(&["replay", "case.min.json", "--workers", "1"]);
    assert_eq!(code(&output), 2, "{}", said(&output));
    explains_no_launches(&place, &["explain", case, "--backend", &right]);
    let output = place.run(&["calibrate", &right, "--cases", "4"]);
    assert_eq!(code(&output), 0, "{}", said(&output));
    let score =
        ["faults", "--score", "--backend", &right, "--only", "call-scale-off", "--quick", "--workers", "1"];
    let output = place.run(&score);
    assert_eq!(code(&output), 0, "{}", said(&output));
    fs::create_dir(place.path().join("regressions")).expect("a folder");
    let night = ["nightly", "--backend", &right, "--budget", "2s", "--workers", "1", "--corpus", "."];
    let output = place.run(&night);
    assert!(said(&output).contains("held"), "{}", said(&output));
}

/// Tests that `explain` shows who holds what, and no launches of this project in the place of the subject's.
fn explains_no_launches(place: &Place, explain: &[&str]) {
    let output = place.run(explain);
    let text = said(&output);
    assert_eq!(code(&output), 0, "{text}");
    let why = "the launches of a subject from outside are not known; --backend emulated shows this project's";
    assert!(text.contains(&format!("\nlaunches  not shown: {why}")), "{text}");
    assert!(text.contains("\n  rank 0 owns\n") && !text.contains("launch on"), "{text}");
    let output = place.run(&[explain, &["--operations"]].concat());
    assert!(
        code(&output) == 1 && said(&output).contains(&format!("--operations: {why}")),
        "{}",
        said(&output)
    );
}

/// Test that a program which is asked to stop, once or twice, ends soon and leaves no worker, not even one that notices
/// nothing. A run that hangs has minutes left by its deadline.
#[test]
fn a_stopped_program_leaves_no_process() {
    let stopped =
        [("deaf", "always", 1), ("hang", "softcap", 1), ("hang", "softcap", 2), ("deaf", "always", 0)];
    at_once(stopped, |(fault, when, signals)| {
        let place = Place::new();
        let mock = place.mock(fault, when);
        let cases = if signals == 0 { "10" } else { "1000000" };
        let mut command = place.command(&["run", "--backend", &mock, "--cases", cases, "--workers", "1"]);
        let mut program = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let events = place.path().join("seamproof.out/events.jsonl");
        let start = Instant::now();
        while signals > 0 && !events.exists() && start.elapsed() < WAIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(1));
        let id = Pid::from_child(&program);
        let asked = Instant::now();
        for _ in 0..signals {
            kill_process(id, Signal::INT).expect("it is told");
            std::thread::sleep(Duration::from_millis(300));
        }
        program.wait().expect("it ends");
        assert!(
            signals == 0 || asked.elapsed() < WAIT / 2,
            "{fault} {when} {signals}: {:?}",
            asked.elapsed()
        );
        place.is_left_by_all();
    });
}

/// Has a Python process's own subject judged, and returns the summary.
fn served(place: &Place, fault: &str, when: &str, options: &[&str]) -> (Output, Value) {
    let calling = workers().join("calling.py");
    let mut command = Command::new("python3");
    command.current_dir(place.path()).arg(calling).args([PROGRAM, fault, when, "--json", "summary.json"]);
    let output = command.args(options).output().expect("Python runs");
    let text = fs::read_to_string(place.path().join("summary.json")).unwrap_or_default();
    (output, serde_json::from_str(&text).unwrap_or_default())
}

/// Returns a field's text.
fn text(field: &Value) -> &str {
    field.as_str().unwrap_or_default()
}

/// Returns a field's number.
fn number(field: &Value) -> u64 {
    field.as_u64().expect("a number")
}

#[test]
fn a_process_has_its_own_subject_judged() {
    let place = Place::new();
    let (output, summary) =
        served(&place, "none", "always", &["--cases", "30", "--seed", "1", "--text", "text"]);
    assert_eq!((code(&output), text(&summary["outcome"])), (4, "too-little-run"), "{}", said(&output));
    assert_eq!((number(&summary["held"]), number(&summary["exit"]), text(&summary["seed"])), (30, 4, "0x1"));
    assert!(summary["declared"]["table"]["softcap"].as_bool().expect("the table"));
    assert_eq!(summary["ended"], Value::Null);
    let written = fs::read_to_string(place.path().join("text")).expect("the text");
    assert_eq!(text(&summary["text"]), written);
    let options = ["--cases", "30", "--seed", "1", "--out", "out", "--name", "python:kernel.py:x"];
    let (output, summary) = served(&place, "wrong", "others", &options);
    assert_eq!((code(&output), text(&summary["outcome"])), (2, "finding"), "{}", said(&output));
    let finding = &summary["findings"][0];
    assert_eq!(finding["minimal"], true, "{finding}");
    assert_eq!(finding["case"]["subject"]["name"], "python:kernel.py:x");
    let file = text(&finding["file"]);
    assert_eq!(text(&finding["replay"]), format!("seamproof replay {file}"));
    let (output, summary) = served(&place, "wrong", "others", &["--replay", file]);
    assert_eq!((code(&output), number(&summary["failed"])), (2, 1), "{}", said(&output));
    let (output, summary) = served(&place, "none", "others", &["--replay", file]);
    assert_eq!((code(&output), text(&summary["outcome"])), (0, "held"), "{}", said(&output));
    let (output, _) = served(&place, "none", "others", &["--replay", "none.json"]);
    assert_eq!(code(&output), 1, "{}", said(&output));
}

#[test]
fn the_end_of_the_calling_process_is_the_end_of_the_campaign() {
    let place = Place::new();
    let options = ["--cases", "12", "--seed", "1"];
    let (_, summary) = served(&place, "raise", "softcap", &options);
    assert_eq!((text(&summary["outcome"]), number(&summary["cases"])), ("crash", 12), "{summary}");
    assert!(text(&summary["findings"][0]["what"]).contains("a mask that nobody knows"));
    let (_, summary) = served(&place, "shapes", "softcap", &options);
    assert_eq!((text(&summary["outcome"]), number(&summary["failed"])), ("crash", 1), "{summary}");
    assert!(text(&summary["ended"]).contains("garbage"), "{summary}");
    for (fault, words) in
        [("undeclared", "declares nothing"), ("version", "version 1"), ("closed", "no such kernel")]
    {
        let (output, summary) = served(&place, fault, "always", &options);
        assert_eq!((code(&output), text(&summary["outcome"])), (1, "input"), "{fault}: {summary}");
        assert!(text(&summary["trouble"][0]).contains(words), "{fault}: {summary}");
    }
    let (_, summary) = served(&place, "hang", "softcap", &[&options[..], &["--deadline", "1s"]].concat());
    assert_eq!(summary["outcome"], "crash", "{summary}");
}

/// Test that the program ends by itself where its caller does not live to see it.
#[test]
fn a_campaign_whose_caller_dies_ends() {
    at_once([("gone", "internal"), ("killed", "crash")], |(fault, outcome)| {
        let place = Place::new();
        served(&place, fault, "always", &["--cases", "30", "--seed", "1", "--out", "out"]);
        let start = Instant::now();
        let written = loop {
            match fs::read_to_string(place.path().join("summary.json")) {
                Ok(written) => break written,
                Err(_) => assert!(start.elapsed() < WAIT, "{fault}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let summary: Value = serde_json::from_str(&written).expect("JSON");
        assert_eq!(summary["outcome"], outcome, "{summary}");
        assert!(text(&summary["ended"]).contains("went away"), "{summary}");
    });
}

/// Returns what a campaign on the mock whose window is short says, its events and its findings' files, with a fault in
/// what writes scripts.
fn scripted(place: &Place, how: &str, more: &[&str]) -> (Output, Vec<Value>, Vec<String>) {
    let backend = format!("python:{}:Short", workers().join("kernels.py").display());
    let usual =
        ["run", "--backend", &backend, "--cases", "40", "--seed", "2", "--workers", "1", "--json", "e.jsonl"];
    let mut command = place.command(&[&usual[..], more].concat());
    let output = command.env("SCRIPT", how).output().expect("the program runs");
    let events = fs::read_to_string(place.path().join("e.jsonl")).expect("the events");
    let events = events.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    let files = fs::read_dir(place.path().join("seamproof.out/findings")).expect("the findings");
    let name = |file: std::io::Result<fs::DirEntry>| file.expect("a file").file_name().into_string();
    (output, events, files.map(|file| name(file).expect("a name")).collect())
}

/// Test that a finding of a Python subject comes with a script in place of a Rust test, and that what goes wrong with
/// it is told at the finding.
#[test]
fn a_finding_in_python_comes_with_a_script() {
    let doubts = [
        ("", None),
        ("doubt", Some("it holds")),
        ("none", Some("there is none: no source")),
        ("fail", Some("there is none: python -m seamproof.script: it failed: no such library")),
    ];
    at_once(doubts, |(how, doubt)| {
        let place = Place::new();
        let (output, events, files) = scripted(&place, how, &[]);
        let told = said(&output);
        assert_eq!(code(&output), 2, "{how}: {told}");
        assert!(files.iter().all(|file| !file.ends_with(".rs")), "{files:?}");
        let of_name = |name: &str| {
            let of = |event: &&Value| event["event"] == "finding" && event["name"] == name;
            events.iter().rev().find(of).expect("its event")["script"].clone()
        };
        let cases: Vec<&str> = files.iter().filter_map(|file| file.strip_suffix(".json")).collect();
        assert!(!cases.is_empty(), "{told}");
        for name in cases {
            let is_written = how.is_empty() || how == "doubt";
            assert_eq!(files.contains(&format!("{name}.py")), is_written, "{how}: {files:?}");
            let script = of_name(name);
            let path = format!("seamproof.out/findings/{name}.py");
            assert_eq!(script["path"].as_str(), is_written.then_some(path.as_str()), "{how}: {script}");
            assert_eq!((&script["shows"], script["doubt"].as_str()), (&Value::Bool(doubt.is_none()), doubt));
            let words = fs::read_to_string(place.path().join(&path).with_extension("txt")).expect("words");
            let last = words.lines().next_back().unwrap_or_default();
            assert!(last.starts_with("script: ") && last.contains(doubt.unwrap_or(&path)), "{words}");
            let command = |python: &str| told.contains(&format!("script: {python} {path}\n"));
            assert!(!is_written || command("python3") || command("python"), "{told}");
        }
        assert!(told.contains(doubt.unwrap_or("progress scripts of findings: 1 of ")), "{told}");
    });
    let (output, events, files) = scripted(&Place::new(), "fail", &["--scripts", "0"]);
    assert!(!said(&output).contains("script"), "{}", said(&output));
    assert!(events.iter().all(|event| event["script"].is_null()));
    assert!(files.iter().all(|file| !file.ends_with(".py") && !file.ends_with(".rs")), "{files:?}");
}

/// Test that a script which hangs is left at the first signal, with everything that it started, and the campaign's
/// summary is still there.
#[test]
fn a_script_that_hangs_is_left_at_a_signal() {
    let place = Place::new();
    let backend = format!("python:{}:Short", workers().join("kernels.py").display());
    let mut command =
        place.command(&["run", "--backend", &backend, "--cases", "40", "--seed", "2", "--workers", "1"]);
    command.env("SCRIPT", "hang").stdout(Stdio::piped()).stderr(Stdio::null());
    let program = command.spawn().expect("it starts");
    let start = Instant::now();
    while !place.path().join("begun").exists() {
        assert!(start.elapsed() < WAIT, "no script is begun");
        std::thread::sleep(Duration::from_millis(20));
    }
    let start = Instant::now();
    kill_process(Pid::from_child(&program), Signal::INT).expect("it is told");
    let output = program.wait_with_output().expect("it ends");
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(code(&output), 2, "{}", said(&output));
    assert!(said(&output).contains("python -m seamproof.script: it was interrupted"), "{}", said(&output));
    assert!(place.path().join("seamproof.out/sums.json").exists());
}
