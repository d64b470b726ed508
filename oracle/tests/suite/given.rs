//! Scales of what a kernel quantises: results are cut to their range, and amaxes are those of results that nothing cuts.

use crate::common::{Draws, random, scaled};

use seamproof_oracle::amax::{AmaxOracle, Range};
use seamproof_oracle::envelope::{Arithmetic, DsFold, Partition};
use seamproof_oracle::{
    Element, Format, Inputs, OwnScales, Problem, ProblemFields, Quantity, Saved, Scaling, Sink, TensorName,
    blocked, exact,
};

/// Returns a drawn problem whose results are in FP8 with these descales, and the same with results in f32.
fn drawn(seed: u64, descale: f32) -> [(Problem, Inputs); 2] {
    let (problem, inputs) = random(seed, 6);
    let (wide, inputs) = scaled(&problem, inputs, &mut Draws(seed + 2000));
    let mut fields = ProblemFields::from(wide.clone());
    let code = Element { format: Format::E4m3, scaling: Scaling::PerTensor };
    (fields.precision.p, fields.precision.ds) = (code, code);
    (fields.precision.out, fields.precision.gradients) = (code, code);
    let own = OwnScales::new(&fields.precision, |_| descale);
    let narrow = Problem::new(fields.clone()).expect("scalings change no shape");
    (fields.precision.out, fields.precision.gradients) = (Format::F32.into(), Format::F32.into());
    let wide = Problem::new(fields).expect("a problem");
    let with = |own| Inputs { scales: inputs.scales.clone().with_own(own), ..inputs.clone() };
    let own_of_wide = OwnScales::new(&wide.precision, |_| descale);
    [(narrow, with(own)), (wide, with(own_of_wide))]
}

#[test]
fn results_past_the_range_are_cut() {
    let mut cut = 0;
    for seed in 0..40 {
        let [(narrow, inputs), (wide, of_wide)] = drawn(seed, 1.0 / 512.0);
        let most = inputs.scales.stored(&narrow, TensorName::Out).most();
        assert_eq!(most, 448.0 / 512.0);
        let (got, whole) = (exact::forward(&narrow, &inputs), exact::forward(&wide, &of_wide));
        let right = whole.out.mapv(|out| out.clamp(-most, most));
        assert_eq!(got.out, right, "{seed}");
        assert_eq!(got.lse, whole.lse);
        cut += usize::from(right != whole.out);
        let saved = Saved::from(&got);
        let (got, whole) =
            (exact::backward(&narrow, &inputs, &saved), exact::backward(&wide, &of_wide, &saved));
        assert_eq!(got.dk, whole.dk.mapv(|dk| dk.clamp(-most, most)), "{seed}");
        let of_blocks = blocked::backward(&narrow, &inputs, &saved, None).exact;
        assert!(of_blocks.dv.iter().all(|dv| dv.abs() <= most));
    }
    assert!(cut > 10, "{cut}");
}

/// Returns the largest magnitude of dS times the scale, by its definition, from gradients with one key each.
fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, |most, value: f64| most.max(value.abs()))
}

#[test]
fn the_range_of_an_amax_has_the_exact_one() {
    let arithmetic = Arithmetic { ds_fold: DsFold::Before, ..Arithmetic::default() };
    let mut bounded = 0;
    for seed in 0..40 {
        let [(narrow, inputs), (wide, of_wide)] = drawn(seed, 1.0 / 64.0);
        let oracle =
            AmaxOracle::new(&narrow, &inputs, arithmetic, Partition::single(8, 8)).expect("a problem");
        let forward = exact::forward(&wide, &of_wide);
        let saved = Saved::from(&exact::forward(&narrow, &inputs));
        let gradients = exact::backward(&wide, &of_wide, &saved);
        let all: Vec<(Quantity, Range)> =
            oracle.forward().into_iter().chain(oracle.backward(&saved)).collect();
        assert_eq!(
            all.iter().map(|(quantity, _)| *quantity).collect::<std::collections::HashSet<_>>().len(),
            6
        );
        for (quantity, range) in all {
            let Range { exact, least, most } = range;
            assert!(least <= exact && exact <= most, "{seed}: {} {range:?}", quantity.name());
            let right = match quantity {
                Quantity::Out => largest(forward.out.iter().copied()),
                Quantity::Dq => largest(gradients.dq.iter().copied()),
                Quantity::Dk => largest(gradients.dk.iter().copied()),
                Quantity::Dv => largest(gradients.dv.iter().copied()),
                Quantity::P => largest(exact::largest_weights(&wide, &of_wide)),
                Quantity::Ds => continue,
            };
            assert!((exact - right).abs() <= 1e-9 * right, "{seed}: {} {exact} {right}", quantity.name());
            bounded += usize::from(right > 0.0 && most < 2.0 * right);
        }
    }
    assert!(bounded > 100, "{bounded}");
}

/// Test that a weight below the range of f32, beside a sink that takes the row, may have become nothing.
#[test]
fn a_weight_below_the_range_of_f32_may_be_gone() {
    let mut gone = 0;
    for seed in 0..40 {
        let [(narrow, mut inputs), _] = drawn(seed, 1.0);
        let mut fields = ProblemFields::from(narrow);
        fields.softmax.sink = Sink::OffByOne;
        let narrow = Problem::new(fields).expect("a problem");
        inputs.sink = ndarray::Array1::zeros(0);
        for number in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0] {
            inputs.q.fill(number);
            inputs.k.fill(-number);
            let (arithmetic, partition) = (Arithmetic::default(), Partition::single(8, 8));
            let oracle = AmaxOracle::new(&narrow, &inputs, arithmetic, partition).expect("a problem");
            let (_, range) = oracle.forward()[0];
            assert!(range.least <= range.exact && range.exact <= range.most);
            if range.exact < f64::from(f32::MIN_POSITIVE) {
                assert_eq!(range.least, 0.0, "{seed}: {range:?}");
                gone += usize::from(range.exact > 0.0);
            }
        }
    }
    assert!(gone > 5, "{gone}");
}
