"""torch's own `varlen_attn` on a GPU: FlashAttention 2's kernels behind a private signature.

seamproof run --backend python:python/examples/torch_varlen_attn.py:attention
"""

import inspect

from torch.nn.attention.varlen import AuxRequest, varlen_attn

import seamproof

# Grouped heads have to be asked for in newer versions, and cannot be in older ones.
MORE = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@seamproof.subject(
    arrays="torch",
    device="cuda",
    formats=["bf16", "fp16"],
    d=seamproof.multiples(8, to=256),
    d_v=seamproof.multiples(8, to=256),
    d_equal=True,
    masks=seamproof.bottom_right(windows=True),
    layout=seamproof.packed(slack=True),
    lengths={"no_sequences": False},
    lse=seamproof.lse(empty="+inf"),
)
def attention(p, q, k, v, dout=None, sink=None):
    out, lse = varlen_attn(
        q, k, v, p.q.padded_offsets, p.kv.padded_offsets, p.q.max_length, p.kv.max_length,
        return_aux=AuxRequest(lse=True), scale=p.scale, window_size=p.window("fa"), **MORE,
    )  # fmt: skip
    return seamproof.Result(out, lse=lse, grads=seamproof.autograd)


def test_attention():
    seamproof.check(attention, budget="60s")
