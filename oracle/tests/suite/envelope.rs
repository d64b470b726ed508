//! Choices of honest subjects: none costs more than its bound.

use crate::common::plain;

use seamproof_oracle::envelope::{Accumulation, Arithmetic, GradientPair, Model, Partition};
use seamproof_oracle::{Format, Problem};

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
