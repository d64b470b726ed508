//! [`Maxima`]: the largest magnitudes that the launches of a kernel have seen, as real kernels keep them: an integer
//! maximum of the bits of an f32, in which a NaN is larger than every number.

use std::sync::atomic::{AtomicU32, Ordering};

use seamproof_oracle::Quantity;
use seamproof_oracle::amax::Amaxes;

use crate::Real;

/// Largest magnitudes of what a kernel quantises, before it is multiplied by a scale.
#[derive(Debug, Default)]
pub(super) struct Maxima([AtomicU32; 6]);

impl Maxima {
    /// Counts numbers of a quantity.
    pub(super) fn count<T: Real>(&self, quantity: Quantity, values: &[T]) {
        let bits = |value: &T| (value.to_f64().abs() as f32).to_bits();
        let largest = values.iter().map(bits).max().unwrap_or(0);
        self.0[quantity as usize].fetch_max(largest, Ordering::Relaxed);
    }

    /// Returns the largest magnitude of each quantity so far.
    pub(super) fn told(&self) -> Amaxes {
        let bits = |quantity: Quantity| self.0[quantity as usize].load(Ordering::Relaxed);
        Amaxes::new(|quantity| Some(f32::from_bits(bits(quantity))))
    }
}
