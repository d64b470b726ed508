//! The backward on Hopper's tensor cores (see `backward.cu`): what it takes, and its launch.
//!
//! It takes what the forward takes, with dout in q's format, and gradients in q's format or in f32. [`refusal`] names
//! what it does not take. dk and dv are summed in one order. dq is summed in f32 over tiles of keys, in a [`DqOrder`]
//! that the caller chooses; where a row's keys are in one tile or in two, both orders give the same bits.
//!
//! The workspace grows with rows, not with their square: it has 4 bytes for each lane of dq, in whole tiles, and a
//! little more. The GPU makes a call's plan from its tables, as in the forward.
//!
//! `bucket` has the sizes that depend on the head dims, and `walk` the choice of order and form.
#![allow(unsafe_code, reason = "says which types kernels receive")]

mod bucket;
mod walk;

pub(crate) use bucket::{Bucket, shared_of};
pub(crate) use walk::Form;
pub use walk::{KEYS_BY_TURNS, SHORT_ROWS, Walks};

use seamproof_oracle::Format;
use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

use crate::attend::{BackwardTensors, CallTables, RawSegments, WeightFormats};
use crate::device::TileLaunch;
use crate::error::KernelError;
use crate::forward::{self, ALIGNMENT, AttentionKernels, ForwardOperands, Instance, elements, tensor_maps};
use crate::gpu::{Gpu, Launch, TensorMap};
use crate::memory::{Area, Argument};
use crate::tables::on_bytes;
use crate::view::{RawElements, RawView, View};

use bucket::{PARTS, PLACES, steps};
use walk::{Route, heads_together};

/// The threads of the kernel on rows, and of the kernel on tiles.
const ROW_THREADS: usize = 256;
/// The largest head dimension.
pub const DIM_MAX: usize = forward::DIM_MAX;
pub(crate) const TILE_THREADS: usize = 384;

/// The order in which dq is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DqOrder {
    /// Tiles of keys add as they come, between the first and the last, or in any other order that is the fastest.
    /// Bits may differ from launch to launch.
    AsTheyCome,
    /// Tiles of keys add one after the other. The bits are the same each time.
    Fixed,
}

impl DqOrder {
    /// Both orders.
    pub const ALL: [DqOrder; 2] = [DqOrder::Fixed, DqOrder::AsTheyCome];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            DqOrder::Fixed => "fixed",
            DqOrder::AsTheyCome => "any",
        }
    }

    /// Returns the order of a name.
    pub fn by_name(name: &str) -> Option<DqOrder> {
        DqOrder::ALL.into_iter().find(|order| order.name() == name)
    }
}

/// The update of gradients by a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientUpdate {
    /// Gradients are overwritten.
    Overwrite,
    /// Gradients are added to, once, before the result is rounded. Padding rows stay.
    Accumulate,
}

/// The order of sums, the update of gradients, and the walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardMode {
    /// The order in which dq is summed.
    pub order: DqOrder,
    /// The update of dq, dk and dv.
    pub update: GradientUpdate,
    /// The walks of every launch, which then has the long form; `None` for the form and the walks that fit its call.
    pub walks: Option<Walks>,
}

impl BackwardMode {
    /// Returns the mode that overwrites gradients.
    pub const fn overwrite(order: DqOrder) -> BackwardMode {
        BackwardMode { order, update: GradientUpdate::Overwrite, walks: None }
    }

    /// Returns the mode that adds to gradients.
    pub const fn accumulate(order: DqOrder) -> BackwardMode {
        BackwardMode { order, update: GradientUpdate::Accumulate, walks: None }
    }

    /// Returns the mode with other walks.
    pub const fn with_walks(self, walks: Option<Walks>) -> BackwardMode {
        BackwardMode { walks, ..self }
    }
}

