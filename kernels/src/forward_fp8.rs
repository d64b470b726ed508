//! The forward on Hopper's tensor cores in FP8 (see `forward.cu`): what it takes, and its launch.
//!
//! q, k and v are codes of e4m3, with a descale for each segment and head. v comes as its turned copy
//! ([`TurnedShape`]). P is rounded to e4m3 and out is bf16 or f32. The plan, the tables and the contract are those of
//! the forward in 16 bits ([`forward`](crate::forward)).

use seamproof_oracle::Format;
use seamproof_simulator::{AttentionCall, RowPolicy};

use crate::attend::{CallTables, ForwardTensors, WeightFormats};
use crate::device::TileLaunch;
use crate::error::KernelError;
use crate::forward::{
    ALIGNMENT, PlanPlaces, PlanTiles, RawArguments, head_chunk, refusal_of_numbers, scale_log2, tensor_map,
};
use crate::gpu::{Gpu, TensorMap, TiledTensor};
use crate::memory::Area;
use crate::tables::on_bytes;
use crate::turned::TurnedShape;
use crate::view::{RawElements, View};

/// The lanes of a box's row, and the keys of a block.
const PANEL: usize = 128;
/// Head dims are multiples of this: the copy engine's rows are whole vectors.
pub const DIM_MULTIPLE: usize = 16;
/// The largest head dim.
pub const DIM_MAX: usize = 256;
/// The head dims that kernels are compiled for. Each takes those up to its own.
const WIDTHS: [usize; 3] = [64, 128, DIM_MAX];
/// Rows of an average segment up to which the short shape is faster: with head dims up to 128, and with larger ones.
const SHORT_ROWS: [usize; 2] = [1024, 128];

/// The number of query rows that are multiplied at once, with 128 keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Shape {
    /// 128 query rows, or 192 with head dims up to 64.
    Long,
    /// 64 query rows, and three tiles at once in a block of threads, or two with head dims over 128.
    Short,
}

/// The tensors of a forward in FP8.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Tensors<'a> {
    /// The tensors of any forward; q, k and v in e4m3.
    pub forward: ForwardTensors<'a>,
    /// The turned copy of v.
    pub turned: Area<'a>,
    /// The descales of q, k and v: f32 for each segment and head.
    pub descales: [Area<'a>; 3],
}

impl Fp8Shape {
    /// All shapes.
    pub const ALL: [Fp8Shape; 2] = [Fp8Shape::Long, Fp8Shape::Short];

    /// Returns the fastest shape for a call, by the lengths that the host knows and the head dims of q and k, and of v.
    pub fn of(call: &CallTables, dims: [usize; 2]) -> Fp8Shape {
        let is_wide = width(dims) == DIM_MAX;
        if call.mean_rows() <= SHORT_ROWS[usize::from(is_wide)] { Fp8Shape::Short } else { Fp8Shape::Long }
    }

    /// Returns what the blocks of a launch with so many query heads share: each item is a tile of a segment's real rows and a
    /// head.
    pub(crate) fn launch(self, call: &AttentionCall, heads: usize, dims: [usize; 2]) -> TileLaunch {
        let (teams, rows, _) = self.config(width(dims));
        let tiles: usize = call.segments.iter().map(|segment| segment.q.len.div_ceil(rows)).sum();
        TileLaunch { items: heads * tiles, cluster: 1, teams, segments: call.segments.len(), turns: 0 }
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Fp8Shape::Long => "long",
            Fp8Shape::Short => "short",
        }
    }

    /// Returns for head dims up to `dim` the teams of a block, a tile's query rows, and how many tiles of Q, and blocks of
    /// K and V, shared memory holds.
    fn config(self, dim: usize) -> (usize, usize, [usize; 3]) {
        match self {
            Fp8Shape::Long if dim <= 64 => (1, 192, [2, 4, 4]),
            Fp8Shape::Long if dim <= 128 => (1, 128, [2, 4, 4]),
            Fp8Shape::Long => (1, 128, [2, 2, 2]),
            Fp8Shape::Short if dim <= 128 => (3, 64, [1, 2, 2]),
            Fp8Shape::Short => (2, 64, [1, 2, 1]),
        }
    }

    /// Returns the bytes of shared memory, from a multiple of 1024 on: barriers and rings for each team.
    fn shared_bytes(self, dim: usize) -> usize {
        let (teams, rows, [q, k, v]) = self.config(dim);
        let lanes = dim.next_multiple_of(PANEL);
        1024 + teams * (1024 + (q * rows + k * PANEL) * lanes + v * PANEL * dim)
    }

    /// Returns the threads of a block: the consumers, and a group with the producers.
    fn threads(self, dim: usize) -> usize {
        let (teams, rows, _) = self.config(dim);
        teams * rows * 2 + 128
    }
}

