//! A forward and a backward on tensors of their own, by any of the kernels, to be launched again and again.
//!
//! An *instance* is one of the kernels that a source is compiled to: of a shape, the largest head dim and a format.

use seamproof_kernels::attend::{BackwardTensors, CallTables, ForwardTensors, WeightFormats};
use seamproof_kernels::backward::{BackwardMode, DqOrder};
use seamproof_kernels::backward_fp8;
use seamproof_kernels::forward::{DIM_MAX, TileShape};
use seamproof_kernels::forward_fp8::Fp8Shape;
use seamproof_kernels::memory::DeviceBuffer;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{
    Alignment, Format, Heads, Mask, Pass, Precision, Problem, ProblemFields, Run, Sequence, TensorRows,
};
use seamproof_simulator::AttentionCall;

use crate::problem::{dims, fields, legal, packed};
use crate::ready::{BackwardBuffers, NormalNumbers, weights};
use crate::ready_fp8::Fp8BackwardBuffers;

/// The numbers that the largest logits of heads are raised from, in turn: none is smaller than the first, and none is
/// larger than the second.
const LARGEST: [f32; 2] = [f32::NEG_INFINITY, 1e30];
/// The byte in all other results before a launch. It makes a number of about 1 in every format, from which a sum
/// differs.
const BEFORE: u8 = 0x3f;
/// The bytes of a guard that are read at once.
const PIECE: usize = 1 << 28;

/// The kernels that run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernels {
    /// The simple kernels.
    Simple,
    /// The simple kernels, whose forward finds keys through a block table for pages of so many rows.
    Paged(usize),
    /// The kernels on tensor cores. Those of the backward do not take head dims over [`DIM_MAX`], where the simple ones run.
    Tuned(TileShape, BackwardMode),
}

/// The tables and memory that the launches of a forward and a backward of one call need beside tensors.
pub(super) struct Launches {
    kernels: Kernels,
    pub(super) call: CallTables,
    pub(super) tables: DeviceBuffer,
    /// The forward's plan, and the backward's workspace behind a guard of so many bytes.
    rooms: [DeviceBuffer; 2],
    guard: usize,
    weights: WeightFormats,
}

impl Launches {
    /// Prepares a call on tensors, given their rows of queries and keys, the heads of both, and their lanes of a head.
    /// With [`Pass::Forward`] the tables are those of a forward alone. Those of a backward with a prefix go to no forward
    /// on tensor cores.
    pub(super) fn new(
        gpu: &Gpu,
        call: &AttentionCall,
        sizes: ([usize; 2], [usize; 2], [usize; 2]),
        how: (Kernels, WeightFormats, Pass),
    ) -> Result<Launches, KernelError> {
        Launches::guarded(gpu, call, sizes, how, 0)
    }

    /// Prepares the same with a guard of so many bytes before the backward's workspace, which sums behind it must not touch.
    pub(super) fn guarded(
        gpu: &Gpu,
        call: &AttentionCall,
        (rows, heads, dims): ([usize; 2], [usize; 2], [usize; 2]),
        (kernels, weights, pass): (Kernels, WeightFormats, Pass),
        guard: usize,
    ) -> Result<Launches, KernelError> {
        let tables = CallTables::new(call, rows, pass == Pass::Backward)?;
        let call = match kernels {
            Kernels::Paged(size) => tables.in_pages(call, size)?,
            Kernels::Simple | Kernels::Tuned(..) => tables,
        };
        let bytes = match kernels {
            Kernels::Simple | Kernels::Paged(_) => [0, call.scratch_bytes(heads[0])],
            Kernels::Tuned(shape, _) if is_of_forward(dims) => {
                [call.forward_bytes(shape, heads), call.scratch_bytes(heads[0])]
            }
            // Tensors that do not lie on 16 bytes take the room of head dims of 128 at least.
            Kernels::Tuned(shape, _) => {
                let rooms = [dims, [128; 2]].map(|dims| call.workspace_bytes(heads[0], dims));
                [call.forward_bytes(shape, heads), rooms[0].max(rooms[1])]
            }
        };
        let [plan, workspace] = bytes;
        let rooms = [gpu.allocate(plan)?, gpu.allocate(guard + workspace)?];
        if guard > 0 {
            gpu.fill(rooms[1].area().part(0..guard)?, BEFORE)?;
        }
        Ok(Launches { kernels, tables: gpu.upload(call.bytes())?, call, rooms, guard, weights })
    }

