"""`jax.nn.dot_product_attention` on the CPU: a dense call whose lengths and windows stand for packed sequences.

    pytest python/examples/jax_attention.py
    seamproof run --backend python:python/examples/jax_attention.py:attention

The dense batch is gathered from the packed tensors and scattered back, so this tests the masks, the lengths and the
gradients of the call, and nothing of packing. It returns no LSE.
"""

import jax
import jax.numpy as jnp
import numpy as np

import seamproof


@seamproof.subject(
    arrays="jax",
    device="cpu",
    formats=["f32"],
    d_equal=True,
    # Its causal masks and windows begin at the first query and the first key.
    masks=seamproof.top_left(windows=["causal-window", "two-sided"]),
    layout=seamproof.packed(padding=True, gaps=True, first_offset=True, slack=True),
    lengths={"empty_q": False, "empty_kv": False, "blind_queries": False, "no_sequences": False},
    padding_inputs="anything",
    statistics=[],
)
def attention(p, q, k, v, dout=None, sink=None):
    rows = {}
    for side in (p.q, p.kv):
        # Positions past a sequence's end read its first row: the call must not look at them.
        rows[side] = np.array(
            [[run.offset + (i if i < run.len else 0) for i in range(side.max_length)] for run in side.runs]
        )
    out = jax.nn.dot_product_attention(
        q[rows[p.q]],
        k[rows[p.kv]],
        v[rows[p.kv]],
        scale=p.scale,
        is_causal=p.causal,
        query_seq_lengths=p.q.lengths,
        key_value_seq_lengths=p.kv.lengths,
        local_window_size=p.window("jax"),
    )
    packed = jnp.zeros(p.shape("out"), out.dtype)
    for index, run in enumerate(p.q.runs):
        packed = packed.at[run.offset : run.offset + run.len].set(out[index, : run.len])
    return seamproof.Result(packed, grads=seamproof.autograd)


def test_attention():
    seamproof.check(attention, budget="20s")
