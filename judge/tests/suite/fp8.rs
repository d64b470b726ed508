//! The emulated kernel in FP8: it is right on what is drawn for its table, whatever its options, and each fault of it is
//! found.

use std::collections::HashSet;
use std::num::NonZeroUsize;

use seamproof_judge::evaluate::evaluate;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{FP8_FAULTS, Fp8};
use seamproof_oracle::{Algorithm, Scaling};
use seamproof_simulator::emulated::Tiles;
use seamproof_simulator::schedule::MergeOrder;

/// Returns drawn problems as the subject is asked them.
fn asked(seed: u64, cases: u64) -> impl Iterator<Item = Problem> {
    let table = Fp8::default().declaration().table;
    (0..cases).filter_map(move |index| match generate::draw(seed, index, &Limits::seams()) {
        Draw::Problem(problem) => {
            let asked = table.asked(problem);
            table.refusal(&asked).is_none().then_some(asked)
        }
        _ => None,
    })
}

#[test]
fn the_kernel_in_fp8_holds_on_what_is_drawn() {
    let (mut held, mut scalings, mut algorithms) = (0, HashSet::new(), HashSet::new());
    for (index, problem) in asked(5, 1_500).enumerate() {
        let kernel = Fp8 {
            tiles: Tiles { q: [1, 4, 16][index % 3], kv: [16, 64, 5][index / 3 % 3] },
            promoted_after: [None, NonZeroUsize::new(1), NonZeroUsize::new(4)][index / 9 % 3],
            weight_exponent: [8, 4, 0][index / 27 % 3],
            merge: MergeOrder::WEIGHTED[index / 81 % 2],
            order: index as u64,
            fault: None,
        };
        let verdict = evaluate(&kernel, &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
        scalings.insert(problem.precision.q.scaling);
        algorithms.insert(problem.parallel.algorithm.name());
        held += usize::from(problem.precision.q.scaling != Scaling::None && problem.pairs() > 0);
    }
    assert!(held > 500 && scalings.len() == 4, "{held} {scalings:?}");
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
}

#[test]
fn each_fault_of_the_kernel_in_fp8_is_found() {
    assert!(
        Fp8::long_rows()
            .take(30)
            .all(|problem| matches!(evaluate(&Fp8::default(), &problem), Verdict::Pass(_)))
    );
    for fault in FP8_FAULTS {
        let wrong = Fp8 { fault: Some(fault), ..Fp8::default() };
        let mut problems = asked(6, 3_000).chain(Fp8::long_rows());
        let found = problems.any(|problem| matches!(evaluate(&wrong, &problem), Verdict::Finding(_)));
        assert!(found, "{}", fault.id);
    }
}
