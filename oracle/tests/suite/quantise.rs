//! Quantising: groups and factors against plain restatements, and laws that every recipe keeps.

use ndarray::{Array3, s};
use seamproof_oracle::groups::Groups;
use seamproof_oracle::quantise::{
    Answer, Delayed, Factors, Quantisation, QuantisationError, QuantisationFields, ScaleRule, Takes, quantise,
};
use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{
    E8m0, Element, Format, Heads, InputViews, Inputs, Pass, Problem, ProblemFields, Scaling, TensorName,
};

use crate::common::{Draws, random};

const SCALINGS: [Scaling; 7] = [
    Scaling::PerTensor,
    Scaling::PerHead,
    Scaling::PerSequenceHead,
    Scaling::PerSequenceGroup,
    Scaling::PerTokenHead,
    Scaling::PerBlock { rows: 1, columns: 4 },
    Scaling::PerBlock { rows: 3, columns: 2 },
];

const TENSORS: [TensorName; 4] = [TensorName::Q, TensorName::K, TensorName::V, TensorName::Dout];

fn current(problem: &Problem, format: Format, scaling: Scaling, scale: ScaleRule) -> QuantisationFields {
    QuantisationFields {
        problem: problem.clone(),
        tensors: TENSORS.to_vec(),
        element: Element { format, scaling },
        scale,
        margin: 0,
        delayed: None,
    }
}

fn answer(fields: QuantisationFields, inputs: &Inputs) -> Answer {
    quantise(&Quantisation::new(fields).expect("a legal quantisation"), inputs).expect("finite values")
}

/// Returns a problem of one sequence and one head, with these queries.
fn queries(values: &[f32]) -> (Problem, Inputs) {
    let fields =
        ProblemFields { pass: Pass::Forward, ..ProblemFields::packed(&[(values.len(), values.len())], 1) };
    let problem = Problem::new(fields).expect("a legal problem");
    let q = Array3::from_shape_vec([values.len(), 1, 1], values.to_vec()).expect("one lane each");
    let inputs = Inputs {
        k: q.clone(),
        v: q.clone(),
        q,
        dout: Array3::zeros([0, 1, 1]),
        sink: Default::default(),
        scales: Default::default(),
    };
    (problem, inputs)
}

/// Returns q's codes, scale and descale under one scale for the tensor.
fn of_queries(values: &[f32], rule: ScaleRule, delayed: Option<Delayed>) -> (Vec<u8>, f32, f32) {
    let (problem, inputs) = queries(values);
    let fields = current(&problem, Format::E4m3, Scaling::PerTensor, rule);
    let got = answer(QuantisationFields { tensors: vec![TensorName::Q], delayed, ..fields }, &inputs);
    let q = &got.tensors[0];
    (q.codes.iter().copied().collect(), q.scale[[0, 0, 0]], q.descale[[0, 0, 0]])
}

#[test]
fn small_tensors_have_the_codes_that_a_reader_works_out() {
    // 448 / 7 = 64: 1 → 64 (exponent 6, code 0x68), −7 → −448, 0.03 → 1.92 → 1.875 (1.111b · 2^0).
    let (codes, scale, descale) = of_queries(&[1.0, -7.0, 0.03, -0.0], ScaleRule::F32, None);
    assert_eq!((codes.as_slice(), scale, descale), (&[0x68, 0xfe, 0x3f, 0x80][..], 64.0, 1.0 / 64.0));
    // 448 / 5 = 89.6, whose largest power of two is 64: 5 → 320 (1.01b · 2^8).
    let (codes, scale, descale) = of_queries(&[5.0, 1.0], ScaleRule::PowerOfTwo, None);
    assert_eq!((codes.as_slice(), scale, descale), (&[0x7a, 0x68][..], 64.0, 1.0 / 64.0));
    // ⌊log₂ 500⌋ = 8 is the exponent of 448: δ is 1 and 500 saturates. Rounded up, δ is 2 and 500 becomes 250 → 256.
    assert_eq!(of_queries(&[500.0], ScaleRule::E8m0Down, None), (vec![0x7e], 1.0, 1.0));
    assert_eq!(of_queries(&[500.0], ScaleRule::E8m0Up, None), (vec![0x78], 0.5, 2.0));
    // Zeros keep the scale 1, and in E8M0 have the least one.
    for rule in [ScaleRule::F32, ScaleRule::PowerOfTwo] {
        assert_eq!(of_queries(&[0.0, -0.0], rule, None), (vec![0x00, 0x80], 1.0, 1.0));
    }
    let least = E8m0::from_code(0).value() as f32;
    assert_eq!(of_queries(&[0.0], ScaleRule::E8m0Up, None), (vec![0], 1.0 / least, least));
}

