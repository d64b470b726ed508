//! Sights: what queries of a program on several ranks would see if it mistook positions, ranks or padding, and what
//! they would make of it if it merged the results of its blocks in a wrong way. Hypotheses about whole cases ask for
//! these.
//!
//! A *block* is the keys that one rank holds. A rank of a ring sees its own block first, then that of the rank before
//! it, and so on. The *own position* of a row counts the rows of its sequence that its rank has, padding included. What a
//! program may take for a key are all rows of a sequence: padding is taken to hold 0, as where sequences are filled up.

use ndarray::{Array2, Array3, s};
use seamproof_oracle::exact::log_sum_exp;
use seamproof_oracle::sharding::RankLayout;
use seamproof_oracle::{Algorithm, Balance, ForwardResults, Inputs, Mask, Problem, Side};

use super::dealt::{Dealt, Place};
use super::pairs::{PAIRS_MAX, Pairs, widened};

/// A mistake of a program on several ranks.
pub(super) struct SightMistake {
    /// What the program did, in words.
    pub(super) words: &'static str,
    /// Whether a query sees a row of keys.
    sees: fn(&DealtPairs<'_>, usize, usize) -> bool,
    merge: Merge,
}

/// How the sums of blocks become a row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Merge {
    /// One softmax, as it should be.
    Softmax,
    /// The mean of the blocks' own results.
    Mean,
    /// The sum of the blocks' own results.
    Sum,
    /// A running maximum, at which earlier sums stay as they are.
    Unscaled,
}

/// Mistakes, simple ones first: of several that explain the same results the first is told.
pub(super) const SIGHT_MISTAKES: [SightMistake; 8] = [
    SightMistake {
        words: "rows of 0 that fill a sequence up were taken for keys",
        sees: |dealt, query, key| dealt.mask().visible(query, dealt.span(), dealt.span()).contains(&key),
        ..RIGHT
    },
    SightMistake { words: "results of blocks were averaged", merge: Merge::Mean, ..RIGHT },
    SightMistake { words: "results of blocks were added", merge: Merge::Sum, ..RIGHT },
    SightMistake {
        words: "sums of earlier blocks were not scaled when the row's largest logit grew",
        merge: Merge::Unscaled,
        ..RIGHT
    },
    SightMistake {
        words: "second chunks were taken to lie in the order of ranks, not in the opposite one",
        sees: |dealt, query, key| dealt.sees_in_ascending_chunks(query, key),
        ..RIGHT
    },
    SightMistake {
        words: "keys were taken in the order of ranks for keys in the order of positions",
        sees: |dealt, query, key| dealt.sees_in_order_of_ranks(query, key),
        ..RIGHT
    },
    SightMistake {
        words: "ranks took positions among their own rows for those of the sequence",
        sees: |dealt, query, key| dealt.sees_by_own_positions(query, key),
        ..RIGHT
    },
    SightMistake {
        words: "ranks took positions among their own rows for those of the sequence, and saw no key of a later rank",
        sees: |dealt, query, key| {
            dealt.queries[query].part.rank >= dealt.keys[key].part.rank
                && dealt.sees_by_own_positions(query, key)
        },
        ..RIGHT
    },
];

/// What a right program does.
const RIGHT: SightMistake =
    SightMistake { words: "", sees: |dealt, query, key| dealt.pairs.sees(query, key), merge: Merge::Softmax };

impl SightMistake {
    /// Whether the LSE that a program with this mistake returns is known.
    pub(super) fn has_lse(&self) -> bool {
        self.merge == Merge::Softmax
    }

    /// Whether a program on several ranks may make this mistake in a problem.
    fn is_possible(&self, problem: &Problem) -> bool {
        match self.merge {
            // Programs fill both sides up to the same length.
            Merge::Softmax => problem.sequences.iter().all(|s| s.q.span == s.kv.span),
            _ => problem.parallel.algorithm == Algorithm::Ring,
        }
    }
}

/// A case whose rows are dealt to ranks.
pub(super) struct DealtCase<'a> {
    problem: &'a Problem,
    sequences: Vec<DealtPairs<'a>>,
}

