//! Faults of the rows that a kernel reads, sees and clears: padding, lengths, masks, tiles and heads.

use std::ops::Range;

use seamproof_oracle::{Format, Intervals, Pass, Run, TensorName};

use super::entry::{FORGETS, READS, VALUES, WRITES, fault, kernels, right};
use crate::emulated::{Finished, HeadRows, Panel, Stages, UnitArithmetic, Weights};
use crate::faults::fault::Fault;
use crate::{Real, Segment};

const TE: &str = "https://github.com/NVIDIA/TransformerEngine/pull/1009";
const TE_GRADIENTS: &str = "https://github.com/NVIDIA/TransformerEngine/pull/2596";
const CUDNN_CAPACITY: &str = "https://github.com/NVIDIA/cudnn-frontend/issues/624";
const TE_WINDOW: &str = "https://github.com/NVIDIA/TransformerEngine/pull/1212";
const SGLANG_WINDOW: &str = "https://github.com/sgl-project/sglang/issues/32087";
const HF_WINDOW: &str = "https://github.com/huggingface/transformers/issues/40163";
const TRITON_FLAG: &str = "https://github.com/triton-lang/triton/issues/4541";

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "out-padding-left",
        "padding rows of the output keep what the allocator gave",
        TE,
        WRITES,
        &OutPaddingLeft,
    ),
    fault(
        "lse-padding-left",
        "padding rows of the statistic keep what the allocator gave",
        TE,
        WRITES,
        &LsePaddingLeft,
    ),
    fault("dq-padding-left", "padding rows of dq are never zeroed", TE_GRADIENTS, WRITES, &DqPaddingLeft),
    fault(
        "dkv-padding-left",
        "padding rows of dk and dv are never zeroed",
        TE_GRADIENTS,
        WRITES,
        &DkvPaddingLeft,
    ),
    fault(
        "zeros-past-the-span",
        "zeros are stored up to the tile's end, over rows that another owns",
        "https://github.com/Dao-AILab/flash-attention/commit/a3a257c7",
        WRITES,
        &ZerosPastSpan,
    ),
    fault(
        "padding-key-seen",
        "one padding key is visible to every query that sees the last key",
        "https://github.com/flashinfer-ai/flashinfer/pull/5090",
        READS,
        &PaddingKey,
    ),
    fault(
        "padding-key-seen-by-one",
        "one padding key is visible to the last query",
        "https://github.com/flashinfer-ai/flashinfer/pull/5090",
        READS,
        &PaddingKeyOfOne,
    ),
    fault(
        "tail-unmasked",
        "the tail of the last tile of keys is not masked: capacity is taken for length",
        CUDNN_CAPACITY,
        READS,
        &TailUnmasked,
    ),
    fault(
        "zero-times-stale",
        "a masked column's weight is 0, its stale value is not: 0 · NaN",
        CUDNN_CAPACITY,
        READS,
        &ZeroTimesStale,
    )
    .of(&[53]),
    fault(
        "tail-unmasked-in-the-backward",
        "the backward masks keys past the length only where it masks causally",
        "https://github.com/Dao-AILab/flash-attention/commit/c65b5106",
        READS,
        &BackwardTail,
    ),
    fault(
        "lse-of-one-row-tiles",
        "the statistic of a tile of one row is not stored",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1083",
        FORGETS,
        &OneRowLse,
    ),
    fault(
        "empty-row-lse-finite",
        "a row without keys has a finite LSE, so that a merge takes it for valid",
        "https://github.com/vllm-project/vllm/issues/49294",
        VALUES,
        &FiniteLse,
    ),
    fault(
        "empty-row-nan",
        "a row without keys is divided by its sum of 0",
        "https://github.com/pytorch/pytorch/issues/103963",
        VALUES,
        &EmptyNan,
    ),
    fault(
        "mask-of-two-rows",
        "two rows of a tile are masked as the second is",
        "https://github.com/Dao-AILab/flash-attention/pull/2528",
        VALUES,
        &MaskOfTile,
    ),
    fault(
        "forward-sees-one-more",
        "the forward's right edge is one key too far",
        HF_WINDOW,
        VALUES,
        &ForwardRightMore,
    ),
    fault(
        "forward-sees-one-less",
        "the forward's right edge is one key short",
        HF_WINDOW,
        VALUES,
        &ForwardRightLess,
    ),
    fault(
        "backward-sees-one-more",
        "the backward's right edge is one key too far",
        HF_WINDOW,
        VALUES,
        &BackwardRightMore,
    ),
    fault(
        "backward-sees-one-less",
        "the backward's right edge is one key short",
        HF_WINDOW,
        VALUES,
        &BackwardRightLess,
    ),
    fault(
        "window-one-key-long",
        "the kernel takes an exclusive left edge for an inclusive one",
        TE_WINDOW,
        VALUES,
        &LeftMore,
    ),
    fault("window-one-key-short", "the window's oldest key is dropped", SGLANG_WINDOW, VALUES, &LeftLess),
    fault(
        "backward-window-one-key-short",
        "the window's oldest key is dropped in the backward alone",
        SGLANG_WINDOW,
        VALUES,
        &BackwardLeftLess,
    ),
    fault(
        "kernel-backward-top-left",
        "the backward's diagonal starts at the first key, the forward's ends at the last",
        "https://github.com/xlite-dev/ffpa-attn/pull/300",
        VALUES,
        &BackwardTopLeft,
    ),
    fault("backward-without-mask", "the backward ignores the mask", TRITON_FLAG, VALUES, &BackwardUnmasked),
    fault(
        "forward-without-left-edge",
        "the forward ignores the window's left edge",
        TRITON_FLAG,
        VALUES,
        &ForwardNoLeft,
    ),
    fault(
        "last-key-tile-skipped",
        "the loop over tiles of keys ends one early",
        "https://github.com/intel/sycl-tla/pull/489",
        VALUES,
        &LastTileSkipped,
    ),
    fault(
        "tile-of-one-key-skipped",
        "a tile of which one key is visible is taken for an empty one (> for ≥)",
        "https://github.com/SandAI-org/MagiAttention/pull/117",
        VALUES,
        &TileOfOne,
    ),
    fault(
        "sink-tokens-twice",
        "tiles of sink tokens are walked before those of the window, and again where the window begins in them",
        "https://github.com/sgl-project/sglang/pull/12504",
        VALUES,
        &SinkTokensTwice,
    ),
    fault(
        "first-key-missing",
        "the first key is hidden from every query",
        SGLANG_WINDOW,
        VALUES,
        &FirstKeyMissing,
    ),
    fault(
        "one-key-missing-in-one-row",
        "the last query misses its first key",
        SGLANG_WINDOW,
        VALUES,
        &OneRowMisses,
    ),
    fault(
        "key-row-duplicated",
        "one key row is read from its neighbour",
        "https://github.com/mirage-project/mirage/issues/698",
        VALUES,
        &KeyDuplicated,
    ),
    fault(
        "value-rows-swapped",
        "two neighbouring value rows are exchanged",
        "https://github.com/flagos-ai/FlagAttention/pull/46",
        VALUES,
        &ValuesSwapped,
    ),
    fault(
        "value-rows-shifted",
        "the last tile's values are read one row early",
        "https://github.com/flagos-ai/FlagAttention/pull/46",
        VALUES,
        &ValuesShifted,
    ),
    fault(
        "query-row-of-neighbour",
        "one query row is read from its neighbour",
        "https://github.com/lvyufeng/PocketLLM/pull/240",
        VALUES,
        &QueryOfNeighbour,
    ),
    fault(
        "head-dim-tail-ignored",
        "the lanes past the last whole group of eight are not loaded",
        "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2",
        VALUES,
        &DimTail,
    ),
    fault(
        "last-eight-lanes-ignored",
        "the product stops eight lanes early",
        "https://github.com/Dao-AILab/flash-attention/commit/6d199aa2",
        VALUES,
        &LastLanes,
    ),
    fault(
        "kv-head-of-neighbour",
        "a query head that starts a group reads the group before",
        "https://github.com/FlashML-org/FreeToken/pull/177",
        VALUES,
        &KvHeadOfNeighbour,
    ),
    fault(
        "gqa-head-lost",
        "the last query head of a group has no backward: no share of dk and dv, no dq",
        "https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27",
        FORGETS,
        &HeadLost,
    ),
];

