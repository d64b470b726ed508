//! Calls of attention kernels.

use seamproof_oracle::{Alignment, Mask, Pass, Problem, ProblemFields, Run, Sequence, Softmax};
use seamproof_simulator::{AttentionCall, CallError};

fn problem(mask: Mask, lengths: &[(usize, usize)]) -> Problem {
    let (mut q_rows, mut kv_rows) = (1, 2);
    let sequences = (0..).zip(lengths).map(|(id, &(lq, lk))| {
        let (q, kv) = (Run::packed(q_rows, lq, lq + 1), Run::packed(kv_rows, lk, lk + 2));
        (q_rows, kv_rows) = (q_rows + q.span, kv_rows + kv.span);
        Sequence { id, q, kv }
    });
    let fields = ProblemFields::of(sequences.collect(), 1);
    Problem::new(ProblemFields { mask, pass: Pass::Forward, ..fields }).unwrap()
}

#[test]
fn a_whole_call_sees_what_the_mask_shows() {
    let sides = [None, Some(0), Some(1), Some(3), Some(u32::MAX)];
    for align in [Alignment::TopLeft, Alignment::BottomRight] {
        for (left, right) in sides.into_iter().flat_map(|left| sides.map(|right| (left, right))) {
            let mask = Mask::window(left, right, align);
            let problem = problem(mask, &[(4, 2), (2, 5), (3, 3), (0, 2), (2, 0)]);
            let call = AttentionCall::whole(&problem);
            assert_eq!(call.check(problem.rows.q, problem.rows.kv), Ok(()));
            for (segment, sequence) in call.segments.iter().zip(&problem.sequences) {
                for i in 0..sequence.q.len {
                    let shown = mask.visible(i, sequence.q.len, sequence.kv.len);
                    assert_eq!(segment.visible(i), shown, "{mask:?} {sequence:?} query {i}");
                }
            }
        }
    }
}

#[test]
fn a_factor_that_is_none_is_refused() {
    let problem = problem(Mask::CAUSAL, &[(4, 2)]);
    let refused = |scale: f32, softcap: Option<f32>| {
        let mut call = AttentionCall::whole(&problem);
        call.softmax = Softmax { scale, softcap, ..call.softmax };
        call.check(problem.rows.q, problem.rows.kv).map_err(|error| error.to_string())
    };
    assert_eq!(refused(0.5, Some(3.0)), Ok(()));
    for (scale, softcap) in [(f32::NAN, None), (0.0, None), (f32::INFINITY, None), (-1.0, None)] {
        assert!(refused(scale, softcap).is_err_and(|said| said.contains("the scale is")), "{scale}");
    }
    for softcap in [f32::NAN, 0.0, -2.0] {
        assert!(refused(1.0, Some(softcap)).is_err_and(|said| said.contains("the softcap is")), "{softcap}");
    }
}

#[test]
fn a_call_outside_its_tensors_is_refused() {
    let problem = problem(Mask::CAUSAL, &[(4, 2), (2, 5)]);
    let call = AttentionCall::whole(&problem);
    assert!(matches!(call.check(problem.rows.q - 1, problem.rows.kv), Err(CallError::Run { side: "q", .. })));
    assert!(matches!(
        call.check(problem.rows.q, problem.rows.kv - 1),
        Err(CallError::Run { side: "kv", .. })
    ));
    let mut twice = call.clone();
    twice.segments.push(twice.segments[0].clone());
    let error = twice.check(problem.rows.q, problem.rows.kv);
    assert_eq!(error, Err(CallError::QueryRowOwnedTwice { row: 1 }));
}
