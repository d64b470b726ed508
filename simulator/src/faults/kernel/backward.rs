//! Faults of the gradients: terms that are recomputed, summed or scaled wrongly, or forgotten.

use std::ops::Range;

use seamproof_oracle::{Format, Intervals, Pass, Softmax, TensorName};

use super::entry::{OFF, VALUES, bf16, fault, kernels, right};
use crate::emulated::{HeadRows, Pair, Stages, TileWeights, UnitArithmetic};
use crate::faults::fault::Fault;
use crate::{GuardedTensor, Segment};

const OPTIONS: &str = "https://github.com/Dao-AILab/flash-attention/issues/2424";
const SCALE: &str = "https://github.com/Dao-AILab/flash-attention/issues/2651";
const STRIDES: &str = "https://github.com/Dao-AILab/flash-attention/commit/9ee0ff1d";
const DENSE: &str = "https://github.com/Dao-AILab/flash-attention/issues/355";
const BLOCKS: &str = "https://github.com/Dao-AILab/flash-attention/issues/2623";
const SUMS: &str = "https://github.com/NVIDIA/cudnn-frontend/issues/385";
const SINKS: &str = "https://github.com/jax-ml/jax/issues/40140";

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "d-of-another-row",
        "D is that of the row before: the output is read with a wrong stride",
        STRIDES,
        VALUES,
        &DOfAnotherRow,
    ),
    fault(
        "d-missing",
        "dS is taken without D",
        "https://github.com/huggingface/picotron/issues/37",
        VALUES,
        &DMissing,
    ),
    fault(
        "dout-row-of-neighbour",
        "one row of dout is read from its neighbour",
        DENSE,
        VALUES,
        &DoutOfNeighbour,
    ),
    fault("dk-misses-a-query", "one query adds nothing to dk", BLOCKS, VALUES, &DkMisses),
    fault("dv-misses-a-query", "one query adds nothing to dv", BLOCKS, VALUES, &DvMisses),
    fault("dq-misses-a-key", "one key adds nothing to dq", BLOCKS, VALUES, &DqMisses),
    fault(
        "pair-missing-in-the-backward",
        "one (query, key) pair is missing in the backward alone",
        BLOCKS,
        VALUES,
        &PairMissing,
    ),
    fault("dk-scaled", "dk is 1 + 2^-8 times what it should be", SCALE, VALUES, &DkScaled),
    fault("dq-without-scale", "dq is not multiplied by the softmax scale", SCALE, VALUES, &DqUnscaled),
    fault("dk-without-scale", "dk is not multiplied by the softmax scale", SCALE, VALUES, &DkUnscaled),
    fault(
        "ds-without-scale",
        "neither dq nor dk is multiplied by the softmax scale",
        SCALE,
        VALUES,
        &DsUnscaled,
    ),
    fault(
        "backward-scale-off",
        "the backward's softmax scale is off by one percent",
        SCALE,
        VALUES,
        &BackwardScale,
    ),
    fault(
        "stale-dq",
        "dq keeps 2^-8 of another row's sum",
        "https://github.com/ROCm/flash-attention/pull/179",
        VALUES,
        &StaleDq,
    ),
    fault("dq-of-the-last-tile", "each tile of keys overwrites dq", SUMS, VALUES, &DqOverwritten),
    fault("dk-of-the-last-tile", "each tile of queries overwrites dk", SUMS, VALUES, &DkOverwritten),
    fault(
        "saved-lse-of-neighbour",
        "one row's saved LSE is read from its neighbour",
        "https://github.com/Dao-AILab/flash-attention/pull/2573",
        VALUES,
        &LseOfNeighbour,
    ),
    fault(
        "dk-halved",
        "dk is half of what it should be: a mean over two heads where their sum is meant",
        "https://github.com/marin-community/levanter/pull/449",
        VALUES,
        &DkHalved,
    ),
    fault(
        "softcap-derivative-missing",
        "dS passes the soft cap as if it were the identity",
        OPTIONS,
        VALUES,
        &NoDerivative,
    ),
    fault("softcap-missing-in-the-backward", "the recomputed logits are not capped", OPTIONS, VALUES, &NoCap),
    fault(
        "dsink-without-the-lse",
        "dsink takes the sink's bare exponential for its weight",
        SINKS,
        VALUES,
        &SinkUnnormalised,
    ),
    fault("dsink-negated", "dsink has the wrong sign", SINKS, VALUES, &SinkNegated),
    fault(
        "dsink-in-bf16",
        "the terms of dsink are rounded to 16 bits before they cancel",
        SINKS,
        VALUES,
        &SinkInBf16,
    )
    .of(&[192]),
    fault(
        "ds-in-fp8",
        "dS is rounded to 8 bits before its products",
        "https://github.com/ROCm/flash-attention/pull/162",
        VALUES,
        &DsInFp8,
    ),
    fault(
        "dk-in-bf16",
        "dk is kept in 16 bits from tile to tile",
        "https://github.com/zhuzilin/ring-flash-attention/commit/4072701",
        VALUES,
        &DkInBf16,
    ),
    fault(
        "backward-key-duplicated",
        "one key row of the backward is read from its neighbour",
        BLOCKS,
        VALUES,
        &KeyDuplicated,
    ),
    fault(
        "backward-last-key-tile-skipped",
        "the backward's loop over tiles of keys ends one early",
        BLOCKS,
        VALUES,
        &LastTileSkipped,
    ),
];

