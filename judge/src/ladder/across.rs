//! Sequences that were not kept apart: what queries of a pack make of keys of other sequences. Hypotheses about whole
//! cases ask for these.
//!
//! Nothing in a pack's rows says where a sequence ends. An attention that takes them for one sequence, or that compares
//! positions and no sequences, sees keys of others.

use seamproof_oracle::sharding::run_of;
use seamproof_oracle::{ForwardResults, Inputs, Problem, Run, Side};

use super::pairs::{PAIRS_MAX, logit, weighed};

/// A row: the index of its sequence, and its position there.
type Row = (usize, usize);

/// A mistake about which sequence a key is of.
pub(super) struct AcrossMistake {
    /// What the subject did, in words.
    pub(super) words: &'static str,
    sees: fn(&Pack<'_>, Row, Row) -> bool,
}

const POSITIONS_ALONE: &str =
    "sequences were not kept apart: queries saw keys of others at the positions that the mask shows";

/// Mistakes, of which the first that explains the results is told.
pub(super) const ACROSS_MISTAKES: [AcrossMistake; 3] = [
    AcrossMistake {
        words: "sequences were not kept apart, and the rows of all were taken for those of one",
        sees: |pack, query, key| {
            let [queries, keys] = &pack.sides;
            pack.problem
                .mask
                .visible(queries.place(query), queries.total, keys.total)
                .contains(&keys.place(key))
        },
    },
    // The mask's corner is that of the query's own sequence, as where positions of both sides are compared, or that of
    // each pair of sequences.
    AcrossMistake {
        words: POSITIONS_ALONE,
        sees: |pack, query, key| {
            let own = &pack.problem.sequences[query.0];
            pack.problem.mask.visible(query.1, own.q.len, own.kv.len).contains(&key.1)
        },
    },
    AcrossMistake {
        words: POSITIONS_ALONE,
        sees: |pack, query, key| {
            let [of_query, of_key] = [query.0, key.0].map(|index| &pack.problem.sequences[index]);
            pack.problem.mask.visible(query.1, of_query.q.len, of_key.kv.len).contains(&key.1)
        },
    },
];

/// The real rows of one side of all sequences, in the order in which they lie.
struct Rows {
    /// Number of rows before those of each sequence.
    before: Vec<usize>,
    total: usize,
}

impl Rows {
    fn new(problem: &Problem, side: Side) -> Rows {
        let runs: Vec<Run> = problem.sequences.iter().map(|sequence| run_of(sequence, side)).collect();
        let len = |before: usize| runs.iter().filter(|run| run.offset < before).map(|run| run.len).sum();
        let before = runs.iter().map(|run| len(run.offset)).collect();
        Rows { before, total: len(usize::MAX) }
    }

    /// Returns the place of a row among all.
    fn place(&self, (sequence, position): Row) -> usize {
        self.before[sequence] + position
    }
}

/// A case of several sequences.
pub(super) struct Pack<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs,
    /// Of q, and of k and v.
    sides: [Rows; 2],
    keys: Vec<Row>,
}

impl<'a> Pack<'a> {
    /// Returns a case as a pack; `None` where no sequence could be taken for another, or where it is too large.
    pub(super) fn new(problem: &'a Problem, inputs: &'a Inputs) -> Option<Pack<'a>> {
        let keys: Vec<Row> = { problem.sequences.iter().enumerate() }
            .flat_map(|(index, sequence)| (0..sequence.kv.len).map(move |key| (index, key)))
            .collect();
        let sides = [Side::Q, Side::Kv].map(|side| Rows::new(problem, side));
        let pairs = sides[0].total.saturating_mul(sides[1].total).saturating_mul(problem.heads.q);
        let is_plain = problem.sharing.is_empty() && problem.steps.is_empty() && problem.pages.is_none();
        let is_asked = is_plain && problem.sequences.len() > 1 && pairs <= PAIRS_MAX;
        is_asked.then_some(Pack { problem, inputs, sides, keys })
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
        let kv_head = head / problem.group();
        let of_key = |&(sequence, key): &Row| (problem.sequences[sequence].kv.row(key), kv_head);
        let logits: Vec<f64> =
            seen.iter().map(|key| logit(problem, inputs, (row, head), of_key(key))).collect();
        let (lse, _, out) = weighed((problem, inputs), head, &logits, seen.iter().map(of_key));
        (out, lse)
    }
}
