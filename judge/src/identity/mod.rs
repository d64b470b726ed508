//! Identities: relations between results of the subject alone, without the oracle and at any size.
//!
//! An identity asks the subject a second question whose answer follows from the first. The question is a *twin*,
//! another problem or other inputs ([`TABLE`]). An identity is *bitwise* where a right kernel that keeps the named
//! promises ([`Promises`]) makes the very same roundings in both runs, whatever its tiles; zeros of either sign are
//! the same. It is *bounded* where the roundings differ. The bound is then the sum of both runs' rounding terms,
//! evaluated with norms of the inputs (`bound`), and never a tolerance. The content of padding is a rung of its own
//! (poison), and every twin's padding is poisoned too.
//!
//! A twin that the subject's table refuses is fitted where the relation survives that: where only rows move. Otherwise
//! the identity is not asked, and counted ([`Margin::not_asked`]).
//!
//! Where sequences [share keys](seamproof_oracle::Sharing), only identities that keep all sequences are asked.
//!
//! The data seed of a case alone decides which identities it meets, so that a finding keeps its identity while the
//! geometry shrinks. Those without a second run are always asked. Scoring asks all identities, and so does a case
//! that is too large for the oracle.

mod arrange;
mod asked;
mod beside;
mod bound;
mod form;
mod gradients;
mod heads;
mod laws;
mod mask;
mod memory;
pub mod norms;
mod probe;
mod readers;
mod repeat;
mod scale;
mod sums;
mod twin;

use bound::Bounds;
use ndarray::Array2;
pub(crate) use repeat::rerun;

use crate::finding::{Check, Finding, Relation};
use crate::hash::mix;
use crate::ladder::evidence::{Depth, Evidence, Look};
use crate::subject::Promises;
use crate::verdict::Margin;

/// Number of identities with runs of their own that a case of a campaign meets. A second one would cost a fifth of
/// the cases.
const DRAWN: usize = 1;
/// Number of cases among which one is asked about memory, of a subject that promises something of it.
const MEMORY_ONE_IN: u64 = 8;
/// Constant that sets the draw of identities apart from other uses of the data seed.
const DRAW: u64 = 0x1de7_7177;

/// Returns for each query the most by which its D may lie from `Σ dout·out` of the out that the subject returned,
/// `[heads, rows]`.
pub(crate) fn deltas_apart(evidence: &Evidence<'_>) -> Array2<f64> {
    let Evidence { problem, inputs, first, .. } = *evidence;
    let bounds = Bounds::new(evidence, problem, inputs);
    let mut apart = Array2::zeros(problem.lse_shape());
    for (sequence, both) in problem.sequences.iter().enumerate() {
        for (position, row) in both.q.real_rows().enumerate() {
            for head in 0..problem.heads.q {
                apart[[head, row]] = bounds.delta_apart(sequence, position, head, &first.out);
            }
        }
    }
    apart
}

/// Returns for each query the largest magnitude of dS in its sequence and head, errors included, or more,
/// `[heads, rows]`.
pub(crate) fn largest_gradients(evidence: &Evidence<'_>) -> Array2<f64> {
    let Evidence { problem, inputs, .. } = *evidence;
    let bounds = Bounds::new(evidence, problem, inputs);
    let mut largest = Array2::zeros(problem.lse_shape());
    for (sequence, both) in problem.sequences.iter().enumerate() {
        for head in 0..problem.heads.q {
            let most = bounds.ds_most(sequence, head);
            both.q.real_rows().for_each(|row| largest[[head, row]] = most);
        }
    }
    largest
}

/// Distance that the two sides of an identity may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// Equal bits; zeros of either sign are the same.
    Bitwise,
    /// Difference within a derived bound.
    Bounded,
    /// Equal bits where the same roundings are made, and a difference within a derived bound elsewhere.
    Both,
}

/// An identity: its question, the exactness of its answer, and its purpose.
pub struct Identity {
    /// Relation that the identity asks for.
    pub relation: Relation,
    /// Exactness with which the two sides agree.
    pub exactness: Exactness,
    /// Description of the second run, whose results are compared with the case's own; empty where there is none.
    pub twin: &'static str,
    /// Classes of faults that the identity is meant to catch.
    pub sees: &'static [&'static str],
    /// Whether a subject's promises suffice for the identity to be asked.
    pub needs: fn(&Promises) -> bool,
    /// Number of further runs of the subject, at most.
    pub runs: u32,
    /// Function that asks the identity; `None` where it says nothing about the case.
    pub ask: fn(&Evidence<'_>) -> Option<Look>,
}

const fn free(_: &Promises) -> bool {
    true
}

macro_rules! identity {
    ($relation:ident $exactness:ident $runs:literal $needs:expr, $ask:path, $twin:literal;
        $($sees:literal),+) => {
        Identity {
            relation: Relation::$relation,
            exactness: Exactness::$exactness,
            twin: $twin,
            sees: &[$($sees),+],
            needs: $needs,
            runs: $runs,
            ask: $ask,
        }
    };
}

