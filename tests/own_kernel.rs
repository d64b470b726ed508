//! A kernel of one's own under the judge, written as from another crate: what README's section of that name links to.
//!
//! The kernel is [`forward`] and [`backward`]: plain attention on the CPU, a query row of one head at a time, bf16 in and
//! out, f32 between, on one rank. [`Own`] puts it under the judge, and three tests ask: does it hold on drawn problems, does
//! a campaign find a planted bug, and is a wrong call of the right kernel found?

use std::ops::Range;

use ndarray::{Array, Array1, Array2, Array3, ArrayView1, Axis, ShapeBuilder, Zip, s};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use seamproof::backends::BackendError;
use seamproof::campaign::{self, Control, Distinct, Options, Plan, Shard, Silent, Sinks, Subjects, Summary};
use seamproof::record::Findings;
use seamproof_judge::case::Case;
use seamproof_judge::generate::{Limits, Profile};
use seamproof_judge::ladder::judge;
use seamproof_judge::strategy::problems;
use seamproof_judge::subject::{
    Backend, Capabilities, Declaration, Outputs, PaddingContract, PaddingInputs, PaddingOutputs, Promises,
    RankGradients, RankOutputs, RunError, TensorName,
};
use seamproof_judge::subjects::{Miscalled, miscall};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::envelope::Accumulation;
use seamproof_oracle::{
    Alignment, ContextParallel, Format, Inputs, Mask, Pass, Precision, Problem, ProblemFields, Run, Sequence,
    Sink,
};
use seamproof_simulator::UNWRITTEN_BITS;

/// The kernel under the judge.
#[derive(Clone, Copy)]
struct Own {
    /// Keys that a left window is short of: 0 is right.
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
    /// Of the keys that it sees.
    keys: Vec<usize>,
}

impl Own {
    /// Every query of every sequence and head.
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

    /// The keys of a sequence that its query `i` sees.
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

/// A result that nobody has written yet: rows that no sequence owns must stay so.
fn unwritten<S: ShapeBuilder>(shape: S) -> Array<f32, S::Dim> {
    Array::from_elem(shape, f32::from_bits(UNWRITTEN_BITS))
}

/// One head of one row.
fn lanes(tensor: &Array3<f32>, row: usize, head: usize) -> ArrayView1<'_, f32> {
    tensor.slice(s![row, head, ..])
}

/// out and lse.
type Saved = (Array3<f32>, Array2<f32>);

/// Fills every row that a sequence owns: with 0 and −∞ where it is padding, as where it sees no key.
fn forward(own: Own, problem: &Problem, inputs: &Inputs) -> Saved {
    let (mut out, mut lse) = (unwritten(problem.out_shape()), unwritten(problem.lse_shape()));
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
            // A weight is rounded before it is normalised: the exact modes tell.
            values.scaled_add(bf16(weight), &lanes(&inputs.v, *key, kv_head));
        }
        let normalised = |value| if sum == 0.0 { 0.0 } else { bf16(value / sum) };
        out.slice_mut(s![row, head, ..]).assign(&values.mapv(normalised));
        lse[[head, row]] = largest + sum.ln();
    }
    (out, lse)
}

