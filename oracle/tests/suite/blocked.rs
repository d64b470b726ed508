//! `blocked` compared with `exact`. Each element is within 1e-12 · (1 + max|logit|) · Σ|terms|, and has the same bits
//! on any number of threads.

use crate::common::{Draws, inputs, plain, random};

use ndarray::{Array1, Array2, Array3, s};
use proptest::prelude::*;
use seamproof_oracle::blocked::{Answer, SomeRows, Wanted};
use seamproof_oracle::envelope::{Accumulation, Arithmetic, Delta, DsScale, Model, Partition};
use seamproof_oracle::{
    Format, ForwardResults, Gradients, Heads, Inputs, Mask, Problem, ProblemFields, Saved, SavedErrors,
    blocked, exact,
};

const TOLERANCE: f64 = 1e-12;

/// Returns `Σ|terms|` of every element, by the definitions, and the largest |logit|.
fn magnitudes(problem: &Problem, inputs: &Inputs, saved: &Saved) -> (ForwardResults, Gradients, f64) {
    let mut forward = ForwardResults {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), 1.0),
        max_logit: Array1::from_elem(problem.heads.q, 1.0),
    };
    let mut gradients = Gradients {
        dq: Array3::zeros(problem.q_shape()),
        dk: Array3::zeros(problem.k_shape()),
        dv: Array3::zeros(problem.v_shape()),
        dsink: Array1::zeros(problem.learnable_sinks()),
    };
    let scale = f64::from(problem.softmax.scale);
    let mut largest = 0.0f64;
    for sequence in &problem.sequences {
        for head in 0..problem.heads.q {
            let kv_head = head / problem.group();
            for i in 0..sequence.q.len {
                let row = sequence.q.row(i);
                let lse = saved.lse[[head, row]];
                let d: f64 = (0..problem.dims.v)
                    .map(|c| (f64::from(inputs.dout[[row, head, c]]) * saved.out[[row, head, c]]).abs())
                    .sum();
                for j in problem.mask.visible(i, sequence.q.len, sequence.kv.len) {
                    let key = sequence.kv.row(j);
                    let lane = |a: &Array3<f32>, at: [usize; 2], c| f64::from(a[[at[0], at[1], c]]);
                    let product: f64 = (0..problem.dims.qk)
                        .map(|c| lane(&inputs.q, [row, head], c) * lane(&inputs.k, [key, kv_head], c))
                        .sum();
                    let logit = problem.softmax.cap(scale * product);
                    largest = largest.max(logit.abs()).max((scale * product).abs());
                    let p = libm::exp(logit - lse);
                    let dp: f64 = (0..problem.dims.v)
                        .map(|c| {
                            (lane(&inputs.dout, [row, head], c) * lane(&inputs.v, [key, kv_head], c)).abs()
                        })
                        .sum();
                    let ds = scale * p * (dp + d);
                    for c in 0..problem.dims.v {
                        forward.out[[row, head, c]] += p * lane(&inputs.v, [key, kv_head], c).abs();
                        gradients.dv[[key, kv_head, c]] += p * lane(&inputs.dout, [row, head], c).abs();
                    }
                    for c in 0..problem.dims.qk {
                        gradients.dq[[row, head, c]] += ds * lane(&inputs.k, [key, kv_head], c).abs();
                        gradients.dk[[key, kv_head, c]] += ds * lane(&inputs.q, [row, head], c).abs();
                    }
                }
                if let Some(dsink) = gradients.dsink.get_mut(head) {
                    *dsink += libm::exp(f64::from(inputs.sink[head]) - lse) * d;
                }
            }
        }
    }
    (forward, gradients, largest)
}

fn assert_close<'a>(
    what: &str,
    got: impl IntoIterator<Item = &'a f64>,
    exact: impl IntoIterator<Item = &'a f64>,
    terms: impl IntoIterator<Item = &'a f64>,
    factor: f64,
) {
    for (index, ((got, exact), terms)) in got.into_iter().zip(exact).zip(terms).enumerate() {
        let allowed = TOLERANCE * factor * terms;
        let error = (got - exact).abs();
        assert!(
            got == exact || error <= allowed,
            "{what}[{index}]: {got} against {exact}, allowed {allowed}"
        );
    }
}

