//! The envelope of the backward in tier W, from sums over pairs. It serves a reference that runs elsewhere and cannot
//! bring every pair here, as [`crate::envelope::RowEnvelope`] does for the forward.
//!
//! For a pair, let p be its weight and x = dP − D. Each error of [`Model::gradient_pair`] is at most
//! `px·p|x| + p·p + one`, a [`Majorant`], where the three coefficients are the same for all pairs of a sum. Three rules
//! give them. An error of an exponent grows with each of its quantities, so the largest of each are taken
//! ([`Extremes`]). A floor that holds for small numbers alone is added everywhere: `max(a, b) ≤ a + b`. A term of |x|
//! alone is a floor times the largest |x|. A bound is therefore never below that of [`crate::blocked::backward_of`].

use super::{DENOMINATOR_ERROR_MAX, Model, gradients};
use crate::Format;
use crate::envelope::constants::{EXP_ERROR, F32_ROUNDOFF};

/// The largest quantities among the pairs of a sum, or more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extremes {
    /// The largest magnitude of a logit.
    pub logit: f64,
    /// The largest magnitude of a saved LSE.
    pub lse: f64,
    /// The largest distance of a logit from the LSE of its row.
    pub distance: f64,
    /// The largest `Σ|q||k|`.
    pub a: f64,
    /// The largest `Σ|dout||v|`.
    pub b: f64,
    /// The largest `|dP − D|`, or `|dP|` where that is larger.
    pub x: f64,
    /// The largest error of a row's D.
    pub d_error: f64,
}

/// Coefficients that bound the error of any pair: `px·p|x| + p·p + one`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Majorant {
    /// Coefficient of `p|x|`.
    pub px: f64,
    /// Coefficient of p.
    pub p: f64,
    /// The part that does not shrink with the weight.
    pub one: f64,
}

impl Majorant {
    const UNBOUNDED: Majorant = Majorant { px: f64::INFINITY, p: f64::INFINITY, one: f64::INFINITY };

    fn new(px: f64, p: f64, one: f64) -> Majorant {
        Majorant { px, p, one }
    }

    fn times(self, factor: f64) -> Majorant {
        Majorant::new(self.px * factor, self.p * factor, self.one * factor)
    }

    fn plus(self, other: Majorant) -> Majorant {
        Majorant::new(self.px + other.px, self.p + other.p, self.one + other.one)
    }

    fn floor(one: f64) -> Majorant {
        Majorant::new(0.0, 0.0, one)
    }

    /// Returns the bound of a sum, from `Σ p|x|·m`, `Σ p·m` and `Σ m` over its pairs, where m are magnitudes.
    pub fn of(&self, [px, p, one]: [f64; 3]) -> f64 {
        // No pairs have no error, also where a pair's own would not be bounded.
        let term = |coefficient: f64, sum: f64| if sum == 0.0 { 0.0 } else { coefficient * sum };
        term(self.px, px) + term(self.p, p) + term(self.one, one)
    }
}

/// The majorants of a pair's errors in the three gradients, those of dk and dq without the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientMajorants {
    /// Errors of the coefficients of `|dout|` in dv.
    pub dv: Majorant,
    /// Errors of the coefficients of `|q|` in dk.
    pub dk: Majorant,
    /// Errors of the coefficients of `|k|` in dq.
    pub dq: Majorant,
}

impl Model {
    /// Returns the majorants of the pairs of a sum; `sums` is [`Model::gradient_sums`]. They are infinite where an
    /// exponent may be off by more than 1, and where dS has a factor for each tile: the largest dS of a tile is not among
    /// the extremes of a sum.
    pub fn gradient_majorants(&self, extremes: &Extremes, sums: (f64, f64)) -> GradientMajorants {
        let (by_query, by_key) = sums;
        let Some(weight) = self.weight_majorant(extremes).filter(|_| !self.scales_tiles()) else {
            let none = Majorant::UNBOUNDED;
            return GradientMajorants { dv: none, dk: none, dq: none };
        };
        let exact = Majorant::new(0.0, 1.0, 0.0);
        let (unit, least) = (most_lost(self.p), self.p_least);
        let rounded = |error: Majorant, exact: Majorant, (unit, floor): (f64, f64), g: f64, factor: f64| {
            let computed = exact.plus(error);
            let rounding = computed.times(unit).plus(Majorant::floor(floor));
            error.plus(rounding).plus(computed.plus(rounding).plus(Majorant::floor(factor)).times(g))
        };
        let by_query_in_dv = by_query + self.dv_roundings * F32_ROUNDOFF;
        let dv = rounded(weight, exact, (unit, least), by_query_in_dv, self.p_floor);

        let (ds_exact, ds) = (Majorant::new(1.0, 0.0, 0.0), self.ds_majorant(weight, extremes));
        let rounding = (most_lost(self.ds), self.logit_gradient_floor(0.0));
        let floor = self.ds_factor_floor(0.0);
        let of_ds = |g: f64| rounded(ds, ds_exact, rounding, g + self.dqk_roundings * F32_ROUNDOFF, floor);
        GradientMajorants { dv, dk: of_ds(by_query), dq: of_ds(by_key) }
    }

