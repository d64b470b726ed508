//! A kernel of another crate under the judge, forward and backward, written as that crate would write it.
//!
//! The kernel is [`forward`] and [`backward`]: plain attention on the CPU, a query row of one head at a time, bf16 in
//! and out, f32 between, on one rank. [`Own`] puts it under the judge. Three tests ask whether it holds on drawn
//! problems, whether a campaign finds a planted bug, and whether a wrong call of the right kernel is found.

use std::ops::Range;

use seamproof_judge::ndarray::{Array1, Array2, Array3, ArrayView1, Axis, Zip, s};
use seamproof_judge::prelude::*;
use seamproof_judge::proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

/// The kernel under the judge.
#[derive(Clone, Copy)]
struct Own {
    /// Number of keys by which a left window is too short; 0 is right.
    short: u32,
}

const RIGHT: Own = Own { short: 0 };
/// The planted bug.
const SHORT: Own = Own { short: 1 };

/// Rows of the tensors that one query works on.
struct Query {
    row: usize,
    head: usize,
    kv_head: usize,
    /// Rows of the keys that the query sees.
    keys: Vec<usize>,
}

impl Own {
    /// Returns every query of every sequence and head.
    fn queries(self, problem: &Problem) -> impl Iterator<Item = Query> + '_ {
        problem.sequences.iter().flat_map(move |&Sequence { q, kv, .. }| {
            q.real_rows().enumerate().flat_map(move |(i, row)| {
                let keys =
                    self.visible(problem.mask, i, q.len, kv.len).map(|key| kv.row(key)).collect::<Vec<_>>();
                let group = problem.heads.q / problem.heads.kv;
                (0..problem.heads.q).map(move |head| Query {
                    row,
                    head,
                    kv_head: head / group,
                    keys: keys.clone(),
                })
            })
        })
    }

    /// Returns the keys of a sequence that its query `i` sees.
    fn visible(self, mask: Mask, i: usize, queries: usize, keys: usize) -> Range<usize> {
        let (queries, keys) = (queries as i64, keys as i64);
        let diagonal = i as i64 + if mask.align == Alignment::BottomRight { keys - queries } else { 0 };
        let left = mask.left.map(|left| i64::from(left.saturating_sub(self.short)));
        let first = left.map_or(0, |left| diagonal - left).clamp(0, keys);
        let end = mask.right.map_or(keys, |right| diagonal + i64::from(right) + 1).clamp(first, keys);
        first as usize..end as usize
    }
}

fn bf16(value: f32) -> f32 {
    Format::Bf16.round_f32(value)
}

/// Returns one head of one row.
fn lanes(tensor: &Array3<f32>, row: usize, head: usize) -> ArrayView1<'_, f32> {
    tensor.slice(s![row, head, ..])
}

/// Fills out and lse of every row that a sequence owns. Padding rows, and rows that see no key, get 0 and −∞.
fn forward(own: Own, problem: &Problem, inputs: &Inputs, out: &mut Array3<f32>, lse: &mut Array2<f32>) {
    for row in problem.sequences.iter().flat_map(|sequence| sequence.q.padding_rows()) {
        out.index_axis_mut(Axis(0), row).fill(0.0);
        lse.index_axis_mut(Axis(1), row).fill(f32::NEG_INFINITY);
    }
    for Query { row, head, kv_head, keys } in own.queries(problem) {
        let q = lanes(&inputs.q, row, head);
        let logit = |key: &usize| problem.softmax.scale * q.dot(&lanes(&inputs.k, *key, kv_head));
        let logits: Vec<f32> = keys.iter().map(logit).collect();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut values) = (0.0f32, Array1::zeros(problem.dims.v));
        for (key, logit) in keys.iter().zip(logits) {
            let weight = (logit - largest).exp();
            sum += weight;
            // A weight is rounded before it is normalised. The exact modes would notice another order.
            values.scaled_add(bf16(weight), &lanes(&inputs.v, *key, kv_head));
        }
        let normalised = |value| if sum == 0.0 { 0.0 } else { bf16(value / sum) };
        out.slice_mut(s![row, head, ..]).assign(&values.mapv(normalised));
        lse[[head, row]] = largest + sum.ln();
    }
}

