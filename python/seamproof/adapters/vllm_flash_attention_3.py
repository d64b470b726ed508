"""FlashAttention 3 as vLLM ships it: the forward, with padding between sequences.

    seamproof run --backend python:vllm_flash_attention_3.py:attention

`paged` has its keys and values in pages as well, and is called step by step on a KV cache.

Tried with the extension of vLLM 0.24.0 under torch 2.11.0 on an H200. `$VLLM_FLASH_ATTENTION_3` names the file
`_vllm_fa3_C.abi3.so` where vLLM itself is not installed.
"""

import functools
import importlib.util
import os
from pathlib import Path

import torch

import seamproof

NAME = "_vllm_fa3_C.abi3.so"


def library():
    given = os.environ.get("VLLM_FLASH_ATTENTION_3")
    if given:
        return given
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise seamproof.NotHere(f"vllm is not installed, and $VLLM_FLASH_ATTENTION_3 names no {NAME}")
    return str(Path(found.submodule_search_locations[0]) / "vllm_flash_attn" / NAME)


torch.ops.load_library(library())
forward = torch.ops._vllm_fa3_C.fwd


declared = functools.partial(
    seamproof.subject,
    arrays="torch", device="cuda", formats=["bf16", "fp16"], d=seamproof.multiples(8, to=256),
    d_v=seamproof.multiples(8, to=256), d_equal=True, masks=seamproof.bottom_right(windows=True, most=1 << 30),
    layout=seamproof.packed(padding=True, slack=True), softcap=True, backward=False,
    arithmetic={"soft_cap": "approximate"},
    lengths={"no_sequences": False}, lse=seamproof.lse(empty="+inf"), start_seconds=300,
)  # fmt: skip


def call(p, q, k, v, dout=None, sink=None):
    left, right = p.window("fa")
    # The table says where keys lie that are in pages, and there are no offsets then.
    places = {"cu_seqlens_k": p.kv.padded_offsets} if p.block_table is None else {"page_table": p.block_table}
    given = {
        "q": q, "k": k, "v": v, "out": p.empty("out"), "cu_seqlens_q": p.q.padded_offsets, **places,
        "seqused_q": p.q.lengths, "seqused_k": p.kv.lengths,
        "max_seqlen_q": p.q.max_length, "max_seqlen_k": p.kv.max_length, "softmax_scale": p.scale,
        "is_causal": p.causal and p.left is None, "window_size_left": left, "window_size_right": right,
        "softcap": p.softcap or 0.0,
    }  # fmt: skip
    return called(given)


attention = declared(name="attention")(call)
# A page that holds whole tiles of keys is loaded by another path than a smaller one.
paged = declared(name="paged", cache=True, pages=[1, 3, 5, 16, 64, 128])(call)


def called(given):
    """Calls the operator, whose arguments are positional, with what is given by name."""
    arguments, missing = [], dict(given)
    for argument in forward.default._schema.arguments:
        if argument.name in missing:
            arguments.append(missing.pop(argument.name))
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        else:
            arguments.append(DEFAULTS.get(argument.name))
    if missing:
        raise seamproof.DeclarationError(
            f"fwd has no argument {', '.join(missing)}: {forward.default._schema}"
        )
    _, lse, *_ = forward(*arguments)
    return seamproof.Result(given["out"], lse=lse)


DEFAULTS = {
    "is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0
}  # fmt: skip