/// Every identity, in the order of [`Relation`].
pub static TABLE: [Identity; 31] = [
    identity!(PaddingAmount Bitwise 1 |p| p.sequences_alone, arrange::padding_amount,
        "the same sequences without their padding, or with three padding rows where they have none";
        "padding", "lengths taken for offsets", "tile edges"),
    identity!(Placement Bitwise 1 |p| p.sequences_alone, arrange::placement,
        "the same sequences in the opposite order in memory, behind a first offset, with gaps and slack";
        "base and slack", "offsets", "strides"),
    identity!(SequenceOrder Bitwise 1 |p| p.sequences_alone, arrange::order,
        "the same sequences in the opposite order";
        "metadata of the wrong sequence", "schedulers"),
    identity!(Alone Bitwise 1 |p| p.sequences_alone, arrange::alone,
        "the sequence by itself";
        "neighbours in a batch", "maxima over the batch", "cross-talk"),
    identity!(EmptySequence Bitwise 1 |p| p.sequences_alone, arrange::empty_sequence,
        "the same sequences with three more among them that hold no pair of query and key";
        "empty sequences", "metadata shifted by one"),
    identity!(ClosingOffsets Bitwise 1 |p| p.sequences_alone, arrange::closing_offsets,
        "the same sequences and two more at the end that have no rows";
        "repeated closing offsets", "batch size taken from offsets"),
    identity!(OneRank Bounded 1 free, sums::one_rank,
        "the same problem on one rank";
        "coverage over ranks", "merges", "chunk order", "lost partial gradients"),
    identity!(UnitValues Bounded 1 free, sums::unit_values,
        "the same with every value of v at 1";
        "normalisation", "merge weights", "lost partial results"),
    identity!(SumOfDv Bounded 0 free, sums::sum_of_dv,
        "";
        "lost or doubled query blocks", "lost partial gradients"),
    identity!(SumOfDk Bounded 0 free, sums::sum_of_dk,
        "";
        "missing rowsum of dout and out", "lse of another row"),
    identity!(LinearInV Bitwise 1 free, scale::linear_in_v,
        "the same with v times -2, or -1 where -2 might overflow";
        "state kept between calls", "saturation", "constants added to results"),
    identity!(LinearInDout Bitwise 1 |p| p.deterministic_backward, scale::linear_in_dout,
        "the same with dout times -2, or -1 where -2 might overflow";
        "gradients that do not start at zero", "saturation"),
    identity!(ScaleFolding Bitwise 1 free, scale::scale_folding,
        "the same with q times 4 and a quarter of the scale";
        "scale ignored, fixed or applied twice"),
    identity!(Negation Bitwise 1 free, scale::negation,
        "the same with q and k negated";
        "sign asymmetry", "constants added to logits"),
    identity!(RepeatedKvHeads Both 1 |p| p.heads_alone, heads::repeated_kv_heads,
        "the same with a copy of its KV head for every query head";
        "head to KV head mapping", "packing of grouped heads", "lost heads of a group"),
    identity!(HeadOrder Bitwise 1 |p| p.heads_alone, heads::head_order,
        "the same with the heads in the opposite order";
        "head indexing", "statistics or sinks of another head"),
    identity!(WideWindow Bitwise 1 |p| p.rows_alone, mask::wide_window,
        "the same with every absent window bound at more than the longest sequence";
        "window bounds", "paths for special masks"),
    identity!(MaskForm Bitwise 1 |p| p.rows_alone, mask::other_form,
        "the same sight in another form: from the other corner, or without a window bound or sink tokens that change nothing";
        "diagonal alignment", "paths for special masks"),
    identity!(NarrowerWindow Both 1 |p| p.rows_alone, mask::narrower_window,
        "the same with a window one key narrower";
        "window off by one", "ignored windows"),
    identity!(Prefix Bitwise 1 |p| p.rows_alone, mask::prefix,
        "the first queries of each sequence with the keys that they see, or the last queries where the diagonal ends there";
        "look-ahead", "skipped blocks", "lengths of the tail"),
    identity!(Influence Both 1 |p| p.rows_alone, probe::influence,
        "the forward with one key and its value negated";
        "any wrong pair of query and key"),
    identity!(Cotangent Both 1 free, probe::cotangent,
        "the same with dout at 0 but for one row of one head";
        "any wrong pair in the backward", "gradients of another row"),
    identity!(Rerun Bitwise 1 free, repeat::rerun,
        "the same once more";
        "races", "uninitialised memory"),
    identity!(History Bitwise 2 free, repeat::history,
        "the same after a run with q and v negated and one sequence fewer";
        "state kept between calls", "metadata of an earlier call"),
    identity!(Euler Bounded 0 free, laws::euler,
        "";
        "gradients of another sequence", "lost or doubled partial gradients", "scale missing from one gradient"),
    identity!(Mass Bounded 0 free, laws::mass,
        "";
        "lost or doubled partial gradients", "out and dv of different weights"),
    identity!(OtherForm Both 5 free, form::other_forms,
        "the same given in each other form: offsets, segment ids and positions, or lengths of a padded batch";
        "readers of segment ids", "lengths of a padded batch", "paths for another layout"),
    identity!(OneCall Both 1 free, form::one_call,
        "the same in one call, without a cache";
        "rows of a cache", "diagonal of a step", "paths for few queries"),
    identity!(Beside Both 1 free, beside::beside,
        "the same on the subject beside this one";
        "a new path that differs from the older one"),
    identity!(Memory Bounded 3 |p| p.linear_memory, memory::memory,
        "one sequence of 64, 128 and 256 tokens";
        "a mask of queries by keys", "buffers for every pair of rows"),
    identity!(OutOfPages Both 1 free, form::out_of_pages,
        "the same with keys and values that lie together, and not in pages";
        "tables of pages", "borders of pages", "rows of a pool that hold no key"),
];

