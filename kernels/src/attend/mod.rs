//! Attention for everything that an [`AttentionCall`](seamproof_simulator::AttentionCall) can say. These kernels are
//! simple: they are right first (see `attend.cu`).
//!
//! q, k, v, dout, out and gradients are `[rows, heads, dim]` in bf16, fp16 or f32. lse is `[heads, rows]`; max_logit,
//! sink and dsink are one number a head; all of these are f32. Head dims go up to [`DIM_MAX`], and KV heads divide
//! query heads. Sums are serial, in the order of the CPU device with tiles of [`KEY_TILE`] keys, and so give its
//! bits.
#![allow(unsafe_code, reason = "says which types kernels receive")]

mod tables;

use seamproof_oracle::{Format, Sink};

use crate::block::{THREADS, WARP};
use crate::error::KernelError;
use crate::gpu::{Gpu, Launch};
use crate::memory::{Area, Argument};
pub use crate::summary::CallSummary;
use crate::tables::{blocks, check_apart};
use crate::view::{RawView, View};
pub use tables::CallTables;
pub(crate) use tables::{RawCall, RawSegments, SEGMENT_BYTES};

/// The largest head dimension.
pub const DIM_MAX: usize = 576;
/// The number of keys whose scores share a maximum.
pub const KEY_TILE: usize = 32;
/// Rows that a block works on at once: one for each warp.
const WARPS: usize = THREADS / WARP;
/// The formats that P and dS are rounded to before they enter a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightFormats {
    /// The format of P.
    pub p: Format,
    /// The format of dS.
    pub ds: Format,
}

/// The tensors of a forward launch.
#[derive(Clone, Copy, Debug)]
pub struct ForwardTensors<'a> {
    /// The queries.
    pub q: View<'a>,
    /// The keys.
    pub k: View<'a>,
    /// The values.
    pub v: View<'a>,
    /// The learnable sink, where the call applies one.
    pub sink: Option<View<'a>>,
    /// The output, which is written.
    pub out: View<'a>,
    /// The LSE, which is written.
    pub lse: View<'a>,
    /// The largest logits, which are raised and never lowered.
    pub max_logit: View<'a>,
}

/// The tensors of a backward launch.
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors<'a> {
    /// The queries.
    pub q: View<'a>,
    /// The keys.
    pub k: View<'a>,
    /// The values.
    pub v: View<'a>,
    /// The gradient of the output.
    pub dout: View<'a>,
    /// The output.
    pub out: View<'a>,
    /// The LSE.
    pub lse: View<'a>,
    /// The gradient of the queries, which is written.
    pub dq: View<'a>,
    /// The gradient of the keys, which is written.
    pub dk: View<'a>,
    /// The gradient of the values, which is written.
    pub dv: View<'a>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawForward {
    call: RawCall,
    /// q, k, v, sink, out, lse, max_logit.
    views: [RawView; 7],
    sink_kind: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawBackward {
    call: RawCall,
    /// q, k, v, dout, out, lse, dq, dk, dv.
    views: [RawView; 9],
    row_dots: u64,
}
// SAFETY: repr(C), the fields of `Forward` in attend.cu.
unsafe impl Argument for RawForward {}
// SAFETY: repr(C), the fields of `Backward` in attend.cu.
unsafe impl Argument for RawBackward {}

