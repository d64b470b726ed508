//! Comparison of results with the exact answer under its bounds, element by element and tier by tier.

use ndarray::{Array1, Array2, Array3};
use seamproof_oracle::blocked::Answer;
use seamproof_oracle::sharding::RankLayout;
use seamproof_oracle::{Format, ForwardResults, Gradients, Problem, Saved, Side};

use super::compare::{ResultTensor, Worst, times_bound};
use crate::finding::{Check, Finding};
use crate::subject::{RankGradients, RankOutputs, TensorName};
use crate::verdict::{Margin, Tier};

/// Function that writes the error ÷ bound of each of some elements. It takes the results, the exact values, their
/// bounds, the format where they can overflow, and the place for the ratios.
pub type MeasureRatios = fn(&[f32], &[f64], &[f64], Option<Format>, &mut [f64]);

/// Compares the LSE and out in tier R.
pub(super) fn replayed_forward(
    compare: &Comparison<'_>,
    rank: &RankOutputs,
    answer: &Answer<ForwardResults>,
    margin: &mut Margin,
) -> Option<Finding> {
    let (exact, left) = (&answer.exact, &answer.bound.as_ref()?.worst);
    [TensorName::Lse, TensorName::Out]
        .into_iter()
        .find_map(|tensor| compare.tensor(tensor, Tier::R, forward_views(tensor, rank, exact, left)?, margin))
}

/// Compares the gradients in tier R.
pub(super) fn replayed_gradients(
    compare: &Comparison<'_>,
    got: &RankGradients,
    Answer { exact, bound }: &Answer<Gradients>,
    margin: &mut Margin,
) -> Option<Finding> {
    let left = &bound.as_ref()?.worst;
    gradients(
        compare,
        got,
        exact,
        (&[TensorName::Dv, TensorName::Dk, TensorName::Dq], &[(Tier::R, left)]),
        margin,
    )
}

/// Returns the subject's own results for the oracle's backward, which reads real rows alone. The exact LSE stands in
/// where the subject hides its own.
pub(super) fn saved(rank: &RankOutputs, exact: &Array2<f64>) -> Saved {
    let lse = rank.lse.as_ref().map_or_else(|| exact.clone(), |lse| lse.mapv(f64::from));
    Saved { out: rank.out.mapv(f64::from), lse }
}

/// Results of a forward that are compared, in order. The LSE is the sharpest observable of mask and scale.
pub(super) const FORWARD: [TensorName; 3] = [TensorName::Lse, TensorName::Out, TensorName::MaxLogit];
/// Results of a backward that are compared, in order.
pub(super) const BACKWARD: [TensorName; 4] =
    [TensorName::Dv, TensorName::Dk, TensorName::Dq, TensorName::Dsink];

/// Compares these tensors of a forward in tiers W and T.
pub(super) fn forward(
    compare: &Comparison<'_>,
    rank: &RankOutputs,
    answer: &Answer<ForwardResults>,
    tensors: &[TensorName],
    margin: &mut Margin,
) -> Option<Finding> {
    let exact = &answer.exact;
    let bounds = [
        (Tier::W, answer.bound.as_ref().map(|b| &b.worst)),
        (Tier::T, answer.bound.as_ref().map(|b| &b.dithered)),
    ];
    let look = |tensor: TensorName, margin: &mut Margin| {
        let mut tiers = bounds.iter().filter_map(|(tier, bound)| Some((*tier, (*bound)?)));
        tiers.find_map(|(tier, bound)| {
            compare.tensor(tensor, tier, forward_views(tensor, rank, exact, bound)?, margin)
        })
    };
    tensors.iter().find_map(|&tensor| look(tensor, margin))
}

/// Returns a tensor of a forward, its exact values and their bounds; `None` for a statistic that the subject hides.
pub(super) fn forward_views<'a>(
    tensor: TensorName,
    rank: &'a RankOutputs,
    exact: &'a ForwardResults,
    bound: &'a ForwardResults,
) -> Option<Triple<'a>> {
    Some(match tensor {
        TensorName::Lse => {
            let got = ResultTensor::Statistic(rank.lse.as_ref()?.view());
            (got, ResultTensor::Statistic(exact.lse.view()), ResultTensor::Statistic(bound.lse.view()))
        }
        TensorName::MaxLogit => heads(rank.max_logit.as_ref()?, &exact.max_logit, &bound.max_logit),
        _ => rows(Side::Q, &rank.out, &exact.out, &bound.out),
    })
}