/// The formats and head dims of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub struct BackwardOperands {
    /// The tensors that the forward has too. Its out is what the backward reads.
    pub forward: ForwardOperands,
    /// The format that dS is rounded to.
    pub ds: Format,
    /// The format of dout.
    pub dout: Format,
    /// The formats of dq, dk and dv.
    pub gradients: [Format; 3],
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct RawArguments {
    /// q, k, v, dout, and out in the short form.
    maps: [TensorMap; 5],
    /// Plan, segments, runs, tiles of query rows, tiles of keys, sums, statistics, tiles added, whether rows are
    /// described.
    places: [u64; PLACES],
    /// dout, out, lse, dq, dk, dv.
    views: [RawView; 6],
    heads: i32,
    group: i32,
    head_chunk: i32,
    q_step: i32,
    kv_step: i32,
    dim: i32,
    dim_v: i32,
    clear: i32,
    accumulate: i32,
    scale: f32,
    down: i32,
    fixed: i32,
    describes: i32,
    cap: f32,
    inner: f32,
    by_threads: i32,
    /// q, k, v and dout.
    elements: [RawElements; 4],
    /// Those of q, k, v and dout.
    descales: [u64; 4],
    /// The turned copies of queries and of keys.
    turned: [u64; 2],
    q_capacity: u32,
}
// SAFETY: repr(C), the fields of `Args` in backward.cu.
unsafe impl Argument for RawArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawPlan {
    segments: u64,
    runs: u64,
    /// The first five of the other kernels' places.
    places: [u64; 5],
    q_rows: i64,
    kv_rows: i64,
    segment_count: i32,
    run_count: i32,
    q_step: i32,
    kv_step: i32,
    tile_rows: i32,
    tile_keys_log2: i32,
    q_capacity: i32,
    kv_capacity: i32,
}
// SAFETY: repr(C), the fields of `PlanArgs` in backward_plan.cuh.
unsafe impl Argument for RawPlan {}

/// Returns what the blocks of the kernel on tiles share: each item is a tile of a segment's real keys and a KV head.
/// `dims` are those of keys and of values.
pub(crate) fn launch(call: &AttentionCall, [heads, kv_heads]: [usize; 2], dims: [usize; 2]) -> TileLaunch {
    let runs = call.segments.iter().flat_map(|segment| &segment.kv);
    let bucket = Bucket::of_codes(dims);
    let items = kv_heads * runs.map(|run| run.len.div_ceil(bucket.keys())).sum::<usize>();
    let tiles = call.segments.iter().map(|segment| most_tiles(segment, bucket)).max().unwrap_or(0);
    let turns = tiles * (heads / kv_heads.max(1));
    TileLaunch { items, cluster: 1, teams: 1, segments: call.segments.len(), turns }
}

/// Returns the most tiles of query rows of which some see a key of one tile, by the band alone.
fn most_tiles(segment: &Segment, bucket: Bucket) -> usize {
    let (rows, keys) = (bucket.rows(), bucket.keys());
    let [lo, hi] = [segment.lo.unwrap_or(i64::MIN), segment.hi.unwrap_or(i64::MAX)];
    let mut before = 0;
    let mut most = 0;
    for run in &segment.kv {
        for first in (0..run.len).step_by(keys) {
            let key = (before + first) as i64;
            let behind = key + keys.min(run.len - first) as i64;
            // Row r sees keys r + lo to r + hi.
            let from = key.saturating_sub(hi).max(0) as usize;
            let to = behind.saturating_sub(lo).clamp(0, segment.q.len as i64) as usize;
            if from < to && lo <= hi {
                most = most.max(to.div_ceil(rows) - from / rows);
            }
        }
        before += run.len;
    }
    most
}

