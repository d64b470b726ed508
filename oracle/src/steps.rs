//! A problem as a sequence of calls on a growing cache of keys and values: a prefill, then steps that append tokens.
//!
//! Steps are no part of the mathematics. With a causal mask from the bottom-right corner a query sees no key that comes
//! later than it, so each row of the one call over everything is a row of the call that appends its token.

use serde::{Deserialize, Serialize};

use crate::{Alignment, Mask, Problem, ProblemFields, Run, Sequence, SingleForwardError, TensorRows};

/// Largest number of steps of a problem.
pub const STEPS_MAX: usize = 64;

/// The largest numbers of tokens that the calls append to each sequence, call by call.
///
/// A sequence with fewer tokens left appends these. A last call appends what is left after all steps, and where nothing
/// is left there is no such call. Keys that a sequence has beyond its queries are in the cache before the first call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Steps(pub Vec<usize>);

/// The reason why a problem cannot be made in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepsError {
    /// More steps than a problem may have.
    #[error("there are {count} of them; use at most {STEPS_MAX}")]
    Count {
        /// The number of steps.
        count: usize,
    },
    /// A step that appends nothing.
    #[error("steps[{index}] is 0; use at least 1")]
    Nothing {
        /// The index of the step.
        index: usize,
    },
    /// A mask under which a query may see a key that is not yet in the cache.
    #[error(
        "the mask is not causal from the bottom-right corner; use right 0, align bottom-right and no prefix"
    )]
    Mask,
    /// A problem that is not one forward call over everything. A backward would need all calls at once.
    #[error(transparent)]
    SingleForward(#[from] SingleForwardError),
    /// A sequence that would append more tokens than it has keys.
    #[error("sequences[{index}] has {queries} queries and {keys} keys; each query brings a key of its own")]
    Keys {
        /// The index of the sequence.
        index: usize,
        /// The number of queries.
        queries: usize,
        /// The number of keys.
        keys: usize,
    },
}

/// One call: the problem that the kernel is given, and what each of its sequences appends.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Queries of the appended tokens, which follow each other, and the cache where it lies. Cache rows that are not
    /// yet written are padding of their sequence. Where the cache is in pages, the sequences keep theirs.
    pub problem: Problem,
    /// What each sequence of that problem appends.
    pub appends: Vec<Append>,
}

/// What a call appends to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// The index of the sequence in the whole problem.
    pub sequence: usize,
    /// The position of the first appended token among the queries.
    pub first: usize,
    /// The number of keys in the cache before the call: the position of the first appended key.
    pub cached: usize,
    /// The number of appended tokens.
    pub tokens: usize,
}

impl Steps {
    /// Whether there are no steps: the problem is one call, without a cache.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that these fields can be made in steps. The fields' own steps are not read.
    pub fn check(&self, fields: &ProblemFields) -> Result<(), StepsError> {
        if self.is_empty() {
            return Ok(());
        }
        let count = self.0.len();
        if count > STEPS_MAX {
            return Err(StepsError::Count { count });
        }
        if let Some(index) = self.0.iter().position(|&tokens| tokens == 0) {
            return Err(StepsError::Nothing { index });
        }
        let Mask { right, align, prefix, .. } = fields.mask;
        if right != Some(0) || align != Alignment::BottomRight || prefix > 0 {
            return Err(StepsError::Mask);
        }
        fields.check_single_forward()?;
        let lengths = fields.sequences.iter().map(|sequence| (sequence.q.len, sequence.kv.len));
        match lengths.enumerate().find(|(_, (queries, keys))| queries > keys) {
            Some((index, (queries, keys))) => Err(StepsError::Keys { index, queries, keys }),
            None => Ok(()),
        }
    }
}

impl Problem {
    /// Returns the calls of a problem with steps, in order; none for a problem without.
    pub fn calls(&self) -> Vec<Call> {
        let longest = self.sequences.iter().map(|sequence| sequence.q.len).max().unwrap_or(0);
        let rest = (!self.steps.is_empty()).then_some(longest);
        let mut done = 0usize;
        let mut calls = Vec::new();
        for tokens in self.steps.0.iter().copied().chain(rest) {
            let end = done.max(longest.min(done.saturating_add(tokens)));
            if end > done {
                calls.push(self.call(done, end));
            }
            done = end;
        }
        calls
    }

    /// Returns the call that appends the tokens of these positions. Sequences without one take no part in it.
    fn call(&self, start: usize, end: usize) -> Call {
        let mut rows = 0;
        let (mut sequences, mut appends) = (Vec::new(), Vec::new());
        for (index, sequence) in self.sequences.iter().enumerate() {
            let tokens = sequence.q.len.min(end).saturating_sub(start);
            if tokens == 0 {
                continue;
            }
            let cached = sequence.kv.len - sequence.q.len + start;
            let (q, kv) = (Run::packed(rows, tokens, tokens), Run { len: cached + tokens, ..sequence.kv });
            sequences.push(Sequence { q, kv, ..*sequence });
            appends.push(Append { sequence: index, first: start, cached, tokens });
            rows += tokens;
        }
        let rows = TensorRows { q: rows, ..self.rows };
        let taking: Vec<usize> = appends.iter().map(|append| append.sequence).collect();
        let pages = self.pages.as_ref().map(|pages| pages.of(&taking));
        Call { problem: self.with_sequences(sequences, pages, rows), appends }
    }
}
