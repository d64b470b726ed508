//! Steps of a problem: the calls that they make, and why some problems have none.

use ndarray::{Array3, s};
use seamproof_oracle::{
    Algorithm, Alignment, Append, Balance, Call, ContextParallel, Form, Inputs, Mask, Pass, Problem,
    ProblemFields, Steps, exact,
};

/// Returns fields of sequences, each given by queries and keys, with a mask under which they can be made in steps.
fn fields(lengths: &[(usize, usize)], steps: &[usize]) -> ProblemFields {
    ProblemFields {
        mask: Mask { align: Alignment::BottomRight, ..Mask::CAUSAL },
        pass: Pass::Forward,
        steps: Steps(steps.to_vec()),
        ..ProblemFields::packed(lengths, 4)
    }
}

fn calls(lengths: &[(usize, usize)], steps: &[usize]) -> Vec<Call> {
    Problem::new(fields(lengths, steps)).expect("it can be made in steps").calls()
}

#[test]
fn each_call_appends_what_is_left_of_a_sequence() {
    let calls = calls(&[(5, 5), (0, 3), (2, 7)], &[3, 1]);
    let lengths = |call: &Call| {
        call.problem.sequences.iter().map(|one| (one.id, one.q.len, one.kv.len)).collect::<Vec<_>>()
    };
    assert_eq!(
        calls.iter().map(lengths).collect::<Vec<_>>(),
        [vec![(0, 3, 3), (2, 2, 7)], vec![(0, 1, 4)], vec![(0, 1, 5)],]
    );
    assert_eq!(calls[0].appends[1], Append { sequence: 2, first: 0, cached: 5, tokens: 2 });
    assert_eq!(calls[2].appends, [Append { sequence: 0, first: 4, cached: 4, tokens: 1 }]);
    // Queries follow each other. The cache stays where it lies, and what is not yet written is padding.
    let [first, third] = &calls[0].problem.sequences[..] else { panic!("two sequences") };
    assert_eq!((first.q.offset, third.q.offset, calls[0].problem.rows.q), (0, 3, 5));
    assert_eq!((first.kv.offset, first.kv.span, third.kv.offset), (0, 5, 8));
    assert_eq!(calls[2].problem.rows.kv, 15);
    assert!(calls.iter().all(|call| call.problem.calls().is_empty()));
}

#[test]
fn steps_past_the_last_token_are_no_calls() {
    assert_eq!(calls(&[(2, 2)], &[1, usize::MAX, 7]).len(), 2);
    assert_eq!(calls(&[(0, 2)], &[1]), []);
    assert_eq!(calls(&[], &[1]), []);
    assert_eq!(calls(&[(3, 3)], &[]), []);
}

/// Test of the definition: the exact results of the calls are, row for row, those of the one call over everything.
#[test]
fn all_calls_together_are_one_call_over_everything() {
    for (left, sink_tokens) in [(None, 0), (Some(1), 0), (Some(1), 2)] {
        let mut fields = fields(&[(6, 6), (3, 8), (1, 1)], &[2, 1]);
        (fields.mask.left, fields.mask.sink_tokens) = (left, sink_tokens);
        let problem = Problem::new(fields).unwrap();
        let tensor = |shape: [usize; 3], by: usize| {
            Array3::from_shape_fn(shape, |(row, _, lane)| ((row * 7 + lane * by) % 11) as f32 - 5.0)
        };
        let inputs = Inputs {
            q: tensor(problem.q_shape(), 3),
            k: tensor(problem.k_shape(), 5),
            v: tensor(problem.v_shape(), 2),
            dout: Array3::zeros([0, 1, 4]),
            sink: Default::default(),
            scales: Default::default(),
        };
        let whole = exact::forward(&problem.at_once(), &inputs);
        let mut rows = 0;
        for Call { problem: call, appends } in problem.calls() {
            let mut q = Array3::zeros(call.q_shape());
            for (append, own) in appends.iter().zip(&call.sequences) {
                let from = problem.sequences[append.sequence].q.row(append.first);
                q.slice_mut(s![own.q.offset..own.q.offset + append.tokens, .., ..])
                    .assign(&inputs.q.slice(s![from..from + append.tokens, .., ..]));
            }
            let results = exact::forward(&call, &Inputs { q, ..inputs.clone() });
            for (append, own) in appends.iter().zip(&call.sequences) {
                for token in 0..append.tokens {
                    let at = problem.sequences[append.sequence].q.row(append.first + token);
                    assert_eq!(results.lse[[0, own.q.row(token)]], whole.lse[[0, at]]);
                    assert_eq!(
                        results.out.slice(s![own.q.row(token), .., ..]),
                        whole.out.slice(s![at, .., ..])
                    );
                    rows += 1;
                }
            }
        }
        assert_eq!(rows, problem.tokens());
    }
}

#[test]
fn what_cannot_be_made_in_steps_is_refused_with_the_value() {
    let refused = |fields: ProblemFields| Problem::new(fields).unwrap_err().to_string();
    let right = || fields(&[(2, 4)], &[1]);
    assert_eq!(refused(fields(&[(2, 4)], &[1, 0])), "steps: steps[1] is 0; use at least 1");
    assert_eq!(refused(fields(&[(2, 4)], &[1; 65])), "steps: there are 65 of them; use at most 64");
    let corner = "steps: the mask is not causal from the bottom-right corner; use right 0, align bottom-right and no prefix";
    assert_eq!(refused(ProblemFields { mask: Mask::CAUSAL, ..right() }), corner);
    let ahead = Mask { right: Some(1), ..right().mask };
    assert_eq!(refused(ProblemFields { mask: ahead, ..right() }), corner);
    let shown = Mask { prefix: 1, ..right().mask };
    assert_eq!(refused(ProblemFields { mask: shown, ..right() }), corner);
    assert_eq!(
        refused(ProblemFields { pass: Pass::Backward, ..right() }),
        "steps: the pass is backward; use forward"
    );
    let parallel = ContextParallel::over(1, Algorithm::Ring, Balance::Contiguous);
    assert_eq!(refused(ProblemFields { parallel, ..right() }), "steps: the algorithm is ring; use single");
    assert_eq!(
        refused(ProblemFields { form: Form::Segments, ..right() }),
        "steps: the form is segments; use cu_seqlens"
    );
    assert_eq!(
        refused(fields(&[(1, 1), (3, 2)], &[1])),
        "steps: sequences[1] has 3 queries and 2 keys; each query brings a key of its own"
    );
    let sayable = ProblemFields { mask: Mask::CAUSAL, ..right() }.sayable();
    assert!(sayable.steps.is_empty() && !right().sayable().steps.is_empty());
}

#[test]
fn a_problem_without_steps_is_written_as_before() {
    let json =
        |steps: &[usize]| serde_json::to_value(Problem::new(fields(&[(2, 4)], steps)).unwrap()).unwrap();
    assert_eq!(json(&[]).get("steps"), None);
    assert_eq!(json(&[1, 1])["steps"], serde_json::json!([1, 1]));
    let again: Problem = serde_json::from_value(json(&[1, 1])).unwrap();
    assert_eq!(again.steps.0, [1, 1]);
}
