//! Mistakes that explain a whole case: each is told where it is the fault, and none where the results show another.

use ndarray::{Array3, s};
use seamproof_judge::finding::{Check, Finding};
use seamproof_judge::ladder::judge;
use seamproof_judge::subject::{Backend, Declaration, Outputs, PaddingInputs, RankOutputs, RunError};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{
    Alignment, Dims, Format, Heads, InputMode, Inputs, Mask, Pass, Precision, Problem, ProblemFields, Run,
    Sequence, Sink, Softmax, TensorName,
};

const LOOKS: &str = "looks as if ";

/// A right subject in the hands of a wrong caller. It shows no max_logit, as most kernels do not.
struct Mistaken<C, R> {
    inner: Emulated,
    /// Function that edits the problem and the inputs of the call.
    call: C,
    /// Function that edits the results, given the problem that was asked for.
    results: R,
}

impl<C, R> Backend for Mistaken<C, R>
where
    C: Fn(&mut ProblemFields, &mut Inputs) + Sync,
    R: Fn(&Problem, &mut RankOutputs) + Sync,
{
    fn declaration(&self) -> Declaration {
        let mut declaration = self.inner.declaration();
        declaration.table.statistics = vec![TensorName::Lse];
        declaration
    }

    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }

    fn name(&self) -> &str {
        "mistaken"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let (mut fields, mut inputs) = (ProblemFields::from(problem.clone()), inputs.clone());
        (self.call)(&mut fields, &mut inputs);
        let called = Problem::new(fields).expect("the caller asks for a problem");
        let mut outputs = self.inner.run(&called, &inputs)?;
        for rank in &mut outputs.ranks {
            rank.max_logit = None;
            (self.results)(problem, rank);
        }
        Ok(outputs)
    }
}

/// A subject that asks for finite numbers in padding rows.
struct Finite<B>(B);

impl<B: Backend> Backend for Finite<B> {
    fn declaration(&self) -> Declaration {
        let mut declaration = self.0.declaration();
        declaration.padding.inputs = PaddingInputs::Finite;
        declaration
    }

    fn name(&self) -> &str {
        "finite"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        self.0.run(problem, inputs)
    }
}

/// Returns the finding about a caller's mistake.
pub(crate) fn finding(
    problem: &Problem,
    call: impl Fn(&mut ProblemFields, &mut Inputs) + Sync,
    results: impl Fn(&Problem, &mut RankOutputs) + Sync,
) -> Finding {
    finding_of(Emulated::default(), problem, call, results)
}

/// Returns the finding about a caller's mistake around this kernel.
pub(crate) fn finding_of(
    inner: Emulated,
    problem: &Problem,
    call: impl Fn(&mut ProblemFields, &mut Inputs) + Sync,
    results: impl Fn(&Problem, &mut RankOutputs) + Sync,
) -> Finding {
    match judge(&Mistaken { inner, call, results }, problem) {
        Verdict::Finding(finding) => *finding,
        verdict => panic!("not seen: {verdict:?}"),
    }
}

/// Checks the words about a caller's mistake: these and no others.
fn told(
    problem: &Problem,
    words: &str,
    call: impl Fn(&mut ProblemFields, &mut Inputs) + Sync,
    results: impl Fn(&Problem, &mut RankOutputs) + Sync,
) {
    let finding = finding(problem, call, results);
    let looks = finding.what.split_once(LOOKS).map(|(_, looks)| looks);
    assert_eq!(looks, Some(words), "{finding}");
}

pub(crate) fn nothing(_: &mut ProblemFields, _: &mut Inputs) {}

fn as_they_are(_: &Problem, _: &mut RankOutputs) {}

/// Returns two sequences with padding, in a mode.
fn problem(mode: InputMode, edit: impl FnOnce(&mut ProblemFields)) -> Problem {
    let sequences = [(0, Run::packed(0, 9, 10)), (1, Run::packed(10, 5, 5))];
    let sequences = sequences.map(|(id, run)| Sequence { id, q: run, kv: run });
    let mut fields = ProblemFields {
        heads: Heads { q: 4, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.25),
        pass: Pass::Forward,
        mode,
        data_seed: 3,
        ..ProblemFields::of(sequences.to_vec(), 8)
    };
    fields.dims = Dims { qk: 8, v: 16 };
    edit(&mut fields);
    Problem::new(fields).expect("the fields are legal")
}

fn flat() -> Problem {
    problem(InputMode::Flat, |_| {})
}

