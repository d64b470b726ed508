//! Recorded runs in this process: right ones hold whatever is drawn, wrong ones do not, and no bytes make the readers
//! panic.

use std::fs;
use std::path::Path;

use seamproof::backends::by_name;
use seamproof::recording::{
    self, MANIFEST, Made, Manifest, RankFile, RankPlace, Sample, Share, rank_file_name,
};
use seamproof_judge::generate::{Draw, Limits, draw};
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Emulated, SubjectName, draw_options};
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::sharding::layouts;
use seamproof_oracle::{Algorithm, Balance, ContextParallel, InputMode, Mask, Pass, Problem, ProblemFields};

const SEED: u64 = 0x5ec0;
const CASES: u64 = 400;
/// Number of cases that are recorded. Each file waits for the disk.
const RECORDED: u64 = 120;

fn drawn(index: u64) -> Option<Problem> {
    match draw(SEED, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    }
}

/// Runs a problem and writes the recording; `None` where the subject or the recording refuses the problem.
pub(super) fn recorded(
    dir: &Path,
    subject: &dyn Backend,
    problem: &Problem,
    tables: bool,
) -> Option<Manifest> {
    let mut inputs = values::inputs(problem);
    let [strongest, _] = Poison::fills(subject.declaration().padding.inputs, problem);
    values::poison(&mut inputs, problem, strongest);
    let outputs = subject.run(problem, &inputs).ok()?;
    let made = Made { backend: subject, name: "drawn".into(), problem, inputs: &inputs, outputs, tables };
    Some(recording::write(dir, made).expect("the recording is written"))
}

/// Returns the manifest of a drawn case's recording; `None` where the case cannot be recorded.
pub(super) fn manifest_of_draw(index: u64) -> Option<String> {
    let place = tempfile::tempdir().expect("a temporary directory");
    recorded(place.path(), &Emulated::default(), &drawn(index)?, false)?;
    Some(fs::read_to_string(place.path().join(MANIFEST)).expect("the manifest is written"))
}

fn judged(dir: &Path, sample: Option<Sample>) -> Verdict {
    recording::judge(&recording::read(dir).expect("the recording is read"), sample, None)
        .expect("the files are the same")
}

#[test]
fn right_runs_hold_and_are_read_back_as_they_were() {
    let (mut held, mut regions, mut shared, mut ranks) = (0, 0, 0, [0; Algorithm::ALL.len()]);
    for index in 0..RECORDED {
        let Some(problem) = drawn(index) else { continue };
        let subject = Emulated::from_options(&draw_options(index)).expect("drawn options are taken");
        let place = tempfile::tempdir().expect("a temporary directory");
        let Some(manifest) = recorded(place.path(), &subject, &problem, index % 2 == 0) else { continue };
        let verdict = judged(place.path(), (index % 3 == 0).then_some(Sample { rows: 8, seed: index }));
        assert!(matches!(verdict, Verdict::Pass(_)), "case {index}: {verdict}");
        assert_eq!(recording::read(place.path()).expect("it is read").manifest, manifest);
        held += 1;
        regions += usize::from(problem.parallel.region > 1);
        shared += usize::from(!problem.sharing.is_empty());
        ranks[problem.parallel.algorithm.number()] += 1;
    }
    let enough = held > RECORDED / 2 && regions > 1 && shared > 1 && ranks.iter().all(|count| *count > 0);
    assert!(enough, "{held}, {regions} in regions, {shared} with shared keys, {ranks:?}");
}

/// Test on a ring whose keys come one step late: the finding says so, and of which chunk.
#[test]
fn a_late_step_is_told_of_the_chunk_that_it_befell() {
    let fields = ProblemFields {
        mask: Mask::CAUSAL,
        mode: InputMode::Flat,
        parallel: ContextParallel::over(4, Algorithm::Ring, Balance::DualChunk),
        ..ProblemFields::packed(&[(64, 64)], 16)
    };
    let problem = Problem::new(fields).expect("a problem");
    let subject = by_name("emulated+kv-of-another-step", &Default::default()).expect("a fault");
    let place = tempfile::tempdir().expect("a temporary directory");
    recorded(place.path(), subject.as_ref(), &problem, true).expect("it is recorded");
    let Verdict::Finding(finding) = judged(place.path(), None) else { panic!("it is wrong") };
    let told = "looks as if rank 1's first chunk of sequence 0 took its own keys in the place of those of rank 0, 1 step late";
    assert!(finding.what.contains(told), "{}", finding.what);
}

