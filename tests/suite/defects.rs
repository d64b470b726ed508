//! Defects of the field as stored cases. Each fails on the subject that has the defect, and holds on the right one.
//! Where the schedule is wrong, `explain` shows what is computed and what should be; a wrong scale or format of codes in
//! FP8 is no fault of it. Kernels of others are not here to be run; their cases have an adapter and a page.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use seamproof::explain::{Selection, explain};
use seamproof::replay::{replay, subject_of};
use seamproof_judge::case::{Case, Subject};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::subjects::{Fp8, SubjectName};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::Pass;

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/defects");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn has_a_page_and_an_adapter(path: &Path, case: &Case) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = root.join("docs/findings").join(path.file_name().expect("a file"));
    for kind in ["md", "py"] {
        assert!(page.with_extension(kind).is_file(), "{}: no page in {kind}", page.display());
    }
    let name = case.subject.name.strip_prefix(SubjectName::PYTHON).expect("a Python subject");
    let (file, subject) = name.rsplit_once(':').expect("a named subject");
    let adapter = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let is_there =
        adapter.contains(&format!("def {subject}(")) || adapter.contains(&format!("\n{subject} = "));
    assert!(is_there, "{file} has no {subject}");
}

/// Returns the emulated kernel that takes a case of another's subject.
fn ours(case: &Case) -> Subject {
    let pass = if case.problem.pass == Pass::Backward { "both" } else { "forward" };
    let given = [("sequence", "cudnn"), ("pass", pass)].map(|(name, value)| (name.into(), value.into()));
    match case.problem.precision.q.format.saturates() {
        true => Subject { name: Fp8::NAME.into(), options: BTreeMap::from(given) },
        false => Subject { name: "emulated".into(), options: BTreeMap::new() },
    }
}

/// Returns the subject of a case without its planted fault.
fn without_fault(case: &Case) -> Subject {
    let name = case.subject.name.split('+').next().unwrap_or_default();
    Subject { name: name.into(), ..case.subject.clone() }
}

#[test]
fn every_defect_fails_on_its_subject_and_is_explained() {
    let files = files();
    assert!(files.len() >= 4, "only {} defects", files.len());
    for path in files {
        let name = path.display();
        let case = Case::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let outside = SubjectName::from(&case.subject).is_outside();
        let right = if outside { ours(&case) } else { without_fault(&case) };
        let right =
            subject_of(&Case { subject: right, ..case.clone() }).unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(evaluate(&*right, &case.problem), Verdict::Pass(_)), "{name}: not right");
        if outside {
            has_a_page_and_an_adapter(&path, &case);
            continue;
        }
        assert!(matches!(replay(&case), Ok(Verdict::Finding(_))), "{name}: not found");
        let subject = subject_of(&case).unwrap_or_else(|error| panic!("{name}: {error}"));
        let schedule = subject.schedule(&case.problem).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = explain(&case.problem, &schedule, &Selection::default());
        let is_of_codes = case.subject.name.starts_with(Fp8::NAME);
        assert_eq!(text.contains("WRONG"), !is_of_codes, "{name}: {text}");
    }
}
