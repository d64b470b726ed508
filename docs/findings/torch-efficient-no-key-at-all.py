"""torch's memory-efficient attention: without any key the call raises an error about max_seqlen_k.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def efficient(q, k, v, queries, keys, mask):
    ends = offsets(*queries), offsets(*keys), max(queries), max(keys)
    given = (q[None], k[None], v[None], None, *ends, 0.0, mask, True)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(*given, scale=1.0)
    return out[0], lse


q, k = (torch.randn(n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (3, 0))
try:
    efficient(q, k, k, [3], [0], 0)
except RuntimeError as error:
    print(error)
    sys.exit(2 if "max_seqlen_k" in str(error) else 0)
