"""FlashAttention 2 in torch: without any query the launch fails, and the CUDA error stays with the process.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


q, k = (torch.randn(n, 1, 32, device="cuda", dtype=torch.bfloat16) for n in (0, 4))
ends = offsets(0), offsets(4), 0, 4
try:
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, k, *ends, 0.0, False, False, scale=1.0
    )
    given = (out, q, k, k, out, lse, *ends, 0.0, False, state, unused)
    torch.ops.aten._flash_attention_backward(*given, scale=1.0)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).splitlines()[0])
    sys.exit(2 if "invalid argument" in str(error) else 0)
