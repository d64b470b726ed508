//! Faults at the call: any subject, even a closed kernel, is called wrongly while the judge holds the right problem.
//!
//! A [`Miscall`] changes what the subject is told (window, lengths, scale, rows of an input) or its results (rows
//! swapped, a factor, a format). The results therefore carry the subject's own noise. On a case where the change
//! leaves the right answer as it is, the fault does not show: it is *equivalent* there
//! ([`Miscalled::shows`](super::Miscalled::shows)).

use std::sync::LazyLock;

use ndarray::{Array3, Axis, s};
use seamproof_oracle::{Alignment, Format, Inputs, Problem, Sequence, Sink};
use seamproof_simulator::faults::find;

use super::miscall::{Miscall, ROWS, VALUES, told};
use super::misreads::MISREADS;
use super::missteps::MISSTEPS;
use crate::subject::{Backend, Outputs, RankGradients, RankOutputs, RunError};

/// Source of tests and tolerances that let such faults pass.
const TE_TOLERANCE: &str =
    "https://github.com/NVIDIA/TransformerEngine/blob/main/tests/pytorch/attention/run_attention_with_cp.py";

/// Source of kernels that reorder rows, and lose or double some.
const REORDER: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/fused_attn/context_parallel.cu";

/// Source of partial sums of dk and dq that were lost, or added once too often.
const HALVED: &str = "https://github.com/zhuzilin/ring-flash-attention/commit/4072701";

/// Source of statistics whose rows are padded, which callers take apart themselves.
const LSE_ROWS: &str = "https://github.com/zhuzilin/ring-flash-attention/blob/main/ring_flash_attn/utils.py";

/// Every miscall.
pub static MISCALLS: LazyLock<Vec<Miscall>> =
    LazyLock::new(|| AT_THE_CALL.into_iter().chain(MISREADS).chain(MISSTEPS).collect());

