//! Disagreements that a check finds.

use std::fmt;

/// A kernel and its twin that disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The operation.
    pub operation: &'static str,
    /// The index of the case.
    pub case: u64,
    /// The tensor or guard, and the place in it.
    pub place: String,
    /// A description of the case.
    pub what: String,
    /// The number of bytes that differ.
    pub bytes: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Mismatch { operation, case, place, what, bytes } = self;
        write!(f, "{operation}, case {case}: {place}; {bytes} bytes differ; {what}")
    }
}