fn lse(rank: &mut RankOutputs, edit: impl Fn(f32) -> f32) {
    rank.lse.as_mut().expect("the LSE is shown").mapv_inplace(edit);
}

#[test]
fn an_lse_with_another_base() {
    for mode in [InputMode::Flat, InputMode::Peaked, InputMode::UniformCount, InputMode::Routing] {
        let problem = problem(mode, |_| {});
        for (factor, words) in [
            (std::f32::consts::LOG2_E, "looks as if the LSE had base 2 (× 1.4427 everywhere)"),
            (
                std::f32::consts::LN_2,
                "looks as if a natural LSE was converted from base 2 (× 0.6931 everywhere)",
            ),
        ] {
            let finding = finding(&problem, nothing, |_, rank| lse(rank, |lse| lse * factor));
            let (_, more) = finding.what.split_once(words).unwrap_or_else(|| panic!("{finding}"));
            // In routing a row's LSE is one logit, which another scale explains too.
            assert!(more.is_empty() || mode == InputMode::Routing, "{finding}");
        }
    }
}

/// Sets the LSE of each row from its exact LSE and its largest logit.
fn of_largest(problem: &Problem, rank: &mut RankOutputs, edit: fn(f32, f32) -> f32) {
    let inputs = seamproof_judge::values::inputs(problem);
    let all = rank.lse.as_mut().expect("the LSE is shown");
    for sequence in &problem.sequences {
        for (i, row) in sequence.q.real_rows().enumerate() {
            for head in 0..problem.heads.q {
                let keys = problem.mask.visible(i, sequence.q.len, sequence.kv.len);
                let logit = |key: usize| {
                    let [q, k] =
                        [(&inputs.q, row, head), (&inputs.k, sequence.kv.row(key), head / problem.group())]
                            .map(|(tensor, row, head)| tensor.slice(ndarray::s![row, head, ..]));
                    problem.softmax.scale * q.dot(&k)
                };
                let largest = keys.map(logit).fold(f32::NEG_INFINITY, f32::max);
                let lse = &mut all[[head, row]];
                *lse = edit(*lse, largest);
            }
        }
    }
}

#[test]
fn an_lse_and_the_largest_logit() {
    let lacked = "the LSE lacked the row's largest logit (the logarithm of Σ exp(s − max) alone)";
    told(&flat(), lacked, nothing, |problem, rank| of_largest(problem, rank, |lse, largest| lse - largest));
    let stood = "the row's largest logit stood in place of the LSE";
    told(&flat(), stood, nothing, |problem, rank| of_largest(problem, rank, |_, largest| largest));
}

/// Test that a lost key is not told as a lost maximum where all rows see two keys.
#[test]
fn rows_of_equally_many_equal_keys_do_not_name_the_largest_logit() {
    let two = problem(InputMode::UniformCount, |fields| {
        fields.mask = Mask::FULL;
        fields.sequences.truncate(1);
        fields.sequences[0].kv = Run::packed(0, 2, 10);
    });
    let finding = finding(&two, nothing, |_, rank| lse(rank, |lse| if lse > 0.0 { 0.0 } else { lse }));
    assert!(!finding.what.contains("largest"), "{finding}");
}

#[test]
fn a_sink_or_a_soft_cap_that_is_missing() {
    let sink = problem(InputMode::Flat, |fields| fields.softmax.sink = Sink::OffByOne);
    let without = |fields: &mut ProblemFields, _: &mut Inputs| fields.softmax.sink = Sink::None;
    told(&sink, "the sink was left out", without, as_they_are);
    let before = "the LSE was taken before the sink was added";
    told(&sink, before, nothing, |_, rank| {
        lse(rank, |lse| if lse > f32::NEG_INFINITY { lse.exp_m1().ln() } else { lse });
    });
    let learnable = problem(InputMode::Flat, |fields| fields.softmax.sink = Sink::Learnable);
    let emptied = |fields: &mut ProblemFields, inputs: &mut Inputs| {
        without(fields, inputs);
        inputs.sink = ndarray::Array1::zeros(0);
    };
    told(&learnable, "the sink was left out", emptied, as_they_are);
    let capped = problem(InputMode::Large, |fields| fields.softmax.softcap = Some(2.0));
    told(&capped, "the soft cap was left out", |fields, _| fields.softmax.softcap = None, as_they_are);
}