/// Returns the rows with up to `extra` padding rows behind them.
fn with_padding(tensor: TensorName, segment: &Segment, extra: usize) -> Vec<usize> {
    let rows = right::<crate::emulated::Serial>().rows(Pass::Forward, tensor, segment);
    let padding = segment.kv.last().into_iter().flat_map(Run::padding_rows).take(extra);
    let keys = matches!(tensor, TensorName::K | TensorName::V);
    rows.into_iter().chain(padding.filter(|_| keys)).collect()
}

/// Returns the keys that query `i` sees if up to `extra` padding rows behind the last key look like keys.
fn seen_with_padding(segment: &Segment, i: usize, extra: usize) -> Intervals {
    let (seen, keys) = (segment.visible(i), segment.keys());
    let padding = segment.kv.last().map_or(0, |run| run.span - run.len).min(extra);
    seen.moved(|end| if end == keys { keys + padding } else { end })
}

/// Returns keys without the first one.
fn without_first(mut seen: Intervals) -> Intervals {
    seen.next();
    seen
}

/// Returns the keys that a query sees if the mask's right edge is moved by `by`.
fn right_edge(segment: &Segment, i: usize, by: i64) -> Intervals {
    Segment { hi: segment.hi.map(|hi| hi + by), ..segment.clone() }.visible(i)
}

