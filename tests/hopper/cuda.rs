//! The CUDA device. Tests that need a Hopper GPU are ignored unless asked for, and fail without one:
//! `cargo test --release --test hopper cuda -- --ignored`

use std::collections::BTreeMap;

use assert_cmd::Command;
use seamproof::backends::{Cuda, CudaRunner};
use seamproof_judge::generate::{self, Draw, Profile};
use seamproof_judge::subject::{Backend, RunError};
use seamproof_judge::subjects::difference;
use seamproof_judge::values::{self, Poison};
use seamproof_kernels::attend::CallTables;
use seamproof_kernels::forward::AttentionKernels;
use seamproof_oracle::{Algorithm, Pass, Problem};
use seamproof_simulator::schedule::Work;

/// Returns random problems that the subject takes, with the subject.
fn problems(cases: u64, seed: u64) -> impl Iterator<Item = (Problem, Cuda)> {
    let limits = Profile::Seams.limits();
    let drawn = (0..cases).filter_map(move |case| match generate::draw(seed, case, &limits) {
        Draw::Problem(problem) => {
            let subject = Cuda::of_case(case, &problem);
            Some((problem, subject))
        }
        Draw::Malformed(_) => None,
    });
    drawn.filter(|(problem, subject)| subject.declaration().table.refusal(problem).is_none())
}

/// Test that no launch of any schedule names a key twice or a row outside of its tensors, so that the launcher takes
/// them all.
#[test]
fn every_launch_of_a_schedule_has_tables() {
    let (mut forward, mut backward, mut paged, mut regions, mut widened, mut cut) = (0, 0, 0, 0, 0, 0);
    let mut kept = [0, 0];
    let mut told: BTreeMap<&str, usize> = BTreeMap::new();
    for (problem, subject) in problems(3000, 3) {
        paged += usize::from(problem.pages.is_some());
        regions += usize::from(problem.parallel.region > 1);
        cut += usize::from(!problem.mask.is_band());
        let schedule = subject.schedule(&problem).unwrap();
        let rows = |id: seamproof_simulator::schedule::BufferId| schedule.buffers[id.0].rows;
        for operation in schedule.ranks.iter().flat_map(|program| &program.operations) {
            match &operation.work {
                Work::Attend(attend) => {
                    let tables =
                        CallTables::new(&attend.call, [rows(attend.q), rows(attend.k)], false).unwrap();
                    kept[0] += usize::from(tables.has_sink_tokens());
                    forward += 1;
                    let algorithm = problem.parallel.algorithm.name();
                    *told.entry(algorithm).or_default() += usize::from(attend.table.is_some());
                }
                Work::AttendBackward(attend) => {
                    let tables =
                        CallTables::new(&attend.call, [rows(attend.q), rows(attend.k)], true).unwrap();
                    widened += usize::from(tables.has_bands_of_keys());
                    kept[1] += usize::from(tables.has_sink_tokens());
                    backward += 1;
                }
                _ => {}
            }
        }
    }
    assert!(
        forward > 2000 && backward > 1000 && paged > 100 && regions > 50 && widened > 100 && cut > 200,
        "too little run: {forward}, {backward}, {paged}, {regions}, {widened}, {cut}"
    );
    assert!(kept.iter().all(|&count| count > 100), "too few launches with sink tokens: {kept:?}");
    let driven = told.iter().filter(|(_, told)| **told > 100).map(|(algorithm, _)| *algorithm);
    assert_eq!(driven.collect::<Vec<_>>(), ["all-gather", "all-to-all", "hierarchical", "ring"], "{told:?}");
}

/// Test that there is one launch where a sequence's bits are promised to be its own. It has one shape, which further
/// launches keep.
#[test]
fn the_shape_of_a_problem_is_that_of_its_one_launch() {
    let (mut of_one, mut others) = (0, 0);
    for (problem, subject) in problems(1000, 7) {
        assert_eq!(subject.in_shape_of(&problem), None, "the simple kernels have no shape");
        let tuned = Cuda { attention: AttentionKernels::Tuned, ..subject };
        let forward = tuned.ways(&problem).first().is_some_and(|way| way.taken);
        match tuned.in_shape_of(&problem) {
            Some(in_shape) => {
                assert!(forward && problem.parallel.algorithm == Algorithm::Single, "{problem:?}");
                assert!(matches!(in_shape.attention, AttentionKernels::Of(_)));
                assert_eq!(in_shape.in_shape_of(&problem), Some(in_shape));
                of_one += 1;
            }
            None => {
                let alone = problem.parallel.algorithm == Algorithm::Single && problem.parallel.region == 1;
                let of_one_launch = alone && problem.steps.is_empty();
                assert!(!forward || !of_one_launch, "{problem:?}");
                others += 1;
            }
        }
    }
    assert!(of_one > 50 && others > 50, "too little run: {of_one}, {others}");
}

