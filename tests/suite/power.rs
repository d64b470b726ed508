//! The power table in small: the faults that the judge catches, and those that the rules of the field let pass.

use seamproof::power::rows::{PowerRow, Shape};
use seamproof::power::rules::Compared;
use seamproof::power::tensors::Tensors;
use seamproof::power::{BF16, Caught, DRAWS, FP8, Measured, PowerPlan, PowerTable, measure};
use seamproof_judge::subject::RankOutputs;
use seamproof_oracle::{InputMode, Problem, ProblemFields, blocked};

const PLAN: PowerPlan = PowerPlan { cases: 6, seed: 1 };

fn measured(name: &str, smaller: fn(Shape) -> Shape) -> Measured {
    measured_in(&BF16, name, smaller)
}

fn measured_in(table: &PowerTable, name: &str, smaller: fn(Shape) -> Shape) -> Measured {
    let row = *table.rows.iter().find(|row| row.name == name).unwrap();
    let shapes: &'static [Shape] = row.shapes.iter().copied().map(smaller).collect::<Vec<Shape>>().leak();
    let measured = measure(&PowerRow { shapes, ..row }, &table.rules, &PLAN).unwrap();
    assert_eq!(measured.judge.0.len(), PLAN.cases, "{name}: the fault shows in too few cases");
    assert_eq!(measured.rules[1].0.len(), PLAN.cases, "{name}: the fault shows in too few near-normal cases");
    measured
}

/// Test of mask faults. At the lengths that TransformerEngine tests, their effect is below its tolerance, unless
/// logits are made peaked.
#[test]
fn faults_of_masks_below_the_tolerance_are_caught_by_the_judge_alone() {
    let one_key = measured("one key of 4096 masked, for one query", |shape| Shape { queries: 16, ..shape });
    let leak = measured("3 padding keys leak into 3301", |shape| Shape { queries: 16, ..shape });
    for measured in [one_key, leak] {
        assert_eq!(measured.judge.draws(PLAN.seed), DRAWS);
        let flat = measured.rules[0].in_mode(InputMode::Flat);
        assert_eq!((flat.0.len(), flat.cases()), (PLAN.cases / 2, 0), "{measured:?}");
    }
}

/// Test of a scale that is off by less than a hundredth, which no tolerance of a hundredth sees, whatever the inputs.
#[test]
fn a_scale_that_is_slightly_off_is_caught_by_the_judge_alone() {
    let scale = measured("scale off by 2⁻⁸", |shape| Shape { queries: 64, keys: 64, ..shape });
    assert_eq!(scale.judge.draws(PLAN.seed), DRAWS);
    assert_eq!(scale.rules.map(|caught| caught.cases()), [0, 0]);
}

/// Test of an accumulator that is off by 2⁻⁸ of a row, which is one rounding of the row.
#[test]
fn a_stale_accumulator_is_below_the_tolerance() {
    let stale = measured("accumulator keeps 2⁻⁸ of another row", |shape| Shape {
        queries: 64,
        keys: 64,
        ..shape
    });
    assert_eq!(stale.judge.draws(PLAN.seed), DRAWS);
    assert_eq!(stale.rules[0].cases(), 0);
}

/// Test that the rules are no straw men: all three catch a gradient that is wrong by a factor.
#[test]
fn a_gradient_without_its_scale_is_caught_by_all_three() {
    let unscaled = measured("dS without scale", |shape| Shape { queries: 64, keys: 64, ..shape });
    let caught = [&unscaled.judge, &unscaled.rules[0], &unscaled.rules[1]];
    assert_eq!(caught.map(|caught| caught.draws(PLAN.seed)), [DRAWS; 3]);
}

#[test]
fn the_right_kernel_is_never_rejected() {
    let right = measured("no fault", |shape| Shape {
        queries: shape.queries.min(64),
        keys: shape.keys.min(64),
        mask: shape.mask,
        ..shape
    });
    let caught = [&right.judge, &right.rules[0], &right.rules[1]];
    assert_eq!(caught.map(Caught::cases), [0; 3]);
}

/// Test of the table in FP8: rules that let a rounding of 6 % pass see nothing of weights that are cut off, or of their sum. The right kernel passes them all.
#[test]
fn subtle_faults_in_fp8_are_caught_by_the_judge_alone() {
    let short = |shape: Shape| Shape { queries: 16, keys: 16, heads: 1, dim: 16, ..shape };
    for name in ["weights cut off", "row sum of rounded weights"] {
        let measured = measured_in(&FP8, name, short);
        assert_eq!(measured.judge.draws(PLAN.seed), DRAWS, "{name}: {measured:?}");
        assert_eq!(measured.rules.map(|caught| caught.cases()), [0, 0], "{name}");
    }
    let right = measured_in(&FP8, "no fault", short);
    let caught = [&right.judge, &right.rules[0], &right.rules[1]];
    assert_eq!(caught.map(Caught::cases), [0; 3]);
}

/// Test that the rule of the mean square can reject: it does where values have the scale of something sixteen times
/// as large, and where nothing is finite.
#[test]
fn the_rule_of_the_mean_square_rejects_what_is_far_off() {
    let problem = Problem::new(ProblemFields::packed(&[(8, 8)], 16)).unwrap();
    let inputs = seamproof_judge::values::inputs(&problem);
    let exact = Tensors::exact(&problem, &inputs, false);
    let accepts = |factor: f32| {
        let mut got = RankOutputs::unwritten(&problem.forward());
        got.out = blocked::forward(&problem, &inputs, None).exact.out.mapv(|out| factor * out as f32);
        let got = Tensors::of(&got);
        let compared = Compared { got: &got, exact: &exact, problem: &problem, inputs: &inputs };
        FP8.rules.map(|rule| (rule.accepts)(&compared))
    };
    assert_eq!(accepts(1.0), [true, true]);
    assert!(!accepts(16.0)[1] && accepts(f32::NAN) == [false, false]);
}

/// Test that a draw is as good as its cases: it catches nothing where no case does, and something where one does.
#[test]
fn draws_count_what_the_pool_holds() {
    let pool = |caught: usize| {
        Caught((0..40).map(|case| (InputMode::Flat, case < caught)).collect()).draws(PLAN.seed)
    };
    assert_eq!((pool(0), pool(40)), (0, DRAWS));
    // The expected share is 1 − (39/40)²⁰ = 0.397.
    assert!((340..450).contains(&pool(1)), "{}", pool(1));
}
