//! Choices of a legal kernel's arithmetic: each holds on the emulated kernel that makes it and declares it, and is
//! condemned on one that makes it and declares another.

use std::collections::BTreeMap;
use std::ops::Range;

use seamproof_judge::calibrate::{Calibration, CalibrationOutcome};
use seamproof_judge::finding::Check;
use seamproof_judge::generate::{self, Draw, Limits};
use seamproof_judge::ladder::judge;
use seamproof_judge::profile::Lock;
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Emulated, difference, draw_options};
use seamproof_judge::values;
use seamproof_judge::verdict::{Tier, Verdict};
use seamproof_oracle::envelope::{Arithmetic, Delta, DsWeights, GroupSums, WeightRounding};
use seamproof_oracle::{
    Format, InputMode, Inputs, Pass, Precision, Problem, ProblemFields, Softmax, TensorName,
};

/// Returns the emulated kernel of a case with these options besides the drawn ones.
fn kernel(case: u64, options: &[(&str, &str)]) -> Emulated {
    let mut drawn: BTreeMap<String, String> = draw_options(case);
    drawn.extend(options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    Emulated::from_options(&drawn).expect("the options are legal")
}

/// Returns the drawn problem of a case that is nearest to what a kernel takes.
fn problem(seed: u64, case: u64, kernel: &dyn Backend) -> Option<Problem> {
    match generate::draw(seed, case, &Limits::quick()) {
        Draw::Problem(problem) => Some(kernel.declaration().table.fitted(problem)),
        Draw::Malformed(_) => None,
    }
}

/// Every choice alone, all of them together, and each with a declaration of nothing.
const CHOICES: [&[(&str, &str)]; 17] = [
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
    &[("soft_cap", "approximate")],
    &[("soft_cap", "approximate"), ("declares", "nothing")],
    &[("ds_weights", "rounded")],
    &[("ds_weights", "rounded"), ("delta", "weighted-dots")],
    &[
        ("ds_weights", "rounded"),
        ("delta", "weighted-dots"),
        ("group_sums", "stored"),
        ("declares", "nothing"),
    ],
    &[("merge", "difference")],
    &[("merge", "difference"), ("declares", "nothing")],
];

/// Number of cases for each choice.
const CASES: u64 = 200;
/// Number of cases for each choice where many are asked for.
const MANY: u64 = 10_000;

fn every_case_holds(choice: usize) {
    cases_hold(choice, 0..CASES);
}

/// Asserts that the kernel with a choice holds in cases of its own seed.
fn cases_hold(choice: usize, cases: Range<u64>) {
    let (mut judged, seed, all) = (0, 40 + choice as u64, cases.end - cases.start);
    for case in cases {
        let kernel = kernel(case, CHOICES[choice]);
        let Some(problem) = problem(seed, case, &kernel) else { continue };
        match judge(&kernel, &problem) {
            Verdict::Pass(_) => judged += 1,
            verdict => panic!("case {case} of {:?}: {verdict:?}\n{problem:?}", CHOICES[choice]),
        }
    }
    assert!(judged > all * 4 / 5, "only {judged} cases of {:?}", CHOICES[choice]);
}

#[test]
#[ignore = "takes minutes: run it alone"]
fn every_choice_holds_in_many_cases() {
    (0..CHOICES.len()).for_each(|choice| cases_hold(choice, CASES..CASES + MANY));
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
fn approximate_soft_caps_hold() {
    (10..12).for_each(every_case_holds);
}

#[test]
fn logit_gradients_of_rounded_weights_hold() {
    (12..15).for_each(every_case_holds);
}

#[test]
fn merges_by_a_difference_hold() {
    (15..17).for_each(every_case_holds);
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

/// A kernel that keeps its LSE to itself.
struct Hides(Emulated);

impl Backend for Hides {
    fn name(&self) -> &str {
        "hides"
    }

    fn declaration(&self) -> Declaration {
        let mut declaration = self.0.declaration();
        declaration.table.statistics.retain(|statistic| *statistic != TensorName::Lse);
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.0)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.0.run(problem, inputs)?;
        outputs.ranks.iter_mut().for_each(|rank| rank.lse = None);
        Ok(outputs)
    }
}

#[test]
fn choices_hold_where_the_lse_is_hidden() {
    for choice in [1, 2, 5, 8] {
        for case in 0..CASES {
            let kernel = Hides(kernel(case, CHOICES[choice]));
            let Some(problem) = problem(60, case, &kernel) else { continue };
            let verdict = judge(&kernel, &problem);
            assert!(matches!(verdict, Verdict::Pass(_)), "case {case} of {choice}: {verdict:?}\n{problem:?}");
        }
    }
}

/// A kernel from elsewhere, on one rank. It tells nothing about its arithmetic and its launches, and has a lock file's
/// profile.
struct Outside {
    kernel: Emulated,
    lock: Option<Lock>,
    version: &'static str,
}

impl Outside {
    fn new(options: &[(&str, &str)], lock: Option<Lock>) -> Outside {
        Outside { kernel: kernel(0, options), lock, version: "1.0" }
    }
}

impl Backend for Outside {
    fn name(&self) -> &str {
        "outside"
    }

    fn declaration(&self) -> Declaration {
        Declaration::single_rank(Format::Bf16, Format::Bf16).with_arithmetic(Arithmetic::default())
    }

    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("library".to_owned(), self.version.to_owned())])
    }

    fn lock(&self) -> Option<Lock> {
        self.lock.clone()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declaration().table.check(problem)?;
        let mut outputs = self.kernel.run(problem, inputs)?;
        outputs.ranks.iter_mut().for_each(|rank| rank.max_logit = None);
        Ok(outputs)
    }
}