/// Returns what there is in a call that the kernels do not take; `None` where they take the call.
pub fn refusal(call: &CallTables, operands: &BackwardOperands) -> Option<String> {
    let BackwardOperands { forward, ds, dout, gradients } = *operands;
    let q = forward.formats[0];
    let refused = |what: bool, name: &dyn Fn() -> String| what.then(name);
    forward::refusal_of_both(call, &forward, [DIM_MAX; 2])
        .or_else(|| refused(dout != q, &|| format!("dout in {dout} beside {q}")))
        .or_else(|| refused(ds != q, &|| format!("dS in {ds} beside {q}")))
        .or_else(|| {
            let served = |format: Format| format == q || format == Format::F32;
            let [dq, dk, dv] = gradients;
            let what = || format!("dq, dk and dv in {dq}, {dk} and {dv} beside {q}");
            refused(!gradients.into_iter().all(served), &what)
        })
        .or_else(|| {
            let what = || format!("{} owned rows or keys", call.owned[0].max(call.owned[1]));
            refused(call.owned.into_iter().any(|rows| rows >= forward::ROWS_MAX), &what)
        })
}

impl AttentionKernels {
    /// Returns whether a backward goes to the kernels on tensor cores. If not, the simple kernels run it.
    pub fn takes_backward(self, call: &CallTables, operands: &BackwardOperands) -> bool {
        self != AttentionKernels::Simple && refusal(call, operands).is_none()
    }
}

fn operands(formats: WeightFormats, tensors: &BackwardTensors) -> BackwardOperands {
    let BackwardTensors { q, k, v, dout, out, dq, dk, dv, .. } = tensors;
    let ([_, _, dim], [_, _, dim_v]) = (q.shape(), v.shape());
    BackwardOperands {
        forward: ForwardOperands {
            formats: [q, k, v].map(View::format),
            out: out.format(),
            p: formats.p,
            dims: [dim, dim_v],
        },
        ds: formats.ds,
        dout: dout.format(),
        gradients: [dq, dk, dv].map(View::format),
    }
}

impl Gpu {
    /// Launches the backward. `tables` holds the call's tables, and `workspace` has [`CallTables::workspace_bytes`].
    /// There are three launches, and no wait. A call that the kernels do not take is [`KernelError::Unserved`].
    /// [`Gpu::sink_gradient`] makes dsink.
    ///
    /// Tables that are written over those of a recorded launch must be as the forward's are. Sums are made in the
    /// orders that were chosen for the recorded call.
    ///
    /// At least eight blocks of this launch must each find a multiprocessor at one time. No others may be held by
    /// kernels that wait for it, nor by further backwards that wait in the same way.
    pub fn backward(
        &self,
        call: &CallTables,
        [tables, workspace]: [Area; 2],
        formats: WeightFormats,
        how: BackwardMode,
        tensors: &BackwardTensors,
    ) -> Result<(), KernelError> {
        let BackwardTensors { q, k, v, dout, out, dq, dk, dv, .. } = tensors;
        // The simple kernel's contract holds here too.
        call.raw(tables, [q, k, v], formats)?;
        let ([_, heads, dim], [_, kv_heads, dim_v]) = (q.shape(), v.shape());
        if let Some(what) = refusal(call, &operands(formats, tensors)) {
            return Err(KernelError::Unserved(what));
        }
        tensors.check(tables, &[("the workspace", workspace)])?;
        let rows = [q, k, v, dout, out, dq, dk, dv];
        let (instance, by_threads) = Instance::on(call, [dim, dim_v], rows);
        let bucket = Bucket::of(instance);
        let route = self.route(call, how, [heads, kv_heads], (bucket, !instance.takes_all()))?;
        let fitting = Form::of(call, route.walks, out.format(), instance);
        let form = if how.walks.is_some() { Form::Tiles } else { fitting };
        // The other form does not use it.
        let brought = if form == Form::Short { out } else { dout };
        let tiled @ [a, b, c, d] = bucket.tiled(call, [q, k, v, dout]);
        let (_, _, q_step, q_box) = a;
        let suffix = instance.suffix(q.format());
        let launch = Prepared {
            bucket,
            form,
            route,
            maps: tensor_maps(self, [a, b, c, d, ("out", brought, q_step, q_box)], by_threads)?,
            elements: elements(tiled)?,
            by_threads,
            descales: [0; 4],
            kernels: ["before", form.name()].map(|name| format!("backward_{name}_{suffix}")),
        };
        self.launch_backward(call, [tables, workspace], how, tensors, launch)
    }

