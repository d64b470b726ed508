//! Passes that are ready to be launched, to be measured or repeated: operands from N(0, 1), padding too, the results
//! that the forward saved, tables and workspace.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_kernels::attend::{BackwardTensors, CallTables, ForwardTensors, WeightFormats};
use seamproof_kernels::backward::BackwardMode;
use seamproof_kernels::forward::{Instance, TileShape};
use seamproof_kernels::memory::{Area, DeviceBuffer};
use seamproof_kernels::view::View;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Format, Problem, Sink};
use seamproof_simulator::AttentionCall;

use crate::problem::dims;

/// The numbers of a tensor until they repeat.
const NUMBERS: usize = 1 << 22;
/// The sinks of heads, in turn: next to nothing, about as much as a key, more than all keys.
const SINKS: [f32; 3] = [-9.0, 0.5, 12.0];

/// Numbers from N(0, 1), for q, k, v and dout.
pub(crate) struct NormalNumbers {
    blocks: [DeviceBuffer; 4],
    format: Format,
}

impl NormalNumbers {
    /// Returns numbers in bf16.
    pub(crate) fn new(gpu: &Gpu) -> Result<NormalNumbers, KernelError> {
        NormalNumbers::of(gpu, Format::Bf16)
    }

    /// Returns numbers in bf16, fp16 or e4m3.
    pub(crate) fn of(gpu: &Gpu, format: Format) -> Result<NormalNumbers, KernelError> {
        let block = |seed| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            // The number is in (0, 1], so that its logarithm is finite.
            let mut uniform = || (rng.next_u32() as f32 + 1.0) / 4_294_967_296.0;
            // Two uniform numbers make a normal one (Box and Muller, Ann. Math. Stat. 29, 1958).
            let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
            let codes = (0..NUMBERS).map(|_| format.encode(f64::from(normal())).to_le_bytes());
            let bytes = codes.flat_map(|code| code.into_iter().take(element_bytes(format)));
            gpu.upload(&bytes.collect::<Vec<u8>>())
        };
        Ok(NormalNumbers { blocks: [block(1)?, block(2)?, block(3)?, block(4)?], format })
    }

    /// Returns the blocks, one after the other.
    pub(crate) fn bytes(&self, gpu: &Gpu) -> Result<Vec<u8>, KernelError> {
        let blocks = self.blocks.iter().map(|block| gpu.read(block.area())).collect::<Result<Vec<_>, _>>()?;
        Ok(blocks.concat())
    }

    /// Returns a tensor that repeats a block.
    fn tensor(&self, gpu: &Gpu, block: usize, shape: [usize; 3]) -> Result<DeviceBuffer, KernelError> {
        let bytes = bytes(shape, self.format);
        let (from, tensor) = (self.blocks[block].area(), gpu.allocate(bytes)?);
        for start in (0..bytes).step_by(from.bytes()) {
            let part = from.bytes().min(bytes - start);
            gpu.copy(from.part(0..part)?, tensor.area().part(start..start + part)?)?;
        }
        Ok(tensor)
    }
}

fn element_bytes(format: Format) -> usize {
    format.bits() as usize / 8
}

fn bytes(shape: [usize; 3], format: Format) -> usize {
    shape.iter().product::<usize>() * element_bytes(format)
}

/// Returns the format of out: bf16 beside codes of one byte.
fn of_results(format: Format) -> Format {
    if element_bytes(format) == 1 { Format::Bf16 } else { format }
}

/// Returns the formats in which P and dS of a problem enter products.
pub(crate) fn weights(problem: &Problem) -> WeightFormats {
    WeightFormats { p: problem.precision.p.format, ds: problem.precision.ds.format }
}

/// A launch of a forward.
pub(crate) type ForwardLauncher<'g> = Box<dyn Fn(&ForwardTensors) -> Result<(), KernelError> + 'g>;

/// Puts a call's tables on the GPU. Returns a launch of its forward on tensor cores, in a shape or in the one that
/// fits the call.
pub(crate) fn forward_launcher<'g>(
    gpu: &'g Gpu,
    problem: &Problem,
    shape: Option<TileShape>,
) -> Result<ForwardLauncher<'g>, KernelError> {
    let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], false)?;
    let heads = [problem.heads.q, problem.heads.kv];
    let fitting = || TileShape::of(&call, Instance::of(&call, dims(problem)), heads);
    let shape = shape.unwrap_or_else(fitting);
    let bytes = call.forward_bytes(shape, heads);
    let (tables, plan) = (gpu.upload(call.bytes())?, gpu.allocate(bytes)?);
    let weights = weights(problem);
    Ok(Box::new(move |tensors| gpu.forward(&call, [tables.area(), plan.area()], weights, shape, tensors)))
}

/// The tensors of a forward.
pub(crate) struct ForwardBuffers {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
    max_logit: DeviceBuffer,
    /// The learnable sink, where the problem has one.
    sink: Option<DeviceBuffer>,
    /// The format of q, k and v.
    format: Format,
}

impl ForwardBuffers {
    pub(crate) fn new(
        gpu: &Gpu,
        problem: &Problem,
        numbers: &NormalNumbers,
    ) -> Result<ForwardBuffers, KernelError> {
        let sinks = (0..problem.heads.q).flat_map(|head| SINKS[head % SINKS.len()].to_le_bytes());
        let sink = (problem.softmax.sink == Sink::Learnable).then(|| gpu.upload(&sinks.collect::<Vec<u8>>()));
        Ok(ForwardBuffers {
            format: numbers.format,
            sink: sink.transpose()?,
            q: numbers.tensor(gpu, 0, problem.q_shape())?,
            k: numbers.tensor(gpu, 1, problem.k_shape())?,
            v: numbers.tensor(gpu, 2, problem.v_shape())?,
            out: gpu.allocate(bytes(problem.out_shape(), of_results(numbers.format)))?,
            lse: gpu.allocate(problem.lse_shape().iter().product::<usize>() * 4)?,
            max_logit: gpu.upload(&f32::NEG_INFINITY.to_le_bytes().repeat(problem.heads.q))?,
        })
    }

