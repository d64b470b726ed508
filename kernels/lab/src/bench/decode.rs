//! Speed of decoding: one query row of each sequence against all its keys, beside a device copy of as many bytes as K and V
//! have. The split shape reads these once, and has next to nothing else to do.

use std::io::Write;

use seamproof_kernels::forward::TileShape;
use seamproof_kernels::{Gpu, KernelError};
use seamproof_oracle::{Alignment, Heads, Mask, Problem, Run, Sequence, TensorRows};

use super::error::BenchError;
use super::pools::Pools;
use crate::problem::{fields, legal};
use crate::ready::{ForwardBuffers, NormalNumbers, forward_launcher};

/// The heads: a KV head for each query head, and four and eight query heads to one.
const HEADS: [(&str, Heads); 3] =
    [("mha", Heads { q: 16, kv: 16 }), ("gqa4", Heads { q: 32, kv: 8 }), ("gqa8", Heads { q: 64, kv: 8 })];
const DIM: usize = 128;
/// Numbers of sequences, and the keys of each. 0: sequences from 8,192 to 131,072 keys.
const BATCHES: [(usize, usize); 8] =
    [(64, 2048), (1, 8192), (1, 32_768), (1, 131_072), (8, 8192), (64, 8192), (8, 131_072), (32, 0)];
/// Sets of tensors are made until they are no longer kept in the L2 cache.
const BYTES_OF_SETS: usize = 512 << 20;

/// Prints every figure.
pub fn decode(gpu: &Gpu, to: &mut dyn Write) -> Result<(), BenchError> {
    let (pools, numbers) = (Pools::new(gpu)?, NormalNumbers::new(gpu)?);
    writeln!(to, "{}: one query row a sequence, heads of {DIM} in bf16; bytes of K and V", gpu.name()?)?;
    for (batch, keys) in BATCHES {
        for (name, heads) in HEADS {
            let problem = problem(batch, keys, heads)?;
            let bytes = 2 * 2 * problem.rows.kv * heads.kv * DIM;
            let buffers: Vec<ForwardBuffers> = (0..BYTES_OF_SETS.div_ceil(bytes))
                .map(|_| ForwardBuffers::new(gpu, &problem, &numbers))
                .collect::<Result<_, KernelError>>()?;
            let case = match keys {
                0 => format!("{batch} × 8k to 128k {name}"),
                _ => format!("{batch} × {keys} {name}"),
            };
            for shape in [TileShape::Split, TileShape::Short] {
                let launch = forward_launcher(gpu, &problem, Some(shape))?;
                let line = pools.line((&case, &format!("{shape:?}")), (bytes, bytes), |number| {
                    launch(&buffers[number % buffers.len()].forward(&problem))
                })?;
                writeln!(to, "{line}")?;
            }
            to.flush()?;
        }
    }
    Ok(())
}

/// Returns sequences of so many keys each, or of more and more, whose last position has a query.
fn problem(batch: usize, keys: usize, heads: Heads) -> Result<Problem, KernelError> {
    let mut end = 0;
    let sequence = |number: usize| {
        let keys = if keys == 0 { 8192 + (131_072 - 8192) * number / (batch - 1) } else { keys };
        let kv = Run::packed(end, keys, keys);
        end += keys;
        Sequence { id: number as u32, q: Run::packed(number, 1, 1), kv }
    };
    let sequences: Vec<Sequence> = (0..batch).map(sequence).collect();
    let rows = TensorRows { q: batch, kv: end };
    let bottom_right = Mask { align: Alignment::BottomRight, ..Mask::CAUSAL };
    legal(fields(sequences, rows, heads, DIM, bottom_right))
}