    /// Returns whether the guard is as it was.
    pub(super) fn is_guard_whole(&self, gpu: &Gpu) -> Result<bool, KernelError> {
        for start in (0..self.guard).step_by(PIECE) {
            let piece = self.rooms[1].area().part(start..self.guard.min(start + PIECE))?;
            if gpu.read(piece)?.iter().any(|byte| *byte != BEFORE) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Launches both passes.
    pub(super) fn launch(
        &self,
        gpu: &Gpu,
        (forward, backward): (&ForwardTensors, &BackwardTensors),
    ) -> Result<(), KernelError> {
        self.forward(gpu, forward)?;
        self.backward(gpu, backward)
    }

    /// Launches the forward.
    pub(super) fn forward(&self, gpu: &Gpu, tensors: &ForwardTensors) -> Result<(), KernelError> {
        let (Launches { call, weights, .. }, tables) = (self, self.tables.area());
        match self.kernels {
            Kernels::Simple | Kernels::Paged(_) => gpu.attend(call, tables, *weights, tensors),
            Kernels::Tuned(shape, _) => {
                gpu.forward(call, [tables, self.rooms[0].area()], *weights, shape, tensors)
            }
        }
    }

    /// Launches the backward.
    pub(super) fn backward(&self, gpu: &Gpu, tensors: &BackwardTensors) -> Result<(), KernelError> {
        let Launches { call, weights, .. } = self;
        let room = self.rooms[1].area();
        let areas = [self.tables.area(), room.part(self.guard..room.bytes())?];
        let dims = [&tensors.q, &tensors.v].map(|tensor| tensor.shape()[2]);
        match self.kernels {
            Kernels::Tuned(_, how) if !is_of_forward(dims) => {
                gpu.backward(call, areas, *weights, how, tensors)
            }
            _ => gpu.attend_backward(call, areas, *weights, tensors),
        }
    }
}

/// Returns whether the kernels on tensor cores take head dims in a forward alone.
fn is_of_forward(dims: [usize; 2]) -> bool {
    dims.into_iter().any(|dim| dim > DIM_MAX)
}

/// A forward and a backward of a problem, with their tensors.
pub(super) struct ReadyPasses<'g> {
    gpu: &'g Gpu,
    problem: &'g Problem,
    tensors: BackwardBuffers,
    pub(super) launches: Launches,
}

impl<'g> ReadyPasses<'g> {
    /// Prepares a call on a problem's tensors.
    pub(super) fn new(
        gpu: &'g Gpu,
        (problem, call): (&'g Problem, &AttentionCall),
        kernels: Kernels,
        numbers: &NormalNumbers,
    ) -> Result<ReadyPasses<'g>, KernelError> {
        let (rows, dims) = ([problem.rows.q, problem.rows.kv], dims(problem));
        let launches = Launches::new(
            gpu,
            call,
            (rows, [problem.heads.q, problem.heads.kv], dims),
            (kernels, weights(problem), Pass::Backward),
        )?;
        Ok(ReadyPasses { gpu, problem, tensors: BackwardBuffers::new(gpu, problem, numbers)?, launches })
    }

    /// Launches both passes.
    pub(super) fn launch(&self) -> Result<(), KernelError> {
        let ReadyPasses { gpu, problem, tensors, launches } = self;
        launches.launch(gpu, (&tensors.forward.forward(problem), &tensors.backward(problem)))
    }

