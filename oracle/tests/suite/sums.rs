//! The envelope from sums over a row's pairs, compared with the envelope that looks at every pair.

use crate::common::{Draws, inputs, random};

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use ndarray::{Array3, Axis};
use proptest::prelude::*;
use seamproof_oracle::envelope::{
    Accumulation, Arithmetic, DitherSums, MergeBy, Merges, Model, Partition, RowEnvelope, RowSums, SLOTS,
    WeightRounding, largest_multiplicity,
};
use seamproof_oracle::{Format, Heads, Inputs, Mask, Precision, Problem, ProblemFields, blocked};

/// Returns the sums that a reference elsewhere would bring: those of a row, and three of each lane.
fn sums(
    problem: &Problem,
    inputs: &Inputs,
    model: &Model,
    (sequence, head, i): (usize, usize, usize),
) -> (RowSums, DitherSums, Vec<[f64; 3]>) {
    let sequence = &problem.sequences[sequence];
    let lane = |a: &Array3<f32>, row: usize, head: usize, c: usize| f64::from(a[[row, head, c]]);
    let (row, kv_head) = (sequence.q.row(i), head / problem.group());
    let keys: Vec<usize> =
        problem.mask.visible(i, sequence.q.len, sequence.kv.len).map(|key| sequence.kv.row(key)).collect();
    let products = |key: usize, of: &dyn Fn(f64) -> f64| -> f64 {
        (0..problem.dims.qk)
            .map(|c| of(lane(&inputs.q, row, head, c)) * of(lane(&inputs.k, key, kv_head, c)))
            .sum()
    };
    let scale = f64::from(problem.softmax.scale);
    let logits: Vec<f64> =
        keys.iter().map(|&key| problem.softmax.cap(scale * products(key, &|x| x))).collect();
    let a: Vec<f64> = keys.iter().map(|&key| products(key, &|x| model.magnitude(x))).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| libm::exp(logit - largest)).collect();
    let values = |c: usize| keys.iter().map(move |&key| lane(&inputs.v, key, kv_head, c));
    let lanes = (0..problem.dims.v).map(|c| {
        let terms = || weights.iter().zip(values(c));
        let squares = terms().map(|(w, v)| (w * v).powi(2)).sum();
        [terms().map(|(w, v)| w * v).sum(), terms().map(|(w, v)| w * model.magnitude(v)).sum(), squares]
    });
    let lanes: Vec<[f64; 3]> = lanes.collect();
    let list: Vec<usize> = sequence.kv.real_rows().collect();
    let of_list = inputs.k.index_axis(Axis(1), kv_head).select(Axis(0), &list).mapv(f64::from);
    let dither = DitherSums {
        sum: logits.iter().map(|logit| logit - largest).sum(),
        sum_squares: logits.iter().map(|logit| (logit - largest).powi(2)).sum(),
        shared: shared_share(&weights),
        copies: largest_multiplicity(&of_list.view()),
    };
    let row = RowSums {
        keys: keys.len(),
        largest,
        smallest: logits.iter().copied().fold(f64::INFINITY, f64::min),
        sum: weights.iter().sum(),
        sum_a: weights.iter().zip(&a).map(|(w, a)| w * a).sum(),
        largest_a: a.iter().copied().fold(0.0, f64::max),
        sink: problem.sink(head, &inputs.sink),
        value_max: (0..problem.dims.v).flat_map(values).map(f64::abs).fold(0.0, f64::max),
    };
    (row, dither, lanes)
}

/// Returns the share of weights that have company in their slot of a binade, or the share of their squares, whichever
/// is larger. A binade has [`SLOTS`] slots for each weight.
fn shared_share(weights: &[f64]) -> f64 {
    let slot = |weight: f64| {
        let significand = weight / libm::exp2(libm::floor(libm::log2(weight))) - 1.0;
        (significand * (SLOTS * weights.len()) as f64) as u64
    };
    let mut slots: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    weights.iter().filter(|weight| **weight != 0.0).for_each(|&w| slots.entry(slot(w)).or_default().push(w));
    let share = |counts: fn(&f64) -> f64| {
        let sum = |least: usize| -> f64 {
            slots.values().filter(|slot| slot.len() >= least).flatten().map(counts).sum()
        };
        sum(2) / sum(1)
    };
    share(|_| 1.0).max(share(|weight| weight * weight))
}

/// The most that sums in another order may differ by, relative to a bound.
const SLACK: f64 = 1e-9;

