//! Preconditions of the exact modes, and the error that a right result can have against the exact value.
//!
//! # Errors
//!
//! Let ε = 2⁻²⁴. The errors hold for any order of sums, for f32 that rounds or truncates, and for an exponential of 2
//! ulp:
//!
//! - *Weights.* If all logits are 0, `exp(0) = 1` without error. Otherwise the exponent is a difference of products
//!   whose roundings add up to `4 ε |logit|`. Each rescaling of the staircase (at most one a level) multiplies by
//!   another exponential.
//! - *Row sum.* If the weights are exactly 1, the sum is one of integers below 2²⁴, and exact. Otherwise it has the
//!   weights' error, and `2 ε` for each addition that adds anything.
//! - *Out.* Reciprocal, product and their arguments err by 2⁻²¹. The numerator of all-zero logits is a sum of
//!   integers, and exact. In the other modes the values are not negative, or there is one term, so errors of terms
//!   are relative to the sum. An addition in a tensor core errs by at most `(17 / 4 + 1) · 2⁻²³`. One rounding to the
//!   format follows.
//! - *LSE.* It has the row sum's error, the roundings of the maximum's product and of the sum, and the logarithm's
//!   error.
//! - *Merges.* A step's weight is `exp(its LSE − the LSE)`. It has the errors of storing both, and of each
//!   exponential. A merge by a difference has an absolute error besides, that of the largest value.
//!
//! A result is right when it is one of the format's numbers from `RN(x − error)` to `RN(x + error)`. This is almost
//! always one number, or the two next to a tie.

use seamproof_oracle::envelope::{Arithmetic, Delta, GroupSums, MergeBy, Partition, WeightRounding};
use seamproof_oracle::{Element, Format, InputMode, Pass, Problem, Scaling};

use super::plan::{Code, ExactPlan, PartialLse, code_lanes, has_codes, is_uniform};
use super::{COUNT_VALUE, DEAD_LEVEL, LEVEL_MAX, ROUTED_VALUE, STAIR_VALUE, TABLE_MAX};

/// Unit roundoff ε of f32.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;
/// Relative error of an exponential: 2.06 ulp (measured for `ex2.approx.ftz.f32` on Hopper), and the error of the
/// constant in its argument.
const EXPONENTIAL: f64 = 8.0 * EPSILON;
/// Absolute error of a logarithm near 1, and relative error elsewhere.
const LOGARITHM: f64 = 8.0 * EPSILON;
/// Absolute error of a merge by a difference, relative to the largest value:
/// [`envelope::DIFFERENCE_ERROR`](seamproof_oracle::envelope::DIFFERENCE_ERROR) with this module's exponential.
const DIFFERENCE: f64 = 16.0 * EPSILON;
/// Relative error of dividing by the row sum.
const NORMALISED: f64 = 8.0 * EPSILON;
/// Relative error of one addition in a tensor core: 17 addends are truncated at 2⁻²⁵ of the largest, and the result
/// at 2⁻²³.
const ADDITION: f64 = 10.5 * EPSILON;
/// Smallest weight of a step of the staircase, relative to the largest.
const STEP_MIN: f64 = 1.0 / (1_u64 << LEVEL_MAX) as f64;
/// Number of rescalings of a staircase.
const RESCALINGS: f64 = 13.0;

/// Reason why a mode's preconditions do not hold.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// A mode that is not one of [`InputMode::EXACT`].
    #[error("the mode is not exact")]
    Mode,
    /// A format in which integers of the mode need not be exact.
    #[error("{quantity} is {element}; exact modes take unscaled bf16 and fp16, and P and results in f32")]
    Format {
        /// Name of the quantity.
        quantity: &'static str,
        /// Element of the quantity.
        element: Element,
    },
    /// A soft cap, which narrows the gaps between logits.
    #[error("a soft cap leaves no gap between logits")]
    Softcap,
    /// Too many keys in a sequence.
    #[error("a sequence has {keys} keys; the head dimension has codes for {most}")]
    Keys {
        /// Number of keys.
        keys: usize,
        /// Largest number of keys.
        most: usize,
    },
    /// A scale that does not give the logits that the mode needs.
    #[error("the scale is {got}; the mode needs {needs}")]
    Scale {
        /// Scale of the problem.
        got: f32,
        /// Scale that the mode needs.
        needs: &'static str,
    },
    /// A query that its format cannot hold.
    #[error("queries hold {0:e}, which is no number of their format")]
    Amplitude(f64),
}

