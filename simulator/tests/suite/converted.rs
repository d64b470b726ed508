//! A single rank that converts a pack into a batch and back: its copies, and the packs that are not converted.

use seamproof_oracle::{Mask, Pass, Problem, ProblemFields, Run, Sequence, TensorRows};
use seamproof_simulator::check::check;
use seamproof_simulator::schedule::{Schedule, Work, converted, single};

/// Returns the number of copies of each pass.
fn copies(schedule: &Schedule) -> [usize; 2] {
    let program = &schedule.ranks[0];
    let begin = program.backward.unwrap_or(program.operations.len());
    let (forward, backward) = program.operations.split_at(begin);
    [forward, backward].map(|pass| pass.iter().filter(|o| matches!(o.work, Work::Copy { .. })).count())
}

fn padded(lengths: &[(usize, usize)]) -> ProblemFields {
    ProblemFields { mask: Mask::CAUSAL, pass: Pass::Backward, ..ProblemFields::padded(lengths, 8) }
}

#[test]
fn conversions_run_in_both_passes() {
    let problem = Problem::new(padded(&[(3, 4), (0, 2), (5, 5)])).unwrap();
    let schedule = converted(&problem).unwrap();
    // q, k, v, then out and lse; dout, then dq, dk and dv.
    assert_eq!(copies(&schedule), [5, 4]);
    let batch = schedule.buffers.iter().find(|buffer| &*buffer.name == "q in BSHD").unwrap();
    assert_eq!(batch.rows, 3 * 5, "as many rows as the longest real length");
    check(&problem, &schedule).unwrap();
    let Work::Copy { rows, .. } = &schedule.ranks[0].operations[0].work else { panic!("a copy of q") };
    let run = |offset, len| Run::packed(offset, len, len);
    assert_eq!(*rows, [(run(0, 3), run(0, 3)), (run(6, 5), run(10, 5))]);
}

#[test]
fn packs_that_are_not_converted_run_as_they_lie() {
    let apart = Run { offset: 0, step: 2, len: 3, span: 3 };
    let sequences = vec![Sequence { id: 0, q: apart, kv: apart }];
    let rows = TensorRows { q: 5, kv: 5 };
    let giant: Vec<(usize, usize)> = [(64, 64)].into_iter().chain((0..9).map(|_| (1, 1))).collect();
    for fields in [
        ProblemFields { rows, ..ProblemFields::of(sequences, 8) },
        ProblemFields::packed(&[], 8),
        ProblemFields::padded(&giant, 8),
    ] {
        let problem = Problem::new(fields).unwrap();
        assert_eq!(converted(&problem).unwrap(), single(&problem).unwrap(), "{problem:?}");
    }
}
