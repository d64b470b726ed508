//! The problems of the stored regressions. Each is legal and small enough to be judged in seconds. Together they still
//! hold what the field reported.

use std::fs;
use std::path::Path;

use seamproof_oracle::names::{TeKind, TeMask};
use seamproof_oracle::{Alignment, Problem, Sink};
use serde_json::Value;

/// The most visible pairs · query heads · larger head dimension of one case, a measure of the time that judging takes.
const WORK_MAX: u64 = 200_000_000;

/// Returns every stored regression's name and problem, in order of names.
fn problems() -> Vec<(String, Problem)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/regressions");
    let mut problems: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let case: Value = serde_json::from_str(&fs::read_to_string(path).unwrap())
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let problem = serde_json::from_value(case["problem"].clone());
            let problem = problem.unwrap_or_else(|error| panic!("{name}: {error}"));
            (name, problem)
        })
        .collect();
    problems.sort_by(|a, b| a.0.cmp(&b.0));
    problems
}

#[test]
fn every_problem_is_legal_and_small() {
    for (name, problem) in problems() {
        let work = problem.pairs() * problem.heads.q as u64 * problem.dims.qk.max(problem.dims.v) as u64;
        assert!(work <= WORK_MAX, "{name}: {work}");
    }
}

#[test]
fn the_reported_packs_are_there() {
    let lengths = |name: &str| {
        let found = problems().into_iter().find(|(other, _)| other == name);
        let (_, problem) = found.unwrap_or_else(|| panic!("{name} is missing"));
        let sequences = problem.sequences.iter();
        sequences.map(|sequence| (sequence.q.len, sequence.q.span)).collect::<Vec<_>>()
    };
    assert_eq!(lengths("te-2892-fp8-padded-pack"), [(100, 112), (150, 160), (120, 128), (130, 144)]);
    assert_eq!(lengths("te-2892-equal-offsets"), [112, 160, 128, 144].map(|len| (len, len)));
    assert_eq!(lengths("te-docstring-padded-pack"), [(3, 4), (2, 4), (4, 5)]);
    assert_eq!(lengths("te-golden-four-sequences"), [(8, 8), (8, 8), (8, 8), (16, 16)]);
    assert_eq!(lengths("te-golden-empty-middle"), [(4, 4), (0, 0), (8, 8)]);
    assert_eq!(lengths("te-1930-seven-in-eight"), [(7, 8)]);
    assert_eq!(lengths("te-3331-tail-padding-698"), [(698, 704)]);
    assert_eq!(lengths("te-2186-short-sequences"), [(9, 12), (8, 8), (8, 8), (12, 12), (8, 8), (12, 12)]);
    assert_eq!(lengths("te-2829-all-gather-pack"), [(3, 4), (13, 16)]);
    assert_eq!(lengths("te-cp-tests-2794-3301-window"), [(2794, 2796), (3301, 3304)]);
    assert_eq!(lengths("fa-2515-all-empty-pack"), [(0, 0), (0, 4), (0, 0)]);
    assert_eq!(lengths("fa-2515-no-sequences"), []);
    assert_eq!(lengths("ragged32-one-sequence"), [(2013, 2048)]);
}

/// Test of the window (512, 512) beside a causal mask, which TransformerEngine narrows to (512, 0): the stored case has
/// the narrowed one, and its neighbour the window as it is without that mask.
#[test]
fn a_causal_window_of_two_sides_is_stored_as_the_causal_one() {
    let narrowed =
        |kind| TeMask { kind, window: Some((512, 512)), bottom_right_diagonal: Some(false) }.to_mask();
    let stored = |name: &str| problems().into_iter().find(|(other, _)| other == name).map(|(_, p)| p.mask);
    let [causal, two_sided] =
        ["te-2829-all-gather-window-512-0", "te-2829-all-gather-window-512-512"].map(stored);
    assert_eq!(narrowed(TeKind::PaddingCausal).ok(), causal);
    assert_eq!(narrowed(TeKind::Padding).ok(), two_sided);
    assert_eq!(causal.and_then(|mask| mask.right), Some(0));
}

/// A claim about a problem, with its text.
type Claim = (&'static str, fn(&Problem) -> bool);

#[test]
fn the_seams_are_covered() {
    let claims: [Claim; 9] = [
        ("one query and many keys", |p| p.sequences.iter().any(|s| s.q.len == 1 && s.kv.len > 1000)),
        ("queries without keys", |p| p.sequences.iter().any(|s| s.q.len > 0 && s.kv.len == 0)),
        ("keys without queries", |p| p.sequences.iter().any(|s| s.q.len == 0 && s.kv.len > 0)),
        ("first row above 0", |p| p.sequences.iter().map(|s| s.q.offset).min().is_some_and(|row| row > 0)),
        ("rows in steps", |p| p.sequences.iter().any(|s| s.q.step > 1)),
        ("rows that see nothing", |p| {
            p.mask.align == Alignment::BottomRight && p.sequences.iter().any(|s| s.q.len > s.kv.len)
        }),
        ("a window to the right", |p| p.mask.right.is_some_and(|right| right > 0)),
        ("a learnable sink", |p| p.softmax.sink == Sink::Learnable),
        ("value dim below key dim", |p| p.dims.v < p.dims.qk),
    ];
    let problems = problems();
    for (claim, holds) in claims {
        assert!(problems.iter().any(|(_, problem)| holds(problem)), "no stored case has {claim}");
    }
}
