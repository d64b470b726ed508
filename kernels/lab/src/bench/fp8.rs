//! Speed of the passes in FP8, beside that of the pass in bf16 in the same run. The kernel that makes v's turned copy
//! for the forward is measured by itself; the backward makes its own.

use seamproof_kernels::Gpu;
use seamproof_kernels::attend::CallTables;
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::forward::AttentionKernels;
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::turned::TurnedShape;
use seamproof_oracle::Format;
use seamproof_simulator::AttentionCall;

use super::attention::forward_ms;
use super::backward::{PRODUCTS, backward_ms};
use super::error::BenchError;
use super::figures::{Figure, Figures};
use super::timing::{TIMING, time};
use super::tracks::BenchCell;
use crate::problem::dims;
use crate::ready::NormalNumbers;
use crate::ready_fp8::{Fp8BackwardBuffers, Fp8ForwardBuffers};

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
        let sets = (0..TIMING.sets).map(|_| Fp8ForwardBuffers::new(gpu, problem, &codes));
        let sets: Vec<Fp8ForwardBuffers> = sets.collect::<Result<_, _>>()?;
        let shape = shape.unwrap_or(Fp8Shape::of(&call, dims(problem)));
        let launch = |set: usize| {
            gpu.forward_fp8(&call, [tables.area(), plan.area()], shape, &sets[set].tensors(problem))
        };
        let ms = time(gpu, launch)?;
        let turning = time(gpu, |set| sets[set].turn(gpu, problem))?;
        let in_bf16 = forward_ms(gpu, cell, AttentionKernels::Tuned, &numbers)?;
        figures.line(cell, Figure { mode: "fp8", operations: cell.operations(), ms }, (TIMING, None))?;
        let moved = 2.0 * TurnedShape::of(problem.v_shape()).bytes() as f64;
        figures.say(&format!(
            "{:32}bf16 {in_bf16:.4} ms, ratio {:.3}; turned copy {turning:.4} ms, {:.2} TB/s",
            "",
            in_bf16 / ms,
            moved / turning / 1e9
        ))?;
    }
    Ok(())
}

/// Prints for each cell and order the figure in FP8 and the ratio to bf16.
pub(super) fn backward_fp8(gpu: &Gpu, cells: &[BenchCell], figures: &mut Figures) -> Result<(), BenchError> {
    let (codes, numbers) = (NormalNumbers::of(gpu, Format::E4m3)?, NormalNumbers::new(gpu)?);
    for cell in cells {
        let problem = &cell.problem;
        let (rows, heads) = ([problem.rows.q, problem.rows.kv], [problem.heads.q, problem.heads.kv]);
        let call = CallTables::new(&AttentionCall::whole(problem), rows, true)?;
        let bytes = call.fp8_workspace_bytes(heads, dims(problem));
        let (tables, workspace) = (gpu.upload(call.bytes())?, gpu.allocate(bytes)?);
        let sets = (0..TIMING.sets).map(|_| Fp8BackwardBuffers::new(gpu, problem, [&codes; 2]));
        let sets: Vec<Fp8BackwardBuffers> = sets.collect::<Result<_, _>>()?;
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
