"""torch's varlen_attn: gradients of rows behind the last sequence are never written.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
from torch.nn.attention.varlen import varlen_attn


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


rows, shows = 200, False
q, k, v = (
    torch.randn(rows, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
)
# Leaves NaN in freed memory, where the gradients will lie.
old = [torch.full_like(q, float("nan"), requires_grad=False) for _ in range(100)]
del old
out = varlen_attn(q, k, v, offsets(3, 5), offsets(3, 5), 5, 5, window_size=(-1, 0))
out.backward(torch.ones_like(out))
for name, x in (("dq", q), ("dk", k), ("dv", v)):
    bad = int((x.grad[8:] != 0).any((1, 2)).sum())
    print(f"{name}: {bad} of {rows - 8} rows behind the last sequence are not 0")
    shows |= bad > 0
sys.exit(2 if shows else 0)
