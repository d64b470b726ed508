//! What a pass returns: exact values and their bounds.

/// An exact result and, where a model was given, the largest honest error of each of its elements.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// The exact values.
    pub exact: T,
    /// Bounds of the same shapes; 0 where the exact value is the only right one.
    pub bound: Option<Tiers<T>>,
}

/// The envelope's tiers.
#[derive(Clone, Debug)]
pub struct Tiers<T> {
    /// Tier W.
    pub worst: T,
    /// Tier T: never above W; infinite where nothing is certified, so that W speaks alone.
    pub dithered: T,
}
