//! Layouts of the LSE whose rows are padded: a right kernel holds in each, and a wrong stride is found.

use ndarray::Array2;
use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::oracle::{LseLayout, LseOrder};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::Emulated;

const LAYOUTS: [LseLayout; 4] = [
    LseLayout { order: LseOrder::HeadsRows, multiple: 8 },
    LseLayout { order: LseOrder::HeadsRows, multiple: 128 },
    LseLayout { order: LseOrder::Batch, multiple: 1 },
    LseLayout { order: LseOrder::Batch, multiple: 128 },
];

fn problems() -> impl Iterator<Item = Problem> {
    (0..400).filter_map(|index| match generate::draw(12, index, &Limits::quick()) {
        Draw::Problem(problem) => Some(problem).filter(|problem| is_legal(problem) && problem.pairs() > 0),
        Draw::Malformed(_) => None,
    })
}

#[test]
fn a_right_kernel_holds_in_every_layout() {
    for lse in LAYOUTS {
        let right = Emulated { lse, ..Emulated::default() };
        let several = problems().filter(|problem| !problem.parallel.is_whole()).take(10);
        let steps = problems().filter(|problem| !problem.steps.is_empty()).take(4);
        for problem in problems().take(30).chain(several).chain(steps) {
            let verdict = evaluate(&right, &problem);
            assert!(matches!(verdict, Verdict::Pass(_)), "{lse:?}: {verdict}, {problem:?}");
        }
    }
}

/// The emulated kernel, which returns memory of a layout in which heads follow each other at another stride.
struct OtherStride {
    layout: LseLayout,
    stride: fn(usize) -> usize,
}

impl Backend for OtherStride {
    fn name(&self) -> &str {
        "other-stride"
    }

    fn declaration(&self) -> Declaration {
        Emulated { lse: self.layout, ..Emulated::default() }.declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Emulated { lse: self.layout, ..Emulated::default() }.run(problem, inputs)?;
        for lse in outputs.ranks.iter_mut().filter_map(|rank| rank.lse.as_mut()) {
            let (lines, columns) = lse.dim();
            let mut memory = vec![f32::NAN; 2 * lines * columns + 2 * lines];
            for ((line, column), value) in lse.indexed_iter().filter(|(_, value)| !value.is_nan()) {
                memory[line * (self.stride)(columns) + column] = *value;
            }
            *lse = Array2::from_shape_fn((lines, columns), |(line, column)| memory[line * columns + column]);
        }
        Ok(outputs)
    }
}

#[test]
fn another_stride_than_the_declared_one_is_found() {
    for layout in LAYOUTS {
        // A stride one short, as if rows were not padded, and one too long.
        for stride in [|columns: usize| columns.saturating_sub(1), |columns: usize| columns + 1] {
            let wrong = OtherStride { layout, stride };
            let found = problems().filter(|problem| problem.heads.q > 1).take(20);
            let found = found.filter(|problem| matches!(evaluate(&wrong, problem), Verdict::Finding(_)));
            assert!(found.count() > 10, "{layout:?}");
        }
    }
}

/// The emulated kernel, which declares a layout and returns the plain one.
struct Undeclared;

impl Backend for Undeclared {
    fn name(&self) -> &str {
        "undeclared"
    }

    fn declaration(&self) -> Declaration {
        Emulated { lse: LAYOUTS[1], ..Emulated::default() }.declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        Emulated::default().run(problem, inputs)
    }
}

#[test]
fn an_lse_of_another_shape_than_its_layout_is_told_with_both() {
    let problem = Problem::new(ProblemFields::packed(&[(3, 3)], 8)).expect("a problem");
    let Verdict::Finding(finding) = evaluate(&Undeclared, &problem) else { panic!("a finding") };
    assert_eq!(finding.what, "lse has shape [1, 3], and its layout [1, 128]");
}

#[test]
fn a_layout_of_no_multiple_is_no_row_of_a_table() {
    let mut table = Table::default();
    table.lse.multiple = 0;
    let error = table.validated().expect_err("no multiple").to_string();
    assert!(error.starts_with("table.lse.multiple: 0 is out of range"), "{error}");
}
