//! Attention in FP8 on the device: a forward on codes with descales, outside of any schedule.

use std::ops::Range;

use seamproof_oracle::Format;
use seamproof_simulator::emulated::ForwardLaunch;
use seamproof_simulator::schedule::Descales;
use seamproof_simulator::{AttentionCall, GuardedTensor};

use super::stretch::{Placed, Stretch};
use super::workspace::Workspace;
use crate::attend::{CallTables, ForwardTensors};
use crate::codec::load;
use crate::error::KernelError;
use crate::forward_fp8::{Fp8Shape, Fp8Tensors};
use crate::memory::Area;
use crate::turned::TurnedShape;
use crate::view::View;

/// Returns the descales of q by segment and head, and those of k and of v by segment and KV head.
fn by_tensor(descales: &[Vec<Descales>], group: usize) -> [Vec<f32>; 3] {
    let of_keys = |pick: fn(&Descales) -> f32| {
        descales.iter().flat_map(|heads| heads.iter().step_by(group.max(1)).map(pick)).collect()
    };
    [descales.iter().flatten().map(|of| of.q).collect(), of_keys(|of| of.k), of_keys(|of| of.v)]
}

impl Workspace {
    /// Runs a forward on codes of e4m3, each segment and query head of which has descales. Results are written with what
    /// lies around them, and the guard bands show what was written outside.
    pub fn attend_fp8(
        &self,
        call: &AttentionCall,
        shape: Option<Fp8Shape>,
        launch: ForwardLaunch<f32>,
    ) -> Result<(), KernelError> {
        let ForwardLaunch { q, k, v, sink, descales, out, lse, max_logit } = launch;
        let [q_rows, heads, _] = q.shape();
        let tables = CallTables::new(call, [q_rows, k.shape()[0]], false)?;
        let turned_shape = TurnedShape::of(v.shape());
        let mut stretch = Stretch::default();
        let given = [q, k, v].map(|tensor| stretch.tensor(tensor));
        let of_group = heads / k.shape()[1].max(1);
        let descales = by_tensor(descales, of_group).map(|numbers| stretch.numbers(&numbers));
        let sinks = stretch.numbers(sink);
        let call_tables = stretch.push(tables.bytes());
        let plan = stretch.room(tables.plan_bytes());
        let turned = stretch.room(turned_shape.bytes());
        let results = [&*out, &*lse, &*max_logit].map(|tensor| stretch.tensor(tensor));
        let image = stretch.into_bytes();
        self.run.set(self.run.get() + 1);
        self.memory.reserve(&self.gpu, image.len())?;
        let run = |memory: Area| {
            let area = |bytes: &Range<usize>| memory.part(bytes.clone());
            self.gpu.send(memory, &image)?;
            let view = |tensor: &GuardedTensor, placed: &Placed| {
                Ok(View::rows(area(&placed.inner)?, tensor.shape(), tensor.format()))
            };
            let statistic = |tensor: &GuardedTensor, placed: &Placed| {
                let [heads, rows, _] = tensor.shape();
                Ok(View::statistic(area(&placed.inner)?, [heads, rows], Format::F32))
            };
            let has_sink = !sink.is_empty();
            let sink = has_sink.then(|| Ok(View::heads(area(&sinks)?, heads, Format::F32))).transpose()?;
            let tensors = Fp8Tensors {
                forward: ForwardTensors {
                    q: view(q, &given[0])?,
                    k: view(k, &given[1])?,
                    v: view(v, &given[2])?,
                    sink,
                    out: view(out, &results[0])?,
                    lse: statistic(lse, &results[1])?,
                    max_logit: View::heads(area(&results[2].inner)?, heads, Format::F32),
                },
                turned: area(&turned)?,
                descales: [area(&descales[0])?, area(&descales[1])?, area(&descales[2])?],
            };
            self.gpu.turn(&tensors.forward.v, tensors.turned)?;
            let shape = shape.unwrap_or(Fp8Shape::of(&tables));
            self.gpu.forward_fp8(&tables, [area(&call_tables)?, area(&plan)?], shape, &tensors)?;
            self.gpu.read(memory.part(results[0].whole.start..image.len())?)
        };
        let bytes = self.memory.with(run)?;
        for (tensor, placed) in [out, lse, max_logit].into_iter().zip(&results) {
            let start = placed.whole.start - results[0].whole.start;
            load(tensor.format(), &bytes[start..start + placed.whole.len()], tensor.raw_mut());
        }
        Ok(())
    }
}
