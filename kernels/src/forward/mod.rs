//! The forward on Hopper's tensor cores (see `forward.cu`): what it takes, and its launch.
//!
//! It takes an [`AttentionCall`](seamproof_simulator::AttentionCall) with q, k and v in bf16 or fp16, head dims up to
//! [`LATENT_DIMS`], and a positive scale. [`refusal`] names what it does not take.
//!
//! The GPU makes a call's plan from its tables. So a recorded launch may be repeated with other real lengths in the
//! same tables, and with the owned rows dealt otherwise to as many segments. The lengths that the host knows choose a
//! shape and the order of heads, which decide speed alone.
#![allow(unsafe_code, reason = "says which types kernels receive")]

mod shape;
mod split;

use std::ops::Range;

use seamproof_oracle::{Format, Softmax};
use seamproof_simulator::RowPolicy;

use crate::attend::{CallTables, ForwardTensors, RawSegments, WeightFormats};
use crate::block::WARP;
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::gpu::{Gpu, Launch, TensorMap, TiledTensor};
use crate::memory::{Area, Argument};
use crate::tables::on_bytes;
use crate::view::{RawElements, RawView, View};
use shape::TILE_ROWS_LEAST;
pub use shape::{AttentionKernels, Instance, TileShape};
pub(crate) use shape::{SHORT_ROWS, shared_of};
pub(crate) use split::THREADS as SPLIT_THREADS;

/// The largest head dimension of both passes.
pub const DIM_MAX: usize = 256;
/// The largest head dimensions of q and k, and of v, in a forward alone: those of latent attention, where a value is the 512
/// latent lanes of its key (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>).
pub const LATENT_DIMS: [usize; 2] = [576, 512];
/// The largest head dimension of every instance but the widest and the latent one.
pub(crate) const WIDE_DIM: usize = 128;
/// The end of bounds and rows, whose sums fit 32 bits: `FAR` of plan.cuh.
pub(crate) const ROWS_MAX: usize = 1 << 29;
/// The bytes that addresses are aligned to where the copy engine reads, and vectors are stored.
pub(crate) const ALIGNMENT: usize = 16;
/// The bytes of a box's row.
const PANEL_BYTES: usize = 128;
/// The bytes of `Plan`, `PlannedRows` and `PlannedKeys` of the source.
const PLAN_BYTES: usize = 16;
const PLANNED_ROWS_BYTES: usize = 64;
const PLANNED_KEYS_BYTES: usize = 16;
/// Keys and values that stay in the L2 cache while all tiles of their heads are taken. This is less than half of the
/// cache, since each half keeps what both read.
const CACHED_BYTES: usize = 24 << 20;

/// The formats and head dims of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOperands {
    /// The formats of q, k and v.
    pub formats: [Format; 3],
    /// The format of out.
    pub out: Format,
    /// The format that P is rounded to.
    pub p: Format,
    /// The head dims of q and k, and of v.
    pub dims: [usize; 2],
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct RawArguments {
    pub(crate) maps: [TensorMap; 3],
    pub(crate) plan: u64,
    pub(crate) rows: u64,
    pub(crate) keys: u64,
    pub(crate) tile_segment: u64,
    /// out, lse, max_logit, sink.
    pub(crate) views: [RawView; 4],
    pub(crate) heads: i32,
    pub(crate) group: i32,
    pub(crate) head_chunk: i32,
    pub(crate) q_step: i32,
    pub(crate) dim_v: i32,
    pub(crate) clear: i32,
    pub(crate) sink_kind: i32,
    pub(crate) packed_log2: i32,
    pub(crate) scale: f32,
    pub(crate) scale_log2: f32,
    pub(crate) inner: f32,
    pub(crate) by_threads: i32,
    /// q, k and v.
    pub(crate) elements: [RawElements; 3],
    /// Of q, k and v; in FP8.
    pub(crate) descales: [u64; 3],
}
// SAFETY: repr(C), the fields of `Args` in forward.cu.
unsafe impl Argument for RawArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawPlan {
    segments: u64,
    runs: u64,
    plan: u64,
    rows: u64,
    keys: u64,
    tile_segment: u64,
    q_rows: i64,
    segment_count: i32,
    run_count: i32,
    q_step: i32,
    kv_step: i32,
    tile_rows: i32,
    part_rows: i32,
    tile_capacity: i32,
    longer: i32,
    tile_pieces: u64,
    ended: u64,
    ended_count: i32,
    by_blocks: i32,
    rows_from: i64,
    rows_to: i64,
}
// SAFETY: repr(C), the fields of `PlanArgs` in forward_plan.cuh.
unsafe impl Argument for RawPlan {}

