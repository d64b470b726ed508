//! Nights: one that is killed at any moment loses no finding, and reports and the corpus stay whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use assert_cmd::cargo::cargo_bin;
use seamproof_judge::case::Case;
use serde_json::Value;

/// Number of nights that are killed.
const KILLS: u64 = 5;
/// Longest time from a night's start until it is killed.
const MOMENT_MAX: Duration = Duration::from_secs(3);
/// Time that is longer than the start of a night takes.
const LONGEST: Duration = Duration::from_secs(300);
/// Subject that fails, so that findings are written all the time.
const SUBJECT: &str = "window-off-by-one";

/// Makes a corpus of two regressions that hold on the subject, and a list of known failures.
fn corpus(place: &Path, known: &str) -> PathBuf {
    let corpus = place.join("corpus");
    fs::create_dir_all(corpus.join("regressions")).expect("a directory");
    for name in ["fa-2515-no-sequences.json", "te-2186-short-sequences.json"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions").join(name);
        fs::copy(from, corpus.join("regressions").join(name)).expect("a copy");
    }
    fs::write(corpus.join("known.toml"), known).expect("a file");
    corpus
}

fn night_of(place: &Path, budget: &str, subject: &str) -> Command {
    let mut command = Command::new(cargo_bin("seamproof"));
    let arguments = ["nightly", "--budget", budget, "--seed", "7", "--corpus", "corpus", "--out", "nights"];
    command.current_dir(place).args(arguments).args(["--backend", subject]);
    command
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).expect("the directory is there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { all.extend(files(&path)) } else { all.push(path) }
    }
    all
}

fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files(dir).into_iter().map(|path| (path.clone(), fs::read(path).expect("a file"))).collect()
}

/// Checks that every JSON file that is there is whole.
fn all_whole(dir: &Path) {
    for path in files(dir).iter().filter(|path| path.extension().is_some_and(|extension| extension == "json"))
    {
        match path.parent().and_then(Path::file_name).is_some_and(|name| name == "findings") {
            true => drop(Case::load(path).unwrap_or_else(|error| panic!("{error}"))),
            false => drop(json(path)),
        }
    }
}

fn is_case(path: &Path) -> bool {
    let folder = path.parent().and_then(Path::file_name);
    folder.is_some_and(|name| name == "findings") && path.extension().is_some_and(|end| end == "json")
}

/// Runs `seamproof replay` and returns its exit code and output.
fn replayed(place: &Path, path: &str) -> (Option<i32>, String) {
    let mut replay = Command::new(cargo_bin("seamproof"));
    let output = replay.current_dir(place).args(["replay", path]).output().expect("it is replayed");
    (output.status.code(), said(&output))
}

/// Returns the keys of the failures that a run's log tells of. Its last line may be torn.
fn announced(log: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == "finding").map(|event| event["key"].to_string()).collect()
}

