//! Choices of a random case.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_kernels::tables::Cut;
use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Balance, Run};
use seamproof_simulator::shard::ShardedSide;

/// The choices of a case, and a text about them.
pub(super) struct CaseDraw {
    rng: ChaCha8Rng,
    pub(super) what: String,
}

impl CaseDraw {
    pub(super) fn new(seed: u64, case: u64) -> CaseDraw {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..].copy_from_slice(&case.to_le_bytes());
        CaseDraw { rng: ChaCha8Rng::from_seed(*blake3::hash(&key).as_bytes()), what: String::new() }
    }

    pub(super) fn bits(&mut self) -> u32 {
        self.rng.next_u32()
    }

    /// Returns a number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.rng.next_u64() % end.max(1) as u64) as usize
    }

    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    pub(super) fn note(&mut self, what: &str) {
        self.what.push_str(what);
        self.what.push_str("; ");
    }

    /// Returns a cut of a batch.
    pub(super) fn cut(&mut self) -> Cut {
        let cp = self.pick(&[1, 1, 2, 2, 3, 4, 8, 5]);
        let stripe = self.pick(&[1, 1, 2, 3, 16]);
        let balance = self.pick(&[
            Balance::Contiguous,
            Balance::DualChunk,
            Balance::DualChunk,
            Balance::Striped { stripe },
        ]);
        self.note(&format!("{balance:?} over {cp}"));
        Cut { cp, balance }
    }

    /// Returns runs in order of rows, whose spans are multiples of `unit`, and the rows of their tensor.
    pub(super) fn runs(&mut self, unit: usize, rows_max: usize) -> (Vec<Run>, usize) {
        let count = match self.below(10) {
            0 => 0,
            1 => 1,
            2 => 100 + self.below(1000),
            _ => 1 + self.below(9),
        };
        let gaps = self.one_in(3);
        let mut end = if self.one_in(3) { self.below(3 * unit + 2) } else { 0 };
        let mut runs = Vec::new();
        for _ in 0..count {
            let units = self.pick(&[0, 1, 1, 2, 3, 7, 40]);
            let span = unit * if units == 40 { self.below(40) } else { units };
            let span = if end + span > rows_max { 0 } else { span };
            let len = match self.below(6) {
                0 => 0,
                1 => span.min(1),
                2 | 3 => span,
                _ => self.below(span + 1),
            };
            runs.push(Run { offset: end, step: 1, len, span });
            end += span + if gaps { self.below(2 * unit + 1) } else { 0 };
        }
        let rows = end + if self.one_in(2) { self.below(2 * unit + 3) } else { 0 };
        let (real, spans): (usize, usize) =
            runs.iter().fold((0, 0), |(real, spans), run| (real + run.len, spans + run.span));
        self.note(&format!("{count} sequences, {real} real of {spans} owned of {rows} rows"));
        (runs, rows)
    }

    /// Returns a batch cut over ranks.
    pub(super) fn shard(&mut self, cut: Cut) -> ShardedSide {
        let unit = span_multiple(cut.balance, cut.cp);
        let (runs, rows) = self.runs(unit, 4096);
        ShardedSide::of_runs(&runs, rows, cut.cp, cut.balance)
    }
}
