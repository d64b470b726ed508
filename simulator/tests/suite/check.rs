//! Right schedules under the checker: it accepts the builders' schedules.

use crate::common::{Draws, problem};

use seamproof_oracle::{
    Algorithm, Alignment, Balance, ContextParallel, Heads, Mask, Pass, Problem, ProblemFields, Run, Sequence,
    Sink, Softmax,
};
use seamproof_simulator::check::check;
use seamproof_simulator::schedule::{MergeOrder, build, build_with};

/// Number of problems of each algorithm and cut.
const PROBLEMS: usize = 400;

fn accepts(algorithm: Algorithm, balances: &[Balance], sizes: std::ops::RangeInclusive<usize>) {
    let mut draws = Draws(11);
    let mut built = 0;
    for number in 0..PROBLEMS {
        let balance = draws.pick(balances);
        let cp = sizes.start() + draws.below(sizes.end() - sizes.start() + 1);
        let problem = problem(&mut draws, algorithm, balance, cp);
        let order = draws.pick(&MergeOrder::ALL);
        let Ok(schedule) = build_with(&problem, order) else { continue };
        built += 1;
        match check(&problem, &schedule) {
            Ok(proof) => assert_eq!(proof.pairs, problem.pairs() * problem.heads.q as u64),
            Err(errors) => {
                let lines: Vec<String> = errors.iter().take(8).map(ToString::to_string).collect();
                panic!("problem {number}: {}\n{problem:#?}", lines.join("\n"));
            }
        }
    }
    assert!(built > PROBLEMS / 2);
}

const CUTS: [Balance; 4] =
    [Balance::DualChunk, Balance::Contiguous, Balance::Striped { stripe: 1 }, Balance::Striped { stripe: 2 }];

#[test]
fn single_rank_schedules_are_right() {
    accepts(Algorithm::Single, &CUTS[..2], 1..=1);
}

#[test]
fn rings_are_right() {
    accepts(Algorithm::Ring, &CUTS, 1..=6);
}

#[test]
fn all_gathers_are_right() {
    accepts(Algorithm::AllGather, &CUTS, 1..=6);
}

#[test]
fn all_to_alls_are_right() {
    accepts(Algorithm::AllToAll, &CUTS, 1..=6);
}

/// One pack of a million tokens on 64 ranks.
fn pack(algorithm: Algorithm, balance: Balance, mask: Mask) -> Problem {
    let span = 1 << 14;
    let lengths: Vec<_> = (0..64).map(|id| (span - 37 * id, span)).collect();
    Problem::new(ProblemFields {
        heads: Heads { q: 64, kv: 8 },
        mask,
        softmax: Softmax { sink: Sink::Learnable, ..Softmax::scaled(0.5) },
        parallel: ContextParallel::over(64, algorithm, balance),
        ..ProblemFields::padded(&lengths, 128)
    })
    .unwrap()
}

#[test]
#[ignore = "seconds; prints figures"]
fn a_million_tokens_on_64_ranks() {
    let window = Mask { left: Some(4000), right: Some(100), align: Alignment::TopLeft, ..Mask::FULL };
    for (algorithm, balance) in [
        (Algorithm::Ring, Balance::DualChunk),
        (Algorithm::Ring, Balance::Striped { stripe: 1 }),
        (Algorithm::AllGather, Balance::DualChunk),
        (Algorithm::AllGather, Balance::Striped { stripe: 128 }),
        (Algorithm::AllToAll, Balance::DualChunk),
    ] {
        for mask in [Mask::CAUSAL, window] {
            let problem = pack(algorithm, balance, mask);
            let start = std::time::Instant::now();
            let schedule = build(&problem).unwrap();
            let built = start.elapsed();
            let proof = check(&problem, &schedule).map_err(|errors| errors[0].clone());
            let memory = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let peak = memory.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("").to_owned();
            let checked = start.elapsed() - built;
            eprintln!(
                "{algorithm:?} {balance:?} {mask:?}: built {built:?}, checked {checked:?}, {peak}, {proof:?}"
            );
        }
    }
}

/// Number of sequences whose schedules are proved. A checker that copies its knowledge of all sequences for each of
/// them takes a minute for each schedule.
const MANY: usize = 1 << 16;

fn proves_each(problem: ProblemFields) {
    let problem = Problem::new(problem).expect("a legal pack");
    let schedule = build(&problem).expect("a schedule");
    let proof = check(&problem, &schedule).expect("a right schedule");
    assert_eq!((proof.segments, proof.pairs), (MANY, problem.pairs()));
}

/// Sequences of one token, whose order in memory differs from their order in the list.
#[test]
fn many_sequences_in_any_order_are_proved() {
    let parallel = ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk);
    let sequence = |id: usize| {
        // An odd factor permutes any power of two.
        let run = Run::packed(4 * (id * 25_777 % MANY), 1, 4);
        Sequence { id: id as u32, q: run, kv: run }
    };
    let fields = ProblemFields::of((0..MANY).map(sequence).collect(), 1);
    proves_each(ProblemFields { parallel, pass: Pass::Forward, ..fields });
}

/// Sequences of two tokens whose rows lie apart (SBHD).
#[test]
fn many_sequences_with_rows_apart_are_proved() {
    let sequence = |id: usize| {
        let run = Run { offset: id, step: MANY, len: 2, span: 2 };
        Sequence { id: id as u32, q: run, kv: run }
    };
    let fields = ProblemFields::of((0..MANY).map(sequence).collect(), 1);
    proves_each(ProblemFields { mask: Mask::CAUSAL, pass: Pass::Forward, ..fields });
}
