//! Tensors of a cell: operands from N(0, 1), padding too, and room for results.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use seamproof_oracle::Format;

use super::tracks::Cell;
use crate::attend::{Backward, Forward};
use crate::error::KernelError;
use crate::gpu::{Buffer, Gpu};
use crate::view::View;

/// Numbers of a tensor until they repeat.
const NUMBERS: usize = 1 << 22;
const BF16_BYTES: usize = 2;

/// Numbers from N(0, 1) in bf16, for q, k, v and dout.
pub(super) struct Numbers([Buffer; 4]);

impl Numbers {
    pub(super) fn new(gpu: &Gpu) -> Result<Numbers, KernelError> {
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
        Ok(Numbers([block(1)?, block(2)?, block(3)?, block(4)?]))
    }

    /// The blocks one after the other.
    pub(super) fn bytes(&self, gpu: &Gpu) -> Result<Vec<u8>, KernelError> {
        let blocks = self.0.iter().map(|block| gpu.read(block.area())).collect::<Result<Vec<_>, _>>()?;
        Ok(blocks.concat())
    }

    /// A tensor that repeats a block.
    fn tensor(&self, gpu: &Gpu, block: usize, shape: [usize; 3]) -> Result<Buffer, KernelError> {
        let (from, tensor) = (self.0[block].area(), gpu.allocate(bytes(shape))?);
        for start in (0..bytes(shape)).step_by(from.bytes()) {
            let part = from.bytes().min(bytes(shape) - start);
            gpu.copy(from.part(0..part)?, tensor.area().part(start..start + part)?)?;
        }
        Ok(tensor)
    }
}

fn bytes(shape: [usize; 3]) -> usize {
    shape.iter().product::<usize>() * BF16_BYTES
}

/// Tensors of a forward.
pub(super) struct Tensors {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    out: Buffer,
    lse: Buffer,
    max_logit: Buffer,
}

impl Tensors {
    pub(super) fn new(gpu: &Gpu, cell: &Cell, numbers: &Numbers) -> Result<Tensors, KernelError> {
        let problem = &cell.problem;
        Ok(Tensors {
            q: numbers.tensor(gpu, 0, problem.q_shape())?,
            k: numbers.tensor(gpu, 1, problem.k_shape())?,
            v: numbers.tensor(gpu, 2, problem.v_shape())?,
            out: gpu.allocate(bytes(problem.out_shape()))?,
            lse: gpu.allocate(problem.lse_shape().iter().product::<usize>() * 4)?,
            max_logit: gpu.upload(&f32::NEG_INFINITY.to_le_bytes().repeat(problem.heads.q))?,
        })
    }

    pub(super) fn forward(&self, cell: &Cell) -> Forward<'_> {
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

/// Tensors of a backward: those of its forward, dout, and dq, dk and dv.
pub(super) struct Gradients {
    pub(super) forward: Tensors,
    dout: Buffer,
    /// dq, dk, dv.
    pub(super) results: [Buffer; 3],
}

impl Gradients {
    pub(super) fn new(gpu: &Gpu, cell: &Cell, numbers: &Numbers) -> Result<Gradients, KernelError> {
        let problem = &cell.problem;
        let room = |shape| gpu.allocate(bytes(shape));
        Ok(Gradients {
            forward: Tensors::new(gpu, cell, numbers)?,
            dout: numbers.tensor(gpu, 3, problem.out_shape())?,
            results: [room(problem.q_shape())?, room(problem.k_shape())?, room(problem.v_shape())?],
        })
    }

    pub(super) fn backward(&self, cell: &Cell) -> Backward<'_> {
        let (problem, Forward { q, k, v, out, lse, .. }) = (&cell.problem, self.forward.forward(cell));
        let [dq, dk, dv] = &self.results;
        Backward {
            q,
            k,
            v,
            dout: View::rows(self.dout.area(), problem.out_shape(), Format::Bf16),
            out,
            lse,
            dq: View::rows(dq.area(), q.shape(), Format::Bf16),
            dk: View::rows(dk.area(), k.shape(), Format::Bf16),
            dv: View::rows(dv.area(), v.shape(), Format::Bf16),
        }
    }
}
