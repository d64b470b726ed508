//! The judge's table of context-parallel algorithms: what each needs of a problem, and how often it is drawn. The
//! needs are stated without the schedule builders, because these are tested against them.

use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Algorithm, Heads, Problem, Run, Sequence};

/// Requirement of a context-parallel algorithm, or of a sequence-parallel region. Every subject refuses a problem that
/// breaks it, because the algorithm cannot run it or does not support it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelRule {
    /// Every span must be a multiple of the number of pieces that the balance makes of it.
    #[error("a sequence's span is not a multiple of what the sharding cuts it into")]
    SpanMultiple,
    /// Only rows that follow each other are cut, or those that lie side by side (SBHD): with one step for all sequences
    /// of a side, which begin within it.
    #[error("rows with a step are dealt where all sequences of a side have it and begin within it (SBHD)")]
    ConsecutiveRows,
    /// Query heads must be dealt evenly.
    #[error("the query heads are not a multiple of the ranks of the all-to-all or of the region")]
    QueryHeads,
    /// KV heads must be dealt or replicated evenly.
    #[error(
        "the kv heads are neither a multiple nor a divisor of the ranks of the all-to-all or of the region"
    )]
    KvHeads,
}

impl ParallelRule {
    /// Every rule.
    pub(super) const ALL: [ParallelRule; 4] = [
        ParallelRule::SpanMultiple,
        ParallelRule::ConsecutiveRows,
        ParallelRule::QueryHeads,
        ParallelRule::KvHeads,
    ];

    /// Returns the name that refusals are counted by.
    pub(super) fn name(self) -> &'static str {
        match self {
            ParallelRule::SpanMultiple => "span multiple",
            ParallelRule::ConsecutiveRows => "consecutive rows",
            ParallelRule::QueryHeads => "query heads",
            ParallelRule::KvHeads => "kv heads",
        }
    }
}

/// A row of the table, for a group of a given size.
pub(crate) struct Needs {
    /// Number of ranks that heads are dealt to: query heads evenly, KV heads evenly or replicated evenly.
    pub(crate) dealt_to: usize,
    /// Share of all cases in each profile, as measured for the [census](crate::census::Class).
    pub(crate) rates: [u16; 3],
}

impl Needs {
    /// Returns the row of an algorithm for a group of `size` ranks.
    pub(crate) fn of(algorithm: Algorithm, size: usize) -> Needs {
        let needs = |rates| Needs { dealt_to: 1, rates };
        match algorithm {
            Algorithm::Single => needs([528, 530, 528]),
            Algorithm::Ring => needs([104, 103, 107]),
            Algorithm::AllGather => needs([108, 107, 105]),
            Algorithm::AllToAll => Needs { dealt_to: size, ..needs([105, 106, 107]) },
            Algorithm::Hierarchical { all_to_all } => {
                Needs { dealt_to: all_to_all, ..needs([107, 106, 105]) }
            }
        }
    }

    /// Returns the rule that numbers of heads break, if any.
    pub(crate) fn broken_by_heads(&self, heads: Heads) -> Option<ParallelRule> {
        broken_by_dealing(heads, self.dealt_to)
    }
}

/// Returns the rule that heads break which cannot be dealt to so many ranks, if any.
fn broken_by_dealing(heads: Heads, ranks: usize) -> Option<ParallelRule> {
    match heads.dealt(ranks) {
        Some(_) => None,
        None if heads.q.is_multiple_of(ranks) => Some(ParallelRule::KvHeads),
        None => Some(ParallelRule::QueryHeads),
    }
}

/// Returns a requirement of the problem's algorithm, or of its region, that the problem breaks, if any. It is the same
/// for every subject. It does not use the schedule builders, because they are tested against it.
pub fn broken_rule(problem: &Problem) -> Option<ParallelRule> {
    let (algorithm, balance, size) =
        (problem.parallel.algorithm, problem.parallel.balance, problem.parallel.size());
    let Some(heads) = problem.heads.dealt(problem.parallel.region) else {
        return broken_by_dealing(problem.heads, problem.parallel.region);
    };
    if algorithm == Algorithm::Single {
        return None;
    }
    let needs = Needs::of(algorithm, size);
    needs.broken_by_heads(heads).or_else(|| broken_by_rows(problem, span_multiple(balance, size)))
}

/// Returns the rule that the rows of a sequence break, if any. Spans must be multiples of `unit`.
fn broken_by_rows(problem: &Problem, unit: usize) -> Option<ParallelRule> {
    let side = |side: fn(&Sequence) -> Run, rows| {
        let runs: Vec<Run> = problem.sequences.iter().map(side).collect();
        let owning: Vec<Run> = runs.into_iter().filter(|run| run.span > 0).collect();
        let beside = are_side_by_side(&owning, rows);
        owning.into_iter().find_map(|run| match beside || run.step == 1 {
            true => (!run.span.is_multiple_of(unit)).then_some(ParallelRule::SpanMultiple),
            false => Some(ParallelRule::ConsecutiveRows),
        })
    };
    side(|sequence| sequence.q, problem.rows.q).or_else(|| side(|sequence| sequence.kv, problem.rows.kv))
}

/// Whether rows of one position lie side by side, in a tensor of at least as many rows as there are from one position
/// to the next.
fn are_side_by_side(runs: &[Run], rows: usize) -> bool {
    let first = runs.iter().map(|run| run.offset).min().unwrap_or(0);
    let mut steps = runs.iter().map(|run| run.step);
    let step = steps.next().unwrap_or(1);
    step <= rows && steps.all(|other| other == step) && runs.iter().all(|run| run.offset < first + step)
}
