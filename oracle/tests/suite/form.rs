//! Forms in which a problem is given: what each can say, and the way back.

use std::collections::BTreeSet;

use seamproof_oracle::segments::Segments;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Form, Given, Problem, ProblemFields, Run, Sequence, TensorRows,
};

fn in_form(form: Form, sequences: &[(Run, Run)]) -> Result<Problem, String> {
    let sequences = (0..).zip(sequences).map(|(id, &(q, kv))| Sequence { id, q, kv });
    let fields = ProblemFields { form, ..ProblemFields::of(sequences.collect(), 8) };
    Problem::new(fields).map_err(|error| error.to_string())
}

/// Returns the sequences that a subject reads.
fn read(problem: &Problem) -> Vec<Sequence> {
    Given::of(problem).expect("a form").sequences(problem.rows).expect("it says the problem")
}

fn tight(offset: usize, len: usize) -> Run {
    Run::packed(offset, len, len)
}

#[test]
fn a_form_that_says_a_problem_is_read_as_the_same_sequences() {
    // Rows that belong to none before, between and behind; keys in another order than queries; a side without rows.
    let runs = [(tight(2, 3), tight(4, 2)), (tight(5, 1), tight(0, 3)), (tight(9, 0), tight(7, 1))];
    let problem = in_form(Form::Segments, &runs).unwrap();
    let again = read(&problem);
    assert_eq!(again[..2], problem.sequences[..2]);
    assert_eq!((again[2].q.len, again[2].kv), (0, tight(7, 1)));
    let batch = [(3, 4), (0, 0), (5, 2)];
    let rows = |index: usize, len, span| Run::packed(index * span, len, span);
    let runs: Vec<(Run, Run)> =
        (0..).zip(batch).map(|(i, (q, kv))| (rows(i, q, 5), rows(i, kv, 4))).collect();
    let problem = in_form(Form::Lengths, &runs).unwrap();
    assert_eq!(read(&problem), problem.sequences);
    for form in [Form::Segments, Form::Lengths] {
        assert_eq!(read(&in_form(form, &[]).unwrap()), []);
    }
    for form in [Form::CuSeqlens, Form::PadBetweenSeqs] {
        assert!(Given::of(&in_form(form, &runs).unwrap()).is_none());
    }
}

#[test]
fn what_a_form_cannot_say_is_refused_with_the_value() {
    let padded = [(Run::packed(0, 2, 3), tight(0, 2))];
    assert_eq!(
        in_form(Form::Segments, &padded).unwrap_err(),
        "form segments: sequences[0].q has offset 0, step 1 and span 3, not 0, 1 and 2; use cu_seqlens"
    );
    let apart = [(Run { offset: 0, step: 2, len: 2, span: 2 }, tight(0, 2))];
    assert!(in_form(Form::Segments, &apart).unwrap_err().contains("step 2"));
    assert!(in_form(Form::Lengths, &padded).is_ok());
    let uneven = [(tight(0, 2), tight(0, 2)), (tight(2, 3), tight(2, 2))];
    assert_eq!(
        in_form(Form::Lengths, &uneven).unwrap_err(),
        "form lengths: sequences[1].q has offset 2, step 1 and span 3, not 2, 1 and 2; use cu_seqlens"
    );
    let fields = |form| ProblemFields { form, ..ProblemFields::padded(&[(2, 4), (4, 4)], 8) };
    let mut slack = fields(Form::Lengths);
    slack.rows.kv += 1;
    assert_eq!(
        Problem::new(slack.clone()).unwrap_err().to_string(),
        "form lengths: rows.kv is 9, and the batch has 8; use cu_seqlens"
    );
    assert_eq!(slack.sayable().form, Form::CuSeqlens);
    assert_eq!(fields(Form::Lengths).sayable().form, Form::Lengths);
    let parallel = ContextParallel::over(2, Algorithm::Ring, Balance::Contiguous);
    let ring = Problem::new(ProblemFields { parallel, ..fields(Form::BatchedSegments) });
    assert_eq!(
        ring.unwrap_err().to_string(),
        "form batched_segments: the algorithm is ring; only single is given so; use cu_seqlens"
    );
}