/// Returns the keys that a query sees if the mask's left edge is moved by `by`.
fn left_edge(segment: &Segment, i: usize, by: i64) -> Intervals {
    Segment { lo: segment.lo.map(|lo| lo + by), ..segment.clone() }.visible(i)
}

/// Returns the given keys in the wrong pass, and the right keys in the other.
fn only(pass: Pass, wrong: Pass, segment: &Segment, i: usize, seen: Intervals) -> Intervals {
    if pass == wrong { seen } else { segment.visible(i) }
}

kernels! {
    OutPaddingLeft {
        fn padding(&self, tensor: TensorName, run: &Run) -> Vec<usize> {
            if tensor == TensorName::Out { Vec::new() } else { run.padding_rows().collect() }
        }
    }
    LsePaddingLeft {
        fn padding(&self, tensor: TensorName, run: &Run) -> Vec<usize> {
            if tensor == TensorName::Lse { Vec::new() } else { run.padding_rows().collect() }
        }
    }
    DqPaddingLeft {
        fn padding(&self, tensor: TensorName, run: &Run) -> Vec<usize> {
            if tensor == TensorName::Dq { Vec::new() } else { run.padding_rows().collect() }
        }
    }
    DkvPaddingLeft {
        fn padding(&self, tensor: TensorName, run: &Run) -> Vec<usize> {
            let left = matches!(tensor, TensorName::Dk | TensorName::Dv);
            if left { Vec::new() } else { run.padding_rows().collect() }
        }
    }
    ZerosPastSpan {
        fn padding(&self, _: TensorName, run: &Run) -> Vec<usize> {
            run.padding_rows().chain([run.offset + run.step * run.span]).collect()
        }
    }
    PaddingKey {
        fn rows(&self, _: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            with_padding(tensor, segment, 1)
        }
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            seen_with_padding(segment, i, 1)
        }
    }
    PaddingKeyOfOne {
        fn rows(&self, _: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            with_padding(tensor, segment, 1)
        }
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            seen_with_padding(segment, i, usize::from(i + 1 == segment.q.len))
        }
    }
    TailUnmasked {
        fn rows(&self, _: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            with_padding(tensor, segment, usize::MAX)
        }
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            seen_with_padding(segment, i, usize::MAX)
        }
    }
    ZeroTimesStale {
        fn add_values(&self, units: &A, acc: &mut [f32], weights: Weights<'_, f32>, values: HeadRows<'_, f32>) {
            right::<A>().add_values(units, acc, weights, values);
            let behind = values.rows.last().map_or(0, |row| row + 1);
            if behind < values.tensor.shape()[0] {
                let stale = values.tensor.lane(behind, values.head);
                acc.iter_mut().zip(stale).for_each(|(acc, stale)| *acc += 0.0 * stale);
            }
        }
    }
    BackwardTail {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            with_padding(tensor, segment, if pass == Pass::Backward { 1 } else { 0 })
        }
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Backward, segment, i, seen_with_padding(segment, i, 1))
        }
    }
    OneRowLse {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            if tile.len() == 1 { f32::UNWRITTEN } else { right::<A>().lse(tile, local) }
        }
    }
    FiniteLse {
        fn lse(&self, tile: &[Finished<f32>], local: usize) -> f32 {
            right::<A>().lse(tile, local).max(f32::MIN)
        }
    }
    EmptyNan {
        fn out(&self, tile: &[Finished<f32>], local: usize, format: Format, to: &mut [f32]) {
            right::<A>().out(tile, local, format, to);
            let Finished { sum, acc, .. } = &tile[local];
            to.iter_mut().zip(acc).filter(|_| *sum == 0.0).for_each(|(to, acc)| *to = acc / sum);
        }
    }
    MaskOfTile {
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            segment.visible((i | 1).min(segment.q.len - 1))
        }
    }
    ForwardRightMore {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Forward, segment, i, right_edge(segment, i, 1))
        }
    }
    ForwardRightLess {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Forward, segment, i, right_edge(segment, i, -1))
        }
    }
    BackwardRightMore {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Backward, segment, i, right_edge(segment, i, 1))
        }
    }
    BackwardRightLess {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Backward, segment, i, right_edge(segment, i, -1))
        }
    }
    LeftMore {
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            left_edge(segment, i, -1)
        }
    }
    LeftLess {
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            left_edge(segment, i, 1)
        }
    }
    BackwardLeftLess {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Backward, segment, i, left_edge(segment, i, 1))
        }
    }
    BackwardTopLeft {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            let (lo, hi) = (segment.lo.zip(segment.hi).map(|(lo, hi)| lo - hi), segment.hi.map(|_| 0));
            let square = Segment { lo: lo.or(segment.lo), hi, ..segment.clone() };
            only(pass, Pass::Backward, segment, i, square.visible(i))
        }
    }
    BackwardUnmasked {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            only(pass, Pass::Backward, segment, i, (0..segment.keys()).into())
        }
    }
    ForwardNoLeft {
        fn visible(&self, pass: Pass, segment: &Segment, i: usize) -> Intervals {
            let open = Segment { lo: None, ..segment.clone() };
            only(pass, Pass::Forward, segment, i, open.visible(i))
        }
    }
    LastTileSkipped {
        fn tiles(&self, pass: Pass, segment: &Segment, rows: &Range<usize>, keys: usize, size: usize) -> Vec<Range<usize>> {
            let mut tiles = right::<A>().tiles(pass, segment, rows, keys, size);
            tiles.truncate(tiles.len().saturating_sub(1).max(1));
            tiles
        }
    }
    TileOfOne {
        fn tiles(&self, pass: Pass, segment: &Segment, rows: &Range<usize>, keys: usize, size: usize) -> Vec<Range<usize>> {
            let end = rows.clone().map(|i| segment.visible(i).hull().end).max().unwrap_or(0);
            let mut tiles = right::<A>().tiles(pass, segment, rows, keys, size);
            tiles.retain(|tile| tile.start + 1 < end);
            tiles
        }
    }
    SinkTokensTwice {
        fn tiles(&self, pass: Pass, segment: &Segment, rows: &Range<usize>, keys: usize, size: usize) -> Vec<Range<usize>> {
            let mut tiles = right::<A>().tiles(pass, segment, rows, keys, size);
            let begins = segment.lo.map_or(0, |lo| (rows.start as i64 + lo).max(0) as usize);
            let sink_tokens = tiles.iter().take_while(|tile| tile.start < segment.sink_tokens);
            let twice: Vec<Range<usize>> = sink_tokens.filter(|tile| tile.end > begins).cloned().collect();
            tiles.splice(0..0, twice);
            tiles
        }
    }
    FirstKeyMissing {
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            segment.visible(i).moved(|end| end.max(1))
        }
    }
    OneRowMisses {
        fn visible(&self, _: Pass, segment: &Segment, i: usize) -> Intervals {
            let seen = segment.visible(i);
            if i + 1 == segment.q.len { without_first(seen) } else { seen }
        }
    }
    KeyDuplicated {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::K && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows[middle] = rows[middle - 1];
            }
            rows
        }
    }
    ValuesSwapped {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::V && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows.swap(middle, middle - 1);
            }
            rows
        }
    }
    ValuesShifted {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::V && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows[middle..].rotate_left(1);
            }
            rows
        }
    }
    QueryOfNeighbour {
        fn rows(&self, pass: Pass, tensor: TensorName, segment: &Segment) -> Vec<usize> {
            let mut rows = right::<A>().rows(pass, tensor, segment);
            if tensor == TensorName::Q && pass == Pass::Forward && rows.len() > 1 {
                let middle = rows.len() / 2;
                rows[middle] = rows[middle - 1];
            }
            rows
        }
    }
    DimTail {
        fn products(&self, units: &A, _: Pass, formats: [Format; 2], a: &[f32], b: Panel<'_, f32>, to: &mut [f32]) {
            let whole = if a.len() < 8 { a.len() } else { a.len() / 8 * 8 };
            units.products(formats, &a[..whole], b.lanes(whole), to);
        }
    }
    LastLanes {
        fn products(&self, units: &A, pass: Pass, formats: [Format; 2], a: &[f32], b: Panel<'_, f32>, to: &mut [f32]) {
            let lanes = if pass == Pass::Forward { a.len().saturating_sub(8).max(1) } else { a.len() };
            units.products(formats, &a[..lanes], b.lanes(lanes), to);
        }
    }
    KvHeadOfNeighbour {
        fn kv_head(&self, head: usize, group: usize) -> usize {
            head.saturating_sub(1) / group
        }
    }
    HeadLost {
        fn query_heads(&self, kv_head: usize, group: usize) -> Range<usize> {
            kv_head * group..((kv_head + 1) * group - 1).max(kv_head * group + 1)
        }
    }
}