/// Fills the gradients of the out and lse that the forward returned.
fn backward(
    own: Own,
    problem: &Problem,
    inputs: &Inputs,
    out: &Array3<f32>,
    lse: &Array2<f32>,
    gradients: &mut RankGradients,
) {
    let mut dq = Array3::zeros(problem.q_shape());
    let (mut dk, mut dv) = (Array3::zeros(problem.k_shape()), Array3::zeros(problem.v_shape()));
    let scale = problem.softmax.scale;
    for Query { row, head, kv_head, keys } in own.queries(problem) {
        let (q, dout) = (lanes(&inputs.q, row, head), lanes(&inputs.dout, row, head));
        // D is taken from out as it is stored.
        let delta = dout.dot(&lanes(out, row, head));
        for key in keys {
            let (k, v) = (lanes(&inputs.k, key, kv_head), lanes(&inputs.v, key, kv_head));
            let weight = (scale * q.dot(&k) - lse[[head, row]]).exp();
            let ds = bf16(weight * (dout.dot(&v) - delta));
            dq.slice_mut(s![row, head, ..]).scaled_add(ds, &k);
            dk.slice_mut(s![key, kv_head, ..]).scaled_add(ds, &q);
            dv.slice_mut(s![key, kv_head, ..]).scaled_add(bf16(weight), &dout);
        }
    }
    let (q, kv) = (|| problem.sequences.iter().map(|s| s.q), || problem.sequences.iter().map(|s| s.kv));
    store(&dq, q(), scale, &mut gradients.dq);
    store(&dk, kv(), scale, &mut gradients.dk);
    store(&dv, kv(), 1.0, &mut gradients.dv);
}

/// Stores `scale` times the sums in rows that a sequence owns.
fn store(sums: &Array3<f32>, runs: impl Iterator<Item = Run>, scale: f32, stored: &mut Array3<f32>) {
    for row in runs.flat_map(|run| run.real_rows().chain(run.padding_rows())) {
        let to = stored.index_axis_mut(Axis(0), row);
        Zip::from(to).and(sums.index_axis(Axis(0), row)).for_each(|to, sum| *to = bf16(scale * sum));
    }
}

impl Backend for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn declaration(&self) -> Declaration {
        Declaration::single_rank(Format::Bf16, Format::Bf16)
            .with_padding(PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero })
            // Every sum runs in an order that no neighbour changes.
            .with_promises(Promises::ALL)
            .with_accumulation(Accumulation::F32Serial)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.declaration().table.check(problem)?;
        let mut got = RankOutputs::unwritten(problem);
        let lse = got.lse.as_mut().expect("it was made with one");
        forward(*self, problem, inputs, &mut got.out, lse);
        if let Some(gradients) = &mut got.gradients {
            backward(*self, problem, inputs, &got.out, lse, gradients);
        }
        Ok(got.into())
    }
}

/// Returns the smallest problem found that does not hold, and why; `None` where all drawn problems hold.
fn failure(backend: &dyn Backend, limits: Limits) -> Option<TestError<Problem>> {
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let every_problem_holds = runner.run(&problems_for(&backend.declaration().table, limits), |problem| {
        match judge(backend, &problem) {
            Verdict::Pass(_) => Ok(()),
            verdict => Err(TestCaseError::fail(verdict.to_string())),
        }
    });
    every_problem_holds.err()
}

#[test]
fn the_kernel_is_right_on_drawn_problems() {
    for limits in [Limits::quick(), Limits::seams()] {
        assert_eq!(failure(&RIGHT, limits), None);
    }
}

#[test]
fn a_wrong_call_of_the_right_kernel_is_found() {
    let wrong = miscall("call-last-key-lost").expect("a fault of the catalogue");
    let found = failure(&Miscalled::new(Box::new(RIGHT), wrong), Limits::quick());
    let Some(TestError::Fail(_, smallest)) = found else { panic!("{found:?}") };
    assert!(smallest.tokens() <= 2, "{smallest:?}");
}

#[test]
fn a_campaign_holds_the_right_kernel() {
    let summary = Campaign { seed: 1, ..Campaign::quick(1500) }.run(&RIGHT);
    assert!(summary.holds() && summary.held > 1400, "{summary}");
    // The kernel was asked for what it refuses, and for nothing else outside its table but forms that contradict
    // themselves, which other rows may refuse first.
    assert!(
        summary.refused.keys().all(|row| [
            "precisions",
            "masks.kinds",
            "forms",
            "softcap",
            "parallel.algorithms"
        ]
        .contains(row)),
        "{summary}"
    );
    assert_eq!(summary.missed(), []);
    // Several ranks, other formats and sinks are what the kernel does not take.
    let kept_out = summary.kept_out();
    for class in ["ring", "fp16", "softcap", "sink, learnable"] {
        assert!(kept_out.contains(&class), "{kept_out:?}");
    }
    assert!(!kept_out.contains(&"causal, window to the left"), "{kept_out:?}");
}

#[test]
fn a_campaign_finds_a_planted_bug() {
    let summary = Campaign { seed: 1, ..Campaign::quick(1500) }.run(&SHORT);
    assert!(!summary.failures.is_empty(), "{summary}");
    for failure in &summary.failures {
        let problem = &failure.case.problem;
        assert!(problem.tokens() <= 4, "{summary}");
        assert!(matches!(judge(&SHORT, problem), Verdict::Finding(_)));
        assert!(matches!(judge(&RIGHT, problem), Verdict::Pass(_)));
    }
}
