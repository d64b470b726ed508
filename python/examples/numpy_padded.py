"""Attention in numpy on sequences with padding between them, in the calling forms of FlashAttention-3 (`seqused_q` and
`seqused_k` beside padded `cu_seqlens`, in the backward too) and of TransformerEngine (real and padded `cu_seqlens`, and
`pad_between_seqs`, the caller's word on whether they differ).

Like a kernel on a GPU it covers rows up to the largest lengths that it is told, and no others.

    seamproof run --backend python:python/examples/numpy_padded.py:attention
    seamproof run --backend python:python/examples/numpy_padded.py:attention_te
"""

import numpy as np

import seamproof


def sequences(offsets_q, lengths_q, offsets_k, lengths_k, most_q, most_k):
    """Yields the rows of each sequence's queries and keys, and its lengths."""
    for first_q, lq, first_k, lk in zip(offsets_q, lengths_q, offsets_k, lengths_k, strict=True):
        rows_q = first_q + np.arange(most_q)[:lq]
        rows_k = first_k + np.arange(most_k)[:lk]
        yield rows_q, rows_k, lq, lk


def seen_by(rows_q, rows_k, lq, lk, causal, window_size):
    """Returns which keys each query sees; the last query sees the last key."""
    left, right = window_size[0], 0 if causal else window_size[1]
    distance = np.arange(len(rows_k))[None, :] - np.arange(len(rows_q))[:, None] - (lk - lq)
    seen = np.ones(distance.shape, bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def forward(q, k, v, told, scale, causal, window_size):
    out = np.zeros((len(q), q.shape[1], v.shape[2]), np.float32)
    lse = np.full((q.shape[1], len(q)), -np.inf, np.float32)
    group = q.shape[1] // k.shape[1]
    for rows_q, rows_k, *lengths in sequences(*told):
        seen = seen_by(rows_q, rows_k, *lengths, causal, window_size)
        for head in range(q.shape[1]):
            logits = scale * (q[rows_q, head] @ k[rows_k, head // group].T)
            logits = np.where(seen, logits, -np.inf)
            top = logits.max(axis=1, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None])
            total = weights.sum(axis=1)
            some = total > 0
            weighted = weights @ v[rows_k, head // group]
            out[rows_q[some], head] = weighted[some] / total[some, None]
            lse[head, rows_q[some]] = top[some] + np.log(total[some])
    return out, lse


def gradients(dout, q, k, v, out, lse, told, scale, causal, window_size):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for rows_q, rows_k, *lengths in sequences(*told):
        seen = seen_by(rows_q, rows_k, *lengths, causal, window_size)
        for head in range(q.shape[1]):
            own = head // group
            logits = scale * (q[rows_q, head] @ k[rows_k, own].T)
            sums = np.where(seen.any(axis=1), lse[head, rows_q], 0)[:, None]
            weights = np.where(seen, np.exp(np.where(seen, logits - sums, 0)), 0).astype(np.float32)
            delta = (dout[rows_q, head] * out[rows_q, head]).sum(axis=1, keepdims=True)
            ds = scale * weights * (dout[rows_q, head] @ v[rows_k, own].T - delta)
            dq[rows_q, head] = ds @ k[rows_k, own]
            dk[rows_k, own] += ds.T @ q[rows_q, head]
            dv[rows_k, own] += weights.T @ dout[rows_q, head]
    return dq, dk, dv


def backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
    softmax_scale, causal, window_size,
):  # fmt: skip
    told = (cu_seqlens_q[:-1], seqused_q, cu_seqlens_k[:-1], seqused_k, max_seqlen_q, max_seqlen_k)
    return gradients(dout, q, k, v, out, lse, told, softmax_scale, causal, window_size)


@seamproof.flash_varlen(arrays="numpy", formats=["f32"], seqused=True, backward=backward)
def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale=None,
    causal=False, window_size=(-1, -1),
):  # fmt: skip
    told = (cu_seqlens_q[:-1], seqused_q, cu_seqlens_k[:-1], seqused_k, max_seqlen_q, max_seqlen_k)
    return forward(q, k, v, told, softmax_scale, causal, window_size)


def placed(cu_seqlens, cu_seqlens_padded, padded):
    """Returns the first rows and the lengths of the sequences. Without padding the lengths alone say where rows lie."""
    return (cu_seqlens_padded if padded else cu_seqlens)[:-1], np.diff(cu_seqlens)


def is_padded(said, real_q, padded_q, real_kv, padded_kv):
    """Returns the caller's word; without one, whether real and padded offsets differ."""
    if said is not None:
        return said
    return not (np.array_equal(real_q, padded_q) and np.array_equal(real_kv, padded_kv))


def backward_te(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q,
    max_seqlen_kv, pad_between_seqs, softmax_scale, causal, window_size,
):  # fmt: skip
    offsets = (cu_seqlens_q, cu_seqlens_q_padded), (cu_seqlens_kv, cu_seqlens_kv_padded)
    padded = is_padded(pad_between_seqs, *offsets[0], *offsets[1])
    told = (*placed(*offsets[0], padded), *placed(*offsets[1], padded), max_seqlen_q, max_seqlen_kv)
    return gradients(dout, q, k, v, out, lse, told, softmax_scale, causal, window_size)


@seamproof.flash_varlen(arrays="numpy", formats=["f32"], seqused=True, backward=backward_te)
def attention_te(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
    pad_between_seqs=None, softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    offsets = (cu_seqlens_q, cu_seqlens_q_padded), (cu_seqlens_kv, cu_seqlens_kv_padded)
    padded = is_padded(pad_between_seqs, *offsets[0], *offsets[1])
    told = (*placed(*offsets[0], padded), *placed(*offsets[1], padded), max_seqlen_q, max_seqlen_kv)
    return forward(q, k, v, told, softmax_scale, causal, window_size)


def test_attention():
    seamproof.check(attention, budget="20s")


def test_attention_te():
    seamproof.check(attention_te, budget="20s")