#[test]
fn a_night_that_was_killed_loses_no_finding() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (corpus, nights) = (corpus(place.path(), ""), place.path().join("nights"));
    let before = contents(&corpus);
    for number in 1..=KILLS {
        let mut night = night_of(place.path(), "4m", SUBJECT);
        let mut child = night.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the night starts");
        let run = nights.join(format!("night-{number:04}/{SUBJECT}-quick"));
        let begin = Instant::now();
        while !run.join("events.jsonl").exists() && begin.elapsed() < LONGEST {
            sleep(Duration::from_millis(5));
        }
        let drawn = blake3::hash(&number.to_le_bytes()).as_bytes()[0];
        sleep(MOMENT_MAX.mul_f64(f64::from(drawn) / 255.0));
        child.kill().expect("it is killed");
        child.wait().expect("it ends");
        all_whole(&nights);
        let found = files(&run).iter().filter(|path| is_case(path)).count();
        let announced = announced(&run.join("events.jsonl")).len();
        assert!(found >= announced, "night {number}: {announced} failures announced, {found} on disk");
    }
    let found = |number: u64| {
        files(&nights.join(format!("night-{number:04}"))).iter().filter(|path| is_case(path)).count() as u64
    };
    let expected: Vec<(u64, u64)> =
        (1..=KILLS).map(|number| (number, found(number))).filter(|(_, found)| *found > 0).collect();
    assert!(expected.len() > 1, "too little was found: {expected:?}");

    // The next night finds nothing itself and names all of it.
    let output = night_of(place.path(), "1s", "emulated").output().expect("the night runs");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let dir = nights.join(format!("night-{:04}", KILLS + 1));
    let left = json(&dir.join("report.json"))["left"].take();
    let told = left.as_array().expect("a list").iter();
    let told: Vec<_> = told.map(|left| (left["dir"].clone(), left["findings"].clone())).collect();
    let named =
        expected.iter().map(|(night, found)| (format!("nights/night-{night:04}").into(), (*found).into()));
    assert_eq!(told, named.collect::<Vec<_>>(), "{left}");
    let junit = fs::read_to_string(dir.join("junit.xml")).expect("a report");
    for (night, found) in expected {
        let command = format!("seamproof replay nights/night-{night:04}");
        assert!(text.contains(&format!("`{command}`")) && junit.contains(&command), "{text}");
        let (code, judged) = replayed(place.path(), &format!("nights/night-{night:04}"));
        assert_eq!(code, Some(2), "{judged}");
        assert!(judged.contains(&format!("failed {found} · crashed 0 · unreadable 0")), "{judged}");
    }

    // The night after it does not tell of them again.
    let output = night_of(place.path(), "1s", "emulated").output().expect("the night runs");
    let text = said(&output);
    assert!(matches!(output.status.code(), Some(0 | 4)), "nothing was found, maybe too little run: {text}");
    assert!(!text.contains("Left behind"), "{text}");
    let (code, text) = replayed(place.path(), &format!("nights/night-{:04}", KILLS + 2));
    assert!(code == Some(1) && text.contains("this night found nothing"), "{text}");
    assert_eq!(contents(&corpus), before, "the corpus is read, never written");
}

#[test]
fn kernels_of_others_that_are_not_installed_are_named_with_the_reason() {
    let place = tempfile::tempdir().expect("a folder");
    let corpus = corpus(place.path(), "");
    let night = |more: &[&str]| {
        let mut command = Command::new(cargo_bin("seamproof"));
        let arguments = ["nightly", "--budget", "1s", "--seed", "7", "--corpus", "corpus", "--outside"];
        let package = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python_workers/package");
        command.current_dir(place.path()).args(arguments).args(more).env("PYTHONPATH", package);
        command.output().expect("the night runs")
    };
    let without = night(&[]);
    assert_eq!(without.status.code(), Some(1), "{}", said(&without));
    assert!(said(&without).contains("outside.toml"), "{}", said(&without));
    let lacking = "class NotHere(Exception): pass\nraise NotHere('not here: no such library')\n";
    fs::write(place.path().join("kernel.py"), lacking).expect("an adapter");
    fs::write(corpus.join("outside.toml"), "subjects = ['python:kernel.py:attention']\n").expect("a list");
    let output = night(&[]);
    let text = said(&output);
    assert!(matches!(output.status.code(), Some(0 | 4)), "{text}");
    assert!(text.contains("**python:kernel.py:attention is not there**"), "{text}");
    assert!(text.contains("not here: no such library"), "{text}");
    // An adapter with a fault is another thing.
    fs::write(place.path().join("kernel.py"), "1 / 0\n").expect("an adapter");
    let broken = night(&[]);
    assert_eq!(broken.status.code(), Some(1), "{}", said(&broken));
    let both = night(&["--backend", "emulated"]);
    assert!(said(&both).contains("cannot be used with"), "{}", said(&both));
}

