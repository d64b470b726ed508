//! The answer of a pass: exact values and their bounds.

/// An exact result and, where a model was given, the largest honest error of each of its elements.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// The exact values.
    pub exact: T,
    /// The bounds, in the same shapes; 0 where the exact value is the only right one.
    pub bound: Option<Tiers<T>>,
}

/// The envelope's tiers.
#[derive(Clone, Debug)]
pub struct Tiers<T> {
    /// Tier W.
    pub worst: T,
    /// Tier T: never above W, and infinite where nothing is certified. There W alone speaks.
    pub dithered: T,
}
