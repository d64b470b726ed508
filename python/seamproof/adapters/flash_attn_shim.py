"""The functions of `flash_attn` that context-parallel programs call, on machines that lack that package.

`install` makes them importable, unless `flash_attn` is there. On a GPU they are torch's own FlashAttention 2, which is
the same kernel; a call without queries fails there, so it is left out. On the CPU they are plain torch with
FlashAttention's roundings: P and dS in q's format, sums in f32, D from the out that is stored.

Rings merge their outs in TorchScript, which fuses a merge after its first calls on a GPU and then returns other bits
(`docs/findings/ring-merge-fused.md`). No bit is the same in two runs then, so it is off; `jit=on` shows it.
"""

import importlib
import os
import sys
import types

import seamproof

# torch reads it when it is imported.
if seamproof.options().get("jit") != "on":
    os.environ.setdefault("PYTORCH_JIT", "0")

import torch

aten = torch.ops.aten
INTERFACE = "flash_attn.flash_attn_interface"


def install():
    """Makes the functions importable."""
    try:
        importlib.import_module(INTERFACE)
        return
    except ImportError:
        pass
    # FlashAttention 4 has the same package, without them.
    package = sys.modules.get("flash_attn") or types.ModuleType("flash_attn")
    interface = types.ModuleType(INTERFACE)
    for function in FUNCTIONS:
        setattr(interface, function.__name__, function)
    package.flash_attn_interface, package.flash_attn_func = interface, None
    package.__version__ = "2.7.4"  # whose signatures these are
    sys.modules |= {"flash_attn": package, INTERFACE: interface}


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    if q.is_cuda and q.numel():
        longest = (q.shape[1], k.shape[1])
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *longest, 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, None
    outs, lses = zip(
        *(forward(*one, softmax_scale, causal) for one in zip(q, k, v, strict=True)), strict=True
    )
    return torch.stack(outs), torch.stack(lses), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    if q.is_cuda and q.numel():
        longest = (q.shape[1], k.shape[1])
        gradients = aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            None,
            None,
            *longest,
            0.0,
            causal,
            *states(q),
            scale=softmax_scale,
        )
        return filled((dq, dk, dv), gradients)
    for batch in range(len(q)):
        of = [tensor[batch] for tensor in (dout, q, k, v, out, softmax_lse)]
        filled((dq[batch], dk[batch], dv[batch]), backward(*of, softmax_scale, causal))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    ends = (cu_seqlens_q, cu_seqlens_k)
    if q.is_cuda and q.numel():
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *ends, max_seqlen_q, max_seqlen_k, 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, None
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for of_q, of_k in pieces(*ends):
        out[of_q], lse[:, of_q] = forward(q[of_q], k[of_k], v[of_k], softmax_scale, causal)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, deterministic=False, rng_state=None, zero_tensors=False,
):  # fmt: skip
    refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    ends = (cu_seqlens_q, cu_seqlens_k)
    if q.is_cuda and q.numel():
        gradients = aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, *ends, max_seqlen_q, max_seqlen_k, 0.0, causal, *states(q),
            scale=softmax_scale,
        )  # fmt: skip
        return filled((dq, dk, dv), gradients)
    for of_q, of_k in pieces(*ends):
        given = (dout[of_q], q[of_q], k[of_k], v[of_k], out[of_q], softmax_lse[:, of_q])
        filled((dq[of_q], dk[of_k], dv[of_k]), backward(*given, softmax_scale, causal))


FUNCTIONS = (
    _flash_attn_forward,
    _flash_attn_backward,
    _flash_attn_varlen_forward,
    _flash_attn_varlen_backward,
)


def refuse(dropout_p, left, right, softcap, alibi_slopes):
    """Raises for arguments that these functions do not have."""
    if dropout_p or softcap or alibi_slopes is not None or (left, right) not in ((-1, -1), (-1, 0)):
        raise NotImplementedError("no dropout, windows, soft cap or ALiBi slopes here")


def states(q):
    """Returns the states of a random generator, from which nothing is drawn."""
    return (torch.empty(count, dtype=torch.uint64, device=q.device) for count in (2, 0))


def filled(places, gradients):
    for place, gradient in zip(places, gradients, strict=True):
        place.copy_(gradient)


def pieces(cu_seqlens_q, cu_seqlens_k):
    """Returns the rows of each sequence: of queries and of keys."""
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    (at_q, at_k), *others = ends
    for end_q, end_k in others:
        yield slice(at_q, end_q), slice(at_k, end_k)
        at_q, at_k = end_q, end_k


def logits(q, k, scale, causal):
    """Returns the logits of each head in f32, −∞ where a key is hidden: `[heads, queries, keys]`."""
    group = q.shape[1] // k.shape[1]
    heads_first = k.float().repeat_interleave(group, 1).transpose(0, 1)
    found = scale * (q.float().transpose(0, 1) @ heads_first.transpose(1, 2))
    if causal:
        seen = torch.ones(found.shape[1:], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0])
        found = found.masked_fill(~seen, -torch.inf)
    return found


def forward(q, k, v, scale, causal):
    """Returns out and lse of one sequence: 0 and +∞ for a row without keys."""
    found, group = logits(q, k, scale, causal), q.shape[1] // k.shape[1]
    if k.shape[0] == 0:
        lse = q.new_full((q.shape[1], q.shape[0]), torch.inf, dtype=torch.float32)
        return q.new_zeros(*q.shape[:2], v.shape[2]), lse
    top = found.amax(2, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(found - top)
    total = weights.sum(2, keepdim=True)
    sums = weights.to(q.dtype).float() @ v.float().repeat_interleave(group, 1).transpose(0, 1)
    out = torch.where(total > 0, sums / total, 0.0)
    lse = torch.where(total > 0, top + total.log(), torch.inf)
    return out.transpose(0, 1).to(q.dtype), lse[..., 0]


def backward(dout, q, k, v, out, lse, scale, causal):
    """Returns dq, dk and dv of one sequence in f32."""
    heads_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    weights = torch.exp(logits(q, k, scale, causal) - lse[..., None])
    dout_first = dout.float().transpose(0, 1)
    delta = (dout_first * out.float().transpose(0, 1)).sum(2, keepdim=True)
    dots = dout_first @ v.float().repeat_interleave(group, 1).permute(1, 2, 0)
    ds = (weights * (dots - delta)).to(q.dtype).float()
    dq = scale * (ds @ k.float().repeat_interleave(group, 1).transpose(0, 1))
    dk = scale * (ds.transpose(1, 2) @ q.float().transpose(0, 1))
    dv = weights.to(q.dtype).float().transpose(1, 2) @ dout_first

    def of_group(gradient):
        return gradient.unflatten(0, (heads_kv, group)).sum(1).transpose(0, 1)

    return dq.transpose(0, 1), of_group(dk), of_group(dv)