#[test]
fn known_failures_are_no_news_and_an_entry_that_is_not_true_is_an_error() {
    let place = tempfile::tempdir().expect("a temporary directory");
    // The stored case names another subject for itself, and fails on this one.
    let regression = "regressions/te-1212-window-one-key-short.json";
    fs::copy(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(regression),
        corpus(place.path(), "").join(regression),
    )
    .expect("a copy");
    let first = night_of(place.path(), "2s", SUBJECT).output().expect("the night runs");
    assert_eq!(first.status.code(), Some(2), "{}", said(&first));
    let report = json(&place.path().join("nights/night-0001/report.json"));
    counts_add_up(&report);
    assert!(report["seconds"].as_f64() < Some(60.0), "campaigns end with their budget: {report}");
    assert!(report["left_out"].as_str().is_some_and(|what| what.starts_with("large cases")), "{report}");
    replays_whole(place.path(), &report);
    events_name_files(place.path());
    let failures = report["failures"].as_array().expect("a list");
    assert_eq!(regressions_in_junit(place.path(), 1), ["failed", "held", "held"]);
    // The smallest case of each key becomes its entry, but for one check and tensor that the stored case does not
    // break.
    let key = report["regressions"][0]["failed"][0]["key"].as_str().expect("a key");
    let keys = || failures.iter().map(|failure| failure["key"].as_str().expect("a key"));
    let left_out = keys().find(|other| parts(other).0 != parts(key).0).expect("two kinds of failures");
    let mut known = String::new();
    for (number, failure) in failures.iter().enumerate() {
        let replay = failure["replay"].as_str().expect("a command");
        let file = replay.trim_start_matches("seamproof replay ");
        fs::copy(place.path().join(file), place.path().join(format!("corpus/{number}.json")))
            .expect("a copy");
        let key = failure["key"].as_str().expect("a key");
        if parts(key).0 != parts(left_out).0 {
            known += &entry(key, &format!("{number}.json"));
        }
    }
    if !keys().any(|other| other == key) {
        known += &entry(key, regression);
    }
    fs::write(place.path().join("corpus/known.toml"), &known).expect("a file");
    let second = night_of(place.path(), "2s", SUBJECT).output().expect("the night runs");
    let path = place.path().join("nights/night-0002/report.json");
    assert!(path.exists(), "{}", said(&second));
    let report = json(&path);
    let standings = report["known"].as_array().expect("a list");
    assert!(standings.iter().all(|entry| entry["standing"] == "true"), "{standings:?}");
    let listed: Vec<&str> = known.lines().filter_map(|line| line.strip_prefix("key = '")).collect();
    let mut new = 0;
    let mut unshrunk = 0;
    for failure in report["failures"].as_array().expect("a list") {
        let (kind, features) = parts(failure["key"].as_str().expect("a key"));
        let shows = |other: &&str| {
            let (other, needed) = parts(other.trim_end_matches('\''));
            other == kind && needed.is_subset(&features)
        };
        assert_eq!(failure["known"].is_null(), !listed.iter().any(shows), "{failure}");
        new += usize::from(failure["known"].is_null());
        unshrunk += usize::from(
            !failure["known"].is_null() && failure["cases"].as_u64() > failure["shrunk"].as_u64(),
        );
    }
    assert!(unshrunk > 0, "cases of a listed failure are counted as they were drawn: {report}");
    assert!(new > 0 && second.status.code() == Some(2), "one kind is not listed: {report}");
    assert!(said(&second).contains("(night 1)"), "{}", said(&second));
    assert!(said(&second).contains("## Regressions that fail as is known\n\n- **"), "{}", said(&second));
    assert!(!said(&second).contains("## Regressions that fail\n"), "{}", said(&second));
    assert_eq!(regressions_in_junit(place.path(), 2), ["skipped", "held", "held"]);
    // This case does not fail, and its entry excuses nothing.
    let held = place.path().join("corpus/regressions/fa-2515-no-sequences.json");
    fs::copy(held, place.path().join("corpus/0.json")).expect("a copy");
    let first = entry(keys().next().expect("a key"), "0.json");
    fs::write(place.path().join("corpus/known.toml"), first).expect("a file");
    let third = night_of(place.path(), "2s", SUBJECT).output().expect("the night runs");
    let path = place.path().join("nights/night-0003/report.json");
    assert!(path.exists(), "{}", said(&third));
    let report = json(&path);
    assert!(report["known"][0]["standing"]["stale"].is_string(), "{report}");
    let found = report["failures"].as_array().expect("a list");
    assert!(!found.is_empty() && found.iter().all(|failure| failure["known"].is_null()), "{report}");
    let text = fs::read_to_string(place.path().join("nights/night-0003/report.md")).expect("a report");
    assert!(text.contains("## Known failures that are none any more"), "{text}");
    assert!(
        text.lines().next().is_some_and(|title| title.contains("1 known failure not seen any more")),
        "{text}"
    );
}