    /// Returns the walks of a launch, by turns only of a kernel that `may_turn`: others were not timed so.
    pub(crate) fn route(
        &self,
        call: &CallTables,
        how: BackwardMode,
        [heads, kv_heads]: [usize; 2],
        (bucket, may_turn): (Bucket, bool),
    ) -> Result<Route, KernelError> {
        if let Some(walks) = how.walks {
            return Ok(Route::forced(walks, kv_heads));
        }
        let heads = [heads / kv_heads.max(1), kv_heads];
        let walks = Walks::fitting(how.order, call, heads, self.multiprocessors()?, may_turn);
        Ok(Route::fitting(walks, call, bucket))
    }

    /// Launches what was prepared, on tensors that were checked.
    pub(crate) fn launch_backward(
        &self,
        call: &CallTables,
        [tables, workspace]: [Area; 2],
        how: BackwardMode,
        tensors: &BackwardTensors,
        prepared: Prepared,
    ) -> Result<(), KernelError> {
        let BackwardTensors { q, v, dout, out, lse, dq, dk, dv, .. } = tensors;
        let ([_, heads, dim], [_, kv_heads, dim_v]) = (q.shape(), v.shape());
        let Prepared { bucket, form, route, maps, elements, by_threads, descales, kernels: [before, tiles] } =
            prepared;
        let layout = bucket.layout(call, [heads, kv_heads]);
        on_bytes("the workspace", workspace.address(), ALIGNMENT)?;
        if workspace.bytes() < layout[PARTS] {
            return Err(KernelError::shape(format!(
                "{} bytes for the workspace, not {}",
                workspace.bytes(),
                layout[PARTS]
            )));
        }
        if heads == 0 {
            return Ok(());
        }
        let parts: [u64; PARTS] = std::array::from_fn(|part| workspace.address() + layout[part] as u64);
        let [places @ .., turned_queries, turned_keys] = parts;
        let planned = raw_plan(call, tables, bucket, &places);
        let group = heads / kv_heads;
        // Tiles that come to rows one after the other add in turns at no cost.
        let order = if form == Form::Short { DqOrder::Fixed } else { how.order };
        let chunk = heads_together(order, form, route, call, [group, kv_heads], bucket);
        let [q_step, kv_step] = steps(call);
        let capacities = bucket.capacities(call);
        let arguments = RawArguments {
            maps,
            places,
            views: [
                dout.raw_moved("dout")?,
                out.raw("out")?,
                lse.raw("lse")?,
                dq.raw("dq")?,
                dk.raw("dk")?,
                dv.raw("dv")?,
            ],
            heads: heads as i32,
            group: group as i32,
            head_chunk: chunk as i32,
            q_step: q_step as i32,
            kv_step: kv_step as i32,
            dim: dim as i32,
            dim_v: dim_v as i32,
            clear: i32::from(call.policy == RowPolicy::Overwrite),
            accumulate: i32::from(how.update == GradientUpdate::Accumulate),
            scale: call.softmax.scale,
            down: route.down(),
            fixed: i32::from(order == DqOrder::Fixed),
            describes: i32::from(form == Form::Short),
            cap: call.softmax.softcap.unwrap_or(0.0),
            inner: call.softmax.softcap.map_or(0.0, |cap| call.softmax.scale / cap),
            by_threads: i32::from(by_threads),
            elements,
            descales,
            turned: [turned_queries, turned_keys],
            q_capacity: capacities[0] as u32,
        };
        let blocks = capacities[0] + if bucket.codes { capacities[1] } else { 0 };
        let rows = (blocks, if form == Form::Short { 1 } else { heads }, ROW_THREADS);
        self.launch("backward_plan", (1, 1, self.planners()), &[&planned])?;
        self.launch(&before, rows, &[&arguments])?;
        let grid = (self.staying_blocks(1)?, 1, TILE_THREADS);
        self.launch_with(&tiles, grid, bucket.shared_bytes(form), &[&arguments])
    }
}

