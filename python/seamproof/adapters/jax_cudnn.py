"""JAX's cuDNN attention for packed sequences, whose offsets are apart from their real lengths.

    seamproof run --backend python:jax_cudnn.py:attention

Not yet run on a GPU. Every shape is compiled, so rows are filled up to a multiple of 128
and sequences to a power of two.
"""

import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

import seamproof


def up(count, of):
    return max(-(-count // of) * of, of)


def filled(array, rows):
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0), (0, 0)))[None]


@seamproof.subject(
    arrays="jax", device="cuda", formats=["bf16", "fp16"], d=[64, 128], d_v=[64, 128], d_equal=True,
    masks=seamproof.top_left(windows=["causal-window"], most=1 << 20), start_seconds=600,
    layout=seamproof.packed(padding=True, gaps=True, slack=True, first_offset=True),
    lengths={"no_sequences": False}, statistics=["lse"], lse=seamproof.lse(order="th"),
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    # With a single sequence its offsets are not read.
    count = max(2, 1 << max(len(p.sequences) - 1, 0).bit_length())

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
    return seamproof.Result(out[0, : p.q.rows], lse=lse[0].T[: p.q.rows], grads=seamproof.autograd)
