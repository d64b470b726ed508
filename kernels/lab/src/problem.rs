//! Problems of one rank, to run the kernels on.

use seamproof_kernels::KernelError;
use seamproof_kernels::forward::LATENT_DIMS;
use seamproof_oracle::{Dims, Heads, Mask, Problem, ProblemFields, Sequence, TensorRows};

/// Returns a pass with its backward, in bf16, of one head dim.
pub(crate) fn fields(
    sequences: Vec<Sequence>,
    rows: TensorRows,
    heads: Heads,
    dim: usize,
    mask: Mask,
) -> ProblemFields {
    ProblemFields { rows, heads, mask, dims: dims_of(dim), data_seed: 1, ..ProblemFields::of(sequences, dim) }
}

/// Returns a pass over sequences one behind the other, each with its real and its owned rows.
pub(crate) fn packed(
    lengths: impl IntoIterator<Item = (usize, usize)>,
    heads: Heads,
    dim: usize,
    mask: Mask,
) -> ProblemFields {
    let lengths: Vec<(usize, usize)> = lengths.into_iter().collect();
    ProblemFields { heads, mask, dims: dims_of(dim), data_seed: 1, ..ProblemFields::padded(&lengths, dim) }
}

/// Returns one head dim of all tensors, but no more lanes of values than the forward takes.
fn dims_of(dim: usize) -> Dims {
    Dims { qk: dim, v: dim.min(LATENT_DIMS[1]) }
}

pub(crate) fn legal(fields: ProblemFields) -> Result<Problem, KernelError> {
    Problem::new(fields).map_err(|error| KernelError::shape(error.to_string()))
}

/// Returns the head dims of q and k, and of v.
pub(crate) fn dims(problem: &Problem) -> [usize; 2] {
    [problem.dims.qk, problem.dims.v]
}
