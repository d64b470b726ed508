//! Latent attention in its absorbed form: one KV head of 576 and 512 lanes that all query heads share.

use std::collections::HashSet;

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::exact::eligible;
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::prelude::*;
use seamproof_judge::subjects::{Emulated, Fp8, draw_options};

/// Returns legal problems with latent heads, and their numbers.
fn drawn(limits: &Limits) -> impl Iterator<Item = (u64, Problem)> {
    (0..40_000).filter_map(move |index| match generate::draw(17, index, limits) {
        Draw::Problem(problem) => Some((index, problem)).filter(|(_, p)| p.dims.qk == 576 && is_legal(p)),
        Draw::Malformed(_) => None,
    })
}

#[test]
fn the_emulated_kernel_holds_on_latent_heads() {
    let (mut held, mut modes, mut algorithms) = (0, HashSet::new(), HashSet::new());
    for limits in [Limits::quick(), Limits::seams()] {
        for (index, problem) in drawn(&limits).take(200) {
            let kernel = Emulated::from_options(&draw_options(index)).expect("options that are drawn");
            let verdict = evaluate(&kernel, &problem);
            assert!(matches!(verdict, Verdict::Pass(_)), "{kernel:?} on {problem:?}: {verdict:?}");
            held += usize::from(problem.pairs() > 0);
            modes.insert(problem.mode);
            algorithms.insert(problem.parallel.algorithm.name());
        }
    }
    assert!(held > 200 && modes.len() > 12 && algorithms.len() > 4, "{held} {modes:?} {algorithms:?}");
}

#[test]
fn large_latent_heads_hold() {
    for (_, problem) in drawn(&Limits::large()).filter(|(_, p)| p.pairs() < 1 << 15).take(4) {
        let verdict = evaluate(&Emulated::default(), &problem);
        assert!(matches!(verdict, Verdict::Pass(_)), "{problem:?}: {verdict:?}");
    }
}

#[test]
fn the_kernel_in_fp8_refuses_them() {
    let declared = Fp8::default().declaration();
    let (_, problem) = drawn(&Limits::quick()).next().expect("one case in 85");
    let fitted = declared.table.asked(problem.clone());
    assert_eq!((fitted.dims.qk, fitted.dims.v), (256, 256));
    let rows: Vec<_> = declared.table.refusals(&problem).map(|refusal| refusal.row()).collect();
    assert!(rows.contains(&"dims.qk") && rows.contains(&"dims.v"), "{rows:?}");
    assert!(Emulated::default().declaration().table.refusal(&problem).is_none());
}

/// Test that exact modes stay exact with so many lanes: codes that a format cannot hold are refused, and a mode that is
/// drawn is one whose preconditions hold.
#[test]
fn exact_modes_of_latent_heads_meet_their_preconditions() {
    let mut modes = HashSet::new();
    for (_, problem) in drawn(&Limits::quick()).filter(|(_, p)| p.mode.is_exact()) {
        assert_eq!(eligible(problem.mode, &problem), Ok(()), "{problem:?}");
        modes.insert(problem.mode);
    }
    assert_eq!(modes.len(), InputMode::EXACT.len(), "{modes:?}");
}
