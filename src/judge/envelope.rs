//! Envelope: every element within the largest honest error of the exact answer.

use ndarray::{Array2, Array3};
use seamproof_oracle::envelope::Model;
use seamproof_oracle::{Format, Forward, Gradients, Problem, Saved, Side, blocked};

use super::compare::{View, Worst};
use super::{Evidence, Look, Ratio};
use crate::backend::{RankGradients, RankOutputs, TensorName};
use crate::layout::RankLayout;
use crate::verdict::{Check, Finding, Margin, number};

/// The rung: the forward, LSE first, then the backward on the out and lse that the subject returned.
pub(super) fn look(evidence: &Evidence<'_>, margin: &mut Margin) -> Look {
    let Evidence { backend, problem, layout, inputs, .. } = *evidence;
    let rank = evidence.first;
    let model = Model::new(problem, backend.accumulation(), backend.partition(problem));
    let answer = evidence.oracle(|| blocked::forward(problem, inputs, Some(&model)));
    let Some(bound) = &answer.bound else {
        return Look::Failed("the forward came without its envelope".into());
    };
    let compare = Comparison { problem, layout, ratio: evidence.judge.ratio };
    if let Some(finding) = forward(&compare, rank, &answer.exact, bound, margin) {
        return Some(finding).into();
    }
    let Some(gradients) = &rank.gradients else { return Look::Held };
    let Some(lse) = &rank.lse else {
        let why = "the subject hides its LSE, and end-to-end bounds of the backward are not there yet";
        return Look::Failed(why.into());
    };
    let saved = saved(problem, layout, rank, lse);
    let answer = evidence.oracle(|| blocked::backward(problem, inputs, &saved, Some(&model)));
    let Some(bound) = &answer.bound else {
        return Look::Failed("the backward came without its envelope".into());
    };
    backward(&compare, gradients, &answer.exact, bound, margin).into()
}

/// The subject's own results on real rows, as the oracle's backward takes them.
fn saved(problem: &Problem, layout: &RankLayout, rank: &RankOutputs, lse: &Array2<f32>) -> Saved {
    let mut saved = Saved {
        out: Array3::zeros(problem.out_shape()),
        lse: Array2::from_elem(problem.lse_shape(), f64::NEG_INFINITY),
    };
    let out = View::Rows(rank.out.view(), Side::Q);
    out.real(layout, |row, head, _| {
        saved.lse[[head, row]] = f64::from(lse[[head, row]]);
        for lane in 0..out.lanes() {
            saved.out[[row, head, lane]] = f64::from(rank.out[[row, head, lane]]);
        }
    });
    saved
}

fn forward(
    compare: &Comparison<'_>,
    rank: &RankOutputs,
    exact: &Forward,
    bound: &Forward,
    margin: &mut Margin,
) -> Option<Finding> {
    if let Some(lse) = &rank.lse {
        let (exact, bound) = (exact.lse.view(), bound.lse.view());
        let views = (View::Statistic(lse.view()), View::Statistic(exact), View::Statistic(bound));
        if let Some(finding) = compare.tensor(TensorName::Lse, views, &mut margin.lse) {
            return Some(finding);
        }
    }
    let views = rows(Side::Q, &rank.out, &exact.out, &bound.out);
    if let Some(finding) = compare.tensor(TensorName::Out, views, &mut margin.out) {
        return Some(finding);
    }
    let max_logit = rank.max_logit.as_ref()?;
    let (exact, bound) = (exact.max_logit.view(), bound.max_logit.view());
    let views = (View::Heads(max_logit.view()), View::Heads(exact), View::Heads(bound));
    compare.tensor(TensorName::MaxLogit, views, &mut margin.max_logit)
}

fn backward(
    compare: &Comparison<'_>,
    got: &RankGradients,
    exact: &Gradients,
    bound: &Gradients,
    margin: &mut Margin,
) -> Option<Finding> {
    let dq = rows(Side::Q, &got.dq, &exact.dq, &bound.dq);
    let dk = rows(Side::Kv, &got.dk, &exact.dk, &bound.dk);
    let dv = rows(Side::Kv, &got.dv, &exact.dv, &bound.dv);
    let dsink =
        (View::Heads(got.dsink.view()), View::Heads(exact.dsink.view()), View::Heads(bound.dsink.view()));
    compare
        .tensor(TensorName::Dv, dv, &mut margin.dv)
        .or_else(|| compare.tensor(TensorName::Dk, dk, &mut margin.dk))
        .or_else(|| compare.tensor(TensorName::Dq, dq, &mut margin.dq))
        .or_else(|| compare.tensor(TensorName::Dsink, dsink, &mut margin.dsink))
}

type Triple<'a> = (View<'a, f32>, View<'a, f64>, View<'a, f64>);

fn rows<'a>(side: Side, got: &'a Array3<f32>, exact: &'a Array3<f64>, bound: &'a Array3<f64>) -> Triple<'a> {
    (View::Rows(got.view(), side), View::Rows(exact.view(), side), View::Rows(bound.view(), side))
}

/// Compares results with exact values under their bounds.
struct Comparison<'a> {
    problem: &'a Problem,
    layout: &'a RankLayout,
    ratio: Ratio,
}

impl Comparison<'_> {
    /// Compares every real element; raises `margin` to the worst error ÷ bound.
    fn tensor(
        &self,
        tensor: TensorName,
        (got, exact, bound): Triple<'_>,
        margin: &mut f64,
    ) -> Option<Finding> {
        let precision = &self.problem.precision;
        let format = match tensor {
            TensorName::Out => Some(precision.out.format),
            TensorName::Dq | TensorName::Dk | TensorName::Dv => Some(precision.gradients.format),
            // An infinite statistic says that there is no key: it is no overflow.
            _ => None,
        };
        let what = "further from the exact value than rounding explains";
        let mut worst = Worst::new(Check::Envelope, tensor, what);
        got.real(self.layout, |row, head, place| {
            for lane in 0..got.lanes() {
                let (value, right, bound) = (
                    f64::from(got.at(row, head, lane)),
                    exact.at(row, head, lane),
                    bound.at(row, head, lane),
                );
                let ratio = (self.ratio)(value, right, bound, format);
                worst.compared();
                *margin = margin.max(ratio);
                if ratio > 1.0 {
                    worst.failed(ratio, |finding| {
                        finding.place = got.lane_place(place, lane);
                        finding.got = Some(number(value));
                        finding.expected = Some(number(right));
                        finding.bound = bound.is_finite().then_some(bound);
                        finding.ratio = ratio.is_finite().then_some(ratio);
                    });
                }
            }
        });
        worst.finding()
    }
}

/// Error ÷ bound; 0 for equal values (infinities too), infinite for NaN and for any error where none is allowed.
///
/// Where the format can overflow, an infinity stands for any value that rounds to it, so it is as far off as the exact
/// value lies below the format's threshold.
pub(super) fn error_ratio(got: f64, exact: f64, bound: f64, overflows: Option<Format>) -> f64 {
    if got == exact {
        return 0.0;
    }
    let got = overflows.map_or(got, |format| overflowed(got, exact, format));
    if got == exact {
        return 0.0;
    }
    let ratio = (got - exact).abs() / bound;
    // A NaN on either side is a failure: a comparison that NaN slips through is bug 210 of the field (cubecl 1070).
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

/// The value nearest to `exact` that rounds to the infinity `got`; `got` itself where it is finite.
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
