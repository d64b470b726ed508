//! Choices of a legal kernel's arithmetic: each holds on the emulated kernel that makes it and declares it, and is
//! condemned on one that makes it and declares another.

use std::collections::BTreeMap;

use seamproof_judge::calibrate::{Calibration, CalibrationOutcome};
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::profile::Lock;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Emulated, draw_options};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::envelope::{Arithmetic, Delta, GroupSums, WeightRounding};
use seamproof_oracle::{Inputs, Problem};

/// Returns the emulated kernel of a case with these options besides the drawn ones.
fn kernel(case: u64, options: &[(&str, &str)]) -> Emulated {
    let mut drawn: BTreeMap<String, String> = draw_options(case);
    drawn.extend(options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    Emulated::from_options(&drawn).expect("the options are legal")
}

/// Returns the drawn problem of a case that is nearest to what a kernel takes.
fn problem(seed: u64, case: u64, kernel: &dyn Backend) -> Option<Problem> {
    match generate::draw(seed, case, &Limits::quick()) {
        Draw::Problem(problem) => Some(kernel.fitted(problem)),
        Draw::Malformed(_) => None,
    }
}

/// Every choice alone, all of them together, and each with a declaration of nothing.
const CHOICES: [&[(&str, &str)]; 10] = [
    &[("weights", "after-normalisation")],
    &[("delta", "weighted-dots")],
    &[("delta", "unrounded-out")],
    &[("group_sums", "stored")],
    &[("results", "f32")],
    &[("weights", "after-normalisation"), ("delta", "weighted-dots"), ("group_sums", "stored")],
    &[("weights", "after-normalisation"), ("delta", "unrounded-out"), ("results", "f32")],
    &[("declares", "nothing")],
    &[("weights", "after-normalisation"), ("delta", "weighted-dots"), ("declares", "nothing")],
    &[("delta", "unrounded-out"), ("group_sums", "stored"), ("declares", "nothing")],
];

/// Number of cases for each choice. More are judged where this variable says so.
fn cases() -> u64 {
    std::env::var("SEAMPROOF_CHOICE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(120)
}

fn every_case_holds(choice: usize) {
    let (mut judged, seed) = (0, 40 + choice as u64);
    for case in 0..cases() {
        let kernel = kernel(case, CHOICES[choice]);
        let Some(problem) = problem(seed, case, &kernel) else { continue };
        match judge(&kernel, &problem) {
            Verdict::Pass(_) => judged += 1,
            verdict => panic!("case {case} of {:?}: {verdict:?}\n{problem:?}", CHOICES[choice]),
        }
    }
    assert!(judged > cases() * 4 / 5, "only {judged} cases of {:?}", CHOICES[choice]);
}

#[test]
fn weights_normalised_first_hold() {
    every_case_holds(0);
}

#[test]
fn weighted_dots_hold() {
    every_case_holds(1);
}

#[test]
fn an_unrounded_out_holds() {
    every_case_holds(2);
}

#[test]
fn stored_heads_hold() {
    every_case_holds(3);
}

#[test]
fn results_in_f32_hold() {
    every_case_holds(4);
}

#[test]
fn choices_together_hold() {
    (5..7).for_each(every_case_holds);
}

#[test]
fn what_declares_nothing_holds() {
    (7..10).for_each(every_case_holds);
}

/// A kernel under another's declaration.
struct Claims {
    kernel: Emulated,
    arithmetic: Arithmetic,
}

impl Backend for Claims {
    fn name(&self) -> &str {
        "claims"
    }

    fn declaration(&self) -> Declaration {
        self.kernel.declaration().with_arithmetic(self.arithmetic)
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.kernel)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.kernel.run(problem, inputs)
    }
}

#[test]
fn a_choice_that_is_not_declared_is_condemned() {
    for choice in &CHOICES[..4] {
        let condemned = (0..200).find(|&case| {
            let kernel = kernel(case, choice);
            let Some(problem) = problem(7, case, &kernel) else { return false };
            let accumulation = kernel.declaration().arithmetic.accumulation;
            let claims = Claims { kernel, arithmetic: Arithmetic::flash_attention(accumulation) };
            matches!(judge(&claims, &problem), Verdict::Finding(_))
        });
        assert!(condemned.is_some(), "{choice:?}");
    }
}

/// Returns the profile that is found of a kernel with these options that declares nothing.
fn found(options: &[(&str, &str)]) -> Lock {
    let options: Vec<(&str, &str)> = options.iter().copied().chain([("declares", "nothing")]).collect();
    let make = |index: u64| Ok(Box::new(kernel(index, &options)) as Box<dyn Backend>);
    let calibration = Calibration::run(make, 40, 5).expect("the kernel runs");
    assert!(calibration.doubt() < 1e-2, "{calibration}");
    match calibration.outcome("emulated", 5) {
        CalibrationOutcome::Unique(lock) => *lock,
        outcome => panic!("{options:?}: {outcome:?}\n{calibration}"),
    }
}

#[test]
fn calibration_finds_the_choices_of_a_kernel_that_declares_nothing() {
    use {Delta::*, GroupSums::*, WeightRounding::*};
    let kernels: [(&[(&str, &str)], _); 4] = [
        (&[], (BeforeNormalisation, StoredOut, F32)),
        (CHOICES[5], (AfterNormalisation, WeightedDots, Stored)),
        (CHOICES[2], (BeforeNormalisation, UnroundedOut, F32)),
        (CHOICES[3], (BeforeNormalisation, StoredOut, Stored)),
    ];
    for (options, (weights, delta, group_sums)) in kernels {
        let lock = found(options);
        let got = (lock.weights, lock.delta, lock.group_sums);
        assert_eq!(got, (Some(weights), Some(delta), Some(group_sums)), "{options:?}");
        assert!(lock.rounds_weights && lock.kv_tile.is_none(), "{options:?}: {lock:?}");
    }
}
