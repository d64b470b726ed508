//! The command line from outside: exit codes, texts, files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use seamproof::backends::MISCALLS;
use seamproof::case::{Case, Found};
use seamproof::judge::Relation;
use seamproof::verdict::{Check, Finding};
use serde_json::Value;
use tempfile::TempDir;

/// Exit codes of a campaign without findings: a small one may be too little to meet every floor of the census.
const NOTHING_FOUND: [i32; 2] = [0, 4];

fn place() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn seamproof(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("seamproof").expect("the program is built");
    command.current_dir(dir).args(arguments).output().expect("the program runs")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("the program was not killed")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("stderr is text")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is text")
}

/// An input error: exit 1 and one line on stderr that holds each of these texts.
fn refuses(dir: &Path, arguments: &[&str], texts: &[&str]) {
    let output = seamproof(dir, arguments);
    let said = stderr(&output);
    assert_eq!(code(&output), 1, "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    for text in texts {
        assert!(said.contains(text), "{arguments:?}: '{text}' is not in: {said}");
    }
}

/// A campaign of 300 cases; its events without what depends on the clock.
fn campaign(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = seamproof(dir, &[&["run", "--seed", "1", "--cases", "300"], arguments].concat());
    assert!(NOTHING_FOUND.contains(&code(&output)), "{}{}", stdout(&output), stderr(&output));
    events(&dir.join("seamproof.out/events.jsonl"))
}

fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("events are written");
    let event = |line: &str| {
        let mut event: Value = serde_json::from_str(line).expect("an event is JSON");
        event.as_object_mut().expect("an event is an object").remove("times");
        event
    };
    text.lines().map(event).collect()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

/// A legal case, as a campaign stores it: the canary's finding.
fn stored_case(dir: &Path) -> String {
    campaign(dir, &["--shard", "0/300"]);
    fs::read_to_string(case_in(&dir.join("seamproof.out/canary"))).expect("the canary is stored")
}

fn case_in(dir: &Path) -> PathBuf {
    let entries = fs::read_dir(dir).expect("the directory is there");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    paths.find(|path| path.extension().is_some_and(|extension| extension == "json")).expect("a case is there")
}

#[test]
fn help_is_no_error_and_shows_examples() {
    let place = place();
    for arguments in [
        vec!["--help"],
        vec!["run", "--help"],
        vec!["replay", "--help"],
        vec!["shrink", "--help"],
        vec!["census", "--help"],
        vec!["bench", "oracle", "--help"],
        vec!["kernels", "--help"],
        vec!["kernels", "judge", "--help"],
        vec!["--version"],
    ] {
        let output = seamproof(place.path(), &arguments);
        assert_eq!((code(&output), stderr(&output).as_str()), (0, ""), "{arguments:?}");
        assert!(stdout(&output).contains("seamproof"));
        if arguments.len() > 1 {
            assert!(stdout(&output).contains("Example"), "{arguments:?}");
        }
    }
}

/// Every command of the kernels is in the list, with a line that says what it does; instances are told apart.
#[test]
fn what_the_kernels_commands_are_and_what_is_compiled_is_listed() {
    let place = place();
    let said = stdout(&seamproof(place.path(), &["kernels", "-h"]));
    for command in ["build", "info", "check", "stress", "judge", "twins"] {
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("  {command} ")));
        assert!(line.is_some_and(|what| what.trim().contains(' ')), "{command}: {said}");
    }
    let mut info = Command::cargo_bin("seamproof").expect("the program is built");
    let info = info.args(["kernels", "info"]).env("SEAMPROOF_KERNEL_CACHE", place.path());
    let said = stdout(&info.output().expect("the program runs"));
    let lines: BTreeSet<&str> = said.lines().collect();
    assert_eq!(lines.len(), said.lines().count(), "{said}");
}

