//! The catalogue of planted faults, listed and scored.

use seamproof_judge::subjects::MISCALLS;

use super::look::{PAGE_MAX, elements, fits_a_telephone, table};
use super::{code, place, refuses, seamproof, stderr, stdout};

#[test]
fn the_catalogue_is_listed_and_a_fault_is_scored() {
    let place = place();
    let list = seamproof(place.path(), &["faults", "--list"]);
    let said = stdout(&list);
    assert_eq!((code(&list), stderr(&list).as_str()), (0, ""));
    for text in [
        "window-off-by-one",
        "lengths-floored",
        "table-too-wide",
        "Not planted, by number in docs/known-bugs.md:",
        "https://github.com/",
    ] {
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
    let two = seamproof(place.path(), &["faults", "--only", "window-off-by-one,merge-twice"]);
    assert_eq!((code(&two), stdout(&two).matches("https://").count()), (0, 2), "{}", stdout(&two));
    for wrong in ["nothing", "merge-twice,nothing", "merge-twice,"] {
        refuses(
            place.path(),
            &["faults", "--only", wrong],
            &["--only", wrong.trim_start_matches("merge-twice,")],
        );
    }
    refuses(place.path(), &["faults", "--list", "--score"], &["--score"]);
    refuses(place.path(), &["faults", "--score", "--seeds", "0"], &["--seeds"]);
    refuses(place.path(), &["faults", "--quick"], &["--score"]);
    refuses(place.path(), &["faults", "--html", "f.html"], &["--score"]);
    refuses(place.path(), &["faults", "--score", "--html", "-"], &["--html", "standard output"]);
    refuses(place.path(), &["faults", "--score", "--quick", "--seeds", "2"], &["--quick"]);
}

/// Checks the figures of a score's page against its text.
fn has_the_score(page: &str, said: &str) {
    assert!(page.len() < PAGE_MAX, "{} bytes", page.len());
    let (names, _) = elements(page);
    assert_eq!(names.iter().filter(|name| *name == "script").count(), 2);
    let rungs = table(page, "Rungs");
    assert_eq!(rungs.len(), 9);
    for row in &rungs {
        let line =
            said.lines().find(|line| line.starts_with(&format!("{} ", row[0]))).expect("the text has it");
        assert_eq!(line.split_whitespace().take(5).collect::<Vec<_>>(), row.iter().collect::<Vec<_>>());
    }
    // A mark for each fault that a rung saw, in the picture and in the table.
    let faults = table(page, "Faults in subjects");
    let (_, picture) = page.split_once("role=\"img\"").expect("a picture");
    let (picture, _) = picture.split_once("</svg>").expect("it ends");
    for (at, row) in rungs.iter().enumerate() {
        let signs = faults.iter().filter(|fault| !fault[3 + at].is_empty());
        let (saw, alone): (usize, usize) =
            (signs.clone().count(), signs.filter(|fault| fault[3 + at] == "◆ alone").count());
        assert!(saw >= row[1].parse().expect("a number"), "{}", row[0]);
        assert_eq!(alone.to_string(), row[3], "{}", row[0]);
        let drawn = ["◆", "●", "○"].map(|sign| picture.matches(&format!(": {} {sign}", row[0])).count());
        assert_eq!(drawn.iter().sum::<usize>(), saw, "{}", row[0]);
    }
}

/// Test of faults of every kind by name, and of the whole catalogue. Each is caught, and the table has a line for
/// each rung.
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
    let whole = seamproof(place.path(), &["faults", "--score", "--quick", "--html", "power.html"]);
    let said = stdout(&whole);
    assert_eq!(code(&whole), 0, "{said}{}", stderr(&whole));
    let page = std::fs::read_to_string(place.path().join("power.html")).expect("the page is there");
    has_the_score(&page, &said);
    fits_a_telephone(place.path(), &page);
    let lines = |start: &str| said.lines().filter(|line| line.starts_with(start)).count();
    for rung in [
        "checker",
        "resources",
        "capability",
        "crash",
        "structure",
        "poison",
        "exact",
        "envelope",
        "identity",
    ] {
        assert_eq!(lines(&format!("{rung} ")), 1, "{rung} in {said}");
    }
    assert!(lines("caught ") > 200 && lines("MISSED ") == 0, "{said}");
    for text in ["missed 0", "those of the judge too", "at most 20: held", "kept because"] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
}

/// Test that each fault at the call of a subject behind worker processes is caught there.
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
    // A subject that is always wrong shows nothing about wrong calls.
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

/// Test that a fault at the call is in no schedule: the proof is about what is asked.
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
