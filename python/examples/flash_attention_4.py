"""FlashAttention 4 (`flash_attn.cute`) on a Hopper GPU, with padding between sequences.

seamproof run --backend python:python/examples/flash_attention_4.py:attention
"""

import os
from importlib.metadata import version

# Its kernels are compiled for each kind of call, which takes seconds: workers and later runs share them on disk.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

from flash_attn.cute import flash_attn_varlen_func

import seamproof

attention = seamproof.flash_varlen(
    arrays="torch",
    device="cuda",
    formats=["bf16", "fp16"],
    seqused=True,  # real lengths beside padded offsets
    d=[64, 128],  # more sizes mean more to compile
    d_v=[64, 128],
    d_equal=True,
    sinks=False,  # some of its versions take sinks in bf16 alone, and those of a problem are f32
    padding_inputs="finite",  # NaN in padding rows is multiplied by a weight of 0
    start_seconds=300,
    versions={"flash-attn-4": version("flash-attn-4")},
)(flash_attn_varlen_func)


def test_attention():
    seamproof.check(attention, budget="60s")
