//! How fast attention is on packs of sequences, in floating-point operations on visible pairs of real tokens.
//!
//! A figure is the mean time of a launch over seconds of repetitions of a recorded graph of launches, which take sets of
//! tensors in turn: more than the L2 cache holds. Inputs are drawn from N(0, 1), padding too: what a GPU's power limit
//! allows depends on the data.
//!
//! It also depends on what the GPU did before. Seen on an H200 with a limit of 700 W: after a rest it draws 740 to 750 W
//! at 1770 MHz for about 0.75 s; then its power controller steps in, and at 0.85 s a launch of 1.22 ms takes 1.52. From
//! then on the clock swings around the limit, 1620 to 1755 MHz with a period of about 0.8 s: a launch is up to 3 % faster
//! or slower, less and less over seconds. So nothing counts before the first dip is over, and then whole swings count:
//! their mean is what a long run gets, where a short look, or a median, picks a phase. Otherwise the one that is measured
//! after a rest, ours or the peer's, seems faster than the one that follows another's load.

use std::io::Write;
use std::time::Duration;

use seamproof_oracle::Problem;
use seamproof_simulator::AttentionCall;

use super::backward::backward;
use super::figures::{Figure, Figures};
use super::peer::Timing;
use super::tracks::{Cell, cells, tracks};
use super::{BenchError, mean_ms};
use crate::attend::CallTables;
use crate::error::KernelError;
use crate::forward::Attention as Kernel;
use crate::gpu::Gpu;
use crate::ready::{Launcher, Numbers, Tensors, forward_launcher, weights};

/// Warm-up until the power controller's first dip is over, then three of its swings.
pub(super) const TIMING: Timing = Timing {
    sets: 2,
    launches: 8,
    warm_up: Duration::from_millis(1500),
    measured: Duration::from_millis(2400),
};
/// A launch that takes longer is in a graph once for each set: what lies between launches is nothing to it, and a graph
/// of more would end long after the time is over.
const SLOW_MS: f64 = 20.0;

/// Which pass is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The forward, by one of its kernels.
    Forward(Kernel),
    /// The backward on tensor cores, in both orders of its sums.
    Backward,
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Attention<'a> {
    subject: Subject,
    cells: Vec<Cell>,
    peer: Option<&'a str>,
}

impl<'a> Attention<'a> {
    /// The named tracks and columns, all where none is named, beside a peer: a command of the shell that answers for it
    /// (`bench/fa4.py`).
    pub fn new(
        subject: Subject,
        [rows, columns]: [&[String]; 2],
        peer: Option<&'a str>,
    ) -> Result<Attention<'a>, BenchError> {
        Ok(Attention { subject, cells: cells(&tracks()?, [rows, columns])?, peer })
    }
}

/// Puts what a call says where the GPU reads it; what comes back launches the call by a kernel.
fn launcher<'g>(gpu: &'g Gpu, problem: &Problem, kernel: Kernel) -> Result<Launcher<'g>, KernelError> {
    match kernel {
        Kernel::Simple => simple(gpu, problem),
        Kernel::Tuned => forward_launcher(gpu, problem, None),
        Kernel::Of(shape) => forward_launcher(gpu, problem, Some(shape)),
    }
}

fn simple<'g>(gpu: &'g Gpu, problem: &Problem) -> Result<Launcher<'g>, KernelError> {
    let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], false)?;
    let tables = gpu.upload(&call.bytes)?;
    let weights = weights(problem);
    Ok(Box::new(move |tensors| gpu.attend(&call, tables.area(), weights, tensors)))
}

/// The problems that are measured, each with its name: of the named tracks and columns, of all where none is named.
pub fn problems(rows: &[String], columns: &[String]) -> Result<Vec<(String, Problem)>, BenchError> {
    let name = |cell: Cell| (format!("{} {}", cell.track, cell.column.name), cell.problem);
    Ok(cells(&tracks()?, [rows, columns])?.into_iter().map(name).collect())
}

/// Prints the figures of every cell, with the ratio to the peer's, and the ratios' geometric means. A peer that fails is
/// said so, and costs its own figures alone.
pub fn attention(gpu: &Gpu, plan: &Attention, to: &mut dyn Write) -> Result<(), BenchError> {
    let Attention { subject, cells, peer } = plan;
    writeln!(
        to,
        "{}, {} multiprocessors, at most {} MHz; {}, bf16; means over {} s of launches after {} s of warm-up",
        gpu.name()?,
        gpu.multiprocessors()?,
        gpu.clock_mhz()?,
        match subject {
            Subject::Forward(kernel) => format!("{} kernel, forward", kernel.name()),
            Subject::Backward => "backward in any order and in a fixed one".to_owned(),
        },
        TIMING.measured.as_secs_f64(),
        TIMING.warm_up.as_secs_f64()
    )?;
    let mut figures = Figures::new(*peer, to)?;
    match subject {
        Subject::Forward(kernel) => forward(gpu, *kernel, cells, &mut figures)?,
        Subject::Backward => backward(gpu, cells, &mut figures)?,
    }
    figures.means()
}

fn forward(gpu: &Gpu, kernel: Kernel, cells: &[Cell], figures: &mut Figures) -> Result<(), BenchError> {
    let numbers = Numbers::new(gpu)?;
    for cell in cells {
        let problem = &cell.problem;
        let sets = (0..TIMING.sets).map(|_| Tensors::new(gpu, problem, &numbers));
        let sets: Vec<Tensors> = sets.collect::<Result<_, _>>()?;
        let launcher = launcher(gpu, problem, kernel)?;
        let ms = time(gpu, |set| launcher(&sets[set].forward(problem)))?;
        figures.line(cell, Figure { mode: "", operations: cell.operations(), ms }, (TIMING, None))?;
    }
    Ok(())
}

/// Mean milliseconds of a launch, which is told the set of tensors whose turn it is.
pub(super) fn time(gpu: &Gpu, launch: impl Fn(usize) -> Result<(), KernelError>) -> Result<f64, KernelError> {
    let graph =
        |launches: usize| gpu.record(|| (0..launches).try_for_each(|number| launch(number % TIMING.sets)));
    let slow = f64::from(graph(TIMING.sets)?.time()?) > SLOW_MS * TIMING.sets as f64;
    let launches = if slow { TIMING.sets } else { TIMING.launches };
    Ok(mean_ms(&graph(launches)?, TIMING.warm_up, TIMING.measured)? / launches as f64)
}
