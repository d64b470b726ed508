//! The kinds of input values.

use serde::{Deserialize, Serialize};

/// The way in which input values are drawn. Values are made outside this crate. The mode is part of the problem because
/// the judge's sharper tiers depend on the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InputMode {
    /// An exact mode: all logits are 0, and values are small integers. The LSE counts the keys that a query sees.
    UniformCount,
    /// An exact mode: all logits are 0, and values are differences of a table. A row's sum names both ends of its
    /// interval.
    Endpoints,
    /// An exact mode: each query puts its whole weight on one visible key.
    Routing,
    /// An exact mode, in the backward too: each query puts its weight on a pair of neighbouring keys, at the edge of
    /// its visible keys.
    Pairs,
    /// An exact mode: the weights of a row are powers of two.
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
    /// Equal keys in each sequence: every logit of a row is the same.
    Equal,
    /// Values and output gradients near the format's smallest normal number.
    Tiny,
    /// All logits of a row are deep below 0, or as far above it: from 90 to 200,000, often beyond 1,000 or 50,000,
    /// which kernels take for minus infinity.
    Sunk,
    /// The first key of each sequence has from 2⁹ to 2¹⁵ times the weight of any other, and its value is 0: the small
    /// weights of the others make all of out. Other values have one sign.
    Shadowed,
    /// The largest logit of a row grows once, late, by two to almost four binades of a weight. Values have one sign.
    Rising,
    /// One lane of the keys has a large mean, which moves all logits of a row alike, and values have one too.
    Offset,
    /// Some tensors of a sequence hold zeros alone, and the others are those of `Flat`.
    Zeros,
    /// Values that divide to the midpoints of neighbouring numbers of a format of 8 bits, and to its largest number.
    Midpoints,
}

impl InputMode {
    /// Every mode, the simplest first. The exact modes lead.
    pub const ALL: [InputMode; 18] = [
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
        InputMode::Sunk,
        InputMode::Shadowed,
        InputMode::Rising,
        InputMode::Offset,
        InputMode::Zeros,
        InputMode::Midpoints,
    ];

    /// The exact modes, the simplest first. The right answer is known bit for bit where a mode's preconditions hold.
    pub const EXACT: [InputMode; 5] = [
        InputMode::UniformCount,
        InputMode::Endpoints,
        InputMode::Routing,
        InputMode::Pairs,
        InputMode::Staircase,
    ];

    /// Whether the mode is one of [`InputMode::EXACT`].
    pub fn is_exact(self) -> bool {
        InputMode::EXACT.contains(&self)
    }
}
