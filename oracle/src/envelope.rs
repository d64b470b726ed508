//! For each element of the answer the largest error that an honest subject can show (tier W, worst case).

/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// Products and sums one after the other in f32, rounded to nearest.
    F32Serial,
}

/// stub
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {}
