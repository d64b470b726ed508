//! Scales as inputs: a problem in codes and scales is the problem of their products.

use ndarray::{Array3, s};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    Inputs, Problem, ProblemFields, Saved, ScaleValues, Scales, Scaling, TensorName, blocked, exact,
};

use crate::common::{Draws, random, scaled};

/// Returns the problem and the inputs without scales: every real element times its scale, which is exact in f32 for
/// these numbers.
fn multiplied(problem: &Problem, inputs: &Inputs) -> (Problem, Inputs) {
    let mut fields = ProblemFields::from(problem.clone());
    let precision = &mut fields.precision;
    for element in [&mut precision.q, &mut precision.k, &mut precision.v, &mut precision.dout] {
        element.scaling = Scaling::None;
    }
    let mut plain = inputs.clone();
    plain.scales = Scales::default();
    for (tensor, to) in
        Scales::TENSORS.into_iter().zip([&mut plain.q, &mut plain.k, &mut plain.v, &mut plain.dout])
    {
        let scales = inputs.scales.of(tensor).expect("every input is scaled");
        for (sequence, both) in problem.sequences.iter().enumerate() {
            for (position, row) in run_of(both, tensor.side()).real_rows().enumerate() {
                for ((head, lane), value) in to.slice_mut(s![row, .., ..]).indexed_iter_mut() {
                    let exact = f64::from(*value) * scales.of(sequence, position, head, lane);
                    *value = exact as f32;
                    assert_eq!(f64::from(*value), exact, "few bits in the tests' numbers");
                }
            }
        }
    }
    (Problem::new(fields).expect("scalings change no shape"), plain)
}

fn drawn(seed: u64) -> (Problem, Inputs) {
    let (problem, inputs) = random(seed, 6);
    scaled(&problem, inputs, &mut Draws(seed + 1000))
}

#[test]
fn codes_and_scales_have_the_answer_of_their_products() {
    for seed in 0..60 {
        let (problem, inputs) = drawn(seed);
        let (plain, products) = multiplied(&problem, &inputs);
        let forward = exact::forward(&problem, &inputs);
        assert_eq!(forward, exact::forward(&plain, &products), "{seed}");
        let saved = Saved::from(&forward);
        let gradients = exact::backward(&problem, &inputs, &saved);
        assert_eq!(gradients, exact::backward(&plain, &products, &saved), "{seed}");
        assert_eq!(
            blocked::forward(&problem, &inputs, None).exact,
            blocked::forward(&plain, &products, None).exact,
            "{seed}"
        );
        assert_eq!(
            blocked::backward(&problem, &inputs, &saved, None).exact,
            blocked::backward(&plain, &products, &saved, None).exact,
            "{seed}"
        );
    }
}

#[test]
fn doubling_every_scale_of_values_doubles_the_output_bit_for_bit() {
    for seed in 0..30 {
        let (problem, inputs) = drawn(seed);
        let scales = |factor: f32| {
            Scales::new(&problem, |tensor, _, at| {
                let own = inputs.scales.of(tensor).expect("every input is scaled").descale()[at];
                if tensor == TensorName::V { factor * own } else { own }
            })
        };
        let one = exact::forward(&problem, &inputs);
        let two = exact::forward(&problem, &Inputs { scales: scales(2.0), ..inputs.clone() });
        assert_eq!(two.out, one.out.mapv(|out| 2.0 * out));
        assert_eq!(two.lse, one.lse);
        assert_eq!(exact::forward(&problem, &Inputs { scales: scales(1.0), ..inputs.clone() }), one);
    }
}

#[test]
fn scales_that_are_missing_too_many_or_of_other_groups_are_refused() {
    let (problem, inputs) = drawn(3);
    let missing = Inputs { scales: Scales::default(), ..inputs.clone() };
    assert_eq!(missing.check(&problem).map_err(|error| error.tensor), Err("scales"));
    let (plain, products) = multiplied(&problem, &inputs);
    let many = Inputs { scales: inputs.scales.clone(), ..products };
    assert_eq!(many.check(&plain).map_err(|error| error.tensor), Err("scales"));
    let mut fields = ProblemFields::from(problem.clone());
    fields.precision.k.scaling = Scaling::PerBlock { rows: 1, columns: 1 };
    let other = Problem::new(fields).expect("a scaling changes no shape");
    assert!(inputs.check(&other).is_err());
}

#[test]
fn a_value_has_all_bits_of_code_and_scale() {
    let fields = ProblemFields::packed(&[(1, 1)], 1);
    let mut fields = ProblemFields { scales: ScaleValues::Any, ..fields };
    fields.precision.v.scaling = Scaling::PerTensor;
    let problem = Problem::new(fields).expect("a legal problem");
    let one = Array3::from_elem([1, 1, 1], 1.0);
    let (code, scale) = (1.875f32, 1.0 + f32::EPSILON);
    let scales = Scales::new(&problem, |_, _, _| scale);
    let inputs = Inputs {
        q: one.clone(),
        k: one.clone(),
        v: one.mapv(|one: f32| one * code),
        dout: one,
        sink: Default::default(),
        scales,
    };
    let out = exact::forward(&problem, &inputs).out[[0, 0, 0]];
    assert_eq!(out, f64::from(code) * f64::from(scale));
    assert_ne!(out, f64::from(code * scale), "the product is no number of f32");
    let text = serde_json::to_value(&problem).expect("plain data");
    assert_eq!(text["scales"], "any");
    assert_eq!(serde_json::from_value::<Problem>(text).expect("what was written"), problem);
}
