"""Kernels for the tests of `seamproof large`: plain torch on the CPU, right or with one of a few faults.

python:large_kernels.py:attention:fault=last-tile
"""

import math

import torch

import seamproof

FAULT = seamproof.options().get("fault", "none")
BLOCK = 64


def logits_of(q, k, scale, left, right, shift):
    """Returns the logits of one head, −∞ where a key is hidden."""
    distance = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None] - shift
    seen = torch.ones(distance.shape, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return (scale * (q @ k.T)).masked_fill(~seen, -math.inf)


def rows_of(p, queries, keys, tensors, head):
    """Returns a sequence's rows of q, dout, k and v in f64, for a head."""
    q, k, v, dout = tensors
    of = head // p.group
    return q[queries, head].double(), k[keys, of].double(), v[keys, of].double(), dout[queries, head].double()


def one_head(p, index, q, k, v, dout):
    """Returns out, lse, dq, dk, dv of one head of a sequence."""
    right = p.right
    if FAULT == "off-by-one" and index == 1 and right is not None:
        right += 1
    s = logits_of(q, k, p.scale, p.left, right, p.shift(index))
    if FAULT == "last-tile" and index == len(p.sequences) - 1 and len(k) > BLOCK:
        start = (len(k) - 1) // BLOCK * BLOCK
        s[:, start:] = -math.inf
    lse = torch.logsumexp(s, 1) if len(k) else torch.full((len(q),), -math.inf, dtype=torch.float64)
    w = torch.exp(s - lse.clamp(min=-1e300)[:, None])
    out = (w @ v).bfloat16()
    d = (dout * out.double()).sum(1, keepdim=True)
    p_ij = torch.exp(s - lse.float().double().clamp(min=-1e300)[:, None])
    ds = rounded(p_ij * (dout @ v.T - d), q)
    p_ij = rounded(p_ij, q)
    reads = torch.ones(len(q), dtype=torch.bool)
    if FAULT == "query-block" and index == 0 and len(q) > 3 * BLOCK:
        reads[BLOCK : 2 * BLOCK] = False
    return out, lse, p.scale * ds @ k, p.scale * ds.T[:, reads] @ q[reads], p_ij.T @ dout


def rounded(weights, like):
    """Returns numbers as a kernel rounds them before a product."""
    return weights.bfloat16().to(like.dtype)


def lowered(k):
    """Returns a row as one finds it whose offset of elements wrapped at a small bound, as at 2³¹ in large tensors."""
    elements = k.reshape(-1)
    bound = elements.numel() * 3 // 4
    at = torch.arange(elements.numel())
    return elements[torch.where(at < bound, at, at - bound)].reshape(k.shape)


def bare(p, name, result):
    """Returns a result without slack, in memory that torch lets nobody write to. There is nothing wrong with that."""
    end = (p.kv if name in ("dk", "dv") else p.q).padded[-1]
    with torch.inference_mode():
        return (result[:, :end] if name == "lse" else result[:end]).clone()


@seamproof.subject(
    arrays="torch", device="cpu", formats=["bf16"], d=[32, 64], d_v=[32, 64], d_equal=True, groups=[1, 2], heads_most=4,
    masks=seamproof.both_alignments(windows=True), layout=seamproof.packed(padding=True, slack=True), compiles=False,
    arithmetic={
        "accumulation": "f32-serial", "weights": "before-normalisation", "delta": "stored-out", "group_sums": "f32",
    },
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    if dout is None:
        dout = torch.zeros(p.shape("out"))
    if FAULT == "wrapped":
        k = lowered(k)
    if FAULT == "scaled-in-place":
        q.data *= 2
    out, lse = torch.zeros(p.shape("out"), dtype=q.dtype), torch.zeros(p.shape("lse"))
    sums = {name: torch.zeros(p.shape(name), dtype=torch.float64) for name in ("dq", "dk", "dv")}
    for index, sequence in enumerate(p.sequences):
        queries, keys = sequence.q.real_rows(), sequence.kv.real_rows()
        for head in range(p.heads_q):
            parts = one_head(p, index, *rows_of(p, queries, keys, (q, k, v, dout), head))
            out[queries, head], lse[head, queries] = parts[0], parts[1].float()
            if FAULT == "lost-head" and head == p.heads_q - 1 and p.group > 1:
                parts = (*parts[:3], parts[3] * 0, parts[4])
            sums["dq"][queries, head] = parts[2]
            sums["dk"][keys, head // p.group] += parts[3]
            sums["dv"][keys, head // p.group] += parts[4]
    if FAULT == "infinite":
        # In no row that is judged by its bounds, of the packs of the test.
        out[p.q.runs[0].offset + 37, 0, 5] = math.inf
    if FAULT == "residue":
        sums["dk"] += 2.0**-10
    found = {"out": out, "lse": lse} | {name: each.to(q.dtype) for name, each in sums.items()}
    if FAULT == "bare":
        found = {name: bare(p, name, each) for name, each in found.items()}
    if not p.backward:
        return found["out"], found["lse"]
    return seamproof.Result(**found)