/// Faults in what the subject is told or given, or in what is taken from it.
const AT_THE_CALL: [Miscall; 27] = [
    Miscall {
        id: "call-window-narrower",
        imitates: "the left window bound arrives one smaller",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1212",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| f.mask.left = f.mask.left.map(|left| left.saturating_sub(1)))
        },
    },
    Miscall {
        id: "call-window-wider",
        imitates: "the right window bound arrives one larger",
        source: "https://github.com/huggingface/transformers/issues/40163",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| {
                f.mask.right = f.mask.right.map(|right| right.saturating_add(1));
            })
        },
    },
    Miscall {
        id: "call-other-corner",
        imitates: "the diagonal ends in the other corner",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/960",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| {
                f.mask.align = match f.mask.align {
                    Alignment::TopLeft => Alignment::BottomRight,
                    Alignment::BottomRight => Alignment::TopLeft,
                }
            })
        },
    },
    Miscall {
        id: "call-last-key-lost",
        imitates: "the key length of the last sequence arrives one short",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/3331",
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| {
                if let Some(last) = last_with(&mut f.sequences, |sequence| sequence.kv.len > 0) {
                    last.kv.len -= 1;
                }
            })
        },
    },
    Miscall {
        id: "call-padding-key-seen",
        imitates: "the key length of a padded sequence arrives as its padded length",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/1354",
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| {
                if let Some(last) = last_with(&mut f.sequences, |sequence| sequence.kv.len < sequence.kv.span)
                {
                    last.kv.len = last.kv.span;
                }
            })
        },
    },
    Miscall {
        id: "call-query-lost",
        imitates: "the query length of the first sequence arrives one short",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| {
                if let Some(first) = f.sequences.iter_mut().find(|sequence| sequence.q.len > 0) {
                    first.q.len -= 1;
                }
            })
        },
    },
    Miscall {
        id: "call-scale-off",
        imitates: "the scale is 2^-8 too large: it went through bf16",
        source: "https://github.com/ml-explore/mlx/pull/3119",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| f.softmax.scale *= 1.0 + 1.0 / 256.0)
        },
    },
    Miscall {
        id: "call-scale-of-head-dim",
        imitates: "the scale is 1/√d whatever was asked",
        source: "https://github.com/huggingface/pytorch-image-models/issues/2385",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            told(backend, problem, inputs, |f| f.softmax.scale = 1.0 / (f.dims.qk as f32).sqrt())
        },
    },
    Miscall {
        id: "call-softcap-dropped",
        imitates: "the soft cap does not reach the kernel",
        source: "https://github.com/Dao-AILab/flash-attention/issues/2424",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| told(backend, problem, inputs, |f| f.softmax.softcap = None),
    },
    Miscall {
        id: "call-sink-dropped",
        imitates: "the sink does not reach the kernel; its gradient is 0",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3551",
        entries: &[],
        caught_by: VALUES,
        edit: sink_dropped,
    },
    Miscall {
        id: "call-v-row-shifted",
        imitates: "values lie one row behind their keys",
        source: "https://github.com/flagos-ai/FlagAttention/pull/46",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            given(backend, problem, inputs, |inputs| v_shifted(problem, &mut inputs.v))
        },
    },
    Miscall {
        id: "call-k-rows-of-two-sequences-swapped",
        imitates: "the first keys of two sequences are exchanged: a page or offset of a neighbour",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/2596",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            given(backend, problem, inputs, |inputs| k_swapped(problem, &mut inputs.k))
        },
    },
    Miscall {
        id: "call-row-lost-in-a-conversion",
        imitates: "a conversion from THD ends one row early: the longest sequence's last key and value are zeros",
        source: "https://github.com/NVIDIA/TransformerEngine/pull/3063",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            given(backend, problem, inputs, |inputs| last_key_lost(problem, inputs))
        },
    },
    Miscall {
        id: "call-kv-heads-rotated",
        imitates: "query heads read the KV head after their own",
        source: "https://github.com/ekzhang/jax-js/pull/180",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            given(backend, problem, inputs, |inputs| {
                (inputs.k, inputs.v) = (heads_rotated(&inputs.k), heads_rotated(&inputs.v));
            })
        },
    },
    Miscall {
        id: "call-dout-row-zero",
        imitates: "one query row is missing from the backward",
        source: TE_TOLERANCE,
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            given(backend, problem, inputs, |inputs| {
                let rows = problem.sequences.iter().flat_map(|sequence| sequence.q.real_rows()).last();
                if let Some(row) = rows.filter(|&row| row < inputs.dout.shape()[0]) {
                    inputs.dout.index_axis_mut(Axis(0), row).fill(0.0);
                }
            })
        },
    },
    Miscall {
        id: "call-out-rows-swapped",
        imitates: "a reorder exchanges two rows of out",
        source: REORDER,
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            taken(backend, problem, inputs, |rank| {
                if let [a, b, ..] = rows_of_first(problem, rank.out.shape()[0])[..] {
                    let (one, two) =
                        (rank.out.slice(s![a, .., ..]).to_owned(), rank.out.slice(s![b, .., ..]).to_owned());
                    rank.out.slice_mut(s![a, .., ..]).assign(&two);
                    rank.out.slice_mut(s![b, .., ..]).assign(&one);
                }
            })
        },
    },
    Miscall {
        id: "call-lse-in-bf16",
        imitates: "the LSE goes through bf16 on its way out",
        source: "https://github.com/tenstorrent/tt-metal/pull/41683",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            taken(backend, problem, inputs, |rank| {
                if let Some(lse) = &mut rank.lse {
                    lse.mapv_inplace(|lse| real(lse, |lse| Format::Bf16.round_f32(lse)));
                }
            })
        },
    },
    Miscall {
        id: "call-lse-read-at-the-plain-stride",
        imitates: "the LSE's rows are padded to a multiple of 128, and a caller steps from head to head by the rows alone",
        source: LSE_ROWS,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            lse_restrided(backend, problem, inputs, |[_, rows]| [[padded(rows), 1], [rows, 1]])
        },
    },
    Miscall {
        id: "call-lse-written-at-the-plain-stride",
        imitates: "a kernel writes an LSE with padded rows as if they were not, head after head without padding",
        source: LSE_ROWS,
        entries: &[],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            lse_restrided(backend, problem, inputs, |[_, rows]| [[rows, 1], [padded(rows), 1]])
        },
    },
    Miscall {
        id: "call-lse-by-row-read-by-head",
        imitates: "packed sequences have the heads of a row side by side in the LSE, and a caller reads it head by head",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/1575",
        entries: &[119],
        caught_by: ROWS,
        edit: |backend, problem, inputs| {
            lse_restrided(backend, problem, inputs, |[heads, rows]| [[1, heads], [rows, 1]])
        },
    },
    Miscall {
        id: "call-dk-off",
        imitates: "dk is 2^-6 too large: a factor kept in fp8",
        source: "https://github.com/ROCm/flash-attention/pull/162",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                let format = problem.precision.gradients.format;
                gradients.dk.mapv_inplace(|x| real(x, |x| format.round_f32(x * (1.0 + 1.0 / 64.0))));
            })
        },
    },
    Miscall {
        id: "call-dk-of-a-head-halved",
        imitates: "one of two partial sums of a head's dk is lost",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/4072701",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                gradients.dk.index_axis_mut(Axis(1), 0).mapv_inplace(|x| real(x, |x| x / 2.0));
            })
        },
    },
    Miscall {
        id: "call-dq-and-dk-halved",
        imitates: "the logit gradients are half of what they should be, on every head",
        source: HALVED,
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                gradients.dq.mapv_inplace(|x| real(x, |x| x / 2.0));
                gradients.dk.mapv_inplace(|x| real(x, |x| x / 2.0));
            })
        },
    },
    Miscall {
        id: "call-dk-doubled",
        imitates: "every partial sum of dk is added twice",
        source: HALVED,
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                let format = problem.precision.gradients.format;
                gradients.dk.mapv_inplace(|x| real(x, |x| format.round_f32(x * 2.0)));
            })
        },
    },
    Miscall {
        id: "call-dsink-halved",
        imitates: "the sink's gradient is averaged over two ranks that should add theirs",
        source: "https://github.com/NVIDIA/Megatron-LM/commit/3bdcbbbe5d",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                gradients.dsink.mapv_inplace(|x| real(x, |x| x / 2.0));
            })
        },
    },
    Miscall {
        id: "call-dq-stale",
        imitates: "dq is accumulated onto 2^-4 of the row before: a buffer that was not cleared",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/756f085",
        entries: &[],
        caught_by: VALUES,
        edit: |backend, problem, inputs| {
            gradients_taken(backend, problem, inputs, |gradients| {
                let format = problem.precision.gradients.format;
                if let [a, b, ..] = rows_of_first(problem, gradients.dq.shape()[0])[..] {
                    let stale = gradients.dq.slice(s![a, .., ..]).to_owned();
                    let mut row = gradients.dq.slice_mut(s![b, .., ..]);
                    row.zip_mut_with(&stale, |x, stale| *x = format.round_f32(*x + stale / 16.0));
                }
            })
        },
    },
    Miscall {
        id: "call-dv-of-half-the-queries",
        imitates: "the last half of the query blocks never reach dv",
        source: "https://github.com/zhuzilin/ring-flash-attention/commit/4072701",
        entries: &[],
        caught_by: VALUES,
        edit: dv_of_half,
    },
];

