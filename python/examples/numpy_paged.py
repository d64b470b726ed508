"""Attention in numpy on a KV cache in pages, step by step, in FlashAttention's calling form: a `block_table`, and the
real lengths of the keys as `seqused_k`. It has two mistakes to choose from, as a test of the judge.

    seamproof run --backend python:python/examples/numpy_paged.py:attention
    seamproof run --backend python:python/examples/numpy_paged.py:attention:fault=table

| fault | what is wrong |
|---|---|
| `table` | rows of the block table are counted from 1: each sequence reads the pages of the one behind it |
| `length` | the last page is taken for full |
"""

import itertools
import os

import numpy as np

import seamproof

FAULTS = ("table", "length")
fault = seamproof.options().get("fault") or os.environ.get("SEAMPROOF_FAULT", "none")
if fault not in (*FAULTS, "none"):
    raise ValueError(f"fault={fault} is not known; use one of {', '.join(FAULTS)}, or none")


def in_pages(pool, block_table, lengths):
    """Returns the keys or the values of each sequence."""
    for sequence, length in enumerate(lengths):
        row = (sequence + 1) % len(lengths) if fault == "table" else sequence
        rows = pool[block_table[row]].reshape(-1, *pool.shape[2:])
        pages = -(-length // pool.shape[1])
        yield rows[: pages * pool.shape[1] if fault == "length" else length]


def in_rows(tensor, offsets):
    for first, end in itertools.pairwise(offsets):
        yield tensor[first:end]


@seamproof.flash_varlen(
    arrays="numpy", formats=["f32"], backward=False, cache=True, pages=[1, 3, 4, 16], seqused=True
)
def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table=None,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    out = np.zeros((len(q), q.shape[1], v.shape[-1]), np.float32)
    lse = np.full((q.shape[1], len(q)), -np.inf, np.float32)
    left, right = window_size[0], 0 if causal else window_size[1]
    sides = [
        in_rows(tensor, cu_seqlens_k) if block_table is None else in_pages(tensor, block_table, seqused_k)
        for tensor in (k, v)
    ]
    for sequence, (keys, values) in enumerate(zip(*sides, strict=True)):
        if block_table is None:
            keys, values = (rows[: seqused_k[sequence]] for rows in (keys, values))
        rows = cu_seqlens_q[sequence] + np.arange(seqused_q[sequence])
        distance = np.arange(len(keys))[None, :] - np.arange(len(rows))[:, None] - (len(keys) - len(rows))
        seen = np.ones(distance.shape, bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // k.shape[-2])
            logits = np.where(seen, softmax_scale * (q[rows, head] @ keys[:, of].T), -np.inf)
            top = logits.max(axis=1, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None])
            total = weights.sum(axis=1)
            some = total > 0
            out[rows[some], head] = (weights @ values[:, of])[some] / total[some, None]
            lse[head, rows[some]] = top[some] + np.log(total[some])
    return out, lse


def test_attention():
    seamproof.check(attention, budget="20s")
