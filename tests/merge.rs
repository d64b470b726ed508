//! Shards joined by `seamproof merge` are the campaign that was not cut: events, findings, summary and JUnit report, but for
//! what depends on the clock.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use serde_json::Value;

/// Subjects whose failures have one symptom, or several; and the right one.
const SUBJECTS: [&str; 4] = [
    "window-off-by-one",
    "emulated+padded-keys-as-real",
    "emulated+gradient-sums-not-cleared",
    "emulated:q_tile=2",
];
const CASES: &str = "240";

fn seamproof(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("seamproof").expect("the program is built");
    command.current_dir(dir).args(arguments).output().expect("the program runs")
}

/// A campaign's directory and reports without times and numbers of threads.
#[derive(Debug, PartialEq)]
struct Left {
    code: Option<i32>,
    said: Vec<String>,
    events: Vec<Value>,
    run: Value,
    junit: Vec<String>,
    findings: BTreeMap<String, String>,
}

fn left(dir: &Path, output: &Output) -> Left {
    let out = dir.join("out");
    let text = |name: &str| fs::read_to_string(out.join(name)).expect("the file is there");
    let lines = text("events.jsonl");
    let events = lines.lines().map(|line| timeless(serde_json::from_str(line).expect("an event is JSON")));
    let mut run: Value = serde_json::from_str(&text("run.json")).expect("run.json is JSON");
    run["start"] = timeless(run["start"].take());
    run["summary"] = timeless(run["summary"].take());
    let junit = fs::read_to_string(dir.join("junit.xml")).expect("a report is written");
    let said = String::from_utf8(output.stdout.clone()).expect("stdout is text");
    let timed = ["rate", "cost", "threads"];
    Left {
        code: output.status.code(),
        said: said
            .lines()
            .filter(|line| !timed.iter().any(|t| line.starts_with(t)))
            .map(str::to_owned)
            .collect(),
        events: events.collect(),
        run,
        junit: junit.lines().map(|line| line.split(" time=").next().unwrap_or_default().to_owned()).collect(),
        findings: files(&out.join("findings")),
    }
}

fn timeless(mut event: Value) -> Value {
    if let Some(fields) = event.as_object_mut() {
        fields.remove("times");
        fields.remove("jobs");
    }
    event
}

fn files(dir: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(dir).expect("the directory is there").map(|entry| entry.expect("an entry"));
    let file = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path()).expect("a file of text");
        (entry.file_name().to_string_lossy().into_owned(), text)
    };
    entries.map(file).collect()
}

fn whole(subject: &str) -> (tempfile::TempDir, Left) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let run = [
        "run",
        "--seed",
        "3",
        "--cases",
        CASES,
        "--backend",
        subject,
        "--out",
        "out",
        "--junit",
        "junit.xml",
    ];
    let output = seamproof(place.path(), &run);
    let left = left(place.path(), &output);
    (place, left)
}

fn shard(dir: &Path, subject: &str, index: usize, count: usize) -> String {
    let (shard, out) = (format!("{index}/{count}"), format!("shard-{index}"));
    let run =
        ["run", "--seed", "3", "--cases", CASES, "--backend", subject, "--shard", &shard, "--out", &out];
    seamproof(dir, &run);
    out
}

#[test]
fn shards_join_into_the_campaign_that_was_not_cut() {
    let mut failures = 0;
    for subject in SUBJECTS {
        let (_kept, expected) = whole(subject);
        failures += expected.events.iter().filter(|event| event["event"] == "finding").count();
        for count in [2, 7] {
            let place = tempfile::tempdir().expect("a temporary directory");
            let mut shards: Vec<String> =
                (0..count).map(|index| shard(place.path(), subject, index, count)).collect();
            // In any order.
            shards.reverse();
            let names: Vec<&str> = shards.iter().map(String::as_str).collect();
            let merge = [&["merge", "--out", "out", "--junit", "junit.xml"], &names[..]].concat();
            let output = seamproof(place.path(), &merge);
            assert_eq!(left(place.path(), &output), expected, "{subject} in {count}");
        }
    }
    assert!(failures > 12, "{failures} events of findings: too few to say anything");
}

