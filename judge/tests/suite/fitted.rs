//! The nearest problem that a subject takes.

use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::subject::broken_rule;
use seamproof_judge::subjects::Emulated;

/// Test that fitted problems are inside the table, also where the drawn algorithm cannot cut the drawn problem.
#[test]
fn every_fitted_problem_is_taken() {
    let narrow = Declaration::single_rank(Format::Bf16, Format::F32).forward_only().capabilities;
    let tables = [narrow, Emulated::default().declaration().capabilities];
    let drawn = (0..2_000).filter_map(|index| match generate::draw(3, index, &Limits::fuzz()) {
        Draw::Problem(problem) => Some(problem),
        Draw::Malformed(_) => None,
    });
    let mut uncut = 0;
    for problem in drawn {
        uncut += u32::from(broken_rule(&problem).is_some());
        for table in &tables {
            let fitted = table.fitted(problem.clone());
            assert_eq!(table.refusal(&fitted), None, "{problem:?}");
            assert_eq!(table.fitted(fitted.clone()), fitted);
        }
    }
    assert!(uncut > 10, "{uncut}");
}
