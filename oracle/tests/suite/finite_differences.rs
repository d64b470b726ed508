//! The gradients of `exact` against finite differences of its forward.
//!
//! With `f = Σ dout · out`, each input element x is moved by ±h and ±h/2 (h = 2^-11: exact in f32 for the inputs
//! drawn here), and Richardson's combination `(4·D(h/2) − D(h)) / 3` of the central differences has an error of order
//! h⁴ ≈ 6e-14 beside the rounding 2^-53 / h ≈ 2e-13.

use crate::common::random;

use seamproof_oracle::{Inputs, Problem, Saved, exact};

const STEP: f32 = 1.0 / 2048.0;
const TOLERANCE: f64 = 2e-9;

fn value(problem: &Problem, inputs: &Inputs) -> f64 {
    let forward = exact::forward(problem, inputs);
    let rows = problem.sequences.iter().flat_map(|sequence| sequence.q.real_rows());
    rows.flat_map(|row| {
        (0..problem.heads.q).flat_map(move |head| (0..problem.dims.v).map(move |c| [row, head, c]))
    })
    .map(|at| f64::from(inputs.dout[at]) * forward.out[at])
    .sum()
}

fn check(
    problem: &Problem,
    inputs: &Inputs,
    gradient: impl Iterator<Item = f64>,
    element: impl Fn(&mut Inputs, usize) -> &mut f32,
    what: &str,
) -> usize {
    let mut checked = 0;
    for (index, gradient) in gradient.enumerate() {
        if element(&mut inputs.clone(), index).is_nan() {
            assert_eq!(gradient, 0.0, "{what}: a row that is not real has no gradient");
            continue;
        }
        let central = |step: f32| {
            let [up, down] = [step, -step].map(|step| {
                let mut moved = inputs.clone();
                *element(&mut moved, index) += step;
                value(problem, &moved)
            });
            (up - down) / (2.0 * f64::from(step))
        };
        let difference = (4.0 * central(STEP / 2.0) - central(STEP)) / 3.0;
        let error = (difference - gradient).abs();
        assert!(
            error <= TOLERANCE * (1.0 + gradient.abs()),
            "{what}[{index}]: {gradient} against {difference}"
        );
        checked += 1;
    }
    checked
}

#[test]
fn gradients_are_derivatives() {
    let mut checked = 0;
    for seed in 0..60 {
        let (problem, inputs) = random(seed, 5);
        let saved = Saved::from(&exact::forward(&problem, &inputs));
        let gradients = exact::backward(&problem, &inputs, &saved);
        checked += check(
            &problem,
            &inputs,
            gradients.dq.iter().copied(),
            |i, n| i.q.iter_mut().nth(n).unwrap(),
            "dq",
        );
        checked += check(
            &problem,
            &inputs,
            gradients.dk.iter().copied(),
            |i, n| i.k.iter_mut().nth(n).unwrap(),
            "dk",
        );
        checked += check(
            &problem,
            &inputs,
            gradients.dv.iter().copied(),
            |i, n| i.v.iter_mut().nth(n).unwrap(),
            "dv",
        );
        checked += check(&problem, &inputs, gradients.dsink.iter().copied(), |i, n| &mut i.sink[n], "dsink");
    }
    assert!(checked > 5_000, "only {checked} elements were checked");
}
