"""cuDNN under torch's scaled_dot_product_attention: one query whose LSE is below -88.7 has NaN in dq, dk and dv.

Exit code 1 where the defect shows, 0 where it does not.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

shows = False
for keys in (64, 100, 192, 320):
    for depth in (5, 100, 300):
        draw = torch.Generator().manual_seed(0)
        q = torch.ones(1, 2, 1, 64)
        k = -depth / 64 + 0.02 * torch.randn(1, 2, keys, 64, generator=draw)
        v = torch.randn(1, 2, keys, 64, generator=draw)
        leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(*leaves, scale=1.0)
        out.backward(torch.ones_like(out))
        grads = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
        bad = [name for name, x in grads.items() if not x.isfinite().all()]
        print(f"{keys} keys, logits near -{depth}: {', '.join(bad) or 'all finite'}")
        shows |= bool(bad)
sys.exit(shows)
