//! Problems made in steps on a cache: the right kernel gives the bits of one call, and a wrong caller is found.

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::Relation;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subjects::{Emulated, in_steps, same_bits};

use crate::one_identity::assert_found_by;

/// Returns drawn problems in more than one call.
fn drawn() -> impl Iterator<Item = Problem> {
    (0..4_000).filter_map(|index| match generate::draw(11, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem).filter(|p| p.calls().len() > 1 && is_legal(p)),
        _ => None,
    })
}

fn judged(subject: &dyn Backend, problem: &Problem) -> bool {
    matches!(evaluate(subject, problem), Verdict::Finding(_))
}

#[test]
fn steps_on_the_right_kernel_have_the_bits_of_one_call() {
    let (right, mut cached) = (Emulated::default(), 0);
    for problem in drawn().take(60) {
        let inputs = seamproof_judge::values::inputs(&problem);
        let [steps, once] = [&problem, &problem.at_once()].map(|p| right.run(p, &inputs).expect("it runs"));
        assert!(same_bits(&steps, &once), "{problem:?}");
        assert!(matches!(evaluate(&right, &problem), Verdict::Pass(_)), "{problem:?}");
        cached += usize::from(problem.sequences.iter().any(|one| one.kv.len > one.q.len));
    }
    assert!(cached > 10, "{cached}");
}

/// Test that every fault of a caller is found, and shrunk to a case that shows what it needs: how many calls, and
/// whether keys are cached at first.
#[test]
fn a_wrong_caller_is_found_and_shrunk_to_as_few_calls_as_it_needs() {
    let faults = [
        ("call-top-left-on-a-cache", 1),
        ("call-cache-row-unwritten", 2),
        ("call-appended-one-row-early", 1),
        ("call-appended-at-the-query", 1),
    ];
    for (id, calls) in faults {
        let right = Emulated::default();
        let wrong = Miscalled::new(Box::new(right), miscall(id).expect("a fault"));
        let found = drawn().find(|problem| judged(&wrong, problem)).expect(id);
        let small = shrink(&found, 2_000, |problem| judged(&wrong, problem)).problem;
        assert_eq!((small.calls().len(), small.sequences.len()), (calls, 1), "{id}: {small:?}");
        assert!(small.tokens() <= 2 && small.sequences[0].kv.len <= 2, "{id}: {small:?}");
        // One call without a cache is right.
        assert!(!judged(&wrong, &small.at_once()), "{id}");
    }
}

#[test]
fn a_failure_that_needs_no_steps_is_shrunk_to_none() {
    for problem in drawn().take(8) {
        let small = shrink(&problem, 2_000, |small| small.pairs() > 0).problem;
        assert!(small.steps.is_empty(), "{small:?}");
    }
}

/// The emulated kernel, wrong in one step alone: it scales the out of calls with one query.
struct WrongInDecoding(Promises);

impl Backend for WrongInDecoding {
    fn name(&self) -> &str {
        "wrong-in-decoding"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration().with_promises(self.0)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if !problem.steps.is_empty() {
            return in_steps(self, problem, inputs);
        }
        let mut outputs = Emulated::default().run(problem, inputs)?;
        if problem.tokens() == 1 {
            outputs.ranks[0].out.mapv_inplace(|value| 2.0 * value);
        }
        Ok(outputs)
    }
}

#[test]
fn all_steps_together_are_held_to_one_call() {
    assert_found_by(Relation::OneCall, WrongInDecoding, drawn);
}

/// Test that one failing step is shrunk to that step, as a problem of its own.
#[test]
fn a_kernel_that_is_wrong_in_one_step_is_shrunk_to_that_step() {
    let subject = WrongInDecoding(Promises::ALL);
    let found = drawn().find(|problem| judged(&subject, problem)).expect("a finding");
    let small = shrink(&found, 2_000, |problem| judged(&subject, problem)).problem;
    assert!(small.steps.is_empty() && small.tokens() == 1, "{small:?}");
}

/// Test that a table without the row takes no steps, and keeps everything else of a problem.
#[test]
fn a_subject_without_a_cache_is_asked_in_one_call() {
    let mut table = Table::widest();
    table.cache = false;
    let problem = drawn().next().expect("a problem in steps");
    assert_eq!(table.refusal(&problem), Some(Refusal::Cache));
    assert_eq!(table.fitted(problem.clone()), problem.at_once());
    table.cache = true;
    table.layout.padding = false;
    let tight = Problem::new(ProblemFields {
        mask: problem.mask,
        steps: Steps(vec![2]),
        pass: Pass::Forward,
        ..ProblemFields::packed(&[(9, 9)], 8)
    });
    // The cache is not yet full in the first call: its rows are padding there.
    assert_eq!(table.refusal(&tight.expect("steps of nine tokens")), Some(Refusal::Cache));
}

/// The emulated kernel whose largest logit is NaN in the first call of a problem.
struct NoNumberAtFirst(std::sync::atomic::AtomicBool);

impl Backend for NoNumberAtFirst {
    fn name(&self) -> &str {
        "no-number-at-first"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Emulated::default().run(problem, inputs)?;
        if self.0.swap(false, std::sync::atomic::Ordering::Relaxed) {
            outputs.ranks[0].max_logit.iter_mut().for_each(|most| most.fill(f32::NAN));
        }
        Ok(outputs)
    }
}

#[test]
fn a_largest_logit_that_is_no_number_stays_through_later_calls() {
    let mut seen = 0;
    for problem in drawn().take(20) {
        let subject = NoNumberAtFirst(true.into());
        let outputs =
            in_steps(&subject, &problem, &seamproof_judge::values::inputs(&problem)).expect("it runs");
        if let Some(most) = &outputs.ranks[0].max_logit {
            assert!(most.iter().all(|most| most.is_nan()), "{most}");
            seen += 1;
        }
    }
    assert!(seen > 0);
}
