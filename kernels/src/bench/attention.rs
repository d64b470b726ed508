//! How fast attention is on packs of sequences, in floating-point operations on visible pairs of real tokens.
//!
//! A figure is the median of repetitions of a recorded graph of launches, which take sets of tensors in turn: more than the
//! L2 cache holds. Inputs are drawn from N(0, 1), padding too: what a GPU's power limit allows depends on the data.

use std::io::Write;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_oracle::{Format, Problem};
use seamproof_simulator::AttentionCall;

use super::peer::{Peer, Timing};
use super::tracks::{Cell, LONG, cells, tracks};
use super::{BenchError, median_ms};
use crate::attend::{CallTables, Forward, WeightFormats};
use crate::error::KernelError;
use crate::forward::Shape;
use crate::gpu::{Buffer, Gpu};
use crate::view::View;

const TIMING: Timing = Timing { sets: 2, launches: 8, warm_up: 3, repetitions: 21 };
const FORMATS: WeightFormats = WeightFormats { p: Format::Bf16, ds: Format::Bf16 };
/// Numbers of a tensor until they repeat.
const NUMBERS: usize = 1 << 22;
const BF16_BYTES: usize = 2;

/// The kernels that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// The one for tensor cores, in the shape that it chooses.
    Tuned,
    /// The same for long sequences.
    Long,
    /// The same for short sequences.
    Short,
    /// The simple one that serves every call: slow, so that only short tracks end soon.
    Simple,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The kernel.
    pub kernel: Kernel,
    /// Names of tracks; all where there is none.
    pub tracks: &'a [String],
    /// Names of columns; all where there is none.
    pub columns: &'a [String],
    /// A command of the shell that answers for a peer (`bench/fa4.py`).
    pub peer: Option<&'a str>,
}

/// Launches one forward.
type Launcher<'g> = Box<dyn Fn(&Forward) -> Result<(), KernelError> + 'g>;

impl Kernel {
    /// Every kernel, the one that is measured where none is named first.
    pub const ALL: [Kernel; 4] = [Kernel::Tuned, Kernel::Long, Kernel::Short, Kernel::Simple];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Tuned => "tuned",
            Kernel::Long => "long",
            Kernel::Short => "short",
            Kernel::Simple => "simple",
        }
    }

    /// Puts what a call says where the GPU reads it; what comes back launches the call.
    fn ready<'g>(
        self,
        gpu: &'g Gpu,
        call: &AttentionCall,
        rows: [usize; 2],
    ) -> Result<Launcher<'g>, KernelError> {
        match self {
            Kernel::Tuned => tuned(gpu, call, rows, None),
            Kernel::Long => tuned(gpu, call, rows, Some(Shape::Long)),
            Kernel::Short => tuned(gpu, call, rows, Some(Shape::Short)),
            Kernel::Simple => simple(gpu, call, rows),
        }
    }
}

fn simple<'g>(gpu: &'g Gpu, call: &AttentionCall, rows: [usize; 2]) -> Result<Launcher<'g>, KernelError> {
    let call = CallTables::new(call, rows, false)?;
    let tables = gpu.upload(&call.bytes)?;
    Ok(Box::new(move |tensors| gpu.attend(&call, tables.area(), FORMATS, tensors)))
}

fn tuned<'g>(
    gpu: &'g Gpu,
    call: &AttentionCall,
    rows: [usize; 2],
    shape: Option<Shape>,
) -> Result<Launcher<'g>, KernelError> {
    let call = CallTables::new(call, rows, false)?;
    let (tables, plan) = (gpu.upload(&call.bytes)?, gpu.allocate(call.plan_bytes())?);
    let shape = shape.unwrap_or(Shape::of(&call));
    Ok(Box::new(move |tensors| gpu.forward(&call, [tables.area(), plan.area()], FORMATS, shape, tensors)))
}

/// The problems that are measured, each with its name: of the named tracks and columns, of all where none is named.
pub fn problems(rows: &[String], columns: &[String]) -> Result<Vec<(String, Problem)>, BenchError> {
    let name = |cell: Cell| (format!("{} {}", cell.track, cell.column.name), cell.problem);
    Ok(cells(&tracks()?, [rows, columns])?.into_iter().map(name).collect())
}

/// Prints the figures of every cell, with the ratio to the peer's, and the ratios' geometric means. A peer that fails is
/// said so, and costs its own figures alone.
pub fn attention(gpu: &Gpu, plan: &Attention, to: &mut dyn Write) -> Result<(), BenchError> {
    let Attention { kernel, tracks: rows, columns, peer } = *plan;
    let cells = cells(&tracks()?, [rows, columns])?;
    writeln!(
        to,
        "{}, {} multiprocessors, at most {} MHz; {} kernel, forward, bf16; medians of {} times {} launches",
        gpu.name()?,
        gpu.multiprocessors()?,
        gpu.clock_mhz()?,
        kernel.name(),
        TIMING.repetitions,
        TIMING.launches
    )?;
    let numbers = numbers(gpu)?;
    let mut peer = peer.map(Peer::start).transpose().or_else(|what| {
        writeln!(to, "peer: {what}")?;
        Ok::<_, BenchError>(None)
    })?;
    let mut ratios = Vec::new();
    for cell in &cells {
        let ours = time(gpu, kernel, cell, &numbers)?;
        write!(to, "{:<12} {:<12} {}", cell.track, cell.column.name, figure(cell, ours))?;
        match peer.as_mut().map(|peer| peer.time(cell, TIMING)) {
            None => writeln!(to)?,
            Some(Err(what)) => writeln!(to, "   peer: {what}")?,
            Some(Ok(theirs)) => {
                writeln!(to, "   peer {}   ratio {:.3}", figure(cell, theirs), theirs / ours)?;
                ratios.push((cell, theirs / ours));
            }
        }
        to.flush()?;
    }
    means(&ratios, to)?;
    Ok(())
}