fn hold(problem: &Problem, inputs: &Inputs) {
    let exact_forward = exact::forward(problem, inputs);
    let saved = Saved::from(&exact_forward);
    let exact_gradients = exact::backward(problem, inputs, &saved);
    let forward = blocked::forward(problem, inputs, None).exact;
    let gradients = blocked::backward(problem, inputs, &saved, None).exact;
    let (terms, gradient_terms, largest) = magnitudes(problem, inputs, &saved);
    let factor = 1.0 + largest;
    assert_close("out", &forward.out, &exact_forward.out, &terms.out, factor);
    assert_close("lse", &forward.lse, &exact_forward.lse, &terms.lse, factor);
    assert_close("max_logit", &forward.max_logit, &exact_forward.max_logit, &terms.max_logit, factor);
    assert_close("dq", &gradients.dq, &exact_gradients.dq, &gradient_terms.dq, factor);
    assert_close("dk", &gradients.dk, &exact_gradients.dk, &gradient_terms.dk, factor);
    assert_close("dv", &gradients.dv, &exact_gradients.dv, &gradient_terms.dv, factor);
    assert_close("dsink", &gradients.dsink, &exact_gradients.dsink, &gradient_terms.dsink, factor);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocked_is_exact(seed in any::<u64>(), length_max in 1usize..40) {
        let (problem, inputs) = random(seed, length_max);
        hold(&problem, &inputs);
        hold_by_rows(&problem, &inputs);
    }
}

/// Returns the exact values and both tiers' bounds.
fn tiers<T: Clone>(answer: &Answer<T>) -> [T; 3] {
    let bound = answer.bound.clone().expect("a bound");
    [answer.exact.clone(), bound.worst, bound.dithered]
}

/// Asserts that some rows have the values of the whole's, and bounds that are no wider: fewer terms may be in their
/// sums. With as many terms the bounds of tier W are the same. Those of tier T have a certificate of the rows that are
/// there.
fn assert_rows<T>(
    what: &str,
    [whole, some]: [&[T; 3]; 2],
    lanes: impl Fn(&T, usize) -> Vec<f64>,
    rows: &[usize],
    has_same_sums: bool,
) {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()) + 1e-12;
    let lanes = |of: &[T; 3], row: usize| [0, 1, 2].map(|tier| lanes(&of[tier], row));
    for (place, &row) in rows.iter().enumerate() {
        let ([exact, most, _], [values, worst, dithered]) = (lanes(whole, row), lanes(some, place));
        assert!(values.len() == exact.len() && worst.len() == most.len(), "{what}");
        for (value, exact) in values.iter().zip(&exact) {
            assert!(value == exact || near(*value, *exact), "{what}, row {row}: {value:e} against {exact:e}");
        }
        for (worst, most) in worst.iter().zip(&most) {
            let holds = near(*worst, *most) || !has_same_sums && (0.0..*most).contains(worst);
            assert!(holds, "the bound of {what}, row {row}: {worst:e} against {most:e}");
        }
        for (dithered, worst) in dithered.iter().zip(&worst) {
            let holds = *dithered <= worst * (1.0 + 1e-9) || *dithered == f64::INFINITY;
            assert!(holds && *dithered >= 0.0, "tier T of {what}, row {row}: {dithered:e} over {worst:e}");
        }
    }
}