#[test]
fn the_product_is_rounded_to_f32_before_it_is_rounded_to_the_format() {
    let format = Format::E4m3;
    let scale = ScaleRule::F32.factors(format, 0, 3.0, Factors::ONE).scale;
    let codes = |value: f32| {
        let exact = f64::from(value) * f64::from(scale);
        [exact, f64::from(value * scale)].map(|product| format.encode(product) as u8)
    };
    let midpoints = (0..0x7eu32).map(|code| (format.decode(code) + format.decode(code + 1)) / 2.0);
    let mut near = midpoints.flat_map(|middle| {
        let value = (middle / f64::from(scale)) as f32;
        [value.next_down(), value, value.next_up()]
    });
    let differing = near.find(|value| codes(*value)[0] != codes(*value)[1]);
    let value = differing.expect("some product is a midpoint in f32 alone");
    assert_eq!(of_queries(&[3.0, value], ScaleRule::F32, None).0[1], codes(value)[1], "{value:e}");
}

#[test]
fn a_delayed_recipe_takes_the_history_and_may_saturate() {
    let delayed = |takes, history: &[f32]| Delayed { history: history.to_vec(), takes, previous: 32.0 };
    let of = |takes, history: &[f32], value: f32| {
        of_queries(&[value], ScaleRule::F32, Some(delayed(takes, history)))
    };
    assert_eq!(of(Takes::Max, &[1.0, 4.0, 2.0], 8.0), (vec![0x7e], 112.0, 1.0 / 112.0), "896 saturates");
    assert_eq!(of(Takes::MostRecent, &[1.0, 4.0, 2.0], 0.5).1, 448.0);
    assert_eq!(of(Takes::MostRecent, &[0.0, 4.0], 1.0), (vec![0x60], 32.0, 1.0 / 32.0), "the earlier scale");
    assert_eq!(of(Takes::Max, &[0.0, 0.0], 1.0).1, 32.0);
    assert_eq!(of(Takes::Max, &[1e-38], 0.0).1, f32::MAX, "448e38 is past f32");

    let (problem, inputs) = queries(&[-3.0, 1.0]);
    let fields = QuantisationFields {
        delayed: Some(delayed(Takes::Max, &[5.0, 6.0, 7.0])),
        tensors: vec![TensorName::Q],
        margin: 2,
        ..current(&problem, Format::E5m2, Scaling::PerTensor, ScaleRule::F32)
    };
    let got = answer(fields, &inputs);
    assert_eq!(got.history, Some(vec![3.0, 5.0, 6.0]));
    assert_eq!(got.tensors[0].scale[[0, 0, 0]], 57344.0 / 4.0 / 7.0);
    assert_eq!(got.tensors[0].amax[[0, 0, 0]], 3.0, "the present amax, which this step does not use");
}