/// Returns check and tensor of a key, and its features. An identity is no part of the check.
fn parts(key: &str) -> ((&str, &str), BTreeSet<&str>) {
    let parts: Vec<&str> = key.split(" · ").collect();
    let check = parts[0].split(' ').next().expect("a check");
    let features = parts.get(3).map(|features| features.split(", ").collect());
    ((check, parts[2]), features.unwrap_or_default())
}

/// Returns an entry of the list of known failures, for all failures of a key's check and tensor with its features.
fn entry(key: &str, case: &str) -> String {
    let ((check, tensor), features) = parts(key);
    let needs: Vec<String> = features.iter().map(|feature| format!("'{feature}'")).collect();
    let needs = needs.join(", ");
    format!(
        "[[known]]\nkey = '{key}'\ncase = '{case}'\nreason = 'planted'\nsource = 'https://example.org'\n\
         shows = [{{ checks = ['{check}'], tensors = ['{tensor}'], needs = [{needs}] }}]\n"
    )
}

/// Checks that a night's folder stands for everything that the night found, the stored case that failed included.
fn replays_whole(place: &Path, report: &Value) {
    let (code, text) = replayed(place, "nights/night-0001");
    assert_eq!(code, Some(2), "{text}");
    let stored = report["regressions"][0]["failed"].as_array().expect("a list");
    let failures = report["failures"].as_array().expect("a list");
    let commands =
        failures.iter().chain(stored).map(|failure| failure["replay"].as_str().expect("a command"));
    let named: Vec<&str> = commands.filter_map(|command| command.split(' ').nth(2)).collect();
    assert!(named.len() > 1 && !stored.is_empty(), "{report}");
    for file in named {
        assert!(text.contains(&format!("FAIL     {file} ·")), "{file}: {text}");
    }
    let found = files(&place.join("nights/night-0001")).iter().filter(|path| is_case(path)).count();
    assert_eq!(text.lines().count(), found + 1, "each once, and a summary: {text}");
    assert!(text.contains(&format!("failed {found} · crashed 0 · unreadable 0")), "{text}");
}

/// Checks that the events of a night's campaign name the files of its findings by the commands that replay them. For
/// each key the last event counts.
fn events_name_files(place: &Path) {
    let log = place.join(format!("nights/night-0001/{SUBJECT}-quick/events.jsonl"));
    let text = fs::read_to_string(log).expect("events are written");
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event is JSON"));
    let findings = events.filter(|event| event["event"] == "finding");
    let last: BTreeMap<String, Value> = findings.map(|event| (event["key"].to_string(), event)).collect();
    assert!(!last.is_empty(), "{text}");
    for event in last.values() {
        let name = event["name"].as_str().expect("a name");
        let file = format!("nights/night-0001/{SUBJECT}-quick/findings/{name}.json");
        assert_eq!(event["replay"], format!("seamproof replay {file}"));
        assert!(place.join(&file).exists(), "{file}");
    }
}