    /// Returns the majorant of the error of a recomputed weight; `None` where its exponent may be off by more than 1.
    fn weight_majorant(&self, extremes: &Extremes) -> Option<Majorant> {
        let &Extremes { logit, lse, distance, a, .. } = extremes;
        let eta =
            self.logit_error(a, logit) + F32_ROUNDOFF * (3.0 * lse + distance) + self.factor_in_exponent;
        let relative = (eta + eta * eta) * (1.0 + EXP_ERROR) + EXP_ERROR;
        (eta <= 1.0).then(|| Majorant::new(0.0, relative, self.accumulation.underflow()))
    }

    /// Returns the majorant of the error of the weight that dS, or D, is made of.
    fn ds_weight(&self, weight: Majorant) -> Majorant {
        if !self.may_round_ds_weights {
            return weight;
        }
        let computed = weight.plus(Majorant::new(0.0, 1.0, 0.0));
        weight.plus(computed.times(most_lost(self.p))).plus(Majorant::floor(self.p_least))
    }

    /// Returns the majorant of the error of dS before it is rounded, from that of the unrounded weight.
    fn ds_majorant(&self, weight: Majorant, extremes: &Extremes) -> Majorant {
        let &Extremes { logit, a, b, x, d_error, .. } = extremes;
        let underflow = self.accumulation.underflow();
        let Majorant { p: relative, one: floor, .. } = self.ds_weight(weight);
        // The error of x is `fixed + 3ε|x|`.
        let (fixed, of_x) = (self.dot_error(b) + d_error, 3.0 * F32_ROUNDOFF);
        let product = Majorant {
            px: relative + of_x * (1.0 + relative),
            p: (1.0 + relative) * fixed,
            one: floor * x * (1.0 + of_x) + floor * fixed + underflow,
        };
        let derivative_error = self.softcap.map_or(0.0, |cap| gradients::slope_error(self, cap, logit, a));
        // The derivative of the soft cap is 1 at most.
        let all = product.times(1.0 + derivative_error);
        Majorant { px: all.px + derivative_error + 2.0 * F32_ROUNDOFF, ..all }
    }

    /// Returns the error of `Σ P·dP` of a row over `keys` keys, from `Σ p|dP|` and `Σ p`. It is infinite where nothing
    /// is bounded.
    pub fn dots_error(&self, extremes: &Extremes, keys: usize, [magnitudes, weights]: [f64; 2]) -> f64 {
        let Some(weight) = self.weight_majorant(extremes) else { return f64::INFINITY };
        let underflow = self.accumulation.underflow();
        let Majorant { p: relative, one: floor, .. } = self.ds_weight(weight);
        let fixed = self.dot_error(extremes.b);
        let each = floor * extremes.x + floor * fixed + underflow;
        let errors = relative * magnitudes + (1.0 + relative) * fixed * weights + keys as f64 * each;
        self.weighted_dots_error(keys, magnitudes, errors)
    }

    /// Returns the most by which `Σ p` of a row, made with the LSE that a subject returned, differs from 1, given the
    /// bound of that LSE. It is infinite where nothing is bounded.
    pub fn mass_error(&self, lse_bound: f64) -> f64 {
        if lse_bound < DENOMINATOR_ERROR_MAX { lse_bound + lse_bound * lse_bound } else { f64::INFINITY }
    }
}