/// Test that the caller's word for padding is free to say yes, and says no only where rows lie at the sums of lengths.
#[test]
fn a_caller_who_denies_padding_that_is_there_is_refused() {
    let tail = [(tight(0, 2), tight(0, 3)), (tight(2, 1), Run::packed(3, 1, 2))];
    let gap = [(tight(0, 2), tight(0, 3)), (tight(3, 1), tight(3, 1))];
    let first = [(tight(1, 2), tight(0, 3))];
    let apart = [(Run { offset: 0, step: 2, len: 2, span: 2 }, tight(0, 2))];
    let tight_ones = [(tight(0, 2), tight(0, 3)), (tight(2, 0), tight(3, 1)), (tight(2, 1), tight(4, 0))];
    for runs in [&tail[..], &gap, &first, &apart, &tight_ones, &[]] {
        assert!(in_form(Form::PadBetweenSeqs, runs).is_ok(), "{runs:?}");
        let denied = in_form(Form::NoPadBetweenSeqs, runs);
        assert_eq!(denied.is_ok(), runs.len() == 3 || runs.is_empty(), "{denied:?}");
    }
    assert_eq!(
        in_form(Form::NoPadBetweenSeqs, &tail).unwrap_err(),
        "form no_pad_between_seqs: sequences[1].kv has offset 3, step 1 and span 2, not 3, 1 and 1; use cu_seqlens"
    );
    assert!(
        in_form(Form::NoPadBetweenSeqs, &gap).unwrap_err().contains("offset 3, step 1 and span 1, not 2")
    );
    let words = Form::ALL.map(|form| form.pad_between_seqs());
    assert_eq!(words, [None, None, None, Some(true), Some(false), None]);
    // Ranks share rows without padding where they divide every length.
    let parallel = ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk);
    let ring = |form, lengths: &[(usize, usize)]| {
        Problem::new(ProblemFields { form, parallel: parallel.clone(), ..ProblemFields::padded(lengths, 8) })
    };
    assert!(ring(Form::NoPadBetweenSeqs, &[(8, 8), (4, 4)]).is_ok());
    assert!(ring(Form::NoPadBetweenSeqs, &[(8, 8), (3, 4)]).is_err());
    assert!(ring(Form::PadBetweenSeqs, &[(8, 8), (3, 4)]).is_ok());
}

#[test]
fn the_plain_form_is_not_written() {
    let fields = |form| ProblemFields { form, ..ProblemFields::padded(&[(2, 4), (4, 4)], 8) };
    let json = |form| serde_json::to_value(Problem::new(fields(form)).unwrap()).unwrap();
    assert_eq!(json(Form::CuSeqlens).get("form"), None);
    assert_eq!(json(Form::Lengths)["form"], "lengths");
    let again: Problem = serde_json::from_value(json(Form::Lengths)).unwrap();
    assert_eq!(again.form, Form::Lengths);
    for form in Form::ALL {
        assert_eq!(serde_json::to_value(form).unwrap(), form.name());
    }
}

/// Test that every draw of what lacks dimensions says the same sequences, and that all ways of broadcasting occur.
#[test]
fn ids_under_several_leading_dimensions_say_the_same_sequences() {
    // Twelve batch rows: those of each second index of (2, 2, 3) are the same, or all of them are.
    let batch = |lengths: fn(usize) -> usize| {
        let run = |index: usize| Run::packed(index * 4 + 1, lengths(index), lengths(index));
        let sequences: Vec<Sequence> =
            (0..12).map(|index| Sequence { id: index as u32, q: run(index), kv: run(index) }).collect();
        ProblemFields { rows: TensorRows { q: 48, kv: 48 }, ..ProblemFields::of(sequences, 8) }
    };
    let mut shapes = BTreeSet::new();
    for (lengths, seed) in
        [(|_| 2) as fn(usize) -> usize, |index| 1 + index % 3, |index| 1 + index % 2 + index / 6]
            .into_iter()
            .flat_map(|lengths| (0..16).map(move |seed| (lengths, seed)))
    {
        let fields = ProblemFields { form: Form::BatchedSegments, data_seed: seed, ..batch(lengths) };
        let problem = Problem::new(fields).unwrap();
        assert_eq!(read(&problem), problem.sequences, "seed {seed}");
        let Some(Given::Segments { sides, .. }) = Given::of(&problem) else { panic!("segments") };
        assert_eq!(Segments::new(&sides[0], &sides[1]).unwrap().leading(), [2, 2, 3]);
        shapes.insert(sides.map(|side| [side.ids.shape.len(), side.positions.unwrap().shape.len()]));
    }
    for expected in [[[4, 4], [4, 4]], [[4, 1], [1, 1]], [[1, 4], [1, 1]], [[1, 1], [4, 4]], [[4, 1], [2, 1]]]
    {
        assert!(shapes.contains(&expected), "{expected:?} among {shapes:?}");
    }
}