/// Merges of a problem's partial results, as far as exactness depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merging {
    /// Number of merges of a row.
    pub count: usize,
    /// Whether partial outs are stored in 16 bits.
    pub narrow_out: bool,
    /// Whether partial gradients are stored in 16 bits.
    pub narrow_sums: bool,
    /// Formula by which outs are merged.
    pub by: MergeBy,
}

impl From<Partition> for Merging {
    fn from(partition: Partition) -> Merging {
        let Partition { merges, sums, .. } = partition;
        let narrow = |format: Format| format != Format::F32;
        Merging {
            count: merges.count,
            narrow_out: merges.count > 0 && (narrow(merges.step) || narrow(merges.running)),
            narrow_sums: sums.count > 0 && narrow(sums.format),
            by: merges.by,
        }
    }
}

impl Merging {
    /// Whether outs are merged by differences.
    pub(crate) fn differs(self) -> bool {
        self.count > 0 && self.by == MergeBy::Difference
    }

    /// Returns the merging of a subject with this arithmetic. Gradients of single query heads that may be stored are
    /// partial gradients too.
    pub fn with_heads(self, arithmetic: &Arithmetic, problem: &Problem) -> Merging {
        let is_narrow = problem.precision.gradients.format != Format::F32;
        let stored = arithmetic.group_sums != GroupSums::F32 && problem.group() > 1 && is_narrow;
        Merging { narrow_sums: self.narrow_sums || stored, ..self }
    }
}

/// Results that are exact in a mode. The LSE always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Whether out is exact.
    pub out: bool,
    /// Whether dq, dk, dv and dsink are exact.
    pub gradients: bool,
    /// Whether dv is exact. It is wherever all gradients are.
    pub dv: bool,
    /// Whether dk alone is exact: it is 0, because all queries are.
    pub zero_dk: bool,
}

/// Returns the largest number of keys in a sequence.
pub fn keys_max(mode: InputMode, dim: usize) -> usize {
    let codes = 1_usize << code_lanes(dim).min(24);
    match mode {
        // With this many keys, sums of values stay below 2²⁴.
        InputMode::UniformCount | InputMode::Endpoints => (1 << 24) / TABLE_MAX as usize,
        InputMode::Pairs => 2 * codes - 1,
        InputMode::Routing => codes,
        _ => 1 << 20,
    }
}

/// Checks a mode's preconditions on a problem, whatever the problem's own mode.
pub fn eligible(mode: InputMode, problem: &Problem) -> Result<(), Why> {
    if !mode.is_exact() {
        return Err(Why::Mode);
    }
    formats(problem)?;
    let most = keys_max(mode, problem.dims.qk);
    let keys = problem.sequences.iter().map(|sequence| sequence.kv.len).max().unwrap_or(0);
    if keys > most {
        return Err(Why::Keys { keys, most });
    }
    if is_uniform(mode) {
        return Ok(());
    }
    if problem.softmax.softcap.is_some() {
        return Err(Why::Softcap);
    }
    scale(mode, problem.softmax.scale)?;
    codes(mode, problem).into_iter().try_for_each(|code| amplitude(&code, problem.precision.q.format))
}

fn formats(problem: &Problem) -> Result<(), Why> {
    let exact = |quantity: &str, element: Element| {
        let wide = matches!(quantity, "p" | "out" | "gradients") && element.format == Format::F32;
        element.scaling == Scaling::None && (wide || matches!(element.format, Format::Bf16 | Format::Fp16))
    };
    match problem.precision.elements().into_iter().find(|(quantity, element)| !exact(quantity, *element)) {
        None => Ok(()),
        Some((quantity, element)) => Err(Why::Format { quantity, element }),
    }
}