/// Returns the miscall with this id.
pub fn miscall(id: &str) -> Option<&'static Miscall> {
    find(MISCALLS.iter(), id)
}

/// Runs on other inputs.
fn given(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    edit: impl Fn(&mut Inputs),
) -> Result<Outputs, RunError> {
    let mut inputs = inputs.clone();
    edit(&mut inputs);
    backend.run(problem, &inputs)
}

/// Runs the problem, and spoils the results of each rank.
fn taken(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    spoil: impl Fn(&mut RankOutputs),
) -> Result<Outputs, RunError> {
    let mut outputs = backend.run(problem, inputs)?;
    outputs.ranks.iter_mut().for_each(spoil);
    Ok(outputs)
}

fn gradients_taken(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    spoil: impl Fn(&mut RankGradients),
) -> Result<Outputs, RunError> {
    taken(backend, problem, inputs, |rank| {
        if let Some(gradients) = &mut rank.gradients {
            spoil(gradients);
        }
    })
}

/// Returns a number of rows, padded as FlashAttention and cuDNN pad those of statistics.
fn padded(rows: usize) -> usize {
    rows.next_multiple_of(128)
}

/// Takes the LSE of each rank from memory in which heads and rows have other strides for who writes and who reads them.
/// `strides` returns both, each of heads and rows, given the numbers of heads and rows.
fn lse_restrided(
    backend: &dyn Backend,
    problem: &Problem,
    inputs: &Inputs,
    strides: fn([usize; 2]) -> [[usize; 2]; 2],
) -> Result<Outputs, RunError> {
    taken(backend, problem, inputs, |rank| {
        let Some(lse) = &mut rank.lse else { return };
        let (heads, rows) = lse.dim();
        let [written, read] = strides([heads, rows]);
        let mut memory = vec![f32::NAN; heads * padded(rows)];
        for ((head, row), value) in lse.indexed_iter() {
            memory[head * written[0] + row * written[1]] = *value;
        }
        lse.indexed_iter_mut()
            .for_each(|((head, row), value)| *value = memory[head * read[0] + row * read[1]]);
    })
}