/// Every failing case is counted for its failure, or as like none: the summary's counts add up.
#[test]
fn every_failing_case_is_counted_once() {
    let (_kept, whole) = whole("emulated+padded-keys-as-real");
    let summary = &whole.run["summary"];
    let sum = |counts: &mut dyn Iterator<Item = u64>| counts.sum::<u64>();
    let numbers = |values: &Value| -> Vec<u64> {
        values.as_object().expect("counts").values().filter_map(Value::as_u64).collect()
    };
    let failed = sum(&mut numbers(&summary["failed"]).into_iter());
    let failures = summary["failures"].as_array().expect("a list");
    let of = |name: &str| sum(&mut failures.iter().filter_map(|failure| failure[name].as_u64()));
    let unlike = ["kept", "dropped"].iter().filter_map(|name| summary[name].as_u64());
    let (cases, shrunk) = (of("cases"), of("seen"));
    assert_eq!(cases + unlike.sum::<u64>(), failed, "{summary}");
    assert_eq!(cases - shrunk, summary["not_shrunk"].as_u64().expect("a number"), "{summary}");
    assert!(shrunk < cases, "more failed than were shrunk: {summary}");
    let told = whole.said.iter().filter(|line| line.starts_with("FAIL ")).count();
    assert_eq!(told, failures.len(), "{:?}", whole.said);
    assert!(
        whole.said.iter().any(|line| line.contains(" of them shrunk, the others like them; first in case "))
    );
}

#[test]
fn what_is_missing_double_or_of_another_campaign_is_said() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path();
    let shards: Vec<String> = (0..3).map(|index| shard(dir, "emulated", index, 3)).collect();
    let merge = |arguments: &[&str]| {
        let output = seamproof(dir, &[&["merge"], arguments].concat());
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).expect("text"))
    };
    fs::remove_file(dir.join("shard-1/sums.json")).expect("the sums were written");
    let (code, said) = merge(&[&shards[0], &shards[1], &shards[2]]);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("shard-1: has no sums.json") && said.contains("shard 1/3 is missing"), "{said}");
    let (code, said) = merge(&[&shards[0], "shard-9", &shards[2]]);
    assert_eq!(code, Some(4), "{said}");
    assert!(
        said.contains("shard-9: there is no such directory") && said.contains("1/3 is missing"),
        "{said}"
    );
    let (code, said) = merge(&["shard-8", "shard-9"]);
    assert!(code == Some(1) && said.contains("shard-8, shard-9: no shard has ended"), "{said}");
    let (code, said) = merge(&[&shards[0], &shards[0]]);
    assert!(code == Some(1) && said.contains("shard 0/3 once more"), "{said}");
    let other = shard(dir, "window-off-by-one", 4, 5);
    let (code, said) = merge(&[&shards[0], &other]);
    assert!(code == Some(1) && said.contains("not parts of one campaign"), "{said}");
    let (code, said) = merge(&[&shards[0], "--out", &shards[0]]);
    assert!(code == Some(1) && said.contains("is a shard"), "{said}");
    // A log that lost its end.
    let log = dir.join("shard-2/events.jsonl");
    let text = fs::read_to_string(&log).expect("events are written");
    let kept: Vec<&str> = text.lines().take(20).collect();
    fs::write(&log, kept.join("\n")).expect("the log is written");
    let (code, said) = merge(&[&shards[0], &shards[2]]);
    assert!(code == Some(1) && said.contains("shard-2/events.jsonl: tells of"), "{said}");
}

/// What a killed shard found is in no sum: it is named, and is a finding.
#[test]
fn what_a_shard_found_that_did_not_end_is_named() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path();
    let shards = [0, 1].map(|index| {
        let (shard, out) = (format!("{index}/2"), format!("shard-{index}"));
        let subject = if index == 0 { "emulated" } else { SUBJECTS[0] };
        let run =
            ["run", "--seed", "1", "--cases", "40", "--backend", subject, "--shard", &shard, "--out", &out];
        seamproof(dir, &run);
        out
    });
    let found = files(&dir.join("shard-1/findings"));
    let found: Vec<&String> = found.keys().filter(|name| name.ends_with(".json")).collect();
    assert!(!found.is_empty(), "the shard found something");
    fs::remove_file(dir.join("shard-1/sums.json")).expect("the sums were written");
    for arguments in [&["merge", &shards[0], &shards[1]][..], &["merge", &shards[1]]] {
        let output = seamproof(dir, arguments);
        let said = String::from_utf8(output.stdout).expect("text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        for name in &found {
            assert!(said.contains(&format!("replay: seamproof replay shard-1/findings/{name}\n")), "{said}");
        }
    }
}
