"""FlashAttention 2 in torch: dk of grouped heads is NaN where the gradients of single heads overflow fp16.

Two query heads read one KV head, with queries of opposite signs. Their parts of dk cancel, so that dk is 0. Exit code 2
where the defect shows, 0 where it does not.
"""

import sys

import torch

QUERIES, KEYS, LANES = 512, 2, 64
aten = torch.ops.aten


def dk(dtype):
    """Returns dk of the first key. The part of a single query head is 131,072; fp16 ends at 65,504."""
    q = torch.full((QUERIES, 2, LANES), 16.0)
    q[:, 1] *= -1
    k, v = torch.zeros(KEYS, 1, LANES), torch.ones(KEYS, 1, LANES)
    v[1] *= -1
    dout = torch.full_like(q, 0.5)
    q, k, v, dout = (each.to("cuda", dtype) for each in (q, k, v, dout))
    offsets = (torch.tensor([0, rows], device="cuda", dtype=torch.int32) for rows in (QUERIES, KEYS))
    ends = (*offsets, QUERIES, KEYS)
    out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, *ends, 0.0, False, False, scale=1.0)
    given = (dout, q, k, v, out, lse, *ends, 0.0, False, state, unused)
    return aten._flash_attention_backward(*given, scale=1.0)[1][0, 0]


found = dk(torch.float16)
print("fp16:", found[:4].tolist(), "bf16:", dk(torch.bfloat16)[:4].tolist(), "(must be 0)")
sys.exit(2 if found.isnan().any() else 0)