/// Returns the largest ratios of the two bounds: of LSEs and of outs in tier W, then in tier T. Asserts that no bound
/// is lower and that no exact value differs.
fn compare(problem: &Problem, inputs: &Inputs, model: &Model) -> [f64; 4] {
    let answer = blocked::forward(problem, inputs, Some(model));
    let bound = answer.bound.expect("a model was given");
    let (mut ratios, mut max_logit) = ([0.0f64; 4], vec![0.0f64; problem.heads.q]);
    let mut held = |what: usize, bound: f64, most: f64| {
        assert!(bound >= most * (1.0 - SLACK), "{what}: {bound:e} is below {most:e}");
        if bound.is_finite() || most.is_finite() {
            ratios[what] = ratios[what].max(if most > 0.0 { bound / most } else { 1.0 });
        }
    };
    let same = |exact: f64, right: f64| {
        assert!(exact == right || (exact - right).abs() <= 1e-9 * (1.0 + right.abs()), "{exact} {right}");
    };
    for (number, sequence) in problem.sequences.iter().enumerate() {
        for (head, i) in (0..problem.heads.q).flat_map(|head| (0..sequence.q.len).map(move |i| (head, i))) {
            let (row, dither, lanes) = sums(problem, inputs, model, (number, head, i));
            let envelope = RowEnvelope::new(model, &row).with_dither(&dither);
            let at = sequence.q.row(i);
            let (lse, most) = envelope.lse();
            same(lse, answer.exact.lse[[head, at]]);
            held(0, most, bound.worst.lse[[head, at]]);
            // Weights are relative to the largest logit here, and to the largest of logits and sink there. Two weights
            // that share a slot in one may not in the other: a row at the limit may have a certificate from one of the
            // two alone.
            let certified = bound.dithered.lse[[head, at]].is_finite();
            if certified {
                held(2, envelope.dithered_lse(), bound.dithered.lse[[head, at]]);
            }
            for (c, [numerator, magnitudes, squares]) in lanes.into_iter().enumerate() {
                let place = [at, head, c];
                let (out, most) = envelope.out(numerator, magnitudes);
                same(out, answer.exact.out[place]);
                held(1, most, bound.worst.out[place]);
                if certified {
                    held(3, envelope.dithered_out(numerator, magnitudes, squares), bound.dithered.out[place]);
                }
            }
            max_logit[head] = envelope.max_logit_error().max(max_logit[head]);
        }
    }
    for (head, (&error, &most)) in max_logit.iter().zip(&bound.worst.max_logit).enumerate() {
        assert!(error >= most * (1.0 - SLACK), "max_logit of head {head}: {error:e} is below {most:e}");
    }
    ratios
}

fn model_of(problem: &Problem, draws: &mut Draws) -> Model {
    let accumulation = draws.pick(&[
        Accumulation::F32Serial,
        Accumulation::F32Tree(NonZeroUsize::MIN.saturating_add(3)),
        Accumulation::WgmmaTruncating,
        Accumulation::Unknown,
    ]);
    let by = draws.pick(&[MergeBy::Weights, MergeBy::Difference]);
    let (step, running) = (Format::Bf16, Format::F32);
    let merges = Merges { count: 3, step, running, product_rounded: true, by, through: None };
    let single = Partition::single(1 + draws.below(8), 1 + draws.below(40));
    let partition = draws.pick(&[single, Partition { merges, ..single }]);
    let weights = draws.pick(&[
        WeightRounding::BeforeNormalisation,
        WeightRounding::AfterNormalisation,
        WeightRounding::Unknown,
    ]);
    let arithmetic = Arithmetic { weights, ..Arithmetic::flash_attention(accumulation) };
    Model::new(problem, arithmetic, partition)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_bound_from_sums_is_never_below_the_one_from_pairs(seed in any::<u64>()) {
        compare_drawn(seed);
    }
}

fn compare_drawn(seed: u64) {
    let (problem, inputs) = random(seed, 40);
    let mut draws = Draws(seed ^ 1);
    let precision = Precision::uniform(draws.pick(&[Format::Bf16, Format::Fp16, Format::F32]));
    let problem = Problem::new(ProblemFields { precision, ..problem.into() }).expect("as valid");
    compare(&problem, &inputs, &model_of(&problem, &mut draws));
}

/// Test with outs that are merged by a difference, where the largest value of a row's tile is hidden from the row.
#[test]
fn values_that_a_row_does_not_see_leave_its_bound_as_it_is() {
    compare_drawn(14_596_730_218_412_323_912);
}

/// On data like a network's, the bounds are nearly as sharp. An out's bound steps up by half a spacing where it passes
/// a power of two.
#[test]
fn little_is_lost() {
    let fields = ProblemFields {
        heads: Heads { q: 2, kv: 1 },
        mask: Mask::CAUSAL,
        ..ProblemFields::packed(&[(300, 300)], 64)
    };
    let problem = Problem::new(fields).expect("valid");
    let inputs = inputs(&problem, &mut Draws(7));
    let arithmetic = Arithmetic::flash_attention(Accumulation::WgmmaTruncating);
    let model = Model::new(&problem, arithmetic, Partition::single(64, 128));
    let ratios = compare(&problem, &inputs, &model);
    assert!(
        ratios.iter().zip([1.05, 1.5, 1.05, 1.5]).all(|(ratio, most)| *ratio > 1.0 - SLACK && *ratio < most),
        "{ratios:?}"
    );
}
