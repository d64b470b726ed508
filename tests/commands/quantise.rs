//! Quantisers: a right one holds, a wrong one is found, made small and found again, and what is not asked is no success.

use std::fs;

use super::{code, place, seamproof, stderr, stdout};

const STORED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/quantisations");

#[test]
fn a_wrong_quantiser_is_found_and_its_file_shows_it_again() {
    let place = place();
    let run = |args: &[&str]| seamproof(place.path(), &[&["quantise"], args].concat());
    let right = run(&["--cases", "200", "--seed", "1"]);
    assert!(code(&right) == 0 && stdout(&right).contains("failed 0"), "{}", stdout(&right));
    let wrong = "emulated+amax-over-padding";
    let found = run(&["--cases", "60", "--seed", "1", "--backend", wrong, "--out", "a b"]);
    assert!(code(&found) == 2 && stdout(&found).contains("'a b/quantise-"), "{}", stdout(&found));
    let files = fs::read_dir(place.path().join("a b")).expect("a folder of findings");
    let files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    assert!(!files.is_empty());
    for file in files {
        let file = file.to_str().expect("a name of text");
        // The file knows its quantiser.
        assert_eq!(code(&run(&[file])), 2);
        assert_eq!(code(&run(&[file, "--backend", "emulated"])), 0);
        assert_eq!(code(&run(&[file, STORED])), 2);
        let unknown = fs::read_to_string(file).expect("a readable file").replace(wrong, "emulated+nothing");
        fs::write(place.path().join("unknown.json"), unknown).expect("a file");
        let unknown = run(&["unknown.json"]);
        assert!(code(&unknown) == 1 && stderr(&unknown).contains("'nothing'"), "{}", stderr(&unknown));
    }
    assert_eq!(code(&run(&[STORED])), 0);
}

#[test]
fn what_is_not_asked_or_cannot_be_read_is_no_success() {
    let place = place();
    let run = |args: &[&str]| seamproof(place.path(), &[&["quantise"], args].concat());
    let stored =
        fs::read_to_string(format!("{STORED}/torchtitan-3109-amax-of-the-group.json")).expect("it is there");
    let cut = |from: &str, to: &str| {
        assert!(stored.contains(from), "{from}");
        fs::write(place.path().join("edited.json"), stored.replace(from, to)).expect("a file");
        run(&["edited.json", STORED])
    };
    // Ranks share rows in multiples of eight.
    let uncut = cut("\"span\": 56", "\"span\": 55");
    assert!(code(&uncut) == 4 && stdout(&uncut).contains("not asked edited.json"), "{}", stdout(&uncut));
    let unknown = cut("\"quantisation\"", "\"problem\"");
    assert!(code(&unknown) == 1 && stderr(&unknown).contains("edited.json"), "{}", stderr(&unknown));
    for (args, said) in [
        (&["--cases", "0"][..], "--cases"),
        (&["--backend", "emulated+nothing"], "there is no fault 'nothing'"),
        (&["--backend", "emulate"], "unknown quantiser"),
        (&["nowhere.json"], "nowhere.json"),
    ] {
        let refused = run(args);
        assert!(code(&refused) == 1 && stderr(&refused).contains(said), "{args:?}: {}", stderr(&refused));
    }
}
