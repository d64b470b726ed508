//! The judge on shapes that a campaign seldom draws, in every input mode. It fires on none of them while the kernel
//! is right, and sees a lost key in each that has one to lose.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::any_order::AnyOrder;
use seamproof_judge::exact::fit_scale;
use seamproof_judge::finding::Check;
use seamproof_judge::ladder::{Depth, Judge, judge};
use seamproof_judge::subject::{Backend, Declaration, Outputs, RunError};
use seamproof_judge::subjects::{Arithmetic, Emulated, Miscalled, difference, miscall};
use seamproof_judge::values::{self, Poison};
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Dims, Element, Format, Heads, InputMode, Inputs, Mask,
    Pass, Precision, Problem, ProblemFields, Run, Sequence, Sink, Softmax, TensorRows,
};

type Edit = fn(&mut ProblemFields);

/// Shapes by name, each an edit of [`fields`].
const SHAPES: [(&str, Edit); 24] = [
    ("head dim 8", |f| f.dims = Dims { qk: 8, v: 8 }),
    ("head dim 256", |f| f.dims = Dims { qk: 256, v: 256 }),
    ("a latent head", |f| f.dims = Dims { qk: 576, v: 512 }),
    ("dv above dqk", |f| f.dims = Dims { qk: 8, v: 40 }),
    ("dv below dqk", |f| f.dims = Dims { qk: 40, v: 3 }),
    ("head dim 1", |f| f.dims = Dims { qk: 1, v: 1 }),
    ("GQA 7:1", |f| f.heads = Heads { q: 7, kv: 1 }),
    ("every key masked", |f| {
        lengths(f, [5, 40]);
        f.mask = Mask { left: Some(0), right: Some(0), align: Alignment::TopLeft, ..Mask::FULL };
        f.sequences[0].kv.len = 0;
    }),
    ("queries past the keys", |f| {
        lengths(f, [40, 3]);
        f.mask = Mask { left: Some(1), right: Some(0), align: Alignment::TopLeft, ..Mask::FULL };
    }),
    ("one key", |f| lengths(f, [9, 1])),
    ("one query", |f| lengths(f, [1, 40])),
    ("a huge soft cap", |f| f.softmax.softcap = Some((1 << 20) as f32)),
    ("a tiny soft cap", |f| f.softmax.softcap = Some(1.0 / 1024.0)),
    ("sinks only", |f| {
        lengths(f, [9, 0]);
        f.softmax.sink = Sink::Learnable;
    }),
    ("a sink off by one, one key", |f| {
        lengths(f, [9, 1]);
        f.softmax.sink = Sink::OffByOne;
    }),
    ("a window of 0", |f| {
        f.mask = Mask { left: Some(0), right: Some(0), align: Alignment::BottomRight, ..Mask::FULL }
    }),
    ("a window of 0 to the right", |f| {
        f.mask = Mask { left: None, right: Some(0), align: Alignment::BottomRight, ..Mask::FULL };
    }),
    ("the largest scale", |f| f.softmax.scale = 64.0),
    ("the largest scale at head dim 256", |f| {
        f.dims = Dims { qk: 256, v: 256 };
        f.softmax.scale = 64.0;
    }),
    ("the smallest scale", |f| f.softmax.scale = 1.0 / (1 << 20) as f32),
    ("seven ranks of which one has a row", |f| parallel(f, Algorithm::Ring, 7, [1, 1])),
    ("eight ranks of which none has a query", |f| parallel(f, Algorithm::AllGather, 8, [0, 5])),
    ("four ranks of which none has a key", |f| parallel(f, Algorithm::Ring, 4, [5, 0])),
    ("heads dealt to seven ranks", |f| {
        f.heads = Heads { q: 7, kv: 1 };
        parallel(f, Algorithm::AllToAll, 7, [3, 2]);
    }),
];

/// Returns one sequence after a gap, with padding and slack.
fn fields() -> ProblemFields {
    let (q, kv) = (Run::packed(1, 9, 56), Run::packed(2, 40, 56));
    ProblemFields {
        rows: TensorRows { q: 60, kv: 60 },
        heads: Heads { q: 2, kv: 1 },
        data_seed: 5,
        ..ProblemFields::of(vec![Sequence { id: 0, q, kv }], 16)
    }
}

fn lengths(fields: &mut ProblemFields, [q, kv]: [usize; 2]) {
    (fields.sequences[0].q.len, fields.sequences[0].kv.len) = (q, kv);
}

fn parallel(fields: &mut ProblemFields, algorithm: Algorithm, ranks: usize, of: [usize; 2]) {
    lengths(fields, of);
    fields.parallel = ContextParallel::over(ranks, algorithm, Balance::Contiguous);
}

/// Returns a shape in every mode and format, with the mode's own scale where it has one.
fn problems(edit: Edit) -> impl Iterator<Item = Problem> {
    let formats = [(Format::Bf16, Format::Bf16), (Format::Fp16, Format::Fp16), (Format::Fp16, Format::F32)];
    InputMode::ALL.into_iter().flat_map(move |mode| {
        formats.into_iter().map(move |(format, p)| {
            let mut fields = fields();
            fields.precision = Precision { p: Element::from(p), ..Precision::uniform(format) };
            fields.mode = mode;
            edit(&mut fields);
            fields.softmax.scale = fit_scale(mode, fields.softmax.scale);
            Problem::new(fields).expect("a legal shape")
        })
    })
}

