//! Choices of honest subjects: none costs more than its bound.

use crate::common::plain;

use seamproof_oracle::envelope::{
    Accumulation, Arithmetic, Delta, DsFold, DsScale, DsWeights, EXP_ERROR, GradientPair, GroupSums,
    KeyOrder, Model, NumericProfile, Partition, RowStatistics, WeightRounding,
};
use seamproof_oracle::{Element, Format, Problem, Scaling};

/// A subject may round dS times the scale. Kernels in bf16 were 1.69 times over their bound with a scale of 1/2 where
/// dS was all but 0, and 9 times with a scale of 1/1024 where subnormals are flushed.
#[test]
fn a_logit_gradient_may_be_scaled_before_it_is_rounded() {
    for (format, scale) in
        [(Format::Bf16, 0.5), (Format::Bf16, 1.0 / 1024.0), (Format::Fp16, 0.088), (Format::Fp16, 2.0)]
    {
        let mut fields = plain(&[(1, 1)], 1);
        fields.precision.ds = format.into();
        fields.softmax.scale = scale;
        let problem = Problem::new(fields).expect("a legal problem");
        let [kept, flushed] = [Accumulation::F32Serial, Accumulation::Unknown]
            .map(Arithmetic::flash_attention)
            .map(|arithmetic| Model::new(&problem, arithmetic, Partition::single(1, 1)));
        // The numbers go from those that vanish to ordinary ones, a quarter of a binade apart.
        for step in 0..160 {
            let ds = format.tiny_half() / 8.0 * f64::exp2(f64::from(step) / 4.0);
            let pair = GradientPair { x: ds, ..GradientPair::of_weight(0.0, 0.0, 1.0, 0.0) };
            let most = |model: &Model| model.gradient_pair(&pair, (0.0, 0.0)).ds.most;
            let scale = f64::from(scale);
            let flush = |value: f64| if value < f64::from(f32::MIN_POSITIVE) { 0.0 } else { value };
            let rounded = |value: f64| (format.round(value * scale) / scale - ds).abs();
            assert!((format.round(ds) - ds).abs() <= most(&kept), "{format}, scale {scale}: {ds}");
            assert!(rounded(ds) <= most(&kept), "{format}, scale {scale}: {ds} scaled");
            assert!(
                rounded(flush(ds * scale) / scale) <= most(&flushed),
                "{format}, scale {scale}: {ds} flushed"
            );
        }
    }
}

/// Returns the model of a subject in FP8 with these choices, at a softmax scale.
fn in_fp8(format: Format, scale: f32, ds_scale: DsScale, ds_fold: DsFold) -> Model {
    let mut fields = plain(&[(1, 1)], 1);
    fields.precision.ds = format.into();
    fields.softmax.scale = scale;
    let accumulation = Accumulation::WgmmaFp8 { promoted_after: None };
    let arithmetic = Arithmetic { ds_scale, ds_fold, ..Arithmetic::flash_attention(accumulation) };
    Model::new(&Problem::new(fields).expect("a problem"), arithmetic, Partition::single(1, 1))
}

/// Returns the bound of rounding a dS where the largest of its tile is `most`.
fn rounding_of(model: &Model, ds: f64, most: f64) -> f64 {
    let pair = GradientPair { x: ds, ds_most: most, ..GradientPair::of_weight(0.0, 0.0, 1.0, 0.0) };
    model.gradient_pair(&pair, (0.0, 0.0)).ds.most
}

/// A factor of a tile loses no more of any dS than its bound, whichever power of two it is within its rule, and half of
/// the bound somewhere.
#[test]
fn a_tiles_factor_leaves_a_floor_below_its_largest_number() {
    for format in [Format::E4m3, Format::E5m2] {
        let model = in_fp8(format, 0.25, DsScale::Tile, DsFold::After);
        let mut nearest = 0.0f64;
        for most in [1e-9, 0.3, 1.0, 7e5] {
            let powers = (-200..200).map(|exponent| f64::exp2(f64::from(exponent)));
            let brings =
                |power: &f64| most * power <= format.max_finite() && most * power > format.max_finite() / 4.0;
            let factors: Vec<f64> = powers.filter(brings).collect();
            assert_eq!(factors.len(), 2, "{format}: {most}");
            for (factor, step) in
                factors.into_iter().flat_map(|factor| (0..240).map(move |step| (factor, step)))
            {
                let ds = most * f64::exp2(-f64::from(step) / 8.0);
                let off = (format.round(ds * factor) / factor - ds).abs();
                let bound = rounding_of(&model, ds, most);
                assert!(off <= bound * (1.0 + 1e-12), "{format}: {ds} of {most} times {factor}");
                nearest = nearest.max(off / bound);
            }
        }
        assert!(nearest > 0.5, "{format}: {nearest}");
    }
}

/// Without a factor a dS past the largest number saturates, before or after it is multiplied by the softmax's scale.
#[test]
fn a_logit_gradient_without_a_factor_may_saturate() {
    let format = Format::E4m3;
    for (scale, fold) in
        [(0.25f32, DsFold::Before), (0.25, DsFold::After), (4.0, DsFold::Before), (4.0, DsFold::Unknown)]
    {
        let model = in_fp8(format, scale, DsScale::None, fold);
        let folded = if fold == DsFold::After { 1.0 } else { f64::from(scale) };
        for ds in [1e-4, 0.01, 100.0, 400.0, 500.0, 3000.0] {
            let off = (format.round(ds * folded) / folded - ds).abs();
            assert!(off <= rounding_of(&model, ds, 0.0), "{fold:?} of {scale}: {ds}");
        }
    }
    let after = in_fp8(format, 0.25, DsScale::None, DsFold::After);
    assert!(rounding_of(&after, 3000.0, 0.0) > 2500.0 && rounding_of(&after, 400.0, 0.0) < 26.0);
}

