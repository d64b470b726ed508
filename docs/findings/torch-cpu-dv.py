"""torch's FlashAttention on the CPU: dk and dv are added up over blocks of queries in 16 bits, and lose more with each.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def errors(queries, dtype):
    """Returns the largest relative errors of dk and dv, in units of the format's rounding."""
    torch.manual_seed(0)
    shapes = ((queries, 8), (33, 8), (33, 8), (queries, 8))
    q, k, v, dout = (torch.randn(1, 1, *shape).to(dtype) for shape in shapes)
    dout = dout.abs()  # sums that do not cancel
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(*leaves, scale=1.0).backward(dout)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.softmax(exact[0] @ exact[1].transpose(-1, -2), -1)
    (weights @ exact[2]).backward(dout.double())
    pairs = [(leaf.grad.double(), right.grad) for leaf, right in zip(leaves[1:], exact[1:], strict=True)]
    return [((got - right).abs().max() / right.abs().max()).item() / UNIT[dtype] for got, right in pairs]


shows = False
for dtype in UNIT:
    for queries in (64, 1024, 16384, 65536):
        dk, dv = errors(queries, dtype)
        print(f"{dtype}, {queries} queries: dk is off by {dk:.1f} roundings, dv by {dv:.1f}")
        shows |= dv > 8
sys.exit(2 if shows else 0)