/// Test of large forwards, also of groups of ranks, with every identity that fits them.
#[test]
#[ignore = "needs a Hopper GPU"]
fn large_forwards_hold_with_every_identity() {
    Command::cargo_bin("seamproof")
        .unwrap()
        .args(["kernels", "judge", "--cases", "8", "--sample", "16", "--identities", "15"])
        .assert()
        .success();
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn every_schedule_gives_the_bits_of_the_cpu_device() {
    let mut runner = CudaRunner::open(0).unwrap_or_else(|error| panic!("{error}"));
    let mut seen: BTreeMap<(&str, bool), u32> = BTreeMap::new();
    let (mut steps, mut paged, mut regions, mut cut, mut kept) = (0, 0, 0, 0, 0);
    for (problem, subject) in problems(4000, 5) {
        steps += u32::from(!problem.steps.is_empty());
        paged += u32::from(problem.pages.is_some());
        regions += u32::from(problem.parallel.region > 1);
        cut += u32::from(!problem.mask.is_band());
        kept += u32::from(problem.mask.left.is_some() && problem.mask.sink_tokens > 0);
        let mut inputs = values::inputs(&problem);
        values::poison(&mut inputs, &problem, Poison::Nan);
        let want = subject.twin().run(&problem, &inputs).unwrap();
        let got = runner.run(&subject, &problem, &inputs, &mut |_| {});
        let got = got.unwrap_or_else(|error: RunError| panic!("{error}: {problem:?}"));
        if let Some(what) = difference(&got, &want) {
            panic!("{what}: {problem:?}");
        }
        let algorithm = problem.parallel.algorithm.name();
        *seen.entry((algorithm, problem.pass == Pass::Backward)).or_default() += 1;
    }
    assert!(seen.len() == 10 && seen.values().all(|&count| count >= 50), "too little run: {seen:?}");
    assert!(
        steps >= 50 && paged >= 50 && regions >= 50 && cut >= 200 && kept >= 100,
        "too little run: {steps} in steps, {paged} in pages, {regions} in regions, {cut} cut, with a prefix or with \
         sink tokens, {kept} with sink tokens beside a window"
    );
}

/// Test that each planted fault of an attention kernel is found by a rung that it names.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_fault_in_a_kernel_is_found() {
    Command::cargo_bin("seamproof")
        .unwrap()
        .args(["faults", "--gpu", "--score", "--quick", "--workers", "16"])
        .assert()
        .success();
}

/// Test that the kernels are right, and that a wrong call of them is found despite their own rounding.
#[test]
#[ignore = "needs a Hopper GPU"]
fn a_fault_at_the_call_of_a_kernel_is_found() {
    for backend in ["cuda", "cuda:attention=long,dq=any"] {
        Command::cargo_bin("seamproof")
            .unwrap()
            .args(["faults", "--score", "--quick", "--backend", backend])
            .assert()
            .success();
    }
}

/// Test that the reported bugs' cases also hold on the kernels on tensor cores, wherever these take a case.
#[test]
#[ignore = "needs a Hopper GPU"]
fn stored_cases_hold_on_tensor_cores() {
    // The variable names another folder where the test programs were carried to another machine.
    let stored = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/regressions");
    let regressions = std::env::var_os("SEAMPROOF_REGRESSIONS").unwrap_or_else(|| stored.into());
    for backend in ["cuda:attention=tuned", "cuda:attention=tuned,dq=any"] {
        let mut replay = Command::cargo_bin("seamproof").unwrap();
        replay.arg("replay").arg(&regressions).args(["--backend", backend]).assert().success();
    }
}
