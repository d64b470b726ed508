//! Mistakes with descales: each is told where it is the fault, in the words of the descale and not of something else.

use seamproof_judge::finding::{Finding, LOOKS};
use seamproof_judge::ladder::judge;
use seamproof_judge::prelude::*;
use seamproof_judge::subject::Outputs;
use seamproof_judge::subjects::{Fp8, Fp8Sequence, fp8_fault};
use seamproof_oracle::{
    Element, Format, Heads, InputMode, Inputs, Mask, Pass, Precision, ProblemFields, ScaleValues, Scales,
    Scaling, Softmax, TensorScales,
};

/// The right kernel in the hands of a caller that edits its inputs.
struct Called<C>(C);

impl<C: Fn(&Problem, &mut Inputs) + Sync> Backend for Called<C> {
    fn declaration(&self) -> Declaration {
        Fp8::default().declaration()
    }

    fn name(&self) -> &str {
        "called"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut inputs = inputs.clone();
        (self.0)(problem, &mut inputs);
        Fp8::default().run(problem, &inputs)
    }
}

/// Returns three sequences with a scaling whose descales are any numbers.
fn problem(scaling: Scaling, pass: Pass) -> Problem {
    let code = Element { format: Format::E4m3, scaling };
    let mut fields = ProblemFields {
        heads: Heads { q: 4, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.25),
        pass,
        mode: InputMode::Flat,
        data_seed: 3,
        scales: ScaleValues::Any,
        ..ProblemFields::packed(&[(9, 9), (5, 5), (7, 7)], 8)
    };
    for element in [&mut fields.precision.q, &mut fields.precision.k, &mut fields.precision.v] {
        *element = code;
    }
    fields.precision.p = Format::E4m3.into();
    if pass == Pass::Backward {
        (fields.precision.ds, fields.precision.dout) = (Format::E4m3.into(), code);
    }
    Problem::new(fields).expect("the fields are legal")
}

fn finding(subject: &dyn Backend, problem: &Problem) -> Finding {
    match judge(subject, problem) {
        Verdict::Finding(finding) => *finding,
        verdict => panic!("not seen: {verdict:?}"),
    }
}

/// Checks the words about a subject: these and no others.
fn told(subject: &dyn Backend, problem: &Problem, words: &str) {
    let finding = finding(subject, problem);
    let looks = finding.what.split_once(LOOKS).map(|(_, looks)| looks);
    assert_eq!(looks, Some(words), "{finding}");
}

#[test]
fn faults_with_descales_are_named() {
    let faults = [
        ("k-descale-ignored", "the descale of k was ignored"),
        ("v-descale-ignored", "the descale of v was ignored"),
        ("q-descale-twice", "the descale of q was applied twice"),
        ("kv-descales-exchanged", "the descales of k and v were exchanged"),
        (
            "descale-of-the-first-sequence",
            "the descales of q, k and v in sequence 0 stood for every sequence",
        ),
        ("kv-descale-of-the-first-head", "the descales of k and v in head 0 stood for every head"),
    ];
    let problem = problem(Scaling::PerSequenceGroup, Pass::Forward);
    for (fault, words) in faults {
        told(&Fp8::default().planted(fp8_fault(fault).expect("a fault")), &problem, words);
    }
}

#[test]
fn faults_of_the_backward_with_descales_are_named() {
    let faults = [
        ("dout-descale-ignored", "in the backward the descale of dout was ignored"),
        (
            "dout-descale-of-the-first-sequence",
            "in the backward the descale of dout in sequence 0 stood for every sequence",
        ),
        ("dout-and-v-descales-exchanged", "in the backward the descales of v and dout were exchanged"),
        ("q-and-k-descales-exchanged-behind", "in the backward the descales of q and k were exchanged"),
    ];
    let problem = problem(Scaling::PerSequenceGroup, Pass::Backward);
    for (fault, words) in faults {
        told(&Fp8::default().planted(fp8_fault(fault).expect("a fault")), &problem, words);
    }
}

/// Replaces the descales of v, given its own scales and the place.
fn of_v(problem: &Problem, inputs: &mut Inputs, of: impl Fn(&TensorScales, [usize; 3]) -> f32) {
    let own = inputs.scales.v.clone().expect("v is scaled");
    let edited =
        TensorScales::new(problem, TensorName::V, |(rows, head, lanes)| of(&own, [rows, head, lanes]));
    inputs.scales.v = Some(edited);
}

#[test]
fn descales_that_a_caller_edits_are_named() {
    let problem = problem(Scaling::PerSequenceHead, Pass::Forward);
    let inverted =
        |problem: &Problem, inputs: &mut Inputs| of_v(problem, inputs, |own, at| 1.0 / own.descale()[at]);
    told(&Called(inverted), &problem, "the descale of v was inverted (1/δ in place of δ)");
    let halved =
        |problem: &Problem, inputs: &mut Inputs| of_v(problem, inputs, |own, at| own.descale()[at] / 2.0);
    told(
        &Called(halved),
        &problem,
        "codes of v were read as those of its fnuz format, which are half of them",
    );
}

