//! Attention in FP8 on the device: a forward and a backward on codes with descales in a schedule, and a forward outside
//! of any.
//!
//! A forward is two launches: v's turned copy is made of the keys and values that the launch reads, whatever rank they
//! are from, and lies in scratch of the launch's own. A backward makes its turned copies itself.

use std::ops::Range;

use seamproof_oracle::{Format, Run};
use seamproof_simulator::emulated::ForwardLaunch;
use seamproof_simulator::schedule::{Attend, AttendBackward, Descales};
use seamproof_simulator::{AttentionCall, GuardedTensor};

use super::cuda::CudaDevice;
use super::operations::{BackwardPlaces, ForwardPlaces};
use super::run::CudaMemory;
use super::stretch::{Banded, Stretch};
use super::workspace::Workspace;
use crate::attend::{CallTables, ForwardTensors};
use crate::backward::{BackwardMode, DqOrder};
use crate::backward_fp8::Fp8BackwardTensors;
use crate::codec::{load, store};
use crate::error::KernelError;
use crate::forward_fp8::{Fp8Shape, Fp8Tensors};
use crate::memory::Area;
use crate::metadata::TableKernels;
use crate::turned::TurnedShape;
use crate::view::View;

/// Returns the bytes of descales of dout, by run and head, of runs with rows.
pub(super) fn of_dout(
    rows: &[Run],
    descales: &[Vec<Descales>],
    heads: usize,
    memory: &mut CudaMemory,
) -> Range<usize> {
    let with_rows = rows.iter().zip(descales).filter(|(run, _)| run.len > 0);
    let numbers: Vec<f32> = with_rows
        .flat_map(|(_, of)| (0..heads).map(|head| of.get(head).map_or(1.0, |descales| descales.dout)))
        .collect();
    table(&numbers, memory)
}

/// Records numbers of f32.
fn table(numbers: &[f32], memory: &mut CudaMemory) -> Range<usize> {
    let mut bytes = vec![0; 4 * numbers.len()];
    store(Format::F32, numbers, &mut bytes);
    memory.table(&bytes)
}

/// Returns the descales of q by segment and head, those of k and of v by segment and KV head, and those of dout as of
/// q. A segment without queries is told none, and has ones.
fn by_tensor(descales: &[Vec<Descales>], [heads, kv_heads]: [usize; 2]) -> [Vec<f32>; 4] {
    let group = heads / kv_heads.max(1);
    let of = |segment: &Vec<Descales>, head: usize, pick: fn(&Descales) -> f32| {
        segment.get(head).map_or(1.0, pick)
    };
    let all = |heads: usize, each: usize, pick: fn(&Descales) -> f32| {
        let of_segment = move |segment| (0..heads).map(move |head| of(segment, head * each, pick));
        descales.iter().flat_map(of_segment).collect()
    };
    [
        all(heads, 1, |of| of.q),
        all(kv_heads, group, |of| of.k),
        all(kv_heads, group, |of| of.v),
        all(heads, 1, |of| of.dout),
    ]
}

impl CudaDevice<'_> {
    /// Records a forward on codes of e4m3. The schedule has told it the descales of its segments and heads.
    pub(super) fn attend_codes(
        &self,
        attend: &Attend,
        places: ForwardPlaces,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let ForwardPlaces { q, k, v, .. } = places;
        let mut call = CallTables::new(&attend.call, [q.rows, k.rows], false)?;
        let told = self.told(attend.table.as_ref(), &mut call, memory)?;
        let shape = self.options.codes.unwrap_or(Fp8Shape::of(&call, [q.dim, v.dim]));
        let [of_q, of_k, of_v, _] = by_tensor(&attend.descales, [q.heads, k.heads]);
        let descales = [of_q, of_k, of_v].map(|numbers| table(&numbers, memory));
        let (at, plan) = (memory.table(&call.bytes), memory.scratch(call.plan_bytes()));
        let turned = memory.scratch(TurnedShape::of([v.rows, v.heads, v.dim]).bytes());
        self.workspace.count(match shape {
            Fp8Shape::Long => "attend: forward_fp8_long",
            Fp8Shape::Short => "attend: forward_fp8_short",
        });
        memory.record(move |gpu, frame| {
            let [of_q, of_k, of_v] = &descales;
            let table = |bytes: &Range<usize>| frame.tables.part(bytes.clone());
            let tensors = Fp8Tensors {
                forward: places.tensors(frame.memory)?,
                turned: frame.scratch.part(turned.clone())?,
                descales: [table(of_q)?, table(of_k)?, table(of_v)?],
            };
            let tables = table(&at)?;
            if let Some(told) = &told {
                gpu.fill_call(told.area(frame.memory)?, &call, tables)?;
            }
            gpu.turn(&tensors.forward.v, tensors.turned)?;
            gpu.forward_fp8(&call, [tables, frame.scratch.part(plan.clone())?], shape, &tensors)
        });
        Ok(())
    }

    /// Records a backward on codes, whose launches add to nothing: a schedule adds gradients up itself.
    pub(super) fn attend_backward_on_codes(
        &self,
        attend: &AttendBackward,
        places: BackwardPlaces,
        memory: &mut CudaMemory,
    ) -> Result<(), KernelError> {
        let BackwardPlaces { q, k, v, .. } = places;
        let mut call = CallTables::new(&attend.call, [q.rows, k.rows], true)?;
        let told = self.told(attend.table.as_ref(), &mut call, memory)?;
        let heads = [q.heads, k.heads];
        let descales = by_tensor(&attend.descales, heads).map(|numbers| table(&numbers, memory));
        let at = memory.table(&call.bytes);
        let workspace = memory.scratch(call.fp8_workspace_bytes(heads, [q.dim, v.dim]));
        let how = BackwardMode::overwrite(self.options.dq).with_walks(self.options.walks);
        self.workspace.count(match how.order {
            DqOrder::Fixed => "attend backward: backward_fp8, fixed order",
            DqOrder::AsTheyCome => "attend backward: backward_fp8, any order",
        });
        memory.record(move |gpu, frame| {
            let [of_q, of_k, of_v, of_dout] = &descales;
            let table = |bytes: &Range<usize>| frame.tables.part(bytes.clone());
            let descales = [table(of_q)?, table(of_k)?, table(of_v)?, table(of_dout)?];
            let tensors = Fp8BackwardTensors { backward: places.tensors(frame.memory)?, descales };
            let tables = table(&at)?;
            if let Some(told) = &told {
                gpu.fill_call(told.area(frame.memory)?, &call, tables)?;
            }
            gpu.backward_fp8(&call, [tables, frame.scratch.part(workspace.clone())?], how, &tensors)
        });
        Ok(())
    }
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
        let [of_q, of_k, of_v, _] = by_tensor(descales, [heads, k.shape()[1]]);
        let descales = [of_q, of_k, of_v].map(|numbers| stretch.numbers(&numbers));
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
            let view = |tensor: &GuardedTensor, placed: &Banded| {
                Ok(View::rows(area(&placed.inner)?, tensor.shape(), tensor.format()))
            };
            let statistic = |tensor: &GuardedTensor, placed: &Banded| {
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
            let dims = [tensors.forward.q.shape()[2], tensors.forward.v.shape()[2]];
            let shape = shape.unwrap_or(Fp8Shape::of(&tables, dims));
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