/// Returns what there is in a call that the kernel does not take; `None` where it takes the call.
pub fn refusal(call: &CallTables, operands: &ForwardOperands) -> Option<String> {
    let of_backward = call.has_bands_of_keys().then(|| "a prefix in a backward's tables".to_owned());
    of_backward.or_else(|| refusal_of_both(call, operands, LATENT_DIMS))
}

/// Returns what there is in a call that neither the forward takes nor the backward, of which one takes head dims up to `most`.
pub(crate) fn refusal_of_both(
    call: &CallTables,
    operands: &ForwardOperands,
    most: [usize; 2],
) -> Option<String> {
    let ForwardOperands { formats: [q, k, v], out, p, dims } = *operands;
    let refused = |what: bool, name: &dyn Fn() -> String| what.then(name);
    refused(!matches!(q, Format::Bf16 | Format::Fp16) || q != k || q != v, &|| {
        format!("q, k and v in {q}, {k} and {v}")
    })
    .or_else(|| refused(p != q, &|| format!("P in {p} beside {q}")))
    .or_else(|| refused(out != q && out != Format::F32, &|| format!("out in {out} beside {q}")))
    .or_else(|| {
        let served = dims.into_iter().zip(most).all(|(dim, most)| (1..=most).contains(&dim));
        refused(!served, &|| format!("head dims {} and {}", dims[0], dims[1]))
    })
    .or_else(|| refusal_of_numbers(call))
    .or_else(|| refused(!call.is_of_one_step(), &|| "rows of several steps".to_owned()))
}

/// Returns what is too small or too large in a call for any kernel on tensor cores.
pub(crate) fn refusal_of_numbers(call: &CallTables) -> Option<String> {
    let scale = call.softmax.scale;
    if !(scale.is_normal() && scale > 0.0 && scale_log2(scale).is_finite()) {
        return Some(format!("the scale {scale:e}"));
    }
    // A segment may name rows of keys more than once.
    let rows = call.rows[0].max(call.rows[1]).max(call.summary.keys);
    (rows >= ROWS_MAX).then(|| format!("{rows} rows or keys"))
}

impl CallTables {
    /// Returns whether query rows have one step, and keys, and the tensors are whole steps as far as they reach.
    pub(crate) fn is_of_one_step(&self) -> bool {
        let reaches = |side: usize| {
            let step = self.summary.step[side].unwrap_or(1).max(1);
            self.summary.reach[side] <= self.rows[side] / step
        };
        !self.summary.step.contains(&None) && (0..2).all(reaches)
    }

    /// Returns the bytes of the plan of every shape but the split one, whose address is a multiple of 16.
    pub fn plan_bytes(&self) -> usize {
        self.plan_bytes_for(self.tile_capacity(TILE_ROWS_LEAST))
    }

    fn plan_bytes_for(&self, tiles: usize) -> usize {
        let records = PLANNED_ROWS_BYTES * self.segments + PLANNED_KEYS_BYTES * self.runs;
        PLAN_BYTES + records + 4 * tiles
    }

    /// Returns the most tiles of so many rows that the owned rows make, however they are dealt to the segments. The first
    /// and the last tile of a segment may have fewer rows than others.
    fn tile_capacity(&self, tile_rows: usize) -> usize {
        self.owned[0] / tile_rows + 2 * self.segments
    }
}

pub(crate) fn scale_log2(scale: f32) -> f32 {
    (f64::from(scale) * std::f64::consts::LOG2_E) as f32
}

