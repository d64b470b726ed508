"""ring-flash-attn: the bits of a merge change after its first calls on a GPU.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys
import types

import torch

# The package imports flash-attn, which a merge does not need.
interface = types.ModuleType("flash_attn.flash_attn_interface")
names = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
for name in names:
    setattr(interface, name, None)
for name in ("flash_attn", "flash_attn.flash_attn_interface", "ring_flash_attn.adapters"):
    sys.modules[name] = interface
interface.flash_attn_interface = interface.flash_attn_func = interface.substitute_hf_flash_attn = None
interface.update_ring_flash_attn_params = None

from ring_flash_attn.utils import update_out_and_lse  # noqa: E402

torch.manual_seed(0)
out, block = (torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
lse, block_lse = (torch.randn(1, 4, 128, device="cuda") for _ in range(2))
first = None
shows = False
for call in range(5):
    merged = update_out_and_lse(*update_out_and_lse(None, None, out, lse), block, block_lse)
    first = first or merged
    apart = [int((a != b).sum()) for a, b in zip(merged, first, strict=True)]
    rounded = int((merged[0].bfloat16() != first[0].bfloat16()).sum())
    print(
        f"call {call}: {apart[0]} elements of out differ from the first call's, {rounded} as bf16; LSE: {apart[1]}"
    )
    shows |= any(apart)
sys.exit(2 if shows else 0)
