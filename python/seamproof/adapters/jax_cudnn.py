"""JAX's cuDNN attention for packed sequences, whose offsets are apart from their real lengths.

    seamproof run --backend python:jax_cudnn.py:attention

Tried with jax 0.11.2 over cuDNN 9.19.0 on an H200. Every shape is compiled, so rows are filled up to a power of two,
and sequences to one as well.
"""

import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

import seamproof


def up(count, least):
    return max(least, 1 << (count - 1).bit_length()) if count else least


def filled(array, rows):
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0), (0, 0)))[None]


@seamproof.subject(
    arrays="jax", device="cuda", formats=["bf16", "fp16"], d=[64, 128], d_v=[64, 128], d_equal=True,
    masks=seamproof.top_left(windows=["causal-window"], most=1 << 20), start_seconds=600, heads_most=4,
    layout=seamproof.packed(padding=True, gaps=True, slack=True, first_offset=True),
    lengths={"no_sequences": False}, lse=seamproof.lse(order="bhs"),
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    # With a single sequence its offsets are not read.
    count = up(len(p.sequences), 2)

    def of_side(side):
        lengths = [run.len for run in side.runs] + [-1] * (count - len(side.runs))
        offsets = side.padded + [-1] * (count - len(side.runs))
        return (jnp.asarray(np.array([values], np.int32)) for values in (lengths, offsets))

    q_lengths, q_offsets = of_side(p.q)
    kv_lengths, kv_offsets = of_side(p.kv)
    q_rows, kv_rows = up(p.q.rows, 128), up(p.kv.rows, 128)
    out, lse = dot_product_attention(
        filled(q, q_rows), filled(k, kv_rows), filled(v, kv_rows), None, None, q_lengths, kv_lengths, q_offsets,
        kv_offsets, scale=p.scale, mask_type=MaskType.PADDING_CAUSAL if p.causal else MaskType.PADDING,
        sliding_window_length=p.window("jax-cudnn"), return_residual=True,
    )  # fmt: skip
    return seamproof.Result(out[0, : p.q.rows], lse=lse[: len(p.sequences)], grads=seamproof.autograd)