fn kernels() -> Vec<Box<dyn Backend>> {
    let options =
        |of: &[[&str; 2]]| of.iter().map(|[name, value]| ((*name).into(), (*value).into())).collect();
    [options(&[]), options(&[["arithmetic", "hopper"], ["q_tile", "64"], ["kv_tile", "16"], ["order", "3"]])]
        .iter()
        .map(|options| Box::new(Emulated::from_options(options).expect("options")) as Box<dyn Backend>)
        .collect()
}

#[test]
fn odd_shapes_hold_in_every_mode() {
    let mut fired = Vec::new();
    for kernel in kernels() {
        for (name, edit) in SHAPES {
            for problem in problems(edit) {
                let found = Judge::default().examine(&*kernel, &problem, Depth::All);
                if !matches!(found.verdict, Verdict::Pass(_)) || !found.further.is_empty() {
                    let (mode, precision) = (problem.mode, problem.precision);
                    let format = precision.q.format;
                    fired.push(format!(
                        "{name}, {mode:?} in {format}: {:?} {:?}",
                        found.verdict, found.further
                    ));
                }
            }
        }
    }
    assert!(fired.is_empty(), "{} findings:\n{}", fired.len(), fired.join("\n"));
}

/// Test that a lost last key shows in some mode, in every shape in which a query sees that key.
#[test]
fn a_lost_key_is_seen_in_every_odd_shape() {
    let blind = [
        "every key masked",
        "sinks only",
        "eight ranks of which none has a query",
        "four ranks of which none has a key",
    ];
    let wrong =
        Miscalled::new(Box::new(Emulated::default()), miscall("call-last-key-lost").expect("a fault"));
    for (name, edit) in SHAPES {
        let seen = problems(edit).any(|problem| matches!(judge(&wrong, &problem), Verdict::Finding(_)));
        assert_eq!(seen, !blind.contains(&name), "{name}");
    }
}

/// Test that a sink of −∞ acts as none, bit for bit, also in rows without keys, whose LSE is −∞.
#[test]
fn a_sink_of_minus_infinity_is_none() {
    for keys in [40, 0] {
        let problem = |sink| {
            let mut fields = fields();
            lengths(&mut fields, [9, keys]);
            (fields.softmax.sink, fields.pass) = (sink, Pass::Forward);
            Problem::new(fields).expect("a problem")
        };
        let (with, without) = (problem(Sink::Learnable), problem(Sink::None));
        let mut inputs = values::inputs(&with);
        inputs.sink.fill(f32::NEG_INFINITY);
        let bare = Inputs { sink: values::inputs(&without).sink, ..inputs.clone() };
        for arithmetic in [Arithmetic::F32, Arithmetic::Hopper] {
            let kernel = Emulated { arithmetic, ..Emulated::default() };
            let [got, want] = [(&with, &inputs), (&without, &bare)]
                .map(|(problem, inputs)| kernel.run(problem, inputs).expect("a run"));
            assert_eq!(difference(&got, &want), None, "{keys} keys, {arithmetic:?}");
        }
    }
}

/// A subject that sums gradients in any order, and says so. One element of dq is made anew from the inputs, the
/// number of the run and its former value.
struct Spoilt {
    inner: AnyOrder,
    runs: AtomicU64,
    spoil: fn(&Inputs, u64, f32) -> f32,
}

impl Spoilt {
    fn new(spoil: fn(&Inputs, u64, f32) -> f32) -> Spoilt {
        Spoilt { inner: AnyOrder::from(0), runs: AtomicU64::new(0), spoil }
    }
}

impl Backend for Spoilt {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn declaration(&self) -> Declaration {
        self.inner.declaration()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut outputs = Backend::run(&self.inner, problem, inputs)?;
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let real = problem.sequences[0].q.row(0);
        for rank in &mut outputs.ranks {
            let dq = &mut rank.gradients.as_mut().expect("a backward pass").dq[[real, 0, 0]];
            *dq = (self.spoil)(inputs, run, *dq);
        }
        Ok(outputs)
    }
}

/// Test that gradients of an exact mode are the same in any order, so a wrong digit in the second run alone is not a
/// matter of order.
#[test]
fn a_second_run_of_an_exact_mode_is_exact_too() {
    let scale = fit_scale(InputMode::Pairs, fields().softmax.scale);
    let softmax = Softmax { scale, ..fields().softmax };
    let problem = Problem::new(ProblemFields { mode: InputMode::Pairs, softmax, ..fields() });
    // The fault flips the last digit of a bf16 in every second run.
    let subject = Spoilt::new(|_, run, dq| f32::from_bits(dq.to_bits() ^ (run as u32 % 2) << 16));
    match judge(&subject, &problem.expect("a legal shape")) {
        Verdict::Finding(finding) => assert_eq!(finding.check, Check::Exact, "{finding}"),
        verdict => panic!("not seen: {verdict:?}"),
    }
}

#[test]
fn gradients_in_any_order_are_no_finding_but_a_leak_of_either_run_is() {
    assert_eq!(Poison::strongest(&Problem::new(fields()).expect("a legal shape")), Poison::Nan);
    let verdict = |leak| judge(&Spoilt::new(leak), &Problem::new(fields()).expect("a legal shape"));
    let seen = |leak| match verdict(leak) {
        Verdict::Finding(finding) => finding.check,
        verdict => panic!("not seen: {verdict:?}"),
    };
    let right = verdict(|_, _, dq| dq);
    assert!(matches!(right, Verdict::Pass(_)), "{right:?}");
    assert_eq!(
        seen(|inputs, _, dq| if inputs.v.iter().any(|v| v.is_nan()) { f32::NAN } else { dq }),
        Check::Poison
    );
    assert_eq!(
        seen(|inputs, _, dq| if inputs.v.iter().any(|v| v.is_nan()) { dq } else { dq + 100.0 }),
        Check::Envelope
    );
}