#[test]
fn another_scale() {
    let scales = [
        (1.0, "logits were 4 times as large (softmax scale 1 in place of 0.25: forgotten)"),
        (0.0625, "logits were 0.25 times as large (softmax scale 0.0625 in place of 0.25: applied twice)"),
        (
            1.0 / 8f32.sqrt(),
            "logits were 1.414 times as large (softmax scale 0.35355338 in place of 0.25: 1/√ of the head dimension)",
        ),
        (
            0.25 * std::f32::consts::LN_2,
            "logits were 0.6931 times as large (softmax scale 0.1732868 in place of 0.25: powers of 2 in place of e)",
        ),
    ];
    for mode in [InputMode::Flat, InputMode::Peaked] {
        for (scale, words) in scales {
            told(&problem(mode, |_| {}), words, |fields, _| fields.softmax.scale = scale, as_they_are);
        }
    }
}

/// Test of one row of one key, where an LSE with base 2 and a larger scale are the same.
#[test]
fn mistakes_that_cannot_be_told_apart_are_all_told() {
    let one = problem(InputMode::Flat, |fields| {
        fields.sequences = vec![Sequence { id: 0, q: Run::packed(0, 1, 1), kv: Run::packed(0, 1, 1) }];
    });
    let both = "the LSE had base 2 (× 1.4427 everywhere), or as if logits were 1.443 times as large (softmax scale \
                0.36067376 in place of 0.25: converted to base 2 twice)";
    told(&one, both, nothing, |_, rank| lse(rank, |lse| lse / std::f32::consts::LN_2));
}

/// Returns a number whose code in one format is that of another number in another format.
fn read(own: Format, other: Format) -> impl Fn(f32) -> f32 {
    move |value| other.decode(own.encode(f64::from(value))) as f32
}

#[test]
fn codes_that_are_read_in_the_other_format() {
    let formats = [(Format::Fp16, Format::Bf16), (Format::Bf16, Format::Fp16)];
    for (own, other) in formats {
        // With codes in another format, logits of routing are about 1e19. Among several keys, an f32 cannot say which
        // one is the largest.
        let one_key = Mask { left: Some(0), ..Mask::CAUSAL };
        for (mode, mask) in [(InputMode::Flat, Mask::CAUSAL), (InputMode::Routing, one_key)] {
            let problem = problem(mode, |fields| {
                fields.precision = Precision::uniform(own);
                fields.mask = mask;
            });
            let inputs = |fields: &mut ProblemFields, inputs: &mut Inputs| {
                fields.precision = Precision::uniform(other);
                let tensors = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
                tensors.into_iter().for_each(|tensor| tensor.mapv_inplace(read(own, other)));
            };
            told(&problem, &format!("{own} codes were read as {other}"), inputs, |_, rank| {
                rank.out.mapv_inplace(read(other, own));
            });
            let out = format!("out held {other} codes, which are read as {own}");
            told(&problem, &out, nothing, |problem, rank| {
                // Rounded once, to the format whose codes it holds.
                let inputs = seamproof_judge::values::inputs(problem);
                let exact = seamproof_oracle::exact::forward(problem, &inputs).out;
                rank.out = exact.mapv(|out| own.decode(other.encode(out)) as f32);
            });
        }
    }
}

/// Test that a mistake is not told where it leaves one wrong element unexplained.
/// Test that tensors which are read where their rows would lie without padding are named, though what is seen is that
/// padding matters.
#[test]
fn rows_that_are_read_at_the_real_offsets() {
    // The second sequence lies at row 10, and behind 9 real rows.
    let moved = |tensor: &mut Array3<f32>| {
        let read = tensor.slice(s![9..14, .., ..]).to_owned();
        tensor.slice_mut(s![10..15, .., ..]).assign(&read);
    };
    for (words, of) in [
        ("k and v were", [false, true, true]),
        ("v was", [false, false, true]),
        ("q was", [true, false, false]),
    ] {
        let call = |_: &mut ProblemFields, inputs: &mut Inputs| {
            let tensors = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            tensors.into_iter().zip(of).filter(|(_, of)| *of).for_each(|(tensor, _)| moved(tensor));
        };
        let subject = Finite(Mistaken { inner: Emulated::default(), call, results: as_they_are });
        let Verdict::Finding(finding) = judge(&subject, &flat()) else { panic!("not seen") };
        let expected = format!("{LOOKS}{words} read at the real offsets, not at the padded ones");
        assert!(finding.check == Check::Poison && finding.what.ends_with(&expected), "{finding}");
    }
}

