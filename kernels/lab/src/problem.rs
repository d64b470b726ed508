//! Problems of one rank, to run the kernels on.

use seamproof_kernels::KernelError;
use seamproof_oracle::{
    ContextParallel, Dims, Format, Heads, InputMode, Mask, Pass, Precision, Problem, ProblemFields, Run,
    Sequence, Sink, Softmax, TensorRows,
};

/// Returns a pass with its backward, in bf16, of one head dim.
pub(crate) fn fields(
    sequences: Vec<Sequence>,
    rows: TensorRows,
    heads: Heads,
    dim: usize,
    mask: Mask,
) -> ProblemFields {
    let scale = 1.0 / (dim as f32).sqrt();
    ProblemFields {
        sequences,
        rows,
        heads,
        dims: Dims { qk: dim, v: dim },
        mask,
        softmax: Softmax { scale, softcap: None, sink: Sink::None },
        precision: Precision::uniform(Format::Bf16),
        parallel: ContextParallel::single(),
        mode: InputMode::Flat,
        data_seed: 1,
        pass: Pass::Backward,
    }
}

/// Returns a pass over sequences one behind the other, each with its real and its owned rows.
pub(crate) fn packed(
    lengths: impl IntoIterator<Item = (usize, usize)>,
    heads: Heads,
    dim: usize,
    mask: Mask,
) -> ProblemFields {
    let mut rows = 0;
    let sequence = |((len, span), id)| {
        let run = Run::packed(rows, len, span);
        rows += span;
        Sequence { id, q: run, kv: run }
    };
    let sequences = lengths.into_iter().zip(0..).map(sequence).collect();
    fields(sequences, TensorRows { q: rows, kv: rows }, heads, dim, mask)
}

pub(crate) fn legal(fields: ProblemFields) -> Result<Problem, KernelError> {
    Problem::new(fields).map_err(|error| KernelError::shape(error.to_string()))
}