/// Asserts that some rows have the results of the whole.
fn hold_by_rows(problem: &Problem, inputs: &Inputs) {
    let saved = Saved::from(&exact::forward(problem, inputs));
    let arithmetic = Arithmetic { delta: Delta::StoredOut, ..Arithmetic::default() };
    let model = Model::new(problem, arithmetic, Partition::single(64, 64));
    let forward = tiers(&blocked::forward(problem, inputs, Some(&model)));
    let backward = tiers(&blocked::backward(problem, inputs, &saved, Some(&model)));
    let gradients = |wanted: Wanted<'_>| {
        let saved = ((&saved).into(), SavedErrors::default());
        tiers(&blocked::backward_of(problem, inputs, saved, wanted, &model))
    };
    let lanes = |tensor: &Array3<f64>, row: usize| -> Vec<f64> {
        tensor.slice(s![row, .., ..]).iter().copied().collect()
    };
    let is_full = problem.mask == Mask::FULL;
    for (sequence, step) in
        (0..problem.sequences.len()).flat_map(|sequence| [1, 3].map(|step| (sequence, step)))
    {
        let both = problem.sequences[sequence];
        let [q, kv] = [both.q, both.kv].map(|run| (0..run.len).step_by(step).collect::<Vec<_>>());
        let queries = SomeRows { sequence, positions: &q };
        let keys = SomeRows { sequence, positions: &kv };
        let q: Vec<usize> = q.iter().map(|&position| both.q.row(position)).collect();
        let kv: Vec<usize> = kv.iter().map(|&position| both.kv.row(position)).collect();

        let some = tiers(&blocked::forward_of(problem, inputs, queries, &model));
        assert_rows("out", [&forward, &some], |of, row| lanes(&of.out, row), &q, false);
        assert_rows("lse", [&forward, &some], |of, row| of.lse.column(row).to_vec(), &q, true);
        let some = gradients(Wanted::Queries(queries));
        assert!(some.iter().all(|of| of.dk.is_empty() && of.dv.is_empty() && of.dsink.is_empty()));
        assert_rows("dq", [&backward, &some], |of, row| lanes(&of.dq, row), &q, is_full);
        let some = gradients(Wanted::Keys(keys));
        assert!(some.iter().all(|of| of.dq.is_empty() && of.dsink.is_empty()));
        assert_rows("dk", [&backward, &some], |of, row| lanes(&of.dk, row), &kv, is_full);
        assert_rows("dv", [&backward, &some], |of, row| lanes(&of.dv, row), &kv, is_full);
    }
    for (whole, sinks) in backward.iter().zip(&gradients(Wanted::Sinks)) {
        assert!(sinks.dq.is_empty() && sinks.dk.is_empty() && sinks.dv.is_empty());
        assert_eq!(whole.dsink, sinks.dsink);
    }
}

/// Returns a problem of these lengths, and its inputs. Lengths past every tile of `blocked` make several row tiles,
/// several key tiles, and two pieces of one head.
fn large(lengths: &[(usize, usize)], mask: Mask, heads: Heads) -> (Problem, Inputs) {
    let fields = ProblemFields { mask, heads, ..plain(lengths, 3) };
    let problem = Problem::new(fields).unwrap();
    let inputs = inputs(&problem, &mut Draws(7));
    (problem, inputs)
}

#[test]
fn blocked_is_exact_across_its_own_tiles() {
    let window = Mask { left: Some(130), ..Mask::CAUSAL };
    for mask in [Mask::FULL, Mask::CAUSAL, window, Mask { sink_tokens: 3, ..window }] {
        let (problem, inputs) = large(&[(300, 700), (129, 513)], mask, Heads { q: 2, kv: 1 });
        hold(&problem, &inputs);
    }
    let (problem, inputs) = large(&[(1500, 1030)], Mask::CAUSAL, Heads { q: 1, kv: 1 });
    hold(&problem, &inputs);
}

#[test]
fn threads_do_not_change_a_bit() {
    let (problem, inputs) = large(&[(1400, 1400)], Mask::CAUSAL, Heads { q: 2, kv: 1 });
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let forward = blocked::forward(&problem, &inputs, None).exact;
            let gradients = blocked::backward(&problem, &inputs, &Saved::from(&forward), None).exact;
            (forward, gradients)
        })
    };
    assert!(run(1) == run(3));
}

