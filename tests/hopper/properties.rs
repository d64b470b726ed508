//! Property tests over the campaign's own generator and shrinker, generic over the subject.
//!
//! A failure prints the minimal problem as JSON, ready for `seamproof replay`.

use proptest::test_runner::{Config, TestCaseError, TestRunner};
use seamproof::backends::{self, Cuda};
use seamproof_judge::generate::{self, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::strategy::problems;
use seamproof_judge::subject::Backend;
use seamproof_judge::subjects::{Arithmetic, Emulated};
use seamproof_judge::verdict::Verdict;
use seamproof_kernels::backward::DqOrder;
use seamproof_kernels::forward::AttentionKernels;
use seamproof_oracle::{Balance, Problem};
use seamproof_simulator::emulated::Tiles;

fn runner(cases: u32) -> TestRunner {
    // Seed files lose their meaning when the generator changes, so the shrunk problem itself is printed instead.
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

/// Whether the subject holds on a problem; false for a refusal exactly as its table says.
fn holds(backend: &dyn Backend, problem: &Problem) -> Result<bool, TestCaseError> {
    match judge(backend, problem) {
        Verdict::Pass(_) => Ok(true),
        Verdict::Refused(_) | Verdict::RefusedMalformed(_) => Ok(false),
        Verdict::Finding(finding) => {
            let problem = serde_json::to_string(problem).unwrap_or_default();
            Err(TestCaseError::fail(format!("{finding}\n{problem}")))
        }
        Verdict::TooLarge(what) | Verdict::Infrastructure(what) => Err(TestCaseError::fail(what)),
    }
}

/// Checks the property for any subject: every drawn problem holds that its table takes, or the nearest one that it takes.
fn every_problem_holds(backend: &dyn Backend, cases: u32, limits: Limits) {
    let (held, table) = (std::cell::Cell::new(0), backend.declaration().table);
    runner(cases)
        .run(&problems(limits), |problem| {
            held.set(held.get() + u32::from(holds(backend, &table.fitted(problem))?));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{}: {failure}", backend.name()));
    assert!(held.get() > cases / 10 * 9, "only {} of {cases} cases were judged", held.get());
}

#[test]
fn the_emulated_kernel_is_right_on_drawn_problems() {
    every_problem_holds(&Emulated::default(), 400, Limits::quick());
    every_problem_holds(
        &Emulated { tiles: Tiles { q: 1, kv: 16 }, order: 7, ..Emulated::default() },
        300,
        Limits::seams(),
    );
}

#[test]
fn the_tensor_core_model_is_right_on_drawn_problems() {
    let hopper = Emulated { arithmetic: Arithmetic::Hopper, ..Emulated::default() };
    every_problem_holds(&hopper, 300, Limits::quick());
    every_problem_holds(
        &Emulated { tiles: Tiles { q: 64, kv: 16 }, order: 7, ..hopper },
        200,
        Limits::seams(),
    );
}

/// Test of the kernels on a GPU with the same strategies.
#[test]
#[ignore = "needs a Hopper GPU"]
fn the_kernels_are_right_on_drawn_problems() {
    for attention in AttentionKernels::ALL {
        for dq in DqOrder::ALL {
            let kernels = Cuda { attention, dq, ..Cuda::default() };
            every_problem_holds(&kernels, 100, Limits::quick());
            every_problem_holds(&Cuda { order: 7, streams: 4, ..kernels }, 60, Limits::seams());
        }
    }
}

/// Test that enough is left of what is drawn for the test on a GPU, which seldom runs.
#[test]
fn the_kernels_take_the_nearest_of_nearly_all_drawn_problems() {
    for attention in AttentionKernels::ALL {
        let table = Cuda { attention, ..Cuda::default() }.declaration().table;
        let taken = std::cell::Cell::new(0);
        let drawn = runner(200).run(&problems(Limits::quick()), |problem| {
            taken.set(taken.get() + u32::from(table.refusal(&table.fitted(problem)).is_none()));
            Ok(())
        });
        assert!(drawn.is_ok() && taken.get() > 180, "{attention:?}: {} of 200", taken.get());
    }
}

#[test]
fn the_emulated_kernel_is_right_on_the_whole_tiny_space() {
    let backends = [
        Emulated { tiles: Tiles { q: 1, kv: 1 }, order: 7, ..Emulated::default() },
        Emulated { tiles: Tiles { q: 2, kv: 2 }, order: 7, ..Emulated::default() },
        Emulated { arithmetic: Arithmetic::Hopper, ..Emulated::default() },
    ];
    let mut judged = 0;
    for (index, problem) in generate::tiny().enumerate() {
        match judge(&backends[index % backends.len()], &problem) {
            Verdict::Pass(_) => judged += 1,
            verdict => panic!("{verdict:?}\n{}", serde_json::to_string(&problem).unwrap()),
        }
    }
    assert!(judged >= 1_000, "only {judged} problems in the tiny space");
}

#[test]
fn the_planted_canary_is_found_and_shrunk_by_proptest() {
    let canary = backends::canary();
    let failure =
        runner(1_000).run(&problems(Limits::quick()), |problem| holds(canary.as_ref(), &problem).map(|_| ()));
    let Err(proptest::test_runner::TestError::Fail(_, minimal)) = failure else {
        panic!("the canary was not found: {failure:?}");
    };
    // Where the fault is in a launch on the edges of wide stripes, no problem without them shows it.
    let stripe = match minimal.parallel.balance {
        Balance::Striped { stripe } => stripe,
        Balance::Contiguous | Balance::DualChunk => 1,
    };
    assert!(minimal.sequences.len() <= 1 && minimal.tokens() <= 4 * stripe, "{minimal:?}");
}