/// Returns the scale that a mode needs and that is nearest to the given one; the given one where any will do.
pub fn fit_scale(mode: InputMode, scale: f32) -> f32 {
    match mode {
        InputMode::Staircase => std::f32::consts::LN_2,
        // The significand is cleared, and the power of two kept in the range of the usual scales.
        InputMode::Pairs => f32::from_bits(scale.to_bits() & f32::INFINITY.to_bits()).clamp(0.0625, 1.0),
        _ => scale,
    }
}

fn scale(mode: InputMode, got: f32) -> Result<(), Why> {
    let needs = match mode {
        InputMode::Staircase if got != std::f32::consts::LN_2 => "ln 2",
        InputMode::Pairs if got.to_bits() & 0x007f_ffff != 0 => "a power of two",
        _ => return Ok(()),
    };
    Err(Why::Scale { got, needs })
}

/// Returns the codes of each sequence that has keys.
fn codes(mode: InputMode, problem: &Problem) -> Vec<Code> {
    let plans = problem.sequences.iter().filter(|s| s.kv.len > 0 && has_codes(mode));
    plans.map(|sequence| ExactPlan::of(mode, problem, sequence).code).collect()
}

/// Checks that the numbers in queries have few enough bits for the format, and lie within its range.
fn amplitude(code: &Code, format: Format) -> Result<(), Why> {
    let held = [code.amplitude, code.amplitude * code.bias() as f64];
    match held.into_iter().find(|held| format.round(*held) != *held || held.abs() > format.max_finite()) {
        None => Ok(()),
        Some(held) => Err(Why::Amplitude(held)),
    }
}

/// Returns which results of an eligible problem are exact, given how partial results are merged and the choices of the
/// subject's arithmetic.
///
/// - *Weights* of 1 and ½ are numbers of every format, and rounding them before or after they are normalised gives the
///   same. Other modes have weights `w / l` of a known row sum `l`. Normalised before they are rounded to 16 bits, they
///   are `w · RN(1 / l)` for a power of two w: out is then known in one launch ([`normalised`]), and not where several
///   launches have sums of their own. If the order is unknown, out is not known either.
/// - *D* of an unrounded out, or of unrounded weights, is off by f32's errors, and so is `dP − D`. Where that is 0, or
///   has few bits, dS shows them: dq and dk are left to the envelope. dv has no part in this.
/// - *Out*, merged in 16 bits, is exact only where a partial out, weighted or not, is itself a number of the format.
///   That is so in `pairs` and `routing`, where a step's out is the row's, half of it, or of no weight. The errors
///   must also stay below half an ulp, so that each store rounds them away.
/// - *Out, merged by differences*, is off by an absolute error, that of the largest value that entered it. An out of 0
///   may then be a small number, and D with it: dq and dk are left to the envelope.
/// - *Gradients*: P is a power of two (2⁰, 2⁻¹) up to a relative error below half an ulp, so its rounding is exact. D
///   is exact, since it comes from an exact out. `dS = P · (dP − D)` is exact, since it is a multiple of ¼ of at most
///   dv quarters. All sums of such multiples are exact while they have no more bits than their format holds.
pub fn parts(mode: InputMode, problem: &Problem, merging: Merging, arithmetic: &Arithmetic) -> Parts {
    let coded = has_codes(mode);
    let precision = &problem.precision;
    let bits = |element: Element| element.format.precision_bits();
    let quarters = 2f64.powi(bits(precision.ds));
    let p_bits = if precision.p.format == Format::F32 { bits(precision.ds) } else { bits(precision.p) };
    let half_ulp = 2f64.powi(-p_bits.max(bits(precision.ds)) - 1);
    let weights = problem.sequences.iter().all(|sequence| {
        let plan = ExactPlan::of(mode, problem, sequence);
        let logit = plan.code_logit();
        backward_weight_error(mode, logit, plan.partial_lse(logit, plan.keys()), merging) < half_ulp
    });
    let out_half_ulp = 2f64.powi(-bits(precision.out) - 1);
    let steady = problem.sequences.iter().all(|sequence| {
        let plan = ExactPlan::of(mode, problem, sequence);
        let logit = plan.code_logit();
        let (relative, merged) = out_error(mode, logit, 2, plan.partial_lse(logit, plan.keys()), merging);
        relative + merged + difference_error(mode, merging) / least_out(mode) < out_half_ulp
    });
    let is_known = match arithmetic.weights {
        _ if coded || precision.p.format == Format::F32 => true,
        WeightRounding::BeforeNormalisation => true,
        WeightRounding::AfterNormalisation => merging.count == 0,
        WeightRounding::Unknown => false,
    };
    let out = is_known && (!merging.narrow_out || coded && steady);
    let backward = problem.pass == Pass::Backward;
    let dv = backward && out && coded && problem.dims.v as f64 <= quarters && weights;
    Parts {
        out,
        gradients: dv && arithmetic.delta == Delta::StoredOut && !merging.differs(),
        dv,
        zero_dk: backward && is_uniform(mode),
    }
}

