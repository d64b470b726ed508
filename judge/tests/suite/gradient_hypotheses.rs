//! Mistakes that explain a whole gradient: each is told where it is the fault, and none where an element shows another.

use ndarray::{Array3, Axis, s};
use seamproof_judge::subject::{RankGradients, RankOutputs};
use seamproof_judge::subjects::Emulated;
use seamproof_judge::values;
use seamproof_oracle::{
    Gradients, Heads, InputMode, Inputs, Mask, Problem, ProblemFields, Run, Saved, Sequence, Softmax, exact,
};

use super::hypotheses::{finding_of, nothing};

/// Returns two sequences with padding behind each, and two query heads on each KV head.
fn problem() -> Problem {
    let sequences = [(0, Run::packed(0, 9, 11)), (1, Run::packed(11, 5, 6))];
    let sequences = sequences.map(|(id, run)| Sequence { id, q: run, kv: run });
    let fields = ProblemFields {
        heads: Heads { q: 4, kv: 2 },
        mask: Mask::CAUSAL,
        softmax: Softmax::scaled(0.25),
        mode: InputMode::Flat,
        data_seed: 3,
        ..ProblemFields::of(sequences.to_vec(), 8)
    };
    Problem::new(fields).expect("the fields are legal")
}

/// Returns what the judge says of gradients that are edited, given the problem and what the forward returned.
fn said(edit: impl Fn(&Problem, &Saved, &mut RankGradients) + Sync) -> String {
    said_of(Emulated::default(), edit)
}

/// Returns the same of this kernel's gradients.
fn said_of(kernel: Emulated, edit: impl Fn(&Problem, &Saved, &mut RankGradients) + Sync) -> String {
    let results = |problem: &Problem, rank: &mut RankOutputs| {
        let lse = rank.lse.as_ref().expect("the LSE is shown").mapv(f64::from);
        let saved = Saved { out: rank.out.mapv(f64::from), lse };
        if let Some(gradients) = &mut rank.gradients {
            edit(problem, &saved, gradients);
        }
    };
    finding_of(kernel, &problem(), nothing, results).what
}

/// Checks the words about edited gradients: these and no others.
fn told(words: &str, edit: impl Fn(&Problem, &Saved, &mut RankGradients) + Sync) {
    let said = said(edit);
    assert_eq!(said.split_once("looks as if ").map(|(_, looks)| looks), Some(words), "{said}");
}

/// Returns the gradients of an edited backward, with the bits of f32.
fn backward(problem: &Problem, saved: &Saved, edit: impl FnOnce(&mut Inputs, &mut Saved)) -> Gradients {
    let (mut inputs, mut saved) = (values::inputs(problem), saved.clone());
    edit(&mut inputs, &mut saved);
    exact::backward(problem, &inputs, &saved)
}

fn narrowed(gradient: &Array3<f64>) -> Array3<f32> {
    gradient.mapv(|value| value as f32)
}

#[test]
fn a_gradient_that_is_off_by_a_factor() {
    told("dk lacked the softmax scale (× 4 everywhere)", |_, _, of| of.dk.mapv_inplace(|dk| dk * 4.0));
    told("dq had the softmax scale twice (× 0.25 everywhere)", |_, _, of| {
        of.dq.mapv_inplace(|dq| dq * 0.25);
    });
    told("dv was 0 everywhere", |_, _, of| of.dv.fill(0.0));
    told("dv had the other sign everywhere", |_, _, of| of.dv.mapv_inplace(|dv| -dv));
    told("the mean of a group's query heads stood in dv, not their sum (× 0.5 everywhere)", |_, _, of| {
        of.dv.mapv_inplace(|dv| dv * 0.5);
    });
    told("dq was about 3.00 times what it should be everywhere", |_, _, of| {
        of.dq.mapv_inplace(|dq| dq * 3.0);
    });
}