    /// Returns what `launch` writes, and what it leaves, by the names of results.
    pub(super) fn results(
        &self,
        launch: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Vec<NamedBytes>, KernelError> {
        results(self.gpu, &self.tensors, self.problem.heads.q, launch)
    }
}

/// A result's name and bytes.
pub(super) type NamedBytes = (&'static str, Vec<u8>);

/// Returns what `launch` writes to tensors of so many heads, and what it leaves.
fn results(
    gpu: &Gpu,
    tensors: &BackwardBuffers,
    heads: usize,
    launch: impl FnOnce() -> Result<(), KernelError>,
) -> Result<Vec<NamedBytes>, KernelError> {
    let largest = (0..heads).flat_map(|head| LARGEST[head % LARGEST.len()].to_le_bytes());
    let largest: Vec<u8> = largest.collect();
    for (name, area) in tensors.results() {
        let before = if name == "max_logit" { largest.clone() } else { vec![BEFORE; area.bytes()] };
        gpu.write(area, &before)?;
    }
    launch()?;
    tensors.results().into_iter().map(|(name, area)| Ok((name, gpu.read(area)?))).collect()
}

/// The head dims of passes in FP8: of every size, the last of forwards alone.
pub(super) const FP8_DIMS: [usize; 3] = [64, 128, 256];
/// The formats of dout in FP8.
pub(super) const FP8_DOUT: [Format; 2] = [Format::E4m3, Format::E5m2];

/// Passes of a problem in FP8, with their tensors.
pub(super) struct ReadyCodes<'g> {
    gpu: &'g Gpu,
    problem: &'g Problem,
    tensors: Fp8BackwardBuffers,
}

impl<'g> ReadyCodes<'g> {
    /// Prepares passes on numbers in e4m3, with dout of others.
    pub(super) fn new(
        gpu: &'g Gpu,
        problem: &'g Problem,
        numbers: [&NormalNumbers; 2],
    ) -> Result<ReadyCodes<'g>, KernelError> {
        Ok(ReadyCodes { gpu, problem, tensors: Fp8BackwardBuffers::new(gpu, problem, numbers)? })
    }

    /// Returns what a forward in a shape and, with head dims that it takes, a backward write.
    pub(super) fn results(&self, shape: Fp8Shape, how: BackwardMode) -> Result<Vec<NamedBytes>, KernelError> {
        let ReadyCodes { gpu, problem, tensors } = self;
        results(gpu, &tensors.backward, problem.heads.q, || {
            tensors.run_forward(gpu, problem, Some(shape))?;
            match problem.dims.qk {
                ..=backward_fp8::DIM_MAX => tensors.run_backward(gpu, problem, how),
                _ => Ok(()),
            }
        })
    }
}

/// The lengths: a tile cut short, whole ones, and more than one in every shape, with padding behind each.
const LENGTHS: [usize; 4] = [300, 1, 64, 450];
/// The rows that a sequence owns behind its real ones.
const PADDING: usize = 16;
/// The query and KV heads: four query heads to a KV head, which share tiles, and one.
const HEADS: [Heads; 2] = [Heads { q: 4, kv: 1 }, Heads { q: 2, kv: 2 }];
/// The head dims: of all sizes, and three whose rows threads bring.
pub(super) const DIMS: [usize; 7] = [64, 128, 20, 256, 130, 576, 300];
pub(super) const FORMATS: [Format; 2] = [Format::Bf16, Format::Fp16];
/// The beginnings of the names of the kernels on tensor cores.
const TENSOR_CORES: [&str; 2] = ["forward_", "backward_"];

/// Returns the shapes that have kernels of their own for a head dim: over 128 there is one.
pub(super) fn shapes(dim: usize) -> &'static [TileShape] {
    if dim > 128 { &[TileShape::Long] } else { &TileShape::ALL }
}

/// The split shape.
pub(super) const SPLIT: Kernels = Kernels::Tuned(TileShape::Split, BackwardMode::overwrite(DqOrder::Fixed));