/// Returns the relative error of a row's unrounded weight, where `logit` is the row's largest.
fn weight_error(mode: InputMode, logit: f64) -> f64 {
    let exponent = EXPONENTIAL + 4.0 * EPSILON * logit.abs();
    match mode {
        _ if is_uniform(mode) => 0.0,
        InputMode::Staircase => {
            let top = f64::from(LEVEL_MAX);
            exponent + (RESCALINGS + 1.0) * (EXPONENTIAL + EPSILON * (3.0 + 4.0 * top))
        }
        _ => exponent,
    }
}

/// Returns the relative error of a row sum over `active` keys with a weight.
fn sum_error(mode: InputMode, logit: f64, active: usize) -> f64 {
    if is_uniform(mode) { 0.0 } else { weight_error(mode, logit) + 2.0 * EPSILON * active as f64 }
}

/// Returns the error that merges add to an LSE.
///
/// `L' = L − ln σ(L − b)` rounds the difference, its logarithm and the result. The logarithm is 0 where b is that of
/// keys without a weight. Where L is, the roundings are those of its own magnitude, and that happens once: L' has a
/// weight.
fn merged_lse_error(lse: PartialLse, merging: Merging) -> f64 {
    let (roundings, once) = if merging.differs() { (5.0, 5.0 * EPSILON * lse.deepest) } else { (4.0, 0.0) };
    let each = EXPONENTIAL + LOGARITHM + EPSILON * (roundings * lse.weighing + 4.0);
    merging.count as f64 * each + once
}

/// Returns the absolute error that merges by differences add to an element of out.
pub(crate) fn difference_error(mode: InputMode, merging: Merging) -> f64 {
    let largest = match mode {
        InputMode::UniformCount => COUNT_VALUE,
        InputMode::Staircase => STAIR_VALUE,
        InputMode::Pairs => 1,
        InputMode::Routing => ROUTED_VALUE,
        _ => TABLE_MAX,
    };
    if merging.differs() { 1.02 * merging.count as f64 * DIFFERENCE * f64::from(largest) } else { 0.0 }
}

/// Returns the smallest magnitude of an out other than 0 of a coded mode.
fn least_out(mode: InputMode) -> f64 {
    if mode == InputMode::Pairs { 0.5 } else { 1.0 }
}

/// Returns the relative error that merges add to a weight.
fn merge_error(lse: PartialLse, merging: Merging) -> f64 {
    if merging.count == 0 {
        return 0.0;
    }
    let weighing = lse.weighing;
    let stored = EPSILON * (5.0 * weighing + 4.0) + LOGARITHM * (1.0 + weighing.ln_1p());
    let merged = match merging.by {
        MergeBy::Weights => merging.count as f64 * (EXPONENTIAL + EPSILON * (2.0 * weighing + 4.0)),
        MergeBy::Difference => merged_lse_error(lse, merging),
    };
    2.0 * (stored + merged)
}

