//! Speed of attention on packs of sequences, in floating-point operations on visible pairs of real tokens.
//!
//! A figure is the mean time of a launch, over seconds of repetitions of a recorded graph. The launches of a graph
//! take sets of tensors in turn, more than the L2 cache holds. Inputs are drawn from N(0, 1), padding too, because
//! what a GPU's power limit allows depends on the data.

use std::io::Write;

use seamproof_kernels::attend::CallTables;
use seamproof_kernels::forward::AttentionKernels;
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::Problem;
use seamproof_simulator::AttentionCall;

use super::backward::backward;
use super::error::BenchError;
use super::figures::{Figure, Figures};
use super::fp8::{backward_fp8, forward_fp8};
use super::timing::{TIMING, time};
use super::tracks::{BenchCell, cells, cells_and_wide, tracks};
use crate::ready::{ForwardBuffers, ForwardLauncher, NormalNumbers, forward_launcher, weights};

/// The pass that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchedPass {
    /// The forward, by one of its kernels.
    Forward(AttentionKernels),
    /// The forward in FP8, in one shape or that which fits each cell, beside that in bf16.
    ForwardFp8(Option<Fp8Shape>),
    /// The backward on tensor cores, in both orders of its sums.
    Backward,
    /// The backward in FP8, beside that in bf16, in both orders of their sums.
    BackwardFp8,
}

/// A measurement: a pass, on cells, beside a peer.
#[derive(Clone, Debug)]
pub struct AttentionBench<'a> {
    subject: BenchedPass,
    cells: Vec<BenchCell>,
    peer: Option<&'a str>,
}

impl<'a> AttentionBench<'a> {
    /// Returns the measurement of the named tracks and columns, of all where none is named. The peer is a command of
    /// the shell that answers for it (`bench/fa4.py`).
    pub fn new(
        subject: BenchedPass,
        [rows, columns]: [&[String]; 2],
        peer: Option<&'a str>,
    ) -> Result<AttentionBench<'a>, BenchError> {
        let cells = match subject {
            // Peers are asked for one head dim.
            BenchedPass::Forward(_) => cells_and_wide(&tracks()?, [rows, columns], peer.is_none())?,
            BenchedPass::ForwardFp8(_) | BenchedPass::Backward => {
                cells_and_wide(&tracks()?, [rows, columns], false)?
            }
            BenchedPass::BackwardFp8 => cells(&tracks()?, [rows, columns])?,
        };
        Ok(AttentionBench { subject, cells, peer })
    }
}

/// Puts a call's tables on the GPU. Returns a launch of its forward by a kernel.
fn launcher<'g>(
    gpu: &'g Gpu,
    problem: &Problem,
    kernel: AttentionKernels,
) -> Result<ForwardLauncher<'g>, KernelError> {
    match kernel {
        AttentionKernels::Simple => simple(gpu, problem),
        AttentionKernels::Tuned => forward_launcher(gpu, problem, None),
        AttentionKernels::Of(shape) => forward_launcher(gpu, problem, Some(shape)),
    }
}

fn simple<'g>(gpu: &'g Gpu, problem: &Problem) -> Result<ForwardLauncher<'g>, KernelError> {
    let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], false)?;
    let tables = gpu.upload(call.bytes())?;
    let weights = weights(problem);
    Ok(Box::new(move |tensors| gpu.attend(&call, tables.area(), weights, tensors)))
}

/// Returns the problems of the named tracks and columns, of all where none is named, each with its name.
pub fn problems(rows: &[String], columns: &[String]) -> Result<Vec<(String, Problem)>, BenchError> {
    let name = |cell: BenchCell| (format!("{} {}", cell.track, cell.column.name), cell.problem);
    Ok(cells(&tracks()?, [rows, columns])?.into_iter().map(name).collect())
}

/// Prints the figures of every cell with the ratio to the peer's, and the geometric means of the ratios. A peer that
/// fails is named with its error, and costs only its own figures.
pub fn attention(gpu: &Gpu, plan: &AttentionBench, to: &mut dyn Write) -> Result<(), BenchError> {
    let AttentionBench { subject, cells, peer } = plan;
    writeln!(
        to,
        "{}, {} multiprocessors, at most {} MHz; {}, bf16; means over {} s of launches after {} s of warm-up",
        gpu.name()?,
        gpu.multiprocessors()?,
        gpu.clock_mhz()?,
        match subject {
            BenchedPass::Forward(kernel) => format!("{} kernel, forward", kernel.name()),
            BenchedPass::ForwardFp8(shape) => {
                let shape = shape.map_or("tuned", Fp8Shape::name);
                format!("{shape} kernel, forward in FP8, beside the tuned kernel's")
            }
            BenchedPass::Backward => "backward in any order and in a fixed one".to_owned(),
            BenchedPass::BackwardFp8 => "backward in FP8, in both orders, beside that in bf16".to_owned(),
        },
        TIMING.measured.as_secs_f64(),
        TIMING.warm_up.as_secs_f64()
    )?;
    let mut figures = Figures::new(*peer, to)?;
    match subject {
        BenchedPass::Forward(kernel) => forward(gpu, *kernel, cells, &mut figures)?,
        BenchedPass::ForwardFp8(shape) => forward_fp8(gpu, *shape, cells, &mut figures)?,
        BenchedPass::Backward => backward(gpu, cells, &mut figures)?,
        BenchedPass::BackwardFp8 => backward_fp8(gpu, cells, &mut figures)?,
    }
    figures.means()
}

fn forward(
    gpu: &Gpu,
    kernel: AttentionKernels,
    cells: &[BenchCell],
    figures: &mut Figures,
) -> Result<(), BenchError> {
    let numbers = NormalNumbers::new(gpu)?;
    for cell in cells {
        let ms = forward_ms(gpu, cell, kernel, &numbers)?;
        figures.line(cell, Figure { mode: "", operations: cell.operations(), ms }, (TIMING, None))?;
    }
    Ok(())
}

/// Returns the mean milliseconds of a cell's forward.
pub(super) fn forward_ms(
    gpu: &Gpu,
    cell: &BenchCell,
    kernel: AttentionKernels,
    numbers: &NormalNumbers,
) -> Result<f64, BenchError> {
    let problem = &cell.problem;
    let sets = (0..TIMING.sets).map(|_| ForwardBuffers::new(gpu, problem, numbers));
    let sets: Vec<ForwardBuffers> = sets.collect::<Result<_, _>>()?;
    let launcher = launcher(gpu, problem, kernel)?;
    Ok(time(gpu, |set| launcher(&sets[set].forward(problem)))?)
}
