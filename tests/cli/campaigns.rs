//! Campaigns: their events, summaries, shards and ends.

use std::fs;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{campaign, code, events, named, place, refuses, seamproof, stderr, stdout};

#[test]
fn a_directory_that_cannot_be_written_is_known_before_any_case_runs() {
    let place = place();
    let dir = place.path();
    fs::write(dir.join("file"), "").expect("a file");
    fs::create_dir_all(dir.join("mine")).expect("a directory");
    fs::write(dir.join("mine/thesis"), "").expect("a file");
    refuses(dir, &["run", "--out", "file"], &["file"]);
    refuses(dir, &["run", "--out", "file/below"], &["file/below"]);
    refuses(dir, &["run", "--out", "/proc/none"], &["/proc/none"]);
    refuses(dir, &["run", "--out", "mine"], &["mine", "--out"]);
    refuses(dir, &["run", "--json", "nowhere/events"], &["nowhere/events"]);
    if cfg!(target_os = "linux") {
        refuses(dir, &["run", "--cases", "1", "--json", "/dev/full"], &["/dev/full"]);
        let output = seamproof(dir, &["run", "--cases", "1", "--json", "/dev/full"]);
        assert!(!stdout(&output).contains("canary"), "{}", stdout(&output));
    }
    refuses(dir, &["run", "--junit", "nowhere/junit"], &["nowhere/junit"]);
}

#[test]
fn the_same_seed_gives_the_same_events_whatever_the_threads() {
    let place = place();
    let mut first = campaign(place.path(), &["--jobs", "1"]);
    let mut second = campaign(place.path(), &["--jobs", "4"]);
    assert_eq!(first.remove(0)["jobs"], 1);
    assert_eq!(second.remove(0)["jobs"], 4);
    assert_eq!(first, second);
    assert_eq!(named(&first, "case").len(), 300);
    assert!(place.path().join("seamproof.out.1/run.json").is_file());
}

#[test]
fn shards_together_are_the_unsharded_campaign() {
    let place = place();
    let cases = |events: Vec<Value>| -> Vec<Value> { named(&events, "case").into_iter().cloned().collect() };
    let whole = cases(campaign(place.path(), &[]));
    let mut parts = Vec::new();
    for shard in ["0/3", "1/3", "2/3"] {
        parts.extend(cases(campaign(place.path(), &["--shard", shard])));
    }
    parts.sort_by_key(|event| event["index"].as_u64());
    assert_eq!(whole, parts);
}

#[test]
fn a_campaign_reports_to_people_and_machines() {
    let place = place();
    let arguments = ["run", "--seed", "0x1", "--cases", "300", "--json", "e.jsonl", "--junit", "j.xml"];
    let output = seamproof(place.path(), &arguments);
    let said = stdout(&output);
    for text in
        ["seed      0x1", "emulated", "quick", "limits", "threads", "canary    found", "margin", "cases/s"]
    {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let events = events(&place.path().join("e.jsonl"));
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().expect("a name")).collect();
    assert_eq!((names[0], names[1], names[names.len() - 1]), ("start", "canary", "summary"));
    let text = fs::read_to_string(place.path().join("j.xml")).expect("the report is there");
    let report = quick_junit::Report::deserialize_from_str(&text).expect("the report is JUnit");
    assert_eq!(report.test_suites.len(), 1);
    assert!(report.test_suites[0].test_cases.iter().any(|test| test.name.as_str() == "envelope"));
}

#[test]
fn a_campaign_that_is_too_small_says_so_in_few_lines() {
    let place = place();
    let output = seamproof(place.path(), &["run", "--cases", "5", "--seed", "1"]);
    assert_eq!(code(&output), 4, "{}", stderr(&output));
    assert!(stdout(&output).matches("too little run").count() <= 5, "{}", stdout(&output));
    assert!(stdout(&output).contains("other floors"), "{}", stdout(&output));
}

#[test]
fn the_census_needs_no_backend() {
    let place = place();
    let output = seamproof(place.path(), &["census", "--cases", "20000"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let output = seamproof(place.path(), &["census", "--cases", "1"]);
    assert_eq!(code(&output), 4);
    assert!(stderr(&output).contains("too little"));
    assert!(!place.path().join("seamproof.out").exists());
}

#[test]
fn a_campaign_that_held_says_so_in_its_last_line() {
    let place = place();
    let output = seamproof(place.path(), &["run", "--seed", "1", "--cases", "1000"]);
    let said = stdout(&output);
    let last = said.lines().last().unwrap_or_default();
    assert_eq!(code(&output), 0, "{said}");
    assert!(last.starts_with("result    nothing was found: ") && last.contains(" cases held, "), "{said}");
    // With so few cases that held, p50 is reported and p99 is not.
    let margins = said.lines().filter(|line| line.starts_with("          lse ") && line.contains(" W "));
    let columns: Vec<Vec<&str>> = margins.map(|line| line.split_whitespace().collect()).collect();
    let told = columns.iter().any(|line| matches!(line[..], [_, _, _, p50, "-", _] if p50 != "-"));
    assert!(told, "{said}");
    let few = seamproof(place.path(), &["run", "--seed", "1", "--cases", "3"]);
    assert!(code(&few) == 4 && !stdout(&few).contains("nothing was found"), "{}", stdout(&few));
}

/// Test that a fault of the subject itself is the same for every file, and is reported once.
#[test]
fn a_subject_that_cannot_be_had_is_said_once_and_not_for_each_file() {
    let place = place();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions");
    let refused = |backend: &str, texts: &[&str]| {
        refuses(place.path(), &["replay", folder, "--backend", backend], texts);
    };
    refused("emulated:nope=1", &["--backend", "no option 'nope'", "q_tile"]);
    refused("emulated:q_tile=many", &["--backend", "q_tile", "many"]);
    refused("abacus", &["--backend", "abacus"]);
    refused("mock:bad-device=0", &["mock:bad-device=0 cannot be started", "gone"]);
    // A fault alone is no subject.
    refused("call-scale-off", &["a fault at the call", "write emulated~call-scale-off"]);
    refused("cuda+call-scale-off", &["write cuda~call-scale-off"]);
    refused("ds-without-scale", &["write emulated+ds-without-scale"]);
    refused("emulated~merge-twice", &["write emulated+merge-twice"]);
}

#[cfg(unix)]
#[test]
fn a_signal_ends_the_campaign_with_its_summary() {
    const PATIENCE: Duration = Duration::from_secs(60);
    for signal in ["-INT", "-TERM"] {
        let place = place();
        let child = Process::new(assert_cmd::cargo::cargo_bin("seamproof"))
            .current_dir(place.path())
            .args(["run", "--time", "1h", "--seed", "1", "--junit", "j.xml"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = place.path().join("seamproof.out/events.jsonl");
        let begun = || fs::read_to_string(&log).is_ok_and(|text| text.contains("\"case\""));
        let start = Instant::now();
        while !begun() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
        let killed = Process::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(killed.expect("kill runs").success());
        let output = child.wait_with_output().expect("the program ends");
        assert_eq!(code(&output), 4, "{}", stderr(&output));
        assert!(stdout(&output).contains("too little run: interrupted"), "{}", stdout(&output));
        let events = events(&log);
        assert_eq!(events.last().map(|event| &event["interrupted"]), Some(&Value::Bool(true)));
        let text = fs::read_to_string(place.path().join("j.xml")).expect("the report is there");
        assert!(!text.contains("has not ended"), "{text}");
    }
}