/// Test that a contradiction is read as an error that names both values, and is no form of a problem without one.
#[test]
fn contradictions_say_no_problem() {
    let given = |form, lengths: &[(usize, usize)]| {
        let fields = ProblemFields { form, ..ProblemFields::packed(lengths, 8) };
        Problem::new(fields).map_err(|error| error.to_string())
    };
    let said = |form, lengths: &[(usize, usize)]| {
        let problem = given(form, lengths).unwrap();
        Given::of(&problem).unwrap().sequences(problem.rows).unwrap_err().to_string()
    };
    assert_eq!(
        said(Form::MisshapenSegments, &[(2, 3); 4]),
        "q has the leading dimensions [4, 1] and kv [2, 2, 1]; use the same, or the last of them alone on one side"
    );
    assert_eq!(
        said(Form::MisshapenSegments, &[(2, 2); 3]),
        "q has the leading dimensions [3, 1] and kv [2, 1]; use the same, or the last of them alone on one side"
    );
    assert_eq!(
        said(Form::UnequalLengths, &[(2, 3); 4]),
        "q has 4 lengths and kv 3; give both for each batch row"
    );
    assert_eq!(
        given(Form::MisshapenSegments, &[(2, 1); 3]).unwrap_err(),
        "form misshapen_segments: there are 3 batch rows; only two or more, beside keys that divide \
         otherwise, contradict each other so; use cu_seqlens"
    );
    assert!(given(Form::UnequalLengths, &[]).unwrap_err().contains("only one or more"));
    for form in Form::CONTRADICTIONS {
        assert!(form.is_contradiction() && !Form::ALL.contains(&form));
        assert_eq!(serde_json::to_value(form).unwrap(), form.name());
    }
}

/// Test of the arrays of one problem, which `python/tests/test_problem.py` expects of the Python package too.
#[test]
fn batched_ids_are_the_golden_ones() {
    let run = |index: usize, rows, len| Run::packed(index * rows, len, len);
    let lengths = [(2, 1), (3, 1), (2, 1), (3, 2)];
    let sequences = lengths.into_iter().enumerate().map(|(index, (q, kv))| Sequence {
        id: index as u32,
        q: run(index, 3, q),
        kv: run(index, 2, kv),
    });
    let rows = TensorRows { q: 12, kv: 8 };
    let fields = ProblemFields { rows, ..ProblemFields::of(sequences.collect(), 8) };
    let given = |data_seed| {
        let fields = ProblemFields { form: Form::BatchedSegments, data_seed, ..fields.clone() };
        let Some(Given::Segments { sides, .. }) = Given::of(&Problem::new(fields).unwrap()) else {
            panic!("segments")
        };
        sides.map(|side| {
            let positions = side.positions.unwrap();
            [(side.ids.shape, side.ids.values), (positions.shape, positions.values)]
        })
    };
    let ids = (vec![2, 2, 2], vec![1, 0, 1, 0, 1, 0, 1, 1]);
    let short = [(vec![2, 3], vec![1, 1, 0, 1, 1, 1]), (vec![3], vec![0, 1, 2])];
    assert_eq!(given(0b1111)[1], [ids.clone(), (vec![2], vec![0, 1])]);
    assert_eq!(given(0b1111)[0], short);
    let kept = (vec![2, 2, 3], [1, 1, 0, 1, 1, 1].repeat(2));
    let positions = (vec![2, 2, 3], [0, 1, 0, 0, 1, 2].repeat(2));
    assert_eq!(given(0b0001)[0], [short[0].clone(), positions]);
    assert_eq!(
        given(0),
        [[kept, given(0b0001)[0][1].clone()], [ids, (vec![2, 2, 2], vec![0, 0, 0, 0, 0, 0, 0, 1])]]
    );
}