/// Returns the head dim of the kernels for these, of q and k, and of v.
fn width(dims: [usize; 2]) -> usize {
    WIDTHS.into_iter().find(|width| dims.into_iter().all(|dim| dim <= *width)).unwrap_or(DIM_MAX)
}

/// Returns the dynamic shared memory of a block of this module's kernels; `None` for any other kernel.
pub(crate) fn shared_of(kernel: &str) -> Option<usize> {
    let (name, dim) = kernel.strip_prefix("forward_fp8_")?.split_once('_')?;
    let shape = Fp8Shape::ALL.into_iter().find(|shape| shape.name() == name)?;
    Some(shape.shared_bytes(dim.parse().ok()?))
}

/// Returns what there is in a call that the kernel does not take; `None` where it takes the call.
pub fn refusal(call: &CallTables, out: Format, dims: [usize; 2]) -> Option<String> {
    let apart = call.summary.step != [Some(1); 2];
    apart
        .then(|| "rows that do not follow each other".to_owned())
        .or_else(|| refusal_of_any_step(call, out, dims, DIM_MAX))
}

/// Returns what neither this kernel takes nor one of rows that are any step apart, with head dims up to `dim_max`.
pub(crate) fn refusal_of_any_step(
    call: &CallTables,
    out: Format,
    dims: [usize; 2],
    dim_max: usize,
) -> Option<String> {
    let served = |dim: usize| dim.is_multiple_of(DIM_MULTIPLE) && (1..=dim_max).contains(&dim);
    let reasons = [
        (!matches!(out, Format::Bf16 | Format::F32), format!("out in {out} beside e4m3")),
        (!dims.into_iter().all(served), format!("head dims {} and {}", dims[0], dims[1])),
        (call.softmax.softcap.is_some(), "a soft cap".to_owned()),
        (call.has_sink_tokens(), "sink tokens beside a window".to_owned()),
        (call.has_bands_of_keys(), "a prefix in a backward's tables".to_owned()),
    ];
    let refused = reasons.into_iter().find_map(|(refused, what)| refused.then_some(what));
    refused.or_else(|| refusal_of_numbers(call))
}

/// Refuses descales that are not one for each segment and head.
pub(crate) fn check_descales(
    call: &CallTables,
    name: &'static str,
    area: Area,
    heads: usize,
) -> Result<(), KernelError> {
    on_bytes(name, area.address(), 4)?;
    if area.bytes() == 4 * call.segments * heads {
        return Ok(());
    }
    let what = format!("{name}: {} bytes, not those of {} segments", area.bytes(), call.segments);
    Err(KernelError::shape(what))
}

