//! `exact` against answers that are known without computing a softmax over many keys.

use crate::common::{Draws, inputs, plain, random};

use ndarray::{Axis, s};
use seamproof_oracle::{Alignment, Heads, Inputs, Mask, Problem, ProblemFields, Saved, Sink, Softmax, exact};

fn make(fields: ProblemFields, seed: u64) -> (Problem, Inputs) {
    let problem = Problem::new(fields).unwrap();
    let inputs = inputs(&problem, &mut Draws(seed));
    (problem, inputs)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-14 * (1.0 + a.abs().max(b.abs()))
}

#[test]
fn one_key_gives_its_value_and_its_logit() {
    let (problem, inputs) = make(plain(&[(3, 1)], 4), 1);
    let forward = exact::forward(&problem, &inputs);
    for i in 0..3 {
        let logit: f64 =
            (0..4).map(|c| f64::from(inputs.q[[i, 0, c]]) * f64::from(inputs.k[[0, 0, c]])).sum();
        assert!(close(forward.lse[[0, i]], logit));
        for c in 0..4 {
            assert_eq!(forward.out[[i, 0, c]], f64::from(inputs.v[[0, 0, c]]));
        }
    }
    let gradients = exact::backward(&problem, &inputs, &Saved::from(&forward));
    assert!(
        gradients.dq.iter().chain(&gradients.dk).all(|g| g.abs() < 1e-14),
        "a softmax over one key is constant"
    );
}

#[test]
fn two_keys_are_a_logistic_function() {
    let (problem, mut inputs) = make(plain(&[(1, 2)], 1), 2);
    inputs.q[[0, 0, 0]] = 1.0;
    (inputs.k[[0, 0, 0]], inputs.k[[1, 0, 0]]) = (0.0, 0.75);
    (inputs.v[[0, 0, 0]], inputs.v[[1, 0, 0]]) = (0.0, 1.0);
    inputs.dout[[0, 0, 0]] = 1.0;
    let forward = exact::forward(&problem, &inputs);
    let sigma = 1.0 / (1.0 + libm::exp(-0.75));
    assert!(close(forward.out[[0, 0, 0]], sigma));
    assert!(close(forward.lse[[0, 0]], libm::log(1.0 + libm::exp(0.75))));
    let gradients = exact::backward(&problem, &inputs, &Saved::from(&forward));
    let slope = sigma * (1.0 - sigma);
    assert!(close(gradients.dq[[0, 0, 0]], 0.75 * slope));
    assert!(close(gradients.dk[[1, 0, 0]], slope));
    assert!(close(gradients.dk[[0, 0, 0]], -slope));
    assert!(close(gradients.dv[[1, 0, 0]], sigma));
}

#[test]
fn equal_logits_average_the_values_that_the_mask_shows() {
    let mask = Mask { left: Some(2), right: Some(1), align: Alignment::BottomRight, ..Mask::FULL };
    let (problem, mut inputs) = make(ProblemFields { mask, ..plain(&[(4, 6)], 2) }, 3);
    inputs.q.fill(0.0);
    let forward = exact::forward(&problem, &inputs);
    for i in 0..4 {
        let seen = mask.visible(i, 4, 6);
        let mean: f64 = seen.clone().map(|j| f64::from(inputs.v[[j, 0, 1]])).sum::<f64>() / seen.len() as f64;
        assert!(close(forward.out[[i, 0, 1]], mean));
        assert!(close(forward.lse[[0, i]], libm::log(seen.len() as f64)));
        assert_eq!(forward.max_logit[0], 0.0);
    }
}

#[test]
fn a_row_without_keys_is_empty_with_and_without_a_sink() {
    for (sink, lse) in [(Sink::None, f64::NEG_INFINITY), (Sink::OffByOne, 0.0), (Sink::Learnable, 1.5)] {
        let softmax = Softmax { scale: 1.0, softcap: None, sink };
        let mask = Mask { right: Some(0), left: None, align: Alignment::BottomRight, ..Mask::FULL };
        let (problem, mut inputs) = make(ProblemFields { softmax, mask, ..plain(&[(3, 1), (2, 0)], 2) }, 4);
        inputs.sink.fill(1.5);
        let forward = exact::forward(&problem, &inputs);
        let gradients = exact::backward(&problem, &inputs, &Saved::from(&forward));
        for row in [0, 1, 3, 4] {
            assert_eq!(forward.lse[[0, row]], lse, "{sink:?} row {row}");
            assert!(forward.out.index_axis(Axis(0), row).iter().all(|&out| out == 0.0));
            assert!(gradients.dq.index_axis(Axis(0), row).iter().all(|&dq| dq == 0.0));
        }
        assert!(forward.lse[[0, 2]] > lse);
        assert!(gradients.dv.iter().chain(&gradients.dsink).all(|g| g.is_finite()));
    }
}

