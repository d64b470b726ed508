"""Attention in numpy in FP8, as FlashAttention-3 has it: codes of e4m3 with a descale for each sequence and KV head,
and weights that are multiplied by 256 before they are rounded to e4m3. It needs `ml_dtypes`, whose types codes have.

    seamproof run --backend python:python/examples/numpy_fp8.py:attention
"""

import ml_dtypes
import numpy as np

import seamproof


@seamproof.subject(
    arrays="numpy",
    formats=["e4m3/sequence-group"],
    masks=seamproof.bottom_right(windows=True),
    layout=seamproof.packed(padding=True, gaps=True, first_offset=True, slack=True),
    arithmetic={"accumulation": "f32-serial", "weights": "before-normalisation", "weight_exponent": 8},
    padding_inputs="anything",
    backward=False,
)
def attention(p, q, k, v, dout=None, sink=None):
    out = np.zeros(p.shape("out"), ml_dtypes.bfloat16)
    lse = np.full(p.shape("lse"), -np.inf, np.float32)
    for sequence, (queries, keys) in enumerate(zip(p.q.runs, p.kv.runs, strict=True)):
        rows, of_keys = (
            np.arange(side.rows)[run.real_rows()] for side, run in ((p.q, queries), (p.kv, keys))
        )
        for head in range(p.heads_q):
            kv_head = head // p.group
            of_q, of_k, of_v = (p.descales[name][sequence, kv_head, 0] for name in ("q", "k", "v"))
            codes = q[rows, head].astype(np.float32) @ k[of_keys, kv_head].astype(np.float32).T
            logits = np.where(p.visible(sequence), np.float32(p.scale) * of_q * of_k * codes, -np.inf)
            top = logits.max(axis=1, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None]).astype(np.float32)
            total = weights.sum(axis=1)
            some = total > 0
            rounded = (256 * weights).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            weighted = rounded @ v[of_keys, kv_head].astype(np.float32)
            out[rows[some], head] = (weighted[some] * (of_v / 256) / total[some, None]).astype(out.dtype)
            lse[head, rows[some]] = top[some] + np.log(total[some])
    return out, lse


def test_attention():
    seamproof.check(attention, budget="20s")