/// Compares these gradients in tiers W and T.
pub(super) fn backward(
    compare: &Comparison<'_>,
    got: &RankGradients,
    Answer { exact, bound }: &Answer<Gradients>,
    tensors: &[TensorName],
    margin: &mut Margin,
) -> Option<Finding> {
    let bound = bound.as_ref()?;
    let bounds = [(Tier::W, &bound.worst), (Tier::T, &bound.dithered)];
    gradients(compare, got, exact, (tensors, &bounds), margin)
}

/// Compares these tensors, one after the other, each under these bounds.
fn gradients(
    compare: &Comparison<'_>,
    got: &RankGradients,
    exact: &Gradients,
    (tensors, bounds): (&[TensorName], &[(Tier, &Gradients)]),
    margin: &mut Margin,
) -> Option<Finding> {
    let looks =
        tensors.iter().flat_map(|&tensor| bounds.iter().map(move |&(tier, bound)| (tensor, tier, bound)));
    looks.into_iter().find_map(|(tensor, tier, bound)| {
        compare.tensor(tensor, tier, gradient_views(tensor, got, exact, bound), margin)
    })
}

/// Returns a gradient, its exact values and their bounds.
pub(super) fn gradient_views<'a>(
    tensor: TensorName,
    got: &'a RankGradients,
    exact: &'a Gradients,
    bound: &'a Gradients,
) -> Triple<'a> {
    match tensor {
        TensorName::Dq => rows(Side::Q, &got.dq, &exact.dq, &bound.dq),
        TensorName::Dk => rows(Side::Kv, &got.dk, &exact.dk, &bound.dk),
        TensorName::Dv => rows(Side::Kv, &got.dv, &exact.dv, &bound.dv),
        _ => heads(&got.dsink, &exact.dsink, &bound.dsink),
    }
}

/// A result, its exact values, and their bounds.
pub(super) type Triple<'a> = (ResultTensor<'a, f32>, ResultTensor<'a, f64>, ResultTensor<'a, f64>);

fn rows<'a>(side: Side, got: &'a Array3<f32>, exact: &'a Array3<f64>, bound: &'a Array3<f64>) -> Triple<'a> {
    (
        ResultTensor::Rows(got.view(), side),
        ResultTensor::Rows(exact.view(), side),
        ResultTensor::Rows(bound.view(), side),
    )
}

fn heads<'a>(got: &'a Array1<f32>, exact: &'a Array1<f64>, bound: &'a Array1<f64>) -> Triple<'a> {
    (ResultTensor::Heads(got.view()), ResultTensor::Heads(exact.view()), ResultTensor::Heads(bound.view()))
}

/// Comparison of results with exact values under their bounds.
pub(super) struct Comparison<'a> {
    pub(super) problem: &'a Problem,
    pub(super) layout: &'a RankLayout,
    pub(super) ratio: MeasureRatios,
}

