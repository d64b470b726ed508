//! Forms in which problems are given: a reader that is wrong in one of them is found, and shrunk in that form.

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::{Check, Relation};
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subjects::{Emulated, miscall};

/// Every form but the plain one.
const OTHERS: [Form; 4] = [Form::Segments, Form::Lengths, Form::PadBetweenSeqs, Form::NoPadBetweenSeqs];

/// The emulated kernel, which reads wrongly what it is given in one form.
struct Misreads {
    form: Form,
    promises: Promises,
}

impl Backend for Misreads {
    fn name(&self) -> &str {
        "misreads"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration().with_promises(self.promises)
    }

    /// The last key of each sequence is lost.
    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        let mut fields = ProblemFields { form: Form::CuSeqlens, ..problem.clone().into() };
        if problem.form == self.form {
            fields
                .sequences
                .iter_mut()
                .for_each(|sequence| sequence.kv.len = sequence.kv.len.saturating_sub(1));
        }
        Emulated::default().run(&Problem::new(fields).expect("a key less"), inputs)
    }
}

fn given(form: Form) -> impl Iterator<Item = Problem> {
    (0..2_000).filter_map(move |index| match generate::draw(9, index, &Limits::seams()) {
        Draw::Problem(problem) => Some(problem).filter(|p| p.form == form && p.pairs() > 0 && is_legal(p)),
        _ => None,
    })
}

#[test]
fn a_wrong_reader_of_one_form_is_found_and_shrunk_in_that_form() {
    for form in OTHERS {
        let subject = Misreads { form, promises: Promises::ALL };
        let wrong = |problem: &Problem| matches!(evaluate(&subject, problem), Verdict::Finding(_));
        let found = given(form).find(wrong).expect("a finding");
        let small = shrink(&found, 2_000, wrong).problem;
        assert_eq!((small.form, small.sequences.len()), (form, 1), "{small:?}");
        assert!(small.tokens() <= 2, "{small:?}");
    }
}

#[test]
fn a_failure_in_any_form_is_shrunk_to_the_plain_one() {
    for form in OTHERS {
        let shrunk =
            given(form).take(8).map(|problem| shrink(&problem, 2_000, |small| small.pairs() > 0).problem);
        assert!(shrunk.collect::<Vec<_>>().iter().all(|small| small.form.is_plain()));
    }
}

/// Test of the identity alone, with bits where a sequence's are promised, and within bounds where they are not.
#[test]
fn all_forms_of_a_problem_are_held_to_one_answer() {
    for promises in [Promises::ALL, Promises::default()] {
        let mut judge = Judge { identities: vec![Relation::OtherForm], ..Judge::default() };
        judge.rungs.retain(|rung| rung.check == Check::Identity);
        let finding = |form: Form, problem: &Problem| match judge
            .examine(&Misreads { form, promises }, problem, Depth::First)
            .verdict
        {
            Verdict::Finding(finding) => Some(finding),
            _ => None,
        };
        // The subject is wrong in the form of the second run alone.
        let mut seen = given(Form::Segments).filter_map(|problem| finding(Form::CuSeqlens, &problem));
        let first = seen.next().expect("it is seen");
        assert_eq!(first.identity, Some(Relation::OtherForm), "{first}");
        assert_eq!(given(Form::Segments).take(50).find_map(|problem| finding(Form::Lengths, &problem)), None);
    }
}

/// Test that a fault of the reader shows in any form, and that a right reader gives the bits of offsets in each.
#[test]
fn the_emulated_kernel_reads_what_it_is_given() {
    let (right, mut shown) = (Emulated::default(), 0);
    let dropped = miscall("call-last-segment-dropped").expect("a fault");
    for problem in OTHERS.into_iter().flat_map(|form| given(form).take(20)) {
        let inputs = seamproof_judge::values::inputs(&problem);
        let plain =
            Problem::new(ProblemFields { form: Form::CuSeqlens, ..problem.clone().into() }).expect("plain");
        let [given, offsets] =
            [&problem, &plain].map(|problem| right.run(problem, &inputs).expect("it runs"));
        assert!(seamproof_judge::subjects::same_bits(&given, &offsets), "{problem:?}");
        shown += usize::from(Miscalled::new(Box::new(right), dropped).shows(&problem, &inputs));
    }
    assert!(shown > 20, "{shown}");
}
