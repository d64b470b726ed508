//! Identities of signs and powers of two.
//!
//! Negating an operand negates every product, sum and rounding, to nearest or toward zero. Doubling an operand
//! doubles them as long as nothing overflows or falls below the normal range. [`tame`] says where that is so: in
//! bf16, whose range is that of f32, where weights stay above e^-40 and no input is tiny. Elsewhere only signs are
//! asked for.

use seamproof_oracle::envelope::{DsFold, DsScale};
use seamproof_oracle::{Format, InputMode, Pass, ProblemFields, Quantity, TensorName};

use super::norms::Norms;
use super::twin::{Claim, Twin, TwinOrigin, everything};
use crate::finding::Relation;
use crate::ladder::evidence::{Evidence, Look};

/// Largest negative logarithm of a weight that is still far above the smallest normal number.
const LOG_WEIGHT_MIN: f64 = 40.0;
/// Magnitudes of inputs that are tame.
const TAME: std::ops::Range<f32> = 1.0 / 16_777_216.0..16_777_216.0;

/// Whether doubling a value or an output gradient doubles every number that comes from it.
fn tame(evidence: &Evidence<'_>) -> bool {
    let (problem, inputs) = (evidence.problem, evidence.inputs.values(evidence.problem));
    // Codes that have descales stay as they are.
    // So do codes of dS that have a power of two for each tile, and weights do not come from values.
    let scales_tiles = evidence.backend.declaration().arithmetic.ds_scale == DsScale::Tile;
    let bf16 = problem.precision.elements().iter().all(|(name, element)| {
        *name == "p"
            || *name == "ds" && scales_tiles
            || element.is_scaled()
            || matches!(element.format, Format::Bf16 | Format::F32)
    });
    let all = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout];
    let values = || all.into_iter().flatten().map(|x| x.abs()).filter(|&x| x != 0.0);
    let keys = problem.sequences.iter().map(|sequence| sequence.kv.len).max().unwrap_or(0);
    let spread = 2.0 * Norms::new(problem, &inputs).largest_logit(problem) + libm::log(keys as f64 + 1.0);
    bf16 && problem.mode != InputMode::Tiny && spread <= LOG_WEIGHT_MIN && values().all(|x| TAME.contains(&x))
}

/// Returns claims about every result, with these factors for some.
fn claims(evidence: &Evidence<'_>, factors: &[(TensorName, f32)]) -> Vec<Claim> {
    let factor = |tensor| factors.iter().find(|(name, _)| *name == tensor).map_or(1.0, |(_, factor)| *factor);
    everything(evidence).into_iter().map(|tensor| Claim { tensor, factor: factor(tensor) }).collect()
}

/// Asks about v times −2 (or −1). out, dq, dk and dsink get the same factor; dv and the statistics stay as they are.
/// Where v has descales, they are doubled and the codes are negated. So are given descales of what grows.
pub(super) fn linear_in_v(evidence: &Evidence<'_>) -> Option<Look> {
    use TensorName::{Dk, Dq, Dsink, Out};
    let factor = if tame(evidence) { -2.0 } else { -1.0 };
    let mut twin = Twin::of(evidence);
    match twin.inputs.scales.v.take() {
        Some(scales) => {
            twin.inputs.v.mapv_inplace(|v| -v);
            twin.inputs.scales.v = Some(scales.times(-factor));
        }
        None => twin.inputs.v.mapv_inplace(|v| factor * v),
    }
    twin.times_own(&[Quantity::Out, Quantity::Ds, Quantity::Dq, Quantity::Dk], -factor);
    let claims = claims(evidence, &[(Out, factor), (Dq, factor), (Dk, factor), (Dsink, factor)]);
    Some(twin.agrees(evidence, Relation::LinearInV, &claims))
}

/// Asks about dout times −2 (or −1). The gradients get the same factor; the forward stays as it is. Where dout has
/// descales, they are doubled and the codes are negated.
pub(super) fn linear_in_dout(evidence: &Evidence<'_>) -> Option<Look> {
    use TensorName::{Dk, Dq, Dsink, Dv};
    if evidence.problem.pass == Pass::Forward {
        return None;
    }
    let factor = if tame(evidence) { -2.0 } else { -1.0 };
    let mut twin = Twin::of(evidence);
    match twin.inputs.scales.dout.take() {
        Some(scales) => {
            twin.inputs.dout.mapv_inplace(|dout| -dout);
            twin.inputs.scales.dout = Some(scales.times(-factor));
        }
        None => twin.inputs.dout.mapv_inplace(|dout| factor * dout),
    }
    twin.times_own(&[Quantity::Ds, Quantity::Dq, Quantity::Dk, Quantity::Dv], -factor);
    let claims = claims(evidence, &[(Dq, factor), (Dk, factor), (Dv, factor), (Dsink, factor)]);
    Some(twin.agrees(evidence, Relation::LinearInDout, &claims))
}

/// Asks about 4q with a quarter of the scale. dq is quartered; everything else stays as it is. A factor of two would
/// not do: unfused attention multiplies q and k by the root of the scale each. Logits are sums of products of q and k,
/// which are never tiny. Gradients may be tiny, so dq and dk are asked about only where the case is tame.
///
/// Where q has descales, they are multiplied and the codes stay. Four times a subnormal code may be a normal one, by
/// which a tensor core aligns a sum in another way.
pub(super) fn scale_folding(evidence: &Evidence<'_>) -> Option<Look> {
    use TensorName::{Dk, Dq};
    let mut fields: ProblemFields = evidence.problem.clone().into();
    fields.softmax.scale /= 4.0;
    let mut twin = Twin::new(evidence, fields, TwinOrigin::same(evidence.problem))?;
    match twin.inputs.scales.q.take() {
        Some(scales) => twin.inputs.scales.q = Some(scales.times(4.0)),
        None => twin.inputs.q.mapv_inplace(|q| 4.0 * q),
    }
    let smaller: &[Quantity] = match evidence.backend.declaration().arithmetic.ds_fold {
        DsFold::Before => &[Quantity::Ds, Quantity::Dq],
        DsFold::After => &[Quantity::Dq],
        // A given descale of dS is for dS with the scale or without it.
        DsFold::Unknown if Quantity::Ds.is_given(&evidence.problem.precision) => return None,
        DsFold::Unknown => &[Quantity::Dq],
    };
    twin.times_own(smaller, 0.25);
    let largest = evidence.problem.precision.q.format.max_finite();
    if twin.inputs.q.iter().any(|&q| f64::from(q.abs()) > largest) {
        return None;
    }
    let mut claims = claims(evidence, &[(Dq, 0.25)]);
    if !tame(evidence) {
        claims.retain(|claim| !matches!(claim.tensor, Dq | Dk));
    }
    Some(twin.agrees(evidence, Relation::ScaleFolding, &claims))
}

/// Asks about −q with −k. dq and dk are negated; everything else stays as it is.
pub(super) fn negation(evidence: &Evidence<'_>) -> Option<Look> {
    let mut twin = Twin::of(evidence);
    twin.inputs.q.mapv_inplace(|q| -q);
    twin.inputs.k.mapv_inplace(|k| -k);
    let claims = claims(evidence, &[(TensorName::Dq, -1.0), (TensorName::Dk, -1.0)]);
    Some(twin.agrees(evidence, Relation::Negation, &claims))
}
