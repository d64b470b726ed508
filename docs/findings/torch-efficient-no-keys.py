"""torch's memory-efficient attention: rows of a sequence without keys are never written, and their LSE is 0 or what
was in memory.

Exit code 2 where the defect shows, 0 where it does not.
"""

import math
import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def efficient(q, k, v, queries, keys, mask):
    ends = offsets(*queries), offsets(*keys), max(queries), max(keys)
    given = (q[None], k[None], v[None], None, *ends, 0.0, mask, True)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(*given, scale=1.0)
    return out[0], lse


# Leaves a number in freed memory, where the results will lie.
torch.full((1 << 22,), 7.0, device="cuda")
q, k = (torch.randn(n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (8, 5))
small = [torch.full((8, 1, 32), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
del small
out, lse = efficient(q, k, k, [3, 5], [0, 5], 0)
print("out of the 3 queries without keys:", out[:3, 0, :2].tolist(), "(must be 0)")
print("their LSE:", lse[0, 0, :3].tolist(), "(must be -inf)")
sys.exit(2 if bool((out[:3] != 0).any()) or bool((lse[0, 0, :3] != -math.inf).any()) else 0)
