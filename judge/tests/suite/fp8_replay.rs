//! Tier R of the backward in FP8: it holds on the emulated kernel, it is as sharp as the last rounding, and it sees other
//! numerics that tiers W and T, and the identities, do not.

use std::num::NonZeroUsize;

use seamproof_judge::evaluate::evaluate;
use seamproof_judge::prelude::*;
use seamproof_judge::profile;
use seamproof_judge::subjects::{Fp8, Fp8Fault, PlantedFp8};
use seamproof_judge::values;
use seamproof_oracle::blocked;
use seamproof_oracle::envelope::{Model, TileFactor};
use seamproof_simulator::emulated::{HeadRows, Stages, TileWeights, Tiles, UnitArithmetic};

use crate::fp8_others::{OF_ANY_SEQUENCE, Ran, Unlocked, kernels, other, right, with_gradients};

/// The kernel with its backward, on which most tiles are whole.
fn kernel() -> Fp8 {
    Fp8 { backward: true, tiles: Tiles { q: 16, kv: 64 }, ..Fp8::default() }
}

kernels! {
    CodesCutOff {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            if pass == Pass::Forward {
                return right::<A>().round(pass, values, format);
            }
            for value in values {
                let rounded = format.round_f32(*value);
                // Codes of one sign are in the order of magnitudes.
                let below = || format.decode(format.encode(rounded.into()) - 1) as f32;
                *value = if rounded.abs() <= value.abs() { rounded } else { below() };
            }
        }
    }
    FactorOfExponent {
        fn tile_factor(&self, ds: &TileWeights<f32>, format: Format) -> f32 {
            let amax = ds.values().iter().fold(0.0f32, |most, ds| most.max(ds.abs()));
            TileFactor::OfExponent.of(amax.into(), format) as f32
        }
    }
    FactorTooSmall {
        fn tile_factor(&self, ds: &TileWeights<f32>, format: Format) -> f32 {
            right::<A>().tile_factor(ds, format) / 16.0
        }
    }
    StepsFromTheEnd {
        fn add_dq(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, keys: HeadRows<'_, f32>) {
            let (rows, columns) = (ds.seen.len(), ds.columns());
            let mut turned = TileWeights::new(rows, columns, ds.format);
            for row in 0..rows {
                let all = ds.row(row).iter().rev().copied().collect::<Vec<_>>();
                turned.row_mut(row).copy_from_slice(&all);
                turned.seen[row] = columns - ds.seen[row].end..columns - ds.seen[row].start;
            }
            let backwards: Vec<usize> = keys.rows.iter().rev().copied().collect();
            right::<A>().add_dq(units, to, &turned, HeadRows { rows: &backwards, ..keys });
        }
    }
}

/// Numerics that are not those of the locked profile, besides [`OF_ANY_SEQUENCE`].
static OTHERS: [Fp8Fault; 6] = [
    other("codes cut towards zero", |recipe| recipe.stages = &CodesCutOff),
    other("a tile's factor from the exponent alone", |recipe| recipe.stages = &FactorOfExponent),
    other("a tile's factor 16 times too small", |recipe| recipe.stages = &FactorTooSmall),
    other("steps of dq from a tile's end", |recipe| recipe.stages = &StepsFromTheEnd),
    other("tiles of 4 queries", |recipe| recipe.tiles.q = 4),
    other("no promotion", |recipe| recipe.promoted_after = None),
];

fn others() -> impl Iterator<Item = &'static Fp8Fault> {
    OTHERS.iter().chain(&OF_ANY_SEQUENCE)
}

/// The gradients of a kernel beside the right kernel's, replayed from the kernel's own out and LSE.
struct Replayed {
    /// The largest error ÷ bound of dq, dk and dv.
    worst: [f64; 3],
    /// The largest error past half a place of bf16, relative to what the bound has past that.
    past: f64,
    /// The number of elements whose bound is no more than 1.1 halves of a place, and of all that have one.
    sharp: [usize; 2],
}

/// Returns the gradients of a kernel beside the replayed ones; `None` where they are not replayed.
fn replayed(kernel: &Fp8, problem: &Problem) -> Option<Replayed> {
    let Ran { inputs, rank, saved, model, replay } = Ran::new(kernel, problem);
    let answer = blocked::replayed_backward(problem, &inputs, &saved, &model, &replay)?;
    let (got, bound) = (rank.gradients.expect("gradients"), answer.bound.expect("bounds").worst);
    let mut all = Replayed { worst: [0.0; 3], past: 0.0, sharp: [0; 2] };
    let exact = &answer.exact;
    let tensors =
        [(&got.dq, &exact.dq, &bound.dq), (&got.dk, &exact.dk, &bound.dk), (&got.dv, &exact.dv, &bound.dv)];
    for ((got, exact, bound), worst) in tensors.into_iter().zip(&mut all.worst) {
        let elements = got.iter().zip(exact).zip(bound).filter(|(_, bound)| **bound > 0.0);
        for ((got, exact), bound) in elements {
            let error = (f64::from(*got) - exact).abs();
            let half = Format::Bf16.half_spacing(exact.abs());
            assert!(bound.is_finite(), "launches that do not show all pairs");
            *worst = worst.max(error / bound);
            all.past = all.past.max((error - half) / (bound - half));
            all.sharp[0] += usize::from(*bound <= 1.1 * half);
            all.sharp[1] += 1;
        }
    }
    Some(all)
}

