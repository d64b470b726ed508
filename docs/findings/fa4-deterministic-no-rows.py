"""FlashAttention 4: the deterministic backward fails where no sequence has rows, but the tensors have.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
from flash_attn.cute import flash_attn_varlen_func


def gradients(deterministic):
    """Returns what the backward of two empty sequences before three rows of slack says."""
    q, k, v = (
        torch.randn(3, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    offsets = torch.zeros(3, device="cuda", dtype=torch.int32)
    out, *_ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=0, max_seqlen_k=0,
        deterministic=deterministic,
    )  # fmt: skip
    try:
        torch.autograd.grad(out.float().sum(), (q, k, v))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "runs"


said = {deterministic: gradients(deterministic) for deterministic in (False, True)}
for deterministic, words in said.items():
    print(f"deterministic={deterministic}: {words}")
sys.exit(2 if said[False] == "runs" and "stride_order" in said[True] else 0)
