"""torch's `scaled_dot_product_attention`, each of its kernels for one dense sequence.

    seamproof run --backend python:torch_sdpa.py:cudnn
    seamproof run --backend python:torch_sdpa.py:flash:device=cpu

`cudnn`, `flash`, `efficient` and `math` force one kernel: torch raises where it cannot run it, and takes no other.
Tried with torch 2.11.0 over cuDNN 9.19.0 on an H200. `cudnn`
refuses a single key, and `flash` a causal mask over other numbers of keys than of queries.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import seamproof

DEVICE = seamproof.options().get("device", "cuda")
ONE_SEQUENCE = {"sequences_most": 1, "no_sequences": False, "empty_q": False, "empty_kv": False}

dense = functools.partial(
    seamproof.subject, arrays="torch", device=DEVICE, formats=["bf16", "fp16"], d=seamproof.multiples(8, to=128),
    d_v=seamproof.multiples(8, to=128), d_equal=True, statistics=[], start_seconds=300,
    layout=seamproof.packed(padding=False, slack=False), masks=seamproof.top_left(windows=False),
    lengths=ONE_SEQUENCE,
)  # fmt: skip


def attend(kernel, p, q, k, v):
    is_flag = not (p.documents or p.chunks or p.prefix or p.sink_tokens)
    seen = {"is_causal": p.causal} if is_flag else {"attn_mask": torch.from_numpy(p.visible(0)).to(q.device)}
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(q, k, v, **seen, scale=p.scale, enable_gqa=p.group > 1)
    return seamproof.Result(out[0].transpose(0, 1), grads=seamproof.autograd)


@dense(lengths=ONE_SEQUENCE | {"least_kv": 2})
def cudnn(p, q, k, v, dout=None, sink=None):
    return attend(SDPBackend.CUDNN_ATTENTION, p, q, k, v)


@dense(lengths=ONE_SEQUENCE | {"equal": True})
def flash(p, q, k, v, dout=None, sink=None):
    return attend(SDPBackend.FLASH_ATTENTION, p, q, k, v)


@dense(groups=[1], d_equal=False)
def efficient(p, q, k, v, dout=None, sink=None):
    return attend(SDPBackend.EFFICIENT_ATTENTION, p, q, k, v)


@dense(
    d=seamproof.multiples(1, to=256), d_v=seamproof.multiples(1, to=256), d_equal=False,
    lengths=ONE_SEQUENCE | {"blind_queries": False},
    masks=seamproof.top_left(windows=False, kinds=("documents", "chunks", "prefix")),
)  # fmt: skip
def math(p, q, k, v, dout=None, sink=None):
    return attend(SDPBackend.MATH, p, q, k, v)