#[test]
fn wrong_arguments_are_one_line_and_exit_1() {
    let place = place();
    let dir = place.path();
    refuses(dir, &["fly"], &["fly"]);
    refuses(dir, &["run", "--speed"], &["--speed"]);
    refuses(dir, &["run", "--cases=-1"], &["--cases", "-1"]);
    refuses(dir, &["run", "--cases", "many"], &["--cases", "many"]);
    refuses(dir, &["run", "--time", "60"], &["--time", "60s"]);
    refuses(dir, &["run", "--shard", "3/3"], &["--shard", "3/3"]);
    refuses(dir, &["run", "--shard", "0/1048577"], &["--shard", "at most 1048576"]);
    refuses(dir, &["run", "--seed", "x"], &["--seed", "commit"]);
    refuses(dir, &["run", "--seed", "18446744073709551616"], &["--seed", "64 bits"]);
    refuses(dir, &["bench"], &["bench", "oracle"]);
    refuses(dir, &["run", "--profile", "tiny"], &["--profile", "tiny"]);
    refuses(dir, &["run", "--jobs", "0"], &["--jobs"]);
    refuses(dir, &["run", "--backend", "abacus"], &["--backend", "abacus", "emulated", "window-off-by-one"]);
    refuses(dir, &["faults", "--only", "nope"], &["--only: there is no fault 'nope'", "`seamproof faults`"]);
    // Before a GPU is looked for, which most machines do not have.
    let plant = |id: &str, texts: &[&str]| refuses(dir, &["kernels", "check", "--plant", id], texts);
    plant("nope", &["--plant: there is no fault 'nope'", "known: all, ", "product-not-rounded"]);
    plant(
        "attend-endless",
        &["--plant: no comparison shows the fault 'attend-endless'", "cuda+attend-endless"],
    );
    for command in [["bench", "attention"], ["kernels", "judge"]] {
        let named = |option, texts: &[&str]| refuses(dir, &[&command[..], &[option, "nope"]].concat(), texts);
        named("--tracks", &["there is no track 'nope'", "one_16384"]);
        named("--columns", &["there is no column 'nope'", "mha-d128"]);
    }
    refuses(dir, &["replay"], &["FILE"]);
    assert!(!dir.join("seamproof.out").exists());
    for arguments in [vec!["run", "--speed"], vec!["run", "--cases", "many"], vec!["replay"], vec!["bench"]] {
        let said = stderr(&seamproof(dir, &arguments));
        assert_eq!(said.matches("--help").count(), 1, "{arguments:?}: {said}");
    }
}

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
fn a_bad_case_file_is_one_line_that_names_file_and_field() {
    let place = place();
    let dir = place.path();
    let good = stored_case(dir);
    let replace = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replacen(from, to, 1)
    };
    let deep = "[".repeat(1 << 20);
    let heads = good.find("\"heads\"").expect("a case has heads");
    let (before, after) = good.split_at(heads);
    let kv = after.find("\"kv\": ").expect("heads have kv") + "\"kv\": ".len();
    let end = kv + after[kv..].find(|letter: char| !letter.is_ascii_digit()).expect("a number ends");
    let zero_heads = format!("{before}{}0{}", &after[..kv], &after[end..]);
    let overflow = "\"sequences\": [{\"id\": 9, \"q\": {\"offset\": 18446744073709551615, \"len\": 9, \"span\": 9}, \
                    \"kv\": {\"offset\": 0, \"len\": 0, \"span\": 0}}], \"rows\"";
    // Without a sequence, any number of rows is legal.
    let large = {
        let sequences = good.find("\"sequences\"").expect("a case has sequences");
        let heads = good.find("\"heads\"").expect("a case has heads");
        let rows = "\"sequences\": [], \"rows\": {\"q\": 67108864, \"kv\": 67108864}, ";
        format!("{}{rows}{}", &good[..sequences], &good[heads..])
    };
    let sequences = good.find("\"sequences\"").expect("a case has sequences");
    let rows = good.find("\"rows\"").expect("a case has rows") + "\"rows\"".len();
    let overflow = format!("{}{overflow}{}", &good[..sequences], &good[rows..]);
    let cases = [
        ("text", "attention".to_owned(), "line 1"),
        ("truncated", good[..good.len() / 2].to_owned(), "EOF"),
        ("nested", replace("\"problem\": ", &format!("\"problem\": {deep}")), "line"),
        ("version", replace("\"version\": 1", "\"version\": 2"), "version: 2"),
        ("type", replace("\"schedule_seed\": ", "\"schedule_seed\": -"), "schedule_seed"),
        ("unknown", replace("\"problem\"", "\"notes\": 1, \"problem\""), "notes"),
        ("zero", zero_heads, "heads.kv is 0"),
        ("overflow", overflow, "sequences[0].q"),
        ("subject", replace("\"name\": \"", "\"name\": \"un"), "subject"),
        ("escape", replace("\"name\": \"", "\"name\": \"\\u001b[2J\\nerror: "), "\\u{1b}[2J\\nerror: "),
        ("large", large, "at most"),
        (
            "recorded",
            replace("\"generated\"", "{\"recorded\": {\"file\": \"f\", \"digest\": \"d\"}}"),
            "inputs",
        ),
    ];
    for (name, text, field) in cases {
        let file = format!("{name}.json");
        fs::write(dir.join(&file), text).expect("the file is written");
        for command in ["replay", "shrink"] {
            let output = seamproof(dir, &[command, &file]);
            let said = stderr(&output);
            assert_eq!((code(&output), said.lines().count()), (1, 1), "{command} {name}: {said}");
            assert!(said.contains(&file) && said.contains(field), "{command} {name}: {said}");
            assert!(said.len() < 1000, "{command} {name}: {} bytes", said.len());
        }
    }
    fs::write(dir.join("binary.json"), b"\xff\xfe{").expect("the file is written");
    refuses(dir, &["replay", "binary.json"], &["binary.json", "UTF-8"]);
    refuses(dir, &["replay", "missing.json"], &["missing.json"]);
    refuses(dir, &["replay", "seamproof.out/findings"], &["seamproof.out/findings", "*.json"]);
    refuses(dir, &["replay", "seamproof.out"], &["seamproof.out/findings", "*.json"]);
}

