//! Packs of very many sequences. What the judge does grows with their number, and not with its square.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use seamproof_judge::ladder::judge;
use seamproof_judge::subjects::Emulated;
use seamproof_judge::verdict::Verdict;
use seamproof_oracle::{
    Algorithm, Balance, ContextParallel, Mask, Pass, Problem, ProblemFields, Run, Sequence,
};

/// Number of sequences of the smaller pack. The larger one has four times as many.
const FEW: usize = 1 << 14;
/// Largest factor between the two packs' times. It is 4 where work is linear, and 16 where it is quadratic.
const FACTOR_MAX: f64 = 8.0;

/// Returns sequences of one token in `span` rows, which lie in memory in another order than in the list.
fn pack(sequences: usize, span: usize, edit: fn(&mut ProblemFields)) -> Problem {
    let sequence = |id: usize| {
        // An odd factor makes an order of every power of two.
        let run = Run::packed(span * (id * 25_777 % sequences), 1, span);
        Sequence { id: id as u32, q: run, kv: run }
    };
    let fields = ProblemFields::of((0..sequences).map(sequence).collect(), 8);
    let mut fields = ProblemFields { mask: Mask::CAUSAL, ..fields };
    edit(&mut fields);
    Problem::new(fields).expect("a legal pack")
}

/// Returns the time that this thread has run on a processor, whoever else runs there.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns what it costs to judge a pack. So few pairs are judged on the thread that asks.
fn cost(problem: &Problem) -> Duration {
    let start = thread_time();
    let verdict = judge(&Emulated::default(), problem);
    assert!(matches!(verdict, Verdict::Pass(_)), "{verdict:?}");
    thread_time() - start
}

fn is_linear(span: usize, edit: fn(&mut ProblemFields)) {
    let [few, many] = [FEW, 4 * FEW].map(|sequences| cost(&pack(sequences, span, edit)));
    let factor = many.as_secs_f64() / few.as_secs_f64();
    assert!(factor < FACTOR_MAX, "four times the sequences cost {factor:.1} times: {few:?}, {many:?}");
}

#[test]
fn a_forward_is_linear_in_sequences() {
    is_linear(1, |fields| fields.pass = Pass::Forward);
}

#[test]
fn a_backward_is_linear_in_sequences() {
    is_linear(1, |_| {});
}

#[test]
fn a_ring_is_linear_in_sequences() {
    is_linear(4, |fields| {
        fields.parallel = ContextParallel::over(2, Algorithm::Ring, Balance::DualChunk);
        fields.pass = Pass::Forward;
    });
}