/// Returns the relative error of an element of out before its rounding, and the error that merges add to it. In the
/// uniform modes the second counts relative to the largest value, because values cancel.
pub(crate) fn out_error(
    mode: InputMode,
    logit: f64,
    active: usize,
    partial: PartialLse,
    merging: Merging,
) -> (f64, f64) {
    let merged = merge_error(partial, merging);
    let terms = if is_uniform(mode) { 0.0 } else { weight_error(mode, logit) + ADDITION * active as f64 };
    (NORMALISED + sum_error(mode, logit, active) + terms, merged)
}

/// Returns the smallest and the largest factor by which weights that are normalised before they are rounded differ from
/// the exact ones, and the error of their sum relative to the largest value. `sum` is that of the weights, the largest
/// of which is 1.
///
/// The weights are `w / l` for powers of two w, so that all are rounded by the same factor `l · RN(1 / l)` where all
/// are normal numbers. Below the normal range a weight is off by twice half a smallest spacing at most. Near a tie each
/// may be rounded to either side. P in f32 has no such factor.
///
/// Products of 16-bit weights and values are integers in units of the smallest weight's last place. Sums below 2²⁴
/// units are exact. Others err with each addition. In the modes with values of one sign that error is relative to the
/// sum, and counted there ([`out_error`]).
pub(crate) fn normalised(
    mode: InputMode,
    problem: &Problem,
    (sum, logit, active): (f64, f64, usize),
    largest: f64,
) -> ((f64, f64), f64) {
    let format = problem.precision.p.format;
    let count = active as f64;
    let units = count * largest * 2f64.powi(format.precision_bits());
    let is_exact = !is_uniform(mode) || units < 2f64.powi(24);
    let added = if is_exact { 0.0 } else { ADDITION * count * largest };
    if format == Format::F32 {
        return ((1.0, 1.0), added);
    }
    let weight = 1.0 / sum;
    let has_steps = !is_uniform(mode) && !has_codes(mode);
    let is_subnormal = has_steps && weight * STEP_MIN < 2f64.powi(format.exponent_min());
    let floor = if is_subnormal { 2.0 * format.tiny_half() * count * largest } else { 0.0 };
    let error = NORMALISED + sum_error(mode, logit, active) + weight_error(mode, logit);
    let rounded = |error: f64| format.round(weight * (1.0 + error)) * sum;
    ((rounded(-error), rounded(error)), added + floor)
}

/// Returns the absolute error of an LSE of `active` keys with a weight.
pub(crate) fn lse_error(
    mode: InputMode,
    logit: f64,
    lse: f64,
    active: usize,
    partial: PartialLse,
    merging: Merging,
) -> f64 {
    let rounded = EPSILON * (4.0 * logit.abs() + lse.abs() + 4.0);
    let logarithm = LOGARITHM * (1.0 + (lse - logit).abs());
    sum_error(mode, logit, active) + rounded + logarithm + merged_lse_error(partial, merging)
}

/// Returns the relative error of the backward's weight `exp(s − LSE)` in `routing` and `pairs`.
pub(crate) fn backward_weight_error(
    mode: InputMode,
    logit: f64,
    partial: PartialLse,
    merging: Merging,
) -> f64 {
    let lse = logit + std::f64::consts::LN_2;
    let exponent = EPSILON * (3.0 * logit.abs() + 3.0 * lse.abs() + 2.0);
    EXPONENTIAL + exponent + lse_error(mode, logit, lse, 2, partial, merging)
}

/// Check that the lowest logit of a staircase is as exact as the highest: its level has 8 bits in every format.
const _: () = assert!(DEAD_LEVEL % 8 == 0 && DEAD_LEVEL / 8 > -128);
