"""Attention in numpy that is given its sequences in each form: offsets beside lengths, with and without the caller's
word for padding, segment ids and positions, also batched, and lengths of a padded batch. What it reads from any of
them is an id and a position for each row.

    seamproof run --backend python:python/examples/numpy_forms.py:attention
    seamproof run --backend python:python/examples/numpy_forms.py:attention:batch=masks
"""

import math

import numpy as np

import seamproof


def by_offsets(p):
    for side in (p.q, p.kv):
        # Without padding, which the caller denies with False, lengths alone say where rows lie.
        offsets = side.offsets if p.pad_between_seqs is False else side.padded_offsets
        ids, at = np.zeros((2, side.rows), np.int32)
        for number, (first, length) in enumerate(zip(offsets, side.lengths, strict=False), 1):
            ids[first : first + length] = number
            at[first : first + length] = np.arange(length)
        yield ids, at


def by_segments(p):
    yield p.segment_ids_q, p.positions_q
    yield p.segment_ids_kv, p.positions_kv


def by_batched_segments(p):
    count = math.prod(p.leading)
    batch_row = np.arange(count)[:, None]
    for side, ids, at in ((p.q, p.segment_ids_q, p.positions_q), (p.kv, p.segment_ids_kv, p.positions_kv)):
        shape = (*p.leading, side.rows // count)
        ids, at = (np.broadcast_to(array, shape).reshape(count, -1) for array in (ids, at))
        # Each batch row counts its segments from 1, so its number goes with theirs.
        yield np.where(ids > 0, ids * count + batch_row, 0).reshape(-1), at.reshape(-1)


def by_lengths(p):
    for side, lengths in zip((p.q, p.kv), p.lengths, strict=True):
        at = np.broadcast_to(np.arange(side.max_span), (len(lengths), side.max_span))
        ids = np.where(at < lengths[:, None], np.arange(1, len(lengths) + 1)[:, None], 0)
        yield ids.reshape(-1), at.reshape(-1)


def by_masks(p):
    for mask in p.padding_masks:
        real = ~mask[:, 0, 0, :]
        ids = np.where(real, np.arange(1, len(real) + 1)[:, None], 0)
        at = np.broadcast_to(np.arange(real.shape[1]), real.shape)
        yield ids.reshape(-1), at.reshape(-1)


READERS = {
    "cu_seqlens": by_offsets,
    "pad_between_seqs": by_offsets,
    "no_pad_between_seqs": by_offsets,
    "segments": by_segments,
    "batched_segments": by_batched_segments,
    # Lengths of a batch are also said by its padding masks.
    "lengths": by_masks if seamproof.options().get("batch") == "masks" else by_lengths,
}


@seamproof.subject(
    arrays="numpy",
    formats=["f32"],
    masks=seamproof.top_left(),
    layout=seamproof.packed(padding=True, gaps=True, first_offset=True),
    forms=list(READERS),
    backward=False,
)
def attention(p, q, k, v, dout=None, sink=None):
    (ids, at), (key_ids, key_at) = READERS[p.given](p)
    distance = key_at[None, :].astype(int) - at[:, None]
    seen = (ids[:, None] == key_ids[None, :]) & (ids != 0)[:, None]
    if p.left is not None:
        seen &= distance >= -p.left
    if p.right is not None:
        seen &= distance <= p.right
    out = np.zeros(p.shape("out"), np.float32)
    lse = np.full(p.shape("lse"), -np.inf, np.float32)
    for head in range(p.heads_q):
        logits = p.scale * (q[:, head] @ k[:, head // p.group].T)
        logits = np.where(seen, logits, -np.inf)
        top = logits.max(axis=1, initial=-np.inf)
        weights = np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None])
        total = weights.sum(axis=1)
        some = total > 0
        out[some, head] = (weights @ v[:, head // p.group])[some] / total[some, None]
        lse[head, some] = top[some] + np.log(total[some])
    return out, lse


def test_attention():
    seamproof.check(attention, budget="20s")