#[test]
fn a_kernel_from_elsewhere_is_calibrated_locked_and_held_to_its_lock() {
    let one_tile = ("kv_tile", "4096");
    let unfused = [CHOICES[5], &[one_tile]].concat();
    let make = |_| Ok(Box::new(Outside::new(&unfused, None)) as Box<dyn Backend>);
    let calibration = Calibration::run(make, 40, 6).expect("the kernel runs");
    let CalibrationOutcome::Unique(lock) = calibration.outcome("outside", 6) else { panic!("{calibration}") };
    assert_eq!(lock.weights, Some(WeightRounding::AfterNormalisation));
    assert_eq!(lock.delta, Some(Delta::WeightedDots));
    assert_eq!(lock.group_sums, Some(GroupSums::Stored));
    assert_eq!(lock.versions["library"], "1.0");

    let verdicts = |subject: &Outside| -> Vec<Verdict> {
        (0..60).filter_map(|case| Some(judge(subject, &problem(8, case, subject)?))).collect()
    };
    let tier = |verdicts: &[Verdict]| {
        let worst = |verdict: &Verdict| match verdict {
            Verdict::Pass(margin) => margin.tier(Tier::R).worst(),
            verdict => panic!("{verdict:?}"),
        };
        verdicts.iter().map(worst).fold(0.0, f64::max)
    };
    let locked = Outside::new(&unfused, Some(*lock));
    let replayed = tier(&verdicts(&locked));
    assert!(replayed > 0.5 && replayed <= 1.0, "tier R speaks: {replayed}");
    let newer = Outside { version: "1.1", ..Outside::new(&unfused, locked.lock.clone()) };
    assert_eq!(tier(&verdicts(&newer)), 0.0, "the lock is of another version");
    let fused = Outside::new(&[one_tile], locked.lock.clone());
    let changed = |verdict: &Verdict| match verdict {
        Verdict::Finding(finding) => finding.what.contains("numerics changed"),
        _ => false,
    };
    assert!(verdicts(&fused).iter().any(changed));
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
    for choice in CHOICES[..4].iter().chain([&CHOICES[10], &CHOICES[12]]) {
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

#[test]
fn exact_modes_tell_the_orders_of_normalising_apart() {
    use InputMode::{Endpoints, Staircase, UniformCount};
    for mode in [UniformCount, Endpoints, Staircase] {
        for format in [Format::Bf16, Format::Fp16] {
            let fields = ProblemFields {
                mode,
                data_seed: 3,
                softmax: Softmax::scaled(std::f32::consts::LN_2),
                precision: Precision::uniform(format),
                ..ProblemFields::packed(&[(40, 40), (9, 23)], 16)
            };
            let problem = Problem::new(fields).expect("the fields are legal");
            let verdict = |made: &str, declared: WeightRounding| {
                let kernel = kernel(1, &[("weights", made)]);
                let arithmetic = kernel.declaration().arithmetic;
                judge(
                    &Claims { kernel, arithmetic: Arithmetic { weights: declared, ..arithmetic } },
                    &problem,
                )
            };
            let (before, after) = (WeightRounding::BeforeNormalisation, WeightRounding::AfterNormalisation);
            for (made, own, other) in
                [("before-normalisation", before, after), ("after-normalisation", after, before)]
            {
                let right = verdict(made, own);
                assert!(matches!(right, Verdict::Pass(_)), "{mode:?} {format} {made}: {right:?}");
                let unknown = verdict(made, WeightRounding::Unknown);
                assert!(matches!(unknown, Verdict::Pass(_)), "{mode:?} {format} {made}: {unknown:?}");
                // The sums of a staircase are mostly powers of two, whose reciprocals have no rounding.
                if mode != Staircase {
                    let Verdict::Finding(finding) = verdict(made, other) else {
                        panic!("{mode:?} {format} {made}")
                    };
                    assert_eq!(finding.check, Check::Exact, "{mode:?} {format} {made}: {finding}");
                }
            }
        }
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
        assert_eq!(lock.ds_weights, Some(DsWeights::Unrounded), "{options:?}");
        assert!(lock.rounds_weights && lock.kv_tile.is_none(), "{options:?}: {lock:?}");
    }
}

/// The emulated kernel on a unit that flushes subnormal results to zero. It declares nothing of its arithmetic.
struct Flushing(Emulated);

impl Backend for Flushing {
    fn name(&self) -> &str {
        "flushing"
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.0)
    }

    fn declaration(&self) -> Declaration {
        self.0.declaration().with_arithmetic(Arithmetic::default())
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = self.0.run(problem, inputs)?;
        let flush = |value: &mut f32| *value = if value.is_subnormal() { 0.0 } else { *value };
        for rank in &mut outputs.ranks {
            rank.out.iter_mut().for_each(flush);
            if let Some(of) = &mut rank.gradients {
                [&mut of.dq, &mut of.dk, &mut of.dv].into_iter().for_each(|x| x.iter_mut().for_each(flush));
            }
        }
        Ok(outputs)
    }
}

/// Test that each row of a gradient may lose its own subnormal result: the sums of dk's and dv's rows then lose one for
/// each row, and not one for each query. XLA on a CPU flushes so.
#[test]
fn a_unit_that_flushes_subnormals_is_legal() {
    let (mut asked, mut flushed) = (0, 0);
    for case in 0..400 {
        let subject = Flushing(kernel(case, &[]));
        let Some(drawn) = problem(31, case, &subject) else { continue };
        let fields = ProblemFields { mode: InputMode::Tiny, pass: Pass::Backward, ..drawn.into() };
        let Ok(tiny) = Problem::new(fields) else { continue };
        asked += 1;
        let inputs = values::inputs(&tiny);
        if let [Ok(got), Ok(kept)] = [subject.run(&tiny, &inputs), subject.0.run(&tiny, &inputs)] {
            flushed += u32::from(difference(&got, &kept).is_some());
        }
        let verdict = judge(&subject, &tiny);
        assert!(!matches!(verdict, Verdict::Finding(_)), "{tiny:?}: {verdict}");
    }
    assert!(asked > 200 && flushed > 20, "{flushed} of {asked}");
}
