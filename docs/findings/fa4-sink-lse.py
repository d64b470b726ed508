"""FlashAttention 4: the LSE is +inf where a learnable sink lies more than 88 above a row's logits.

Exit code 2 where the defect shows, 0 where it does not.
"""

import math
import sys

import torch
from flash_attn.cute import flash_attn_varlen_func


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


q, k, v = (torch.ones(2, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
shows = False
for sink in (0.0, 50.0, 100.0):
    given = {"cu_seqlens_q": offsets(2), "cu_seqlens_k": offsets(2), "max_seqlen_q": 2, "max_seqlen_k": 2}
    sinks = torch.full((1,), sink, device="cuda")
    _, lse = flash_attn_varlen_func(
        q, k, v, softmax_scale=1e-3, learnable_sink=sinks, return_lse=True, **given
    )[:2]
    right = math.log(math.exp(sink) + 2 * math.exp(64e-3))
    print(f"sink {sink}: lse {lse[0, 0].item()}, exact {right:.6f}")
    shows |= abs(lse[0, 0].item() - right) > 1e-3
sys.exit(2 if shows else 0)
