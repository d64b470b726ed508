//! Number formats: how a real number is rounded to bf16, fp16, e4m3 or e5m2, and what each code means.

use std::fmt;
use std::str::FromStr;

/// A storage format. All but f32 are exact in f32, and f32 is exact in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE binary16: 5 exponent bits, 10 mantissa bits.
    Fp16,
    /// OCP FP8 E4M3 ("fn"): no infinity, largest 448, conversions saturate.
    E4m3,
    /// OCP FP8 E5M2: with infinity, largest 57344, conversions saturate.
    E5m2,
}

/// A text that names no [`Format`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no format; use f32, bf16, fp16, e4m3 or e5m2")]
pub struct FormatNameError(String);

impl Format {
    /// Every format.
    pub const ALL: [Format; 5] = [Format::F32, Format::Bf16, Format::Fp16, Format::E4m3, Format::E5m2];

    /// The name in texts and case files.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::Fp16 => "fp16",
            Format::E4m3 => "e4m3",
            Format::E5m2 => "e5m2",
        }
    }

    /// Bits of precision, the implicit one included: 24, 8, 11, 4, 3.
    pub fn precision_bits(self) -> i32 {
        match self {
            Format::F32 => 24,
            Format::Bf16 => 8,
            Format::Fp16 => 11,
            Format::E4m3 => 4,
            Format::E5m2 => 3,
        }
    }

    /// Exponent of the smallest normal number: −126, −126, −14, −6, −14.
    pub fn exponent_min(self) -> i32 {
        match self {
            Format::F32 | Format::Bf16 => -126,
            Format::Fp16 | Format::E5m2 => -14,
            Format::E4m3 => -6,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = FormatNameError;

    fn from_str(text: &str) -> Result<Format, FormatNameError> {
        Format::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| FormatNameError(text.chars().take(40).collect()))
    }
}
