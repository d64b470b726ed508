//! [`Stored`]: the numbers in which a result is stored.

use crate::Format;

/// The numbers of a format times a descale, in which a result is stored. Without a scaling the descale is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored {
    /// The format of a code.
    pub format: Format,
    /// The factor that turns a code into a value, above 0.
    pub descale: f64,
}

impl From<Format> for Stored {
    fn from(format: Format) -> Stored {
        Stored { format, descale: 1.0 }
    }
}

impl Stored {
    /// Returns the largest magnitude.
    #[inline]
    pub fn most(self) -> f64 {
        self.format.max_finite() * self.descale
    }

    /// Returns the nearest number.
    #[inline]
    pub fn round(self, value: f64) -> f64 {
        self.format.round(value / self.descale) * self.descale
    }

    /// Returns half the smallest magnitude other than 0.
    #[inline]
    pub fn tiny_half(self) -> f64 {
        self.format.tiny_half() * self.descale
    }

    /// Returns the largest error of rounding a number whose magnitude is at most this, as [`Format::half_spacing`] does.
    #[inline]
    pub fn half_spacing(self, magnitude: f64) -> f64 {
        if self.descale == 1.0 {
            return self.format.half_spacing(magnitude);
        }
        self.format.half_spacing(magnitude / self.descale) * self.descale
    }

    /// Returns the number that lies within the range, if a conversion saturates, and is nearest to a value.
    #[inline]
    pub fn saturated(self, value: f64) -> f64 {
        if self.format.saturates() { value.clamp(-self.most(), self.most()) } else { value }
    }

    /// Whether a stored value may stand for one past the range: it is the largest, of a format that saturates.
    #[inline]
    pub fn is_saturated(self, value: f64) -> bool {
        // A value in f32 may have lost a rounding of the product.
        self.format.saturates() && value.abs() >= self.most() * (1.0 - 1e-6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_format_times_the_descale() {
        let stored = Stored { format: Format::E4m3, descale: 3.0 };
        assert_eq!(stored.most(), 1344.0);
        assert_eq!(stored.half_spacing(3.0 * 1.9), 3.0 * Format::E4m3.half_spacing(1.9));
        assert_eq!(stored.tiny_half(), 3.0 * Format::E4m3.tiny_half());
        for (value, held) in [(2000.0, 1344.0), (-1e9, -1344.0), (7.1, 7.1)] {
            assert_eq!(stored.saturated(value), held);
            assert_eq!(stored.round(value), 3.0 * Format::E4m3.round(value / 3.0));
            assert_eq!(stored.is_saturated(held), held.abs() > 8.0);
        }
        let bf16 = Stored::from(Format::Bf16);
        assert_eq!(bf16.saturated(1e39), 1e39);
        assert!(!bf16.is_saturated(bf16.most()));
    }
}
