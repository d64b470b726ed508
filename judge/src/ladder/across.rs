//! Sequences that were not kept apart: what queries of a pack make of keys of other sequences. Hypotheses about whole
//! cases ask for these.
//!
//! Nothing in a pack's rows says where a sequence ends. An attention that takes them for one sequence, or that compares
//! positions and no sequences, sees keys of others.

use seamproof_oracle::exact::log_sum_exp;
use seamproof_oracle::{ForwardResults, Inputs, Problem, Sequence, Side};

use super::compare::lanes;
use super::pairs::{dot, widened};

/// Largest number of pairs of real rows, times query heads, of a case in which these mistakes are asked for.
const PAIRS_MAX: usize = 1 << 18;

/// A row: the index of its sequence, and its position there.
type Row = (usize, usize);

/// A mistake about which sequence a key is of.
pub(super) struct AcrossMistake {
    /// What the subject did, in words.
    pub(super) words: &'static str,
    sees: fn(&Pack<'_>, Row, Row) -> bool,
}

/// Mistakes, of which the first that explains the results is told.
pub(super) const ACROSS_MISTAKES: [AcrossMistake; 2] = [
    AcrossMistake {
        words: "sequences were not kept apart, and the rows of all were taken for those of one",
        sees: |pack, query, key| {
            let [of_query, of_key] = [pack.place(Side::Q, query), pack.place(Side::Kv, key)];
            pack.problem.mask.visible(of_query, pack.total(Side::Q), pack.total(Side::Kv)).contains(&of_key)
        },
    },
    AcrossMistake {
        words: "sequences were not kept apart: queries saw keys of others at the positions that the mask shows",
        sees: |pack, query, key| {
            let [of_query, of_key] = [query.0, key.0].map(|index| &pack.problem.sequences[index]);
            pack.problem.mask.visible(query.1, of_query.q.len, of_key.kv.len).contains(&key.1)
        },
    },
];

/// A case of several sequences.
pub(super) struct Pack<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    /// Number of real rows before those of each sequence, in the order of rows: of q, and of k and v.
    before: [Vec<usize>; 2],
    keys: Vec<Row>,
}

/// Returns the offset of a sequence's rows on a side, and the number of the real ones.
fn rows(sequence: &Sequence, side: Side) -> (usize, usize) {
    let run = if side == Side::Q { &sequence.q } else { &sequence.kv };
    (run.offset, run.len)
}

/// Returns how many real rows of a side lie before those of each sequence.
fn before(problem: &Problem, side: Side) -> Vec<usize> {
    let all: Vec<(usize, usize)> = problem.sequences.iter().map(|sequence| rows(sequence, side)).collect();
    let before =
        |(at, _): &(usize, usize)| all.iter().filter(|(other, _)| other < at).map(|(_, len)| len).sum();
    all.iter().map(before).collect()
}

impl<'a> Pack<'a> {
    /// Returns a case as a pack; `None` where no sequence could be taken for another, or where it is too large.
    pub(super) fn new(problem: &'a Problem, inputs: &'a Inputs) -> Option<Pack<'a>> {
        let keys: Vec<Row> = { problem.sequences.iter().enumerate() }
            .flat_map(|(index, sequence)| (0..sequence.kv.len).map(move |key| (index, key)))
            .collect();
        let queries: usize = problem.sequences.iter().map(|sequence| sequence.q.len).sum();
        let pairs = queries.saturating_mul(keys.len()).saturating_mul(problem.heads.q);
        let is_plain = problem.sharing.is_empty() && problem.steps.is_empty() && problem.pages.is_none();
        let before = [Side::Q, Side::Kv].map(|side| before(problem, side));
        let is_asked = is_plain && problem.sequences.len() > 1 && pairs <= PAIRS_MAX;
        is_asked.then_some(Pack { problem, inputs, before, keys })
    }

    /// Returns the place of a row among the real ones of all sequences.
    fn place(&self, side: Side, (sequence, position): Row) -> usize {
        self.before[usize::from(side == Side::Kv)][sequence] + position
    }

    /// Returns the number of real rows of a side.
    fn total(&self, side: Side) -> usize {
        self.problem.sequences.iter().map(|sequence| rows(sequence, side).1).sum()
    }

    /// Returns the forward's results with a mistake, where `right` are the right ones.
    pub(super) fn results(&self, mistake: &AcrossMistake, right: &ForwardResults) -> ForwardResults {
        let mut results = right.clone();
        for (index, sequence) in self.problem.sequences.iter().enumerate() {
            for query in 0..sequence.q.len {
                let seen: Vec<Row> = self
                    .keys
                    .iter()
                    .copied()
                    .filter(|key| (mistake.sees)(self, (index, query), *key))
                    .collect();
                for head in 0..self.problem.heads.q {
                    let row = sequence.q.row(query);
                    let (out, lse) = self.attended(row, head, &seen);
                    results.lse[[head, row]] = lse;
                    for (lane, value) in out.into_iter().enumerate() {
                        results.out[[row, head, lane]] = value;
                    }
                }
            }
        }
        results
    }

    /// Returns out and LSE of a row of q with these keys.
    fn attended(&self, row: usize, head: usize, seen: &[Row]) -> (Vec<f64>, f64) {
        let Pack { problem, inputs, .. } = self;
        let of_key = |(sequence, key): Row| problem.sequences[sequence].kv.row(key);
        let q = lanes(&inputs.q, row, head);
        let logit = |key: &Row| {
            let k = lanes(&inputs.k, of_key(*key), head / problem.group());
            problem.softmax.cap(f64::from(problem.softmax.scale) * dot(&q, &k))
        };
        let logits: Vec<f64> = seen.iter().map(logit).collect();
        let lse = log_sum_exp(&logits, problem.sink(head, &inputs.sink));
        let mut out = vec![0.0; problem.dims.v];
        for (key, logit) in seen.iter().zip(logits) {
            let weight = libm::exp(logit - lse);
            let value = lanes(&inputs.v, of_key(*key), head / problem.group());
            out.iter_mut().zip(widened(&value)).for_each(|(out, v)| *out += weight * v);
        }
        (out, lse)
    }
}