/// Changes an element that was written; unwritten bits stay.
fn real(value: f32, change: impl Fn(f32) -> f32) -> f32 {
    if seamproof_simulator::is_unwritten(value) { value } else { change(value) }
}

fn last_with(sequences: &mut [Sequence], test: impl Fn(&Sequence) -> bool) -> Option<&mut Sequence> {
    sequences.iter_mut().rev().find(|sequence| test(sequence))
}

/// Returns the first two real rows of the first sequence that has two, where a tensor has the problem's own layout.
fn rows_of_first(problem: &Problem, rows: usize) -> Vec<usize> {
    let whole = rows == problem.rows.q && problem.parallel.all_ranks() == 1;
    let first = problem.sequences.iter().find(|sequence| sequence.q.len > 1).filter(|_| whole);
    first.map(|sequence| sequence.q.real_rows().take(2).collect()).unwrap_or_default()
}

fn sink_dropped(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let without = Inputs { sink: ndarray::Array1::zeros(0), ..inputs.clone() };
    let mut outputs = told(backend, problem, &without, |fields| fields.softmax.sink = Sink::None)?;
    for gradients in outputs.ranks.iter_mut().filter_map(|rank| rank.gradients.as_mut()) {
        gradients.dsink = ndarray::Array1::zeros(problem.learnable_sinks());
    }
    Ok(outputs)
}

/// Moves each sequence's rows one place further. The last row becomes the first.
fn v_shifted(problem: &Problem, v: &mut Array3<f32>) {
    let old = v.clone();
    for sequence in &problem.sequences {
        let rows: Vec<usize> = sequence.kv.real_rows().collect();
        for (i, &row) in rows.iter().enumerate() {
            let from = rows[(i + rows.len() - 1) % rows.len()];
            v.index_axis_mut(Axis(0), row).assign(&old.index_axis(Axis(0), from));
        }
    }
}

/// Makes the last real row of the longest sequence's keys and values zeros.
fn last_key_lost(problem: &Problem, inputs: &mut Inputs) {
    let longest = problem.sequences.iter().map(|sequence| sequence.kv).max_by_key(|kv| kv.len);
    if let Some(row) = longest.and_then(|kv| kv.real_rows().last()) {
        inputs.k.index_axis_mut(Axis(0), row).fill(0.0);
        inputs.v.index_axis_mut(Axis(0), row).fill(0.0);
    }
}

fn k_swapped(problem: &Problem, k: &mut Array3<f32>) {
    let mut firsts = problem.sequences.iter().filter_map(|sequence| sequence.kv.real_rows().next());
    if let (Some(a), Some(b)) = (firsts.next(), firsts.next()) {
        let (one, two) = (k.index_axis(Axis(0), a).to_owned(), k.index_axis(Axis(0), b).to_owned());
        k.index_axis_mut(Axis(0), a).assign(&two);
        k.index_axis_mut(Axis(0), b).assign(&one);
    }
}

fn heads_rotated(tensor: &Array3<f32>) -> Array3<f32> {
    let heads = tensor.shape()[1];
    let order: Vec<usize> = (0..heads).map(|head| (head + 1) % heads).collect();
    tensor.select(Axis(1), &order)
}

fn dv_of_half(backend: &dyn Backend, problem: &Problem, inputs: &Inputs) -> Result<Outputs, RunError> {
    let mut outputs = backend.run(problem, inputs)?;
    let half = given(backend, problem, inputs, |inputs| {
        for sequence in &problem.sequences {
            for row in sequence.q.real_rows().skip(sequence.q.len.div_ceil(2)) {
                if row < inputs.dout.shape()[0] {
                    inputs.dout.index_axis_mut(Axis(0), row).fill(0.0);
                }
            }
        }
    })?;
    for (rank, half) in outputs.ranks.iter_mut().zip(half.ranks) {
        if let (Some(gradients), Some(half)) = (&mut rank.gradients, half.gradients) {
            gradients.dv = half.dv;
        }
    }
    Ok(outputs)
}
