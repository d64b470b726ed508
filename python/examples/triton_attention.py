"""A small Triton kernel on a GPU: one program for each query and head, forward only.

seamproof run --backend python:python/examples/triton_attention.py:attention
"""

import triton
import triton.language as tl

import seamproof


@triton.jit
def row(
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    scale,
    rows,
    left,
    right,
    H,
    G,
    D: tl.constexpr,
    DV: tl.constexpr,
    B: tl.constexpr,
):
    i, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_q, first_k = tl.load(cu_q + s), tl.load(cu_k + s)
    lq, lk = tl.load(cu_q + s + 1) - first_q, tl.load(cu_k + s + 1) - first_k
    if i < lq:
        d, dv, kv_heads = tl.arange(0, D), tl.arange(0, DV), H // G
        query = tl.load(q + ((first_q + i) * H + head) * D + d).to(tl.float32)
        top, total, acc = -float("inf"), 0.0, tl.zeros([DV], tl.float32)
        low = tl.where(left < 0, 0, i + lk - lq - left)
        high = tl.where(right < 0, lk - 1, i + lk - lq + right)
        for start in range(0, lk, B):
            j = start + tl.arange(0, B)
            seen = (j < lk) & (j >= low) & (j <= high)
            at_row = ((first_k + j) * kv_heads + head // G)[:, None]
            keys = tl.load(k + at_row * D + d[None, :], mask=seen[:, None], other=0).to(tl.float32)
            values = tl.load(v + at_row * DV + dv[None, :], mask=seen[:, None], other=0).to(tl.float32)
            logits = tl.where(seen, scale * tl.sum(query[None, :] * keys, 1), -float("inf"))
            new = tl.maximum(top, tl.max(logits, 0))
            base = tl.where(new == -float("inf"), 0.0, new)
            weights, kept = tl.exp(logits - base), tl.exp(top - base)
            total, acc = total * kept + tl.sum(weights, 0), acc * kept + tl.sum(weights[:, None] * values, 0)
            top = new
        some = total > 0
        tl.store(
            out + ((first_q + i) * H + head) * DV + dv, tl.where(some, acc / tl.where(some, total, 1.0), 0.0)
        )
        tl.store(
            lse + head * rows + first_q + i,
            tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf")),
        )


@seamproof.subject(
    arrays="torch", device="cuda", formats=["bf16", "fp16", "f32"], p="f32", d=[16, 32, 64, 128], d_v=[16, 32, 64, 128],
    masks=seamproof.bottom_right(), layout=seamproof.packed(), lengths={"no_sequences": False}, backward=False,
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    out, lse = p.empty("out"), p.empty("lse")
    left, right = p.window("fa")
    if p.q.max_length:
        grid = (p.q.max_length, p.heads_q, len(p.sequences))
        offsets = p.q.padded_offsets, p.kv.padded_offsets
        row[grid](
            q,
            k,
            v,
            out,
            lse,
            *offsets,
            p.scale,
            p.q.rows,
            left,
            right,
            p.heads_q,
            p.group,
            p.dim_qk,
            p.dim_v,
            32,
        )
    return out, lse


def test_attention():
    seamproof.check(attention, budget="60s")
