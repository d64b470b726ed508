//! Values of inputs, drawn and poisoned.

use ndarray::{Array3, Axis, s};
use seamproof_judge::hash::lane_hash;
use seamproof_judge::oracle::{
    Dims, Element, Format, Heads, InputMode, Inputs, Pass, Precision, Problem, ProblemFields, Run,
    ScaleValues, Scaling, Sequence, Sink, Softmax, TensorName, TensorRows, TensorScales,
};
use seamproof_judge::values::{Poison, inputs, poison, poison_rows, real_kv_rows, real_q_rows};

use seamproof_judge::generate::{Draw, Limits, draw};

/// Returns two sequences, the first with padding; there are a gap, a first offset, and slack on both sides.
fn fields(mode: InputMode, format: Format) -> ProblemFields {
    let sequences = vec![
        Sequence { id: 4, q: Run::packed(1, 40, 43), kv: Run::packed(2, 50, 51) },
        Sequence { id: 9, q: Run::packed(45, 3, 3), kv: Run::packed(53, 2, 4) },
    ];
    ProblemFields {
        rows: TensorRows { q: 50, kv: 60 },
        heads: Heads { q: 4, kv: 2 },
        dims: Dims { qk: 64, v: 32 },
        softmax: Softmax { sink: Sink::Learnable, ..Softmax::scaled(0.125) },
        precision: Precision::uniform(format),
        mode,
        data_seed: 17,
        ..ProblemFields::of(sequences, 64)
    }
}

fn problem(fields: ProblemFields) -> Problem {
    Problem::new(fields).expect("legal")
}

fn bits(array: &Array3<f32>, row: usize) -> Vec<u32> {
    array.index_axis(Axis(0), row).iter().map(|value| value.to_bits()).collect()
}

fn deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (values.map(|value| (value - mean) * (value - mean)).sum::<f64>() / count).sqrt()
}

/// Returns all logits of one KV head's first query head in the first sequence.
fn logits(problem: &Problem, inputs: &Inputs) -> Vec<f64> {
    let sequence = problem.sequences[0];
    let mut logits = vec![];
    for (q, kv) in sequence.q.real_rows().flat_map(|q| sequence.kv.real_rows().map(move |kv| (q, kv))) {
        let lanes = 0..problem.dims.qk;
        let dot: f64 = lanes.map(|n| f64::from(inputs.q[[q, 0, n]]) * f64::from(inputs.k[[kv, 0, n]])).sum();
        logits.push(dot * f64::from(problem.softmax.scale));
    }
    logits
}

