"""A library in CUDA C++, called through ctypes with torch's memory. Build it first, in this folder:

nvcc -O3 -arch=native -shared -Xcompiler -fPIC -o libattention.so attention.cu
seamproof run --backend python:python/examples/cuda_library/cuda_library.py:attention
"""

import ctypes
from pathlib import Path

import torch

import seamproof

library = ctypes.CDLL(str(Path(__file__).with_name("libattention.so")))
POINTERS, INTEGERS = [ctypes.c_void_p] * 7, [ctypes.c_int] * 7
library.attention_forward.argtypes = [
    *POINTERS,
    *INTEGERS,
    ctypes.c_float,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
]


@seamproof.subject(
    arrays="torch",
    device="cuda",
    formats=["f32"],
    masks=seamproof.bottom_right(windows=True),
    layout=seamproof.packed(slack=True),
    padding_inputs="anything",
    backward=False,
    compiles=False,
)
def attention(p, q, k, v, dout=None, sink=None):
    # Memory of `p.empty` is full of a sentinel and lies between guard bands: what the kernel forgets shows.
    out, lse = p.empty("out"), p.empty("lse")
    arrays = [q, k, v, out, lse, p.q.padded_offsets, p.kv.padded_offsets]
    sizes = [len(p.sequences), p.q.max_length, p.q.rows, p.heads_q, p.group, p.dim_qk, p.dim_v]
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [array.data_ptr() for array in arrays]
    error = library.attention_forward(*pointers, *sizes, p.scale, *p.window("fa"), stream)
    if error:
        raise RuntimeError(f"attention_forward returned the CUDA error {error}")
    return out, lse


def test_attention():
    seamproof.check(attention, budget="60s")
