//! Faults of the online softmax, of the output and its statistics, and of the precision in which they are kept.

use seamproof_oracle::{Format, Pass, Softmax};

use super::entry::{OFF, VALUES, bf16, fault, kernels, right};
use crate::emulated::{Finished, HeadRows, Online, RowSum, Stages, UnitArithmetic, Weights};
use crate::faults::fault::Fault;

const LARGE_LOGITS: &str = "https://github.com/NVIDIA/TransformerEngine/pull/716";
const ONLINE: &str = "https://arxiv.org/abs/1805.02867";
const SLOTS: &str = "https://github.com/Dao-AILab/flash-attention/pull/2229";
const PARTIAL: &str = "https://github.com/tenstorrent/tt-metal/pull/41683";
const SINKS: &str = "https://github.com/NVIDIA/TransformerEngine/pull/3551";
const SCALE: &str = "https://github.com/NVIDIA/TransformerEngine/pull/3063";

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "row-not-rescaled",
        "a growing maximum rescales the sum and not the accumulator",
        ONLINE,
        VALUES,
        &AccNotRescaled,
    ),
    fault(
        "sum-not-rescaled",
        "a growing maximum rescales the accumulator and not the sum",
        ONLINE,
        VALUES,
        &SumNotRescaled,
    ),
    fault(
        "maximum-not-subtracted",
        "weights are taken without the maximum: large logits overflow",
        LARGE_LOGITS,
        VALUES,
        &NoMaximum,
    )
    .of(&[117]),
    fault(
        "maximum-from-minus-1000",
        "a row's maximum begins at -1000, as if that were minus infinity",
        "https://github.com/flashinfer-ai/flashinfer/issues/4451",
        VALUES,
        &MaximumFrom1000,
    ),
    fault(
        "maximum-from-minus-50000",
        "a row's maximum begins at -50000, as if that were minus infinity",
        "https://github.com/flashinfer-ai/flashinfer/issues/4451",
        VALUES,
        &MaximumFrom50000,
    ),
    fault(
        "maximum-of-the-first-tile",
        "the maximum of the first tile is kept, later ones are not rescaled to",
        ONLINE,
        VALUES,
        &FirstMaximum,
    ),
    fault("lse-in-bf16", "the LSE is stored in 16 bits", PARTIAL, VALUES, &LseInBf16),
    fault(
        "lse-without-maximum",
        "the LSE is the logarithm of the sum alone",
        LARGE_LOGITS,
        VALUES,
        &LseWithoutMax,
    ),
    fault(
        "lse-in-base-two",
        "the LSE is stored in the unit of the base-2 exponential",
        "https://github.com/lightseekorg/tokenspeed/pull/571",
        VALUES,
        &LseBaseTwo,
    ),
    fault(
        "lse-of-neighbour",
        "one row's LSE is that of the row before it",
        "https://github.com/Dao-AILab/flash-attention/pull/2573",
        VALUES,
        &LseOfNeighbour,
    ),
    fault(
        "max-logit-of-the-last-tile",
        "each tile of queries overwrites the largest logit",
        SLOTS,
        VALUES,
        &LastMaxLogit,
    ),
    fault("row-sum-in-bf16", "a row's sum is kept in 16 bits", PARTIAL, VALUES, &SumInBf16),
    fault(
        "sum-of-rounded-weights",
        "the row's sum is that of the rounded weights",
        "https://github.com/Dao-AILab/flash-attention/pull/2721",
        VALUES,
        &SumOfRounded,
    ),
    fault(
        "accumulator-in-bf16",
        "the output is kept in 16 bits from tile to tile",
        PARTIAL,
        VALUES,
        &AccInBf16,
    ),
    fault(
        "weights-in-fp8",
        "weights are rounded to 8 bits before the product with the values",
        "https://github.com/Dao-AILab/flash-attention/pull/2717",
        VALUES,
        &WeightsInFp8,
    ),
    fault(
        "logits-in-bf16",
        "logits are rounded to 16 bits before the exponential",
        PARTIAL,
        VALUES,
        &LogitsInBf16,
    ),
    fault(
        "row-of-neighbour",
        "one output row is that of the row before it",
        "https://github.com/lvyufeng/PocketLLM/pull/240",
        VALUES,
        &RowOfNeighbour,
    ),
    fault(
        "stale-accumulator",
        "a row's accumulator starts with 2^-8 of another row's",
        "https://github.com/flashinfer-ai/flashinfer/pull/5029",
        VALUES,
        &StaleAccumulator,
    ),
    fault(
        "output-scaled",
        "the output is 1 + 2^-8 times what it should be",
        "https://github.com/Dao-AILab/flash-attention/pull/2721",
        VALUES,
        &OutputScaled,
    ),
    fault(
        "scale-one-percent-off",
        "the forward's softmax scale is off by one percent",
        SCALE,
        VALUES,
        &ScalePercent,
    ),
    fault(
        "scale-slightly-off",
        "the forward's softmax scale is off by 2^-8",
        "https://github.com/ml-explore/mlx/pull/3119",
        VALUES,
        &ScaleOff,
    ),
    fault(
        "softcap-clamps-the-product",
        "the product is clamped at the cap before it is scaled and capped",
        "https://github.com/Dao-AILab/flash-attention/pull/2402",
        VALUES,
        &CapFirst,
    ),
    fault("kernel-sink-twice", "the sink enters a row's denominator twice", SINKS, VALUES, &SinkTwice),
    fault(
        "sink-without-maximum",
        "the sink's exponential is added as if the row's maximum were 0",
        SINKS,
        VALUES,
        &SinkWithoutMax,
    ),
    fault(
        "sink-only-where-it-is-largest",
        "the sink is added where it is below the row's maximum only",
        SINKS,
        VALUES,
        &SinkBelowMax,
    ),
];

