//! Speed of the passes in FP8, beside that of the pass in bf16 in the same run. The kernel that makes v's turned copy
//! for the forward is measured by itself; the backward makes its own.

use seamproof_kernels::attend::CallTables;
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::backward_fp8::Fp8BackwardTensors;
use seamproof_kernels::forward::{self, AttentionKernels};
use seamproof_kernels::forward_fp8::{Fp8Shape, Fp8Tensors};
use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::turned::TurnedShape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Problem};
use seamproof_simulator::AttentionCall;

use super::attention::forward_ms;
use super::backward::{PRODUCTS, backward_ms};
use super::error::BenchError;
use super::figures::{Figure, Figures};
use super::timing::{TIMING, time};
use super::tracks::BenchCell;
use crate::ready::{BackwardBuffers, ForwardBuffers, NormalNumbers};

/// The descales of heads, in turn.
const DESCALES: [f32; 3] = [0.75, 1.0, 1.5];

/// The tensors of a forward in FP8.
struct Buffers {
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

impl Buffers {
    fn new(gpu: &Gpu, problem: &Problem, numbers: &NormalNumbers) -> Result<Buffers, KernelError> {
        let of = |heads| descales(gpu, problem, heads);
        let buffers = Buffers {
            forward: ForwardBuffers::new(gpu, problem, numbers)?,
            turned: gpu.allocate(TurnedShape::of(problem.v_shape()).bytes())?,
            descales: [of(problem.heads.q)?, of(problem.heads.kv)?, of(problem.heads.kv)?],
        };
        buffers.turn(gpu, problem)?;
        Ok(buffers)
    }

    fn turn(&self, gpu: &Gpu, problem: &Problem) -> Result<(), KernelError> {
        gpu.turn(&self.forward.forward(problem).v, self.turned.area())
    }

    fn tensors(&self, problem: &Problem) -> Fp8Tensors<'_> {
        let descales = self.descales.each_ref().map(DeviceBuffer::area);
        Fp8Tensors { forward: self.forward.forward(problem), turned: self.turned.area(), descales }
    }
}

/// Returns the head dims of q and k, and of v.
fn dims(problem: &Problem) -> [usize; 2] {
    [problem.dims.qk, problem.dims.v]
}

/// Prints for each cell the figure in FP8, the ratio to bf16 where its kernels take the head dim, and the rate of the
/// turned copy.
pub(super) fn forward_fp8(
    gpu: &Gpu,
    shape: Option<Fp8Shape>,
    cells: &[BenchCell],
    figures: &mut Figures,
) -> Result<(), BenchError> {
    let (codes, numbers) = (NormalNumbers::of(gpu, Format::E4m3)?, NormalNumbers::new(gpu)?);
    for cell in cells {
        let problem = &cell.problem;
        let rows = [problem.rows.q, problem.rows.kv];
        let call = CallTables::new(&AttentionCall::whole(problem), rows, false)?;
        let (tables, plan) = (gpu.upload(call.bytes())?, gpu.allocate(call.plan_bytes())?);
        let sets = (0..TIMING.sets).map(|_| Buffers::new(gpu, problem, &codes));
        let sets: Vec<Buffers> = sets.collect::<Result<_, _>>()?;
        let shape = shape.unwrap_or(Fp8Shape::of(&call, dims(problem)));
        let launch = |set: usize| {
            gpu.forward_fp8(&call, [tables.area(), plan.area()], shape, &sets[set].tensors(problem))
        };
        let ms = time(gpu, launch)?;
        let turning = time(gpu, |set| sets[set].turn(gpu, problem))?;
        let beside = if cell.column.dim <= forward::DIM_MAX {
            let in_bf16 = forward_ms(gpu, cell, AttentionKernels::Tuned, &numbers)?;
            format!("bf16 {in_bf16:.4} ms, ratio {:.3}; ", in_bf16 / ms)
        } else {
            String::new()
        };
        figures.line(cell, Figure { mode: "fp8", operations: cell.operations(), ms }, (TIMING, None))?;
        let moved = 2.0 * TurnedShape::of(problem.v_shape()).bytes() as f64;
        figures.say(&format!(
            "{:32}{beside}turned copy {turning:.4} ms, {:.2} TB/s",
            "",
            moved / turning / 1e9
        ))?;
    }
    Ok(())
}

