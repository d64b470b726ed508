//! Sizes of cases: named bounds, one set for each profile. Every bound is respected and reached.

use std::fmt;
use std::str::FromStr;

use seamproof_oracle::Dims;

/// Choice of a budget that stands for the largest entry of any table ([`Limits`]). No draw has it.
pub(super) const WIDEST_BUDGET: u32 = u32::MAX;

/// A named set of [`Limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Profile {
    /// Cases of some tens of tokens, hundreds of cases a second.
    Quick,
    /// Smallest cases, closest to the edges.
    Seams,
    /// Sequences of hundreds to thousands of tokens, with few heads.
    Large,
}

/// A text that names no [`Profile`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no profile; use quick, seams or large")]
pub struct ProfileNameError(String);

impl Profile {
    /// Every profile.
    pub const ALL: [Profile; 3] = [Profile::Quick, Profile::Seams, Profile::Large];

    /// Returns the name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Quick => "quick",
            Profile::Seams => "seams",
            Profile::Large => "large",
        }
    }

    /// Returns the bounds of the profile's cases.
    pub fn limits(self) -> Limits {
        match self {
            Profile::Quick => Limits::quick(),
            Profile::Seams => Limits::seams(),
            Profile::Large => Limits::large(),
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = ProfileNameError;

    fn from_str(text: &str) -> Result<Profile, ProfileNameError> {
        Profile::ALL
            .into_iter()
            .find(|profile| profile.name() == text)
            .ok_or_else(|| ProfileNameError(text.chars().take(40).collect()))
    }
}

/// Bounds on one case. An entry of a table is drawn with equal chances; an entry that stands there twice is twice as
/// likely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest number of sequences in a case.
    pub sequences_max: u32,
    /// Largest number of real rows of one sequence, on either side.
    pub length_max: u32,
    /// Largest number of padding rows of one sequence in a packed layout.
    pub padding_max: u32,
    /// Largest number of rows that nobody owns, in one place.
    pub gap_max: u32,
    /// Largest number of rows after the last sequence.
    pub slack_max: u32,
    /// Largest number of query heads.
    pub q_heads_max: u32,
    /// Largest head dimension, of keys or of values. Above 256 lie those of latent heads alone.
    pub head_dim_max: u32,
    /// Table of the largest ordinary length in a case.
    pub reaches: &'static [u32],
    /// Tile sizes. Lengths and window edges aim at their multiples.
    pub tiles: &'static [u32],
    /// Table of head dimensions.
    pub dims: &'static [u32],
    /// Table of a case's budget, the largest number of visible pairs · query heads · max(dqk, dv). `fixup` shrinks a
    /// case until it fits its entry.
    pub products: &'static [u64],
    /// Largest number of elements ([`seamproof_oracle::Problem::elements`]) in a case.
    pub elements_max: u64,
}

/// Largest head dimension of a case without latent heads.
pub(super) const ORDINARY_DIM_MAX: u32 = 256;
/// Head dimensions of latent attention in its absorbed form ([`HEAD_DIM_MAX`](seamproof_oracle::limits::HEAD_DIM_MAX)).
pub(super) const LATENT: Dims = Dims { qk: 576, v: 512 };

const KI: u64 = 1 << 10;
const MI: u64 = 1 << 20;

impl Limits {
    /// Returns the largest entry of [`Limits::products`].
    pub fn products_max(&self) -> u64 {
        self.products.iter().copied().max().unwrap_or(0)
    }

    /// Returns the bounds of [`Profile::Quick`].
    pub fn quick() -> Limits {
        Limits {
            sequences_max: 1100,
            length_max: 257,
            padding_max: 64,
            gap_max: 9,
            slack_max: 257,
            q_heads_max: 24,
            head_dim_max: 576,
            reaches: &[4, 8, 16, 24, 32, 48, 64, 96, 128, 192],
            tiles: &[4, 8, 16, 32, 64, 128],
            dims: &[8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 1, 2, 3, 5, 7, 9, 13, 17, 33, 65, 8, 16, 32],
            products: &[64 * KI, 128 * KI, 256 * KI, 512 * KI, MI, 2 * MI],
            elements_max: 96 * KI,
        }
    }

    /// Returns bounds for fuzzers, which run thousands of cases a second and find their own way: small cases of some
    /// tens of tokens.
    pub fn fuzz() -> Limits {
        Limits {
            sequences_max: 8,
            length_max: 17,
            padding_max: 8,
            gap_max: 3,
            slack_max: 9,
            q_heads_max: 4,
            head_dim_max: 16,
            reaches: &[2, 4, 8, 16],
            tiles: &[4, 8],
            dims: &[1, 2, 3, 5, 8, 16],
            products: &[4 * KI, 16 * KI],
            elements_max: 4 * KI,
        }
    }

    /// Returns the bounds of [`Profile::Seams`].
    pub fn seams() -> Limits {
        Limits {
            sequences_max: 1100,
            length_max: 33,
            padding_max: 32,
            gap_max: 5,
            slack_max: 65,
            q_heads_max: 12,
            head_dim_max: 576,
            reaches: &[2, 4, 8, 8, 16, 32],
            tiles: &[2, 4, 8, 16],
            dims: &[8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 1, 2, 3, 5, 7, 9, 1, 1, 2, 4, 8],
            products: &[4 * KI, 8 * KI, 16 * KI, 32 * KI, 64 * KI, 256 * KI],
            elements_max: 32 * KI,
        }
    }

    /// Returns the bounds of [`Profile::Large`].
    pub fn large() -> Limits {
        Limits {
            sequences_max: 1100,
            length_max: 4096,
            padding_max: 2048,
            gap_max: 300,
            slack_max: 1024,
            q_heads_max: 12,
            head_dim_max: 576,
            reaches: &[512, 1024, 1024, 2048, 4096],
            tiles: &[64, 128, 256, 512, 1024],
            dims: &[64, 80, 96, 128, 192, 256, 16, 33, 64, 128],
            products: &[64 * MI, 128 * MI, 256 * MI, 1024 * MI],
            elements_max: 16 * MI,
        }
    }
}