#[test]
fn nothing_is_told_that_leaves_an_element_unexplained() {
    let problem = flat();
    let spoilt = finding(&problem, nothing, |_, rank| {
        lse(rank, |lse| lse / std::f32::consts::LN_2);
        rank.out[[13, 3, 7]] += 1.0;
    });
    assert!(!spoilt.what.contains("base 2"), "{spoilt}");
    let one_row = finding(&problem, nothing, |_, rank| {
        rank.lse.as_mut().expect("the LSE is shown")[[3, 13]] /= std::f32::consts::LN_2;
    });
    assert!(!one_row.what.contains("base 2"), "{one_row}");
    let scaled =
        finding(&problem, |fields, _| fields.softmax.scale = 1.0, |_, rank| rank.out[[13, 3, 7]] += 1.0);
    assert!(!scaled.what.contains("scale"), "{scaled}");
}

/// Test of a subject that shows out alone. Codes in the other format make logits so large that the bounds of out are
/// infinite.
#[test]
fn infinite_bounds_explain_nothing() {
    let fp16 = problem(InputMode::Large, |fields| fields.precision = Precision::uniform(Format::Fp16));
    let finding = finding(&fp16, nothing, |_, rank| {
        rank.out.mapv_inplace(|out| out * 0.5);
        lse(rank, |lse| lse + 1.0);
    });
    assert!(!finding.what.contains("read as"), "{finding}");
}

/// Test of a causal argument that was passed, or taken for granted, where the mask hides nothing.
#[test]
fn a_mask_that_was_causal() {
    let full = problem(InputMode::Flat, |fields| fields.mask = Mask::FULL);
    told(&full, "the mask was causal", |fields, _| fields.mask.right = Some(0), as_they_are);
}

/// Returns two sequences without padding between them.
fn pack(mask: Mask) -> Problem {
    problem(InputMode::Flat, |fields| {
        let runs = [(0, Run::packed(0, 9, 9)), (1, Run::packed(9, 5, 5))];
        fields.sequences = runs.map(|(id, run)| Sequence { id, q: run, kv: run }).to_vec();
        fields.mask = mask;
    })
}

#[test]
fn rows_of_a_pack_that_are_taken_for_one_sequence() {
    let as_one = |fields: &mut ProblemFields, _: &mut Inputs| {
        let run = Run::packed(0, 14, 14);
        fields.sequences = vec![Sequence { id: 0, q: run, kv: run }];
    };
    for mask in [Mask::CAUSAL, Mask::FULL, Mask { left: Some(3), ..Mask::CAUSAL }] {
        let words = "sequences were not kept apart, and the rows of all were taken for those of one";
        told(&pack(mask), words, as_one, as_they_are);
    }
}

/// Returns out and LSE of query `row` of a head, of sequence and position `query`, with all keys up to its position.
fn with_keys_of_others(inputs: &Inputs, row: usize, head: usize, position: usize) -> (Vec<f64>, f64) {
    let key_rows = (0..9).chain(9..14).filter(|key| if *key < 9 { *key } else { *key - 9 } <= position);
    let (mut out, mut sum) = (vec![0.0; 16], 0.0);
    for key in key_rows {
        let product = (0..8)
            .map(|lane| f64::from(inputs.q[[row, head, lane]]) * f64::from(inputs.k[[key, head / 2, lane]]));
        let weight = (0.25 * product.sum::<f64>()).exp();
        sum += weight;
        (0..16).for_each(|lane| out[lane] += weight * f64::from(inputs.v[[key, head / 2, lane]]));
    }
    (out.iter().map(|out| out / sum).collect(), sum.ln())
}

#[test]
fn keys_of_other_sequences_at_the_same_positions() {
    let given = std::sync::Mutex::new(None);
    let kept = |_: &mut ProblemFields, inputs: &mut Inputs| {
        given.lock().unwrap().replace(inputs.clone());
    };
    let wrong = |_: &Problem, rank: &mut RankOutputs| {
        let given = given.lock().unwrap();
        let inputs = given.as_ref().expect("the call was made");
        for row in 0..14 {
            for head in 0..4 {
                let position = if row < 9 { row } else { row - 9 };
                let (out, lse) = with_keys_of_others(inputs, row, head, position);
                (0..16).for_each(|lane| rank.out[[row, head, lane]] = out[lane] as f32);
                rank.lse.as_mut().expect("the LSE is shown")[[head, row]] = lse as f32;
            }
        }
    };
    let words =
        "sequences were not kept apart: queries saw keys of others at the positions that the mask shows";
    // Queries and keys of each sequence are the same rows, so that both corners are.
    for align in [Alignment::TopLeft, Alignment::BottomRight] {
        told(&pack(Mask { align, ..Mask::CAUSAL }), words, kept, wrong);
    }
}