/// Where dS has a factor for each tile, rows that are given the largest dS of their head have the bounds of the whole.
/// Without it they are refused.
#[test]
fn rows_need_the_largest_gradient_of_their_tiles() {
    let mut fields = ProblemFields { heads: Heads { q: 4, kv: 2 }, ..plain(&[(40, 70), (30, 9)], 3) };
    fields.precision.ds = Format::E4m3.into();
    let problem = Problem::new(fields).unwrap();
    let inputs = inputs(&problem, &mut Draws(7));
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let arithmetic = |ds_scale| Arithmetic {
        ds_scale,
        ..Arithmetic::flash_attention(Accumulation::WgmmaFp8 { promoted_after: None })
    };
    let model = |ds_scale| Model::new(&problem, arithmetic(ds_scale), Partition::single(16, 16));
    let [none, tile] = [DsScale::None, DsScale::Tile].map(model);
    let whole = tiers(&blocked::backward(&problem, &inputs, &saved, Some(&tile)));
    let unscaled = tiers(&blocked::backward(&problem, &inputs, &saved, Some(&none)));
    assert_eq!(whole[0], unscaled[0]);
    assert_ne!(whole[1], unscaled[1]);
    let rows = SomeRows { sequence: 0, positions: &[0, 7, 39] };
    let most = Array2::from_elem(problem.lse_shape(), 1e3);
    let errors = SavedErrors { ds_most: Some(&most), ..SavedErrors::default() };
    let of_rows = |errors| {
        blocked::backward_of(&problem, &inputs, ((&saved).into(), errors), Wanted::Queries(rows), &tile)
    };
    let [exact, bound, _] = tiers(&of_rows(errors));
    for (place, row) in [0, 7, 39].into_iter().enumerate() {
        let lanes = |tensor: &Array3<f64>, row: usize| tensor.slice(s![row, .., ..]).to_owned();
        assert!((lanes(&exact.dq, place) - lanes(&whole[0].dq, row)).iter().all(|off| off.abs() < 1e-12));
        let wider = lanes(&bound.dq, place) - lanes(&whole[1].dq, row);
        assert!(wider.iter().all(|wider| *wider > 0.0), "{wider}");
    }
    assert!(std::panic::catch_unwind(|| of_rows(SavedErrors::default())).is_err());
}

/// Errors of the LSE with more rows than the problem are refused: they would be read in part, without an error.
#[test]
#[should_panic = "shape of the errors of the lse"]
fn errors_of_another_problem_are_not_read() {
    let (problem, inputs) = large(&[(4, 4)], Mask::FULL, Heads { q: 1, kv: 1 });
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let model = Model::new(&problem, Arithmetic::default(), Partition::single(4, 4));
    blocked::backward_of_hidden_lse(&problem, &inputs, &saved, &Array2::zeros((1, 5)), &model);
}

/// Where D may be a sum over all keys, nothing is said of dk without the errors of D.
#[test]
#[should_panic = "errors of D"]
fn dk_of_an_unknown_d_needs_its_errors() {
    let (problem, inputs) = large(&[(4, 4)], Mask::FULL, Heads { q: 1, kv: 1 });
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let model = Model::new(&problem, Arithmetic::default(), Partition::single(4, 4));
    let keys = Wanted::Keys(SomeRows { sequence: 0, positions: &[1] });
    blocked::backward_of(&problem, &inputs, ((&saved).into(), SavedErrors::default()), keys, &model);
}

/// An infinite error of D leaves dk without a bound that could be broken, and makes no NaN of it.
#[test]
fn an_unbounded_d_bounds_nothing() {
    let (problem, mut inputs) = large(&[(4, 4)], Mask::FULL, Heads { q: 1, kv: 1 });
    inputs.q.slice_mut(s![.., .., 0]).fill(0.0);
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let model = Model::new(&problem, Arithmetic::default(), Partition::single(4, 4));
    let keys = Wanted::Keys(SomeRows { sequence: 0, positions: &[1] });
    let infinite = Array2::from_elem(problem.lse_shape(), f64::INFINITY);
    let errors = SavedErrors { delta: Some(&infinite), ..SavedErrors::default() };
    let [_, worst, _] =
        tiers(&blocked::backward_of(&problem, &inputs, ((&saved).into(), errors), keys, &model));
    assert!(worst.dk.iter().skip(1).all(|bound| *bound > 1e90), "{}", worst.dk);
    assert!(worst.dk[[0, 0, 0]].is_finite() && worst.dv.iter().all(|bound| *bound < 1.0));
}
