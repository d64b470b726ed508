//! Arguments of the command line: help, and refusals.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command as Process, Stdio};

use assert_cmd::Command;

use super::{NOTHING_FOUND, code, place, refuses, seamproof, stderr, stdout, typed};

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

/// Test that every command of the kernels is in the list, with a line that says what it does, and that instances are
/// told apart.
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
    let large = |more: [&'static str; 2]| ["large", "--backend", "python:none.py", more[0], more[1]];
    refuses(dir, &["large"], &["--backend"]);
    refuses(dir, &["large", "--backend", "nothing"], &["nothing", "python:FILE"]);
    refuses(dir, &large(["--cases", "1"]), &["none.py"]);
    refuses(dir, &large(["--tokens", "5..3"]), &["--tokens", "the smaller one first"]);
    refuses(dir, &large(["--tokens", "1"]), &["--tokens", "from 2"]);
    let replayed = ["large", "--backend", "python:none.py", "--replay", "case.json", "--tokens", "5"];
    refuses(dir, &replayed, &["--replay", "cannot be used with", "--tokens"]);
    refuses(dir, &large(["--elements", "6..5"]), &["--elements", "the smaller number first"]);
    refuses(dir, &large(["--shrink", "60"]), &["--shrink", "60s"]);
    refuses(dir, &["run", "--shard", "3/3"], &["--shard", "3/3"]);
    refuses(dir, &["run", "--shard", "0/1048577"], &["--shard", "at most 1048576"]);
    refuses(dir, &["run", "--seed", "x"], &["--seed", "commit"]);
    refuses(dir, &["run", "--seed", "18446744073709551616"], &["--seed", "64 bits"]);
    refuses(dir, &["bench"], &["bench", "oracle"]);
    refuses(dir, &["run", "--profile", "tiny"], &["--profile", "tiny"]);
    refuses(dir, &["run", "--jobs", "0"], &["--jobs"]);
    refuses(dir, &["run", "--backend", "abacus"], &["--backend", "abacus", "emulated", "window-off-by-one"]);
    let faults = format!("`{}`", typed("faults"));
    refuses(dir, &["faults", "--only", "nope"], &["--only: there is no fault 'nope'", &faults]);
    // These are refused before a GPU is searched for, which most machines do not have.
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

/// Test that arguments without a possible answer are refused before anything runs, and that nothing is left on disk.
#[test]
fn questions_without_an_answer_are_refused_at_once() {
    let place = place();
    let refused = |arguments: &[&str], texts: &[&str]| refuses(place.path(), arguments, texts);
    refused(&["run", "--cases", "0"], &["--cases", "1.."]);
    for command in ["run", "merge"] {
        let both = [command, "--json", "-", "--junit", "-", "shard"];
        let both = if command == "run" { &both[..5] } else { &both[..] };
        refused(both, &["--json - and --junit -", "cannot both", "name a file"]);
    }
    refused(&["run", "--backend", "emulated:"], &["--backend", "OPTION=VALUE", "or BACKEND alone"]);
    refused(&["nightly", "--budget", "1h"], &["corpus/regressions", "--corpus", "checkout"]);
    refused(&["calibrate", "emulated", "--cases", "1", "--lock", "lock.json"], &["1 case ", "at least 98"]);
    let with_options = ["calibrate", "emulated:kv_tile=32", "--cases", "24"];
    refused(&[&with_options[..], &["--lock", "lock.json"]].concat(), &["--lock", "name emulated alone"]);
    refused(&[&with_options[..], &["--check"]].concat(), &["--check", "name emulated alone"]);
    refused(&["calibrate", "emulated:tiles=32"], &["no option 'tiles'"]);
    refused(&["calibrate", "emulated:q_tile=16,q_tile=32"], &["option q_tile is given more than once"]);
    assert_eq!(fs::read_dir(place.path()).expect("a directory").count(), 0);
    // A single tile for all cases is the one that each instance declares, and no second candidate.
    let tabled = seamproof(place.path(), &with_options);
    assert!(code(&tabled) == 0 && stdout(&tabled).contains("one candidate explains"), "{}", stdout(&tabled));
    let locked = ["calibrate", "emulated", "--cases", "98", "--lock", "lock.json"];
    assert_eq!(code(&seamproof(place.path(), &locked)), 0);
    assert!(place.path().join("lock.json").exists());
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = place();
    let mut child = Process::new(assert_cmd::cargo::cargo_bin("seamproof"))
        .current_dir(place.path())
        .args(["run", "--cases", "30", "--seed", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(NOTHING_FOUND.contains(&code(&output)), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panic"));
}

/// Test that a deadline of no time is refused, as is a campaign of none. It would end everything, and the words would blame
/// the subject, or say that nothing was found.
#[test]
fn a_deadline_is_some_time() {
    let place = place();
    for option in ["--deadline", "--start-deadline", "--time"] {
        refuses(place.path(), &["run", "--cases", "1", option, "0s"], &[option, "use more than 0"]);
    }
    refuses(place.path(), &["large", "--time", "0s"], &["--time", "use more than 0"]);
}

/// Test that a directory too high or too low is answered with the one to name.
#[cfg(unix)]
#[test]
fn what_to_name_is_said() {
    let place = place();
    let findings = place.path().join("nights/night-0001/emulated-quick/findings");
    fs::create_dir_all(&findings).expect("a directory");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions/fa-2515-no-sequences.json");
    fs::copy(from, findings.join("one.json")).expect("a copy");
    refuses(place.path(), &["replay", "nights"], &["name one of them, such as nights/night-0001"]);
    let file = "nights/night-0001/emulated-quick/findings/one.json";
    for command in ["explain", "shrink"] {
        refuses(place.path(), &[command, "nights/night-0001"], &["is a directory", file]);
    }
    // A file that cannot be read is counted, and nothing waits for it.
    let made = Process::new("mkfifo").arg(findings.join("pipe.json")).status().expect("mkfifo runs");
    assert!(made.success());
    let run = place.path().join("nights/night-0001/emulated-seams");
    fs::create_dir(&run).expect("a directory");
    fs::write(run.join("findings"), "").expect("a file");
    let output = seamproof(place.path(), &["replay", "nights/night-0001"]);
    assert!(
        stdout(&output).contains("held 1 · refused 0 · failed 0 · crashed 0 · unreadable 2"),
        "{output:?}"
    );
    assert_eq!(code(&output), 1);
}