impl<'a> DealtCase<'a> {
    /// Returns a case dealt to ranks; `None` where nothing is asked of it.
    pub(super) fn new(
        problem: &'a Problem,
        inputs: &'a Inputs,
        layouts: &[RankLayout],
    ) -> Option<DealtCase<'a>> {
        let is_plain = layouts.len() == problem.parallel.size() && problem.sharing.is_empty();
        let is_single = problem.parallel.algorithm == Algorithm::Single;
        let pairs = problem
            .sequences
            .iter()
            .map(|s| s.q.len.saturating_mul(s.kv.span).saturating_mul(problem.heads.q));
        let is_small = pairs.fold(0, usize::saturating_add) <= PAIRS_MAX;
        if !is_plain || is_single || !is_small {
            return None;
        }
        let dealt = |(sequence, both)| DealtPairs::new(Pairs { problem, inputs, sequence, both }, layouts);
        let sequences = problem.sequences.iter().enumerate().map(dealt).collect::<Option<_>>()?;
        Some(DealtCase { problem, sequences })
    }

    /// Returns the forward's results with a mistake, where `right` are the right ones; `None` where no program makes
    /// it.
    pub(super) fn results(&self, mistake: &SightMistake, right: &ForwardResults) -> Option<ForwardResults> {
        if !mistake.is_possible(self.problem) {
            return None;
        }
        let mut results = right.clone();
        for dealt in &self.sequences {
            for query in 0..dealt.pairs.both.q.len {
                for head in 0..self.problem.heads.q {
                    let row = dealt.row(mistake, query, head);
                    dealt.put((query, head), row, (&mut results.out, &mut results.lse));
                }
            }
        }
        Some(results)
    }

    /// Whether the LSE of every row may be made of those of its blocks, in any wrong way: it is no less than the least of
    /// them, and above that of all of them together, `right`, by no more than the logarithm of the number of keys. So far it
    /// goes where sums of equal weights are not scaled.
    pub(super) fn may_be_merged(&self, lse: &Array2<f32>, right: &Array2<f64>) -> bool {
        self.sequences.iter().all(|dealt| {
            let queries = dealt.pairs.both.q.real_rows().enumerate();
            let mut rows = queries
                .flat_map(|(query, row)| (0..self.problem.heads.q).map(move |head| (query, row, head)));
            rows.all(|(query, row, head)| {
                let blocks = dealt.blocks(&RIGHT, query, head);
                let of_blocks = blocks.iter().map(|block| log_sum_exp(&block.logits, None));
                let (got, all) = (f64::from(lse[[head, row]]), right[[head, row]]);
                let least = of_blocks.fold(all, f64::min);
                let slack = LSE_SLACK * (1.0 + all.abs().max(least.abs()));
                let most = all + (dealt.keys.len().max(1) as f64).ln();
                got == all || (got >= least - slack && got <= most + slack)
            })
        })
    }
}

/// Share by which an LSE in f32 may be off that many steps make.
const LSE_SLACK: f64 = 1.0 / (1 << 16) as f64;

/// The pairs of a sequence, and the places of their rows.
struct DealtPairs<'a> {
    pairs: Pairs<'a>,
    ranks: usize,
    queries: Vec<Place>,
    keys: Vec<Place>,
}

