//! The number format in which each quantity of a problem is stored, and its scaling.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::limits::SCALING_BLOCK_MAX;
use crate::{Format, TensorName};

/// The scaling of a narrow format's codes to values: `value = code · scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// No scaling: the code is the value.
    None,
    /// One scale for the whole tensor.
    PerTensor,
    /// One scale for each head of the tensor.
    PerHead,
    /// One scale for each sequence and head.
    PerSequenceHead,
    /// One scale for each sequence and group: for queries, the heads that share a KV head (FlashAttention-3's
    /// `q_descale`, of shape `[batch, heads_kv]`); for keys and values the same as [`Scaling::PerSequenceHead`].
    PerSequenceGroup,
    /// One scale for each row and head.
    PerTokenHead,
    /// One scale for each block of `rows` × `columns` of a head: positions of one sequence, counted from its first, and
    /// lanes of the head dimension. A block at an end may be smaller. Where every sequence owns a multiple of `rows`,
    /// and no row lies between them, these are also blocks of the tensor's rows.
    PerBlock {
        /// Rows of a block; at least 1.
        rows: usize,
        /// Columns of a block; at least 1.
        columns: usize,
    },
}

impl Scaling {
    /// Whether a scale belongs to some rows of a sequence, not to all.
    pub fn is_of_rows(self) -> bool {
        matches!(self, Scaling::PerTokenHead | Scaling::PerBlock { .. })
    }

    /// Whether a scale belongs to one row alone.
    pub fn has_single_rows(self) -> bool {
        matches!(self, Scaling::PerTokenHead | Scaling::PerBlock { rows: 1, .. })
    }

    /// The scalings that are a name without numbers, each with that name.
    const NAMED: [(&str, Scaling); 5] = [
        ("tensor", Scaling::PerTensor),
        ("head", Scaling::PerHead),
        ("sequence-head", Scaling::PerSequenceHead),
        ("sequence-group", Scaling::PerSequenceGroup),
        ("token-head", Scaling::PerTokenHead),
    ];
}

/// A format with its scaling, written as `bf16`, `e4m3/tensor`, `e4m3/sequence-head` or `e4m3/block1x32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Element {
    /// The format of a code.
    pub format: Format,
    /// The scaling from codes to values.
    pub scaling: Scaling,
}

/// A text that names no [`Element`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no element; write FORMAT, FORMAT/SCALING or FORMAT/blockRxC, as in bf16, e4m3/tensor or e4m3/block1x32; formats: {formats}; scalings: {scalings}",
    formats = Format::ALL.map(Format::name).join(", "),
    scalings = Scaling::NAMED.map(|(name, _)| name).join(", ")
)]
pub struct ElementNameError(String);

impl Element {
    /// Whether values are codes times scales.
    pub fn is_scaled(self) -> bool {
        self.scaling != Scaling::None
    }
}

impl From<Format> for Element {
    fn from(format: Format) -> Element {
        Element { format, scaling: Scaling::None }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Scaling::NAMED.iter().find(|(_, scaling)| *scaling == self.scaling);
        match (self.scaling, named) {
            (Scaling::PerBlock { rows, columns }, _) => write!(f, "{}/block{rows}x{columns}", self.format),
            (_, Some((name, _))) => write!(f, "{}/{name}", self.format),
            (_, None) => write!(f, "{}", self.format),
        }
    }
}

impl FromStr for Element {
    type Err = ElementNameError;

    fn from_str(text: &str) -> Result<Element, ElementNameError> {
        let wrong = || ElementNameError(text.chars().take(40).collect());
        let (format, scaling) = match text.split_once('/') {
            None => (text, Scaling::None),
            Some((format, scaling)) => match Scaling::NAMED.iter().find(|(name, _)| *name == scaling) {
                Some((_, named)) => (format, *named),
                None => (format, block(scaling).ok_or_else(wrong)?),
            },
        };
        Ok(Element { format: format.parse().map_err(|_| wrong())?, scaling })
    }
}

/// Returns the scaling that a text like `block1x32` names.
fn block(text: &str) -> Option<Scaling> {
    let (rows, columns) = text.strip_prefix("block")?.split_once('x')?;
    let size = |digits: &str| digits.parse().ok().filter(|size| (1..=SCALING_BLOCK_MAX).contains(size));
    Some(Scaling::PerBlock { rows: size(rows)?, columns: size(columns)? })
}

impl TryFrom<String> for Element {
    type Error = ElementNameError;

    fn try_from(text: String) -> Result<Element, ElementNameError> {
        text.parse()
    }
}

impl From<Element> for String {
    fn from(element: Element) -> String {
        element.to_string()
    }
}

/// The element of each quantity that a kernel stores or rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Precision {
    /// Queries.
    pub q: Element,
    /// Keys.
    pub k: Element,
    /// Values.
    pub v: Element,
    /// Softmax weights, before the product with the values; f32 means that they are not rounded. The forward rounds
    /// `exp(s − max)` before it divides by the row's sum, or the weights after they are divided, as the subject
    /// declares ([`WeightRounding`](crate::envelope::WeightRounding)). Here `max` is the row's maximum or a running
    /// one. The backward rounds `exp(s − lse)`.
    pub p: Element,
    /// The output.
    pub out: Element,
    /// The gradient of the output.
    pub dout: Element,
    /// Gradients of the logits, before the products with queries and keys.
    pub ds: Element,
    /// dq, dk and dv.
    pub gradients: Element,
}

impl Precision {
    /// Returns the precision with every quantity in one unscaled format.
    pub fn uniform(format: Format) -> Precision {
        let e = Element::from(format);
        Precision { q: e, k: e, v: e, p: e, out: e, dout: e, ds: e, gradients: e }
    }

    /// Returns the element of an input or of a result; f32 for the sink and the statistics.
    pub fn of(&self, tensor: TensorName) -> Element {
        match tensor {
            TensorName::Q => self.q,
            TensorName::K => self.k,
            TensorName::V => self.v,
            TensorName::Dout => self.dout,
            TensorName::Out => self.out,
            TensorName::Dq | TensorName::Dk | TensorName::Dv => self.gradients,
            TensorName::Sink | TensorName::Lse | TensorName::MaxLogit | TensorName::Dsink => {
                Format::F32.into()
            }
        }
    }

    /// Whether any quantity has a scaling.
    pub fn has_scales(&self) -> bool {
        self.elements().iter().any(|(_, element)| element.is_scaled())
    }

    /// Returns each quantity's name and element, in the order of the fields.
    pub fn elements(&self) -> [(&'static str, Element); 8] {
        [
            ("q", self.q),
            ("k", self.k),
            ("v", self.v),
            ("p", self.p),
            ("out", self.out),
            ("dout", self.dout),
            ("ds", self.ds),
            ("gradients", self.gradients),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_written_and_read_back() {
        let others = [Scaling::None, Scaling::PerBlock { rows: 1, columns: 32 }];
        for format in Format::ALL {
            for scaling in Scaling::NAMED.into_iter().map(|(_, scaling)| scaling).chain(others) {
                let element = Element { format, scaling };
                assert_eq!(element.to_string().parse(), Ok(element));
            }
        }
        for wrong in [
            "",
            "bf17",
            "bf16/",
            "e4m3/heads",
            "e4m3/block",
            "e4m3/block0x4",
            "e4m3/block1x",
            "e4m3/block9999999x1",
        ] {
            assert!(wrong.parse::<Element>().is_err(), "{wrong}");
        }
    }
}
