//! One identity by itself: it finds a wrong subject, and nothing on the right one.

use seamproof_judge::finding::{Check, Relation};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::Emulated;

/// Asserts that a relation finds a wrong subject on some of the problems, with bits where the subject promises these
/// and within bounds where it does not, and that it finds nothing on the right kernel.
pub(crate) fn assert_found_by<B: Backend, P: Iterator<Item = Problem>>(
    relation: Relation,
    wrong: impl Fn(Promises) -> B,
    drawn: impl Fn() -> P,
) {
    let mut judge = Judge { identities: vec![relation], ..Judge::default() };
    judge.rungs.retain(|rung| rung.check == Check::Identity);
    let finding = |subject: &dyn Backend, problem: &Problem| match judge
        .examine(subject, problem, Depth::First)
        .verdict
    {
        Verdict::Finding(finding) => finding.identity,
        _ => None,
    };
    for promises in [Promises::ALL, Promises::default()] {
        let wrong = wrong(promises);
        assert_eq!(drawn().find_map(|problem| finding(&wrong, &problem)), Some(relation));
    }
    assert!(drawn().take(20).all(|problem| finding(&Emulated::default(), &problem).is_none()));
}
