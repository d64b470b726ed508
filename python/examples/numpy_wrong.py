"""The attention of `numpy_attention.py` with six faults to choose from, as a test of the judge and a show of reports.

    seamproof run --backend python:python/examples/numpy_wrong.py:attention:fault=window
    SEAMPROOF_FAULT=window pytest python/examples/numpy_wrong.py

| fault | what is wrong |
|---|---|
| `window` | a window is one key short on the left |
| `alignment` | causal masks are aligned to the top left |
| `group` | query heads read the KV head of their remainder, not of their group |
| `offsets` | the last key of each sequence is the first of the next one |
| `base` | the LSE is a logarithm of base 2 |
| `overflow` | nothing is subtracted before the exponential |
"""

import os

import numpy as np

import seamproof

FAULTS = ("window", "alignment", "group", "offsets", "base", "overflow")
fault = seamproof.options().get("fault") or os.environ.get("SEAMPROOF_FAULT", "window")
if fault not in (*FAULTS, "none"):
    raise ValueError(f"fault={fault} is not known; use one of {', '.join(FAULTS)}, or none")


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
    left, right = window_size[0], 0 if causal else window_size[1]
    for s in range(len(cu_seqlens_q) - 1):
        q_rows = np.arange(cu_seqlens_q[s], cu_seqlens_q[s + 1])
        k_rows = np.arange(cu_seqlens_k[s], cu_seqlens_k[s + 1])
        if fault == "offsets" and len(k_rows) and k_rows[-1] + 1 < len(k):
            k_rows[-1] += 1
        shift = 0 if fault == "alignment" and causal else len(k_rows) - len(q_rows)
        distance = np.arange(len(k_rows))[None, :] - np.arange(len(q_rows))[:, None] - shift
        seen = np.ones(distance.shape, bool)
        if left >= 0:
            seen &= distance >= -left + (fault == "window")
        if right >= 0:
            seen &= distance <= right
        for head in range(q.shape[1]):
            group = q.shape[1] // k.shape[1]
            of = head % k.shape[1] if fault == "group" else head // group
            logits = np.where(seen, softmax_scale * (q[q_rows, head] @ k[k_rows, of].T), -np.inf)
            top = logits.max(axis=1, initial=-np.inf)
            base = np.zeros_like(top) if fault == "overflow" else np.where(np.isfinite(top), top, 0)
            with np.errstate(over="ignore", invalid="ignore"):
                weights = np.exp(logits - base[:, None])
                total = weights.sum(axis=1)
                some = total > 0
                out[q_rows[some], head] = (weights @ v[k_rows, of])[some] / total[some, None]
                lse[head, q_rows[some]] = base[some] + np.log(total[some])
    return out, lse / np.log(2).astype(np.float32) if fault == "base" else lse


def test_attention():
    seamproof.check(attention, budget="20s")
