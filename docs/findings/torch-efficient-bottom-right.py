"""torch's memory-efficient attention: a causal mask aligned to the bottom right hides nothing where there are more
queries than keys.

Exit code 2 where the defect shows, 0 where it does not.
"""

import math
import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def exact(q, k, v, sees):
    """Plain float64 attention of one head; a query without keys has 0 in out and -inf in the LSE."""
    logits = (q.double() @ k.double().T).masked_fill(~sees, -math.inf)
    lse = torch.logsumexp(logits, 1)
    return torch.exp(logits - lse[:, None]).nan_to_num(0.0) @ v.double(), lse


def efficient(q, k, v, queries, keys, mask):
    ends = offsets(*queries), offsets(*keys), max(queries), max(keys)
    given = (q[None], k[None], v[None], None, *ends, 0.0, mask, True)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(*given, scale=1.0)
    return out[0], lse


shows = False
for queries, keys in ((9, 3), (64, 32), (100, 40), (3, 9)):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys))
    out, _ = efficient(q, k, v, [queries], [keys], 2)
    at = torch.arange(queries, device="cuda")[:, None] + keys - queries
    right, _ = exact(q[:, 0], k[:, 0], v[:, 0], torch.arange(keys, device="cuda") <= at)
    wrong = (out[:, 0].double() - right).abs().amax(1) > 0.05
    print(f"{queries} queries, {keys} keys: {int(wrong.sum())} rows of out are wrong")
    shows |= bool(wrong.any())
sys.exit(2 if shows else 0)
