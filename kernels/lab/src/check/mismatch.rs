//! What a check finds.

use std::fmt;

/// A kernel and its twin that disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The operation.
    pub operation: &'static str,
    /// The case's index.
    pub case: u64,
    /// Which tensor, or guard, and where.
    pub place: String,
    /// What the case is.
    pub what: String,
    /// Bytes that differ.
    pub bytes: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Mismatch { operation, case, place, what, bytes } = self;
        write!(f, "{operation}, case {case}: {place}; {bytes} bytes differ; {what}")
    }
}