/// Returns the number of heads that are taken together. Their keys and values fit the cache, and all chunks have one
/// size where twice as many chunks allow that. A last chunk of few heads would have its longest tiles when there is
/// nothing else left. A key and its value of a head have so many bytes.
pub(crate) fn head_chunk(call: &CallTables, group: usize, kv_heads: usize, key_bytes: usize) -> usize {
    let bytes = (call.summary.keys * key_bytes).max(1);
    let fewest = kv_heads.div_ceil((CACHED_BYTES / bytes).max(1));
    let even = (fewest..=2 * fewest).find(|&chunks| kv_heads.is_multiple_of(chunks));
    kv_heads.div_ceil(even.unwrap_or(fewest)) * group
}

/// A tensor as kernels on tensor cores take it: its name and view, the step of its rows, and the heads and rows that come
/// together.
pub(crate) type Tiled<'a> = (&'static str, &'a View<'a>, usize, [usize; 2]);

/// Returns what the copy engine is told of tensors; nothing where threads bring them.
pub(crate) fn tensor_maps<const N: usize>(
    gpu: &Gpu,
    tensors: [Tiled; N],
    by_threads: bool,
) -> Result<[TensorMap; N], KernelError> {
    let mut maps = [TensorMap::NONE; N];
    if !by_threads {
        for (map, tensor) in maps.iter_mut().zip(tensors) {
            let (name, view, ..) = tensor;
            *map = tensor_map(gpu, tensor, view.raw_moved(name)?)?;
        }
    }
    Ok(maps)
}

/// Returns what threads are told of tensors.
pub(crate) fn elements<const N: usize>(tensors: [Tiled; N]) -> Result<[RawElements; N], KernelError> {
    let mut all = [RawElements::default(); N];
    for (elements, (name, view, step, _)) in all.iter_mut().zip(tensors) {
        let ([rows, _, dim], view) = (view.shape(), view.raw_moved(name)?);
        *elements = RawElements { view, rows: (rows / step) as i32, step: step as i32, dim: dim as i32 };
    }
    Ok(all)
}

/// Returns what the copy engine is told of a tensor, which lies as `raw` says.
pub(crate) fn tensor_map(
    gpu: &Gpu,
    (name, view, step, [heads_of_box, rows_of_box]): Tiled,
    raw: RawView,
) -> Result<TensorMap, KernelError> {
    let ([rows, heads, dim], panel) = (view.shape(), PANEL_BYTES / element_bytes(view.format()));
    on_bytes(name, raw.base, ALIGNMENT)?;
    let (row, head) = (raw.row as usize, raw.head as usize);
    gpu.tensor_map(&TiledTensor {
        base: raw.base,
        format: view.format(),
        dims: [dim, heads, step, rows / step],
        strides: [head, row, row * step],
        of_box: [panel as u32, heads_of_box as u32, 1, rows_of_box as u32],
    })
}

/// Where a call's plan lies, and its parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanPlaces {
    pub(crate) plan: u64,
    pub(crate) rows: u64,
    pub(crate) keys: u64,
    pub(crate) tile_segment: u64,
}

/// The tiles of a plan.
#[derive(Clone, Debug)]
pub(crate) struct PlanTiles {
    /// The real rows of the segments that have tiles.
    of: Range<usize>,
    /// The rows of a tile.
    rows: usize,
    /// What the first tile of a segment has fewer rows is a multiple of this.
    part_rows: usize,
    /// The number of tiles for which there is room.
    capacity: usize,
    /// The tables of pieces, which the split shape alone has.
    pieces: Option<PlanPieces>,
}

/// What the plan of the split shape has besides; of others it is all 0.
#[derive(Clone, Copy, Debug, Default)]
struct PlanPieces {
    /// The address of the table of pieces.
    table: u64,
    /// How much longer pieces are, as a power of two.
    longer: i32,
    /// The address of the counts of ended pieces, which the planning kernel clears, and their number.
    ended: (u64, usize),
    /// Whether each block plans for itself, so that the planning kernel only clears counts.
    by_blocks: bool,
}