#[test]
fn rules_agree_with_kernels_that_work_on_bits() {
    let mut draws = Draws(31);
    for format in [Format::E4m3, Format::E5m2] {
        let largest = format.max_finite() as f32;
        let edges = (-149..128).flat_map(|exponent| {
            let edge = libm::ldexp(f64::from(largest), exponent) as f32;
            [edge.next_down(), edge, edge.next_up()]
        });
        let drawn: Vec<f32> =
            (0..100_000).map(|_| f32::from_bits(draws.next() as u32 & 0x7fff_ffff)).collect();
        for amax in edges.chain(drawn).filter(|amax| amax.is_finite() && *amax > 0.0) {
            let factors = |rule: ScaleRule| rule.factors(format, 0, amax, Factors::ONE);
            let quotient = largest / amax;
            let quotient = if quotient.is_infinite() { f32::MAX } else { quotient };
            let plain = Factors { scale: quotient, descale: 1.0 / quotient };
            assert_eq!(factors(ScaleRule::F32), plain, "{amax:e}");
            // TransformerEngine keeps sign and exponent of the quotient.
            let masked = f32::from_bits(quotient.to_bits() & 0xff80_0000);
            assert_eq!(factors(ScaleRule::PowerOfTwo).scale, masked, "{amax:e}");
            // TransformerEngine's `float_to_e8m0` of the product with 1/448 (or 1/57344), away from f32's subnormals.
            let product = amax * (1.0 / largest);
            if product.is_normal() {
                let code = (product.to_bits() >> 23) + u32::from(product.to_bits() & 0x7f_ffff > 0);
                let descale = E8m0::from_code(code.min(254) as u8).value() as f32;
                assert_eq!(factors(ScaleRule::E8m0Up).descale, descale, "{amax:e}");
            }
        }
    }
}

/// Returns the elements of a tensor that share a scale with one of them, said in words for each scaling.
fn are_together(
    problem: &Problem,
    tensor: TensorName,
    scaling: Scaling,
    a: [usize; 4],
    b: [usize; 4],
) -> bool {
    let group = if tensor.side() == seamproof_oracle::Side::Q { problem.group() } else { 1 };
    let [sequence, position, head] = [0, 1, 2].map(|index| a[index] == b[index]);
    match scaling {
        Scaling::None | Scaling::PerTensor => true,
        Scaling::PerHead => head,
        Scaling::PerSequenceHead => sequence && head,
        Scaling::PerSequenceGroup => sequence && a[2] / group == b[2] / group,
        Scaling::PerTokenHead => sequence && position && head,
        Scaling::PerBlock { rows, columns } => {
            sequence && a[1] / rows == b[1] / rows && head && a[3] / columns == b[3] / columns
        }
    }
}

#[test]
fn elements_share_a_group_as_the_scaling_says_and_every_group_lies_in_the_shape() {
    for seed in 0..12 {
        let (problem, _) = random(seed, 5);
        for (tensor, scaling) in TENSORS.into_iter().flat_map(|t| SCALINGS.map(|scaling| (t, scaling))) {
            let groups = Groups::new(&problem, tensor, scaling);
            let [_, heads, lanes] = problem.shape_of(tensor);
            let mut elements = Vec::new();
            for (sequence, both) in problem.sequences.iter().enumerate() {
                for position in 0..run_of(both, tensor.side()).span {
                    let of_row =
                        (0..heads * lanes).map(|index| [sequence, position, index / lanes, index % lanes]);
                    elements.extend(of_row);
                }
            }
            let of = |[sequence, position, head, lane]: [usize; 4]| groups.of(sequence, position, head, lane);
            for &a in elements.iter().step_by(3) {
                assert!(of(a).iter().zip(groups.shape()).all(|(at, len)| *at < len), "{scaling:?} {a:?}");
                for &b in elements.iter().step_by(2) {
                    let together = are_together(&problem, tensor, scaling, a, b);
                    assert_eq!(of(a) == of(b), together, "{scaling:?} {a:?} {b:?}");
                }
            }
        }
    }
}

/// Every recipe without history: formats, scalings, rules.
fn recipes() -> impl Iterator<Item = (Format, Scaling, ScaleRule)> {
    let of = |format| SCALINGS.into_iter().flat_map(move |s| ScaleRule::ALL.map(|rule| (format, s, rule)));
    [Format::E4m3, Format::E5m2].into_iter().flat_map(of)
}