/// What a launch is made of besides its call and its tensors.
pub(crate) struct Prepared {
    pub(crate) bucket: Bucket,
    pub(crate) form: Form,
    pub(crate) route: Route,
    pub(crate) maps: [TensorMap; 5],
    pub(crate) elements: [RawElements; 4],
    pub(crate) by_threads: bool,
    /// Where the descales of q, k, v and dout lie; nowhere but in FP8.
    pub(crate) descales: [u64; 4],
    /// The names of the kernel on rows and of that on tiles.
    pub(crate) kernels: [String; 2],
}

fn raw_plan(call: &CallTables, tables: Area, bucket: Bucket, places: &[u64; PLACES]) -> RawPlan {
    let [q_step, kv_step] = steps(call);
    let [q_capacity, kv_capacity] = bucket.capacities(call);
    let [plan, planned, planned_runs, q_tiles, kv_tiles, ..] = *places;
    let RawSegments { segments, runs, segment_count, run_count } = call.undivided(tables);
    RawPlan {
        segments,
        runs,
        places: [plan, planned, planned_runs, q_tiles, kv_tiles],
        q_rows: call.owned[0] as i64,
        kv_rows: call.owned[1] as i64,
        segment_count: segment_count as i32,
        run_count: run_count as i32,
        q_step: q_step as i32,
        kv_step: kv_step as i32,
        tile_rows: bucket.rows() as i32,
        tile_keys_log2: bucket.keys().ilog2() as i32,
        q_capacity: q_capacity as i32,
        kv_capacity: kv_capacity as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seamproof_oracle::{Run, Sink, Softmax};
    use seamproof_simulator::Segment;

    const OPERANDS: BackwardOperands = BackwardOperands {
        forward: ForwardOperands {
            formats: [Format::Bf16; 3],
            out: Format::Bf16,
            p: Format::Bf16,
            dims: [64, 128],
        },
        ds: Format::Bf16,
        dout: Format::Bf16,
        gradients: [Format::Bf16; 3],
    };

    /// Returns a causal call of 20 rows with a prefix, and with sink tokens beside a window.
    fn widened(prefix: usize, sink_tokens: usize) -> CallTables {
        let rows = Run::packed(0, 20, 20);
        let segment = Segment { q: rows, kv: vec![rows], lo: Some(-30), hi: Some(0), prefix, sink_tokens };
        let softmax = Softmax { scale: 0.125, softcap: None, sink: Sink::None };
        let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
        CallTables::new(&call, [20, 20], true).expect("the run lies in the rows")
    }

    pub(super) fn call(runs: &[(usize, usize)], softcap: Option<f32>) -> CallTables {
        bounded(runs, softcap, Some(0))
    }

    pub(super) fn bounded(runs: &[(usize, usize)], softcap: Option<f32>, hi: Option<i64>) -> CallTables {
        let softmax = Softmax { scale: 0.125, softcap, sink: Sink::None };
        let mut next = 0;
        let segments = runs.iter().map(|&(len, span)| {
            let rows = Run::packed(next, len, span);
            next += span;
            Segment { q: rows, kv: vec![rows], lo: None, hi, prefix: 0, sink_tokens: 0 }
        });
        let call = AttentionCall { segments: segments.collect(), softmax, policy: RowPolicy::Overwrite };
        CallTables::new(&call, [next, next], true).expect("the runs lie in the rows")
    }

    /// Test that turns are the tiles of rows that see a key, for each head of a group. The numbers are made by hand.
    #[test]
    fn turns_are_tiles_of_rows_and_heads() {
        let run = Run::packed(0, 450, 450);
        let of = |lo, hi, heads, dims| {
            let segment = Segment { q: run, kv: vec![run], lo, hi, prefix: 0, sink_tokens: 0 };
            let softmax = Softmax { scale: 0.125, softcap: None, sink: Sink::None };
            launch(
                &AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite },
                heads,
                dims,
            )
            .turns
        };
        assert_eq!(of(None, None, [2, 2], [128, 128]), 8);
        assert_eq!(of(None, Some(0), [2, 2], [64, 128]), 8, "the first keys");
        assert_eq!(of(None, Some(0), [4, 2], [64, 64]), 2 * 4, "tiles of 128 rows");
        assert_eq!(of(Some(-9), Some(0), [2, 2], [128, 128]), 3, "rows 0 to 136");
        assert_eq!(of(Some(1), Some(0), [2, 2], [128, 128]), 0, "an empty band");
        assert_eq!(of(None, Some(-450), [2, 2], [128, 128]), 0, "keys behind all rows");
    }

    /// The registers of a kernel are counted for the threads that are launched.
    #[test]
    fn tiles_are_launched_with_the_threads_that_share_their_registers() {
        for form in Form::ALL {
            let kernel = format!("backward_{}_64_1", form.name());
            assert_eq!(crate::source::sharing_threads(&kernel), Some(TILE_THREADS));
        }
    }

    #[test]
    fn what_is_not_taken_is_named() {
        let taken = call(&[(20, 24), (0, 8)], None);
        assert_eq!(refusal(&taken, &OPERANDS), None);
        let [f32, fp16] = [Format::F32, Format::Fp16];
        let sums = BackwardOperands { gradients: [f32, Format::Bf16, f32], ..OPERANDS };
        assert_eq!(refusal(&taken, &sums), None, "gradients that are summed on");
        let partial =
            BackwardOperands { forward: ForwardOperands { out: f32, ..OPERANDS.forward }, ..OPERANDS };
        assert_eq!(refusal(&taken, &partial), None, "an out that was merged in f32");
        let wide = ForwardOperands { dims: [64, 264], ..OPERANDS.forward };
        let cases = [
            (BackwardOperands { dout: f32, ..OPERANDS }, "dout in f32"),
            (BackwardOperands { ds: fp16, ..OPERANDS }, "dS in fp16"),
            (BackwardOperands { gradients: [fp16, f32, f32], ..OPERANDS }, "dq, dk and dv in fp16"),
            (BackwardOperands { forward: wide, ..OPERANDS }, "264"),
        ];
        for (operands, what) in cases {
            let said = refusal(&taken, &operands).unwrap_or_default();
            assert!(said.contains(what), "{operands:?}: {said:?}, not {what:?}");
        }
        assert_eq!(refusal(&call(&[(20, 24)], Some(3.0)), &OPERANDS), None, "a soft cap");
        let forward = |call: &CallTables| forward::refusal(call, &OPERANDS.forward);
        for (prefix, sink_tokens) in [(3, 0), (0, 2), (3, 2)] {
            let call = widened(prefix, sink_tokens);
            assert_eq!(refusal(&call, &OPERANDS), None, "a prefix of {prefix}, {sink_tokens} sink tokens");
            assert_eq!(Instance::of(&call, [64, 64]), Instance::General);
            assert_eq!(forward(&call).is_some(), prefix > 0, "tables of a backward");
        }
        assert_eq!(Instance::of(&widened(1, 0), [64, 64]), Instance::Narrow, "a prefix that shows nothing");
    }

    #[test]
    fn the_simple_choice_takes_no_backward_and_the_others_what_is_not_refused() {
        let taken = call(&[(20, 24)], None);
        for choice in AttentionKernels::ALL {
            assert_eq!(choice.takes_backward(&taken, &OPERANDS), choice != AttentionKernels::Simple);
            let refused = BackwardOperands { ds: Format::F32, ..OPERANDS };
            assert!(!choice.takes_backward(&taken, &refused));
        }
    }

    /// The structs that the kernels receive have the sources' sizes.
    #[test]
    fn sizes_are_those_of_the_source() {
        assert_eq!(size_of::<RawArguments>(), 5 * 128 + 9 * 8 + 6 * 32 + 16 * 4 + 4 * 48 + 4 * 8 + 2 * 8 + 8);
        assert_eq!(size_of::<RawPlan>(), 7 * 8 + 2 * 8 + 7 * 4 + 4);
    }
}