fn figure(cell: &Cell, ms: f64) -> String {
    format!("{ms:>9.4} ms {:>7.1} TFLOP/s", cell.operations() / ms / 1e9)
}

/// The geometric mean and the least of the ratios of long cells, and of each other track's.
fn means(ratios: &[(&Cell, f64)], to: &mut dyn Write) -> std::io::Result<()> {
    let group = |cell: &Cell| match LONG.contains(&cell.track.as_str()) {
        true => "long tracks".to_owned(),
        false => cell.track.clone(),
    };
    for same in ratios.chunk_by(|(a, _), (b, _)| group(a) == group(b)) {
        let least = same.iter().map(|(_, ratio)| *ratio).fold(f64::INFINITY, f64::min);
        let mean = (same.iter().map(|(_, ratio)| ratio.ln()).sum::<f64>() / same.len() as f64).exp();
        let (name, cells) = (group(same[0].0), same.len());
        writeln!(to, "{name:<12} {cells} cells: ratio {mean:.3} in the geometric mean, {least:.3} at least")?;
    }
    Ok(())
}

/// Tensors of one launch.
struct Tensors {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    out: Buffer,
    lse: Buffer,
    max_logit: Buffer,
}

impl Tensors {
    fn new(gpu: &Gpu, cell: &Cell, numbers: &[Buffer; 3]) -> Result<Tensors, KernelError> {
        let problem = &cell.problem;
        let bytes = |shape: [usize; 3]| shape.iter().product::<usize>() * BF16_BYTES;
        let filled = |shape: [usize; 3], from: &Buffer| {
            let tensor = gpu.allocate(bytes(shape))?;
            let (end, period) = (bytes(shape), from.area().bytes());
            for start in (0..end).step_by(period) {
                let part = period.min(end - start);
                gpu.copy(from.area().part(0..part)?, tensor.area().part(start..start + part)?)?;
            }
            Ok::<Buffer, KernelError>(tensor)
        };
        let [q, k, v] = numbers;
        Ok(Tensors {
            q: filled(problem.q_shape(), q)?,
            k: filled(problem.k_shape(), k)?,
            v: filled(problem.v_shape(), v)?,
            out: gpu.allocate(bytes(problem.out_shape()))?,
            lse: gpu.allocate(problem.lse_shape().iter().product::<usize>() * 4)?,
            max_logit: gpu.upload(&f32::NEG_INFINITY.to_le_bytes().repeat(problem.heads.q))?,
        })
    }

    fn forward(&self, cell: &Cell) -> Forward<'_> {
        let problem = &cell.problem;
        Forward {
            q: View::rows(self.q.area(), problem.q_shape(), Format::Bf16),
            k: View::rows(self.k.area(), problem.k_shape(), Format::Bf16),
            v: View::rows(self.v.area(), problem.v_shape(), Format::Bf16),
            sink: None,
            out: View::rows(self.out.area(), problem.out_shape(), Format::Bf16),
            lse: View::statistic(self.lse.area(), problem.lse_shape(), Format::F32),
            max_logit: View::heads(self.max_logit.area(), problem.heads.q, Format::F32),
        }
    }
}

/// Median milliseconds of a launch.
fn time(gpu: &Gpu, kernel: Kernel, cell: &Cell, numbers: &[Buffer; 3]) -> Result<f64, KernelError> {
    let problem = &cell.problem;
    let sets: Vec<Tensors> =
        (0..TIMING.sets).map(|_| Tensors::new(gpu, cell, numbers)).collect::<Result<_, _>>()?;
    let launcher = kernel.ready(gpu, &AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv])?;
    let launches = || (0..TIMING.launches).map(|launch| &sets[launch % TIMING.sets]);
    let graph = gpu.record(|| launches().try_for_each(|tensors| launcher(&tensors.forward(cell))))?;
    Ok(median_ms(&graph, TIMING.warm_up, TIMING.repetitions)? / TIMING.launches as f64)
}

/// Numbers from N(0, 1) in bf16, for q, k and v.
fn numbers(gpu: &Gpu) -> Result<[Buffer; 3], KernelError> {
    let block = |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // In (0, 1], whose logarithm is finite.
        let mut uniform = || (rng.next_u32() as f32 + 1.0) / 4_294_967_296.0;
        // Box and Muller (Ann. Math. Stat. 29, 1958): two uniform numbers make a normal one.
        let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
        let bytes =
            (0..NUMBERS).flat_map(|_| (Format::Bf16.encode(f64::from(normal())) as u16).to_le_bytes());
        gpu.upload(&bytes.collect::<Vec<u8>>())
    };
    Ok([block(1)?, block(2)?, block(3)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_of_long_tracks_together_and_of_others_apart() {
        let cells = cells(&tracks().unwrap(), [&[], &["mha-d64".to_owned()]]).unwrap();
        let ratios: Vec<_> = cells.iter().zip([1.0, 2.0, 4.0, 3.0, 5.0]).collect();
        let mut text = Vec::new();
        means(&ratios, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[0], "long tracks  3 cells: ratio 2.000 in the geometric mean, 1.000 at least");
        assert!(lines[1].starts_with("short128") && lines[1].contains("3.000"), "{text}");
    }
}