/// Checks that every failing case of a night is counted, for a failure or as like none.
fn counts_add_up(report: &Value) {
    let sum = |list: &str, field: &str| -> u64 {
        let list = report[list].as_array().expect("a list");
        list.iter().map(|entry| entry[field].as_u64().expect("a number")).sum()
    };
    let (cases, shrunk) = (sum("failures", "cases"), sum("failures", "shrunk"));
    assert_eq!(cases + sum("points", "unexplained"), sum("points", "failed"), "{report}");
    assert!(shrunk <= cases, "{report}");
}

/// Returns the outcome of each stored case in a night's JUnit report.
fn regressions_in_junit(place: &Path, night: u32) -> Vec<&'static str> {
    let path = place.join(format!("nights/night-{night:04}/junit.xml"));
    let text = fs::read_to_string(path).expect("the report is there");
    let report = quick_junit::Report::deserialize_from_str(&text).expect("the report is JUnit");
    let is_suite = |suite: &&quick_junit::TestSuite| suite.name.as_str().ends_with(" regressions");
    let suite = report.test_suites.iter().find(is_suite).expect("a suite of stored cases");
    assert!(suite.test_cases.iter().all(|test| test.name.as_str().ends_with(".json")), "{text}");
    let came = |test: &quick_junit::TestCase| match test.status {
        quick_junit::TestCaseStatus::Success { .. } => "held",
        quick_junit::TestCaseStatus::NonSuccess { .. } => "failed",
        quick_junit::TestCaseStatus::Skipped { .. } => "skipped",
    };
    suite.test_cases.iter().map(came).collect()
}

/// Test that the workflow's artifacts belong to the night that it ran. It runs the step that searches for that night
/// as the runner would.
#[test]
fn the_workflow_takes_this_night_and_no_other() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".github/workflows/nightly.yml");
    let text = fs::read_to_string(path).expect("the workflow is there");
    let step =
        text.split("id: tonight").nth(1).and_then(|rest| rest.split("run: |\n").nth(1)).expect("the step");
    let step: String = step
        .lines()
        .take_while(|line| line.starts_with("          "))
        .map(|line| format!("{line}\n"))
        .collect();
    let place = tempfile::tempdir().expect("a temporary directory");
    let (home, file) = (place.path(), |name: &str| place.path().join(name));
    let tonight = || {
        ["output", "summary"].iter().for_each(|name| fs::write(file(name), "").expect("a file"));
        let mut bash = Command::new("bash");
        bash.args(["-e", "-c", &step]).env("HOME", home).env("RUNNER_TEMP", home);
        let ended =
            bash.env("GITHUB_OUTPUT", file("output")).env("GITHUB_STEP_SUMMARY", file("summary")).status();
        assert!(ended.expect("the step runs").success());
        ["output", "summary"].map(|name| fs::read_to_string(file(name)).expect("a file"))
    };
    let write = |night: &str, at: u64| {
        let dir = home.join("seamproof-nights").join(night);
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join("report.md"), night).expect("a file");
        let time = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(at);
        for path in [dir.join("report.md"), dir] {
            fs::File::open(path).and_then(|file| file.set_modified(time)).expect("a time");
        }
    };
    fs::write(file("begun"), "").expect("a file");
    let begun = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
    fs::File::open(file("begun")).and_then(|file| file.set_modified(begun)).expect("a time");
    assert_eq!(tonight(), ["", ""], "no night at all");
    write("night-9999", 900);
    assert_eq!(tonight(), ["", ""], "no night was begun");
    write("night-10000", 1100);
    let dir = home.join("seamproof-nights/night-10000");
    assert_eq!(tonight(), [format!("dir={}\n", dir.display()), "night-10000".to_owned()]);
    let artifacts = text.split("path:").skip(1).flat_map(|rest| rest.split("- uses").next());
    let named: String = artifacts.collect();
    let paths: Vec<&str> = named.split_whitespace().filter(|word| word.contains('/')).collect();
    assert_eq!(paths.len(), 4, "{paths:?}");
    let is_tonight = |path: &&&str| path.starts_with("}}/") || **path == "~/seamproof-nights/trend.jsonl";
    assert!(paths.iter().all(|path| is_tonight(&path)), "{paths:?}");
}

