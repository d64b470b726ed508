//! Campaigns: their events, summaries, shards and ends.

use std::fs;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{campaign, code, events, named, place, refuses, seamproof, stderr, stdout, typed};

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

/// Test that no report is written over another one, or over what the campaign goes on from.
#[test]
fn files_that_would_overwrite_each_other_are_refused() {
    let place = place();
    let dir = place.path();
    let run = ["run", "--seed", "1", "--cases", "20", "--out", "o"];
    let named = |options: &[&'static str]| [&run[..], options].concat();
    refuses(dir, &named(&["--json", "a", "--junit", "./a"]), &["--junit names the file of --json"]);
    refuses(dir, &named(&["--json", "o/events.jsonl"]), &["--json names the campaign's own events.jsonl"]);
    seamproof(dir, &run);
    let log = fs::read(dir.join("o/events.jsonl")).expect("events are written");
    refuses(dir, &named(&["--resume", "--json", "o/events.jsonl"]), &["campaign's own events.jsonl"]);
    refuses(dir, &named(&["--resume", "--junit", "o/../o/checkpoint.json"]), &["own checkpoint.json"]);
    assert_eq!(fs::read(dir.join("o/events.jsonl")).expect("the log is there"), log);
}

/// Test that a report which a full disk cut is no success, and that one whose reader went away is.
#[cfg(target_os = "linux")]
#[test]
fn a_report_that_stdout_does_not_take_is_no_success() {
    let place = place();
    let full =
        || Stdio::from(fs::File::options().write(true).open("/dev/full").expect("the device is there"));
    let run = |to: Stdio| {
        let mut command = Process::new(assert_cmd::cargo::cargo_bin("seamproof"));
        let arguments = ["run", "--seed", "1", "--cases", "1000", "--junit", "-"];
        let command = command.current_dir(place.path()).args(arguments);
        command.stdout(to).stderr(Stdio::piped()).output().expect("the program runs")
    };
    let output = run(full());
    assert_eq!(code(&output), 1, "{}", stderr(&output));
    assert!(stderr(&output).contains("error: standard output: cannot be written"), "{}", stderr(&output));
    assert_eq!(code(&run(Stdio::piped())), 0);
}

/// Test that a pipe which nobody reads is an error, and does not wait for a reader.
#[cfg(target_os = "linux")]
#[test]
fn a_pipe_that_nobody_reads_is_refused() {
    let place = place();
    let made = Process::new("mkfifo").arg(place.path().join("pipe")).status().expect("mkfifo is there");
    assert!(made.success());
    refuses(place.path(), &["run", "--cases", "1", "--json", "pipe"], &["pipe", "that nobody reads"]);
}

#[test]
fn the_same_seed_gives_the_same_events_whatever_the_threads() {
    let place = place();
    let mut first = campaign(place.path(), &["--jobs", "1"]);
    let mut second = campaign(place.path(), &["--jobs", "4"]);
    assert_eq!(first.remove(0)["jobs"], 1);
    assert_eq!(second.remove(0)["jobs"], 4);
    assert_eq!(first, second);
    assert_eq!(named(&first, "case").len(), 200);
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
    let arguments = ["run", "--seed", "0x1", "--cases", "60", "--json", "e.jsonl", "--junit", "j.xml"];
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
    let said = stdout(&output);
    assert!(said.contains("\nverdict   too little run: 5 cases in "), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("too little run: ")).count(), 5, "{said}");
    assert!(said.contains("other floors"), "{said}");
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
fn a_campaign_that_held_says_so_first() {
    let place = place();
    let output = seamproof(place.path(), &["run", "--seed", "1", "--cases", "1000", "--census"]);
    let said = stdout(&output);
    assert_eq!(code(&output), 0, "{said}");
    let begins = |label: &str| said.lines().position(|line| line.starts_with(label)).expect("a line");
    let verdict = said.lines().nth(begins("verdict")).unwrap_or_default();
    assert!(verdict.starts_with("verdict   held: 1000 cases in "), "{said}");
    let order = ["canary", "verdict", "cases", "margin", "rate", "census", "no sequence "].map(begins);
    assert!(order.is_sorted(), "{said}");
    // With so few cases that held, p50 is reported and p99 is not.
    let margins = said.lines().filter(|line| line.starts_with("          lse ") && line.contains(" W "));
    let columns: Vec<Vec<&str>> = margins.map(|line| line.split_whitespace().collect()).collect();
    let told = columns.iter().any(|line| matches!(line[..], [_, _, _, p50, "-", _] if p50 != "-"));
    assert!(told, "{said}");
    let few = seamproof(place.path(), &["run", "--seed", "1", "--cases", "3"]);
    assert!(code(&few) == 4 && !stdout(&few).contains("nothing was found"), "{}", stdout(&few));
    assert!(!stdout(&few).contains("\nno sequence "), "the census is one line: {}", stdout(&few));
}

/// Test that findings come behind the verdict, in lines that fit a screen, each with a command that can be pasted.
#[test]
fn findings_are_told_in_lines_that_fit() {
    let place = place();
    let arguments = ["run", "--backend", "window-off-by-one", "--cases", "60", "--seed", "1"];
    let output = seamproof(place.path(), &arguments);
    let said = stdout(&output);
    assert_eq!(code(&output), 2, "{said}");
    let begins = |label: &str| said.lines().position(|line| line.starts_with(label)).expect("a line");
    assert!(["canary", "verdict", "FAIL", "cases"].map(begins).is_sorted(), "{said}");
    let told = said.lines().filter(|line| line.starts_with("FAIL")).count();
    assert!(said.contains(&format!("\nverdict   {told} findings: ")), "{said}");
    let replays = format!("          replay: {}", typed("replay seamproof.out/findings/"));
    let tries = format!("          try: {}", typed("try --lengths "));
    let is_command = |line: &&str| line.contains(" replay: ") || line.contains(" try: ");
    let (pages, lines): (Vec<_>, Vec<_>) = said.lines().partition(|line| line.starts_with("report "));
    assert_eq!(pages, ["report    seamproof.out/report.html"]);
    let (commands, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(is_command);
    assert!(others.iter().all(|line| line.chars().count() <= 100), "{said}");
    let pairs: Vec<&[&str]> = commands.chunks(2).collect();
    assert_eq!(pairs.len(), told, "{said}");
    let is_pair = |pair: &&[&str]| pair[0].starts_with(&replays) && pair[1].starts_with(&tries);
    assert!(pairs.iter().all(is_pair), "{said}");
    // Files and events say the name, whatever the program is called here.
    let events = events(&place.path().join("seamproof.out/events.jsonl"));
    let named = named(&events, "finding");
    assert!(named.iter().all(|event| event["replay"].as_str().unwrap().starts_with("seamproof replay ")));
    assert!(!said.contains('\u{1b}'), "no colours without a terminal");
}

/// Test that standard output takes the events or the report of JUnit, and the other text goes to standard error.
#[test]
fn standard_output_can_be_for_machines() {
    let place = place();
    let run = |arguments: &[&str]| {
        seamproof(place.path(), &[&["run", "--seed", "1", "--cases", "30"], arguments].concat())
    };
    let output = run(&["--json", "-"]);
    let own = fs::read_to_string(place.path().join("seamproof.out/events.jsonl")).expect("events");
    assert_eq!(stdout(&output), own);
    assert!(stderr(&output).contains("\nverdict   "), "{}", stderr(&output));
    let output = run(&["--junit", "-"]);
    let report = quick_junit::Report::deserialize_from_str(&stdout(&output)).expect("the report is JUnit");
    assert_eq!(report.test_suites.len(), 1);
    assert!(stderr(&output).contains("\nverdict   "), "{}", stderr(&output));
    assert!(!place.path().join("-").exists());
}

#[test]
fn a_report_that_cannot_be_written_names_no_temporary_file() {
    let place = place();
    let said = stderr(&seamproof(place.path(), &["run", "--cases", "1", "--junit", "nowhere/junit"]));
    assert!(said.starts_with("error: nowhere/junit: cannot be written: "), "{said}");
    assert!(!said.contains(".tmp-") && !said.contains("at path"), "{said}");
}

/// Test that a write past the limit of a file's size is an error in words, and no signal ends the program.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_file_sizes_is_an_error() {
    let place = place();
    let program = assert_cmd::cargo::cargo_bin("seamproof");
    let output = Process::new("sh")
        .current_dir(place.path())
        .args(["-c", "ulimit -f 16 && exec \"$0\" run --seed 1 --cases 1000"])
        .arg(program)
        .output()
        .expect("the shell runs");
    let said = stderr(&output);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.contains("error: seamproof.out/events.jsonl: cannot be written: File too large"), "{said}");
}

/// Test that a share of a campaign that meets all floors is enough, too.
#[test]
fn a_shard_is_asked_for_its_share() {
    let place = place();
    for seed in ["1", "2"] {
        let arguments = ["run", "--seed", seed, "--cases", "1000", "--shard", "0/8"];
        let output = seamproof(place.path(), &arguments);
        assert_eq!(code(&output), 0, "{}", stdout(&output));
    }
}

/// Test that large cases do not take a campaign far past its time, and that too few of them are told.
#[test]
fn a_short_campaign_of_large_cases_ends_and_says_that_it_is_too_little() {
    const PATIENCE: Duration = Duration::from_secs(120);
    let place = place();
    let start = Instant::now();
    let arguments = ["run", "--profile", "large", "--time", "3s", "--seed", "7", "--jobs", "1"];
    let output = seamproof(place.path(), &arguments);
    let said = stdout(&output);
    assert!(start.elapsed() < PATIENCE, "{said}");
    assert_eq!(code(&output), 4, "{said}");
    assert!(
        said.contains("canary    found in case ") && said.contains("verdict   too little run: "),
        "{said}"
    );
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