    pub(crate) fn forward(&self, problem: &Problem) -> ForwardTensors<'_> {
        ForwardTensors {
            q: View::rows(self.q.area(), problem.q_shape(), self.format),
            k: View::rows(self.k.area(), problem.k_shape(), self.format),
            v: View::rows(self.v.area(), problem.v_shape(), self.format),
            sink: self.sink.as_ref().map(|sink| View::heads(sink.area(), problem.heads.q, Format::F32)),
            out: View::rows(self.out.area(), problem.out_shape(), of_results(self.format)),
            lse: View::statistic(self.lse.area(), problem.lse_shape(), Format::F32),
            max_logit: View::heads(self.max_logit.area(), problem.heads.q, Format::F32),
        }
    }
}

/// A problem's backward on tensor cores, on sets of tensors whose forward has run.
pub(crate) struct ReadyBackward<'g> {
    gpu: &'g Gpu,
    problem: &'g Problem,
    call: CallTables,
    tables: DeviceBuffer,
    pub(crate) workspace: DeviceBuffer,
    pub(crate) sets: Vec<BackwardBuffers>,
}

impl<'g> ReadyBackward<'g> {
    pub(crate) fn new(
        gpu: &'g Gpu,
        problem: &'g Problem,
        numbers: &NormalNumbers,
        sets: usize,
    ) -> Result<ReadyBackward<'g>, KernelError> {
        let call = CallTables::new(&AttentionCall::whole(problem), [problem.rows.q, problem.rows.kv], true)?;
        let tables = gpu.upload(call.bytes())?;
        let bytes = call.workspace_bytes(problem.heads.q, dims(problem));
        let workspace = gpu.allocate(bytes)?;
        let sets: Vec<_> =
            (0..sets).map(|_| BackwardBuffers::new(gpu, problem, numbers)).collect::<Result<_, _>>()?;
        let forward = forward_launcher(gpu, problem, None)?;
        sets.iter().try_for_each(|set| forward(&set.forward.forward(problem)))?;
        gpu.finish()?;
        Ok(ReadyBackward { gpu, problem, call, tables, workspace, sets })
    }

    /// Returns the tensors of a set.
    pub(crate) fn tensors(&self, set: usize) -> BackwardTensors<'_> {
        self.sets[set].backward(self.problem)
    }

    /// Launches the backward. There is one workspace, so that launches must follow one another.
    pub(crate) fn launch(&self, how: BackwardMode, tensors: &BackwardTensors) -> Result<(), KernelError> {
        let memory = [self.tables.area(), self.workspace.area()];
        self.gpu.backward(&self.call, memory, weights(self.problem), how, tensors)
    }
}

/// The tensors of a backward: those of its forward, dout, and dq, dk and dv.
pub(crate) struct BackwardBuffers {
    pub(crate) forward: ForwardBuffers,
    dout: DeviceBuffer,
    dout_format: Format,
    /// The gradients dq, dk and dv.
    pub(crate) results: [DeviceBuffer; 3],
}

impl BackwardBuffers {
    pub(crate) fn new(
        gpu: &Gpu,
        problem: &Problem,
        numbers: &NormalNumbers,
    ) -> Result<BackwardBuffers, KernelError> {
        BackwardBuffers::with_dout(gpu, problem, [numbers; 2])
    }

    /// Returns tensors of numbers, with dout of others.
    pub(crate) fn with_dout(
        gpu: &Gpu,
        problem: &Problem,
        [numbers, of_dout]: [&NormalNumbers; 2],
    ) -> Result<BackwardBuffers, KernelError> {
        let room = |shape| gpu.allocate(bytes(shape, of_results(numbers.format)));
        Ok(BackwardBuffers {
            forward: ForwardBuffers::new(gpu, problem, numbers)?,
            dout: of_dout.tensor(gpu, 3, problem.out_shape())?,
            dout_format: of_dout.format,
            results: [room(problem.q_shape())?, room(problem.k_shape())?, room(problem.v_shape())?],
        })
    }

    /// Returns what a forward and a backward write, each with its name.
    pub(crate) fn results(&self) -> [(&'static str, Area<'_>); 6] {
        let ForwardBuffers { out, lse, max_logit, .. } = &self.forward;
        let [dq, dk, dv] = &self.results;
        [("out", out), ("lse", lse), ("max_logit", max_logit), ("dq", dq), ("dk", dk), ("dv", dv)]
            .map(|(name, buffer)| (name, buffer.area()))
    }

    pub(crate) fn backward(&self, problem: &Problem) -> BackwardTensors<'_> {
        let ForwardTensors { q, k, v, out, lse, .. } = self.forward.forward(problem);
        let ([dq, dk, dv], results) = (&self.results, of_results(self.forward.format));
        BackwardTensors {
            q,
            k,
            v,
            dout: View::rows(self.dout.area(), problem.out_shape(), self.dout_format),
            out,
            lse,
            dq: View::rows(dq.area(), q.shape(), results),
            dk: View::rows(dk.area(), k.shape(), results),
            dv: View::rows(dv.area(), v.shape(), results),
        }
    }
}