/// A weight of the backward may saturate only where the LSE leaves room for more than `448 / 2^e`.
#[test]
fn a_weight_past_the_formats_range_may_saturate() {
    let mut fields = plain(&[(1, 1)], 1);
    fields.precision.p = Format::E4m3.into();
    let accumulation = Accumulation::WgmmaFp8 { promoted_after: None };
    let arithmetic = Arithmetic { weight_exponent: 8, ..Arithmetic::flash_attention(accumulation) };
    let model = Model::new(&Problem::new(fields).expect("a problem"), arithmetic, Partition::single(1, 1));
    let of = |p: f64| model.gradient_pair(&GradientPair::of_weight(p.ln(), 0.0, p, 0.0), (0.0, 0.0)).p.most;
    assert!(of(1.0) < 0.063 && of(1.7) < 0.11 && of(4.0) > 2.2);
    for p in [0.001, 0.5, 1.0, 1.8, 4.0] {
        assert!((Format::E4m3.round(p * 256.0) / 256.0 - p).abs() <= of(p), "{p}");
    }
}

/// Descales of dout and v cost roundings of their own.
#[test]
fn descales_of_dout_cost_roundings() {
    let bounds = [Scaling::None, Scaling::PerTensor].map(|scaling| {
        let mut fields = plain(&[(1, 1)], 1);
        let code = Element { format: Format::E4m3, scaling };
        (fields.precision.v, fields.precision.dout) = (code, code);
        let accumulation = Accumulation::WgmmaFp8 { promoted_after: None };
        let arithmetic = Arithmetic::flash_attention(accumulation);
        let model =
            Model::new(&Problem::new(fields).expect("a problem"), arithmetic, Partition::single(1, 1));
        let pair = GradientPair { x: 1.0, b: 1.0, ..GradientPair::of_weight(0.0, 0.0, 1.0, 0.0) };
        let error = model.gradient_pair(&pair, (0.0, 0.0));
        [error.dv, error.dk]
    });
    let [[dv, dk], [scaled_dv, scaled_dk]] = bounds;
    assert!(scaled_dv > dv && scaled_dk > dk, "{bounds:?}");
}

/// Returns a weight as a kernel makes it whose exponent takes the factor 2^8: `2^(s·c − (m·c − 8))` with one rounding of
/// f32 for each sum and product but a fused one. c is log2 e.
fn weight_with_a_factor(logit: f32, maximum: f32) -> f64 {
    let to_base_2 = std::f32::consts::LOG2_E;
    let exponent = logit.mul_add(to_base_2, -(maximum * to_base_2 - 8.0));
    f64::exp2(f64::from(exponent))
}

/// Whether a weight is rounded up or down near the middle of two codes is a matter of all roundings of its exponent, that
/// of its factor too. A Hopper kernel rounded 247.99993 to 256 and not to 240, and its exponent near 8 has an ulp that
/// moves the weight by more.
#[test]
fn a_factor_in_the_exponent_makes_more_near_ties() {
    let mut fields = plain(&[(4, 4)], 16);
    fields.precision.p = Format::E4m3.into();
    let accumulation = Accumulation::WgmmaFp8 { promoted_after: None };
    let arithmetic = Arithmetic { weight_exponent: 8, ..Arithmetic::flash_attention(accumulation) };
    let model = Model::new(&Problem::new(fields).expect("a problem"), arithmetic, Partition::single(4, 4));
    let profile = NumericProfile {
        rounds_weights: true,
        scales_logit_gradients: false,
        scales_queries: false,
        weights: WeightRounding::BeforeNormalisation,
        delta: Delta::StoredOut,
        group_sums: GroupSums::F32,
        ds_weights: DsWeights::Unrounded,
        kv_tile: 128,
        kv_order: KeyOrder::Descending,
        tile_factor: None,
    };
    let (middle, mut rounded_to_another) = ((248.0f64 / 256.0).ln(), 0);
    for step in -4000i32..4000 {
        // The logits are near 0, so that their own roundings are small.
        let maximum = 0.001 * (step.rem_euclid(7)) as f32;
        let logit = (f64::from(maximum) + middle + f64::from(step) * 1e-9) as f32;
        let row = RowStatistics {
            keys: 4,
            max: maximum.into(),
            max_abs: 0.03,
            range: 0.04,
            sum: 4.0,
            lse: f64::from(maximum) + 4.0f64.ln(),
            sink: None,
        };
        let both = [f64::from(logit), f64::from(maximum)];
        let weight = (both[0] - both[1]).exp();
        let (replayed, tie) = model.replayed_weight(&profile, &row, weight, both, [0.0, 0.0]);
        for error_of_exp in [-EXP_ERROR, EXP_ERROR] {
            let weight = weight_with_a_factor(logit, maximum) * (1.0 + error_of_exp);
            let own = Format::E4m3.round(weight) / 256.0;
            assert!(
                (own - replayed).abs() <= tie,
                "{logit} below {maximum}: {own} for {replayed}, left {tie}"
            );
            rounded_to_another += usize::from(own != replayed);
        }
    }
    assert!(rounded_to_another > 10, "{rounded_to_another}");
}
