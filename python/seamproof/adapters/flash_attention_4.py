"""FlashAttention 4 (`flash_attn.cute`) on a Hopper GPU, with padding between sequences.

    seamproof run --backend python:flash_attention_4.py:attention

Tried with flash-attn-4 4.0.0b36 on an H100 and an H200. `deterministic` asks for the same bits in every run, `sink`
adds a learnable sink, `softcap` a soft cap. `paged` has keys and values in pages, forward alone, and is called step by
step on a KV cache. Each value of a soft cap is another kernel, so that a campaign compiles
without end.
"""

import functools
import os
from importlib.metadata import version

# Its kernels are compiled for each kind of call, which takes seconds: workers and later runs share them on disk.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

from flash_attn.cute import flash_attn_varlen_func

import seamproof

declared = functools.partial(
    seamproof.flash_varlen,
    arrays="torch",
    device="cuda",
    formats=["bf16", "fp16"],
    seqused=True,  # real lengths beside padded offsets
    d=[64, 128],  # more sizes mean more to compile
    d_v=[64, 128],
    d_equal=True,
    groups=[1, 2, 4],
    softcap=False,
    sinks=False,
    padding_inputs="finite",  # NaN in padding rows is multiplied by a weight of 0
    arithmetic={"delta": "stored-out"},  # the backward is given the stored out, which it needs for D alone
    start_seconds=300,
    versions={"flash-attn-4": version("flash-attn-4")},
)

attention = declared(name="attention")(flash_attn_varlen_func)
deterministic = declared(
    name="deterministic", arguments={"deterministic": True}, promises=["deterministic_backward"]
)(flash_attn_varlen_func)
sink = declared(name="sink", sinks=["learnable"])(flash_attn_varlen_func)
# A page of as many rows as a tile of keys is loaded by another path than the others.
paged = declared(name="paged", backward=False, cache=True, pages=[1, 3, 5, 16, 64, 128])(
    flash_attn_varlen_func
)
softcap = declared(name="softcap", softcap=True, groups=[1, 2], formats=["bf16"])(flash_attn_varlen_func)


def test_attention():
    seamproof.check(attention, budget="60s")
