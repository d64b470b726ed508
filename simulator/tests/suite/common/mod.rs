//! Random problems whose spans a balance divides, and the random numbers behind them.

pub(crate) mod behind;
pub(crate) mod hold;

use std::num::NonZeroU32;

use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{
    Algorithm, Alignment, Balance, Blocks, Borders, ContextParallel, Dims, Heads, Mask, Pass, Problem,
    ProblemFields, Run, Sequence, SharedKeys, Sharing, Side, Sink, Softmax, TensorRows,
};

/// The generator splitmix64.
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Returns KV heads, and query heads for each KV head, that an all-to-all of `members` can deal. KV heads are split or
/// replicated.
fn dealt(draws: &mut Draws, members: usize) -> (usize, usize) {
    let divisors: Vec<usize> = (1..=members).filter(|n| members.is_multiple_of(*n)).collect();
    match draws.below(2) {
        0 => (members * (1 + draws.below(2)), 1 + draws.below(3)),
        _ => {
            let kv = draws.pick(&divisors);
            (kv, members / kv * (1 + draws.below(2)))
        }
    }
}

/// Returns no blocks for half of the draws, or blocks with borders up to `most`.
fn blocks(draws: &mut Draws, most: usize) -> Option<Blocks> {
    match draws.below(4) {
        0 => NonZeroU32::new(1 + draws.below(most) as u32).map(Blocks::Chunks),
        1 => {
            let mut borders: Vec<u32> =
                (0..1 + draws.below(3)).map(|_| 1 + draws.below(most) as u32).collect();
            borders.sort_unstable();
            borders.dedup();
            Borders::new(&borders).ok().map(Blocks::Documents)
        }
        _ => None,
    }
}

/// Returns the problem with keys that later sequences borrow of its first one with keys; `None` where none can.
pub(crate) fn shared(problem: &Problem, draws: &mut Draws) -> Option<Problem> {
    let lens: Vec<usize> = problem.sequences.iter().map(|sequence| sequence.kv.len).collect();
    let with = lens.iter().position(|&len| len > 0)?;
    let borrowers = (with + 1..lens.len()).filter(|&sequence| lens[sequence] > 0);
    let shared = borrowers.map(|sequence| {
        let most = lens[sequence].min(lens[with]);
        SharedKeys { sequence, with, keys: 1 + draws.below(most) }
    });
    let sharing = Sharing(shared.collect());
    let shares = !sharing.is_empty();
    Problem::new(ProblemFields { sharing, ..problem.clone().into() }).ok().filter(|_| shares)
}

/// Returns a random problem whose spans the balance divides.
pub(crate) fn problem(draws: &mut Draws, algorithm: Algorithm, balance: Balance, cp: usize) -> Problem {
    let unit = span_multiple(balance, cp);
    let mut rows = TensorRows { q: cp * draws.below(2), kv: cp * draws.below(3) };
    let mut sequences = Vec::new();
    for id in 0..draws.below(4) {
        let square = draws.below(2) == 0;
        let mut run = |end: &mut usize, like: Option<usize>| {
            let span = unit * draws.below(4);
            let len = like.unwrap_or_else(|| draws.below(span + 1)).min(span);
            let run = Run::packed(*end + cp * draws.below(2), len, span);
            *end = run.offset + span;
            run
        };
        let q = run(&mut rows.q, None);
        let kv = run(&mut rows.kv, square.then_some(q.len));
        sequences.push(Sequence { id: id as u32, q, kv });
    }
    rows = TensorRows { q: rows.q + cp * draws.below(2), kv: rows.kv + cp * draws.below(2) };
    let side = |draws: &mut Draws| match draws.below(3) {
        0 => None,
        1 => Some(draws.below(3) as u32),
        _ => Some(draws.below(3 * unit + 1) as u32),
    };
    let (kv_heads, group) = match algorithm {
        Algorithm::AllToAll => dealt(draws, cp),
        Algorithm::Hierarchical { all_to_all } => dealt(draws, all_to_all),
        _ => (1 + draws.below(2), 1 + draws.below(3)),
    };
    let fields = ProblemFields {
        rows,
        heads: Heads { q: kv_heads * group, kv: kv_heads },
        dims: Dims { qk: 1 + draws.below(4), v: 1 + draws.below(4) },
        mask: Mask {
            left: side(draws),
            right: side(draws),
            align: draws.pick(&[Alignment::TopLeft, Alignment::BottomRight]),
            blocks: blocks(draws, 3 * unit),
            prefix: draws.pick(&[0, 0, 1, unit as u32 + 1]),
            sink_tokens: draws.pick(&[0, 0, 1, unit as u32 + 1]),
        },
        softmax: Softmax {
            scale: 0.5,
            softcap: draws.pick(&[None, Some(3.0)]),
            sink: draws.pick(&[Sink::None, Sink::OffByOne, Sink::Learnable]),
        },
        parallel: ContextParallel::over(cp, algorithm, balance),
        pass: draws.pick(&[Pass::Forward, Pass::Backward, Pass::Backward]),
        ..ProblemFields::of(sequences, 1)
    };
    Problem::new(fields).unwrap()
}

/// Returns a problem with the sequences of q, of kv or of both side by side (SBHD), perhaps with a lane of nobody,
/// behind other rows and before others.
pub(crate) fn side_by_side(draws: &mut Draws, problem: &Problem) -> Problem {
    let mut fields = ProblemFields::from(problem.clone());
    let step = fields.sequences.len() + draws.below(2);
    let chosen = if step > 1 { 1 + draws.below(3) } else { 0 };
    for (bit, side) in [(1, Side::Q), (2, Side::Kv)] {
        if chosen & bit == 0 {
            continue;
        }
        let (first, slack) = (draws.below(5), draws.below(5));
        let mut end = first;
        for (lane, sequence) in fields.sequences.iter_mut().enumerate() {
            let run = if side == Side::Q { &mut sequence.q } else { &mut sequence.kv };
            // A run without rows may lie anywhere.
            let step = if run.span > 0 { step } else { 1 + draws.below(3) };
            let offset = if run.span > 0 { first + lane } else { draws.below(first + 1) };
            *run = Run { offset, step, ..*run };
            end = end.max(run.end().unwrap());
        }
        let rows = if side == Side::Q { &mut fields.rows.q } else { &mut fields.rows.kv };
        *rows = step.max(end) + slack;
    }
    Problem::new(fields).unwrap()
}
