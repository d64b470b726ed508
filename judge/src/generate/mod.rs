//! The one generator behind campaigns' seeds, fuzzers' bytes, property tests and exhaustive small spaces.
//!
//! ```text
//! (seed, index) ─ChaCha8─► 4 KiB ─┐
//! fuzzer's bytes ─────────────────┴─► raw() ─► RawProblem ─► fixup() ─► Draw: a Problem, or malformed fields
//! ```
//!
//! [`raw`] makes plain integers and never fails. Where the bytes run out, every choice is the first one, which is the
//! simplest. [`fixup`] makes a case of *any* integers, and documents its repairs. [`draw`] returns case `index` of
//! campaign `seed`, the same on every machine, whatever was drawn before.
//!
//! One case in twenty is illegal. Half of these are well-formed problems outside the emulated backend's
//! table, which must be refused. The other half are [`Malformed`] fields that break one rule of
//! [`Problem::new`](seamproof_oracle::Problem::new). All other cases are legal: they have one 16-bit format
//! throughout (P in it or in f32), and an algorithm that can cut and deal them.
//!
//! Nine cases in twenty ask for an exact mode ([`crate::exact`]), and get one where the problem meets its
//! preconditions.
//!
//! One case in eight is then *aimed* at what production kernels were seen to get wrong: logits deep below 0, lengths
//! around tiles of 64 and 128, one query with many keys, spans twice as long as what they hold, hundreds of sequences,
//! unusual head dimensions of values, and slack of one or many rows.
//!
//! One case in twelve has values that are hard for what kernels in FP8 quantise: one weight far above all others, a
//! maximum that grows late, large means, or zeros.
//!
//! One case in 85 has the shape of latent attention: head dimensions of 576 and 512, and one KV head of several query
//! heads.
//!
//! **The order of choices is a format.** A corpus of fuzzer bytes keeps its meaning only as long as every choice
//! stays in its place. Choices and entries of tables are added at the end, and a retired one leaves a hole (a repeat
//! of its neighbour). Stored findings are problems, not bytes, and outlive any change here.
//!
//! The generator draws no values ([`crate::values`]) and counts nothing ([`crate::census`]).

use arbitrary::Unstructured;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_oracle::Problem;

mod aims;
mod choices;
mod drawing;
mod fixup;
mod flaws;
mod limits;
mod raw;
mod tiny;
mod value;

pub use drawing::raw;
pub use fixup::fixup;
pub(crate) use fixup::with_legal_mode;
pub use flaws::Malformed;
pub use limits::{Limits, Profile, ProfileNameError};
pub use raw::{RawProblem, RawSequence};
pub use tiny::tiny;
pub use value::value_of;

/// Number of bytes of choices behind one case of a campaign; more than [`raw`] ever uses.
const CHOICE_BYTES: usize = 4096;

/// Case that the generator makes of its choices.
#[derive(Clone, Debug, PartialEq)]
pub enum Draw {
    /// A valid problem; a subject may still have to refuse it.
    Problem(Problem),
    /// Fields that no problem can have.
    Malformed(Malformed),
}

/// Returns case `index` of campaign `seed`.
pub fn draw(seed: u64, index: u64, limits: &Limits) -> Draw {
    fixup(&draw_raw(seed, index, limits), limits)
}

/// Returns the integers behind [`draw`]: [`raw`] reads them from 4 KiB of ChaCha8, seeded with the blake3 hash of
/// `seed` and `index` (16 bytes, little endian).
pub fn draw_raw(seed: u64, index: u64, limits: &Limits) -> RawProblem {
    let key = (u128::from(index) << 64 | u128::from(seed)).to_le_bytes();
    let mut rng = ChaCha8Rng::from_seed(*blake3::hash(&key).as_bytes());
    let mut bytes = [0; CHOICE_BYTES];
    rng.fill_bytes(&mut bytes);
    raw(&mut Unstructured::new(&bytes), limits)
}

#[cfg(test)]
mod tests;