impl PlanTiles {
    /// Returns whole tiles of so many rows, of which a segment's first one may lack a multiple of `part_rows`.
    pub(crate) fn whole(call: &CallTables, rows: usize, part_rows: usize) -> PlanTiles {
        let capacity = call.tile_capacity(TILE_ROWS_LEAST);
        PlanTiles { of: 0..usize::MAX, rows, part_rows, capacity, pieces: None }
    }
}

impl PlanPlaces {
    /// Returns the places of a plan for whole tiles, in memory of at least [`CallTables::plan_bytes`].
    pub(crate) fn of_whole(call: &CallTables, plan: Area) -> Result<PlanPlaces, KernelError> {
        PlanPlaces::of(call, plan, call.tile_capacity(TILE_ROWS_LEAST))
    }

    /// Returns the places in memory for so many tiles at least.
    fn of(call: &CallTables, plan: Area, tiles: usize) -> Result<PlanPlaces, KernelError> {
        on_bytes("the plan", plan.address(), ALIGNMENT)?;
        let bytes = call.plan_bytes_for(tiles);
        if plan.bytes() < bytes {
            return Err(KernelError::shape(format!("{} bytes for the plan, not {bytes}", plan.bytes())));
        }
        let rows = plan.address() + PLAN_BYTES as u64;
        let keys = rows + (PLANNED_ROWS_BYTES * call.segments) as u64;
        let tile_segment = keys + (PLANNED_KEYS_BYTES * call.runs) as u64;
        Ok(PlanPlaces { plan: plan.address(), rows, keys, tile_segment })
    }
}

impl Gpu {
    /// Launches the planning kernel. Returns what it was told.
    pub(crate) fn plan_forward(
        &self,
        call: &CallTables,
        tables: Area,
        places: &PlanPlaces,
        tiles: PlanTiles,
    ) -> Result<RawPlan, KernelError> {
        let PlanPieces { table: tile_pieces, longer, ended: (ended, ended_count), by_blocks } =
            tiles.pieces.unwrap_or_default();
        let [q_step, kv_step] = call.summary.step.map(|step| step.unwrap_or(1).max(1));
        let RawSegments { segments, runs, segment_count, run_count } = call.bands(tables);
        let planned = RawPlan {
            segments,
            runs,
            plan: places.plan,
            rows: places.rows,
            keys: places.keys,
            tile_segment: places.tile_segment,
            q_rows: call.owned[0] as i64,
            segment_count: segment_count as i32,
            run_count: run_count as i32,
            q_step: q_step as i32,
            kv_step: kv_step as i32,
            tile_rows: tiles.rows as i32,
            part_rows: tiles.part_rows as i32,
            tile_capacity: tiles.capacity as i32,
            longer,
            tile_pieces,
            ended,
            ended_count: ended_count as i32,
            by_blocks: by_blocks.into(),
            rows_from: tiles.of.start.min(ROWS_MAX) as i64,
            rows_to: tiles.of.end.min(ROWS_MAX) as i64,
        };
        // With few threads a short plan is made sooner. Fewer buckets put the split shape's tiles in a coarser order, which
        // matters less to it: its items are pieces.
        let planners = match tiles.pieces {
            Some(_) => self.planners().min(segment_count.next_multiple_of(WARP).max(WARP)),
            None => self.planners(),
        };
        self.launch("forward_plan", (1, 1, planners), &[&planned])?;
        Ok(planned)
    }

