//! The judge's table of context-parallel algorithms: what each needs of a problem, stated without the builders that are
//! held against it, and how often it is drawn.

use seamproof_oracle::sharding::span_multiple;
use seamproof_oracle::{Algorithm, Balance, Heads, Problem, Run, Sequence};
use serde::{Deserialize, Serialize};

/// What a context-parallel algorithm needs of a problem; a problem without it is refused because it is impossible.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error, Serialize, Deserialize,
)]
pub enum ParallelRule {
    /// Every span is a multiple of what the balance cuts it into.
    #[error("a sequence's span is not a multiple of what the sharding cuts it into")]
    SpanMultiple,
    /// Only consecutive rows are cut.
    #[error("rows with a step are not cut over ranks")]
    ConsecutiveRows,
    /// Query heads are dealt evenly.
    #[error("the query heads are not a multiple of the all-to-all's ranks")]
    QueryHeads,
    /// KV heads are dealt evenly, or replicated evenly.
    #[error("the kv heads are neither a multiple nor a divisor of the all-to-all's ranks")]
    KvHeads,
    /// A ring's step must be a band.
    #[error("a ring does not take stripes of more than one row")]
    RingStripe,
    /// Super-chunks exist for these cuts only.
    #[error("the hierarchical algorithm takes contiguous and dual-chunk balance only")]
    HierarchicalBalance,
}

impl ParallelRule {
    /// The name that refusals are counted by.
    pub(super) fn name(self) -> &'static str {
        match self {
            ParallelRule::SpanMultiple => "span multiple",
            ParallelRule::ConsecutiveRows => "consecutive rows",
            ParallelRule::QueryHeads => "query heads",
            ParallelRule::KvHeads => "kv heads",
            ParallelRule::RingStripe => "ring stripe",
            ParallelRule::HierarchicalBalance => "hierarchical balance",
        }
    }
}

/// A row of the table, for a group of some size.
pub(crate) struct Needs {
    /// Ranks that heads are dealt to: query heads evenly, KV heads evenly or replicated evenly.
    pub(crate) dealt_to: usize,
    /// Rows of the longest stripe, and the rule that a longer one breaks; none where any is taken.
    pub(crate) stripe: Option<(usize, ParallelRule)>,
    /// Share of all cases in each profile, as a [class](crate::census::Class) of the census has it.
    pub(crate) rates: [u16; 3],
}

impl Needs {
    /// What an algorithm needs on a group of `size` ranks.
    pub(crate) fn of(algorithm: Algorithm, size: usize) -> Needs {
        let needs = |rates| Needs { dealt_to: 1, stripe: None, rates };
        match algorithm {
            Algorithm::Single => needs([480, 480, 480]),
            Algorithm::Ring => {
                Needs { stripe: Some((1, ParallelRule::RingStripe)), ..needs([117, 117, 118]) }
            }
            Algorithm::AllGather => needs([120, 119, 117]),
            Algorithm::AllToAll => Needs { dealt_to: size, ..needs([117, 118, 120]) },
            Algorithm::Hierarchical { all_to_all } => Needs {
                dealt_to: all_to_all,
                stripe: Some((0, ParallelRule::HierarchicalBalance)),
                ..needs([118, 118, 117])
            },
        }
    }

    /// The rule that a balance breaks.
    pub(crate) fn broken_by_balance(&self, balance: Balance) -> Option<ParallelRule> {
        let (longest, rule) = self.stripe?;
        matches!(balance, Balance::Striped { stripe } if stripe > longest).then_some(rule)
    }

    /// The rule that numbers of heads break.
    pub(crate) fn broken_by_heads(&self, heads: Heads) -> Option<ParallelRule> {
        let ranks = self.dealt_to;
        if !heads.q.is_multiple_of(ranks) {
            return Some(ParallelRule::QueryHeads);
        }
        let dealt = heads.kv.is_multiple_of(ranks) || ranks.is_multiple_of(heads.kv);
        (!dealt).then_some(ParallelRule::KvHeads)
    }
}

/// The first rule of a problem's algorithm that the problem breaks: the mathematics of the algorithms, the same for every
/// subject.
pub fn broken_rule(problem: &Problem) -> Option<ParallelRule> {
    let (algorithm, balance, size) =
        (problem.parallel.algorithm, problem.parallel.balance, problem.parallel.size());
    if algorithm == Algorithm::Single {
        return None;
    }
    let needs = Needs::of(algorithm, size);
    let of_group = needs.broken_by_balance(balance).or_else(|| needs.broken_by_heads(problem.heads));
    of_group.or_else(|| broken_by_rows(problem, span_multiple(balance, size)))
}

/// The rule that a sequence's rows break whose spans must be multiples of `unit`.
fn broken_by_rows(problem: &Problem, unit: usize) -> Option<ParallelRule> {
    let side = |side: fn(&Sequence) -> Run| problem.sequences.iter().map(side);
    side(|sequence| sequence.q).chain(side(|sequence| sequence.kv)).find_map(|run| match run.step {
        1 => (!run.span.is_multiple_of(unit)).then_some(ParallelRule::SpanMultiple),
        _ => Some(ParallelRule::ConsecutiveRows),
    })
}