/// A limit on the address space is the shell's, so that this needs no unsafe code.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_bounded_whatever_the_file_holds() {
    const LIMIT_KIB: &str = "1000000";
    let place = place();
    let dir = place.path();
    let huge = File::create(dir.join("huge.json")).expect("a file");
    huge.set_len(1 << 36).expect("a sparse file");
    fs::write(dir.join("deep.json"), "{\"version\": 1, \"story\": ".to_owned() + &"[".repeat(50 << 20))
        .expect("a file");
    fs::write(dir.join("long.json"), "{\"version\": 1, \"".to_owned() + &"x".repeat(50 << 20))
        .expect("a file");
    for (file, text) in [("huge.json", "larger than"), ("deep.json", "no case"), ("long.json", "EOF")] {
        let program = assert_cmd::cargo::cargo_bin("seamproof");
        let output = Process::new("sh")
            .current_dir(dir)
            .args(["-c", "ulimit -v $0 && exec \"$1\" replay \"$2\"", LIMIT_KIB])
            .args([program.as_os_str(), file.as_ref()])
            .output()
            .expect("the shell runs");
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count()), (1, 1), "{file}: {said}");
        assert!(said.contains(file) && said.contains(text), "{file}: {said}");
    }
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

/// The canary is a finding like any other: it replays, and it shrinks.
#[test]
fn a_stored_finding_fails_again() {
    let place = place();
    stored_case(place.path());
    let output = seamproof(place.path(), &["replay", "seamproof.out/canary"]);
    assert!([2, 3].contains(&code(&output)), "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("FAIL"));
}

/// Whoever names a campaign's directory means its findings, and not the summary that lies there too.
#[test]
fn a_campaign_s_directory_replays_its_findings() {
    let place = place();
    let output =
        seamproof(place.path(), &["run", "--backend", "window-off-by-one", "--cases", "50", "--seed", "1"]);
    assert_eq!(code(&output), 2, "{}{}", stdout(&output), stderr(&output));
    let output = seamproof(place.path(), &["replay", "seamproof.out"]);
    assert_eq!(code(&output), 2, "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("unreadable 0"), "{}", stdout(&output));
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
fn a_case_that_fails_on_another_subject_is_shrunk_for_that_subject() {
    const CANARY: &str = "window-off-by-one";
    let place = place();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    let output = seamproof(place.path(), &["shrink", file, "--out", "small.json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("nothing to shrink"));
    let output = seamproof(place.path(), &["shrink", file, "--backend", CANARY, "--out", "small.json"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert!(stdout(&output).contains("step "), "{}", stdout(&output));
    assert_eq!(code(&seamproof(place.path(), &["replay", "small.json"])), 2);
    assert_eq!(code(&seamproof(place.path(), &["replay", "small.json", "--backend", "emulated"])), 0);
}

/// `explain` of what an identity found shows every run that the identity compares.
#[test]
fn an_identity_s_finding_is_explained_with_all_its_runs() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    let mut case = Case::load(Path::new(stored)).expect("the case is there");
    let broken = Finding::new(Check::Identity, None, "the runs differ".to_owned());
    let finding = Finding { identity: Some(Relation::SequenceOrder), ..broken };
    case.found = Some(Found { finding, minimal: false, evaluations: 0 });
    fs::write(place.path().join("case.json"), case.to_json()).expect("a file");
    let output = seamproof(place.path(), &["explain", "case.json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let said = stdout(&output);
    assert!(said.contains("problem   2 sequences (256, 61)"), "{said}");
    assert!(said.contains("\nrun 2     of another problem\nproblem   2 sequences (61, 256)"), "{said}");
}

/// A case that a campaign of another crate left: no command has its subject, and each says what to do.
#[test]
fn a_case_of_another_crates_subject_says_where_it_is_judged() {
    let place = place();
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1930-seven-in-eight.json");
    let mut case = Case::load(Path::new(stored)).expect("a stored case");
    case.subject.name = "mine".to_owned();
    fs::write(place.path().join("case.json"), case.to_json()).expect("the case is written");
    let help = ["case.json: subject: ", "'mine'", "known: emulated, cuda", "--backend", "NAME.rs"];
    for command in ["shrink", "explain"] {
        refuses(place.path(), &[command, "case.json"], &help);
    }
    let replayed = seamproof(place.path(), &["replay", "case.json"]);
    let said = stderr(&replayed);
    assert_eq!((code(&replayed), said.lines().count()), (1, 1), "{said}");
    assert!(help.iter().all(|text| said.contains(text)), "{said}");
    let named = ["case.json", "--backend", "another"];
    for command in ["replay", "shrink", "explain"] {
        let said = stderr(&seamproof(place.path(), &[&[command], &named[..]].concat()));
        assert!(said.contains("'another'") && !said.contains("NAME.rs"), "{said}");
    }
    assert_eq!(code(&seamproof(place.path(), &["replay", "case.json", "--backend", "emulated"])), 0);
}

/// What is minimal already is not written once more, where a replay of its folder would count it twice.
#[test]
fn a_minimal_case_is_not_written_again() {
    let place = place();
    let (file, subject) = ("case.json", "window-off-by-one");
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-1212-window-one-key-short.json");
    fs::copy(stored, place.path().join(file)).expect("a copy");
    let shrink = |file: &str| {
        let output = seamproof(place.path(), &["shrink", file, "--backend", subject]);
        assert_eq!(code(&output), 2, "{}", stderr(&output));
        stdout(&output)
    };
    let said = shrink(file);
    assert!(
        said.contains("replay:  seamproof replay case.min.json\n") && !said.contains("no file"),
        "{said}"
    );
    let said = shrink("case.min.json");
    assert!(
        said.contains("minimal after 0 steps") && said.contains("nothing got smaller: no file is written"),
        "{said}"
    );
    let replay = "seamproof replay case.min.json --backend window-off-by-one\n";
    assert!(said.ends_with(&format!("replay:  {replay}")), "{said}");
    assert!(!place.path().join("case.min.min.json").exists());
    let replayed = seamproof(place.path(), &["replay", ".", "--backend", subject]);
    assert!(stdout(&replayed).contains("failed 2"), "{}", stdout(&replayed));
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

const DEFECTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/defects");

#[test]
fn the_catalogue_is_listed_and_a_fault_is_scored() {
    let place = place();
    let list = seamproof(place.path(), &["faults", "--list"]);
    let said = stdout(&list);
    assert_eq!((code(&list), stderr(&list).as_str()), (0, ""));
    for text in ["window-off-by-one", "lengths-floored", "table-too-wide", "not here", "https://github.com/"]
    {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let one = seamproof(place.path(), &["faults", "--only", "merge-twice"]);
    assert_eq!((code(&one), stdout(&one).matches("https://").count()), (0, 1), "{}", stdout(&one));
    let arguments = ["faults", "--score", "--only", "merge-twice", "--seeds", "1"];
    let score = seamproof(place.path(), &arguments);
    let said = stdout(&score);
    assert_eq!(code(&score), 0, "{said}{}", stderr(&score));
    for text in ["caught merge-twice", "checker", "envelope", "seq", "seen by checker, ", "missed 0"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    refuses(place.path(), &["faults", "--only", "nothing"], &["--only", "nothing"]);
    refuses(place.path(), &["faults", "--list", "--score"], &["--score"]);
    refuses(place.path(), &["faults", "--score", "--seeds", "0"], &["--seeds"]);
    refuses(place.path(), &["faults", "--quick"], &["--score"]);
    refuses(place.path(), &["faults", "--score", "--quick", "--seeds", "2"], &["--quick"]);
}

/// Faults of every kind by name, and the whole catalogue: each is caught, and the table has a line for each rung.
#[test]
fn the_whole_catalogue_is_scored_by_rung() {
    let place = place();
    for (id, rung) in [
        ("table-too-wide", "seen by capability"),
        ("call-lse-in-bf16", "envelope"),
        ("row-not-rescaled", "identity"),
        ("judge-nan-equals", "blinds envelope"),
    ] {
        let one = seamproof(place.path(), &["faults", "--score", "--quick", "--only", id]);
        let said = stdout(&one);
        assert_eq!(code(&one), 0, "{said}{}", stderr(&one));
        assert!(said.contains(&format!("caught {id}")) && said.contains(rung), "{said}");
    }
    let whole = seamproof(place.path(), &["faults", "--score", "--quick"]);
    let said = stdout(&whole);
    assert_eq!(code(&whole), 0, "{said}{}", stderr(&whole));
    let lines = |start: &str| said.lines().filter(|line| line.starts_with(start)).count();
    for rung in ["checker", "capability", "crash", "structure", "poison", "exact", "envelope", "identity"] {
        assert_eq!(lines(&format!("{rung} ")), 1, "{rung} in {said}");
    }
    assert!(lines("caught ") > 200 && lines("MISSED ") == 0, "{said}");
    for text in ["missed 0", "those of the judge too", "at most 20: held", "kept because"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
}

/// What can't give an answer is refused before anything runs, and nothing is left on disk.
#[test]
fn questions_without_an_answer_are_refused_at_once() {
    let place = place();
    let refused = |arguments: &[&str], texts: &[&str]| refuses(place.path(), arguments, texts);
    refused(&["run", "--cases", "0"], &["--cases", "1.."]);
    refused(&["run", "--backend", "emulated:"], &["--backend", "OPTION=VALUE", "or BACKEND alone"]);
    refused(&["nightly", "--budget", "1h"], &["corpus/regressions", "--corpus", "checkout"]);
    refused(&["calibrate", "emulated", "--cases", "1", "--lock", "lock.json"], &["1 case ", "at least 48"]);
    let with_options = ["calibrate", "emulated:kv_tile=32", "--cases", "60"];
    refused(&[&with_options[..], &["--lock", "lock.json"]].concat(), &["--lock", "name emulated alone"]);
    refused(&[&with_options[..], &["--check"]].concat(), &["--check", "name emulated alone"]);
    refused(&["calibrate", "emulated:tiles=32"], &["no option 'tiles'"]);
    assert_eq!(fs::read_dir(place.path()).expect("a directory").count(), 0);
    // One tile for all cases is a candidate as good as the tile that each instance declares.
    let tabled = seamproof(place.path(), &with_options);
    assert!(code(&tabled) == 0 && stdout(&tabled).contains("2 candidates explain"), "{}", stdout(&tabled));
    let locked = ["calibrate", "emulated", "--cases", "60", "--lock", "lock.json"];
    assert_eq!(code(&seamproof(place.path(), &locked)), 0);
    assert!(place.path().join("lock.json").exists());
}

#[test]
fn a_campaign_that_held_says_so_in_its_last_line() {
    let place = place();
    let output = seamproof(place.path(), &["run", "--seed", "1", "--cases", "1000"]);
    let said = stdout(&output);
    let last = said.lines().last().unwrap_or_default();
    assert_eq!(code(&output), 0, "{said}");
    assert!(last.starts_with("result    nothing was found: ") && last.contains(" cases held, "), "{said}");
    // Of so few cases that held p50 is told, and p99 is not.
    let margins = said.lines().filter(|line| line.starts_with("          lse ") && line.contains(" W "));
    let columns: Vec<Vec<&str>> = margins.map(|line| line.split_whitespace().collect()).collect();
    let told = columns.iter().any(|line| matches!(line[..], [_, _, _, p50, "-", _] if p50 != "-"));
    assert!(told, "{said}");
    let few = seamproof(place.path(), &["run", "--seed", "1", "--cases", "3"]);
    assert!(code(&few) == 4 && !stdout(&few).contains("nothing was found"), "{}", stdout(&few));
}

/// The faults at the call of a subject behind worker processes: each is caught there.
#[test]
fn the_faults_at_the_call_are_scored_on_a_backend() {
    let place = place();
    let on = |backend: &'static str| ["faults", "--score", "--quick", "--backend", backend];
    let whole = seamproof(place.path(), &on("emulated@worker"));
    let said = stdout(&whole);
    assert_eq!(code(&whole), 0, "{said}{}", stderr(&whole));
    let caught = said.lines().filter(|line| line.starts_with("caught call-")).count();
    assert_eq!(caught, MISCALLS.len(), "{said}");
    assert!(!said.contains("those of the judge too"), "{said}");
    let sum = format!("faults in subjects {caught} · in the judge 0 · missed 0");
    for text in ["rung ", &sum, "at most 20: held"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let only = |backend: &'static str, id: &'static str| {
        seamproof(place.path(), &[&on(backend)[..], &["--only", id]].concat())
    };
    let one = only("emulated:arithmetic=hopper", "call-scale-off");
    assert_eq!((code(&one), stdout(&one).contains("caught call-scale-off")), (0, true), "{}", stdout(&one));
    // A subject that is wrong whatever it is told shows nothing of what it is told.
    let broken = only("mock:error=others", "call-scale-off");
    assert_eq!(code(&broken), 70, "{}", stdout(&broken));
    for text in ["NOT RUN call-scale-off", "wrong without the fault, too, on 20 of 20", "missed 0"] {
        assert!(stdout(&broken).contains(text), "{text} is not in {}", stdout(&broken));
    }
    let excluded = only("mock:narrow=always", "call-sink-dropped");
    assert_eq!(code(&excluded), 0, "{}{}", stdout(&excluded), stderr(&excluded));
    for text in ["excluded call-sink-dropped", "excluded by the table: call-sink-dropped", "missed 0"] {
        assert!(stdout(&excluded).contains(text), "{text} is not in {}", stdout(&excluded));
    }
    let refused = |arguments: &[&str], texts: &[&str]| refuses(place.path(), arguments, texts);
    refused(&on("mock:bad-device=0"), &["backend mock cannot be started", "gone"]);
    refused(&on("abacus"), &["--backend", "abacus"]);
    refused(&on("emulated~call-scale-off"), &["called wrongly already", "--only"]);
    refused(&[&on("emulated")[..], &["--only", "merge-twice"]].concat(), &["--only", "fault at the call"]);
    refused(&[&on("emulated")[..], &["--gpu"]].concat(), &["--gpu"]);
    refused(&["faults", "--backend", "emulated"], &["--score"]);
}

/// Each stored defect: what is computed beside what should be, and the step in which it goes wrong.
#[test]
fn a_stored_defect_is_explained() {
    let place = place();
    for (name, texts) in [
        ("te-all-gather-window-shift", ["should see", "checked   WRONG"]),
        ("te-all-gather-real-offsets", ["should see", "checked   WRONG"]),
        ("te-reorder-tail", ["checked   WRONG", "layout"]),
        ("te-ring-floored-lengths", ["ring step 2 of 2: lower section", "checked   WRONG"]),
        ("te-ring-window-opens", ["ring step 2 of 2: full section", "should see"]),
    ] {
        let file = format!("{DEFECTS}/{name}.json");
        let output = seamproof(place.path(), &["explain", &file]);
        let said = stdout(&output);
        assert_eq!(code(&output), 0, "{name}: {}", stderr(&output));
        for text in texts {
            assert!(said.contains(text), "{name}: {text} is not in {said}");
        }
        assert!(said.starts_with("subject   emulated+"), "{said}");
        let right = seamproof(place.path(), &["explain", &file, "--backend", "emulated"]);
        assert!(stdout(&right).contains("checked   proved"), "{name}: {}", stdout(&right));
        assert_eq!(
            code(&seamproof(place.path(), &["prove", &file])),
            0,
            "{name}: the builder's own is right"
        );
        assert!([2, 3].contains(&code(&seamproof(place.path(), &["replay", &file]))), "{name}");
    }
    let file = format!("{DEFECTS}/te-ring-window-opens.json");
    let one =
        seamproof(place.path(), &["explain", &file, "--rank", "1", "--pass", "forward", "--operations"]);
    assert!(stdout(&one).contains("merges") && !stdout(&one).contains("\nrank 0\n"), "{}", stdout(&one));
    refuses(place.path(), &["explain", &file, "--rank", "2"], &["--rank", "0 to 1"]);
    refuses(place.path(), &["explain", &file, "--pass", "sideways"], &["sideways"]);
    refuses(place.path(), &["explain", "missing.json"], &["missing.json"]);
}

/// A fault at the call is in no schedule: what is proved is what is asked.
#[test]
fn a_fault_that_no_schedule_shows_is_not_proved_away() {
    let place = place();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions/te-716-large-logits.json");
    let output = seamproof(place.path(), &["explain", file, "--backend", "emulated~call-scale-off"]);
    let said = stdout(&output);
    for text in [
        "subject   emulated~call-scale-off",
        "NOT SHOWN: the fault at the call: the scale is 2^-8 too large",
        "asked to see exactly what the mask shows",
        "checked   proved of what is asked, not of what kernels do",
    ] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
}

/// What is wrong with a subject is wrong for every file, and said once.
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

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = place();
    let mut child = Process::new(assert_cmd::cargo::cargo_bin("seamproof"))
        .current_dir(place.path())
        .args(["run", "--cases", "300", "--seed", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(NOTHING_FOUND.contains(&code(&output)), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panic"));
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

/// A deadline of no time would end everything, and the words would blame the subject.
#[test]
fn a_deadline_is_some_time() {
    let place = place();
    for option in ["--deadline", "--start-deadline"] {
        refuses(place.path(), &["run", "--cases", "1", option, "0s"], &[option, "use more than 0"]);
    }
}

/// Whoever names a directory too high or too low is told what to name.
#[cfg(unix)]
#[test]
fn what_to_name_is_said() {
    let place = place();
    let findings = place.path().join("nights/night-0001/emulated-quick/slice-0000/findings");
    fs::create_dir_all(&findings).expect("a directory");
    fs::write(place.path().join("nights/night-0001/night.json"), "{}").expect("a file");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions/fa-2515-no-sequences.json");
    fs::copy(from, findings.join("one.json")).expect("a copy");
    refuses(place.path(), &["replay", "nights"], &["name one of them, such as nights/night-0001"]);
    let file = "nights/night-0001/emulated-quick/slice-0000/findings/one.json";
    for command in ["explain", "shrink"] {
        refuses(place.path(), &[command, "nights/night-0001"], &["is a directory", file]);
    }
    // What cannot be read of it is counted, and nothing is waited for.
    let made = Process::new("mkfifo").arg(findings.join("pipe.json")).status().expect("mkfifo runs");
    assert!(made.success());
    fs::create_dir(place.path().join("nights/night-0001/emulated-regressions.jsonl")).expect("a directory");
    let output = seamproof(place.path(), &["replay", "nights/night-0001"]);
    assert!(
        stdout(&output).contains("held 1 · refused 0 · failed 0 · crashed 0 · unreadable 2"),
        "{output:?}"
    );
    assert_eq!(code(&output), 1);
}

/// Bytes of choices are read up to a limit that the error says, and nothing waits for a pipe.
#[cfg(unix)]
#[test]
fn a_fuzzer_s_file_is_read_up_to_a_limit() {
    let place = place();
    let dir = place.path();
    let values = |from: &str| ["values".to_owned(), from.to_owned(), "--out".to_owned(), "out".to_owned()];
    let refuses = |from: &str, texts: &[&str]| {
        let arguments = values(from);
        refuses(dir, &arguments.each_ref().map(String::as_str), texts);
    };
    let file = fs::File::create(dir.join("bytes")).expect("a file");
    // A hole: nothing is written.
    file.set_len(1 << 40).expect("a length");
    refuses("bytes", &["bytes: cannot be read: larger than 1048576 bytes"]);
    assert!(Process::new("mkfifo").arg(dir.join("pipe")).status().expect("mkfifo runs").success());
    refuses("pipe", &["pipe: cannot be read: is no regular file"]);
    refuses("/dev/zero", &["/dev/zero: cannot be read: is no regular file"]);
    file.set_len(1 << 20).expect("a length");
    let output = seamproof(dir, &values("bytes").each_ref().map(String::as_str));
    assert_eq!((code(&output), &*stdout(&output)), (0, "values    1 read, 1 new in out\n"));
}

/// The line that replays a finding can be pasted, whatever the folder is called.
#[test]
fn a_replay_line_can_be_pasted() {
    let place = place();
    let dir = place.path().join("it's `my` $HOME");
    fs::create_dir(&dir).expect("a directory");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects/te-reorder-tail.json");
    fs::copy(from, dir.join("a case.json")).expect("a copy");
    let file = format!("{}/a case.json", dir.file_name().expect("a name").to_string_lossy());
    let said = stdout(&seamproof(place.path(), &["shrink", &file, "--budget", "1"]));
    let line = said.lines().find_map(|line| line.strip_prefix("replay:  ")).expect("a command");
    let program = assert_cmd::cargo::cargo_bin("seamproof");
    let script = format!("seamproof() {{ {} \"$@\"; }}\n{line}", program.display());
    let output =
        Process::new("sh").args(["-c", &script]).current_dir(place.path()).output().expect("a shell");
    assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
}
