//! The constants of the bounds: unit roundoffs, documented accuracies of instructions, and tails of laws of chance.

/// Unit roundoff of f32, round to nearest: 2^-24.
pub const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;
/// Relative error of an honest `exp`: 2^-22 (`ex2.approx` after its input scaling).
pub const EXP_ERROR: f64 = 1.0 / (1u64 << 22) as f64;
/// Relative error of an honest `tanh`: 2^-21 (an accurate f32 library function, a few ulp).
pub const TANH_ERROR: f64 = 1.0 / (1u64 << 21) as f64;
/// Relative error of `tanh.approx.f32`: 2^-11, as the ISA's manual says (PTX ISA, "Floating Point Instructions: tanh").
pub const TANH_APPROXIMATE_ERROR: f64 = 1.0 / (1u64 << 11) as f64;
/// Absolute error of an honest `log` for arguments near 1: 2^-21.4 (`lg2.approx` times ln 2).
pub const LOG_ERROR: f64 = 3.613_2e-7;
/// Further relative error of an honest `log`: 3 ulp.
pub(super) const LOG_RELATIVE_ERROR: f64 = 3.0 / (1u64 << 23) as f64;

/// Absolute error of an element of out that one merge by a difference adds, `O' = O − s·(O − B)` with `s = σ(x)`,
/// relative to the largest magnitude M of a value: 14ε.
///
/// O and B lie in the values' hull, so `|O − B| ≤ 2M`. The argument x is off by `ε·|x|`, and `|x|·σ'(x) ≤ 0.224`. An
/// honest exp ([`EXP_ERROR`], 4ε) counts `σ' ≤ 1/4` times. The sum `1 + e^−x` is off by ε, and an approximate
/// reciprocal by 2ε. Thus s is off by 4.3ε. The difference and the product add ε each: `6.3ε·2M`. The last difference
/// adds `ε·M`.
pub const DIFFERENCE_ERROR: f64 = 14.0 * F32_ROUNDOFF;

/// Eight standard deviations of rounding a weight to nearest, in its unit roundoffs. The error is uniform in a cell of
/// half width `u·2^e ≤ u·p`, and its deviation is the half width over √3. Hence `8/√3`, wherever the weights lie in
/// their binades. Weights spread evenly in their logarithm would need 3.4, but those of a row whose logits differ
/// little lie close together. Eight deviations are taken because 1.2e-15 of a normal law lies outside.
pub const NOISE: f64 = 4.619;
/// Azuma's `√(2·ln(2/δ))` for δ = 1e-15. A sum of n roundings, each at most a in magnitude and of mean 0 given the ones
/// before, is within this number times `a·√n`.
pub const ROW_SUM_TAIL: f64 = 8.4;
