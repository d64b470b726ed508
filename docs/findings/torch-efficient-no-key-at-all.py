"""torch's memory-efficient attention: without any key the call raises an error about max_seqlen_k.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


q, k = (torch.randn(1, n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (3, 0))
ends = offsets(3), offsets(0), 3, 0
shows = False
try:
    out, lse, seed, place, *_ = torch.ops.aten._efficient_attention_forward(
        q, k, k, None, *ends, 0.0, 0, True, scale=1.0
    )
    torch.ops.aten._efficient_attention_backward(
        torch.randn_like(out), q, k, k, None, out, *ends, lse, 0.0, seed, place, 0, False, scale=1.0
    )
except RuntimeError as error:
    print(error)
    shows = "max_seqlen_k" in str(error)
sys.exit(2 if shows else 0)
