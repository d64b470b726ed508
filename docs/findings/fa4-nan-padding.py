"""FlashAttention 4: NaN in padding rows of k and v reaches real rows, with seqused and padded cu_seqlens.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
from flash_attn.cute import flash_attn_varlen_func


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


torch.manual_seed(0)
q, k, v = (torch.randn(18, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
v[1:] = float("nan")  # one real key, 17 rows of padding
used = torch.tensor([1], dtype=torch.int32, device="cuda")
given = {"cu_seqlens_q": offsets(18), "cu_seqlens_k": offsets(18), "max_seqlen_q": 18, "max_seqlen_k": 18}
out = flash_attn_varlen_func(q, k, v, seqused_q=used, seqused_k=used, causal=True, **given)
out = out[0] if isinstance(out, tuple) else out
print("out of the one real query:", out[0, 0, :4].tolist(), "; its value:", v[0, 0, :4].tolist())
sys.exit(2 if bool(out[0].isnan().any()) else 0)
