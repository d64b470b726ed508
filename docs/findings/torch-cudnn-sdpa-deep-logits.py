"""cuDNN under torch's scaled_dot_product_attention: dq is NaN where a row's LSE is below -88.7; in fp16, below -12.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def gradients(length, depth, dtype):
    """Logits of about -depth in every row."""
    draw = torch.Generator().manual_seed(0)
    shape = (1, 1, length, 64)
    q = 1 + 0.05 * torch.randn(shape, generator=draw)
    k = -depth / 64 + 0.05 * torch.randn(shape, generator=draw)
    v = torch.randn(shape, generator=draw)
    leaves = [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*leaves, scale=1.0)
    out.backward(torch.randn_like(out))
    return {"out": out, **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}


shows = False
for dtype, depths in ((torch.bfloat16, (20, 60, 100, 2000)), (torch.float16, (10, 20, 60))):
    for length in (64, 128, 192, 256, 320):
        for depth in depths:
            bad = [name for name, x in gradients(length, depth, dtype).items() if not x.isfinite().all()]
            print(f"{dtype}, length {length}, logits near -{depth}: {', '.join(bad) or 'all finite'}")
            shows |= bool(bad)
sys.exit(2 if shows else 0)
