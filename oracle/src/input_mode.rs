//! The kinds of input values.

use serde::{Deserialize, Serialize};

/// How input values are drawn. Values are made outside this crate; the mode is part of the problem because the
/// judge's sharper tiers depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InputMode {
    /// Exact: all logits are 0, values are small integers. The LSE counts the keys that a query sees.
    UniformCount,
    /// Exact: all logits are 0, values are differences of a table, so that a row's sum names both ends of its interval.
    Endpoints,
    /// Exact: each query puts its whole weight on one visible key.
    Routing,
    /// Exact, backward too: each query puts its weight on a pair of neighbouring keys, at the edge of what it sees.
    Pairs,
    /// Exact: the weights of a row are powers of two.
    Staircase,
    /// Small integers: every product and most sums are exact.
    Integers,
    /// Near-normal values whose logits have a standard deviation of 0.5: every key matters.
    Flat,
    /// Near-normal values whose logits have a standard deviation of 3: a few keys dominate.
    Peaked,
    /// Logits of some tens to hundreds: saturated rows, underflowing weights.
    Large,
    /// Magnitudes spread over many binades.
    HeavyTailed,
    /// All keys of a sequence equal, so that every logit of a row is the same.
    Equal,
    /// Values and output gradients near the format's smallest normal number.
    Tiny,
}

impl InputMode {
    /// Every mode, the simplest first: those in which the right answer is known bit for bit.
    pub const ALL: [InputMode; 12] = [
        InputMode::UniformCount,
        InputMode::Endpoints,
        InputMode::Routing,
        InputMode::Pairs,
        InputMode::Staircase,
        InputMode::Integers,
        InputMode::Flat,
        InputMode::Peaked,
        InputMode::Large,
        InputMode::HeavyTailed,
        InputMode::Equal,
        InputMode::Tiny,
    ];

    /// The modes in which the right answer is known bit for bit where their preconditions hold, the simplest first.
    pub const EXACT: [InputMode; 5] = [
        InputMode::UniformCount,
        InputMode::Endpoints,
        InputMode::Routing,
        InputMode::Pairs,
        InputMode::Staircase,
    ];

    /// Whether this is one of [`InputMode::EXACT`].
    pub fn is_exact(self) -> bool {
        InputMode::EXACT.contains(&self)
    }
}
