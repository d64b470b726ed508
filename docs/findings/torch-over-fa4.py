"""torch's own bridge to FlashAttention 4: every call fails with the newer releases of that library.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

activate_flash_attention_impl("FA4")
q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
try:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v)
except ValueError as error:
    print(error)
    sys.exit(2 if "too many values to unpack" in str(error) else 0)
