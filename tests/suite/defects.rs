//! Defects of the field as stored cases. Each fails on the subject that has the defect, and holds on the right one.
//! `explain` shows what is computed and what should be.

use std::fs;
use std::path::{Path, PathBuf};

use seamproof::explain::{Selection, explain};
use seamproof::replay::{replay, subject_of};
use seamproof_judge::case::Case;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_defect_fails_on_its_subject_and_is_explained() {
    let files = files();
    assert!(files.len() >= 4, "only {} defects", files.len());
    for path in files {
        let name = path.display();
        let case = Case::load(&path).unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(replay(&case), Ok(Verdict::Finding(_))), "{name}: not found");
        assert!(
            matches!(evaluate(&Emulated::default(), &case.problem), Verdict::Pass(_)),
            "{name}: not right"
        );
        let subject = subject_of(&case).unwrap_or_else(|error| panic!("{name}: {error}"));
        let schedule = subject.schedule(&case.problem).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = explain(&case.problem, &schedule, &Selection::default());
        assert!(text.contains("WRONG"), "{name}: {text}");
    }
}
