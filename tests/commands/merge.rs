//! Shards joined by `seamproof merge`. They give the campaign that was not cut: events, findings, summary and JUnit
//! report, apart from what depends on the clock.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{NOTHING_FOUND, code, events, named, place, seamproof, stderr};

/// Subjects whose failures have one symptom, or several, and the right one. Each is with the number of shards into
/// which its campaign is cut: few large ones, or many small ones that each find failures of the others anew.
const SUBJECTS: [(&str, usize); 5] = [
    (WINDOW, 3),
    (OTHER_HEAD, 2),
    ("emulated+padded-keys-as-real", 3),
    ("emulated+gradient-sums-not-cleared", 2),
    ("emulated:q_tile=2", 7),
];
const WINDOW: &str = "window-off-by-one";
/// Subject whose queries read the KV head after their own. A minimal case of one lane cannot tell this from other
/// faults.
const OTHER_HEAD: &str = "emulated~call-kv-heads-rotated";
const CASES: &str = "240";

/// A campaign's directory and reports, without times and numbers of threads.
#[derive(Debug, PartialEq)]
struct Left {
    code: Option<i32>,
    said: Vec<String>,
    events: Vec<Value>,
    run: Value,
    junit: Vec<String>,
    findings: BTreeMap<String, String>,
}

impl Left {
    /// Returns the text on one line, as it was before it was wrapped.
    fn told(&self) -> String {
        let lines: Vec<&str> = self.said.iter().map(|line| line.trim()).collect();
        lines.join(" ")
    }
}

fn left(dir: &Path, output: &Output) -> Left {
    left_in(dir, "out", output)
}

