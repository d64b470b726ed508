//! What a subject of known roundings rounds.

use serde::{Deserialize, Serialize};

/// What a subject rounds, and in which order it takes the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericProfile {
    /// Whether weights are rounded to the format of P before the product with the values.
    pub rounds_weights: bool,
    /// Whether logit gradients are multiplied by the scale before they are rounded.
    pub scales_logit_gradients: bool,
    /// Whether queries are multiplied by the scale and rounded to their format before the product with the keys.
    pub scales_queries: bool,
    /// Keys of a tile.
    pub kv_tile: usize,
    /// In which order a launch takes its tiles.
    pub kv_order: KeyOrder,
}

/// The order of a launch's tiles of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyOrder {
    /// From the first key to the last.
    Ascending,
    /// From the last tile to the first, as FlashAttention-3 does.
    Descending,
}