#[test]
fn a_sink_takes_its_mass_from_the_values() {
    let softmax = Softmax { scale: 1.0, softcap: None, sink: Sink::OffByOne };
    let (problem, mut inputs) = make(ProblemFields { softmax, ..plain(&[(1, 1)], 1) }, 5);
    inputs.q.fill(0.0);
    inputs.v.fill(1.0);
    let forward = exact::forward(&problem, &inputs);
    assert!(close(forward.out[[0, 0, 0]], 0.5));
    assert!(close(forward.lse[[0, 0]], libm::log(2.0)));
    assert_eq!(forward.max_logit[0], 0.0, "the maximum is taken before the sink");
}

#[test]
fn identities_hold_on_random_problems() {
    for seed in 0..200 {
        let (problem, mut inputs) = random(seed, 12);
        inputs.v.mapv_inplace(|v| if v.is_nan() { v } else { 1.0 });
        let forward = exact::forward(&problem, &inputs);
        let gradients = exact::backward(&problem, &inputs, &Saved::from(&forward));
        for sequence in &problem.sequences {
            for head in 0..problem.heads.q {
                let mut dv_expected = 0.0;
                for (i, row) in sequence.q.real_rows().enumerate() {
                    let sees = !problem.mask.visible(i, sequence.q.len, sequence.kv.len).is_empty();
                    let sink = problem.sink(head, &inputs.sink);
                    let mass = sink.map_or(0.0, |sink| libm::exp(sink - forward.lse[[head, row]]));
                    let expected = if sees { 1.0 - mass } else { 0.0 };
                    assert!(close(forward.out[[row, head, 0]], expected), "V = 1, seed {seed}");
                    dv_expected += expected * f64::from(inputs.dout[[row, head, 0]]);
                }
                if problem.group() == 1 {
                    let dv: f64 = sequence.kv.real_rows().map(|row| gradients.dv[[row, head, 0]]).sum();
                    assert!((dv - dv_expected).abs() < 1e-12, "Σ dv = Σ dout, seed {seed}");
                }
            }
            if problem.softmax.softcap.is_none() {
                for head in 0..problem.heads.kv {
                    let dk: f64 = sequence.kv.real_rows().map(|row| gradients.dk[[row, head, 0]]).sum();
                    let sinkless = problem.softmax.sink == Sink::None;
                    assert!(!sinkless || dk.abs() < 1e-11, "Σ dk of equal values, seed {seed}: {dk}");
                }
            }
        }
    }
}

#[test]
fn grouped_heads_equal_repeated_keys() {
    let grouped = ProblemFields { heads: Heads { q: 6, kv: 2 }, ..plain(&[(3, 4)], 3) };
    let (grouped, inputs) = make(grouped, 6);
    let fields = ProblemFields { heads: Heads { q: 6, kv: 6 }, ..grouped.clone().into() };
    let repeated = Problem::new(fields).unwrap();
    let repeat = |a: &ndarray::Array3<f32>| a.select(Axis(1), &[0, 0, 0, 1, 1, 1]);
    let wide = Inputs { k: repeat(&inputs.k), v: repeat(&inputs.v), ..inputs.clone() };
    let (a, b) = (exact::forward(&grouped, &inputs), exact::forward(&repeated, &wide));
    assert_eq!(a, b);
    let a = exact::backward(&grouped, &inputs, &Saved::from(&a));
    let b = exact::backward(&repeated, &wide, &Saved::from(&b));
    assert_eq!(a.dq, b.dq);
    for head in 0..2 {
        let sum = b.dk.slice(s![.., head * 3..head * 3 + 3, ..]).sum_axis(Axis(1));
        let difference = &sum - &a.dk.index_axis(Axis(1), head);
        assert!(difference.iter().all(|d| d.abs() < 1e-12));
    }
}

#[test]
fn padding_and_slack_are_never_read() {
    // `random` fills every row that is not real with NaN.
    for seed in 0..100 {
        let (problem, inputs) = random(seed, 9);
        let forward = exact::forward(&problem, &inputs);
        let gradients = exact::backward(&problem, &inputs, &Saved::from(&forward));
        assert!(forward.out.iter().all(|value| value.is_finite()));
        assert!(forward.lse.iter().all(|value| !value.is_nan()));
        let all = gradients.dq.iter().chain(&gradients.dk).chain(&gradients.dv).chain(&gradients.dsink);
        assert!(all.into_iter().all(|value| value.is_finite()));
    }
}