impl Comparison<'_> {
    /// Compares every real element that the tier bounds, and raises the tier's margin to the worst error ÷ bound.
    fn tensor(
        &self,
        tensor: TensorName,
        tier: Tier,
        (got, exact, bound): Triple<'_>,
        margin: &mut Margin,
    ) -> Option<Finding> {
        let format = self.overflows(tensor);
        let largest = self.largest(tier, format, (got, exact, bound));
        if let Some(margin) = margin.tier_mut(tier).of_mut(tensor) {
            *margin = margin.max(largest);
        }
        (largest > 1.0).then(|| self.finding(tensor, tier, format, (got, exact, bound)))?
    }

    /// Returns the format in which a tensor can overflow. One that saturates has no infinity.
    pub(super) fn overflows(&self, tensor: TensorName) -> Option<Format> {
        let precision = &self.problem.precision;
        let format = match tensor {
            TensorName::Out => precision.out.format,
            TensorName::Dq | TensorName::Dk | TensorName::Dv => precision.gradients.format,
            // An infinite statistic says that there is no key; it is not an overflow.
            _ => return None,
        };
        Some(format).filter(|format| !format.saturates())
    }

    /// Returns the largest error ÷ bound of all real elements that the tier bounds.
    fn largest(&self, tier: Tier, format: Option<Format>, (got, exact, bound): Triple<'_>) -> f64 {
        let (mut largest, mut ratios) = ([0.0f64; LANES], [0.0; CHUNK]);
        let mut look = |got: &[f32], exact: &[f64], bound: &[f64]| {
            let chunks = got.chunks(CHUNK).zip(exact.chunks(CHUNK).zip(bound.chunks(CHUNK)));
            for (got, (exact, bound)) in chunks {
                let unbounded = |all: bool, bound: &f64| all & (*bound == f64::INFINITY);
                if tier == Tier::T && bound.iter().fold(true, unbounded) {
                    continue;
                }
                let ratios = &mut ratios[..got.len()];
                (self.ratio)(got, exact, bound, format, ratios);
                if tier != Tier::W {
                    let silent = |(ratio, bound): (&mut f64, &f64)| {
                        *ratio = if *bound == f64::INFINITY { 0.0 } else { *ratio };
                    };
                    ratios.iter_mut().zip(bound).for_each(silent);
                }
                for ratios in ratios.chunks(LANES) {
                    for (largest, ratio) in largest.iter_mut().zip(ratios) {
                        *largest = if *ratio > *largest { *ratio } else { *largest };
                    }
                }
            }
        };
        if let (Some(all), Some(right), Some(most)) = (got.flat(), exact.flat(), bound.flat()) {
            got.every_stretch(self.layout, |at| {
                look(&all[at.clone()], &right[at.clone()], &most[at]);
                true
            });
        } else {
            got.real(self.layout, |row, head, _| {
                let [exact, bound] = [&exact, &bound].map(|of| of.lane(row, head).to_vec());
                look(&got.lane(row, head).to_vec(), &exact, &bound);
            });
        }
        largest.into_iter().fold(0.0, f64::max)
    }

    /// Returns the finding about the elements past their bounds.
    fn finding(
        &self,
        tensor: TensorName,
        tier: Tier,
        format: Option<Format>,
        (got, exact, bound): Triple<'_>,
    ) -> Option<Finding> {
        let mut worst = Worst::new(Check::Envelope, tensor, wording(tier));
        got.real(self.layout, |row, head, place| {
            let right = exact.lane(row, head).into_iter().zip(bound.lane(row, head));
            for (lane, (&value, (&right, &bound))) in got.lane(row, head).into_iter().zip(right).enumerate() {
                if tier != Tier::W && bound == f64::INFINITY {
                    continue;
                }
                let mut ratio = [0.0];
                (self.ratio)(&[value], &[right], &[bound], format, &mut ratio);
                let [ratio] = ratio;
                worst.compared();
                if ratio > 1.0 {
                    let (place, values) = (got.lane_place(place, lane), [f64::from(value), right]);
                    worst.past_bound(place, ratio, values, bound.is_finite().then_some(bound));
                }
            }
        });
        worst.finding()
    }
}

/// The words for an error past tier R's bound.
const REPLAYED: &str =
    "numerics changed since the profile was locked: further from the replayed value than near-ties explain";

impl Finding {
    /// Whether a result is only not what a replay of the subject's roundings gives.
    pub fn is_of_replay(&self) -> bool {
        self.check == Check::Envelope && self.what.contains(REPLAYED)
    }
}

/// Returns the words for an error past a tier's bound.
pub fn wording(tier: Tier) -> &'static str {
    match tier {
        Tier::W => "further from the exact value than rounding explains",
        Tier::T => "further from the exact value than the roundings of dithered inputs explain (tier T)",
        Tier::R => REPLAYED,
    }
}

