//! The softmax: scale, soft cap and sink.
//!
//! A logit is `s = scale · ⟨q, k⟩`, then `s = cap · tanh(s / cap)` where a soft cap is set. A sink adds one term
//! `exp(sink)` to each row's denominator, and no value. The log-sum-exp (LSE) includes the sink.

use serde::{Deserialize, Serialize};

/// A term of the softmax's denominator that belongs to no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sink {
    /// No sink: the plain softmax.
    None,
    /// A sink of 0 for every head, without a gradient: the denominator is `1 + Σ exp(s)`.
    OffByOne,
    /// A sink of one value for each query head, which is an input and has a gradient.
    Learnable,
}

/// The parameters of the steps between `⟨q, k⟩` and the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// The factor of the logits, within [`crate::limits`]. A kernel receives exactly this f32.
    pub scale: f32,
    /// The soft cap: `cap` of `cap · tanh(s / cap)`, within [`crate::limits`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// The sink.
    pub sink: Sink,
}

impl Softmax {
    /// Returns a softmax with this scale, without a soft cap and without a sink.
    pub fn scaled(scale: f32) -> Softmax {
        Softmax { scale, softcap: None, sink: Sink::None }
    }

    /// Returns the logit of a scaled product.
    pub fn cap(&self, scaled: f64) -> f64 {
        match self.softcap {
            None => scaled,
            Some(cap) => f64::from(cap) * libm::tanh(scaled / f64::from(cap)),
        }
    }

    /// Returns the derivative of [`Softmax::cap`], given the logit `s` that the cap returned: `1 − (s / cap)²`.
    pub fn cap_derivative(&self, logit: f64) -> f64 {
        match self.softcap {
            None => 1.0,
            Some(cap) => 1.0 - (logit / f64::from(cap)) * (logit / f64::from(cap)),
        }
    }
}
