"""FlashAttention 2 in torch: a right bound of at least the longest sequence of keys is taken for none.

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


def flash(q, k, v, left, right):
    ends = offsets(len(q)), offsets(len(k)), len(q), len(k)
    window = {"scale": 1.0, "window_size_left": left, "window_size_right": right}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *ends, 0.0, False, False, **window)
    return out[:, 0], lse[0]


def wrong_rows(queries, keys, left, right):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys))
    out, lse = flash(q, k, v, left, right)
    distance = (
        torch.arange(keys, device="cuda") - torch.arange(queries, device="cuda")[:, None] + queries - keys
    )
    sees = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        sees &= distance >= -left
    if right >= 0:
        sees &= distance <= right
    right_out, right_lse = exact(q[:, 0], k[:, 0], v[:, 0], sees)
    wrong = (out.double() - right_out).abs().amax(1) > 0.05
    told = f"row 0: lse {lse[0].item():.4f}, exact {right_lse[0].item():.4f}"
    print(
        f"{queries} queries, {keys} keys, window ({left}, {right}): {int(wrong.sum())} rows of out are wrong; {told}"
    )
    return bool(wrong.any())


shows = [wrong_rows(*problem) for problem in ((17, 1, -1, 4), (22, 3, -1, 4), (22, 3, -1, 2))]
sys.exit(2 if any(shows) else 0)