/// Number of elements whose ratios are computed together.
const CHUNK: usize = 128;
/// Number of running maxima side by side, so that none waits for another.
const LANES: usize = 8;

/// Writes the error ÷ bound of each element: [`error_ratio`], without a branch where nothing overflows.
pub fn error_ratios(got: &[f32], exact: &[f64], bound: &[f64], overflows: Option<Format>, to: &mut [f64]) {
    if overflows.is_some() && got.iter().fold(false, |any, got| any | got.is_infinite()) {
        return each_ratio(got, exact, bound, to, |got, exact, bound| {
            error_ratio(got, exact, bound, overflows)
        });
    }
    each_ratio(got, exact, bound, to, |got, exact, bound| {
        let ratio = times_bound((got - exact).abs(), bound);
        if got == exact { 0.0 } else { ratio }
    });
}

/// Writes a ratio for each element.
#[inline(always)]
pub(super) fn each_ratio(
    got: &[f32],
    exact: &[f64],
    bound: &[f64],
    to: &mut [f64],
    ratio: impl Fn(f64, f64, f64) -> f64,
) {
    let elements = got.iter().zip(exact).zip(bound);
    for (to, ((&got, &exact), &bound)) in to.iter_mut().zip(elements) {
        *to = ratio(f64::from(got), exact, bound);
    }
}

/// Returns error ÷ bound: 0 for equal values (infinities too), infinite for NaN and for any error where none is
/// allowed.
///
/// Where the format can overflow, an infinity stands for any value that rounds to it. It is therefore as far off as
/// the exact value lies below the format's threshold.
pub(super) fn error_ratio(got: f64, exact: f64, bound: f64, overflows: Option<Format>) -> f64 {
    if got == exact {
        return 0.0;
    }
    let overflows = overflows.filter(|_| got.is_infinite());
    let got = overflows.map_or(got, |format| overflowed(got, exact, format));
    if got == exact {
        return 0.0;
    }
    times_bound((got - exact).abs(), bound)
}

/// Returns the value nearest to `exact` that rounds to the infinity `got`; `got` itself where it is finite.
fn overflowed(got: f64, exact: f64, format: Format) -> f64 {
    let threshold = format.max_finite() + format.half_spacing(format.max_finite());
    match got {
        f64::INFINITY if exact.is_finite() => exact.max(threshold),
        f64::NEG_INFINITY if exact.is_finite() => exact.min(-threshold),
        _ => got,
    }
}

#[cfg(test)]
mod tests {
    use super::error_ratio;
    use seamproof_oracle::Format;

    #[test]
    fn nothing_slips_through_the_ratio() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let ratio = |got, exact, bound| error_ratio(got, exact, bound, None);
        assert_eq!(ratio(-inf, -inf, 0.0), 0.0);
        assert_eq!(ratio(1.0, 1.0, 0.0), 0.0);
        assert_eq!(ratio(1.5, 1.0, 1.0), 0.5);
        for (got, exact, bound) in [
            (nan, 1.0, 1.0),
            (1.0, nan, 1.0),
            (1.0, 1.0 + 1e-9, 0.0),
            (inf, 1.0, 1.0),
            (-inf, 1.0, 1.0),
            (1.0, -inf, 0.0),
            (1.0, 2.0, nan),
            (inf, -inf, inf),
        ] {
            assert!(ratio(got, exact, bound) > 1.0, "{got} {exact} {bound}");
        }
    }

    #[test]
    fn an_overflow_is_right_where_the_exact_value_may_overflow() {
        let ratio = |got, exact, bound| error_ratio(got, exact, bound, Some(Format::Fp16));
        assert_eq!(ratio(f64::INFINITY, 71_146.0, 16.0), 0.0);
        assert_eq!(ratio(f64::INFINITY, 65_512.0, 16.0), 0.5);
        assert!(ratio(f64::INFINITY, 65_000.0, 16.0) > 1.0);
        assert!(ratio(f64::NEG_INFINITY, 71_146.0, 16.0) > 1.0);
        assert!(ratio(65_504.0, 71_146.0, 16.0) > 1.0);
    }
}