/// Returns what lies in a directory of this name, and the report beside it.
fn left_in(dir: &Path, name: &str, output: &Output) -> Left {
    let out = dir.join(name);
    let text = |name: &str| fs::read_to_string(out.join(name)).expect("the file is there");
    let lines = text("events.jsonl");
    let events = lines.lines().map(|line| timeless(serde_json::from_str(line).expect("an event is JSON")));
    let mut run: Value = serde_json::from_str(&text("run.json")).expect("run.json is JSON");
    run["start"] = timeless(run["start"].take());
    run["summary"] = timeless(run["summary"].take());
    let junit = fs::read_to_string(dir.join("junit.xml")).expect("a report is written");
    let said = String::from_utf8(output.stdout.clone()).expect("stdout is text");
    let timed = ["canary", "verdict", "rate", "cost", "threads"];
    let mut is_timed = false;
    // A wrapped line goes on behind the columns of labels.
    let mut is_same = |line: &&str| {
        is_timed = timed.iter().any(|label| line.starts_with(label)) || (is_timed && line.starts_with(' '));
        !is_timed
    };
    Left {
        code: output.status.code(),
        said: said.lines().filter(|line| is_same(line)).map(str::to_owned).collect(),
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
    shard_of(dir, CASES, subject, &format!("{index}/{count}"))
}

fn shard_of(dir: &Path, cases: &str, subject: &str, shard: &str) -> String {
    let out = format!("shard-{}", shard.split('/').next().unwrap_or_default());
    let run = ["run", "--seed", "3", "--cases", cases, "--backend", subject, "--shard", shard, "--out", &out];
    seamproof(dir, &run);
    out
}

#[test]
fn shards_join_into_the_campaign_that_was_not_cut() {
    let mut failures = 0;
    for (subject, count) in SUBJECTS {
        let (_kept, expected) = whole(subject);
        failures += expected.events.iter().filter(|event| event["event"] == "finding").count();
        let place = tempfile::tempdir().expect("a temporary directory");
        let mut shards: Vec<String> =
            (0..count).map(|index| shard(place.path(), subject, index, count)).collect();
        // The order of the shards must not matter.
        shards.reverse();
        let names: Vec<&str> = shards.iter().map(String::as_str).collect();
        let merge = [&["merge", "--out", "out", "--junit", "junit.xml"], &names[..]].concat();
        let output = seamproof(place.path(), &merge);
        assert_eq!(left(place.path(), &output), expected, "{subject} in {count}");
    }
    assert!(failures > 12, "{failures} events of findings: too few to say anything");
}

/// Options of a campaign that takes longer than it takes until the first checkpoint, on one thread.
const LONG: [&str; 14] = [
    "run",
    "--seed",
    "3",
    "--cases",
    "600",
    "--jobs",
    "1",
    "--out",
    "out",
    "--junit",
    "junit.xml",
    "--backend",
    WINDOW,
    "--resume",
];
/// Longest time until a checkpoint.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a campaign, and returns it once something is there.
fn started(dir: &Path, arguments: &[&str], is_there: impl Fn() -> bool) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seamproof"));
    command.current_dir(dir).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let start = Instant::now();
    while !is_there() {
        assert!(start.elapsed() < PATIENCE, "what is waited for does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Runs the long campaign and kills it once it has a checkpoint.
fn run_and_kill(dir: &Path) {
    let mut child = started(dir, &LONG, || dir.join("out/checkpoint.json").exists());
    child.kill().expect("it is killed");
    child.wait().expect("it has ended");
    assert!(!dir.join("out/sums.json").exists(), "the campaign ended before it was killed");
}

/// Test that a campaign that was killed goes on as if it had not been: no case is lost or counted twice.
#[test]
fn a_killed_campaign_goes_on_where_it_stopped() {
    let kept = place();
    let output = seamproof(kept.path(), &LONG);
    let expected = left(kept.path(), &output);
    assert_eq!(expected.code, Some(2), "{:?}", expected.said);

    let cut = place();
    run_and_kill(cut.path());
    // What was told after the checkpoint is told again, and a line may be torn.
    let log = cut.path().join("out/events.jsonl");
    let torn = fs::read_to_string(&log).expect("an event log") + "{\"event\":\"case\",\"ind";
    fs::write(&log, torn).expect("the log is written");
    let output = seamproof(cut.path(), &[&LONG[..], &["--json", "e.jsonl"]].concat());
    assert!(stderr(&output).contains("out: going on after "), "{}", stderr(&output));
    assert_eq!(left(cut.path(), &output), expected);
    assert!(!cut.path().join("out.1").exists(), "nothing began anew");
    let copied = fs::read_to_string(cut.path().join("e.jsonl")).expect("a second log");
    assert_eq!(copied, fs::read_to_string(&log).expect("an event log"));

    // A campaign that has ended has no case left.
    let output = seamproof(cut.path(), &LONG);
    assert!(stderr(&output).contains("out: going on after 600 cases"), "{}", stderr(&output));
    assert_eq!(left(cut.path(), &output), expected);
}

/// Options of one of two shards, which runs for some seconds after its first checkpoint, on one thread.
#[cfg(unix)]
const SHARD: [&str; 15] = [
    "run",
    "--seed",
    "3",
    "--cases",
    "1200",
    "--shard",
    "0/2",
    "--jobs",
    "1",
    "--out",
    "out",
    "--junit",
    "junit.xml",
    "--backend",
    WINDOW,
];

/// Runs the shard and sends it a signal once this is there. Returns what it said.
#[cfg(unix)]
fn run_and_signal(dir: &Path, signal: Signal, is_there: impl Fn() -> bool) -> Output {
    let child = started(dir, &[&SHARD[..], &["--resume"]].concat(), is_there);
    kill_process(Pid::from_child(&child), signal).expect("it is told");
    child.wait_with_output().expect("it ends")
}

/// Test that a shard which is killed before it has a checkpoint, told to stop, and killed again comes to the result of
/// a shard that nobody disturbs, and so does its campaign.
#[cfg(unix)]
#[test]
fn a_shard_that_is_preempted_again_and_again_comes_to_the_same_result() {
    let (kept, cut) = (place(), place());
    let (kept, cut) = (kept.path(), cut.path());
    let other = kept.join("other");
    let of_other = |word: &'static str| match word {
        "0/2" => "1/2",
        "out" => "other",
        "junit.xml" => "other.xml",
        word => word,
    };
    let expected = std::thread::scope(|scope| {
        scope.spawn(|| seamproof(kept, &SHARD.map(of_other)));
        left(kept, &seamproof(kept, &SHARD))
    });
    let name = |name: &str| cut.join("out").join(name);
    let log = || fs::read_to_string(name("events.jsonl")).unwrap_or_default();

    let killed = run_and_signal(cut, Signal::KILL, || log().contains("\"case\""));
    assert_eq!(killed.status.code(), None, "the shard ended before it was killed");
    assert!(!name("checkpoint.json").exists(), "it was killed too late");

    let stopped = run_and_signal(cut, Signal::TERM, || name("checkpoint.json").exists());
    assert!(stderr(&stopped).contains("the campaign begins anew"), "{}", stderr(&stopped));
    tells_of_the_interruption(&left(cut, &stopped));
    // The sums go first, and the log is cut next.
    let checkpoint: Value = json(&name("checkpoint.json"));
    let events = checkpoint["events"].as_u64().expect("a size") as usize;
    let goes_on = || !name("sums.json").exists() && log().len() > events;
    let killed = run_and_signal(cut, Signal::KILL, goes_on);
    assert_eq!(killed.status.code(), None, "the shard ended before it was killed");

    let ended = seamproof(cut, &[&SHARD[..], &["--resume"]].concat());
    assert!(stderr(&ended).contains("out: going on after "), "{}", stderr(&ended));
    assert_eq!(left(cut, &ended), expected);
    let other = other.display().to_string();
    let merge = ["merge", "out", &other, "--out", "whole", "--junit", "junit.xml"];
    let [expected, merged] = [kept, cut].map(|dir| left_in(dir, "whole", &seamproof(dir, &merge)));
    assert_eq!(merged, expected);
    assert_eq!((merged.code, &merged.run["summary"]["cases"]), (Some(2), &1200.into()));
}

/// Checks that a shard which was told to stop says so, and how far it came.
#[cfg(unix)]
fn tells_of_the_interruption(left: &Left) {
    let summary = &left.run["summary"];
    let cases = summary["cases"].as_u64().expect("a number of cases");
    assert!(left.code == Some(2) && (1..600).contains(&cases), "{cases}: {:?}", left.said);
    assert_eq!(summary["interrupted"], true);
    let missed = summary["missed"].to_string();
    assert!(missed.contains(&format!("interrupted after {cases} cases, before its end")), "{missed}");
}

#[cfg(unix)]
fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("the file is there")).expect("JSON")
}

