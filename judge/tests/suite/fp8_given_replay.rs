//! Tier R with given scales: it holds on the emulated kernel with the sequence of cuDNN, in both passes and over several
//! ranks, it is as sharp as the last rounding, and it sees other numerics that no other check does.

use std::num::NonZeroUsize;
use std::ops::Range;

use seamproof_judge::calibrate::{Calibration, CalibrationOutcome};
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::prelude::*;
use seamproof_judge::profile;
use seamproof_judge::subjects::{Fp8, Fp8Fault, Fp8Sequence, PlantedFp8, fp8_fault};
use seamproof_oracle::{Stored, blocked};
use seamproof_simulator::Segment;
use seamproof_simulator::emulated::{Factor, Factors, Stages, Tiles, UnitArithmetic};
use seamproof_simulator::schedule::MergeOrder;

use crate::fp8_others::{OF_ANY_SEQUENCE, Ran, Unlocked, kernels, other, right, with_gradients};

/// The kernel in both passes, on which most tiles are whole.
fn kernel() -> Fp8 {
    let tiles = Tiles { q: 16, kv: 64 };
    Fp8 { backward: true, sequence: Fp8Sequence::Cudnn, tiles, ..Fp8::default() }
}

kernels! {
    KeysFromTheLast {
        fn tiles(
            &self,
            pass: Pass,
            segment: &Segment,
            rows: &Range<usize>,
            keys: usize,
            size: usize,
        ) -> Vec<Range<usize>> {
            let mut tiles = right::<A>().tiles(pass, segment, rows, keys, size);
            tiles.reverse();
            tiles
        }
    }
}

/// Numerics that are not those of the locked profile, besides [`OF_ANY_SEQUENCE`].
static OTHERS: [Fp8Fault; 2] = [
    other("a scale of weights one and a half times as large", |recipe| {
        recipe.factors = |own| {
            let right = Factors::of(own);
            let Factor { scale, descale } = right.p;
            Factors { p: Factor { scale: 1.5 * scale, descale: descale / 1.5 }, ..right }
        };
    }),
    other("keys from the last tile to the first", |recipe| recipe.stages = &KeysFromTheLast),
];

fn others() -> impl Iterator<Item = &'static Fp8Fault> {
    OTHERS.iter().chain(&OF_ANY_SEQUENCE)
}

/// Faults of the catalogue that tier R alone sees.
const OF_THE_CATALOGUE: [&str; 3] =
    ["scaled-weights-rounded-twice", "scaled-gradients-rounded-twice", "scaled-sums-not-promoted"];

/// Results of a kernel beside the right kernel's, replayed: out, dq, dk and dv.
#[derive(Default)]
struct Replayed {
    /// The largest error ÷ bound.
    worst: [f64; 4],
    /// The largest error past the last rounding, relative to what the bound has past that.
    past: f64,
    /// The number of elements whose bound is no more than 1.02 times the last rounding, and of all that have one.
    sharp: [[usize; 2]; 4],
}

/// Returns the results of a kernel beside those that are replayed.
fn replayed(kernel: &Fp8, problem: &Problem) -> Replayed {
    let Ran { inputs, rank, saved, model, replay } = Ran::new(kernel, problem);
    let forward = blocked::replayed_forward(problem, &inputs, &model, &replay).expect("a problem");
    let back = blocked::replayed_backward(problem, &inputs, &saved, &model, &replay).expect("known tiles");
    let of_forward = forward.bound.expect("bounds").worst;
    let (got, bound) = (rank.gradients.expect("gradients"), back.bound.expect("bounds").worst);
    let tensors = [
        (TensorName::Out, &rank.out, &forward.exact.out, &of_forward.out),
        (TensorName::Dq, &got.dq, &back.exact.dq, &bound.dq),
        (TensorName::Dk, &got.dk, &back.exact.dk, &bound.dk),
        (TensorName::Dv, &got.dv, &back.exact.dv, &bound.dv),
    ];
    let mut all = Replayed::default();
    for (place, (tensor, got, exact, bound)) in tensors.into_iter().enumerate() {
        let stored =
            Stored { through: model.stored(tensor).through, ..inputs.scales.stored(problem, tensor) };
        let elements = got.iter().zip(exact).zip(bound).filter(|(_, bound)| **bound > 0.0);
        for ((got, exact), bound) in elements {
            assert!(bound.is_finite(), "launches that do not show all pairs");
            let (error, half) = ((f64::from(*got) - exact).abs(), stored.half_spacing(exact.abs()));
            all.worst[place] = all.worst[place].max(error / bound);
            all.past = all.past.max((error - half) / (bound - half));
            all.sharp[place][0] += usize::from(*bound <= 1.02 * half);
            all.sharp[place][1] += 1;
        }
    }
    all
}

/// Returns the largest error ÷ bound of all replayed results.
fn worst(kernel: &Fp8, problem: &Problem) -> f64 {
    replayed(kernel, problem).worst.into_iter().fold(0.0, f64::max)
}

