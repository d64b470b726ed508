"""FlashAttention 3 of vLLM: rows of `out` that no sequence owns are set to 0 where no sequence has a key.

Takes the extension from $VLLM_FLASH_ATTENTION_3 where vLLM itself is not installed.
Exit code 2 where the defect shows, 0 where it does not.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

library = os.environ.get("VLLM_FLASH_ATTENTION_3")
if library is None:
    vllm = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    library = str(vllm / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so")
torch.ops.load_library(library)
forward = torch.ops._vllm_fa3_C.fwd
FIXED = {"is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


def called(**given):
    arguments = []
    for argument in forward.default._schema.arguments:
        if argument.name in given:
            arguments.append(given[argument.name])
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        else:
            arguments.append(FIXED.get(argument.name))
    return forward(*arguments)


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


shows = False
for queries, keys in (((2, 3), (2, 3)), ((2, 3), (0, 3)), ((2, 3), (0, 0)), ((0, 0), (0, 0))):
    rows = sum(queries)
    q, out = (torch.full((rows + 4, 1, 64), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.ones(sum(keys), 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    called(
        q=q, k=k, v=v, out=out, cu_seqlens_q=offsets(*queries), cu_seqlens_k=offsets(*keys),
        max_seqlen_q=max(queries), max_seqlen_k=max(keys), softmax_scale=0.125, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0,
    )  # fmt: skip
    torch.cuda.synchronize()
    cleared = int((out[rows:] == 0).all((1, 2)).sum())
    print(f"queries {queries}, keys {keys}: {cleared} of 4 rows behind the last sequence are set to 0")
    shows |= cleared > 0
sys.exit(2 if shows else 0)