    /// Launches the forward. `tables` holds the call's tables, and `plan` has [`CallTables::forward_bytes`]. There are two
    /// launches, three in the split shape where there are many pieces, four in the mixed shape, and no wait. A call that the
    /// kernel does not take is [`KernelError::Unserved`].
    ///
    /// Tables that are written over those of a recorded launch must be of a call that [`CallTables::new`] takes for
    /// the same tensors, with as many segments, runs and owned rows.
    pub fn forward(
        &self,
        call: &CallTables,
        [tables, plan]: [Area; 2],
        formats: WeightFormats,
        shape: TileShape,
        tensors: &ForwardTensors,
    ) -> Result<(), KernelError> {
        let ForwardTensors { q, k, v, out, .. } = tensors;
        // The simple kernel's contract holds here too.
        call.raw(tables, [q, k, v], formats)?;
        let ([_, heads, dim], [_, _, dim_v]) = (q.shape(), v.shape());
        let operands = ForwardOperands {
            formats: [q, k, v].map(View::format),
            out: out.format(),
            p: formats.p,
            dims: [dim, dim_v],
        };
        if let Some(what) = refusal(call, &operands) {
            return Err(KernelError::Unserved(what));
        }
        tensors.check(tables, &[("the plan", plan)])?;
        let sink = tensors.sink_of(call)?;
        let places = PlanPlaces::of_whole(call, plan)?;
        let (instance, by_threads) = Instance::on(call, [dim, dim_v], [q, k, v, out]);
        if call.owned[0] == 0 || heads == 0 {
            return Ok(());
        }
        let base = self.base(call, &places, tensors, sink, by_threads)?;
        let mut parts = shape.parts(instance).into_iter();
        parts.try_for_each(|part| {
            self.forward_part(call, [tables, plan], tensors, (base, instance, &places), part)
        })
    }

    /// Returns the arguments that all shapes have alike: without packs of heads, and without what the copy engine is told.
    fn base(
        &self,
        call: &CallTables,
        places: &PlanPlaces,
        tensors: &ForwardTensors,
        (sink_kind, sink): (i32, View),
        by_threads: bool,
    ) -> Result<RawArguments, KernelError> {
        let ForwardTensors { q, k, v, out, lse, max_logit, .. } = tensors;
        let ([_, heads, dim], [_, kv_heads, dim_v]) = (q.shape(), v.shape());
        let [q_step, kv_step] = call.summary.step.map(|step| step.unwrap_or(1).max(1));
        let group = heads / kv_heads;
        let Softmax { scale, softcap, .. } = call.softmax;
        // A logit is the cap times a tanh.
        let (scale, inner) = softcap.map_or((scale, 0.0), |cap| (cap, scale / cap));
        let whole = [1, 1];
        Ok(RawArguments {
            maps: [TensorMap::NONE; 3],
            plan: places.plan,
            rows: places.rows,
            keys: places.keys,
            tile_segment: places.tile_segment,
            views: [out.raw("out")?, lse.raw("lse")?, max_logit.raw("max_logit")?, sink.raw("sink")?],
            heads: heads as i32,
            group: group as i32,
            head_chunk: head_chunk(call, group, kv_heads, 2 * (dim + dim_v)) as i32,
            q_step: q_step as i32,
            dim_v: dim_v as i32,
            clear: i32::from(call.policy == RowPolicy::Overwrite),
            sink_kind,
            packed_log2: 0,
            scale,
            scale_log2: scale_log2(scale),
            inner,
            by_threads: i32::from(by_threads),
            elements: elements([
                ("q", q, q_step, whole),
                ("k", k, kv_step, whole),
                ("v", v, kv_step, whole),
            ])?,
            descales: [0; 3],
        })
    }