/// Test that the terminal shows what the night does and how far it is, for large campaigns and stored cases as for
/// all others.
#[test]
fn a_night_shows_what_it_does() {
    let place = tempfile::tempdir().expect("a temporary directory");
    corpus(place.path(), "");
    let output = night_of(place.path(), "8s", "emulated").output().expect("the night runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let mut lines = said.lines().filter(|line| line.starts_with("progress "));
    let stage =
        |line: &str| line.strip_prefix("progress emulated ").is_some_and(|rest| rest.contains(" failed · "));
    assert!(lines.clone().count() > 0 && lines.any(stage), "{said}");
}

/// Test with the signal that stops containers and jobs of a cluster: the night ends in order, with a report that says
/// that too little was run.
#[cfg(unix)]
#[test]
fn a_night_that_is_asked_to_end_ends_after_the_cases_in_flight() {
    let place = tempfile::tempdir().expect("a temporary directory");
    corpus(place.path(), "");
    let child =
        night_of(place.path(), "1h", "emulated").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("the night starts");
    let dir = place.path().join("nights/night-0001");
    let begin = Instant::now();
    while !dir.join("emulated-quick/events.jsonl").exists() && begin.elapsed() < LONGEST {
        sleep(Duration::from_millis(20));
    }
    let asked = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(asked.expect("kill runs").success());
    let output = child.wait_with_output().expect("the night ends");
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    let report = json(&dir.join("report.json"));
    let missed = report["missed"].to_string();
    assert!(missed.contains("emulated seams: not begun, as the night was interrupted"), "{missed}");
    assert!(dir.join("emulated-quick/sums.json").exists());
}

/// Test that the options of each example of a night or a shard exist, and that each is linked from the page on nights.
#[test]
fn examples_of_nights_and_shards_are_of_these_commands() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let page = fs::read_to_string(docs.join("nightly.md")).expect("the page is there");
    for (name, command, options) in [
        ("nightly-slurm.sh", "nightly", 4),
        ("nightly-kubernetes.yaml", "nightly", 4),
        ("Dockerfile", "nightly", 3),
        ("slurm.sh", "run", 7),
        ("kubernetes.yaml", "run", 7),
    ] {
        let help = Command::new(cargo_bin("seamproof")).args([command, "--help"]).output().expect("help");
        let help = said(&help);
        assert!(page.contains(&format!("(examples/{name})")), "{name} is not linked");
        let text = fs::read_to_string(docs.join("examples").join(name)).expect("the example is there");
        // The options are the words that begin with two dashes, from the command's name to its end.
        let words: Vec<&str> = text.split_whitespace().filter(|word| *word != "-").collect();
        let at = words.windows(2).position(|two| two == ["seamproof", command]);
        let rest = at.map_or(&[][..], |at| &words[at + 2..]);
        let is_end = |word: &&str| matches!(*word, "resources:" | "#" | "FROM") || word.starts_with("code=");
        let end = rest.iter().position(is_end);
        let dashed = rest[..end.unwrap_or(rest.len())].iter().filter(|word| word.starts_with("--"));
        let used: Vec<&str> = dashed.map(|word| word.split('=').next().unwrap_or(word)).collect();
        assert_eq!(used.len(), options, "{name}: {used:?}");
        for option in used {
            let is_there = help.split_whitespace().any(|word| word == option);
            assert!(is_there, "{name}: `seamproof {command}` has no {option}");
        }
    }
}