impl<'a> ForwardTensors<'a> {
    /// Refuses a result of another shape, and one that lies where the launch reads or writes something else. `own` is
    /// memory that the launcher writes besides. Tensors that are only read may lie anywhere, even in one place.
    pub(crate) fn check(&self, tables: Area, own: &[(&'static str, Area)]) -> Result<(), KernelError> {
        let ForwardTensors { q, k, v, sink, out, lse, max_logit } = self;
        let ([q_rows, heads, _], [_, _, dim_v]) = (q.shape(), v.shape());
        same("out", out, [q_rows, heads, dim_v])?;
        statistic("lse", lse, [q_rows, heads, 1])?;
        statistic("max_logit", max_logit, [1, heads, 1])?;
        let written = [out.named("out"), lse.named("lse"), max_logit.named("max_logit")];
        let mut read = vec![q.named("q"), k.named("k"), v.named("v"), ("the call's table", tables)];
        read.extend(sink.map(|sink| sink.named("sink")));
        check_apart(&[&written, own].concat(), &read)
    }

    /// Returns the sink's kind as the sources number it, and its numbers. Without numbers, some other statistic
    /// stands in.
    pub(crate) fn sink_of(&self, call: &CallTables) -> Result<(i32, View<'a>), KernelError> {
        let (kind, view) = match (call.softmax.sink, self.sink) {
            (Sink::None, _) => (0, self.max_logit),
            (Sink::OffByOne, _) => (1, self.max_logit),
            (Sink::Learnable, Some(sink)) => (2, sink),
            (Sink::Learnable, None) => return Err(KernelError::shape("a learnable sink is missing")),
        };
        let [_, heads, _] = self.q.shape();
        statistic("sink", &view, [1, heads, 1])?;
        Ok((kind, view))
    }
}

impl BackwardTensors<'_> {
    /// Refuses what [`ForwardTensors::check`] refuses.
    pub(crate) fn check(&self, tables: Area, own: &[(&'static str, Area)]) -> Result<(), KernelError> {
        let BackwardTensors { q, k, v, dout, out, lse, dq, dk, dv } = self;
        let ([q_rows, heads, _], [_, _, dim_v]) = (q.shape(), v.shape());
        same("dout", dout, [q_rows, heads, dim_v])?;
        same("out", out, [q_rows, heads, dim_v])?;
        statistic("lse", lse, [q_rows, heads, 1])?;
        same("dq", dq, q.shape())?;
        same("dk", dk, k.shape())?;
        same("dv", dv, v.shape())?;
        let written = [dq.named("dq"), dk.named("dk"), dv.named("dv")];
        let inputs = [q.named("q"), k.named("k"), v.named("v"), dout.named("dout")];
        let saved = [out.named("out"), lse.named("lse"), ("the call's table", tables)];
        check_apart(&[&written, own].concat(), &[&inputs[..], &saved].concat())
    }
}

pub(crate) fn same(name: &str, view: &View, shape: [usize; 3]) -> Result<(), KernelError> {
    if view.shape() == shape {
        return Ok(());
    }
    Err(KernelError::shape(format!("{name}: {:?}, not {shape:?}", view.shape())))
}

/// Refuses a statistic of another shape or format than f32.
pub(crate) fn statistic(name: &str, view: &View, shape: [usize; 3]) -> Result<(), KernelError> {
    same(name, view, shape)?;
    if view.format() == Format::F32 {
        return Ok(());
    }
    Err(KernelError::shape(format!("{name}: {}, not f32", view.format())))
}

impl Gpu {
    /// Launches the forward. `tables` holds the call's tables. Where they have a block table
    /// ([`CallTables::in_pages`]), keys and values are found through it.
    pub fn attend(
        &self,
        call: &CallTables,
        tables: Area,
        formats: WeightFormats,
        tensors: &ForwardTensors,
    ) -> Result<(), KernelError> {
        let ForwardTensors { q, k, v, out, lse, max_logit, .. } = tensors;
        let raw = call.raw(tables, [q, k, v], formats)?;
        tensors.check(tables, &[])?;
        let (sink_kind, sink) = tensors.sink_of(call)?;
        let views = [
            q.raw("q")?,
            k.raw("k")?,
            v.raw("v")?,
            sink.raw("sink")?,
            out.raw("out")?,
            lse.raw("lse")?,
            max_logit.raw("max_logit")?,
        ];
        let arguments = RawForward { call: raw, views, sink_kind };
        let [_, heads, _] = q.shape();
        let grid = (blocks(call.owned[0] * heads, WARPS), 1, THREADS);
        match &call.pages {
            None => self.launch("attend", grid, &[&arguments]),
            Some(pages) => self.launch("attend_pages", grid, &[&arguments, &pages.raw(tables)]),
        }
    }

    /// Launches the backward. `scratch` has [`CallTables::scratch_bytes`]. [`Gpu::sink_gradient`] makes dsink.
    pub fn attend_backward(
        &self,
        call: &CallTables,
        [tables, scratch]: [Area; 2],
        formats: WeightFormats,
        tensors: &BackwardTensors,
    ) -> Result<(), KernelError> {
        let BackwardTensors { q, k, v, dout, out, lse, dq, dk, dv } = tensors;
        let raw = call.raw(tables, [q, k, v], formats)?;
        tensors.check(tables, &[("the scratch", scratch)])?;
        let ([_, heads, _], [_, kv_heads, _]) = (q.shape(), k.shape());
        if scratch.bytes() < call.scratch_bytes(heads) || !scratch.address().is_multiple_of(4) {
            return Err(KernelError::shape(format!(
                "{} bytes of scratch, not {}",
                scratch.bytes(),
                call.scratch_bytes(heads)
            )));
        }
        let views = [
            q.raw("q")?,
            k.raw("k")?,
            v.raw("v")?,
            dout.raw("dout")?,
            out.raw("out")?,
            lse.raw("lse")?,
            dq.raw("dq")?,
            dk.raw("dk")?,
            dv.raw("dv")?,
        ];
        let arguments = RawBackward { call: raw, views, row_dots: scratch.address() };
        let grid = |rows: usize, heads: usize| (blocks(rows * heads, WARPS), 1, THREADS);
        self.launch("attend_queries", grid(call.owned[0], heads), &[&arguments])?;
        self.launch("attend_keys", grid(call.owned[1], kv_heads), &[&arguments])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 3] = [4, 2, 8];
    const BYTES: u64 = 4 * 2 * 8 * 2;

    /// Returns the tensor in the place of this number, of places that follow each other.
    fn tensor<'a>(place: u64) -> View<'a> {
        View::rows(Area::nowhere(place * BYTES, BYTES as usize), SHAPE, Format::Bf16)
    }

    fn statistic_at<'a>(place: u64) -> View<'a> {
        View::statistic(Area::nowhere(place * BYTES, 4 * 2 * 4), [2, 4], Format::F32)
    }

    fn heads_at<'a>(place: u64) -> View<'a> {
        View::heads(Area::nowhere(place * BYTES, 2 * 4), 2, Format::F32)
    }

    fn area<'a>(place: u64) -> Area<'a> {
        Area::nowhere(place * BYTES, BYTES as usize)
    }

    fn said(checked: Result<(), KernelError>) -> String {
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_forward_writes_apart_from_all_that_it_reads() {
        let (q, k, v) = (tensor(0), tensor(1), tensor(2));
        let (out, lse, max_logit) = (tensor(3), statistic_at(4), heads_at(5));
        let right = ForwardTensors { q, k, v, sink: Some(heads_at(6)), out, lse, max_logit };
        let [tables, plan] = [7, 8].map(area);
        let check = |forward: ForwardTensors, plan| said(forward.check(tables, &[("the plan", plan)]));
        assert_eq!(check(right, plan), "", "q, k and v in one allocation");
        assert_eq!(
            check(ForwardTensors { k: q, v: q, sink: None, ..right }, plan),
            "",
            "keys that are values"
        );
        for (wrong, plan, what) in [
            (ForwardTensors { out: q, ..right }, plan, "out is written where q lies"),
            (ForwardTensors { lse: statistic_at(2), ..right }, plan, "lse is written where v lies"),
            (
                ForwardTensors { max_logit: heads_at(6), ..right },
                plan,
                "max_logit is written where sink lies",
            ),
            (ForwardTensors { lse: statistic_at(3), ..right }, plan, "out is written where lse lies"),
            (right, tables, "the plan is written where the call's table lies"),
            (right, area(1), "the plan is written where k lies"),
            (right, area(3), "out is written where the plan lies"),
        ] {
            let said = check(wrong, plan);
            assert!(said.contains(what), "{said:?}, not {what:?}");
        }
        let short = View::rows(Area::nowhere(3 * BYTES, 0), [0, 2, 8], Format::Bf16);
        assert!(check(ForwardTensors { out: short, ..right }, plan).contains("out"), "another shape");
    }

    #[test]
    fn a_backward_writes_apart_from_all_that_it_reads() {
        let [q, k, v, dout, out, dq, dk, dv] = [0, 1, 2, 3, 4, 5, 6, 7].map(tensor);
        let right = BackwardTensors { q, k, v, dout, out, lse: statistic_at(8), dq, dk, dv };
        let [tables, workspace] = [9, 10].map(area);
        let check = |backward: BackwardTensors, own| said(backward.check(tables, &[("the workspace", own)]));
        assert_eq!(check(right, workspace), "", "gradients that are added to lie where they are written");
        assert_eq!(
            check(BackwardTensors { k: q, v: q, dout: out, ..right }, workspace),
            "",
            "read in one place"
        );
        for (wrong, own, what) in [
            (BackwardTensors { dq: dout, ..right }, workspace, "dq is written where dout lies"),
            (BackwardTensors { dk: out, ..right }, workspace, "dk is written where out lies"),
            (BackwardTensors { dv: k, ..right }, workspace, "dv is written where k lies"),
            (BackwardTensors { dv: dk, ..right }, workspace, "dk is written where dv lies"),
            (BackwardTensors { lse: statistic_at(5), ..right }, workspace, "dq is written where lse lies"),
            (right, tables, "the workspace is written where the call's table lies"),
            (right, area(6), "dk is written where the workspace lies"),
            (right, area(8), "the workspace is written where lse lies"),
        ] {
            let said = check(wrong, own);
            assert!(said.contains(what), "{said:?}, not {what:?}");
        }
    }
}