#[test]
fn what_cannot_be_gone_on_with_begins_anew() {
    let place = place();
    let dir = place.path();
    let run = |seed: &str, shard: &str| {
        let output = seamproof(
            dir,
            &["run", "--seed", seed, "--cases", "40", "--shard", shard, "--out", "out", "--resume"],
        );
        assert!(NOTHING_FOUND.contains(&code(&output)), "{}", stderr(&output));
        stderr(&output)
    };
    assert!(!run("1", "0/2").contains("anew"), "there was nothing to go on with");
    let said = run("2", "0/2");
    assert!(said.contains("seed 0x1, and this one has 0x2") && said.contains("begins anew"), "{said}");
    let said = run("2", "1/2");
    assert!(said.contains("shard 0/2, and this one has 1/2") && said.contains("begins anew"), "{said}");
    let spoils: [(&str, Spoil, &str); 5] = [
        ("checkpoint.json", cut, "EOF while parsing"),
        ("checkpoint.json", |file| edited(file, |it| it["sums"]["held"] = u64::MAX.into()), "counts come to"),
        ("events.jsonl", |file| fs::write(file, "{}\n").expect("a file"), "tells of 3 of "),
        ("events.jsonl", unnamed, "tells of 19 of 20 cases"),
        ("checkpoint.json", |file| fs::remove_file(file).expect("it is written"), "has no checkpoint.json"),
    ];
    for (index, (name, spoil, reason)) in spoils.into_iter().enumerate() {
        spoil(&dir.join("out").join(name));
        let said = run("2", "1/2");
        assert!(said.contains(reason) && said.contains("begins anew"), "{reason}: {said}");
        let kept = dir.join(format!("out.{}", index + 3));
        assert!(
            kept.join("sums.json").is_file() && kept.join("events.jsonl").is_file(),
            "nothing is changed"
        );
    }
    for lacks in [["--cases", "40"], ["--seed", "1"]] {
        refuses_options(dir, &[&["run", "--resume"], &lacks[..]].concat());
    }
    refuses_options(dir, &["run", "--resume", "--cases", "4", "--seed", "1", "--time", "1s"]);
}