impl<'a> DealtPairs<'a> {
    /// Returns pairs with their places; `None` where a row lies on no rank.
    fn new(pairs: Pairs<'a>, layouts: &[RankLayout]) -> Option<DealtPairs<'a>> {
        let [queries, keys] = [Side::Q, Side::Kv].map(|side| Dealt::new(layouts, &pairs, side).all());
        Some(DealtPairs { pairs, ranks: layouts.len(), queries: queries?, keys: keys? })
    }

    fn mask(&self) -> &Mask {
        &self.pairs.problem.mask
    }

    /// Returns the rows of the sequence, with padding: as many on one side as on the other.
    fn span(&self) -> usize {
        self.pairs.both.kv.span
    }

    fn sees_by_own_positions(&self, query: usize, key: usize) -> bool {
        let rows = self.span() / self.ranks;
        self.mask().visible(self.queries[query].own, rows, rows).contains(&self.keys[key].own)
    }

    fn sees_in_ascending_chunks(&self, query: usize, key: usize) -> bool {
        let (chunks, balance) = (2 * self.ranks, self.pairs.problem.parallel.balance);
        if balance != Balance::DualChunk || !self.span().is_multiple_of(chunks) {
            return self.pairs.sees(query, key);
        }
        let rows = self.span() / chunks;
        let at = |Place { part, own, .. }: Place| match own < rows {
            true => part.rank * rows + own,
            false => (self.ranks + part.rank - 1) * rows + own,
        };
        let [query, key] = [at(self.queries[query]), at(self.keys[key])];
        self.mask().visible(query, self.span(), self.span()).contains(&key)
    }

    fn sees_in_order_of_ranks(&self, query: usize, key: usize) -> bool {
        let Place { part, own, .. } = self.keys[key];
        let at = part.rank * (self.span() / self.ranks) + own;
        self.mask().visible(query, self.span(), self.span()).contains(&at)
    }

    /// Returns out and LSE of a query.
    fn row(&self, mistake: &SightMistake, query: usize, head: usize) -> (Vec<f64>, f64) {
        self.merged(mistake.merge, &self.blocks(mistake, query, head), head)
    }

    /// Returns the blocks of which a query sees a key, in the order in which its rank comes to them.
    fn blocks(&self, mistake: &SightMistake, query: usize, head: usize) -> Vec<Block> {
        let own = self.queries[query].part.rank;
        let mut blocks: Vec<Block> = (0..self.ranks).map(|_| Block::default()).collect();
        for (key, place) in self.keys.iter().enumerate() {
            if (mistake.sees)(self, query, key) {
                // The rank's own block is the first one.
                let block = &mut blocks[(own + self.ranks - place.part.rank) % self.ranks];
                let is_real = key < self.pairs.both.kv.len;
                block.push(if is_real { self.pairs.logit(query, head, key) } else { 0.0 }, key);
            }
        }
        blocks.retain(|block| !block.logits.is_empty());
        blocks
    }

    fn merged(&self, merge: Merge, blocks: &[Block], head: usize) -> (Vec<f64>, f64) {
        let problem = self.pairs.problem;
        let all: Vec<f64> = blocks.iter().flat_map(|block| block.logits.iter().copied()).collect();
        let lse = log_sum_exp(&all, problem.sink(head, &self.pairs.inputs.sink));
        let mut out = vec![0.0; problem.dims.v];
        let (mut largest, mut sum) = (f64::NEG_INFINITY, 0.0);
        for block in blocks {
            largest = block.logits.iter().copied().fold(largest, f64::max);
            let base = match merge {
                Merge::Softmax => lse,
                Merge::Mean | Merge::Sum => log_sum_exp(&block.logits, None),
                Merge::Unscaled => largest,
            };
            sum += block.logits.iter().map(|logit| libm::exp(logit - base)).sum::<f64>();
            let real = block.keys.iter().zip(&block.logits).filter(|(key, _)| **key < self.pairs.both.kv.len);
            for (key, logit) in real {
                let weight = libm::exp(logit - base);
                let value = self.pairs.of_key(&self.pairs.inputs.v, *key, head);
                out.iter_mut().zip(widened(&value)).for_each(|(out, v)| *out += weight * v);
            }
        }
        let divisor = match merge {
            Merge::Softmax | Merge::Sum => 1.0,
            Merge::Mean => blocks.len().max(1) as f64,
            Merge::Unscaled => sum.max(f64::MIN_POSITIVE),
        };
        out.iter_mut().for_each(|out| *out /= divisor);
        (out, lse)
    }

    fn put(
        &self,
        (query, head): (usize, usize),
        (out, lse): (Vec<f64>, f64),
        (outs, lses): (&mut Array3<f64>, &mut Array2<f64>),
    ) {
        let row = self.pairs.both.q.row(query);
        outs.slice_mut(s![row, head, ..]).iter_mut().zip(out).for_each(|(to, from)| *to = from);
        lses[[head, row]] = lse;
    }
}

/// The rows of keys of a rank that a query sees, and their logits.
#[derive(Default)]
struct Block {
    keys: Vec<usize>,
    logits: Vec<f64>,
}

impl Block {
    fn push(&mut self, logit: f64, key: usize) {
        self.keys.push(key);
        self.logits.push(logit);
    }
}