/// Returns the element of a tile's row. Row 1 gets the element of row 0.
fn neighbour<T>(tile: &[T], local: usize) -> &T {
    if local == 1 { &tile[0] } else { &tile[local] }
}

kernels! {
    AccNotRescaled {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            let acc = state.acc.clone();
            right::<A>().grow(units, softmax, state, max);
            state.acc = acc;
        }
    }
    SumNotRescaled {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            let sum = state.sum;
            right::<A>().grow(units, softmax, state, max);
            state.sum = sum;
        }
    }
    NoMaximum {
        fn grow(&self, _: &A, _: &Softmax, state: &mut Online<f32>, _: f32) {
            state.max = 0.0;
        }
    }
    MaximumFrom1000 {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            right::<A>().grow(units, softmax, state, max.max(-1000.0));
        }
    }
    MaximumFrom50000 {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            right::<A>().grow(units, softmax, state, max.max(-50_000.0));
        }
    }
    FirstMaximum {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            if state.max == f32::NEG_INFINITY {
                right::<A>().grow(units, softmax, state, max);
            } else {
                state.max = state.max.max(max);
            }
        }
    }
    LseInBf16 {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            bf16(right::<A>().lse(tile, local))
        }
    }
    LseWithoutMax {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            libm::logf(tile[local].sum)
        }
    }
    LseBaseTwo {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            right::<A>().lse(tile, local) * std::f32::consts::LOG2_E
        }
    }
    LseOfNeighbour {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            right::<A>().lse(tile, if local == 1 { 0 } else { local })
        }
    }
    LastMaxLogit {
        fn max_logit(&self, _: f32, tile: f32) -> f32 {
            tile
        }
    }
    SumInBf16 {
        fn add_weights(&self, units: &A, sum: &mut RowSum<f32>, first: usize, weights: &[f32]) {
            right::<A>().add_weights(units, sum, first, weights);
            sum.iter_mut().for_each(|sum| *sum = bf16(*sum));
        }
    }
    SumOfRounded {
        fn add_weights(&self, units: &A, sum: &mut RowSum<f32>, first: usize, weights: &[f32]) {
            let rounded: Vec<f32> = weights.iter().copied().map(bf16).collect();
            right::<A>().add_weights(units, sum, first, &rounded);
        }
    }
    AccInBf16 {
        fn add_values(&self, units: &A, acc: &mut [f32], weights: Weights<'_, f32>, values: HeadRows<'_, f32>) {
            right::<A>().add_values(units, acc, weights, values);
            acc.iter_mut().for_each(|acc| *acc = bf16(*acc));
        }
    }
    WeightsInFp8 {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            let format = if pass == Pass::Forward { Format::E4m3 } else { format };
            right::<A>().round(pass, values, format);
        }
    }
    LogitsInBf16 {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            right::<A>().scores(units, pass, softmax, products);
            products.iter_mut().for_each(|score| *score = bf16(*score));
        }
    }
    RowOfNeighbour {
        fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
            right::<A>().out(std::slice::from_ref(neighbour(tile, local)), 0, format, to);
        }
    }
    StaleAccumulator {
        fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
            let mut row = tile[local].clone();
            let stale = &tile[(local + 1) % tile.len()].acc;
            row.acc.iter_mut().zip(stale).for_each(|(acc, stale)| *acc += stale / 256.0);
            right::<A>().out(&[row], 0, format, to);
        }
    }
    OutputScaled {
        fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
            let mut row = tile[local].clone();
            row.acc.iter_mut().for_each(|acc| *acc *= OFF);
            right::<A>().out(&[row], 0, format, to);
        }
    }
    ScalePercent {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            let by = if pass == Pass::Forward { 1.01 } else { 1.0 };
            products.iter_mut().for_each(|product| *product *= by);
            right::<A>().scores(units, pass, softmax, products);
        }
    }
    ScaleOff {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            let by = if pass == Pass::Forward { OFF } else { 1.0 };
            products.iter_mut().for_each(|product| *product *= by);
            right::<A>().scores(units, pass, softmax, products);
        }
    }
    CapFirst {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            let cap = softmax.softcap.unwrap_or(f32::MAX);
            products.iter_mut().for_each(|product| *product = product.clamp(-cap, cap));
            right::<A>().scores(units, pass, softmax, products);
        }
    }
    SinkTwice {
        fn sink(&self, units: &A, row: &mut Finished<f32>, sink: f32) {
            row.add_sink(units, sink);
            row.add_sink(units, sink);
        }
    }
    SinkWithoutMax {
        fn sink(&self, units: &A, row: &mut Finished<f32>, sink: f32) {
            let empty = row.sum == 0.0;
            if empty { row.add_sink(units, sink) } else { row.sum += units.exp(sink) }
        }
    }
    SinkBelowMax {
        fn sink(&self, units: &A, row: &mut Finished<f32>, sink: f32) {
            if sink <= row.max {
                row.add_sink(units, sink);
            }
        }
    }
}