/// Makes one case of a log an event that nobody knows, in as many bytes.
fn unnamed(log: &Path) {
    let text = fs::read_to_string(log).expect("an event log");
    fs::write(log, text.replacen("\"event\":\"case\"", "\"event\":\"cast\"", 1)).expect("the log is written");
}

fn refuses_options(dir: &Path, arguments: &[&str]) {
    let output = seamproof(dir, arguments);
    assert_eq!(code(&output), 1, "{arguments:?}: {}", stderr(&output));
}

/// Test that the logs of all shards together stay as short as that of the whole campaign.
#[test]
fn late_cases_of_a_shard_that_held_have_no_event() {
    let place = place();
    let out = shard_of(place.path(), "70000", "emulated", "5/33000");
    let told = events(&place.path().join(out).join("events.jsonl"));
    let cases: Vec<u64> = named(&told, "case").iter().filter_map(|case| case["index"].as_u64()).collect();
    assert_eq!(cases, [5, 33_005], "the third is case 66005");
    assert_eq!(named(&told, "summary")[0]["cases"], 3);
}

/// Returns the last event of each failure.
fn findings(events: &[Value]) -> Vec<&Value> {
    let all = events.iter().filter(|event| event["event"] == "finding");
    all.map(|event| (event["key"].to_string(), event)).collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Test that the words before shrinking stand wherever the finding does, after one run and after the merge of its
/// parts. Parts of a program that did not keep these words are joined without them.
#[test]
fn what_was_wrong_before_shrinking_is_not_lost() {
    let (place, expected) = whole(OTHER_HEAD);
    let told: Vec<&Value> =
        findings(&expected.events).into_iter().filter(|f| f["key"]["check"] == "envelope").collect();
    assert!(!told.is_empty());
    for event in told {
        let now = event["finding"]["what"].as_str().expect("words");
        assert!(!now.contains("looks as if"), "{now}: the minimal case is too small to tell");
        let before = event["unshrunk"].as_str().unwrap_or_else(|| panic!("{event}"));
        assert!(before.contains("took the keys and values of KV head "), "{before}");
        let beyond = before.strip_prefix(now).and_then(|beyond| beyond.strip_prefix(": "));
        let line = format!("; before shrinking: {}", beyond.expect("more of the same"));
        let name = event["name"].as_str().expect("a name");
        assert!(expected.told().contains(&line), "{line}: {:?}", expected.said);
        assert!(expected.junit.iter().any(|said| said.ends_with(&line)), "{line}: {:?}", expected.junit);
        assert!(expected.findings[&format!("{name}.txt")].contains(&line), "{line}");
        let file = format!("out/findings/{name}.json");
        let case: Value =
            serde_json::from_str(&expected.findings[&format!("{name}.json")]).expect("a case is JSON");
        assert_eq!(case["found"]["unshrunk"], event["unshrunk"]);
        let shown = seamproof(place.path(), &["explain", &file]).stdout;
        assert!(String::from_utf8_lossy(&shown).contains(&line), "{line}");
    }

    let place = tempfile::tempdir().expect("a temporary directory");
    let parts = [0, 1].map(|index| shard(place.path(), OTHER_HEAD, index, 2));
    for part in &parts {
        let log = place.path().join(part).join("events.jsonl");
        let text = fs::read_to_string(&log).expect("an event log");
        let old: Vec<String> = text.lines().map(|line| without_unshrunk(line).to_string()).collect();
        assert!(text.contains("\"unshrunk\""), "{text}");
        fs::write(&log, old.join("\n") + "\n").expect("the log is written");
    }
    let merge = ["merge", "--out", "out", "--junit", "junit.xml", &parts[0], &parts[1]];
    let merged = left(place.path(), &seamproof(place.path(), &merge));
    let keys = |left: &Left| -> Vec<String> {
        findings(&left.events).iter().map(|f| f["key"].to_string()).collect()
    };
    assert_eq!((merged.code, keys(&merged)), (expected.code, keys(&expected)));
    assert!(!merged.told().contains("before shrinking"), "nobody kept it");
}

/// Returns an event as a program wrote it that did not keep the words before shrinking.
fn without_unshrunk(line: &str) -> Value {
    let mut event: Value = serde_json::from_str(line).expect("an event is JSON");
    event.as_object_mut().expect("an event is an object").remove("unshrunk");
    if let Some(found) = event.pointer_mut("/case/found").and_then(Value::as_object_mut) {
        found.remove("unshrunk");
    }
    event
}

/// Test that every failing case is counted for its failure, or as like none, so that the summary's counts add up.
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
    assert!(whole.told().contains(" of them shrunk, the others like them; first in case "));
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
    let many: Vec<String> = (10..40).map(|index| format!("shard-{index}")).collect();
    let (code, said) = merge(&many.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(code == Some(1) && said.lines().count() < 12 && said.len() < 2000, "{said}");
    assert!(said.contains("… and 22 more shards missing") && said.contains("no shard has ended"), "{said}");
    let (code, said) = merge(&[&shards[0], &shards[0]]);
    assert!(code == Some(1) && said.contains("shard 0/3 once more"), "{said}");
    let other = shard(dir, "window-off-by-one", 4, 5);
    let (code, said) = merge(&[&shards[0], &other]);
    assert!(code == Some(1) && said.contains("not parts of one campaign"), "{said}");
    let (code, said) = merge(&[&shards[0], "--out", &shards[0]]);
    assert!(code == Some(1) && said.contains("is a shard"), "{said}");
}

/// Function that writes something else in the place of a file.
type Spoil = fn(&Path);

/// Cuts a file near its middle, behind a line.
fn cut(file: &Path) {
    let text = fs::read_to_string(file).expect("the file is written");
    let half = text[..text.len() / 2].rfind('\n').expect("the file has lines");
    fs::write(file, &text[..=half]).expect("the file is cut");
}

/// Edits the sums of a shard.
fn edited(file: &Path, edit: fn(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(file).expect("the file is written")).expect("JSON");
    edit(&mut value);
    fs::write(file, value.to_string()).expect("the file is written");
}

/// Test that an unreadable shard costs none of the others. It counts as one that did not end.
#[test]
fn a_shard_that_cannot_be_read_is_missing_and_the_others_are_joined() {
    let spoils: [(&str, Spoil, &str); 14] = [
        ("sums.json", cut, "EOF while parsing"),
        ("sums.json", |file| fs::write(file, "").expect("a file"), "EOF while parsing"),
        ("sums.json", |file| fs::write(file, "{}").expect("a file"), "missing field `start`"),
        ("sums.json", |file| fs::write(file, [0xff, 0]).expect("a file"), "expected value"),
        (
            "sums.json",
            |file| edited(file, |sums| sums["start"]["shard"] = "0/18446744073709551615".into()),
            "is no shard",
        ),
        ("sums.json", |file| edited(file, |sums| sums["sums"]["seconds"] = (-1).into()), "less than none"),
        (
            "sums.json",
            |file| edited(file, |sums| sums["sums"]["held"] = u64::MAX.into()),
            "its counts come to more than",
        ),
        (
            "sums.json",
            |file| {
                fs::remove_file(file).expect("the file is removed");
                fs::create_dir(file).expect("a directory");
            },
            "is no regular file",
        ),
        ("events.jsonl", |file| drop(fs::remove_file(file)), "cannot be read"),
        (
            "events.jsonl",
            |file| {
                let text = fs::read_to_string(file).expect("events are written");
                let kept: Vec<&str> = text.lines().take(9).collect();
                fs::write(file, kept.join("\n")).expect("the log is written");
            },
            "tells of",
        ),
        // Sums and a log that are not of each other.
        (
            "events.jsonl",
            |file| drop(fs::copy(file.with_file_name("../shard-0/events.jsonl"), file)),
            "shard 0/3, and its sums",
        ),
        (
            "events.jsonl",
            |file| {
                let text = fs::read_to_string(file).expect("events are written");
                fs::write(file, text.repeat(2)).expect("the log is written");
            },
            "is not behind the case before it",
        ),
        (
            "events.jsonl",
            |file| {
                let text = fs::read_to_string(file).expect("events are written");
                fs::write(file, text.replacen("\"index\":1,", "\"index\":2,", 1))
                    .expect("the log is written");
            },
            "case 2 is none of shard 1/3",
        ),
        (
            "sums.json",
            |file| edited(file, |sums| sums["sums"]["held"] = (1_u64 << 52).into()),
            "or than its cases",
        ),
    ];
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path();
    let shards: Vec<String> = (0..3).map(|index| shard(dir, "emulated", index, 3)).collect();
    let names: Vec<&str> = shards.iter().map(String::as_str).collect();
    let kept = ["sums.json", "events.jsonl"].map(|name| {
        let file = dir.join("shard-1").join(name);
        let text = fs::read(&file).expect("the file is written");
        (file, text)
    });
    for (name, spoil, reason) in spoils {
        let file = dir.join("shard-1").join(name);
        spoil(&file);
        let output = seamproof(dir, &[&["merge", "--json", "e.jsonl"], &names[..]].concat());
        let said = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
        assert_eq!(output.status.code(), Some(4), "{reason}: {said}");
        let told = said.lines().find(|line| line.starts_with("error: shard-1/")).unwrap_or_default();
        assert!(told.contains(name) && told.contains(reason), "{reason}: {said}");
        assert!(said.contains("too little run: shard 1/3 is missing"), "{said}");
        assert!(said.contains(&format!("not counted: shard-1/{name}")), "{said}");
        let summary = last(&dir.join("e.jsonl"));
        assert_eq!((&summary["cases"], &summary["event"]), (&160.into(), &"summary".into()), "{said}");
        let _ = fs::remove_dir(&file);
        kept.iter().for_each(|(file, text)| fs::write(file, text).expect("the file is put back"));
    }
    // Nothing else is missing then.
    let copy = dir.join("copy");
    fs::create_dir(&copy).expect("a directory");
    fs::write(copy.join("sums.json"), "{").expect("a file");
    let output = seamproof(dir, &[&["merge", "copy"], &names[..]].concat());
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stdout));
    // A shard that is not a directory is no shard.
    fs::write(dir.join("shard-3"), "").expect("a file");
    let output = seamproof(dir, &[&["merge", "shard-3"], &names[..]].concat());
    let said = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
    assert!(said.contains("error: shard-3: is no directory") && !said.contains("missing\n"), "{said}");
}

