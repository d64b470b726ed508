//! The stored regressions as cases: they read, they say why they are kept, and nothing in them is written twice.

use std::fs;
use std::path::{Path, PathBuf};

use seamproof::case::{CASE_VERSION, Case, InputSource};
use seamproof::evaluate::replay;
use seamproof::prove::{Proved, prove};
use seamproof::verdict::Verdict;
use seamproof_simulator::schedule::MergeOrder;
use serde_json::Value;

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/regressions");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_file_is_a_case_with_its_story() {
    for path in files() {
        let name = path.display();
        let text = fs::read_to_string(&path).unwrap();
        let case: Case = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(case.version, CASE_VERSION, "{name}");
        assert_eq!(case.inputs, InputSource::Generated, "{name}");
        assert_eq!(case.found, None, "{name}: a regression is a case that passes");
        let story = case.story.as_ref().unwrap_or_else(|| panic!("{name} has no story"));
        assert!(story.text.ends_with('.'), "{name}");
        assert!(!story.sources.is_empty(), "{name}");
        for source in &story.sources {
            assert!(source.starts_with("https://github.com/"), "{name}: {source}");
        }
    }
}

/// What is read is all that the file says, and defaults are left out: writing the case gives the same JSON.
#[test]
fn every_file_is_what_its_case_is_written_as() {
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        let case: Case = serde_json::from_str(&text).unwrap();
        let written = serde_json::to_string(&case).unwrap();
        let (written, stored): (Value, Value) =
            (serde_json::from_str(&written).unwrap(), serde_json::from_str(&text).unwrap());
        assert_eq!(written, stored, "{}", path.display());
    }
}

#[test]
fn names_are_plain() {
    for path in files() {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let stem = name.strip_suffix(".json").unwrap_or_else(|| panic!("{name} is no JSON file"));
        assert!(stem.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'), "{name}");
    }
}

/// Every regression holds on its subject, and its schedule is proved.
#[test]
fn every_regression_replays() {
    let files = files();
    assert!(files.len() >= 40, "only {} regressions", files.len());
    for path in files {
        let name = path.display();
        let case = Case::load(&path).unwrap_or_else(|error| panic!("{error}"));
        match replay(&case) {
            Ok(Verdict::Pass(_)) => {}
            verdict => panic!("{name}: {verdict:?}"),
        }
        for &order in MergeOrder::of(case.problem.parallel.algorithm) {
            assert!(matches!(prove(&case.problem, order), Proved::Held(_)), "{name}: not proved");
        }
    }
}

/// A fuzzer that cannot read its seeds begins with nothing, and says nothing of it.
#[test]
fn every_seed_of_case_value_is_a_value_and_seeds_are_few() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/fuzz");
    let (mut values, mut bytes) = (0, 0);
    for target in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        for seed in fs::read_dir(target.path()).unwrap().map(|entry| entry.unwrap()) {
            let text = fs::read(seed.path()).unwrap();
            bytes += text.len();
            if target.file_name() == "case_value" {
                assert!(seamproof::fuzz::from_bytes(&text).is_some(), "{}", seed.path().display());
                values += 1;
            }
        }
    }
    assert!(values > 100 && bytes < 2 << 20, "{values} values, {bytes} bytes in all");
}