/// Most bounds are the last rounding and little more, with that to bf16 before it where there is one. Over several ranks those of out are too, whose partial results are
/// replayed; partial gradients are not.
#[test]
fn replayed_results_with_given_scales_are_as_sharp_as_their_last_rounding() {
    for (promoted_after, least) in [(NonZeroUsize::new(1), 0.7), (NonZeroUsize::new(4), 0.7), (None, 0.0)] {
        for (merge, is_whole) in MergeOrder::WEIGHTED.into_iter().flat_map(|of| [(of, true), (of, false)]) {
            let kernel = Fp8 { promoted_after, merge, ..kernel() };
            let (mut sharp, mut past) = ([[0; 2]; 4], 0.0f64);
            let own = |problem: &Problem| problem.parallel.is_whole() == is_whole;
            for problem in with_gradients(&kernel, 41).filter(own).take(60) {
                let replayed = replayed(&kernel, &problem);
                assert!(replayed.worst.iter().all(|worst| *worst <= 1.0), "{:?} {problem:?}", replayed.worst);
                past = past.max(replayed.past);
                for (to, from) in sharp.as_flattened_mut().iter_mut().zip(replayed.sharp.as_flattened()) {
                    *to += from;
                }
            }
            assert!(past > 0.3 && past <= 1.0, "{promoted_after:?} {merge:?}: {past}");
            let shares = sharp.map(|[sharp, all]| sharp as f64 / all as f64);
            let known = if is_whole { &shares[..] } else { &shares[..1] };
            assert!(known.iter().all(|share| *share >= least), "{promoted_after:?} {merge:?}: {shares:?}");
        }
    }
}

/// Each of other numerics passes every other check on some problem whose replay tells them apart.
#[test]
fn other_numerics_with_given_scales_are_seen_by_the_replay_alone() {
    let planted = OF_THE_CATALOGUE.map(|id| fp8_fault(id).expect("a fault of the catalogue"));
    let all = others().map(PlantedFp8::Given).chain(planted);
    for fault in all {
        let wrong = Fp8 { fault: Some(fault), ..kernel() };
        let is_seen = |problem: &Problem| worst(&wrong, problem) > 1.0;
        let passes = |problem: &Problem| matches!(evaluate(&Unlocked(wrong), problem), Verdict::Pass(_));
        let mut problems = with_gradients(&wrong, 21).take(200);
        assert!(problems.any(|problem| is_seen(&problem) && passes(&problem)), "{}", fault.record().id);
    }
}

#[test]
fn the_judge_tells_numerics_with_given_scales_that_changed() {
    for id in OF_THE_CATALOGUE {
        let wrong = kernel().planted(fp8_fault(id).expect("a fault of the catalogue"));
        let found =
            with_gradients(&wrong, 21).take(100).find_map(|problem| match evaluate(&wrong, &problem) {
                Verdict::Finding(finding) => Some(finding),
                _ => None,
            });
        let finding = found.expect("a finding");
        assert!(finding.what.contains("numerics changed"), "{finding}");
    }
}

/// Returns what a calibration of this kernel in both orders of merging says of so many cases.
fn calibrated(kernel: Fp8, cases: u64) -> CalibrationOutcome {
    let instance = |index: u64| Fp8 { merge: MergeOrder::WEIGHTED[index as usize % 2], ..kernel };
    let calibration =
        Calibration::run(|index| Ok(Box::new(instance(index))), cases, 1).expect("every run succeeds");
    calibration.outcome(Fp8Sequence::Cudnn.profile(), 1)
}

#[test]
fn a_calibration_finds_the_locked_profile_and_no_other() {
    let lock = profile::locked(Fp8Sequence::Cudnn.profile()).expect("a profile");
    match calibrated(kernel(), 100) {
        CalibrationOutcome::Unique(found) => assert_eq!(profile::Lock { cases: lock.cases, ..*found }, lock),
        outcome => panic!("{outcome:?}"),
    }
    let asked = ["a scale of weights", "promotion after 1", "promotion after 2"];
    for wrong in others().filter(|other| asked.iter().any(|asked| other.id.starts_with(asked))) {
        let wrong = Fp8 { fault: Some(PlantedFp8::Given(wrong)), ..kernel() };
        assert_eq!(calibrated(wrong, 40), CalibrationOutcome::None);
    }
    // Another order is a candidate of its own, and is told.
    let wrong = others().find(|other| other.id.starts_with("keys from")).expect("one of them");
    let wrong = Fp8 { fault: Some(PlantedFp8::Given(wrong)), tiles: Tiles { q: 16, kv: 16 }, ..kernel() };
    match calibrated(wrong, 60) {
        CalibrationOutcome::Unique(found) => assert_ne!(found.kv_order, lock.kv_order),
        outcome => panic!("{outcome:?}"),
    }
}
