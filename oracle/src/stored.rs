//! [`Stored`]: the numbers in which a result is stored.

use crate::Format;

/// The numbers of a format times a descale, in which a result is stored. Without a scaling the descale is 1. What is
/// stored may have been rounded to a wider format before it became a code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored {
    /// The format of a code.
    pub format: Format,
    /// The factor that turns a code into a value, above 0.
    pub descale: f64,
    /// The format to which a value is rounded before it becomes a code; `None` where its code is made of the value.
    pub through: Option<Format>,
}

impl From<Format> for Stored {
    fn from(format: Format) -> Stored {
        Stored { format, descale: 1.0, through: None }
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
    /// Where it is rounded twice, the code is that of the first rounding's result, which may be the larger number.
    #[inline]
    pub fn half_spacing(self, magnitude: f64) -> f64 {
        let first = self.first_rounding(magnitude);
        first + self.code_spacing(magnitude + first)
    }

    /// Returns the largest error of rounding a number whose magnitude is at most this to the wider format; 0 without one.
    ///
    /// The number that is rounded may be a value, or a value divided by the descale. The unit roundoff bounds both, and
    /// below the normal range the larger of both spacings. No rounding to nearest takes a number past 0, or past twice
    /// itself.
    #[inline]
    pub fn first_rounding(self, magnitude: f64) -> f64 {
        let of = |wide: Format| {
            let least = wide.tiny_half() * self.descale.max(1.0);
            (wide.unit_roundoff() * magnitude + least).min(magnitude)
        };
        self.through.map_or(0.0, of)
    }

    /// Returns the largest error of making a code of a number whose magnitude is at most this.
    #[inline]
    fn code_spacing(self, magnitude: f64) -> f64 {
        if self.descale == 1.0 {
            return self.format.half_spacing(magnitude);
        }
        self.format.half_spacing(magnitude / self.descale) * self.descale
    }

    /// Returns the largest change by which rounding may have made this stored number.
    #[inline(always)]
    pub fn moved(self, stored: f64) -> f64 {
        // The number before a rounding may be larger than the one behind it.
        let before = |number: f64, format: Format, least: f64| {
            number * (1.0 + 2.0 * format.unit_roundoff()) + 2.0 * least
        };
        let own = before(stored.abs(), self.format, self.tiny_half());
        let of_code = self.code_spacing(own.min(self.most()));
        let wide = |wide: Format| before(own, wide, wide.tiny_half() * self.descale.max(1.0));
        of_code + self.through.map_or(0.0, |format| self.first_rounding(wide(format)))
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
        let stored = Stored { format: Format::E4m3, descale: 3.0, through: None };
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

    /// Numbers of many binades, most of which lie near to the middle of two numbers of a code, and some past its range.
    fn near_ties(code: Format, descale: f64) -> impl Iterator<Item = f64> {
        let codes: Vec<f64> =
            (0..128).map(|number| code.decode(number)).filter(|code| code.is_finite()).collect();
        let offsets = [0.0, 1e-9, 1e-5, 1e-3, 1.0 / 600.0, 1.0 / 300.0, 0.03, 0.0625, 0.09];
        let offsets = offsets.map(|offset| [1.0 + offset, 1.0 - offset]).concat();
        let middles: Vec<f64> = codes.windows(2).map(|both| (both[0] + both[1]) / 2.0).collect();
        let around = middles
            .into_iter()
            .flat_map(move |middle| offsets.clone().into_iter().map(move |offset| middle * offset * descale));
        around.chain([1e-40, 3e-6, 1e3, 1e6, 1e38].map(|number| number * descale))
    }

    /// Test that two roundings err by no more than their bound, wherever the first one is made: in values, or in units of
    /// the code. What is past the range is compared with its end.
    #[test]
    fn two_roundings_err_by_their_spacing_at_most() {
        for (code, descale) in [(Format::E4m3, 1.0), (Format::E4m3, 3.0), (Format::E5m2, 0.3)] {
            let stored = Stored { format: code, descale, through: Some(Format::Bf16) };
            let once = Stored { through: None, ..stored };
            let mut moved = 0;
            for number in near_ties(code, descale) {
                let most = stored.half_spacing(number.min(stored.most()));
                let first = [Format::Bf16.round(number), Format::Bf16.round(number / descale) * descale];
                for first in first {
                    let twice = stored.saturated(once.round(first));
                    let error = (twice - stored.saturated(number)).abs();
                    assert!(error <= most, "{number} becomes {first}, then {twice}: {error} of {most}");
                    let is_cut = once.round(first).abs() >= once.most();
                    assert!(is_cut || (twice - number).abs() <= stored.moved(twice), "{number} {twice}");
                    moved += usize::from(twice != once.round(number));
                }
            }
            assert!(moved > 10, "{code}: {moved}");
        }
    }

    /// Test that the bound of two roundings is that of one and no more than the first rounding with its effect on the
    /// second, and that 0 has none.
    #[test]
    fn the_first_rounding_adds_its_own_unit() {
        let twice = Stored { format: Format::E4m3, descale: 3.0, through: Some(Format::Bf16) };
        let once = Stored { through: None, ..twice };
        for number in [0.5, 3.0, 7.1, 40.0, 1000.0] {
            let (unit, least) = (Format::Bf16.unit_roundoff(), 3.0 * Format::Bf16.tiny_half());
            let first = unit * number + least;
            assert_eq!(twice.half_spacing(number), first + once.half_spacing(number + first));
        }
        assert_eq!((twice.half_spacing(0.0), twice.first_rounding(0.0)), (0.0, 0.0));
    }
}
