//! Commands on subjects behind worker processes, without a GPU: the subject is a mock that fails on demand.
//!
//! Whatever a worker does, the command ends and says what happened, and its exit code tells a crash or a hang from a
//! wrong result. However a command ends, no process is left.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use seamproof::worker::{self, mock};
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::finding::Earlier;
use seamproof_judge::shrink::size;
use seamproof_oracle::Problem;
use serde_json::Value;

use super::mocking::{capped, is_gone, options, problem, wait_until, with_sink};
use super::{PROGRAM, at_once, code, seamproof, stdout};

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

/// Test that a campaign whose last worker is gone ends there, and says so. The cases that it has judged count.
#[test]
fn a_campaign_without_workers_ends() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    let closed = format!("mock:crash=9,closed={}", dir.join("closed").display());
    let output = seamproof(dir, &campaign(&closed, &["--json", "e.jsonl"]));
    let said = stdout(&output);
    assert_eq!(code(&output), 3, "{said}");
    for text in ["no worker can be started", "the mock's device 0 is gone", "interrupted after"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let cases = events(&dir.join("e.jsonl"));
    let judged = cases.iter().filter(|event| event["event"] == "case").count();
    assert!((1..60).contains(&judged), "{judged} cases");
}

/// Writes a case of this subject as `NAME.json`.
fn store(dir: &Path, name: &str, subject: &[(&str, &str)], problem: Problem) {
    let subject = Subject { name: mock::NAME.to_owned(), options: options(subject) };
    let text = Case::new(subject, 0, problem).to_json();
    fs::write(dir.join(name).with_extension("json"), text).expect("the case is written");
}

/// Test that the exit code says that the subject's process ended in a stored case, however it did, and that nothing
/// else is wrong. A wrong result beside it says more.
#[test]
fn a_stored_case_that_ends_the_subject_s_process_is_no_wrong_result() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    for option in ["crash", "exit", "error", "oom-killed", "garbage", "wrong-digest"] {
        store(dir, option, &[(option, "sink")], with_sink());
        let output = seamproof(dir, &["replay", &format!("{option}.json"), "--workers", "1"]);
        let said = stdout(&output);
        assert_eq!(code(&output), 3, "{option}: {said}");
        assert!(said.starts_with(&format!("FAIL     {option}.json · crash: ")), "{said}");
        assert!(said.ends_with("failed 0 · crashed 1 · unreadable 0 · internal 0\n"), "{said}");
    }
    store(dir, "held", &[], with_sink());
    let replay = |more: &[&str]| {
        seamproof(dir, &[&["replay", "held.json", "crash.json", "--workers", "1"], more].concat())
    };
    assert_eq!(code(&replay(&[])), 3, "{}", stdout(&replay(&[])));
    assert_eq!(code(&replay(&["--backend", "mock"])), 0, "it is the subject that dies");
    let wrong = Subject { name: format!("{}~call-lse-in-bf16", mock::NAME), options: BTreeMap::new() };
    fs::write(dir.join("wrong.json"), Case::new(wrong, 0, with_sink()).to_json())
        .expect("the case is written");
    assert_eq!(code(&replay(&["wrong.json"])), 2, "{}", stdout(&replay(&["wrong.json"])));
}

/// Test that a night says the same about its stored cases.
#[test]
fn a_night_whose_stored_case_ends_the_subject_s_process_found_a_crash() {
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path();
    fs::create_dir_all(dir.join("corpus/regressions")).expect("a directory");
    fs::write(dir.join("corpus/known.toml"), "").expect("a file");
    store(dir, "corpus/regressions/case", &[], with_sink());
    let night = ["nightly", "--budget", "0s", "--corpus", "corpus", "--backend", "mock:crash=sink"];
    let output = seamproof(dir, &[&night[..], &["--seed", "1", "--workers", "1"]].concat());
    let said = stdout(&output);
    assert_eq!(code(&output), 3, "{said}");
    assert!(said.contains("## Regressions that fail\n\n- **crash · mock · SIGSEGV"), "{said}");
    let replayed = seamproof(dir, &["replay", "nights/night-0001", "--workers", "1"]);
    assert_eq!(code(&replayed), 3, "{}", stdout(&replayed));
}

/// Test that a failure that an earlier run causes is stored with that run, and replayed with it.
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

/// Test that the runs before a failure are stored as they were made, and are not made wrong once more.
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

/// Test that a finding about a subject that is called wrongly replays by that subject's name.
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

/// Test that a supervisor continues with workers of its own build, whatever lies in its program's place by now.
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
    store(dir, "a", &[], with_sink());
    store(dir, "b", &[], problem(|_| {}));
    let hanging = ["--backend", "mock:hang=sink", "--workers", "1", "--deadline", "700ms"];
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

/// Returns the child processes of a parent.
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

/// Whether a process has ended, though nobody has taken its status yet: whoever adopted it may take its time.
#[cfg(target_os = "linux")]
fn has_ended(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Test that a worker ends with its supervisor, however that ends while the worker hangs.
#[cfg(target_os = "linux")]
#[test]
fn no_worker_outlives_its_supervisor() {
    let ways: [&[&str]; 3] = [&["-KILL"], &["-INT", "-INT"], &["-TERM", "-TERM"]];
    at_once(ways, |signals| {
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
                // The child has noted the first signal.
                assert!(notes.by_ref().any(|line| line.expect("a line").contains("once more")));
            }
            let killed = Command::new("kill").args([signal, &*child.id().to_string()]).status();
            assert!(killed.expect("kill runs").success());
        }
        child.wait().expect("it ends");
        for worker in workers {
            wait_until("the worker is left", || is_gone(worker) || has_ended(worker));
        }
    });
}
