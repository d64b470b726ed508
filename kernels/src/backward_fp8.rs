//! The backward on Hopper's tensor cores in FP8 (see `backward_codes.cuh`): what it takes, and its launch.
//!
//! q, k and v are codes of e4m3 and dout codes of e4m3 or e5m2, with a descale for each segment and head. P and dS are
//! rounded to e4m3, dS times a power of two that a tile of 64 keys has. out, dq, dk and dv are bf16 or f32. The plan,
//! the tables, the orders of dq's sums and the contract are those of the backward in 16 bits
//! ([`backward`](crate::backward)).

use seamproof_oracle::Format;

use crate::attend::{BackwardTensors, CallTables, WeightFormats};
use crate::backward::{BackwardMode, Bucket, Form, Prepared};
use crate::error::KernelError;
use crate::forward::{ALIGNMENT, ROWS_MAX, WIDE_DIM, elements, tensor_maps};
use crate::forward_fp8;
use crate::gpu::{Gpu, TensorMap};
use crate::memory::Area;
use crate::tables::on_bytes;
use crate::view::{View, number_of_codes};

/// The largest head dimension.
pub const DIM_MAX: usize = WIDE_DIM;

/// The tensors of a backward in FP8.
#[derive(Clone, Copy, Debug)]
pub struct Fp8BackwardTensors<'a> {
    /// The tensors of any backward; q, k and v in e4m3, dout in e4m3 or e5m2.
    pub backward: BackwardTensors<'a>,
    /// The descales of q, k, v and dout: f32 for each segment and head.
    pub descales: [Area<'a>; 4],
}

/// Returns what there is in a call that the kernel does not take; `None` where it takes the call. `formats` are those
/// of q, k, v and dout, of out, and of dq, dk and dv.
pub fn refusal(
    call: &CallTables,
    (inputs, out, gradients): ([Format; 4], Format, [Format; 3]),
    dims: [usize; 2],
) -> Option<String> {
    let [q, k, v, dout] = inputs;
    let results = |format: &Format| matches!(format, Format::Bf16 | Format::F32);
    let reasons = [
        ([q, k, v] != [Format::E4m3; 3], format!("q, k and v in {q}, {k} and {v}")),
        (!matches!(dout, Format::E4m3 | Format::E5m2), format!("dout in {dout} beside e4m3")),
        (!gradients.iter().all(results), "gradients in another format than bf16 or f32".to_owned()),
        (!call.is_of_one_step(), "rows of several steps".to_owned()),
        (call.owned.into_iter().any(|rows| rows >= ROWS_MAX), "too many owned rows or keys".to_owned()),
    ];
    let refused = reasons.into_iter().find_map(|(refused, what)| refused.then_some(what));
    refused.or_else(|| forward_fp8::refusal_of_any_step(call, out, dims, DIM_MAX))
}

impl CallTables {
    /// Returns the bytes of the workspace of a backward in FP8 with so many query heads and KV heads. It is linear in
    /// rows and heads.
    pub fn fp8_workspace_bytes(&self, heads: [usize; 2], dims: [usize; 2]) -> usize {
        Bucket::of_codes(dims).workspace_bytes(self, heads)
    }
}

impl Gpu {
    /// Launches the backward in FP8. `tables` holds the call's tables, and `workspace` has
    /// [`CallTables::fp8_workspace_bytes`]. There are three launches, and no wait. A call that the kernel does not take
    /// is [`KernelError::Unserved`]. What [`Gpu::backward`] says of tables that are written over, and of blocks that
    /// run at one time, holds here.
    pub fn backward_fp8(
        &self,
        call: &CallTables,
        [tables, workspace]: [Area; 2],
        how: BackwardMode,
        tensors: &Fp8BackwardTensors,
    ) -> Result<(), KernelError> {
        let Fp8BackwardTensors { backward, descales } = tensors;
        let BackwardTensors { q, k, v, dout, out, dq, dk, dv, .. } = backward;
        // The simple kernel's contract holds here too. P and dS have no say.
        let formats = WeightFormats { p: Format::F32, ds: Format::F32 };
        call.raw(tables, [q, k, v], formats)?;
        let ([_, heads, dim], [_, kv_heads, dim_v]) = (q.shape(), v.shape());
        let of = ([q, k, v, dout].map(View::format), out.format(), [dq, dk, dv].map(View::format));
        if let Some(what) = refusal(call, of, [dim, dim_v]) {
            return Err(KernelError::Unserved(what));
        }
        backward.check(tables, &[("the workspace", workspace)])?;
        let names = ["descales of q", "descales of k", "descales of v", "descales of dout"];
        let counts = [heads, kv_heads, kv_heads, heads];
        for ((name, area), heads) in names.into_iter().zip(descales).zip(counts) {
            forward_fp8::check_descales(call, name, *area, heads)?;
        }
        for (name, view) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
            on_bytes(name, view.raw(name)?.base, ALIGNMENT)?;
        }
        let bucket = Bucket::of_codes([dim, dim_v]);
        let tiled = bucket.tiled(call, [q, k, v, dout]);
        let [of_q, of_k, of_v, of_dout] = tensor_maps(self, tiled, false)?;
        let suffix = format!("{}_{}", bucket.dim(), number_of_codes(dout.format()));
        let prepared = Prepared {
            bucket,
            form: Form::Tiles,
            route: self.route(call, how, [heads, kv_heads], (bucket, bucket.dim() > 64))?,
            maps: [of_q, of_k, of_v, of_dout, TensorMap::NONE],
            elements: elements(tiled)?,
            by_threads: false,
            descales: descales.map(|area| area.address()),
            kernels: ["before", "tiles"].map(|name| format!("backward_fp8_{name}_{suffix}")),
        };
        self.launch_backward(call, [tables, workspace], how, backward, prepared)
    }
}