/// Test that a shard whose log lacks a failing case is missing: late cases that held have no event, all others do.
#[test]
fn a_log_that_lacks_a_failing_case_is_not_joined() {
    let place = place();
    let shard = shard(place.path(), WINDOW, 0, 2);
    let log = place.path().join(&shard).join("events.jsonl");
    let text = fs::read_to_string(&log).expect("events are written");
    let told = "\"verdict\":\"finding\"";
    assert!(text.contains(told), "the shard found something");
    fs::write(&log, text.replacen(told, "\"verdict\":\"held\"", 1)).expect("the log is written");
    let said = stderr(&seamproof(place.path(), &["merge", &shard]));
    assert!(said.contains("cases that did not pass"), "{said}");
}

/// Returns the last event of a log.
fn last(log: &Path) -> Value {
    let text = fs::read_to_string(log).expect("events are written");
    serde_json::from_str(text.lines().last().expect("an event")).expect("an event is JSON")
}

/// Test that the findings of a shard that did not end are in no sum. They are named, in the events and the JUnit
/// report too, and count as findings.
#[test]
fn what_a_shard_found_that_did_not_end_is_named() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let dir = place.path();
    let shards = [0, 1].map(|index| {
        let (shard, out) = (format!("{index}/2"), format!("shard-{index}"));
        let subject = if index == 0 { "emulated" } else { WINDOW };
        let run =
            ["run", "--seed", "1", "--cases", "40", "--backend", subject, "--shard", &shard, "--out", &out];
        seamproof(dir, &run);
        out
    });
    let found = files(&dir.join("shard-1/findings"));
    let found: Vec<&String> = found.keys().filter(|name| name.ends_with(".json")).collect();
    assert!(!found.is_empty(), "the shard found something");
    fs::write(dir.join("shard-1/findings/torn.json"), "{").expect("a file");
    let spoils: [Spoil; 2] = [cut, |file| fs::remove_file(file).expect("the sums were written")];
    for (spoil, arguments) in spoils.into_iter().zip([
        // A shard that is named twice is reported once.
        &["merge", &shards[0], &shards[1], "./shard-1"][..],
        &["merge", &shards[1]],
    ]) {
        spoil(&dir.join("shard-1/sums.json"));
        let output = seamproof(dir, &[arguments, &["--json", "e.jsonl", "--junit", "j.xml"]].concat());
        let said = String::from_utf8(output.stdout).expect("text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        let text = fs::read_to_string(dir.join("e.jsonl")).expect("events are written");
        let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event is JSON"));
        let told: Vec<Value> = events.filter(|event| event["event"] == "left").collect();
        let [told] = &told[..] else { panic!("one shard: {text}") };
        assert_eq!((&told["dir"], &told["findings"]), (&"shard-1".into(), &found.len().into()));
        assert!(
            told["unread"][0].as_str().is_some_and(|why| why.contains("torn.json") && why.contains("EOF"))
        );
        let left =
            format!("shard-1 did not end and left {} findings; shard-1/findings/torn.json", found.len());
        assert!(said.contains(&left) && said.contains("seamproof replay shard-1/findings\n"), "{said}");
        let suites = quick_junit::Report::deserialize_from_str(
            &fs::read_to_string(dir.join("j.xml")).expect("a report is written"),
        );
        let [suite] = &suites.expect("the report is JUnit").test_suites[..] else { panic!("one suite") };
        let is_this = |test: &&quick_junit::TestCase| test.name.as_str() == "left behind: shard-1";
        let test = suite.test_cases.iter().find(is_this).expect("a test case");
        let quick_junit::TestCaseStatus::NonSuccess { message, .. } = &test.status else {
            panic!("it holds")
        };
        assert!(message.as_ref().is_some_and(|message| message.as_str().starts_with(&left)), "{test:?}");
        let out = test.system_out.as_ref().map(quick_junit::XmlString::as_str).unwrap_or_default();
        assert_eq!(out, "replay: seamproof replay shard-1/findings");
    }
    // With each of these arguments the others cannot be joined, and the findings are still reported.
    for arguments in
        [&["--out", "j.xml"][..], &["--json", "shard-0"], &["--junit", "nowhere/j.xml"], &["shard-0"]]
    {
        let output = seamproof(dir, &[&["merge", &shards[0], &shards[1]], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.lines().count() > 1, "{arguments:?}: {said}");
    }
    // Nothing was found and nothing ended. The reports say so, and it is an input error.
    fs::create_dir(dir.join("empty")).expect("a directory");
    let output = seamproof(dir, &["merge", "empty", "--json", "e.jsonl", "--junit", "j.xml"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(dir.join("e.jsonl")).expect("events"), "");
    let report = fs::read_to_string(dir.join("j.xml")).expect("a report is written");
    assert!(report.contains("empty: no shard has ended") && report.contains("failures=\"1\""), "{report}");
}
