//! Sums of the matrix unit in FP8 whose parts a replay makes bit by bit: what their bounds keep, and the numbers of a
//! backward's tiles, each of which has a factor of its dS.

use std::num::NonZeroUsize;

use super::{Model, factor, rounding};
use crate::envelope::accumulation::Accumulation;
use crate::envelope::arithmetic::{DsFold, DsScale, DsWeights};
use crate::envelope::constants::F32_ROUNDOFF;
use crate::envelope::model::gradients::GradientPair;
use crate::envelope::profile::{NumericProfile, TileFactor};
use crate::{Format, Precision, Problem, Quantity};

/// Sums of the matrix unit in FP8 that a replay makes bit by bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The number of steps after which a sum is promoted; `None` for never.
    pub after: Option<NonZeroUsize>,
    /// The format of weights.
    pub p: Format,
    /// The format of logit gradients.
    pub ds: Format,
}

/// A pair of a tile in the backward, whose weight is replayed.
#[derive(Clone, Copy, Debug)]
pub struct TilePair {
    /// The rounded weight.
    pub p: f64,
    /// How far another right weight may be from it: 0 apart from near-ties.
    pub p_left: f64,
    /// The logit gradient before it is rounded, with its sign.
    pub ds: f64,
    /// The error of that.
    pub ds_error: f64,
}

/// A tile of the backward, whose dS has one factor.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedTile<'a> {
    model: &'a Model,
    /// The factor; `None` where its largest magnitude leaves more than one.
    pub factor: Option<f64>,
    /// The largest magnitude of dS, its error included.
    most: f64,
    /// Whether the tile's sums for dk are its own. Those with a given factor may pass from tile to tile where they are
    /// never promoted.
    pub has_own_dk: bool,
}

/// The way in which a tile's factor of dS comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DsFactor {
    /// From the tile's largest magnitude.
    OfTile(TileFactor),
    /// From the given descale of dS.
    Given,
}

impl Model {
    /// Returns the model of a replay of the matrix unit's sums in FP8, where the subject declares them and each head of
    /// a sequence has one descale; the same model elsewhere.
    pub fn replaying_sums(self, problem: &Problem) -> Model {
        let Precision { q, k, v, p, ds, .. } = problem.precision;
        let is_told = [q, k, v].iter().all(|of| of.format.saturates() && !of.scaling.is_of_rows());
        match self.accumulation {
            Accumulation::WgmmaFp8 { promoted_after }
                if self.is_declared && is_told && p.format.saturates() =>
            {
                let promotion = Promotion { after: promoted_after, p: p.format, ds: ds.format };
                Model { promotion: Some(promotion), products_qk: 0.0, ..self }
            }
            _ => self,
        }
    }

    /// Returns how the matrix unit's sums are promoted, where they are replayed.
    pub fn promotion(&self) -> Option<Promotion> {
        self.promotion
    }

    /// Returns the model of a replay of the backward's sums too, and the way in which factors of dS come about, where they
    /// are given, or where each tile has one and the profile knows its rule; `None` elsewhere.
    pub fn replaying_gradients(
        self,
        problem: &Problem,
        profile: &NumericProfile,
    ) -> Option<(Model, DsFactor)> {
        let Precision { dout, ds, .. } = problem.precision;
        let is_told = dout.format.saturates() && !dout.scaling.is_of_rows() && ds.format.saturates();
        let rounds_codes = profile.rounds_weights && !profile.scales_queries;
        let factor = self.ds_factor(problem, profile)?;
        let model = self.replaying_sums(problem);
        let is_replayed = model.promotion.is_some() && is_told && rounds_codes;
        is_replayed.then_some((Model { products_v: 0.0, ..model }, factor))
    }

    /// Returns the way in which factors of dS come about, where the profile knows it.
    fn ds_factor(&self, problem: &Problem, profile: &NumericProfile) -> Option<DsFactor> {
        match profile.tile_factor {
            None => {
                let is_given = self.ds_scale == DsScale::None && Quantity::Ds.is_given(&problem.precision);
                is_given.then_some(DsFactor::Given)
            }
            Some(rule) => {
                let is_after = self.ds_fold == DsFold::After && !profile.scales_logit_gradients;
                (self.ds_scale == DsScale::Tile && is_after).then_some(DsFactor::OfTile(rule))
            }
        }
    }

    /// Returns twice the error of some steps of the matrix unit: how far two sums of nearly the same products may be
    /// apart, relative to the sum of magnitudes.
    pub fn apart(&self, steps: usize) -> f64 {
        2.0 * Accumulation::unit_steps(steps)
    }