    /// Launches a shape for segments of so many real rows.
    fn forward_part(
        &self,
        call: &CallTables,
        [tables, plan]: [Area; 2],
        ForwardTensors { q, k, v, .. }: &ForwardTensors,
        (base, instance, places): (RawArguments, Instance, &PlanPlaces),
        (shape, of): (TileShape, Range<usize>),
    ) -> Result<(), KernelError> {
        let ([_, heads, _], [_, kv_heads, _]) = (q.shape(), k.shape());
        let suffix = instance.suffix(q.format());
        let Some(config) = shape.config(instance.dim()) else {
            return self.forward_split(
                call,
                [tables, plan],
                [heads, kv_heads],
                (base, &suffix, instance.dim()),
            );
        };
        let (rows, cluster) = (config.rows(), config.cluster);
        let packed = shape.packed(heads / kv_heads, instance);
        let [q_step, kv_step] = call.summary.step.map(|step| step.unwrap_or(1).max(1));
        let keys_of_box = [1, config.keys / cluster];
        let tiled = [
            ("q", q, q_step, [packed, rows / packed]),
            ("k", k, kv_step, keys_of_box),
            ("v", v, kv_step, keys_of_box),
        ];
        let arguments = RawArguments {
            maps: tensor_maps(self, tiled, base.by_threads != 0)?,
            heads: base.heads / packed as i32,
            group: base.group / packed as i32,
            head_chunk: base.head_chunk / packed as i32,
            packed_log2: packed.trailing_zeros() as i32,
            ..base
        };
        let [tile_rows, part_rows] = [rows * cluster, config.part_rows()].map(|rows| rows / packed);
        let tiles = PlanTiles { of, ..PlanTiles::whole(call, tile_rows, part_rows) };
        self.plan_forward(call, tables, places, tiles)?;
        self.launch_with(
            &format!("forward_{}_{suffix}", shape.name()),
            (self.staying_blocks(cluster)?, 1, config.threads()),
            config.shared_bytes(instance.dim()),
            &[&arguments],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Run, Sink};
    use seamproof_simulator::{AttentionCall, Segment};

    const OPERANDS: ForwardOperands =
        ForwardOperands { formats: [Format::Bf16; 3], out: Format::Bf16, p: Format::Bf16, dims: [64, 128] };

    fn call(runs: &[(Run, Run)], softmax: Softmax) -> CallTables {
        let segment = |&(q, kv): &(Run, Run)| Segment {
            q,
            kv: vec![kv],
            lo: None,
            hi: Some(0),
            prefix: 0,
            sink_tokens: 0,
        };
        let segments = runs.iter().map(segment).collect();
        let call = AttentionCall { segments, softmax, policy: RowPolicy::Overwrite };
        CallTables::new(&call, [64, 64], false).expect("the runs lie in 64 rows")
    }

    fn plain() -> Softmax {
        Softmax { scale: 0.125, softcap: None, sink: Sink::None }
    }

    /// Returns the rows `phase, phase + step, …`.
    fn strided(phase: usize, step: usize, len: usize) -> Run {
        Run { offset: phase, step, len, span: len }
    }

    #[test]
    fn what_is_not_taken_is_named() {
        let packed = Run::packed(3, 20, 24);
        let taken = call(&[(packed, packed)], plain());
        assert_eq!(refusal(&taken, &OPERANDS), None);
        let f32 = Format::F32;
        assert_eq!(
            refusal(&taken, &ForwardOperands { out: f32, ..OPERANDS }),
            None,
            "partial results in f32"
        );
        let cases = [
            (ForwardOperands { formats: [f32; 3], ..OPERANDS }, "q, k and v in f32"),
            (ForwardOperands { p: f32, ..OPERANDS }, "P in f32"),
            (ForwardOperands { out: Format::Fp16, ..OPERANDS }, "out in fp16"),
            (ForwardOperands { dims: [64, 513], ..OPERANDS }, "513"),
            (ForwardOperands { dims: [577, 64], ..OPERANDS }, "577"),
            (ForwardOperands { dims: [0, 64], ..OPERANDS }, "0 and 64"),
        ];
        for (operands, what) in cases {
            let said = refusal(&taken, &operands).unwrap_or_default();
            assert!(said.contains(what), "{operands:?}: {said:?}, not {what:?}");
        }
        for softmax in [Softmax { scale: f32_subnormal(), ..plain() }, Softmax { scale: 3e38, ..plain() }] {
            assert!(refusal(&call(&[(packed, packed)], softmax), &OPERANDS).is_some(), "{softmax:?}");
        }
    }

    /// A soft cap, and rows that are no vectors, go to the general instance; tensors off 16 bytes do too.
    #[test]
    fn an_instance_takes_what_others_leave_out() {
        let packed = Run::packed(3, 20, 24);
        let capped = call(&[(packed, packed)], Softmax { softcap: Some(3.0), ..plain() });
        assert_eq!(refusal(&capped, &OPERANDS), None);
        let of = |dims| Instance::of(&call(&[(packed, packed)], plain()), dims);
        assert_eq!([[64, 64], [72, 64]].map(of), [Instance::Narrow, Instance::Wide]);
        assert_eq!([[12, 64], [64, 1]].map(of), [Instance::General; 2]);
        assert_eq!([[136, 64], [8, 129]].map(of), [Instance::Widest; 2]);
        assert_eq!([[257, 64], [8, 512]].map(of), [Instance::Latent; 2]);
        assert_eq!(Instance::of(&capped, [64, 64]), Instance::General);
        assert_eq!(
            TileShape::ALL.map(|shape| shape.served(Instance::General)),
            [
                TileShape::Middle,
                TileShape::Middle,
                TileShape::Middle,
                TileShape::Short,
                TileShape::Split,
                TileShape::Mixed
            ]
        );
        let at = |by: u64| View::rows(Area::nowhere(0x1000 + by, 2 * 8 * 16), [2, 8, 8], Format::Bf16);
        assert_eq!(Instance::Wide.at([&at(0), &at(16)]), Instance::Wide);
        assert_eq!(Instance::Narrow.at([&at(0), &at(2)]), Instance::General);
        assert_eq!(Instance::General.suffix(Format::Fp16), "128_2_general");
        assert_eq!(Instance::Narrow.suffix(Format::Bf16), "64_1");
        assert_eq!(Instance::Widest.at([&at(0), &at(2)]).suffix(Format::Bf16), "256_1_general");
    }

    fn f32_subnormal() -> f32 {
        f32::MIN_POSITIVE / 2.0
    }

    #[test]
    fn rows_of_one_step_are_taken() {
        let sbhd = [(strided(0, 2, 32), strided(0, 2, 32)), (strided(1, 2, 32), strided(1, 2, 32))];
        assert_eq!(refusal(&call(&sbhd, plain()), &OPERANDS), None);
        let mixed = [(strided(0, 2, 8), strided(0, 2, 8)), (strided(20, 1, 8), strided(20, 1, 8))];
        assert!(refusal(&call(&mixed, plain()), &OPERANDS).is_some());
        // 64 rows are 21 times three and one more. No box of rows three apart reaches that one.
        let beyond = [(strided(0, 3, 22), strided(0, 3, 21))];
        assert!(refusal(&call(&beyond, plain()), &OPERANDS).is_some());
        // The padding row there becomes a real one where a graph is replayed with a longer sequence.
        let grows = [(Run { len: 21, ..strided(0, 3, 22) }, strided(0, 3, 21))];
        assert!(refusal(&call(&grows, plain()), &OPERANDS).is_some());
    }

    #[test]
    fn heads_are_cut_into_chunks_of_one_size() {
        let mut long = call(&[(Run::packed(0, 64, 64), Run::packed(0, 64, 64))], plain());
        assert_eq!(head_chunk(&long, 1, 16, 512), 16, "short keys all stay");
        // A head has 4.5 MiB, so that 5 fit: 4 chunks of 4, and not 3 of 5 and 1.
        long.summary.keys = 9216;
        assert_eq!(head_chunk(&long, 1, 16, 512), 4);
        assert_eq!(head_chunk(&long, 1, 7, 512), 4, "4 and 3");
        // A head has 8 MiB, so that 3 fit: 8 chunks of 2, and not 5 of 3 and 1.
        long.summary.keys = 16384;
        assert_eq!(head_chunk(&long, 1, 16, 512), 2);
        long.summary.keys = 9216;
        assert_eq!(head_chunk(&long, 4, 8, 512), 16);
        long.summary.keys = 1 << 28;
        assert_eq!(head_chunk(&long, 1, 3, 512), 1, "one head at least");
    }

    /// The structs that the kernels receive have the sources' sizes, and a block's shared memory fits a multiprocessor.
    #[test]
    fn sizes_are_those_of_the_source() {
        assert_eq!(size_of::<RawArguments>(), 3 * 128 + 4 * 8 + 4 * 32 + 12 * 4 + 3 * 48 + 32);
        assert_eq!(size_of::<RawPlan>(), 6 * 8 + 8 + 8 * 4 + 5 * 8);
        for shape in TileShape::ALL {
            for instance in Instance::ALL {
                let (served, dim) = (shape.served(instance), instance.dim());
                let bytes = served.shared_bytes(dim);
                assert!(bytes <= 232_448, "{shape:?}, {instance:?}: {bytes}");
            }
        }
    }
}