/// Launches every instance of the kernels on tensor cores, in FP8 too, and the simple kernels, forward and backward. These are
/// small passes for a tool that watches launches, such as a sanitizer. Their results are compared elsewhere.
pub fn launch_instances(gpu: &Gpu) -> Result<(), KernelError> {
    for format in FORMATS {
        let numbers = NormalNumbers::of(gpu, format)?;
        for (dim, heads) in DIMS.into_iter().flat_map(|dim| HEADS.map(|heads| (dim, heads))) {
            let problem = padded(&LENGTHS, (format, dim, heads), Mask::CAUSAL)?;
            let call = AttentionCall::whole(&problem);
            let modes = DqOrder::ALL
                .into_iter()
                .flat_map(|order| [BackwardMode::overwrite(order), BackwardMode::accumulate(order)]);
            let tuned =
                TileShape::ALL.into_iter().zip(modes.cycle()).map(|(shape, how)| Kernels::Tuned(shape, how));
            // Any rows are pages of one row.
            for kernels in [Kernels::Simple, Kernels::Paged(1)].into_iter().chain(tuned) {
                let passes = ReadyPasses::new(gpu, (&problem, &call), kernels, &numbers)?;
                passes.results(|| passes.launch())?;
            }
            let few = few_rows((format, dim, heads))?;
            let passes = ReadyPasses::new(gpu, (&few, &AttentionCall::whole(&few)), SPLIT, &numbers)?;
            passes.results(|| passes.launch())?;
        }
    }
    launch_instances_on_codes(gpu)
}

/// Launches every instance in FP8.
fn launch_instances_on_codes(gpu: &Gpu) -> Result<(), KernelError> {
    let numbers = NormalNumbers::of(gpu, Format::E4m3)?;
    for format in FP8_DOUT {
        let of_dout = NormalNumbers::of(gpu, format)?;
        for (dim, heads) in FP8_DIMS.into_iter().flat_map(|dim| HEADS.map(|heads| (dim, heads))) {
            let problem = padded(&LENGTHS, (Format::Bf16, dim, heads), Mask::CAUSAL)?;
            let passes = ReadyCodes::new(gpu, &problem, [&numbers, &of_dout])?;
            for (shape, order) in Fp8Shape::ALL.into_iter().zip(DqOrder::ALL) {
                passes.results(shape, BackwardMode::overwrite(order))?;
            }
        }
    }
    Ok(())
}

/// The queries and keys of sequences for which each block of the split shape plans by itself ([`few_rows`]).
const FEW_ROWS: [[usize; 2]; 3] = [[1, 230], [2, 64], [1, 0]];

/// Returns a problem as in decoding: sequences of few queries behind many keys, in several pieces.
pub(super) fn few_rows((format, dim, heads): (Format, usize, Heads)) -> Result<Problem, KernelError> {
    let mut rows = [0; 2];
    let run = |rows: &mut usize, len: usize| {
        *rows += len + 1;
        Run::packed(*rows - len - 1, len, len + 1)
    };
    let [of_q, of_kv] = &mut rows;
    let sequences = FEW_ROWS.into_iter().zip(0..).map(|([q, kv], id)| Sequence {
        id,
        q: run(of_q, q),
        kv: run(of_kv, kv),
    });
    let sequences = sequences.collect();
    let mask = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    let plain = fields(sequences, TensorRows { q: rows[0], kv: rows[1] }, heads, dim, mask);
    legal(ProblemFields { precision: Precision::uniform(format), ..plain })
}

/// Returns sequences of these lengths, with padding behind each.
pub(super) fn padded(
    lengths: &[usize],
    (format, dim, heads): (Format, usize, Heads),
    mask: Mask,
) -> Result<Problem, KernelError> {
    let plain = packed(lengths.iter().map(|len| (*len, len + PADDING)), heads, dim, mask);
    legal(ProblemFields { precision: Precision::uniform(format), ..plain })
}

/// Returns the kernels on tensor cores, each with how often it was launched.
pub fn instances(gpu: &Gpu) -> impl Iterator<Item = (&str, u64)> {
    let of_tensor_cores = |name: &str| TENSOR_CORES.iter().any(|begin| name.starts_with(begin));
    gpu.launches().filter(move |(name, _)| of_tensor_cores(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_split_by_blocks() {
        for (dim, heads) in DIMS.into_iter().flat_map(|dim| HEADS.map(|heads| (dim, heads))) {
            let problem = few_rows((Format::Bf16, dim, heads)).expect("a problem");
            let rows = [problem.rows.q, problem.rows.kv];
            let call =
                CallTables::new(&AttentionCall::whole(&problem), rows, true).expect("runs in the rows");
            assert!(call.is_split_by_blocks([heads.q, heads.kv]), "head dim {dim}, {heads:?}");
        }
    }
}
