//! A numeric profile: the roundings of a subject, and the order in which it takes the keys.

use serde::{Deserialize, Serialize};

use super::arithmetic::{Delta, DsWeights, GroupSums, WeightRounding};

/// The roundings of a subject, and the order in which it takes the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericProfile {
    /// Whether weights are rounded to the format of P before the product with the values.
    pub rounds_weights: bool,
    /// Whether logit gradients are multiplied by the scale before they are rounded.
    pub scales_logit_gradients: bool,
    /// Whether queries are multiplied by the scale and rounded to their format before the product with the keys.
    pub scales_queries: bool,
    /// Whether weights are rounded before or after they are divided by their sum. An unknown order cannot be replayed,
    /// and counts as that of FlashAttention.
    pub weights: WeightRounding,
    /// The source of D.
    pub delta: Delta,
    /// The format of dk and dv of one query head.
    pub group_sums: GroupSums,
    /// The weights that dS is made of.
    pub ds_weights: DsWeights,
    /// The number of keys of a tile.
    pub kv_tile: usize,
    /// The order in which a launch takes its tiles.
    pub kv_order: KeyOrder,
}

/// The order of a launch's tiles of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyOrder {
    /// Tiles from the first to the last.
    Ascending,
    /// Tiles from the last to the first, as in FlashAttention-3.
    Descending,
}
