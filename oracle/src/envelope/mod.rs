//! The envelope: for each element of the answer, the largest error that an honest subject can show. It has two tiers
//! here. Tier W is the worst case for any input. In tier T the roundings of dithered weights may cancel. Tier R is in
//! [`crate::replay`].
//!
//! An *honest subject* rounds its inputs, weights, logit gradients and results to the problem's formats, computes in
//! f32 between, and sums and rounds as it declares ([`Arithmetic`], [`Partition`]). The bound is a sum of named
//! rounding terms evaluated with the exact answer's own quantities. Nothing here is tuned: each constant is a unit
//! roundoff, a count of roundings, or a documented accuracy of an instruction.
//!
//! Terms, for query i and key j (all quantities exact; `A_ij = Σ_c |q_ic||k_jc|`, `B_ij = Σ_c |dout_ic||v_jc|`, `m` the
//! row's largest logit, `l = Σ exp(s − m)`, `u` the unit roundoff of a stored format):
//!
//! | term | what it bounds |
//! |---|---|
//! | `logit_error` | absolute error of a logit: `scale·A·(g(d) + 2ε)`, and the soft cap's tanh |
//! | `weight_error` | error `p·θ` of an unrounded weight: the exponent's, exp's own, `R` rescalings of a running max, merges |
//! | `weight_rounding` | absolute error of rounding P: `u·p`, or the format's floor, whichever is larger |
//! | `gamma` | relative error of the row sum |
//! | `g(n)` | error of a sum of n products relative to the sum of their magnitudes. A tensor core cuts a subnormal factor off like a factor of its format's smallest exponent, and such a factor counts as the smallest normal number |
//! | half spacing | the final rounding to the stored format |
//!
//! Further terms follow from the choices of an [`Arithmetic`]; docs/judge.md derives them. Weights that are normalised
//! before they are rounded add `4ε·p` each, and the floors of P and of aligned products are no longer divided by `l`.
//! A merge by a difference ([`MergeBy::Difference`]) adds [`DIFFERENCE_ERROR`] times the row's largest `|v|` to out,
//! and `ε·(|L| + |b|)` to the LSE, for each merge: docs/judge.md derives both. [`Model::row_delta`] gives D's value and
//! error for each source. Stored gradients of the n heads of a group add `n·u` and n floors to dk and dv.
//!
//! These terms hold the cost of a GPU's approximate instructions, and a kernel that uses them need not declare them.
//! `ex2.approx` (2 ulp) is [`EXP_ERROR`]. Its argument `fma(S, c, −fl(m·c))`, with `c = fl(scale·log₂e)`, is off by
//! `2ε·|s − m|` for c, and by `ε·|s − m|` and `ε·|m|` for the two roundings. A rescaling `ex2((m' − m)·c)` is off by
//! `4ε·|m' − m|`. A running maximum only grows: a key's own errors and those of its rescalings add up to
//! `4ε·|s − max| + ε·max|s|` at most. The exponent's `ε·(|s − max| + 2·range + 2·max|s|)` and the logit's `2ε·scale·A`
//! hold that sum. `rcp.approx` (1 ulp, `2ε`) and the product with its result are `3ε` of the `6ε` of an element of out.
//! `lg2.approx` (2^-22, absolute in (0.5, 2) and relative elsewhere) times `ln 2` is off by `5.5ε·|ln l|` beside
//! `2^-22·ln 2`. [`LOG_ERROR`] and 3 ulp of the logarithm hold both.
//!
//! Tier T differs from W in two terms, both for certified sums alone (`dither.rs`). Errors of rounding weights are
//! independent there and of mean 0. Their sum is within eight standard deviations ([`NOISE`]), or within the sum of all
//! magnitudes where that sum is less. A row sum's roundings are bounded by a martingale's tail ([`ROW_SUM_TAIL`]). A
//! truncating unit's error is biased and stays linear. Every other term stays linear too.
//!
//! Only judging uses the bounds. Sources: Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1
//! (`γ_n = nε/(1 − nε)`); MMA-Sim (arXiv 2511.10909) and arXiv 2512.07004 for the tensor core's truncation; the PTX ISA
//! (<https://docs.nvidia.com/cuda/parallel-thread-execution/>) for `ex2.approx`, `lg2.approx` and `rcp.approx`; Higham
//! and Mary, "A New Approach to Probabilistic Rounding Error Analysis" (SIAM J. Sci. Comput. 41, 2019), and Ipsen and
//! Zhou, "Probabilistic Error Analysis for Inner Products" (SIAM J. Matrix Anal. Appl. 41, 2020), for sums of
//! independent roundings.

mod accumulation;
mod arithmetic;
mod constants;
pub(crate) mod dither;
mod model;
mod partition;
mod profile;
mod sums;

pub use accumulation::Accumulation;
pub use arithmetic::{Arithmetic, Delta, DsFold, DsScale, DsWeights, GroupSums, SoftCap, WeightRounding};
pub use constants::{
    DIFFERENCE_ERROR, EXP_ERROR, F32_ROUNDOFF, LOG_ERROR, NOISE, ROW_SUM_TAIL, TANH_APPROXIMATE_ERROR,
    TANH_ERROR,
};
pub use dither::SLOTS;
pub use model::gradients::{GradientPair, GradientPairError, GradientRow, ReplayedPair};
pub use model::majorant::{Extremes, GradientMajorants, Majorant};
pub use model::out::OutRow;
pub use model::{
    BoundTier, Denominator, DsFactor, Model, PairError, Promotion, ReplayedTile, Rounding, RowModel,
    RowStatistics, TilePair,
};
pub use partition::{GradientSums, Joints, MergeBy, Merges, Partition};
pub use profile::{KeyOrder, NumericProfile, TileFactor};
pub use sums::{DitherSums, RowEnvelope, RowSums, largest_multiplicity};
