//! The tables of accuracy in small: what a choice costs is what its arithmetic says.

use seamproof::accuracy::arithmetic::{BACKWARD, Choice, FORWARD, Measured, Table};
use seamproof::accuracy::codes::{COLUMNS, ROWS};
use seamproof::accuracy::{AccuracyPlan, Errors};
use seamproof::power::tensors::Tensors;
use seamproof_judge::values;
use seamproof_oracle::{Format, Pass, Precision, Problem, ProblemFields};

const PLAN: AccuracyPlan = AccuracyPlan { cases: 2, seed: 1 };

fn of_codes(row: &str, column: &str) -> f64 {
    let row = ROWS.iter().find(|of| of.name == row).unwrap();
    row.error(COLUMNS.iter().find(|of| of.name == column).unwrap(), &PLAN).unwrap()
}

fn measured(table: &Table, row: &str) -> Measured {
    let (_, choice) = table.rows.iter().find(|(name, _)| *name == row).unwrap();
    table.measure(*choice, &PLAN).unwrap()
}

/// Returns the error of a result in a mode.
fn error(table: &Table, row: &str, mode: &str, result: usize) -> f64 {
    let place = table.modes.iter().position(|(name, _)| *name == mode).unwrap();
    let Errors(of_mode) = measured(table, row).errors[place];
    of_mode[result]
}

#[test]
fn a_bit_less_costs_twice_the_error() {
    let tensor = ["e4m3, a scale for each tensor", "e5m2, a scale for each tensor"];
    let [e4m3, e5m2] = tensor.map(|row| of_codes(row, "flat"));
    // Roundings of a format with four bits are some 2.6 % of a value, in the root of the mean of squares. The weights of
    // flat rows come of three such tensors, and out mostly of v.
    assert!((0.02..0.05).contains(&e4m3), "{e4m3}");
    assert!((1.8..2.2).contains(&(e5m2 / e4m3)), "{e5m2} and {e4m3}");
}

#[test]
fn an_amax_that_is_too_small_costs_more_than_one_that_is_too_large() {
    let right = of_codes("e4m3, a scale for each tensor", "flat");
    let large = of_codes("the same, an amax 16 times too large", "flat");
    let small = of_codes("the same, an amax 2 times too small", "flat");
    assert!((0.9..1.1).contains(&(large / right)), "{large} and {right}");
    assert!(small > 3.0 * right, "{small} and {right}");
    // Small values then fall below the format's normal numbers.
    let uneven = COLUMNS[3].name;
    assert!(of_codes("the same, an amax 16 times too large", uneven) > 2.0 * right);
    assert!(of_codes("e4m3, for each sequence and head", uneven) < 1.1 * right);
}

#[test]
fn weights_below_the_floor_are_lost_without_their_factor() {
    let table = Table { lengths: (4, 1024), ..FORWARD };
    let first = table.rows[1].0;
    assert!(error(&table, first, "shadowed", 0) < 0.05);
    assert!(error(&table, "weights as they are", "shadowed", 0) > 0.5);
    assert!(
        error(&table, "weights cut towards zero", "of one sign", 0)
            > 10.0 * error(&table, first, "of one sign", 0)
    );
}

#[test]
fn sums_of_one_sign_stop_growing_where_they_are_never_promoted() {
    let table = Table { lengths: (4, 4096), ..FORWARD };
    let first = table.rows[1].0;
    assert!(
        error(&table, "sums never promoted", "of one sign", 0)
            > 10.0 * error(&table, first, "of one sign", 0)
    );
    // Of both signs the roundings of weights are larger.
    assert!(error(&table, "sums never promoted", "flat", 0) < 1.1 * error(&table, first, "flat", 0));
}

#[test]
fn a_kernel_that_does_what_it_declares_is_not_seen() {
    let (forward, backward) =
        (Table { lengths: (8, 512), ..FORWARD }, Table { lengths: (64, 64), ..BACKWARD });
    assert_eq!(measured(&forward, forward.rows[1].0).seen, Some([0, 0]));
    assert_eq!(measured(&backward, backward.rows[1].0).seen, Some([0, 0]));
    let [alone, locked] = measured(&forward, "weights cut towards zero").seen.unwrap();
    assert!(locked > alone && locked >= forward.modes.len(), "{alone} and {locked} cases");
    assert_eq!(measured(&forward, "bf16").seen, None);
}

#[test]
fn an_out_in_e4m3_costs_dq_of_steep_rows_most() {
    let table = Table { lengths: (128, 128), ..BACKWARD };
    let given = "results and dS in e4m3 with given scales";
    let [dq, dv] = [1, 3].map(|result| error(&table, given, "steep", result));
    assert!(dq > 3.0 * dv, "{dq} and {dv}");
    assert!(dq > 3.0 * error(&table, table.rows[1].0, "steep", 1), "{dq}");
}

#[test]
fn every_row_can_be_measured() {
    let plan = AccuracyPlan { cases: 1, seed: 3 };
    for table in [FORWARD, BACKWARD] {
        let table = Table { lengths: (4, 64), ..table };
        for (name, choice) in table.rows {
            let errors = table.measure(*choice, &plan).unwrap().errors;
            let in_range = |Errors(of): &Errors| of.iter().all(|error| (0.0..=1.5).contains(error));
            assert!(errors.iter().all(in_range), "{name}: {errors:?}");
        }
        assert!(matches!(table.rows[0], ("bf16", Choice::Bf16)));
    }
}

#[test]
fn sequences_count_alike() {
    let problem = |precision| {
        Problem::new(ProblemFields {
            pass: Pass::Forward,
            precision: Precision::uniform(precision),
            ..ProblemFields::packed(&[(3, 5), (40, 60)], 16)
        })
        .unwrap()
    };
    let problem = problem(Format::F32);
    let mut inputs = values::inputs(&problem);
    let exact = Tensors::exact(&problem, &inputs, false);
    // Values twice as large in the short sequence alone: its error is 1, the other's 0.
    for row in problem.sequences[0].kv.real_rows() {
        inputs.v.index_axis_mut(ndarray::Axis(0), row).mapv_inplace(|value| 2.0 * value);
    }
    let wrong = Tensors::exact(&problem, &inputs, false);
    let Errors([out, dq, ..]) = Errors::of([(&problem, &wrong, &exact)]);
    assert!((out - 0.5_f64.sqrt()).abs() < 1e-12, "{out}");
    assert_eq!(dq, 0.0);
}