/// The tensors of a backward in FP8, whose forward has run.
struct BackwardSet {
    backward: BackwardBuffers,
    descales: [DeviceBuffer; 4],
}

impl BackwardSet {
    fn new(gpu: &Gpu, problem: &Problem, numbers: &NormalNumbers) -> Result<BackwardSet, KernelError> {
        let backward = BackwardBuffers::new(gpu, problem, numbers)?;
        let of = |heads| descales(gpu, problem, heads);
        let [heads, kv_heads] = [problem.heads.q, problem.heads.kv];
        let set = BackwardSet { backward, descales: [of(heads)?, of(kv_heads)?, of(kv_heads)?, of(heads)?] };
        set.run_forward(gpu, problem)?;
        Ok(set)
    }

    fn run_forward(&self, gpu: &Gpu, problem: &Problem) -> Result<(), KernelError> {
        let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], false)?;
        let (tables, plan) = (gpu.upload(call.bytes())?, gpu.allocate(call.plan_bytes())?);
        let turned = gpu.allocate(TurnedShape::of(problem.v_shape()).bytes())?;
        let forward = self.backward.forward.forward(problem);
        gpu.turn(&forward.v, turned.area())?;
        let [q, k, v, _] = self.descales.each_ref().map(DeviceBuffer::area);
        let tensors = Fp8Tensors { forward, turned: turned.area(), descales: [q, k, v] };
        gpu.forward_fp8(&call, [tables.area(), plan.area()], Fp8Shape::of(&call, dims(problem)), &tensors)?;
        gpu.finish()
    }

    fn tensors(&self, problem: &Problem) -> Fp8BackwardTensors<'_> {
        let descales = self.descales.each_ref().map(DeviceBuffer::area);
        Fp8BackwardTensors { backward: self.backward.backward(problem), descales }
    }
}

/// Prints for each cell and order the figure in FP8 and the ratio to bf16.
pub(super) fn backward_fp8(gpu: &Gpu, cells: &[BenchCell], figures: &mut Figures) -> Result<(), BenchError> {
    let (codes, numbers) = (NormalNumbers::of(gpu, Format::E4m3)?, NormalNumbers::new(gpu)?);
    for cell in cells {
        let problem = &cell.problem;
        let (rows, heads) = ([problem.rows.q, problem.rows.kv], [problem.heads.q, problem.heads.kv]);
        let call = CallTables::new(&AttentionCall::whole(problem), rows, true)?;
        let bytes = call.fp8_workspace_bytes(heads, [problem.dims.qk, problem.dims.v]);
        let (tables, workspace) = (gpu.upload(call.bytes())?, gpu.allocate(bytes)?);
        let sets = (0..TIMING.sets).map(|_| BackwardSet::new(gpu, problem, &codes));
        let sets: Vec<BackwardSet> = sets.collect::<Result<_, _>>()?;
        for order in DqOrder::ALL {
            let how = BackwardMode::overwrite(order);
            let launch = |set: usize| {
                gpu.backward_fp8(&call, [tables.area(), workspace.area()], how, &sets[set].tensors(problem))
            };
            let ms = time(gpu, launch)?;
            let in_bf16 = backward_ms(gpu, cell, order, &numbers)?;
            let figure = Figure { mode: order.name(), operations: PRODUCTS * cell.operations(), ms };
            figures.line(cell, figure, (TIMING, None))?;
            figures.say(&format!("{:32}bf16 {in_bf16:.4} ms, ratio {:.3}", "", in_bf16 / ms))?;
        }
    }
    Ok(())
}
