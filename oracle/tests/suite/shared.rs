//! Keys that sequences share outside of pages: what is refused, what is left of it in other sequences, and gradients
//! that are the sums over the sequences.

use crate::common::{Draws, inputs, plain};

use ndarray::Axis;
use seamproof_oracle::envelope::{Arithmetic, Model, Partition};
use seamproof_oracle::sharding::{members, whole};
use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Form, InputMode, Inputs, Mask, Pages, Pass, Problem,
    ProblemError, ProblemFields, Run, Saved, SharedKeys, Sharing, SharingError, Sink, Softmax, Steps,
    blocked, exact,
};

fn sharing(of: &[[usize; 3]]) -> Sharing {
    Sharing(of.iter().map(|&[sequence, with, keys]| SharedKeys { sequence, with, keys }).collect())
}

/// Returns a prompt of three tokens with its first answer, and two answers more.
fn answers() -> ProblemFields {
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let softmax = Softmax { sink: Sink::Learnable, ..Softmax::scaled(0.5) };
    let fields = ProblemFields { mask, softmax, ..plain(&[(5, 5), (2, 5), (3, 6)], 3) };
    ProblemFields { sharing: sharing(&[[1, 0, 3], [2, 0, 3]]), ..fields }
}

fn refused(edit: impl FnOnce(&mut ProblemFields)) -> SharingError {
    let mut fields = answers();
    edit(&mut fields);
    match Problem::new(fields).unwrap_err() {
        ProblemError::Sharing { error } => error,
        other => panic!("{other}"),
    }
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let shared = |of: &[[usize; 3]]| {
        let sharing = sharing(of);
        refused(|fields| fields.sharing = sharing)
    };
    assert_eq!(shared(&[[1, 0, 6]]), SharingError::Keys { sequence: 1, keys: 6, most: 5 });
    assert_eq!(shared(&[[1, 0, 0]]), SharingError::Keys { sequence: 1, keys: 0, most: 5 });
    assert_eq!(shared(&[[1, 1, 2]]), SharingError::Order { sequence: 1, with: 1 });
    assert_eq!(shared(&[[1, 2, 2]]), SharingError::Order { sequence: 1, with: 2 });
    assert_eq!(shared(&[[3, 0, 2]]), SharingError::Order { sequence: 3, with: 0 });
    assert_eq!(shared(&[[2, 0, 2], [1, 0, 2]]), SharingError::Order { sequence: 1, with: 0 });
    assert_eq!(shared(&[[1, 0, 2], [1, 0, 2]]), SharingError::Order { sequence: 1, with: 0 });
    assert_eq!(shared(&[[1, 0, 2], [2, 1, 2]]), SharingError::Lender { sequence: 2, with: 1 });
    let form = Form::Segments;
    assert_eq!(refused(|fields| fields.form = form), SharingError::Form { form });
    assert_eq!(refused(|fields| fields.mode = InputMode::Pairs), SharingError::ExactMode);
    let cached = |edit: fn(&mut ProblemFields)| {
        refused(|fields| {
            fields.pass = Pass::Forward;
            edit(fields);
        })
    };
    assert_eq!(cached(|fields| fields.steps = Steps(vec![1])), SharingError::Cache);
    assert_eq!(cached(|fields| fields.pages = Some(Pages::in_order(2, [5, 5, 6]))), SharingError::Cache);
    let sayable = ProblemFields { form: Form::PadBetweenSeqs, ..answers() }.sayable();
    assert!(sayable.sharing.is_empty() && !answers().sayable().sharing.is_empty());
}

/// Test that a row of two sequences stays an error where it is not declared, and where it is.
#[test]
fn a_row_of_two_sequences_is_refused() {
    for sharing in [Sharing::default(), sharing(&[[1, 0, 3]])] {
        let mut fields = ProblemFields { sharing, ..answers() };
        fields.sequences[1].kv = Run::packed(2, 5, 5);
        assert!(matches!(Problem::new(fields), Err(ProblemError::Overlap { index: 1, row: 2, .. })));
    }
}