/// Returns what the copy engine is told of codes, whose boxes are so many rows.
fn codes_map(
    gpu: &Gpu,
    (name, view): (&'static str, &View),
    rows_of_box: usize,
) -> Result<TensorMap, KernelError> {
    tensor_map(gpu, (name, view, 1, [1, rows_of_box]), view.raw_codes(name)?)
}

/// Returns what the copy engine is told of a turned copy, whose boxes are 128 keys of so many lanes.
fn turned_map(gpu: &Gpu, turned: Area, shape: TurnedShape, lanes: usize) -> Result<TensorMap, KernelError> {
    let TurnedShape { heads, dim, positions } = shape;
    gpu.tensor_map(&TiledTensor {
        base: turned.address(),
        format: Format::E4m3,
        dims: [positions, 1, dim, heads],
        strides: [positions, positions, dim * positions],
        of_box: [PANEL as u32, 1, lanes as u32, 1],
    })
}

impl Gpu {
    /// Launches the forward in FP8. `tables` holds the call's tables, and `plan` has [`CallTables::plan_bytes`]. There
    /// are two launches, and no wait. A call that the kernel does not take is [`KernelError::Unserved`].
    pub fn forward_fp8(
        &self,
        call: &CallTables,
        [tables, plan]: [Area; 2],
        shape: Fp8Shape,
        tensors: &Fp8Tensors,
    ) -> Result<(), KernelError> {
        let Fp8Tensors { forward, turned, descales } = tensors;
        let ForwardTensors { q, k, v, out, lse, max_logit, .. } = forward;
        // The simple kernel's contract holds here too. P and dS have no say.
        let formats = WeightFormats { p: Format::F32, ds: Format::F32 };
        call.raw(tables, [q, k, v], formats)?;
        let ([_, heads, dim], [rows, kv_heads, dim_v]) = (q.shape(), v.shape());
        let codes = [q, k, v].map(View::format);
        let foreign = (codes != [Format::E4m3; 3]).then(|| format!("q, k and v in {codes:?}"));
        if let Some(what) = foreign.or_else(|| refusal(call, out.format(), [dim, dim_v])) {
            return Err(KernelError::Unserved(what));
        }
        let named =
            [("descales of q", descales[0]), ("descales of k", descales[1]), ("descales of v", descales[2])];
        forward.check(tables, &[("the plan", plan)])?;
        for ((name, area), heads) in named.into_iter().zip([heads, kv_heads, kv_heads]) {
            check_descales(call, name, area, heads)?;
        }
        let turned_shape = TurnedShape::of([rows, kv_heads, dim_v]);
        turned_shape.check(*turned)?;
        let (sink_kind, sink) = forward.sink_of(call)?;
        let places = PlanPlaces::of_whole(call, plan)?;
        let widest = width([dim, dim_v]);
        let ((_, tile_rows, _), group, out) = (shape.config(widest), heads / kv_heads, out.raw("out")?);
        on_bytes("out", out.base, ALIGNMENT)?;
        if call.owned[0] == 0 {
            return Ok(());
        }
        let scale = call.softmax.scale;
        let arguments = RawArguments {
            maps: [
                codes_map(self, ("q", q), tile_rows)?,
                codes_map(self, ("k", k), PANEL)?,
                turned_map(self, *turned, turned_shape, widest)?,
            ],
            plan: places.plan,
            rows: places.rows,
            keys: places.keys,
            tile_segment: places.tile_segment,
            views: [out, lse.raw("lse")?, max_logit.raw("max_logit")?, sink.raw("sink")?],
            heads: heads as i32,
            group: group as i32,
            head_chunk: head_chunk(call, group, kv_heads, dim + dim_v) as i32,
            q_step: 1,
            dim_v: dim_v as i32,
            clear: i32::from(call.policy == RowPolicy::Overwrite),
            sink_kind,
            packed_log2: 0,
            scale,
            scale_log2: scale_log2(scale),
            inner: 0.0,
            by_threads: 0,
            elements: [RawElements::default(); 3],
            descales: descales.map(|area| area.address()),
        };
        self.plan_forward(call, tables, &places, PlanTiles::whole(call, tile_rows, tile_rows))?;
        self.launch_with(
            &format!("forward_fp8_{}_{widest}", shape.name()),
            (self.staying_blocks(1)?, 1, shape.threads(widest)),
            shape.shared_bytes(widest),
            &[&arguments],
        )
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Run, Sink, Softmax};
    use seamproof_simulator::{AttentionCall, Segment};

    use super::*;
    use crate::source::sharing_threads;

    fn call(run: Run, sink_tokens: usize, softmax: Softmax) -> CallTables {
        let segment = Segment { q: run, kv: vec![run], lo: Some(-3), hi: Some(0), prefix: 0, sink_tokens };
        let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
        CallTables::new(&call, [64, 64], false).expect("the run lies in 64 rows")
    }

    /// The registers of a kernel are counted for the threads that are launched.
    #[test]
    fn every_shape_is_launched_with_the_threads_that_share_its_registers() {
        for shape in Fp8Shape::ALL {
            for dim in WIDTHS {
                let kernel = format!("forward_fp8_{}_{dim}", shape.name());
                assert_eq!(sharing_threads(&kernel), Some(shape.threads(dim)), "{kernel}");
                assert_eq!(shared_of(&kernel), Some(shape.shared_bytes(dim)), "{kernel}");
                assert!(shape.shared_bytes(dim) <= 227 << 10, "{kernel}");
            }
        }
        assert_eq!(shared_of("forward_long_128_1"), None);
    }

    #[test]
    fn what_is_not_taken_is_named() {
        let plain = Softmax { scale: 0.125, softcap: None, sink: Sink::None };
        let packed = Run::packed(3, 20, 24);
        let taken = call(packed, 0, plain);
        assert_eq!(refusal(&taken, Format::Bf16, [64, 48]), None);
        assert_eq!(refusal(&taken, Format::F32, [256, 16]), None);
        let capped = call(packed, 0, Softmax { softcap: Some(30.0), ..plain });
        let small = call(packed, 0, Softmax { scale: f32::MIN_POSITIVE / 2.0, ..plain });
        let apart = call(Run { offset: 1, step: 2, len: 5, span: 6 }, 0, plain);
        let kept = call(packed, 2, plain);
        let cases = [
            (&taken, Format::Fp16, [64, 64], "out in fp16"),
            (&taken, Format::Bf16, [64, 40], "64 and 40"),
            (&taken, Format::Bf16, [272, 64], "272 and 64"),
            (&capped, Format::Bf16, [64, 64], "a soft cap"),
            (&small, Format::Bf16, [64, 64], "the scale"),
            (&apart, Format::Bf16, [64, 64], "follow each other"),
            (&kept, Format::Bf16, [64, 64], "sink tokens"),
        ];
        for (call, out, dims, what) in cases {
            let said = refusal(call, out, dims).unwrap_or_default();
            assert!(said.contains(what), "{said:?}, not {what:?}");
        }
    }
}