/// The gradients of the out and lse that the forward returned.
fn backward(own: Own, problem: &Problem, inputs: &Inputs, (out, lse): &Saved) -> RankGradients {
    let mut dq = Array3::zeros(problem.q_shape());
    let (mut dk, mut dv) = (Array3::zeros(problem.k_shape()), Array3::zeros(problem.v_shape()));
    let scale = problem.softmax.scale;
    for Query { row, head, kv_head, keys } in own.queries(problem) {
        let (q, dout) = (lanes(&inputs.q, row, head), lanes(&inputs.dout, row, head));
        // Of the out as it is stored.
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
    RankGradients {
        dq: stored(&dq, q(), scale),
        dk: stored(&dk, kv(), scale),
        dv: stored(&dv, kv(), 1.0),
        dsink: Array1::zeros(0),
    }
}

/// `scale` times the sums, as they are stored in rows that a sequence owns.
fn stored(sums: &Array3<f32>, runs: impl Iterator<Item = Run>, scale: f32) -> Array3<f32> {
    let mut stored = unwritten(sums.raw_dim());
    for row in runs.flat_map(|run| run.real_rows().chain(run.padding_rows())) {
        let to = stored.index_axis_mut(Axis(0), row);
        Zip::from(to).and(sums.index_axis(Axis(0), row)).for_each(|to, sum| *to = bf16(scale * sum));
    }
    stored
}

impl Backend for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn declaration(&self) -> Declaration {
        Declaration {
            capabilities: Capabilities {
                formats: vec![Format::Bf16],
                weight_formats: vec![Format::Bf16],
                head_dims: 1..=256,
                algorithms: vec!["single"],
                sub_groups: false,
                softcap: false,
                sinks: vec![Sink::None],
                statistics: vec![TensorName::Lse],
            },
            padding: PaddingContract { inputs: PaddingInputs::Anything, outputs: PaddingOutputs::Zero },
            // Sums run in an order that no neighbour changes.
            promises: Promises::ALL,
            accumulation: Accumulation::F32Serial,
        }
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        if let Some(refusal) = self.declaration().capabilities.refusal(problem) {
            return Err(refusal.into());
        }
        let saved = forward(*self, problem, inputs);
        let gradients = (problem.pass == Pass::Backward).then(|| backward(*self, problem, inputs, &saved));
        let (out, lse) = saved;
        let rank = RankOutputs { out, lse: Some(lse), max_logit: None, gradients };
        Ok(Outputs { ranks: vec![rank], damage: Vec::new() })
    }
}

/// The nearest problem that the kernel takes: the generator draws for all kernels.
fn fit(problem: Problem) -> Problem {
    let mut fields = ProblemFields::from(problem);
    fields.precision = Precision::uniform(Format::Bf16);
    fields.parallel = ContextParallel::single();
    fields.softmax.softcap = None;
    fields.softmax.sink = Sink::None;
    Problem::new(fields).expect("each of these fields is legal with all others")
}

/// The smallest problem found that does not hold, and why; none where all that were drawn hold.
fn failure(backend: &dyn Backend, limits: Limits) -> Option<TestError<Problem>> {
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let every_problem_holds =
        runner.run(&problems(limits).prop_map(fit), |problem| match judge(backend, &problem) {
            Verdict::Pass(_) => Ok(()),
            verdict => Err(TestCaseError::fail(verdict.to_string())),
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

impl Subjects for Own {
    fn name(&self) -> &str {
        Backend::name(self)
    }

    fn options(&self, _seed: u64) -> Options {
        Options::new()
    }

    fn backend(&self, _options: &Options) -> Result<Box<dyn Backend + '_>, BackendError> {
        Ok(Box::new(*self))
    }

    fn fitted(&self, problem: Problem) -> Problem {
        fit(problem)
    }
}

/// A campaign's summary, and the cases that it stored.
fn campaign(own: Own) -> (Summary, Vec<Case>) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (findings, control) = (Findings::create(place.path()).expect("it is made"), Control::default());
    let (profile, shard) = (Profile::Quick, Shard::WHOLE);
    let plan = Plan { seed: 1, profile, first: 0, cases: Some(1500), time: None, shard, jobs: 2 };
    let summary =
        campaign::run(&plan, &own, &Sinks { findings: &findings, observer: &Silent, control: &control });
    let name = |distinct: &Distinct| Some(findings.path(distinct.name.as_ref()?));
    let paths = summary.distinct.iter().filter_map(name);
    let cases = paths.map(|path| Case::load(&path).expect("a finding is a case")).collect();
    (summary, cases)
}

#[test]
fn a_campaign_finds_a_planted_bug_and_nothing_in_the_right_kernel() {
    let (summary, _) = campaign(RIGHT);
    // What is missed: several ranks, formats and sinks that the kernel does not have.
    assert!(summary.failed.is_empty() && summary.refused.is_empty() && summary.held > 1400, "{summary}");
    let (summary, cases) = campaign(SHORT);
    assert!(!cases.is_empty(), "{summary}");
    for case in &cases {
        assert!(case.problem.tokens() <= 4, "{summary}");
        assert!(matches!(judge(&SHORT, &case.problem), Verdict::Finding(_)));
        assert!(matches!(judge(&RIGHT, &case.problem), Verdict::Pass(_)));
    }
}
