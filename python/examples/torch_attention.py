"""Plain attention in torch with FlashAttention's signature; gradients come from automatic differentiation.

pytest python/examples/torch_attention.py
seamproof run --backend python:python/examples/torch_attention.py:attention
"""

import torch

import seamproof


@seamproof.flash_varlen(arrays="torch", formats=["bf16", "fp16", "f32"], device="cpu")
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
    softcap=0.0,
):
    group = q.shape[1] // k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    offsets_q, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for s in range(len(offsets_q) - 1):
        # [heads, rows, dim], in f32: products of 16-bit numbers are exact there.
        qs = q[offsets_q[s] : offsets_q[s + 1]].float().transpose(0, 1)
        ks = k[offsets_k[s] : offsets_k[s + 1]].float().transpose(0, 1).repeat_interleave(group, 0)
        vs = v[offsets_k[s] : offsets_k[s + 1]].float().transpose(0, 1).repeat_interleave(group, 0)
        lq, lk = qs.shape[1], ks.shape[1]
        distance = torch.arange(lk)[None, :] - torch.arange(lq)[:, None] - (lk - lq)
        hidden = torch.zeros(lq, lk, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        logits = softmax_scale * (qs @ ks.transpose(1, 2))
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        blind = hidden.all(1, keepdim=True) if lk else torch.ones(lq, 1, dtype=torch.bool)
        # A row that sees nothing would have NaN here, in its gradients too.
        logits = logits.masked_fill(hidden & ~blind, -torch.inf)
        top = logits.amax(2, keepdim=True).detach() if lk else logits.new_zeros(*logits.shape[:2], 1)
        weights = torch.exp(logits - top)
        total = weights.sum(2, keepdim=True).masked_fill(blind, 1)
        outs.append(((weights @ vs) / total).masked_fill(blind, 0).transpose(0, 1))
        lses.append((top + total.log()).masked_fill(blind, -torch.inf)[..., 0])
    out = torch.cat([*outs, q.new_zeros(len(q) - offsets_q[-1], q.shape[1], v.shape[2])]).to(q.dtype)
    lse = torch.cat([*lses, q.new_zeros(q.shape[1], len(q) - offsets_q[-1], dtype=torch.float32)], 1)
    return out, lse


def test_attention():
    seamproof.check(attention, budget="20s")