#[test]
fn files_without_shared_keys_still_load() {
    let json = |problem: &Problem| serde_json::to_value(problem).unwrap();
    let shared = Problem::new(answers()).unwrap();
    assert_eq!(json(&shared)["sharing"][0], serde_json::json!({ "sequence": 1, "with": 0, "keys": 3 }));
    assert_eq!(json(&shared.unshared()).get("sharing"), None);
    for problem in [shared.unshared(), shared] {
        assert_eq!(serde_json::from_value::<Problem>(json(&problem)).unwrap(), problem);
    }
}

#[test]
fn other_sequences_share_what_they_still_have() {
    let (before, shared) = (answers().sequences, answers().sharing);
    let fitted =
        |kept: &[usize]| shared.fitted(&before, &kept.iter().map(|&index| before[index]).collect::<Vec<_>>());
    assert_eq!(fitted(&[0, 1, 2]), shared);
    assert_eq!(fitted(&[0, 2]), sharing(&[[1, 0, 3]]));
    // Who is left without the lender lends.
    assert_eq!(fitted(&[1, 2]), sharing(&[[1, 0, 3]]));
    assert_eq!(fitted(&[2, 1, 0]), sharing(&[[1, 0, 3], [2, 0, 3]]));
    assert_eq!(fitted(&[1]), Sharing::default());
    let mut short = before.clone();
    short[0].kv.len = 2;
    short[2].kv.len = 1;
    assert_eq!(shared.fitted(&before, &short), sharing(&[[1, 0, 2], [2, 0, 1]]));
    assert_eq!([0, 1, 2].map(|sequence| shared.common(sequence)), [3; 3]);
}

/// Test that no rank holds the rows that a sequence borrows, and that every other key lies where it does unshared.
#[test]
fn holes_are_on_no_rank() {
    let shared = Problem::new(answers()).unwrap();
    let rows: Vec<usize> =
        whole(&shared).kv.runs.iter().flat_map(|placed| placed.local.real_rows()).collect();
    assert_eq!(rows, [0, 1, 2, 3, 4, 8, 9, 13, 14, 15]);
    let mut fields = answers();
    for (index, sequence) in fields.sequences.iter_mut().enumerate() {
        sequence.q = Run::packed(8 * index, sequence.q.len, 8);
        sequence.kv = Run::packed(8 * index, sequence.kv.len, 8);
    }
    (fields.rows.q, fields.rows.kv) = (24, 24);
    for balance in [Balance::Contiguous, Balance::DualChunk, Balance::Striped { stripe: 1 }] {
        let parallel = ContextParallel::over(2, Algorithm::AllGather, balance);
        let problem = Problem::new(ProblemFields { parallel, ..fields.clone() }).unwrap();
        let keys = |problem: &Problem| {
            let mut keys = Vec::new();
            for (rank, layout) in members(problem).unwrap().into_iter().enumerate() {
                for placed in layout.kv.runs {
                    for (i, row) in placed.local.real_rows().enumerate() {
                        keys.push((rank, row, placed.sequence, placed.piece.start + i * placed.piece.step));
                    }
                }
            }
            keys.sort_unstable();
            keys
        };
        let borrowed = |(_, _, sequence, position): &(usize, usize, usize, usize)| {
            *position < problem.sharing.borrowed(*sequence)
        };
        let apart = keys(&problem.unshared());
        let held: Vec<_> = apart.iter().copied().filter(|key| !borrowed(key)).collect();
        assert_eq!(keys(&problem), held, "{balance:?}");
        assert_eq!(apart.len() - held.len(), 6, "{balance:?}");
    }
}

fn value(problem: &Problem, inputs: &Inputs) -> f64 {
    let forward = exact::forward(problem, inputs);
    inputs.dout.iter().zip(&forward.out).map(|(dout, out)| f64::from(*dout) * out).sum()
}

