//! Keys and values in pages: the right kernel gives the bits of rows that lie together, and a wrong reader of the table
//! is found.

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::Relation;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subjects::{Emulated, Planted, same_bits};
use seamproof_judge::values;
use seamproof_simulator::check::check;
use seamproof_simulator::faults;

use crate::one_identity::assert_found_by;

/// Returns drawn problems in pages, with keys.
fn drawn() -> impl Iterator<Item = Problem> {
    (0..6_000).filter_map(|index| match generate::draw(12, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem).filter(|p| p.pages.is_some() && p.pairs() > 0 && is_legal(p)),
        _ => None,
    })
}

fn judged(subject: &dyn Backend, problem: &Problem) -> bool {
    matches!(evaluate(subject, problem), Verdict::Finding(_))
}

#[test]
fn pages_on_the_right_kernel_have_the_bits_of_rows_that_lie_together() {
    let (right, mut steps, mut shared, mut in_disorder) = (Emulated::default(), 0, 0, 0);
    for problem in drawn().take(120) {
        let inputs = values::inputs(&problem);
        let [paged, together] =
            [&problem, &problem.without_pages()].map(|p| right.run(p, &inputs).expect("it runs"));
        assert!(same_bits(&paged, &together), "{problem:?}");
        assert!(matches!(evaluate(&right, &problem), Verdict::Pass(_)), "{problem:?}");
        let pages = problem.pages.as_ref().expect("pages");
        steps += usize::from(!problem.steps.is_empty());
        shared += usize::from(!pages.shared.is_empty());
        in_disorder += usize::from(pages.table.iter().flatten().enumerate().any(|(i, page)| i != *page));
    }
    assert!(steps > 20 && shared > 10 && in_disorder > 60, "{steps} {shared} {in_disorder}");
}

/// Test that the checker proves the schedules of drawn pages, of one row or many, shared or not.
#[test]
fn the_schedule_of_drawn_pages_is_proved() {
    for problem in drawn().take(120) {
        let schedule = Emulated::default().schedule(&problem).expect("one rank");
        let proved = check(&problem, &schedule);
        assert!(proved.is_ok(), "{problem:?}: {proved:?}");
    }
}

#[test]
fn rows_of_a_shared_page_have_equal_values() {
    let of_shared = drawn().filter(|p| p.pages.as_ref().is_some_and(|pages| !pages.shared.is_empty()));
    for problem in of_shared.take(20) {
        let inputs = values::inputs(&problem);
        assert!(problem.shared_rows().next().is_some() && problem.shares_equal_rows(&inputs), "{problem:?}");
        // Sequences that share nothing are as they would be without pages.
        let own = values::inputs(&problem.without_pages());
        assert_eq!(inputs.q, own.q);
        assert!(inputs.k != own.k);
    }
}

/// Test that every fault of a reader of pages is found, and shrunk to a case with pages that is right without them.
#[test]
fn a_wrong_reader_of_pages_is_found_and_shrunk_to_few_pages() {
    let ids = [
        "page-of-the-next-entry",
        "page-behind-a-page",
        "pages-of-the-next-sequence",
        "page-offset-of-another-size",
        "page-of-one-row",
        "last-page-taken-for-full",
        "page-of-an-append-unknown",
    ];
    for id in ids {
        let wrong = Planted::new(Emulated::default(), *faults::by_id(id).expect("a fault"));
        let found = drawn().find(|problem| judged(&wrong, problem)).expect(id);
        let small = shrink(&found, 3_000, |problem| judged(&wrong, problem)).problem;
        let pages = small.pages.as_ref().expect("pages");
        assert!(pages.count <= 3 && small.sequences.len() <= 2 && pages.shared.is_empty(), "{id}: {small:?}");
        assert!(small.tokens() <= 2, "{id}: {small:?}");
        assert!(!judged(&wrong, &small.without_pages()), "{id}");
    }
}

#[test]
fn a_failure_that_needs_no_pages_is_shrunk_to_none() {
    for problem in drawn().take(8) {
        let small = shrink(&problem, 2_000, |small| small.pairs() > 0).problem;
        assert!(small.pages.is_none(), "{small:?}");
    }
}

/// The emulated kernel, wrong in pages alone: it scales the out.
struct WrongInPages(Promises);

impl Backend for WrongInPages {
    fn name(&self) -> &str {
        "wrong-in-pages"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration().with_promises(self.0)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Emulated::default().run(problem, inputs)?;
        if problem.pages.is_some() {
            outputs.ranks[0].out.mapv_inplace(|value| 2.0 * value);
        }
        Ok(outputs)
    }
}

#[test]
fn pages_are_held_to_rows_that_lie_together() {
    assert_found_by(Relation::OutOfPages, WrongInPages, drawn);
}

/// Test that a table without the row takes no pages, and keeps everything else of a problem; one with other sizes takes
/// those.
#[test]
fn a_subject_that_takes_no_pages_is_asked_without() {
    let mut table = Table::widest();
    table.pages = None;
    for problem in drawn().take(20) {
        let size = problem.pages.as_ref().map_or(0, |pages| pages.size);
        assert_eq!(table.refusal(&problem), Some(Refusal::Pages(size)));
        assert_eq!(table.fitted(problem.clone()), problem.without_pages());
        let mut other = Table::widest();
        other.pages = Some(Sizes::only(6));
        let fitted = other.fitted(problem.clone());
        assert_eq!(fitted.pages.as_ref().map(|pages| pages.size), Some(6));
        assert_eq!(fitted.without_pages(), problem.without_pages());
    }
}
