//! The names of a problem's tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Side;

/// The name of an input or a result of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum TensorName {
    Q,
    K,
    V,
    Dout,
    Sink,
    Out,
    Lse,
    MaxLogit,
    Dq,
    Dk,
    Dv,
    Dsink,
}

impl TensorName {
    /// The results that a subject may return: those of the forward, then those of the backward.
    pub const RESULTS: [TensorName; 7] = [
        TensorName::Out,
        TensorName::Lse,
        TensorName::MaxLogit,
        TensorName::Dq,
        TensorName::Dk,
        TensorName::Dv,
        TensorName::Dsink,
    ];

    /// Returns the side whose rows and heads the tensor has; that of the queries where it has no rows.
    pub fn side(self) -> Side {
        match self {
            TensorName::K | TensorName::V | TensorName::Dk | TensorName::Dv => Side::Kv,
            _ => Side::Q,
        }
    }

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            TensorName::Q => "q",
            TensorName::K => "k",
            TensorName::V => "v",
            TensorName::Dout => "dout",
            TensorName::Sink => "sink",
            TensorName::Out => "out",
            TensorName::Lse => "lse",
            TensorName::MaxLogit => "max_logit",
            TensorName::Dq => "dq",
            TensorName::Dk => "dk",
            TensorName::Dv => "dv",
            TensorName::Dsink => "dsink",
        }
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