/// Test that dk and dv of a lent row are derivatives by the one row that all sequences have: a lent row that moves is
/// moved in the holes as well. The differences are those of `finite_differences`.
#[test]
fn gradients_of_shared_keys_are_derivatives() {
    let problem = Problem::new(answers()).unwrap();
    let mut inputs = inputs(&problem, &mut Draws(5));
    problem.repeat_shared(&mut inputs.k, &mut inputs.v);
    assert!(problem.shares_equal_rows(&inputs));
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let gradients = exact::backward(&problem, &inputs, &saved);
    let apart = exact::backward(&problem.unshared(), &inputs, &saved);
    assert_eq!(gradients.dq, apart.dq);
    for row in 0..problem.rows.kv {
        for lane in 0..3 {
            let central = |of_keys: bool, step: f32| {
                let [up, down] = [step, -step].map(|step| {
                    let mut moved = inputs.clone();
                    let tensor = if of_keys { &mut moved.k } else { &mut moved.v };
                    tensor[[row, 0, lane]] += step;
                    problem.repeat_shared(&mut moved.k, &mut moved.v);
                    value(&problem, &moved)
                });
                (up - down) / (2.0 * f64::from(step))
            };
            for (of_keys, gradient) in [(true, &gradients.dk), (false, &gradients.dv)] {
                let step = 1.0 / 2048.0;
                let difference = (4.0 * central(of_keys, step / 2.0) - central(of_keys, step)) / 3.0;
                let gradient = gradient[[row, 0, lane]];
                assert!((difference - gradient).abs() <= 2e-9, "row {row}: {gradient} against {difference}");
            }
        }
    }
}

/// Test that the fast answer is the plain one, and that the bound of a sum is no less than those of its parts.
#[test]
fn the_fast_answer_sums_shared_keys_and_bounds_the_sums() {
    let problem = Problem::new(answers()).unwrap();
    let mut inputs = inputs(&problem, &mut Draws(6));
    problem.repeat_shared(&mut inputs.k, &mut inputs.v);
    let saved = Saved::from(&exact::forward(&problem, &inputs));
    let plain = exact::backward(&problem, &inputs, &saved);
    let model = Model::new(&problem, Arithmetic::default(), Partition::single(16, 16));
    let of = |problem: &Problem| blocked::backward(problem, &inputs, &saved, Some(&model));
    let (shared, apart) = (of(&problem), of(&problem.unshared()));
    let [bound, parts] = [&shared, &apart].map(|answer| &answer.bound.as_ref().unwrap().worst);
    for (got, right) in [(&shared.exact.dk, &plain.dk), (&shared.exact.dv, &plain.dv)] {
        assert!(
            got.iter().zip(right).all(|(got, right)| (got - right).abs() < 1e-12),
            "{got} against {right}"
        );
    }
    for (bound, parts) in [(&bound.dk, &parts.dk), (&bound.dv, &parts.dv)] {
        for lent in 0..3 {
            let rows = [lent, 5 + lent, 10 + lent].map(|row| parts.index_axis(Axis(0), row));
            let bound = bound.index_axis(Axis(0), lent);
            for (at, bound) in bound.indexed_iter() {
                let sum: f64 = rows.iter().map(|row| row[at]).sum();
                assert!((sum..3.0 * sum).contains(bound), "{bound} of {sum}");
            }
        }
        // A hole has no gradient, and other rows are as they would be unshared.
        assert!([5, 6, 7, 10, 11, 12].iter().all(|&row| bound.index_axis(Axis(0), row).sum() == 0.0));
        assert!(
            [3, 4, 8, 9, 13, 14, 15]
                .iter()
                .all(|&row| { bound.index_axis(Axis(0), row) == parts.index_axis(Axis(0), row) })
        );
    }
}
