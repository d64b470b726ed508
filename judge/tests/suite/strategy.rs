//! The strategy for property tests.

use seamproof_judge::generate::Limits;
use seamproof_judge::oracle::Problem;
use seamproof_judge::proptest::strategy::{Strategy, ValueTree};
use seamproof_judge::proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use seamproof_judge::strategy::{problems, problems_for};
use seamproof_judge::subject::Table;

use seamproof_judge::subject::{MaskForm, Sizes};

fn runner() -> TestRunner {
    TestRunner::new(Config { failure_persistence: None, max_shrink_iters: u32::MAX, ..Config::default() })
}

#[test]
fn a_failing_property_comes_back_minimal() {
    let test = |problem: Problem| match problem.pairs() {
        0 => Ok(()),
        pairs => Err(TestCaseError::fail(format!("{pairs} pairs"))),
    };
    let result = runner().run(&problems(Limits::quick()), test);
    let Err(TestError::Fail(reason, smallest)) = result else { panic!("{result:?}") };
    assert_eq!(reason.message(), "1 pairs");
    assert_eq!((smallest.sequences.len(), smallest.tokens(), smallest.elements()), (1, 1, 4));
}

#[test]
fn what_is_inside_a_table_shrinks_inside() {
    let mut table = Table::widest();
    table.masks.forms = vec![MaskForm::CausalWindow];
    table.lengths.empty_kv = false;
    table.dims.qk = Sizes::only(16);
    let inside = table.clone();
    let test = move |problem: Problem| {
        assert_eq!(inside.refusal(&problem), None, "{problem:?}");
        match problem.group() {
            1 => Ok(()),
            group => Err(TestCaseError::fail(format!("a group of {group}"))),
        }
    };
    let result = runner().run(&problems_for(&table, Limits::quick()), test);
    let Err(TestError::Fail(reason, smallest)) = result else { panic!("{result:?}") };
    assert_eq!((reason.message(), smallest.dims.qk, smallest.sequences.len()), ("a group of 2", 16, 0));
}

#[test]
fn what_is_drawn_is_varied() {
    let mut runner = TestRunner::deterministic();
    let strategy = problems(Limits::quick());
    let drawn: Vec<Problem> =
        (0..100).map(|_| strategy.new_tree(&mut runner).expect("every draw is legal").current()).collect();
    let distinct: std::collections::HashSet<_> = drawn.iter().map(|problem| format!("{problem:?}")).collect();
    assert!(distinct.len() > 90, "{}", distinct.len());
    assert!(drawn.iter().any(|problem| problem.sequences.len() > 1));
}