/// Returns the identity of a relation.
pub fn identity(relation: Relation) -> &'static Identity {
    &TABLE[relation as usize]
}

/// Asks the identities of a case. The first broken one is the finding.
pub(crate) fn look(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    let promises = evidence.backend.promises(evidence.problem);
    let all = evidence.depth == Depth::All || !evidence.has_oracle();
    let mut asked = if all { TABLE.iter().collect() } else { drawn(evidence.problem.data_seed) };
    if !all {
        // Whoever names another subject asks for it in every case.
        asked.extend(evidence.backend.beside().map(|_| identity(Relation::Beside)));
        let weighed = mix(evidence.problem.data_seed ^ DRAW).is_multiple_of(MEMORY_ONE_IN);
        asked.extend(weighed.then(|| identity(Relation::Memory)));
    }
    let known = &evidence.judge.identities;
    let shares = !evidence.problem.sharing.is_empty();
    let asked = asked.into_iter().filter(|identity| known.contains(&identity.relation));
    let asked = asked.filter(|identity| !shares || identity.holds_of_shared_keys());
    for identity in asked.filter(|identity| (identity.needs)(&promises)) {
        evidence.told.outside.set(false);
        match identity.answer(evidence) {
            None if evidence.told.outside.get() => margin.not_asked.insert(identity.relation),
            None | Some(Look::Held) => {}
            Some(broken_or_failed) => return broken_or_failed,
        }
    }
    Look::Held
}

impl Identity {
    /// Whether the relation holds where sequences share keys. Their dk and dv depend on other sequences, so it must
    /// keep all sequences, and sum no gradients of one.
    fn holds_of_shared_keys(&self) -> bool {
        use Relation::{
            Beside, HeadOrder, LinearInDout, LinearInV, MaskForm, Negation, Rerun, ScaleFolding, UnitValues,
            WideWindow,
        };
        matches!(
            self.relation,
            Beside
                | HeadOrder
                | LinearInDout
                | LinearInV
                | MaskForm
                | Negation
                | Rerun
                | ScaleFolding
                | UnitValues
                | WideWindow
        )
    }

    /// Whether few subjects can be asked, which would leave the draws of all others empty.
    pub fn stands_apart(&self) -> bool {
        matches!(self.relation, Relation::Beside | Relation::Memory)
    }

    /// Asks the identity; `None` where it says nothing about the case.
    pub fn answer(&self, evidence: &Evidence<'_>) -> Option<Look> {
        match (self.ask)(evidence) {
            Some(Look::Broken(finding)) => Some(Look::Broken(Box::new(self.told(*finding)))),
            answer => answer,
        }
    }

    /// Returns a finding that says which runs disagree. The ending of a process already says so itself.
    fn told(&self, finding: Finding) -> Finding {
        if self.twin.is_empty() || finding.check != Check::Identity {
            return finding;
        }
        let what = format!("{} (the second run: {}; a replay makes both)", finding.what, self.twin);
        Finding { what, ..finding }
    }
}

/// Returns the identities of a data seed: those without runs, then [`DRAWN`] others, with expensive ones drawn less
/// often. Those that few subjects can be asked are not drawn.
pub fn drawn(data_seed: u64) -> Vec<&'static Identity> {
    let drawn = TABLE.iter().filter(|identity| !identity.stands_apart());
    let (mut free, mut dear): (Vec<_>, Vec<_>) = drawn.partition(|identity| identity.runs == 0);
    dear.sort_by_cached_key(|identity| {
        // The smallest scaled draw wins, so twice the runs make an identity about half as likely.
        mix(mix(data_seed ^ DRAW).wrapping_add(identity.relation as u64)) / 2
            * u64::from(identity.runs.min(2))
    });
    free.extend(dear.into_iter().take(DRAWN));
    free
}