/// Returns the most that rounding to a format loses of a number, relative to it. A format that saturates may lose
/// nearly all, and no extreme says whether it does.
fn most_lost(format: Format) -> f64 {
    if format.saturates() { 1.0 } else { format.unit_roundoff() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::{
        Accumulation, Arithmetic, Delta, DsWeights, GradientPair, GroupSums, Partition, SoftCap,
        WeightRounding,
    };
    use crate::{Format, Precision, Problem, ProblemFields, Softmax};

    /// A generator of uniform draws from [0, 1).
    struct Draws(u64);

    impl Draws {
        fn unit(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }

        fn pick<T: Copy>(&mut self, of: &[T]) -> T {
            of[(self.unit() * of.len() as f64) as usize]
        }

        fn model(&mut self) -> Model {
            let arithmetic = Arithmetic {
                accumulation: self.pick(&[
                    Accumulation::F32Serial,
                    Accumulation::WgmmaTruncating,
                    Accumulation::Unknown,
                ]),
                weights: WeightRounding::Unknown,
                delta: Delta::StoredOut,
                group_sums: GroupSums::Unknown,
                soft_cap: SoftCap::Unknown,
                ds_weights: self.pick(&[DsWeights::Unrounded, DsWeights::Rounded]),
                ..Arithmetic::flash_attention(Accumulation::Unknown)
            };
            let softcap = self.pick(&[None, Some(30.0), Some(1.0)]);
            let fields = ProblemFields {
                softmax: Softmax { softcap, ..Softmax::scaled(self.pick(&[0.125, 1.0, 4.0])) },
                precision: Precision::uniform(self.pick(&[Format::Bf16, Format::Fp16, Format::F32])),
                ..ProblemFields::packed(&[(64, 64)], 64)
            };
            let problem = Problem::new(fields).expect("a problem");
            Model::new(&problem, arithmetic, Partition::single(64, 64))
        }
    }

    /// Every error of a pair is at most its majorant, which is hardly more for a pair near the extremes.
    #[test]
    fn no_pair_errs_by_more_than_its_majorant() {
        let (mut draws, mut near, mut tight) = (Draws(3), 0, 0);
        for _ in 0..20_000 {
            let model = draws.model();
            let least = draws.pick(&[0.0, 0.9]);
            let p = libm::exp(-draws.pick(&[8.0, 40.0]) * draws.unit());
            let mut below = |most: f64| most * (least + (1.0 - least) * draws.unit());
            let (a, b, d_error) = (100.0, 50.0, 0.01);
            let (logit, lse) = (below(20.0), below(25.0));
            let x = below(40.0);
            let derivative = model.softcap.map_or(1.0, |cap| 1.0 - (logit / cap).tanh().powi(2));
            let pair = GradientPair {
                logit,
                lse,
                lse_error: 0.0,
                p,
                x,
                derivative,
                a: below(a),
                b: below(b),
                d_error: below(d_error),
                ds_most: 0.0,
            };
            let extremes = Extremes { logit: 20.0, lse: 25.0, distance: 25.0, a, b, x: 40.0, d_error };
            let sums = model.gradient_sums(1000, 500);
            let (error, most) = (model.gradient_pair(&pair, sums), model.gradient_majorants(&extremes, sums));
            let of = |majorant: Majorant| majorant.of([p * x.abs(), p, 1.0]);
            let pairs = [
                (error.dv + error.p.most, of(most.dv)),
                (error.dk + error.ds.most, of(most.dk)),
                (error.dq + error.ds.most, of(most.dq)),
            ];
            for (error, most) in pairs {
                assert!(error <= most * (1.0 + 1e-12), "{error:e} {most:e}: {pair:?}");
                let ordinary = least > 0.0 && p > 1e-3 && model.softcap.is_none();
                near += usize::from(ordinary);
                tight += usize::from(ordinary && most <= 1.5 * error);
            }
            let (magnitude, error) = model.weighted_dot(&pair);
            let all = model.dots_error(&extremes, 1, [magnitude, p]);
            assert!(model.weighted_dots_error(1, magnitude, error) <= all * (1.0 + 1e-12), "{pair:?}");
        }
        assert!(near > 1000 && tight > near * 9 / 10, "{tight} of {near} are tight");
    }

    #[test]
    fn nothing_is_bounded_where_an_exponent_is_lost_and_nothing_is_wrong_without_pairs() {
        let model = Draws(1).model();
        let lost = Extremes { logit: 1e9, lse: 1e9, distance: 0.0, a: 0.0, b: 0.0, x: 0.0, d_error: 0.0 };
        let majorant = model.gradient_majorants(&lost, (0.0, 0.0)).dk;
        assert_eq!(majorant.of([1.0, 1.0, 1.0]), f64::INFINITY);
        assert_eq!(majorant.of([0.0; 3]), 0.0);
    }
}
