//! The hash behind every value: SplitMix64 over the coordinates of an element. [`crate::values`] states the formula.

/// Step of SplitMix64: 2⁶⁴ ÷ the golden ratio, made odd.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of SplitMix64.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the state after one more word.
pub fn absorb(state: u64, word: u64) -> u64 {
    mix((state ^ word).wrapping_add(GOLDEN))
}

/// Returns the hash of a lane of a row.
pub fn lane_hash(row: u64, lane: usize) -> u64 {
    mix(row.wrapping_add(GOLDEN.wrapping_mul(lane as u64 + 1)))
}

/// Returns a uniform number below `n`, from the hash's upper half. The bias is below n ÷ 2³².
pub fn below(n: u32, hash: u64) -> u32 {
    (((hash >> 32) * u64::from(n)) >> 32) as u32
}

/// Number of each tensor in the hash.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum Tensor {
    Q = 0,
    K = 1,
    V = 2,
    Dout = 3,
    Sink = 4,
}

/// Word in place of a tensor's number where an exact mode draws something else.
pub const CHOICE: u64 = 5;
