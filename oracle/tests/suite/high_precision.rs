//! `exact` against 256-bit arithmetic on small problems, masks and sinks included.

use crate::common::random;

use astro_float_num::{BigFloat, Consts, RoundingMode};
use ndarray::Array3;
use seamproof_oracle::{Inputs, Problem, Saved, exact};

const BITS: usize = 256;
const ROUND: RoundingMode = RoundingMode::ToEven;
const TOLERANCE: f64 = 1e-13;

/// A number of 256 bits, with the handful of operations that attention needs.
#[derive(Clone, Debug)]
struct Big(BigFloat);

impl Big {
    fn new(value: f64) -> Big {
        Big(BigFloat::from_f64(value, BITS))
    }

    fn add(&self, other: &Big) -> Big {
        Big(self.0.add(&other.0, BITS, ROUND))
    }

    fn sub(&self, other: &Big) -> Big {
        Big(self.0.sub(&other.0, BITS, ROUND))
    }

    fn mul(&self, other: &Big) -> Big {
        Big(self.0.mul(&other.0, BITS, ROUND))
    }

    fn div(&self, other: &Big) -> Big {
        Big(self.0.div(&other.0, BITS, ROUND))
    }

    fn exp(&self, consts: &mut Consts) -> Big {
        Big(self.0.exp(BITS, ROUND, consts))
    }

    fn ln(&self, consts: &mut Consts) -> Big {
        Big(self.0.ln(BITS, ROUND, consts))
    }

    fn tanh(&self, consts: &mut Consts) -> Big {
        Big(self.0.tanh(BITS, ROUND, consts))
    }

    /// Returns the nearest f64, through decimal text: slow, and obviously right.
    fn to_f64(&self) -> f64 {
        self.0.to_string().parse().expect("a decimal number")
    }
}

fn sum(terms: impl IntoIterator<Item = Big>) -> Big {
    terms.into_iter().fold(Big::new(0.0), |sum, term| sum.add(&term))
}

fn dot(a: &Array3<f32>, at: [usize; 2], b: &Array3<f32>, bt: [usize; 2]) -> Big {
    let lane = |array: &Array3<f32>, at: [usize; 2], c: usize| Big::new(f64::from(array[[at[0], at[1], c]]));
    sum((0..a.shape()[2]).map(|c| lane(a, at, c).mul(&lane(b, bt, c))))
}

/// Compares lse, out and the gradients with `exact`, element by element. Returns the number of rows.
fn check_rows(problem: &Problem, inputs: &Inputs, consts: &mut Consts) -> usize {
    let forward = exact::forward(problem, inputs);
    let gradients = exact::backward(problem, inputs, &Saved::from(&forward));
    let zeros = |shape: [usize; 3]| Array3::from_elem(shape, Big::new(0.0));
    let (mut dk, mut dv) = (zeros(problem.k_shape()), zeros(problem.v_shape()));
    let scale = Big::new(f64::from(problem.softmax.scale));
    let close = |got: f64, right: &Big, what: &str| {
        let right = right.to_f64();
        assert!((got - right).abs() <= TOLERANCE * (1.0 + right.abs()), "{what}: {got} against {right}");
    };
    let mut rows = 0;
    for sequence in &problem.sequences {
        for (head, i) in (0..problem.heads.q).flat_map(|head| (0..sequence.q.len).map(move |i| (head, i))) {
            let (row, kv) = (sequence.q.row(i), head / problem.group());
            let keys: Vec<usize> = problem
                .mask
                .visible(i, sequence.q.len, sequence.kv.len)
                .map(|j| sequence.kv.row(j))
                .collect();
            let sink = problem.sink(head, &inputs.sink).map(Big::new);
            if keys.is_empty() {
                continue;
            }
            let tanhs: Vec<Big> = keys
                .iter()
                .map(|&key| {
                    let s = scale.mul(&dot(&inputs.q, [row, head], &inputs.k, [key, kv]));
                    match problem.softmax.softcap {
                        None => s,
                        Some(cap) => s.div(&Big::new(f64::from(cap))).tanh(consts),
                    }
                })
                .collect();
            let cap = problem.softmax.softcap.map(|cap| Big::new(f64::from(cap)));
            let logits: Vec<Big> =
                tanhs.iter().map(|t| cap.as_ref().map_or(t.clone(), |cap| cap.mul(t))).collect();
            let terms: Vec<Big> = logits.iter().map(|s| s.exp(consts)).collect();
            let sink_term = sink.map(|sink| sink.exp(consts));
            let total = sum(terms.iter().cloned().chain(sink_term.clone()));
            close(forward.lse[[head, row]], &total.ln(consts), "lse");
            let out: Vec<Big> = (0..problem.dims.v)
                .map(|c| {
                    let value = |key: usize| Big::new(f64::from(inputs.v[[key, kv, c]]));
                    sum(terms.iter().zip(&keys).map(|(t, &key)| t.mul(&value(key)))).div(&total)
                })
                .collect();
            for (c, out) in out.iter().enumerate() {
                close(forward.out[[row, head, c]], out, "out");
            }
            let dout = |c: usize| Big::new(f64::from(inputs.dout[[row, head, c]]));
            let d = sum((0..problem.dims.v).map(|c| dout(c).mul(&out[c])));
            let mut dq = vec![Big::new(0.0); problem.dims.qk];
            for ((&key, term), t) in keys.iter().zip(&terms).zip(&tanhs) {
                let p = term.div(&total);
                let dp = dot(&inputs.dout, [row, head], &inputs.v, [key, kv]);
                let one = Big::new(1.0);
                let derivative = if cap.is_some() { one.sub(&t.mul(t)) } else { one };
                let ds = scale.mul(&p).mul(&dp.sub(&d)).mul(&derivative);
                for c in 0..problem.dims.qk {
                    dq[c] = dq[c].add(&ds.mul(&Big::new(f64::from(inputs.k[[key, kv, c]]))));
                    let q = Big::new(f64::from(inputs.q[[row, head, c]]));
                    dk[[key, kv, c]] = dk[[key, kv, c]].add(&ds.mul(&q));
                }
                for c in 0..problem.dims.v {
                    dv[[key, kv, c]] = dv[[key, kv, c]].add(&p.mul(&dout(c)));
                }
            }
            for (c, dq) in dq.iter().enumerate() {
                close(gradients.dq[[row, head, c]], dq, "dq");
            }
            rows += 1;
        }
    }
    gradients.dk.iter().zip(&dk).for_each(|(got, right)| close(*got, right, "dk"));
    gradients.dv.iter().zip(&dv).for_each(|(got, right)| close(*got, right, "dv"));
    rows
}

#[test]
fn exact_agrees_with_256_bits() {
    let mut consts = Consts::new().expect("constants");
    let rows: usize = (0..40)
        .map(|seed| {
            let (problem, inputs) = random(seed, 5);
            check_rows(&problem, &inputs, &mut consts)
        })
        .sum();
    assert!(rows > 100, "only {rows} rows were checked");
}
