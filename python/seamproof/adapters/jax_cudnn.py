"""JAX's cuDNN attention for packed sequences, whose offsets are apart from their real lengths.

    seamproof run --backend python:jax_cudnn.py:attention

Tried with jax 0.11.2 over cuDNN 9.19.0 on an H200. Every shape is compiled, so rows are filled up to a power of two
from 512, and sequences to one from 8. `$JAX_COMPILATION_CACHE_DIR` lets workers share what they compile.
"""

import functools

import jax
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

import seamproof


def up(count, least):
    return max(least, 1 << (count - 1).bit_length()) if count else least


def filled(array, rows):
    # numpy fills: JAX would compile that for every number of rows.
    array = np.asarray(array)
    return np.pad(array, ((0, rows - array.shape[0]), (0, 0), (0, 0)))[None]


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale"))
def attend(q, k, v, dout, sides, causal, window, scale):
    def forward(q, k, v):
        return dot_product_attention(
            q, k, v, None, None, *sides, scale=scale, sliding_window_length=window, return_residual=True,
            mask_type=MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        )  # fmt: skip

    if dout is None:
        return forward(q, k, v)
    out, gradients, lse = jax.vjp(forward, q, k, v, has_aux=True)
    return out, lse, *gradients(dout)


@seamproof.subject(
    arrays="jax", device="cuda", formats=["bf16", "fp16"], d=[64, 128], d_v=[64, 128], d_equal=True,
    masks=seamproof.top_left(windows=["causal-window"], most=1 << 20), start_seconds=600, heads_most=4,
    layout=seamproof.packed(padding=True, gaps=True, slack=True, first_offset=True),
    lengths={"no_sequences": False}, lse=seamproof.lse(order="bhs"), versions={"jax": jax.__version__},
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    # With a single sequence its offsets are not read.
    count = up(len(p.sequences), 8)

    def of_side(side):
        fill = [-1] * (count - len(side.runs))
        values = [run.len for run in side.runs] + fill, side.padded + fill
        return [np.array([each], np.int32) for each in values]

    (q_lengths, q_offsets), (kv_lengths, kv_offsets) = of_side(p.q), of_side(p.kv)
    q_rows, kv_rows = up(p.q.rows, 512), up(p.kv.rows, 512)
    out, lse, *gradients = attend(
        filled(q, q_rows), filled(k, kv_rows), filled(v, kv_rows), None if dout is None else filled(dout, q_rows),
        (q_lengths, kv_lengths, q_offsets, kv_offsets), p.causal, p.window("jax-cudnn"), p.scale,
    )  # fmt: skip
    result = seamproof.Result(cut(out, p.q.rows), lse=np.asarray(lse)[: len(p.sequences)])
    if gradients:
        dq, dk, dv = gradients
        result.dq, result.dk, result.dv = cut(dq, p.q.rows), cut(dk, p.kv.rows), cut(dv, p.kv.rows)
    return result


def cut(array, rows):
    return np.asarray(array)[0, :rows]