#[test]
fn a_code_stands_for_the_nearest_value_unless_it_saturates() {
    for seed in 0..6 {
        let (problem, inputs) = random(seed, 6);
        for (format, scaling, rule) in recipes() {
            let got = answer(current(&problem, format, scaling, rule), &inputs);
            for (tensor, of) in TENSORS.into_iter().zip(&got.tensors) {
                let groups = Groups::new(&problem, tensor, scaling);
                assert_eq!(of.scale.dim(), groups.shape().into());
                for (sequence, both) in problem.sequences.iter().enumerate() {
                    for (position, row) in run_of(both, tensor.side()).real_rows().enumerate() {
                        for ((head, lane), value) in
                            InputViews::from(&inputs).of(tensor).slice(s![row, .., ..]).indexed_iter()
                        {
                            let group = groups.of(sequence, position, head, lane);
                            let (amax, scale) = (of.amax[group], of.scale[group]);
                            assert!(value.abs() <= amax, "{tensor} {scaling:?}");
                            let scaled = f64::from(value * scale);
                            let code = format.decode(u32::from(of.codes[[row, head, lane]]));
                            let error = (code - scaled).abs();
                            assert!(
                                error <= format.half_spacing(scaled.abs()),
                                "{tensor} {scaling:?} {rule:?}"
                            );
                            let saturates = scaled.abs() > format.max_finite() * (1.0 + 1e-6);
                            assert!(
                                !saturates || rule == ScaleRule::E8m0Down,
                                "{tensor} {scaling:?} {rule:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_that_are_not_real_have_codes_of_zero_and_move_nothing() {
    for seed in 0..8 {
        let (problem, inputs) = random(seed, 6);
        let mut other = inputs.clone();
        for tensor in [&mut other.q, &mut other.k, &mut other.v, &mut other.dout] {
            tensor.mapv_inplace(|value| if value.is_nan() { 3e38 } else { value });
        }
        for (format, scaling, rule) in recipes() {
            let fields = current(&problem, format, scaling, rule);
            let got = answer(fields.clone(), &inputs);
            assert_eq!(got, answer(fields, &other), "{scaling:?}");
            for (tensor, of) in TENSORS.into_iter().zip(&got.tensors) {
                let views = InputViews::from(&inputs);
                let values = views.of(tensor);
                assert!(values.iter().zip(&of.codes).all(|(value, code)| !value.is_nan() || *code == 0));
            }
        }
    }
}

#[test]
fn powers_of_two_pass_through_every_recipe() {
    for seed in 0..6 {
        let (problem, inputs) = random(seed, 6);
        for (format, scaling, rule) in recipes() {
            let fields = current(&problem, format, scaling, rule);
            let mut larger = inputs.clone();
            for tensor in [&mut larger.q, &mut larger.k, &mut larger.v, &mut larger.dout] {
                tensor.mapv_inplace(|value| value * 32.0);
            }
            for (one, other) in
                answer(fields.clone(), &inputs).tensors.iter().zip(&answer(fields, &larger).tensors)
            {
                assert_eq!(one.codes, other.codes, "{scaling:?} {rule:?}");
                // A group of zeros has no factor to pass on.
                let factors = one.amax.iter().zip(one.descale.iter().zip(&other.descale));
                assert!(factors.into_iter().all(|(amax, (one, other))| *amax == 0.0 || one * 32.0 == *other));
            }
        }
    }
}

#[test]
fn a_sequence_alone_has_the_codes_that_it_has_in_a_pack() {
    let alone = |scaling: &Scaling| !matches!(scaling, Scaling::PerTensor | Scaling::PerHead);
    for seed in 0..10 {
        let (problem, inputs) = random(seed, 6);
        for (format, scaling, rule) in recipes().filter(|(_, scaling, _)| alone(scaling)) {
            let pack = answer(current(&problem, format, scaling, rule), &inputs);
            for sequence in &problem.sequences {
                let single =
                    Problem::new(ProblemFields { sequences: vec![*sequence], ..problem.clone().into() });
                let single = single.expect("a part of a legal problem");
                let got = answer(current(&single, format, scaling, rule), &inputs);
                for (tensor, (one, all)) in TENSORS.into_iter().zip(got.tensors.iter().zip(&pack.tensors)) {
                    for row in run_of(sequence, tensor.side()).real_rows() {
                        let [one, all] = [one, all].map(|of| of.codes.slice(s![row, .., ..]));
                        assert_eq!(one, all, "{tensor} {scaling:?}");
                    }
                }
            }
        }
    }
}

/// Returns inputs that differ in every token of a sequence but its first, which is not 0.
fn with_other_later_tokens(problem: &Problem, inputs: &Inputs) -> Inputs {
    let mut other = inputs.clone();
    for sequence in &problem.sequences {
        for (tensor, run) in [
            (&mut other.q, sequence.q),
            (&mut other.k, sequence.kv),
            (&mut other.v, sequence.kv),
            (&mut other.dout, sequence.q),
        ] {
            for row in run.real_rows().skip(1) {
                tensor.slice_mut(s![row, .., ..]).mapv_inplace(|value| 7.0 * value + 1.0);
            }
        }
    }
    other
}

#[test]
fn later_tokens_move_no_code_of_earlier_ones_exactly_where_a_recipe_keeps_prefixes() {
    let history = || Delayed { history: vec![2.0], takes: Takes::Max, previous: 1.0 };
    let of_the_present = recipes().map(|recipe| (recipe, None));
    let delayed = [ScaleRule::F32, ScaleRule::PowerOfTwo]
        .map(|rule| ((Format::E4m3, Scaling::PerTensor, rule), Some(history())));
    for ((format, scaling, rule), delayed) in of_the_present.chain(delayed) {
        let mut moved = false;
        for seed in 0..8 {
            let (problem, inputs) = random(seed, 6);
            let fields =
                QuantisationFields { delayed: delayed.clone(), ..current(&problem, format, scaling, rule) };
            let other = answer(fields.clone(), &with_other_later_tokens(&problem, &inputs));
            let own = answer(fields, &inputs);
            for (tensor, (own, other)) in TENSORS.into_iter().zip(own.tensors.iter().zip(&other.tensors)) {
                let first = |sequence| run_of(sequence, tensor.side()).real_rows().next();
                moved |= problem
                    .sequences
                    .iter()
                    .filter_map(first)
                    .any(|row| own.codes.slice(s![row, .., ..]) != other.codes.slice(s![row, .., ..]));
            }
        }
        let (problem, _) = random(0, 6);
        let asked = QuantisationFields { delayed, ..current(&problem, format, scaling, rule) };
        let asked = Quantisation::new(asked).expect("a legal quantisation");
        assert_eq!(moved, !asked.keeps_prefixes(), "{scaling:?} {rule:?}");
    }
}

#[test]
fn a_shared_scale_is_that_of_the_largest_tensor() {
    let (problem, mut inputs) = queries(&[1.0]);
    inputs.v.fill(-14.0);
    let fields = QuantisationFields {
        tensors: vec![TensorName::Q, TensorName::V],
        ..current(&problem, Format::E4m3, Scaling::PerTensor, ScaleRule::F32)
    };
    let got = answer(fields.clone(), &inputs);
    assert!(got.tensors.iter().all(|of| of.amax[[0, 0, 0]] == 14.0 && of.scale[[0, 0, 0]] == 32.0));
    let element = Element { scaling: Scaling::PerHead, ..fields.element };
    let apart = answer(QuantisationFields { element, ..fields }, &inputs);
    assert_eq!(apart.tensors[0].amax[[0, 0, 0]], 1.0);
}

#[test]
fn what_is_no_quantisation_is_refused_and_a_legal_one_is_read_back() {
    let (problem, mut inputs) = queries(&[1.0, 2.0]);
    let fields = QuantisationFields {
        tensors: vec![TensorName::K],
        ..current(&problem, Format::E4m3, Scaling::PerTensor, ScaleRule::F32)
    };
    let delayed = Delayed { history: vec![1.0], takes: Takes::Max, previous: 1.0 };
    let refused = |edit: &dyn Fn(&mut QuantisationFields)| {
        let mut fields = fields.clone();
        edit(&mut fields);
        Quantisation::new(fields).expect_err("not legal")
    };
    let bf16 = Element { format: Format::Bf16, scaling: Scaling::PerTensor };
    assert_eq!(refused(&|f| f.element = bf16), QuantisationError::Element(bf16));
    assert!(matches!(refused(&|f| f.element = Format::E4m3.into()), QuantisationError::Element(_)));
    assert_eq!(refused(&|f| f.tensors.clear()), QuantisationError::NoTensors);
    let twice = QuantisationError::Tensors(TensorName::K, 2);
    assert_eq!(refused(&|f| f.tensors.push(TensorName::K)), twice);
    assert!(matches!(refused(&|f| f.tensors = vec![TensorName::Lse]), QuantisationError::Tensors(..)));
    assert_eq!(refused(&|f| f.tensors.push(TensorName::Dout)), QuantisationError::NoDout);
    assert_eq!(refused(&|f| f.margin = -17), QuantisationError::Margin(-17));
    let with = |delayed: Delayed| refused(&|f| f.delayed = Some(delayed.clone()));
    assert_eq!(with(Delayed { history: vec![], ..delayed.clone() }), QuantisationError::History(0));
    let negative = with(Delayed { history: vec![1.0, -1.0], ..delayed.clone() });
    assert_eq!(negative, QuantisationError::DelayedValue("history", -1.0));
    let zero = with(Delayed { previous: 0.0, ..delayed.clone() });
    assert_eq!(zero, QuantisationError::DelayedValue("previous", 0.0));
    let in_e8m0 = refused(&|f| (f.scale, f.delayed) = (ScaleRule::E8m0Up, Some(delayed.clone())));
    assert!(matches!(in_e8m0, QuantisationError::DelayedScaling(..)));

    let legal = QuantisationFields { delayed: Some(delayed), margin: -2, ..fields };
    let legal = Quantisation::new(legal).expect("a legal quantisation");
    let text = serde_json::to_string(&legal).expect("plain data");
    assert_eq!(serde_json::from_str::<Quantisation>(&text).expect("what was written"), legal);
    inputs.k[[1, 0, 0]] = f32::NEG_INFINITY;
    let error = quantise(&legal, &inputs).expect_err("a value that is not finite");
    assert_eq!((error.tensor, error.row), (TensorName::K, 1));
}

#[test]
fn grouped_queries_share_a_scale_per_group_of_heads() {
    let fields =
        ProblemFields { heads: Heads { q: 4, kv: 2 }, ..ProblemFields::packed(&[(1, 1), (1, 1)], 1) };
    let problem = Problem::new(fields).expect("a legal problem");
    let q = Array3::from_shape_fn([2, 4, 1], |(row, head, _)| (1 + 4 * row + head) as f32);
    let [k, v] = [1.0, 2.0].map(|value| Array3::from_elem([2, 2, 1], value));
    let inputs = Inputs { dout: q.clone(), q, k, v, sink: Default::default(), scales: Default::default() };
    let got =
        answer(current(&problem, Format::E4m3, Scaling::PerSequenceGroup, ScaleRule::PowerOfTwo), &inputs);
    assert_eq!(got.tensors[0].amax.iter().copied().collect::<Vec<f32>>(), [2.0, 4.0, 6.0, 8.0]);
    assert_eq!(got.tensors[1].amax.dim(), (2, 2, 1));
}
