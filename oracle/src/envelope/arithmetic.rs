//! Arithmetic: what a right subject may do differently, as it declares it. Each choice has its own term in the bounds.

use serde::{Deserialize, Serialize};

use super::accumulation::Accumulation;

/// The choices of a subject's arithmetic, as declared. The default is unknown in everything, which is the weakest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Arithmetic {
    /// The way of all sums.
    pub accumulation: Accumulation,
    /// The forward's order of rounding P and dividing by the row's sum.
    pub weights: WeightRounding,
    /// The source of D.
    pub delta: Delta,
    /// The format of dk and dv of one query head, before they are summed over the group.
    pub group_sums: GroupSums,
    /// The accuracy of the soft cap's `tanh`.
    pub soft_cap: SoftCap,
    /// The weights that the backward multiplies `dP − D` with.
    pub ds_weights: DsWeights,
    /// The power of two with which weights are multiplied before they are rounded, as exponent. An FP8 format has few
    /// numbers below 1; FlashAttention-3 multiplies by 2⁸.
    #[serde(skip_serializing_if = "is_default")]
    pub weight_exponent: u8,
    /// The factor of dS before it is rounded to FP8.
    #[serde(skip_serializing_if = "is_default")]
    pub ds_scale: DsScale,
    /// The place of the softmax's scale beside the rounding of dS.
    #[serde(skip_serializing_if = "is_default")]
    pub ds_fold: DsFold,
}

fn is_default<T: Default + PartialEq>(choice: &T) -> bool {
    *choice == T::default()
}

/// The order in which a forward rounds its weights and divides them by the row's sum.
///
/// With P in f32 the order matters to f32's own errors alone. The bounds hold for both orders there, whatever is
/// declared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightRounding {
    /// `exp(s − max)` is rounded, and the product with the values is divided by the sum of unrounded weights, as in
    /// FlashAttention. The maximum may be a running one.
    BeforeNormalisation,
    /// `exp(s − max) / sum` is rounded, as in an unfused softmax. With partial results on several launches, each
    /// launch divides by its own sum.
    AfterNormalisation,
    /// An undeclared order: the bounds hold for both.
    #[default]
    Unknown,
}

/// The source of a row's `D`, the number that the backward subtracts from each dP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Delta {
    /// `rowsum(dout · out)` of the out that is returned, as in FlashAttention.
    StoredOut,
    /// `Σ P·dP` over the row's keys, of unrounded P and dP, as in an unfused softmax's backward.
    WeightedDots,
    /// `rowsum(dout · out)` of an out that was kept before its rounding to the returned format.
    UnroundedOut,
    /// An undeclared source: the bounds hold for each of these.
    #[default]
    Unknown,
}

/// The format in which dk and dv of each query head are kept before they are summed over the heads of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupSums {
    /// f32: the sum over the group is rounded once.
    F32,
    /// The gradients' own format. The stored gradients are then added, in f32 or one after the other in this format.
    Stored,
    /// An undeclared format: the bounds hold for both.
    #[default]
    Unknown,
}

/// The weights P of `dS = P·(dP − D)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsWeights {
    /// P in f32, as in FlashAttention.
    Unrounded,
    /// P after its rounding for dv, as in the memory-efficient attention of xformers and torch.
    Rounded,
    /// An undeclared choice: the bounds hold for both.
    #[default]
    Unknown,
}

/// The factor with which dS is multiplied before it is rounded to FP8, and by which its products are divided again.
///
/// Formats of 16 bits have the range of dS, which is rounded as it is there, whatever is declared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsScale {
    /// None: what is small vanishes, and what is past the format's range saturates.
    None,
    /// A power of two for each tile of queries and keys, or for a part of it. It follows from the largest magnitude of
    /// dS in the tile, which it brings above a quarter of the format's largest number, and not past that number.
    Tile,
    /// An undeclared factor: the bounds hold for both.
    #[default]
    Unknown,
}

/// The place of the softmax's scale beside the rounding of dS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsFold {
    /// `scale · dS` is rounded, as in cuDNN.
    Before,
    /// dS is rounded, and sums of its products are multiplied by the scale, as in FlashAttention.
    After,
    /// An undeclared place: the bounds hold for both.
    #[default]
    Unknown,
}

/// The accuracy of the soft cap's `tanh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SoftCap {
    /// That of a library function in f32: [`TANH_ERROR`](super::TANH_ERROR).
    Accurate,
    /// That of the instruction `tanh.approx.f32`: [`TANH_APPROXIMATE_ERROR`](super::TANH_APPROXIMATE_ERROR), as in
    /// FlashAttention 3.
    Approximate,
    /// An undeclared accuracy: the bounds hold for both.
    #[default]
    Unknown,
}

impl Arithmetic {
    /// Returns the choices of a FlashAttention-style kernel with this accumulation: weights are rounded before they are
    /// normalised, D comes from the stored out, dS from unrounded weights and without a factor of its own, a group is
    /// summed in f32, and the soft cap is accurate. The place of the softmax's scale is left open.
    pub const fn flash_attention(accumulation: Accumulation) -> Arithmetic {
        Arithmetic {
            accumulation,
            weights: WeightRounding::BeforeNormalisation,
            delta: Delta::StoredOut,
            group_sums: GroupSums::F32,
            soft_cap: SoftCap::Accurate,
            ds_weights: DsWeights::Unrounded,
            weight_exponent: 0,
            ds_scale: DsScale::None,
            ds_fold: DsFold::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    const EIGHT: NonZeroUsize = NonZeroUsize::new(8).unwrap();

    #[test]
    fn choices_are_written_as_the_protocol_says() {
        let declared = Arithmetic {
            accumulation: Accumulation::F32Tree(EIGHT),
            weights: WeightRounding::AfterNormalisation,
            delta: Delta::WeightedDots,
            group_sums: GroupSums::Stored,
            soft_cap: SoftCap::Approximate,
            ds_weights: DsWeights::Rounded,
            ..Arithmetic::default()
        };
        let text = r#"{"accumulation":{"f32-tree":8},"weights":"after-normalisation","delta":"weighted-dots","group_sums":"stored","soft_cap":"approximate","ds_weights":"rounded"}"#;
        assert_eq!(serde_json::to_string(&declared).expect("plain data"), text);
        assert_eq!(serde_json::from_str::<Arithmetic>(text).expect("what was written"), declared);
        let in_fp8 = Arithmetic {
            accumulation: Accumulation::WgmmaFp8 { promoted_after: Some(EIGHT) },
            weight_exponent: 8,
            ds_scale: DsScale::Tile,
            ds_fold: DsFold::After,
            ..declared
        };
        let text = serde_json::to_string(&in_fp8).expect("plain data");
        assert!(text.contains(r#"{"wgmma-fp8":{"promoted_after":8}}"#), "{text}");
        assert!(text.ends_with(r#","weight_exponent":8,"ds_scale":"tile","ds_fold":"after"}"#), "{text}");
        assert_eq!(serde_json::from_str::<Arithmetic>(&text).expect("what was written"), in_fp8);
        assert_eq!(serde_json::from_str::<Arithmetic>("{}").expect("all unknown"), Arithmetic::default());
        for wrong in [r#"{"weight":"unknown"}"#, r#"{"accumulation":{"f32-tree":0}}"#] {
            assert!(serde_json::from_str::<Arithmetic>(wrong).is_err(), "{wrong}");
        }
    }
}
