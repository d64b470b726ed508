//! Tensors of passes in FP8 that are ready to be launched: codes of numbers from N(0, 1), with descales.

use seamproof_kernels::attend::CallTables;
use seamproof_kernels::backward::BackwardMode;
use seamproof_kernels::backward_fp8::Fp8BackwardTensors;
use seamproof_kernels::forward_fp8::{Fp8Shape, Fp8Tensors};
use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::turned::TurnedShape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::Problem;
use seamproof_simulator::AttentionCall;

use crate::problem::dims;
use crate::ready::{BackwardBuffers, ForwardBuffers, NormalNumbers};

/// The descales of heads, in turn.
const DESCALES: [f32; 3] = [0.75, 1.0, 1.5];

/// The tensors of a forward in FP8.
pub(crate) struct Fp8ForwardBuffers {
    forward: ForwardBuffers,
    turned: DeviceBuffer,
    descales: [DeviceBuffer; 3],
}

/// Puts descales of each sequence and head on the GPU.
fn descales(gpu: &Gpu, problem: &Problem, heads: usize) -> Result<DeviceBuffer, KernelError> {
    let count = problem.sequences.len() * heads;
    let numbers = (0..count).flat_map(|place| DESCALES[place % heads % DESCALES.len()].to_le_bytes());
    gpu.upload(&numbers.collect::<Vec<u8>>())
}

impl Fp8ForwardBuffers {
    pub(crate) fn new(
        gpu: &Gpu,
        problem: &Problem,
        numbers: &NormalNumbers,
    ) -> Result<Fp8ForwardBuffers, KernelError> {
        let of = |heads| descales(gpu, problem, heads);
        let buffers = Fp8ForwardBuffers {
            forward: ForwardBuffers::new(gpu, problem, numbers)?,
            turned: gpu.allocate(TurnedShape::of(problem.v_shape()).bytes())?,
            descales: [of(problem.heads.q)?, of(problem.heads.kv)?, of(problem.heads.kv)?],
        };
        buffers.turn(gpu, problem)?;
        Ok(buffers)
    }

    pub(crate) fn turn(&self, gpu: &Gpu, problem: &Problem) -> Result<(), KernelError> {
        gpu.turn(&self.forward.forward(problem).v, self.turned.area())
    }

    pub(crate) fn tensors(&self, problem: &Problem) -> Fp8Tensors<'_> {
        let descales = self.descales.each_ref().map(DeviceBuffer::area);
        Fp8Tensors { forward: self.forward.forward(problem), turned: self.turned.area(), descales }
    }
}

/// The tensors of a backward in FP8, whose forward has run.
pub(crate) struct Fp8BackwardBuffers {
    pub(crate) backward: BackwardBuffers,
    descales: [DeviceBuffer; 4],
}

impl Fp8BackwardBuffers {
    /// Returns tensors of numbers in e4m3, with dout of others.
    pub(crate) fn new(
        gpu: &Gpu,
        problem: &Problem,
        [numbers, of_dout]: [&NormalNumbers; 2],
    ) -> Result<Fp8BackwardBuffers, KernelError> {
        let backward = BackwardBuffers::with_dout(gpu, problem, [numbers, of_dout])?;
        let of = |heads| descales(gpu, problem, heads);
        let [heads, kv_heads] = [problem.heads.q, problem.heads.kv];
        let descales = [of(heads)?, of(kv_heads)?, of(kv_heads)?, of(heads)?];
        let buffers = Fp8BackwardBuffers { backward, descales };
        buffers.run_forward(gpu, problem, None)?;
        Ok(buffers)
    }

    /// Runs the forward, in a shape or in the one that fits.
    pub(crate) fn run_forward(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        shape: Option<Fp8Shape>,
    ) -> Result<(), KernelError> {
        let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], false)?;
        let (tables, plan) = (gpu.upload(call.bytes())?, gpu.allocate(call.plan_bytes())?);
        let turned = gpu.allocate(TurnedShape::of(problem.v_shape()).bytes())?;
        let forward = self.backward.forward.forward(problem);
        gpu.turn(&forward.v, turned.area())?;
        let [q, k, v, _] = self.descales.each_ref().map(DeviceBuffer::area);
        let tensors = Fp8Tensors { forward, turned: turned.area(), descales: [q, k, v] };
        let shape = shape.unwrap_or_else(|| Fp8Shape::of(&call, dims(problem)));
        gpu.forward_fp8(&call, [tables.area(), plan.area()], shape, &tensors)?;
        gpu.finish()
    }

    /// Runs the backward.
    pub(crate) fn run_backward(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        how: BackwardMode,
    ) -> Result<(), KernelError> {
        let (rows, heads) = ([problem.rows.q, problem.rows.kv], [problem.heads.q, problem.heads.kv]);
        let call = CallTables::new(&AttentionCall::whole(problem), rows, true)?;
        let workspace = gpu.allocate(call.fp8_workspace_bytes(heads, dims(problem)))?;
        let tables = gpu.upload(call.bytes())?;
        gpu.backward_fp8(&call, [tables.area(), workspace.area()], how, &self.tensors(problem))?;
        gpu.finish()
    }

    pub(crate) fn tensors(&self, problem: &Problem) -> Fp8BackwardTensors<'_> {
        let descales = self.descales.each_ref().map(DeviceBuffer::area);
        Fp8BackwardTensors { backward: self.backward.backward(problem), descales }
    }
}