/// Test that gradients which are returned in the wrong order, and KV heads that are taken by a remainder, are told.
#[test]
fn a_gradient_of_another_place() {
    told("dv stood in dk", |_, _, of| of.dk = of.dv.clone());
    told("dk stood in dv", |_, _, of| of.dv = of.dk.clone());
    let by_remainder = |problem: &Problem, saved: &Saved| {
        // Heads 0 and 2 on the first KV head, 1 and 3 on the second.
        let order = [0, 2, 1, 3];
        let edit = |inputs: &mut Inputs, saved: &mut Saved| {
            inputs.q = inputs.q.select(Axis(1), &order);
            inputs.dout = inputs.dout.select(Axis(1), &order);
            saved.out = saved.out.select(Axis(1), &order);
            saved.lse = saved.lse.select(Axis(0), &order);
        };
        let gradients = backward(problem, saved, edit);
        Gradients { dq: gradients.dq.select(Axis(1), &order), ..gradients }
    };
    let words = "in the backward query head h read KV head h mod 2";
    told(words, |problem, saved, of| of.dk = narrowed(&by_remainder(problem, saved).dk));
    told(words, |problem, saved, of| of.dv = narrowed(&by_remainder(problem, saved).dv));
    told(words, |problem, saved, of| of.dq = narrowed(&by_remainder(problem, saved).dq));
}

#[test]
fn a_gradient_whose_rows_lie_elsewhere() {
    told("dk was written at the real offsets, not at the padded ones", |_, _, of| {
        let rows = of.dk.slice(s![11..16, .., ..]).to_owned();
        of.dk.slice_mut(s![9..14, .., ..]).assign(&rows);
        of.dk.slice_mut(s![14..16, .., ..]).fill(0.0);
        of.dk.slice_mut(s![9..11, .., ..]).fill(0.0);
    });
    told("each row of dv lay 1 row too late", |problem, _, of| {
        for sequence in &problem.sequences {
            for i in (1..sequence.kv.len).rev() {
                let row = of.dv.slice(s![sequence.kv.row(i - 1), .., ..]).to_owned();
                of.dv.slice_mut(s![sequence.kv.row(i), .., ..]).assign(&row);
            }
        }
    });
}

#[test]
fn a_gradient_that_lacks_a_term() {
    told("rowsum(dout ∘ out) was left out of dS", |problem, saved, of| {
        of.dk = narrowed(&backward(problem, saved, |_, saved| saved.out.fill(0.0)).dk);
    });
    told("the last query head of each group counted alone in dv", |problem, saved, of| {
        let without = |inputs: &mut Inputs, _: &mut Saved| {
            [0, 2].into_iter().for_each(|head| inputs.dout.slice_mut(s![.., head, ..]).fill(0.0));
        };
        of.dv = narrowed(&backward(problem, saved, without).dv);
    });
    told("in the backward the mask was left out", |problem, saved, of| {
        let fields = ProblemFields { mask: Mask::FULL, ..problem.clone().into() };
        let full = Problem::new(fields).expect("a mask");
        of.dv = narrowed(&backward(&full, saved, |_, _| {}).dv);
    });
}

/// Test that a mistake is told of a kernel that says nothing of its arithmetic: other sources of D would give bounds that
/// hold the right gradient too.
#[test]
fn a_term_is_missed_whatever_is_declared() {
    let silent = [("declares".to_owned(), "nothing".to_owned())].into();
    let kernel = Emulated::from_options(&silent).expect("options");
    let said = said_of(kernel, |problem, saved, of| {
        of.dk = narrowed(&backward(problem, saved, |_, saved| saved.out.fill(0.0)).dk);
    });
    assert!(said.contains("looks as if rowsum(dout ∘ out) was left out of dS"), "{said}");
}

/// Test that a mistake is not told where it leaves one wrong element unexplained.
#[test]
fn nothing_is_told_that_leaves_an_element_unexplained() {
    let said = said(|_, _, of| {
        of.dk.mapv_inplace(|dk| dk * 4.0);
        of.dk[[3, 1, 2]] += 1.0;
    });
    assert!(!said.contains("scale"), "{said}");
}
