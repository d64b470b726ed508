"""`jax.nn.dot_product_attention` on the CPU: a dense call whose lengths and windows stand for packed sequences.

    pytest python/examples/jax_attention.py
    seamproof run --backend python:python/examples/jax_attention.py:attention

Packed rows are gathered into a batch and scattered back, so this tests the masks, the lengths and the gradients of the
call, and nothing of packing. It returns no LSE. JAX compiles for each shape, so batches come in few sizes.
"""

from functools import partial

import jax
import numpy as np

import seamproof

# Most of the time goes into compiling, and a small problem does not need to be fast.
jax.config.update("jax_disable_most_optimizations", True)

SEQUENCES, LENGTHS = 4, (8, 64)


@partial(jax.jit, static_argnames=("causal", "window"))
def dense(q, k, v, dout, scale, lengths_q, lengths_kv, causal, window):
    def call(q, k, v):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=causal,
            query_seq_lengths=lengths_q,
            key_value_seq_lengths=lengths_kv,
            local_window_size=window,
        )

    out, pullback = jax.vjp(call, q, k, v)
    return (out, *pullback(dout))


def batch(packed, side):
    """Returns packed rows as `[sequences, positions, heads, dim]`, with ones past a sequence's end."""
    length = next(length for length in LENGTHS if length >= side.max_length)
    whole = np.ones((SEQUENCES, length, *packed.shape[1:]), np.float32)
    for index, run in enumerate(side.runs):
        whole[index, : run.len] = packed[run.real_rows()]
    return whole


def unbatch(whole, side):
    """Returns the packed rows of a batch."""
    packed = np.zeros((side.rows, *whole.shape[2:]), np.float32)
    for index, run in enumerate(side.runs):
        packed[run.real_rows()] = whole[index, : run.len]
    return packed


@seamproof.subject(
    arrays="numpy",
    formats=["f32"],
    d=[4, 16],
    d_v=[4, 16],
    d_equal=True,
    groups=[1, 2],
    heads_most=4,
    # Its masks begin at the first query and the first key.
    masks=seamproof.top_left(windows=["causal-window", "two-sided"]),
    layout=seamproof.packed(padding=True, gaps=True, first_offset=True, slack=True),
    lengths={
        "empty_q": False,
        "empty_kv": False,
        "blind_queries": False,
        "no_sequences": False,
        "most": LENGTHS[-1],
        "sequences_most": SEQUENCES,
    },
    padding_inputs="anything",
    statistics=[],
)
def attention(p, q, k, v, dout=None, sink=None):
    lengths = [np.array([run.len for run in side.runs] + [1] * SEQUENCES)[:SEQUENCES] for side in (p.q, p.kv)]
    if dout is None:
        dout = np.zeros(p.shape("out"), np.float32)
    # A window that reaches past every position is the same as none, and needs no code of its own.
    window = tuple(LENGTHS[-1] if bound is None else min(bound, LENGTHS[-1]) for bound in (p.left, p.right))
    found = dense(
        batch(q, p.q), batch(k, p.kv), batch(v, p.kv), batch(dout, p.q), np.float32(p.scale), *lengths, p.causal, window
    )  # fmt: skip
    out, dq, dk, dv = (
        unbatch(np.asarray(x), side) for x, side in zip(found, (p.q, p.q, p.kv, p.kv), strict=True)
    )
    return seamproof.Result(out, dq=dq, dk=dk, dv=dv) if p.backward else seamproof.Result(out)


def test_attention():
    seamproof.check(attention, budget="60s")
