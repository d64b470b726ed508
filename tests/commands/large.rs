//! `seamproof large` on subjects whose inputs and results pass through the program.

use std::fs;
#[cfg(unix)]
use std::io::{BufRead, BufReader, Read};
#[cfg(unix)]
use std::process::{Command as Process, Stdio};

use super::{code, place, seamproof, stdout};

/// Test that packs of a subject that is in no Python file go to the ordinary judge: a right subject holds and its canary
/// is found, and a wrong one is a finding that becomes small. Drawn rows are enough where all would be too dear.
#[test]
fn large_packs_of_any_subject_are_judged() {
    let place = place();
    let large = |backend: &str, more: &[&str]| {
        let usual =
            ["large", "--backend", backend, "--tokens", "64..192", "--elements", "65536", "--seed", "3"];
        seamproof(place.path(), &[&usual[..], more].concat())
    };
    let held = large("emulated", &["--cases", "6"]);
    let said = stdout(&held);
    assert_eq!(code(&held), 0, "{said}");
    assert!(
        said.contains("every row") && said.contains("canary    found") && said.contains("0 findings"),
        "{said}"
    );
    let wrong = large("emulated+window-off-by-one", &["--cases", "6", "--shrink", "20s"]);
    let said = stdout(&wrong);
    assert_eq!(code(&wrong), 2, "{said}");
    assert!(said.contains("FINDING") && said.contains("seamproof replay"), "{said}");
    let folder = place.path().join("seamproof.out/findings");
    let file = fs::read_dir(folder).expect("findings").flatten().map(|entry| entry.file_name());
    let stored = file.map(|name| name.to_string_lossy().into_owned()).find(|name| name.starts_with("large-"));
    let stored = format!("seamproof.out/findings/{}", stored.expect("the pack as it was drawn"));
    let again = [
        "large",
        "--backend",
        "emulated+window-off-by-one",
        "--shrink",
        "0s",
        "--replay",
        &stored,
        "--out",
        "again",
    ];
    let again = seamproof(place.path(), &again);
    assert_eq!(code(&again), 2, "{}", stdout(&again));
}

/// Test that workers which end with a hunt that is interrupted are no crash of the subject.
#[cfg(unix)]
#[test]
fn an_interrupted_hunt_accuses_nobody() {
    for signal in ["-INT", "-TERM"] {
        let place = place();
        let mut child = Process::new(assert_cmd::cargo::cargo_bin("seamproof"))
            .current_dir(place.path())
            .args([
                "large",
                "--backend",
                "emulated@worker",
                "--tokens",
                "2048..4096",
                "--time",
                "1h",
                "--seed",
                "1",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
        // Behind the seed a pack is with a worker soon, and for long.
        said.read_line(&mut String::new()).expect("a line");
        std::thread::sleep(std::time::Duration::from_millis(700));
        let killed = Process::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(killed.expect("kill runs").success());
        let mut rest = String::new();
        said.read_to_string(&mut rest).expect("text");
        let ended = child.wait().expect("the program ends");
        assert_eq!(ended.code(), Some(4), "{rest}");
        assert!(rest.contains("0 findings") && rest.contains("too little run: interrupted"), "{rest}");
    }
}
