//! `explain`, word by word, on cases that a person can follow.

use seamproof::backend::Backend;
use seamproof::backends::{Emulated, canary};
use seamproof::explain::{Options, explain};
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Dims, Format, Heads, InputMode, Mask, Pass, Precision, Problem,
    ProblemFields, Rows, Run, Sequence, Sink, Softmax,
};

/// Self-attention on a pack of sequences, given as (real, padded) rows.
fn problem(lengths: &[(usize, usize)], mask: Mask, algorithm: Algorithm, ranks: usize) -> Problem {
    let mut rows = 0;
    let sequences = lengths.iter().enumerate().map(|(id, &(len, span))| {
        let run = Run::packed(rows, len, span);
        rows += span;
        Sequence { id: id as u32, q: run, kv: run }
    });
    Problem::new(ProblemFields {
        sequences: sequences.collect(),
        rows: Rows { q: rows, kv: rows },
        heads: Heads { q: 1, kv: 1 },
        dims: Dims { qk: 1, v: 1 },
        mask,
        softmax: Softmax { scale: 1.0, softcap: None, sink: Sink::None },
        precision: Precision::uniform(Format::Bf16),
        parallel: ContextParallel {
            algorithm,
            balance: Balance::DualChunk,
            world: ranks,
            ranks: (0..ranks).collect(),
        },
        mode: InputMode::Flat,
        data_seed: 0,
        pass: Pass::Forward,
    })
    .unwrap()
}

fn explained(backend: &dyn Backend, problem: &Problem, options: Options) -> String {
    explain(problem, &backend.schedule(problem).unwrap(), &options)
}

#[track_caller]
fn says(got: &str, expected: &str) {
    assert_eq!(got, expected, "\n{got}");
}

#[test]
fn one_rank_with_padding() {
    let problem = problem(&[(3, 4), (2, 4)], Mask::CAUSAL, Algorithm::Single, 1);
    says(&explained(&Emulated::default(), &problem, Options::default()), "EXPECT_SINGLE");
}

#[test]
fn a_ring_of_two_ranks() {
    let problem = problem(&[(3, 4), (7, 8)], Mask::CAUSAL, Algorithm::Ring, 2);
    says(&explained(&Emulated::default(), &problem, Options::default()), "EXPECT_RING");
}

#[test]
fn an_all_gather_with_every_operation_of_a_rank() {
    let problem = problem(&[(3, 4), (7, 8)], Mask::CAUSAL, Algorithm::AllGather, 2);
    let options = Options { rank: Some(1), pass: Some(Pass::Forward), operations: true };
    says(&explained(&Emulated::default(), &problem, options), "EXPECT_GATHER");
}

#[test]
fn a_window_that_is_one_key_short() {
    let mask = Mask { left: Some(2), ..Mask::CAUSAL };
    let problem = problem(&[(3, 4), (12, 12)], mask, Algorithm::AllGather, 2);
    let options = Options { rank: Some(0), ..Options::default() };
    says(&explained(canary().as_ref(), &problem, options), "EXPECT_WINDOW");
}

/// A key that is of another sequence, and padding, are named as what they are; so is a schedule that does not run.
#[test]
fn foreign_keys_and_hopeless_schedules() {
    let problem = problem(&[(2, 4), (2, 4)], Mask::FULL, Algorithm::Single, 1);
    let mut schedule = Emulated::default().schedule(&problem).unwrap();
    let launch = schedule.ranks[0].operations.iter_mut().find_map(|operation| match &mut operation.work {
        seamproof_simulator::schedule::Work::Attend(attend) => Some(attend),
        _ => None,
    });
    launch.unwrap().call.segments[0].kv[0] = Run::packed(0, 5, 5);
    let text = explain(&problem, &schedule, &Options::default());
    let line =
        "of sequence 0 see 0..2 and 2 rows of padding, 0..1 of sequence 1, kv heads 0..1, should see 0..2";
    assert!(text.contains(line), "{text}");
    schedule.ranks.clear();
    let text = explain(&problem, &schedule, &Options::default());
    assert!(text.contains("the schedule does not run"), "{text}");
}

#[test]
fn what_is_left_out_is_counted() {
    let problem = problem(&[(1, 4); 40], Mask::CAUSAL, Algorithm::Ring, 2);
    let text = explained(&Emulated::default(), &problem, Options::default());
    for left in ["  … and 24 more sequences", "    … and 8 more segments"] {
        assert!(text.contains(left), "{left}: {text}");
    }
}
