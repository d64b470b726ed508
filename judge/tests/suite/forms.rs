//! Forms in which problems are given: a reader that is wrong in one of them is found, and shrunk in that form.

use seamproof_judge::census::is_legal;
use seamproof_judge::evaluate::evaluate;
use seamproof_judge::finding::{Check, Finding, Relation};
use seamproof_judge::generate::{self, Draw};
use seamproof_judge::ladder::{Depth, Judge};
use seamproof_judge::prelude::*;
use seamproof_judge::shrink::shrink;
use seamproof_judge::subjects::{Emulated, miscall};
use seamproof_oracle::Algorithm;

/// Every form but the plain one.
const OTHERS: [Form; 5] =
    [Form::Segments, Form::Lengths, Form::PadBetweenSeqs, Form::NoPadBetweenSeqs, Form::BatchedSegments];

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

/// Test of the identity alone, with bits where a sequence's are promised, and within bounds where they are not. A
/// subject that is wrong in one form is found whichever it is, by a problem that was given in another.
#[test]
fn all_forms_of_a_problem_are_held_to_one_answer() {
    for promises in [Promises::ALL, Promises::default()] {
        for wrong in Form::ALL {
            let given_otherwise = Form::ALL.into_iter().filter(|form| *form != wrong).flat_map(given);
            let mut sayable = given_otherwise.filter(|problem| wrong.check(problem).is_ok()).take(40);
            let found = sayable.find_map(|problem| finding(&Misreads { form: wrong, promises }, &problem));
            let found = found.unwrap_or_else(|| panic!("{} is not asked", wrong.name()));
            assert_eq!(found.identity, Some(Relation::OtherForm), "{found}");
        }
    }
    let problems = || Form::ALL.into_iter().flat_map(|form| given(form).take(5));
    assert!(problems().all(|problem| finding(&Emulated::default(), &problem).is_none()));
}

/// Forms that several ranks are given as each of them has it.
const DEALT: [Form; 2] = [Form::Segments, Form::Lengths];

fn dealt(form: Form) -> impl Iterator<Item = Problem> {
    given(form).filter(|problem| problem.parallel.size() > 1)
}

/// Test that what is dealt is drawn over several ranks in every algorithm and balance, read as the same problem, and
/// held to one answer: a reader that is wrong in one form is found by problems in another.
#[test]
fn forms_that_are_dealt_to_ranks_are_held_to_one_answer() {
    for wrong in DEALT {
        let sayable = dealt(Form::PadBetweenSeqs).chain(DEALT.into_iter().flat_map(dealt));
        let mut asked = sayable.filter(|p| p.form != wrong && wrong.check(p).is_ok()).take(40);
        let promises = Promises::ALL;
        let found = asked.find_map(|problem| finding(&Misreads { form: wrong, promises }, &problem));
        let found = found.unwrap_or_else(|| panic!("{} is not asked", wrong.name()));
        assert_eq!(found.identity, Some(Relation::OtherForm), "{found}");
    }
    let mut groups = std::collections::HashSet::new();
    for problem in DEALT.into_iter().flat_map(dealt) {
        groups.insert((problem.parallel.algorithm.number(), problem.parallel.balance));
        let given = Given::of(&problem).expect("a form that is dealt");
        let again = given.sequences(problem.rows).expect("what is drawn is read");
        let fields = ProblemFields { sequences: again, form: Form::CuSeqlens, ..problem.clone().into() };
        assert_eq!(Problem::new(fields).expect("a problem").pairs(), problem.pairs());
    }
    assert!(groups.len() >= 12, "{groups:?}");
}

/// Test that a failure on several ranks is shrunk in a form that is dealt, and stays legal there.
#[test]
fn a_failure_in_a_form_that_is_dealt_is_shrunk_over_ranks() {
    for form in DEALT {
        let wrong = |problem: &Problem| {
            let parallel = &problem.parallel;
            problem.form == form && parallel.algorithm != Algorithm::Single && problem.pairs() > 0
        };
        let large = |problem: &Problem| problem.parallel.size() > 2 && problem.sequences.len() > 1;
        let found = dealt(form).find(large).expect("a draw");
        let small = shrink(&found, 2_000, wrong).problem;
        assert!(small.sequences.len() == 1 && small.parallel.size() == 1 && small.tokens() == 1, "{small:?}");
    }
}

/// Returns what the identity of forms finds by itself.
fn finding(subject: &dyn Backend, problem: &Problem) -> Option<Finding> {
    let mut judge = Judge { identities: vec![Relation::OtherForm], ..Judge::default() };
    judge.rungs.retain(|rung| rung.check == Check::Identity);
    match judge.examine(subject, problem, Depth::All).verdict {
        Verdict::Finding(finding) => Some(*finding),
        _ => None,
    }
}

/// Test that a contradiction is refused by the right kernel, whatever it says without the contradiction, and that no
/// table may take one.
#[test]
fn a_contradiction_is_refused_by_the_reader_and_by_every_table() {
    for form in Form::CONTRADICTIONS {
        let fields = ProblemFields { form, ..ProblemFields::packed(&[(2, 3); 4], 8) };
        let problem = Problem::new(fields.clone()).expect("a case of a contradiction");
        let inputs = seamproof_judge::values::inputs(&problem);
        let refused = Emulated::default().run(&problem, &inputs).expect_err("a refusal");
        assert_eq!(refused, RunError::Refused(Refusal::Form(form)));
        assert!(matches!(evaluate(&Emulated::default(), &problem), Verdict::Refused(Refusal::Form(_))));
        let plain = Problem::new(ProblemFields { form: Form::CuSeqlens, ..fields }).expect("plain");
        assert!(Emulated::default().run(&plain, &inputs).is_ok());
        let mut table = Table::widest();
        table.forms.push(form);
        let error = table.validated().expect_err("a table without meaning").to_string();
        assert!(error.starts_with(&format!("table.forms: {} says no problem", form.name())), "{error}");
    }
}

/// The emulated kernel, which fails at a contradiction in place of refusing it.
struct Trips;

impl Backend for Trips {
    fn name(&self) -> &str {
        "trips"
    }

    fn declaration(&self) -> Declaration {
        Emulated::default().declaration()
    }

    fn run(&self, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
        Emulated::default().run(problem, inputs).map_err(|error| match error {
            RunError::Refused(Refusal::Form(_)) => {
                RunError::Crash("cannot reshape an array of size 3".into())
            }
            other => other,
        })
    }
}

/// Test that an obscure error is not taken for a refusal.
#[test]
fn a_contradiction_that_ends_in_an_obscure_error_is_a_finding() {
    for form in Form::CONTRADICTIONS {
        let fields = ProblemFields { form, ..ProblemFields::packed(&[(2, 3); 4], 8) };
        let problem = Problem::new(fields).expect("a case of a contradiction");
        match evaluate(&Trips, &problem) {
            Verdict::Finding(finding) => assert_eq!(finding.check, Check::Crash, "{finding}"),
            other => panic!("{}: {other:?}", form.name()),
        }
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
