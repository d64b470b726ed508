"""Attention in numpy with FlashAttention's signature, right on all that its signature allows.

Check it in a test run, or from the command line:

    pytest python/examples/numpy_attention.py
    seamproof run --backend python:python/examples/numpy_attention.py:attention
"""

import numpy as np

import seamproof


@seamproof.flash_varlen(arrays="numpy", formats=["f32"], backward=False)
def attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    out = np.zeros((len(q), q.shape[1], v.shape[2]), np.float32)
    lse = np.full((q.shape[1], len(q)), -np.inf, np.float32)
    group = q.shape[1] // k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    for first_q, end_q, first_k, end_k in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        lq, lk = end_q - first_q, end_k - first_k
        # How far a key lies to the right of its query's diagonal, which ends at the bottom right.
        distance = np.arange(lk)[None, :] - np.arange(lq)[:, None] - (lk - lq)
        seen = np.ones((lq, lk), bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        for head in range(q.shape[1]):
            logits = softmax_scale * (q[first_q:end_q, head] @ k[first_k:end_k, head // group].T)
            logits = np.where(seen, logits, -np.inf)
            top = logits.max(axis=1, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None])
            total = weights.sum(axis=1)
            some = total > 0
            weighted = weights @ v[first_k:end_k, head // group]
            out[first_q:end_q, head][some] = weighted[some] / total[some, None]
            lse[head, first_q:end_q][some] = top[some] + np.log(total[some])
    return out, lse


def test_attention():
    seamproof.check(attention, budget="20s")