/// Test that a run of the subject of a profile holds in tier R too, on several ranks and in parts by heads, and that the
/// run of a kernel with other tiles does not.
#[test]
fn the_roundings_of_a_locked_profile_are_asked_for() {
    let options = |text: &str| text.parse::<SubjectName>().expect("a name").options;
    let subjects = ["emulated:q_tile=16,kv_tile=16", "emulated:q_tile=16,kv_tile=32"]
        .map(|name| Emulated::from_options(&options(name)).expect("the options are taken"));
    let (mut replayed, mut other, mut parallel) = (0, 0, 0);
    for problem in (0..RECORDED).filter_map(drawn) {
        let place = tempfile::tempdir().expect("a temporary directory");
        if recorded(place.path(), &subjects[0], &problem, false).is_none() {
            continue;
        }
        let read = recording::read(place.path()).expect("the recording is read");
        let [own, others] = subjects.map(|subject| recording::profiled(&read, &subject).ok());
        let Some((own, others)) = own.zip(others) else { continue };
        let judged =
            |profiled| recording::judge(&read, None, Some(profiled)).expect("the files are the same");
        let verdict = judged(&own);
        assert!(matches!(verdict, Verdict::Pass(_)), "{verdict}");
        replayed += 1;
        parallel += usize::from(problem.parallel.size() > 1);
        other += usize::from(matches!(judged(&others), Verdict::Finding(_)));
    }
    assert!(
        replayed > 30 && parallel > 10 && other > 3,
        "{replayed}, {parallel} parallel, {other} of others"
    );
}

#[test]
fn a_recording_allows_at_least_the_roundings_that_the_schedule_makes() {
    for problem in (0..CASES).filter_map(drawn) {
        let subject = Emulated::default();
        if subject.schedule(&problem).is_err() {
            continue;
        }
        let made = subject.partition(&problem);
        let arithmetic = subject.declaration().arithmetic;
        let allowed = recording::RecordedArithmetic::of(arithmetic, made).partition(&problem.parallel);
        assert!(allowed.merges.count >= made.merges.count, "{made:?} {allowed:?}");
        assert!(allowed.sums.count >= made.sums.count, "{made:?} {allowed:?}");
        assert!(allowed.q_tile <= made.q_tile && allowed.kv_tile <= made.kv_tile, "{made:?} {allowed:?}");
    }
}

/// Returns a small recording of two ranks with everything in it: its manifest and the bytes of the files.
fn small() -> (Vec<u8>, Vec<u8>) {
    let is_small = |problem: &Problem| {
        problem.parallel.size() == 2
            && problem.parallel.region == 1
            && problem.pass == Pass::Backward
            && problem.learnable_sinks() > 0
            && problem.elements() < 4000
    };
    let place = tempfile::tempdir().expect("a temporary directory");
    let written = (0..)
        .filter_map(drawn)
        .filter(is_small)
        .find(|problem| recorded(place.path(), &Emulated::default(), problem, true).is_some());
    assert!(written.is_some());
    let bytes = |name: &str| fs::read(place.path().join(name)).expect("the file is written");
    (bytes(MANIFEST), bytes(&rank_file_name(1)))
}

#[test]
fn no_changed_byte_makes_a_reader_panic() {
    let (manifest, file) = small();
    let path = Path::new("FILE");
    let (known, problem) = Manifest::parse(path, &manifest).expect("the manifest is read");
    let of_tables =
        RankPlace { manifest: &known, problem: &problem, rank: 1, layout: None, share: Share::all(&problem) };
    RankFile::parse(path, &file, of_tables).expect("the rank file is read");
    let layouts = layouts(&problem).expect("the rule cuts it");
    let one_line = |error: recording::RecordingError| {
        let said = error.to_string();
        assert!(said.starts_with("FILE: ") && !said.contains('\n') && said.len() < 2000, "{said}");
    };
    for (at, other) in
        (0..manifest.len()).flat_map(|at| [0x00, 0x20, 0x39, 0x80, 0xff].map(|other| (at, other)))
    {
        let mut bytes = manifest.clone();
        bytes[at] = other;
        let _ = Manifest::parse(path, &bytes).map_err(one_line);
    }
    let header = 8 + usize::from(file[0]) + (usize::from(file[1]) << 8);
    for (at, other) in (0..header).flat_map(|at| [0x00, 0x20, 0x39, 0x80, 0xff].map(|other| (at, other))) {
        let mut bytes = file.clone();
        bytes[at] = other;
        for layout in [None, Some(&layouts[1])] {
            let _ = RankFile::parse(path, &bytes, RankPlace { layout, ..of_tables }).map_err(one_line);
        }
    }
    for length in 0..file.len() {
        assert!(RankFile::parse(path, &file[..length], of_tables).map_err(one_line).is_err());
    }
}