    /// Returns `g` of dv and of dk for `queries` rows in all, of every query head of the group, whose sums are replayed.
    /// That of dk is in pieces of a tile at most where tiles have factors of their own. The others are where they are
    /// promoted.
    pub fn replayed_query_sums(&self, queries: usize) -> [f64; 2] {
        let tile = self.partition.q_tile;
        let known = self.accumulation.grouped_promotions(queries, self.group, tile);
        let of_sums = |is_known: bool| match is_known || self.is_promoted() {
            true => known,
            false => self.accumulation.grouped_products(queries, self.group, tile),
        };
        [false, self.scales_tiles()].map(|is_known| {
            of_sums(is_known) + self.sum_error() + self.heads_error() + self.gradient_roundings()
        })
    }

    /// Whether the matrix unit's sums are promoted.
    fn is_promoted(&self) -> bool {
        self.promotion.is_some_and(|promotion| promotion.after.is_some())
    }

    /// Returns `g` of dq for `keys` keys, whose sums are replayed.
    pub fn replayed_key_sum(&self, keys: usize) -> f64 {
        let own = self.accumulation.tiled_promotions(keys, self.intervals, self.partition.kv_tile);
        own + self.sum_error() + self.gradient_roundings()
    }

    /// Returns the error of the factors that a gradient takes at the end.
    fn gradient_roundings(&self) -> f64 {
        F32_ROUNDOFF * self.dv_roundings.max(self.dqk_roundings)
    }

    /// Returns one pair of a tile: its rounded weight, and its logit gradient before that is rounded.
    #[inline(always)]
    pub fn replayed_tile_pair(&self, profile: &NumericProfile, pair: &GradientPair) -> TilePair {
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let (p, p_left) = self.replayed_p(profile, pair.p, p_error);
        let (ds, ds_error) = match profile.ds_weights {
            DsWeights::Rounded => self.ds_errors(pair, p, p_left),
            DsWeights::Unrounded | DsWeights::Unknown => (ds, ds_error),
        };
        let ds_error = ds_error + self.given_factor_error(profile, ds + ds_error);
        let ds_error = ds_error + self.accumulation.underflow();
        TilePair { p, p_left, ds: ds.copysign(pair.x), ds_error }
    }

    /// Returns the error that a given scale brings to a logit gradient of this magnitude before it is rounded: the scale is
    /// a reciprocal that was rounded, and the products with it and with the softmax's scale are.
    #[inline(always)]
    fn given_factor_error(&self, profile: &NumericProfile, ds: f64) -> f64 {
        if self.scales_tiles() {
            return 0.0;
        }
        let (folded, roundings) = if profile.scales_logit_gradients { (self.scale, 3.0) } else { (1.0, 2.0) };
        let underflow = self.accumulation.underflow() * (1.0 + self.ds_descale) / folded;
        roundings * F32_ROUNDOFF * ds + underflow
    }

    /// Returns a tile whose largest magnitude of dS lies in a range.
    pub fn replayed_tile(
        &self,
        (rule, profile): (DsFactor, &NumericProfile),
        [least, most]: [f64; 2],
    ) -> ReplayedTile<'_> {
        let folded = if profile.scales_logit_gradients { self.scale } else { 1.0 };
        let factor = match rule {
            DsFactor::Given => Some(folded / self.ds_descale),
            DsFactor::OfTile(rule) => {
                let [of_least, of_most] = [least, most].map(|amax| rule.of(amax, self.ds));
                (of_least == of_most).then_some(of_most)
            }
        };
        let has_own_dk = rule != DsFactor::Given || self.is_promoted();
        ReplayedTile { model: self, factor, most, has_own_dk }
    }

    /// Returns the coefficient of an error that `g` makes of a weight that may be another one by `left`.
    #[inline(always)]
    pub fn replayed_weight_error(&self, g: f64, p: f64, left: f64) -> f64 {
        left + g * factor(p + left, self.p_floor)
    }

    /// Returns how far apart two right sums of so many steps may be by their cuts, relative to the magnitude of a
    /// factor of the weight.
    #[inline(always)]
    pub fn weight_cuts(&self, steps: usize, p: f64, left: f64) -> f64 {
        let of = |p| factor(p, self.p_floor);
        Accumulation::unit_steps(steps) * (of(p) + of(p + left))
    }
}