#[test]
fn the_hash_is_the_documented_one() {
    // The first list holds the first outputs of SplitMix64 with seed 0, as published. The second and third lists were
    // made by a script from the module's text.
    assert_eq!([0, 1].map(|lane| lane_hash(0, lane)), [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    let inputs = inputs(&problem(fields(InputMode::Peaked, Format::F32)));
    let bits = [inputs.q[[1, 0, 0]], inputs.k[[53, 1, 63]], inputs.v[[3, 1, 5]], inputs.dout[[46, 3, 31]]];
    assert_eq!(bits.map(f32::to_bits), [3_226_977_280, 3_181_031_424, 1_065_689_710, 1_026_613_948]);
    assert_eq!(
        inputs.sink.map(|value| value.to_bits()).to_vec(),
        [1_067_992_996, 1_066_541_778, 1_046_109_024, 1_063_859_400]
    );
}

#[test]
fn every_mode_is_pinned() {
    let digest = |mode| {
        let mut hasher = blake3::Hasher::new();
        for format in [Format::Bf16, Format::Fp16] {
            let inputs = inputs(&problem(fields(mode, format)));
            for tensor in [&inputs.q, &inputs.k, &inputs.v, &inputs.dout] {
                tensor.iter().for_each(|value| {
                    hasher.update(&value.to_bits().to_le_bytes());
                });
            }
        }
        hasher.finalize().to_hex()[..8].to_owned()
    };
    assert_eq!(
        InputMode::ALL.map(digest),
        [
            "3eb63fb3", "9001a9e7", "3ca57dd5", "7e117354", "bb92fa4e", "679c2448", "05d25b41", "1d21eee4",
            "27433b0f", "f3c69c5f", "8f1aa3e5", "78a02af9", "4b9f0a20", "76ac780b", "1926357d", "ba0319f3",
            "fd8aab1f", "129e5022"
        ]
    );
}

#[test]
fn shapes_are_the_problems_and_rows_without_tokens_are_zero() {
    for mode in InputMode::ALL {
        for pass in [Pass::Forward, Pass::Backward] {
            let problem = problem(ProblemFields { pass, ..fields(mode, Format::Bf16) });
            let inputs = inputs(&problem);
            assert_eq!(inputs.check(&problem), Ok(()));
            for row in [0, 41, 43, 44, 48, 49] {
                assert!(bits(&inputs.q, row).iter().all(|&bits| bits == 0));
            }
            assert!(bits(&inputs.v, 52).iter().all(|&bits| bits == 0));
        }
    }
}

#[test]
fn values_are_numbers_of_their_format() {
    for mode in InputMode::ALL {
        for format in Format::ALL {
            let inputs = inputs(&problem(fields(mode, format)));
            for value in [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].into_iter().flatten() {
                assert!(value.is_finite());
                assert_eq!(format.round_f32(*value).to_bits(), value.to_bits(), "{mode:?} {format}");
            }
        }
    }
}

#[test]
fn dropping_or_moving_a_sequence_changes_no_other_value() {
    for mode in InputMode::ALL {
        let both = fields(mode, Format::Fp16);
        let mut alone = both.clone();
        alone.sequences.remove(0);
        alone.sequences[0].q = Run { offset: 5, step: 7, ..both.sequences[1].q };
        let [whole, part] = [both, alone].map(|fields| inputs(&problem(fields)));
        for position in 0..3 {
            assert_eq!(bits(&whole.q, 45 + position), bits(&part.q, 5 + 7 * position));
            assert_eq!(bits(&whole.dout, 45 + position), bits(&part.dout, 5 + 7 * position));
        }
        for row in [53, 54] {
            assert_eq!(bits(&whole.k, row), bits(&part.k, row));
            assert_eq!(bits(&whole.v, row), bits(&part.v, row));
        }
        assert_eq!(whole.sink, part.sink);
    }
}

#[test]
fn logits_spread_as_the_mode_promises() {
    let promises = [(InputMode::Flat, 0.5), (InputMode::Peaked, 3.0), (InputMode::Large, 64.0)];
    for (mode, promised) in promises {
        for (scale, qk) in [(0.125, 64), (1.0, 16), (0.01, 256)] {
            let mut fields = fields(mode, Format::Bf16);
            (fields.softmax.scale, fields.dims.qk) = (scale, qk);
            let problem = problem(fields);
            let got = deviation(logits(&problem, &inputs(&problem)).into_iter());
            assert!((got / promised - 1.0).abs() < 0.15, "{mode:?} scale {scale} dim {qk}: {got}");
        }
    }
}

#[test]
fn logits_of_a_sunk_row_are_far_from_0_and_alike() {
    let (mut below, mut past) = (0, [0, 0]);
    for (scale, qk, format) in [(0.125, 64, Format::Bf16), (1.7, 3, Format::Fp16), (0.01, 256, Format::Fp16)]
    {
        let mut fields = fields(InputMode::Sunk, format);
        (fields.softmax.scale, fields.dims.qk) = (scale, qk);
        let problem = problem(fields);
        let inputs = inputs(&problem);
        for (row, sequence) in problem.sequences.iter().flat_map(|s| s.q.real_rows().map(move |row| (row, s)))
        {
            let logits: Vec<f64> = sequence
                .kv
                .real_rows()
                .map(|key| {
                    let lanes =
                        inputs.q.slice(s![row, 0, ..]).into_iter().zip(inputs.k.slice(s![key, 0, ..]));
                    f64::from(scale) * lanes.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
                })
                .collect();
            let (least, most) = logits.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
            if logits.is_empty() {
                continue;
            }
            assert!(least.abs() > 85.0 && most.abs() < 210_000.0, "{least} to {most}");
            assert!(most - least < 5.0, "{least} to {most}");
            below += usize::from(most < 0.0);
            past[0] += usize::from(most < -1_000.0 && least > -2_000.0);
            past[1] += usize::from(most < -50_000.0 && least > -60_000.0);
        }
    }
    assert!(below > 4 && past[0] > 1 && past[1] > 0, "{below} {past:?}");
}

#[test]
fn near_normal_values_have_mean_0_and_variance_1() {
    let inputs = inputs(&problem(fields(InputMode::Flat, Format::F32)));
    let values = inputs.v.iter().filter(|value| **value != 0.0).map(|value| f64::from(*value));
    let mean = values.clone().sum::<f64>() / values.clone().count() as f64;
    assert!(mean.abs() < 0.06, "{mean}");
    assert!((deviation(values) - 1.0).abs() < 0.04);
}

#[test]
fn modes_are_what_they_say() {
    let of = |mode, format| inputs(&problem(fields(mode, format)));
    let integers = of(InputMode::Integers, Format::Bf16);
    assert!(integers.q.iter().all(|value| value.fract() == 0.0 && value.abs() <= 2.0));
    assert!(integers.v.iter().any(|value| *value == 4.0));
    let equal = of(InputMode::Equal, Format::Bf16);
    assert_eq!(bits(&equal.k, 2), bits(&equal.k, 51));
    assert_ne!(bits(&equal.k, 2), bits(&equal.k, 53));
    assert_ne!(bits(&equal.v, 2), bits(&equal.v, 51));
    for format in [Format::Bf16, Format::Fp16] {
        let tiny = of(InputMode::Tiny, format);
        let normal = 2f64.powi(format.exponent_min());
        let magnitudes = || tiny.v.iter().map(|value| f64::from(value.abs())).filter(|value| *value > 0.0);
        assert!(magnitudes().any(|value| value < normal));
        assert!(magnitudes().any(|value| value > normal));
        assert!(magnitudes().all(|value| value < 16.0 * normal));
    }
    let heavy = of(InputMode::HeavyTailed, Format::Fp16);
    let magnitudes = || heavy.q.iter().map(|value| value.abs()).filter(|value| *value > 0.0);
    assert!(magnitudes().all(|value| value <= 64.0));
    assert!(magnitudes().any(|value| value >= 32.0));
    assert!(magnitudes().any(|value| value < 1.0 / 64.0));
}

/// Returns the logits of a row of a problem of one head: those of its sequence's keys, before any mask.
fn row_logits(problem: &Problem, inputs: &Inputs, sequence: usize, position: usize) -> Vec<f64> {
    let Sequence { q, kv, .. } = problem.sequences[sequence];
    let descale =
        |tensor, position| inputs.scales.of(tensor).map_or(1.0, |scales| scales.of(sequence, position, 0, 0));
    let query = inputs.q.slice(s![q.row(position), 0, ..]);
    let logit = |(at, row): (usize, usize)| {
        let products = query.iter().zip(inputs.k.slice(s![row, 0, ..])).map(|(q, k)| f64::from(q * k));
        let descales = descale(TensorName::Q, position) * descale(TensorName::K, at);
        f64::from(problem.softmax.scale) * descales * products.sum::<f64>()
    };
    kv.real_rows().enumerate().map(logit).collect()
}

#[test]
fn weights_of_a_shadowed_row_are_small_and_a_rising_one_grows_once() {
    let code = Element { format: Format::E4m3, scaling: Scaling::PerSequenceHead };
    let bf16 = Precision::uniform(Format::Bf16);
    let mut grown = 0;
    for (seed, precision) in
        (0..24).flat_map(|seed| [(seed, bf16), (seed, Precision { q: code, k: code, ..bf16 })])
    {
        for scale in [0.125, 1.7, 0.01] {
            let packed = ProblemFields::packed(&[(3, 70), (2, 9)], 32);
            let fields = ProblemFields { precision, data_seed: seed, ..packed };
            let logits = |mode| {
                let softmax = Softmax { scale, ..fields.softmax };
                let problem = problem(ProblemFields { mode, softmax, ..fields.clone() });
                let inputs = inputs(&problem);
                [[0, 2], [1, 0]].map(|[sequence, row]| row_logits(&problem, &inputs, sequence, row))
            };
            for row in logits(InputMode::Shadowed) {
                let binades = (row[0] - row[1]) / std::f64::consts::LN_2;
                assert!((8.4..16.0).contains(&binades), "{binades} at {scale}");
                assert!(row[2..].iter().all(|logit| *logit == row[1]));
            }
            for row in logits(InputMode::Rising) {
                let grows: Vec<usize> = (1..row.len()).filter(|&key| row[key] != row[key - 1]).collect();
                let binades = (row[row.len() - 1] - row[0]) / std::f64::consts::LN_2;
                assert!(grows.len() <= 1 && (grows.is_empty() || (1.8..4.0).contains(&binades)), "{binades}");
                assert!(grows.iter().all(|key| key.is_power_of_two() && *key >= 4));
                grown += grows.len();
            }
        }
    }
    assert!(grown > 150, "{grown}");
}

#[test]
fn means_zeros_and_midpoints_are_what_they_say() {
    let of = |mode, seed| inputs(&problem(ProblemFields { data_seed: seed, ..fields(mode, Format::Bf16) }));
    let offset = of(InputMode::Offset, 1);
    let real = |tensor: &Array3<f32>, lane: usize| -> Vec<f32> {
        tensor.slice(s![.., 0, lane]).iter().copied().filter(|value| *value != 0.0).collect()
    };
    assert!(real(&offset.v, 3).iter().all(|value| (4.0..12.0).contains(value)));
    let (outlier, others) = (real(&offset.k, 0), real(&offset.k, 1));
    let largest = others.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    assert!(outlier.iter().all(|value| *value > 4.0 * largest), "{outlier:?} {largest}");

    let mut zeros = [0; 4];
    for seed in 0..40 {
        let of = of(InputMode::Zeros, seed);
        for (count, tensor) in zeros.iter_mut().zip([&of.q, &of.k, &of.v, &of.dout]) {
            *count += usize::from(tensor.iter().all(|value| *value == 0.0));
        }
    }
    assert!(zeros.iter().all(|count| (2..30).contains(count)), "{zeros:?}");

    let middles = of(InputMode::Midpoints, 1);
    for format in [Format::E4m3, Format::E5m2] {
        let scale = format.max_finite() / 7.0;
        let scaled = || middles.v.iter().map(|value| (f64::from(*value) * scale).abs());
        let is_tie = |value: &f64| (format.round(*value) - value).abs() == format.half_spacing(*value);
        assert!(scaled().any(|value| value == format.max_finite()));
        assert!(scaled().all(|value| value <= format.max_finite()));
        assert!(scaled().filter(is_tie).count() > middles.v.len() / 4);
    }
}

#[test]
fn a_sink_is_spread_over_its_range() {
    let mut many = fields(InputMode::Flat, Format::Bf16);
    many.heads = Heads { q: 64, kv: 2 };
    let sink = inputs(&problem(many)).sink;
    assert!(sink.iter().all(|value| (-2.0..2.0).contains(value)));
    assert!(sink.iter().any(|value| *value < -1.0));
    assert!(sink.iter().any(|value| *value > 1.0));
}

/// Poisons a problem's inputs and compares every row with what it must hold.
fn check_poison(problem: &Problem, kind: Poison) {
    let clean = inputs(problem);
    assert_eq!(clean.check(problem), Ok(()));
    let mut inputs = clean.clone();
    poison(&mut inputs, problem, kind);
    let (q, kv) = (real_q_rows(problem), real_kv_rows(problem));
    assert_eq!((q.len(), kv.len()), (problem.rows.q, problem.rows.kv));
    let tensors = [
        (TensorName::Q, &inputs.q, &clean.q, &q),
        (TensorName::Dout, &inputs.dout, &clean.dout, &q),
        (TensorName::K, &inputs.k, &clean.k, &kv),
        (TensorName::V, &inputs.v, &clean.v, &kv),
    ];
    for (name, got, was, real) in tensors {
        let saturates = problem.precision.of(name).format.saturates();
        let kind = if saturates && kind == Poison::Infinity { Poison::Nan } else { kind };
        for (row, (slice, real)) in got.outer_iter().zip(real).enumerate() {
            match real {
                true => assert_eq!(bits(got, row), bits(was, row)),
                false => assert!(slice.iter().all(|value| is_poison(kind, *value))),
            }
        }
    }
}

#[test]
fn a_format_that_saturates_is_poisoned_with_nan_for_infinities() {
    for (format, has_infinity) in [(Format::E4m3, false), (Format::E5m2, false), (Format::Bf16, true)] {
        let mut fields = fields(InputMode::Flat, format);
        fields.rows.q += 1;
        let problem = problem(fields);
        let mut inputs = inputs(&problem);
        poison(&mut inputs, &problem, Poison::Infinity);
        let last = inputs.q.outer_iter().next_back().expect("a row of slack");
        let fits = |value: &f32| if has_infinity { value.is_infinite() } else { value.is_nan() };
        assert!(last.iter().all(fits), "{format}");
    }
}

#[test]
fn poison_fills_every_row_without_a_token_and_no_other() {
    let limits = Limits::seams();
    for index in 0..400 {
        if let Draw::Problem(problem) = draw(5, index, &limits) {
            check_poison(&problem, Poison::ALL[index as usize % Poison::ALL.len()]);
        }
    }
}

#[test]
fn poison_varies_by_element() {
    let problem = problem(fields(InputMode::Peaked, Format::Bf16));
    for kind in Poison::ALL {
        let mut inputs = inputs(&problem);
        poison(&mut inputs, &problem, kind);
        check_poison(&problem, kind);
        for row in [0, 41, 44, 49] {
            assert!(bits(&inputs.q, row).windows(2).any(|pair| pair[0] != pair[1]), "{kind:?}");
        }
    }
}

fn is_poison(kind: Poison, value: f32) -> bool {
    match kind {
        Poison::Zero => value == 0.0,
        Poison::Large => {
            Format::ALL.iter().all(|format| format.round_f32(value) == value) && value.abs() >= 256.0
        }
        Poison::Infinity => value.is_infinite(),
        Poison::Nan => value.is_nan() && value.to_bits() & 0xffff == 0,
    }
}

#[test]
fn real_rows_are_those_of_the_runs() {
    let problem = problem(fields(InputMode::Flat, Format::Bf16));
    let rows = |real: Vec<bool>| (0..real.len()).filter(|row| real[*row]).collect::<Vec<_>>();
    assert_eq!(rows(real_q_rows(&problem)), (1..41).chain(45..48).collect::<Vec<_>>());
    assert_eq!(rows(real_kv_rows(&problem)), (2..52).chain(53..55).collect::<Vec<_>>());
}

#[test]
fn saved_statistics_are_poisoned_along_their_rows() {
    let real = [true, false, true];
    let mut lse = ndarray::Array2::<f32>::zeros([2, 3]);
    poison_rows(lse.view_mut(), Axis(1), &real, Poison::Nan);
    assert_eq!(
        lse.map(|value| value.is_nan()).into_raw_vec_and_offset().0,
        [false, true, false, false, true, false]
    );
}

#[test]
fn elements_may_differ_in_format() {
    let mut mixed = fields(InputMode::Flat, Format::Bf16);
    mixed.precision.k = Element::from(Format::E4m3);
    let inputs = inputs(&problem(mixed));
    assert!(inputs.k.iter().all(|value| Format::E4m3.round_f32(*value) == *value));
    assert!(inputs.q.iter().any(|value| Format::E4m3.round_f32(*value) != *value));
}

#[test]
fn scales_are_drawn_as_the_problem_says_and_stay_with_their_sequence() {
    let scaled = |scaling: Scaling, scales: ScaleValues| {
        let mut scaled = ProblemFields { scales, ..fields(InputMode::Flat, Format::E4m3) };
        scaled.precision.k.scaling = scaling;
        scaled.precision.v.scaling = scaling;
        scaled
    };
    let rows = Scaling::PerBlock { rows: 2, columns: 2 };
    for values in ScaleValues::ALL {
        for scaling in
            [Scaling::PerTensor, Scaling::PerHead, Scaling::PerSequenceHead, Scaling::PerTokenHead, rows]
        {
            let whole = problem(scaled(scaling, values));
            let inputs = inputs(&whole);
            assert_eq!(inputs.check(&whole), Ok(()));
            assert!(inputs.scales.q.is_none() && inputs.scales.k.is_some());
            assert!(inputs.scales.k != inputs.scales.v || values != ScaleValues::Any, "{scaling:?}");
            let drawn: Vec<f32> =
                inputs.scales.k.iter().flat_map(|of| of.descale().iter().copied()).collect();
            let significand = |scale: f32| f32::from_bits(scale.to_bits() & 0x7f_ffff | 1f32.to_bits());
            let right = |scale: f32| match values {
                ScaleValues::PowersOfTwo => significand(scale) == 1.0,
                ScaleValues::ThreeTimesPowers => significand(scale) == 1.5,
                ScaleValues::Any | ScaleValues::Delayed => true,
            };
            assert!(drawn.iter().all(|scale| (0.0625..32.0).contains(scale) && right(*scale)), "{drawn:?}");

            let mut fewer = scaled(scaling, values);
            fewer.sequences.remove(0);
            let fewer = problem(fewer);
            let alone = seamproof_judge::values::inputs(&fewer).scales;
            let (all, alone) = (inputs.scales.k.expect("scaled"), alone.k.expect("scaled"));
            for (index, sequence) in fewer.sequences.iter().enumerate() {
                for position in 0..sequence.kv.span {
                    let at = |of: &TensorScales, index| of.of(index, position, 0, 1);
                    assert_eq!(at(&all, index + 1), at(&alone, index), "{scaling:?}");
                }
            }
        }
    }
}

#[test]
#[ignore = "prints how long a case and an element take"]
#[allow(clippy::print_stdout)]
fn measure() {
    const CASES: u64 = 5_000;
    let start = std::time::Instant::now();
    let limits = Limits::quick();
    let problems: Vec<Problem> = (0..CASES)
        .filter_map(|index| match draw(1, index, &limits) {
            Draw::Problem(problem) => Some(problem),
            Draw::Malformed(_) => None,
        })
        .collect();
    println!("{:.0} ns a case", start.elapsed().as_nanos() as f64 / CASES as f64);
    for mode in InputMode::ALL {
        let (mut nanoseconds, mut elements) = (0.0, 0);
        for problem in problems.iter().filter(|problem| problem.mode == mode) {
            let start = std::time::Instant::now();
            let made = inputs(problem);
            nanoseconds += start.elapsed().as_nanos() as f64;
            elements += made.q.len() + made.k.len() + made.v.len() + made.dout.len();
        }
        println!("{mode:?}: {:.2} ns an element", nanoseconds / elements as f64);
    }
}