/// Returns the largest error ÷ bound of all replayed gradients.
fn worst(kernel: &Fp8, problem: &Problem) -> f64 {
    replayed(kernel, problem).map_or(0.0, |replayed| replayed.worst.into_iter().fold(0.0, f64::max))
}

/// Most bounds are the last rounding and little more, and where more is left a near-tie may use nearly all of it.
#[test]
fn replayed_gradients_in_fp8_are_as_sharp_as_their_last_rounding() {
    let steps = [NonZeroUsize::new(1), NonZeroUsize::new(4)];
    for (promoted_after, is_whole) in steps.into_iter().flat_map(|after| [(after, true), (after, false)]) {
        let kernel = Fp8 { promoted_after, ..kernel() };
        let (mut past, mut sharp) = (0.0f64, [0; 2]);
        let own = |problem: &Problem| problem.parallel.is_whole() == is_whole;
        for problem in with_gradients(&kernel, 31).filter(own).take(80) {
            let replayed = replayed(&kernel, &problem).expect("tiles that are known");
            assert!(replayed.worst.iter().all(|worst| *worst <= 1.0), "{:?}", replayed.worst);
            past = past.max(replayed.past);
            (0..2).for_each(|of| sharp[of] += replayed.sharp[of]);
        }
        let share = sharp[0] as f64 / sharp[1] as f64;
        assert!(past > 0.3 && past <= 1.0 && share > 0.5, "{promoted_after:?} {is_whole}: {past} {share}");
    }
}

/// A sum over queries that is never promoted has the unit's error throughout, and dv keeps the bound for it. The other
/// gradients do not.
#[test]
fn sums_of_a_tile_are_replayed_without_promotion() {
    let kernel = Fp8 { promoted_after: None, ..kernel() };
    for problem in with_gradients(&kernel, 32).take(80) {
        let replayed = replayed(&kernel, &problem).expect("tiles that are known");
        assert!(replayed.worst.iter().all(|worst| *worst <= 1.0), "{:?}", replayed.worst);
    }
}

/// Each of other numerics passes every other check on some problem whose replayed gradients tell them apart.
#[test]
fn other_numerics_of_the_backward_are_seen_by_its_replay_alone() {
    for other in others() {
        let wrong = Fp8 { fault: Some(PlantedFp8::Backward(other)), ..kernel() };
        let is_seen = |problem: &Problem| worst(&wrong, problem) > 1.0;
        let passes = |problem: &Problem| matches!(evaluate(&Unlocked(wrong), problem), Verdict::Pass(_));
        for is_whole in [true, false] {
            let own = |problem: &Problem| problem.parallel.is_whole() == is_whole;
            let mut problems = with_gradients(&wrong, 21).filter(own).take(200);
            assert!(problems.any(|problem| is_seen(&problem) && passes(&problem)), "{}", other.id);
        }
    }
}

#[test]
fn the_judge_tells_numerics_of_the_backward_that_changed() {
    let other = others().find(|other| other.id == "dP in bf16").expect("one of them");
    let wrong = Fp8 { fault: Some(PlantedFp8::Backward(other)), ..kernel() };
    let found = with_gradients(&wrong, 21).take(50).find_map(|problem| match evaluate(&wrong, &problem) {
        Verdict::Finding(finding) => Some(finding),
        _ => None,
    });
    let finding = found.expect("a finding");
    let gradients = [TensorName::Dq, TensorName::Dk].map(Some);
    assert!(finding.what.contains("numerics changed") && gradients.contains(&finding.tensor), "{finding}");
}

/// A profile without a rule of a tile's factor leaves gradients alone, as that of the kernel on Hopper does.
#[test]
fn gradients_are_not_replayed_without_a_locked_rule() {
    assert_eq!(profile::locked("cuda-fp8").expect("a profile").tile_factor, None);
    let kernel = kernel();
    let problem = with_gradients(&kernel, 31).next().expect("a problem");
    let lock = profile::locked("emulated-fp8").expect("a profile");
    let lock = profile::Lock { tile_factor: None, ..lock };
    let (arithmetic, partition) = (kernel.declaration().arithmetic, kernel.partition(&problem));
    let launches = || kernel.launches(&problem);
    let replay = lock.replay(&problem, &arithmetic, partition, launches, || unreachable!("no tiles"));
    let replay = replay.expect("the forward is replayed");
    let inputs = values::inputs(&problem);
    let forward = blocked::forward(&problem, &inputs, None).exact;
    let model = Model::new(&problem, arithmetic, partition);
    let saved = (&forward).into();
    assert!(blocked::replayed_backward(&problem, &inputs, &saved, &model, &replay).is_none());
}