/// Returns the tile's weights without those of row `i`.
fn without_row(weights: &TileWeights<f32>, i: usize) -> TileWeights<f32> {
    let mut weights = weights.clone();
    weights.row_mut(i).fill(0.0);
    weights.seen[i] = 0..0;
    weights
}

/// Rounds a sum to 16 bits after each tile.
fn narrowed(to: &mut [f32]) {
    to.iter_mut().for_each(|value| *value = bf16(*value));
}

kernels! {
    DOfAnotherRow {
        fn row_dots(&self, units: &A, dout: HeadRows<'_, f32>, out: HeadRows<'_, f32>) -> Vec<f32> {
            let mut dots = right::<A>().row_dots(units, dout, out);
            dots.rotate_right(1);
            dots
        }
    }
    DMissing {
        fn logit_gradient(&self, units: &A, softmax: &Softmax, pair: Pair<f32>) -> f32 {
            right::<A>().logit_gradient(units, softmax, Pair { d: 0.0, ..pair })
        }
    }
    DoutOfNeighbour {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::Dout && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows[middle] = rows[middle - 1];
            }
            rows
        }
    }
    DkMisses {
        fn add_dk(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, queries: HeadRows<'_, f32>) {
            right::<A>().add_dk(units, to, &without_row(ds, 0), queries);
        }
    }
    DvMisses {
        fn add_dv(&self, units: &A, to: &mut [f32], p: &TileWeights<f32>, dout: HeadRows<'_, f32>) {
            right::<A>().add_dv(units, to, &without_row(p, 0), dout);
        }
    }
    DqMisses {
        fn add_dq(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, keys: HeadRows<'_, f32>) {
            let mut ds = ds.clone();
            (0..ds.seen.len()).for_each(|i| ds.row_mut(i)[0] = 0.0);
            right::<A>().add_dq(units, to, &ds, keys);
        }
    }
    PairMissing {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            let mut seen = segment.visible(i);
            if pass == Pass::Backward && i + 1 == segment.q.len {
                seen.next_back();
            }
            seen
        }
    }
    DkScaled {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            right::<A>().factor(gradient, softmax) * if gradient == TensorName::Dk { OFF } else { 1.0 }
        }
    }
    DqUnscaled {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            if gradient == TensorName::Dq { 1.0 } else { right::<A>().factor(gradient, softmax) }
        }
    }
    DkUnscaled {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            if gradient == TensorName::Dk { 1.0 } else { right::<A>().factor(gradient, softmax) }
        }
    }
    DsUnscaled {
        fn factor(&self, _: TensorName, _: &Softmax) -> f32 {
            1.0
        }
    }
    BackwardScale {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            let by = if pass == Pass::Backward { 1.01 } else { 1.0 };
            products.iter_mut().for_each(|product| *product *= by);
            right::<A>().scores(units, pass, softmax, products);
        }
    }
    StaleDq {
        fn store(
            &self,
            gradient: TensorName,
            factor: f32,
            sums: &[f32],
            index: usize,
            format: Format,
            to: &mut [f32],
        ) {
            let (dim, mut sums) = (to.len(), sums.to_vec());
            let other = (index + 1) % (sums.len() / dim);
            if gradient == TensorName::Dq {
                (0..dim).for_each(|c| sums[index * dim + c] += sums[other * dim + c] / 256.0);
            }
            right::<A>().store(gradient, factor, &sums, index, format, to);
        }
    }
    DqOverwritten {
        fn add_dq(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, keys: HeadRows<'_, f32>) {
            to.fill(0.0);
            right::<A>().add_dq(units, to, ds, keys);
        }
    }
    DkOverwritten {
        fn add_dk(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, queries: HeadRows<'_, f32>) {
            to.fill(0.0);
            right::<A>().add_dk(units, to, ds, queries);
        }
    }
    LseOfNeighbour {
        fn saved_lse(&self, lse: &GuardedTensor<f32>, head: usize, rows: &[usize]) -> Vec<f32> {
            let mut lse = right::<A>().saved_lse(lse, head, rows);
            let usual = lse.len() > 1 && lse.iter().all(|lse| lse.is_finite());
            lse[0] = if usual { lse[1] } else { lse[0] };
            lse
        }
    }
    DkHalved {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            right::<A>().factor(gradient, softmax) * if gradient == TensorName::Dk { 0.5 } else { 1.0 }
        }
    }
    NoDerivative {
        fn logit_gradient(&self, _: &A, _: &Softmax, pair: Pair<f32>) -> f32 {
            pair.weight * (pair.dp - pair.d)
        }
    }
    NoCap {
        fn scores(&self, units: &A, pass: Pass, softmax: &Softmax, products: &mut [f32]) {
            if pass == Pass::Forward || softmax.softcap.is_none() {
                return right::<A>().scores(units, pass, softmax, products);
            }
            // The scores that the unit makes of the product with a cap that is far away.
            let wide = Softmax { softcap: None, ..*softmax };
            right::<A>().scores(units, pass, &wide, products);
        }
    }
    SinkUnnormalised {
        fn sink_gradient(&self, units: &A, sink: f32, _: f32, d: f32) -> f32 {
            units.exp(sink) * d
        }
    }
    SinkNegated {
        fn sink_gradient(&self, units: &A, sink: f32, lse: f32, d: f32) -> f32 {
            -right::<A>().sink_gradient(units, sink, lse, d)
        }
    }
    SinkInBf16 {
        fn sink_gradient(&self, units: &A, sink: f32, lse: f32, d: f32) -> f32 {
            bf16(right::<A>().sink_gradient(units, sink, lse, d))
        }
    }
    DsInFp8 {
        fn logit_gradient(&self, units: &A, softmax: &Softmax, pair: Pair<f32>) -> f32 {
            Format::E4m3.round_f32(right::<A>().logit_gradient(units, softmax, pair))
        }
    }
    DkInBf16 {
        fn add_dk(&self, units: &A, to: &mut [f32], ds: &TileWeights<f32>, queries: HeadRows<'_, f32>) {
            right::<A>().add_dk(units, to, ds, queries);
            narrowed(to);
        }
    }
    KeyDuplicated {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::K && pass == Pass::Backward && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows[middle] = rows[middle - 1];
            }
            rows
        }
    }
    LastTileSkipped {
        fn tiles(&self, pass: Pass, segment: &Segment, rows: &Range<usize>, keys: usize, size: usize) -> Vec<Range<usize>> {
            let mut tiles = right::<A>().tiles(pass, segment, rows, keys, size);
            tiles.truncate(if pass == Pass::Backward { tiles.len().saturating_sub(1) } else { tiles.len() });
            tiles
        }
    }
}
