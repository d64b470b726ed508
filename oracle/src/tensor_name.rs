//! The names of a problem's tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A named result or input of a problem.
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
    /// What a subject may return, the results of the backward after those of the forward.
    pub const RESULTS: [TensorName; 7] = [
        TensorName::Out,
        TensorName::Lse,
        TensorName::MaxLogit,
        TensorName::Dq,
        TensorName::Dk,
        TensorName::Dv,
        TensorName::Dsink,
    ];

    /// The name in texts and files.
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