/// Test of codes that are read in the other format. A number of e5m2 need not be one of e4m3, and the kernel takes it
/// where it is.
#[test]
fn codes_in_another_8_bit_format_are_named() {
    let problem = problem(Scaling::PerSequenceHead, Pass::Forward);
    let read = |code: f32| Format::E5m2.decode(Format::E4m3.encode(f64::from(code))) as f32;
    let of_k = |_: &Problem, inputs: &mut Inputs| inputs.k.mapv_inplace(read);
    told(&Called(of_k), &problem, "e4m3 codes of k were read as e5m2");
    let of_v = |_: &Problem, inputs: &mut Inputs| inputs.v.mapv_inplace(read);
    told(&Called(of_v), &problem, "e4m3 codes of v were read as e5m2");
}

/// A kernel that looks descales of a group up by the number of the query head.
struct ByQueryHead;

impl Backend for ByQueryHead {
    fn declaration(&self) -> Declaration {
        Fp8::default().declaration()
    }

    fn name(&self) -> &str {
        "by-query-head"
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut fields = ProblemFields::from(problem.clone());
        let Precision { q, k, v, .. } = &mut fields.precision;
        for element in [q, k, v] {
            element.scaling = Scaling::PerSequenceHead;
        }
        let each = Problem::new(fields).expect("each head has a descale");
        let scales = Scales::new(&each, |tensor, _, [sequence, head, _]| {
            let head = if tensor == TensorName::Q { head % problem.heads.kv } else { head };
            let own = inputs.scales.of(tensor).expect("a scaled input").descale();
            own[[sequence, head.min(own.dim().1 - 1), 0]]
        });
        Fp8::default().run(&each, &Inputs { scales, ..inputs.clone() })
    }
}

#[test]
fn descales_of_groups_that_are_looked_up_by_query_heads_are_named() {
    let problem = problem(Scaling::PerSequenceGroup, Pass::Forward);
    let words = "for q query head h had the descale at h mod the number of KV heads, not at its group";
    told(&ByQueryHead, &problem, words);
}

/// Test of a largest logit whose bound is wide: it holds those of several other scales, none of which leaves little of
/// the error.
#[test]
fn a_bound_that_is_wider_than_the_effect_names_no_scale() {
    for (data_seed, scaling) in
        (0..40).map(|seed| (seed, [Scaling::PerTensor, Scaling::PerHead][seed as usize % 2]))
    {
        let mut fields = ProblemFields::from(problem(scaling, Pass::Forward));
        (fields.data_seed, fields.dims.qk) = (data_seed, 128);
        fields.softmax.scale = 0.088_388_346;
        let problem = Problem::new(fields).expect("the fields are legal");
        let wrong = Fp8::default().planted(fp8_fault("k-descale-ignored").expect("a fault"));
        if let Verdict::Finding(finding) = judge(&wrong, &problem) {
            assert!(!finding.what.contains("twice"), "{data_seed}: {finding}");
        }
    }
}

/// Returns a pack in cuDNN's sequence, with given descales that are any numbers.
fn given(pass: Pass, seed: u64) -> Problem {
    let kernel = Fp8 { sequence: Fp8Sequence::Cudnn, backward: pass == Pass::Backward, ..Fp8::default() };
    let fields = ProblemFields {
        precision: kernel.declaration().table.precisions[0],
        heads: Heads { q: 2, kv: 2 },
        data_seed: seed,
        ..ProblemFields::from(problem(Scaling::PerTensor, pass))
    };
    Problem::new(fields).expect("the fields are legal")
}

/// Test of mistakes with given scales. These are drawn: with some of them a mistake changes nothing, or all results are at the
/// end of their range, and then nothing is told.
#[test]
fn faults_with_given_scales_are_named() {
    let faults = [
        ("weight-descale-dropped", Pass::Forward, "out lacked the descale of p (× ", 3),
        ("out-scale-of-one", Pass::Forward, "out lacked its scale (× ", 2),
        ("ds-descale-dropped", Pass::Backward, "dk lacked the descale of ds (× ", 7),
        ("gradient-scales-in-another-order", Pass::Backward, "dk had the scale of dv (× ", 6),
        (
            "out-descale-dropped-in-d",
            Pass::Backward,
            "rowsum(dout ∘ out) was made of the codes of out, without their descale",
            3,
        ),
    ];
    for (fault, pass, words, named) in faults {
        let subject = Fp8::default().planted(fp8_fault(fault).expect("a fault"));
        let looks = |seed: u64| match judge(&subject, &given(pass, seed)) {
            Verdict::Finding(finding) => finding.what.split_once(LOOKS).map(|(_, looks)| looks.to_owned()),
            _ => None,
        };
        let told: Vec<String> = (0..8).filter_map(looks).collect();
        assert!(told.iter().all(|looks| looks.contains(words)), "{fault}: {told:?}");
        assert!(told.len() >= named, "{fault}: {told:?}");
    }
}