impl ReplayedTile<'_> {
    /// Returns a rounded logit gradient, and how far another right one may be from it. Without a known factor it is not
    /// rounded, and the whole rounding counts.
    #[inline(always)]
    pub fn rounded(&self, ds: f64, error: f64) -> (f64, f64) {
        let format = self.model.ds;
        let Some(factor) = self.factor else {
            let floor = self.model.logit_gradient_floor(self.most);
            return (ds, error + rounding(format, ds.abs() + error, floor, f64::INFINITY).most);
        };
        let rounded = format.round(ds * factor);
        let apart = |other: f64| (format.round(other * factor) - rounded).abs();
        (rounded / factor, apart(ds + error).max(apart(ds - error)) / factor)
    }

    /// Returns the coefficient of an error that `g` makes of a logit gradient that may be another one by `left`.
    #[inline(always)]
    pub fn error(&self, g: f64, ds: f64, left: f64) -> f64 {
        left + g * factor(ds.abs() + left, self.floor())
    }

    /// Returns how far apart two right sums of so many steps may be by their cuts, relative to the magnitude of a
    /// factor of the logit gradient.
    #[inline(always)]
    pub fn cuts(&self, steps: usize, ds: f64, left: f64) -> f64 {
        let of = |ds| factor(ds, self.floor());
        Accumulation::unit_steps(steps) * (of(ds.abs()) + of(ds.abs() + left))
    }

    /// Returns the least magnitude that a logit gradient other than 0 counts as in the unit's steps.
    #[inline(always)]
    fn floor(&self) -> f64 {
        match self.factor {
            Some(factor) => self.model.ds_floor / factor,
            None => self.model.ds_factor_floor(self.most),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemFields;
    use crate::envelope::{Arithmetic, Partition};

    fn profile() -> NumericProfile {
        NumericProfile { tile_factor: Some(TileFactor::Largest), ..NumericProfile::of_tests() }
    }

    fn model() -> Model {
        let mut fields = ProblemFields::packed(&[(4, 4)], 16);
        fields.precision.p = Format::E4m3.into();
        fields.precision.ds = Format::E4m3.into();
        let accumulation = Accumulation::WgmmaFp8 { promoted_after: None };
        let arithmetic = Arithmetic { ds_scale: DsScale::Tile, ..Arithmetic::flash_attention(accumulation) };
        Model::new(&Problem::new(fields).expect("a problem"), arithmetic, Partition::single(4, 4))
    }

    #[test]
    fn a_tile_near_a_border_has_no_factor_and_its_roundings_count_in_full() {
        let model = model();
        let of = |amax| model.replayed_tile((DsFactor::OfTile(TileFactor::Largest), &profile()), amax);
        assert_eq!(of([1.74, 1.75]).factor, Some(256.0));
        assert_eq!(of([1.76, 1.77]).factor, Some(128.0));
        // Zeros have the factor 1, so that a tile of rounding errors has none.
        assert_eq!(of([0.0, 1e-9]).factor, None);
        let border = of([1.749, 1.751]);
        assert_eq!(border.factor, None);
        // The rounded numbers under both factors are within what is left.
        for step in 0..1_000 {
            let ds = 1.751 - 0.001_751 * f64::from(step);
            let (value, left) = border.rounded(ds, 1e-7);
            for factor in [128.0, 256.0] {
                let rounded = Format::E4m3.round(ds * factor) / factor;
                assert!((rounded - value).abs() <= left, "{ds} becomes {rounded}");
            }
        }
    }

    #[test]
    fn a_near_tie_counts_in_full_and_may_have_another_sign() {
        let model = model();
        let rule = DsFactor::OfTile(TileFactor::Largest);
        let profile = profile();
        let tile = model.replayed_tile((rule, &profile), [1.75, 1.75]);
        let tiny = 2.0 * Format::E4m3.tiny_half() / 256.0;
        assert_eq!(tile.rounded(1.0, 1e-6), (1.0, 0.0));
        assert_eq!(tile.rounded(-1.062_5, 1e-6), (-1.0, 0.125));
        assert_eq!(tile.rounded(0.1 * tiny, 2.5 * tiny), (0.0, 3.0 * tiny));
    }

    #[test]
    fn a_sum_that_is_known_keeps_the_errors_of_f32_alone() {
        let known = model().replayed_query_sums(4_096);
        let (whole, _) = model().gradient_sums(4_096, 64);
        // Sums of dv that are never promoted are not known.
        assert!(known[0] > 0.5 * whole && known[1] < 0.01 * whole, "{known:?} and {whole}");
        assert!(model().replayed_key_sum(64) < 1e-5);
    }
}
