//! `seamproof large` on subjects whose inputs and results pass through the program.

use std::fs;

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