#[cfg(test)]
mod tests {
    use seamproof_oracle::{Run, Sink, Softmax};
    use seamproof_simulator::{AttentionCall, RowPolicy, Segment};

    use super::*;
    use crate::backward::{TILE_THREADS, shared_of};
    use crate::source::sharing_threads;

    fn call(run: Run) -> CallTables {
        let softmax = Softmax { scale: 0.125, softcap: None, sink: Sink::None };
        let segment = Segment { q: run, kv: vec![run], lo: Some(-3), hi: Some(0), prefix: 0, sink_tokens: 0 };
        let call = AttentionCall { segments: vec![segment], softmax, policy: RowPolicy::Overwrite };
        CallTables::new(&call, [64, 64], true).expect("the run lies in 64 rows")
    }

    #[test]
    fn what_is_not_taken_is_named() {
        let (e4m3, e5m2, bf16, f32, fp16) =
            (Format::E4m3, Format::E5m2, Format::Bf16, Format::F32, Format::Fp16);
        let packed = call(Run::packed(3, 20, 24));
        for dout in [e4m3, e5m2] {
            let formats = ([e4m3, e4m3, e4m3, dout], bf16, [bf16, f32, bf16]);
            assert_eq!(refusal(&packed, formats, [64, 48]), None);
        }
        // A rank's stripes are a step apart; rows of several steps are no tensor of the copy engine.
        let right = ([e4m3; 4], bf16, [bf16; 3]);
        let stripes = call(Run { offset: 1, step: 2, len: 5, span: 6 });
        assert_eq!(refusal(&stripes, right, [64, 64]), None);
        let cases = [
            (([e4m3, e5m2, e4m3, e4m3], bf16, [bf16; 3]), [64, 64], "q, k and v"),
            (([e4m3, e4m3, e4m3, bf16], bf16, [bf16; 3]), [64, 64], "dout in bf16"),
            (([e4m3; 4], bf16, [bf16, fp16, bf16]), [64, 64], "gradients in another format"),
            (([e4m3; 4], fp16, [bf16; 3]), [64, 64], "out in fp16"),
            (right, [64, 40], "64 and 40"),
        ];
        for (formats, dims, what) in cases {
            let said = refusal(&packed, formats, dims).unwrap_or_default();
            assert!(said.contains(what), "{said:?}, not {what:?}");
        }
    }

    /// The registers of the kernel are counted for the threads that are launched, and a multiprocessor has its memory.
    #[test]
    fn every_instance_is_launched_with_the_threads_that_share_its_registers() {
        for kernel in ["backward_fp8_tiles_64_3", "backward_fp8_tiles_64_4", "backward_fp8_tiles_128_3"] {
            assert_eq!(sharing_threads(kernel), Some(TILE_THREADS), "{kernel}");
            assert!(shared_of(kernel).is_some_and(|bytes| bytes <= 227 << 10), "{kernel}");
        }
    }

    /// Turned copies grow with rows, and with both kinds of heads.
    #[test]
    fn the_workspace_holds_turned_copies() {
        let packed = call(Run::packed(3, 20, 24));
        let bytes = |heads| packed.fp8_workspace_bytes(heads, [128, 128]);
        assert!(bytes([4, 2]) - bytes([4, 1]) >= 128 * 128);
        assert!(bytes([4, 2]) > packed.workspace_bytes(4, [128, 128]));
    }
}
