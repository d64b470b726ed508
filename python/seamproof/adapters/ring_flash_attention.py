"""ring-flash-attn: rings, zigzag rings, stripes, an all-gather by heads; ranks are threads on one device, or processes.

    seamproof run --backend python:ring_flash_attention.py:varlen:cp=4

`varlen` takes packed sequences: `ring_flash_attn_varlen_func` where rows are dealt contiguously, and
`zigzag_ring_flash_attn_varlen_func` where they are dealt in two chunks. `dense` calls `ring_flash_attn_func`,
`zigzag_ring_flash_attn_func` and, for stripes, `stripe_flash_attn_func` for each sequence. `llama3` is
`llama3_flash_attn_varlen_func`, which deals the rows of all sequences as if they were one. Sequences are filled up with
0 to a length that the ranks can share. `cp` is the largest number of ranks: 8 without it.

Tried with ring-flash-attn 0.1.8 and torch 2.11.0 and 2.15.0 on a CPU, with the functions of `flash_attn_shim.py`.
"""

import sys
import types
from importlib.metadata import PackageNotFoundError, version

import flash_attn_shim
import torch

import seamproof
import seamproof.cp

flash_attn_shim.install()
# The package imports its bindings for transformers, which these functions do not use, and which fail without
# transformers and with version 5.
bindings = types.ModuleType("ring_flash_attn.adapters")
bindings.substitute_hf_flash_attn = bindings.update_ring_flash_attn_params = None
sys.modules[bindings.__name__] = bindings

import ring_flash_attn as library  # noqa: E402

try:
    VERSIONS = {"ring-flash-attn": version("ring-flash-attn")}
except PackageNotFoundError:
    VERSIONS = {}


# How outs are said to be merged. The rings subtract; `merge_by=weights` shows what that loses.
MERGE_BY = seamproof.options().get("merge_by", "difference")


def declared(algorithm, balances):
    merge_by = MERGE_BY if algorithm == "ring" else "weights"
    ranks = int(seamproof.options().get("cp", 8))
    return seamproof.subject(
        arrays="torch", device="cuda" if torch.cuda.is_available() else "cpu", formats=["bf16", "fp16"],
        d=seamproof.multiples(8, to=128), d_v=seamproof.multiples(8, to=128), d_equal=True,
        groups=[1, 2, 4], masks=seamproof.bottom_right(windows=False), padding_inputs="anything",
        layout=seamproof.packed(padding=True, slack=False), versions=VERSIONS,
        partials={"merge": "io", "merge_by": merge_by, "wire": "io"}, start_seconds=300,
        table={
            "masks": {"forms": ["causal"]}, "lengths": {"equal": True, "no_sequences": False},
            "parallel": {
                "algorithms": [algorithm], "balances": balances, "ranks_most": ranks, "sub_groups": True,
            },
        },
    )  # fmt: skip


def called(local, function, arguments=(), **more):
    """Returns a function's results for the rank's rows, gradients too where they are asked for."""
    leaves = [
        tensor.detach().requires_grad_(local.dout is not None) for tensor in (local.q, local.k, local.v)
    ]
    batch = () if arguments else (0,)
    q, k, v = (leaf.unsqueeze(*batch) if batch else leaf for leaf in leaves)
    out, lse, _ = function(
        q, k, v, *arguments, softmax_scale=local.problem.scale, causal=True, return_attn_probs=True, **more
    )
    out, lse = (out[0], lse[0]) if batch else (out, lse)
    result = seamproof.Result(out, lse=lse)
    if local.dout is not None:
        result.dq, result.dk, result.dv = torch.autograd.grad(out, leaves, local.dout)
    return result


@declared("ring", ["contiguous", "dual-chunk"])
def varlen(p, q, k, v, dout=None, sink=None):
    function = {
        "contiguous": library.ring_flash_attn_varlen_func,
        "dual-chunk": library.zigzag_ring_flash_attn_varlen_func,
    }[p.parallel.balance]

    def program(local):
        ends = (local.offsets(local.size), max(local.spans) // local.size)
        return called(local, function, ends, group=local.group())

    return seamproof.cp.attend(p, program, q, k, v, dout)


@declared("ring", ["contiguous", "dual-chunk", "striped"])
def dense(p, q, k, v, dout=None, sink=None):
    function = {
        "contiguous": library.ring_flash_attn_func,
        "dual-chunk": library.zigzag_ring_flash_attn_func,
        "striped": library.stripe_flash_attn_func,
    }[p.parallel.balance]

    def program(local):
        group = local.group()
        return local.joined([called(part, function, group=group) for part in local.sequences()])

    return seamproof.cp.attend(p, program, q, k, v, dout)


@declared("all-gather", ["contiguous"])
def llama3(p, q, k, v, dout=None, sink=None):
    def program(local):
        *places, of_keys = library.llama3_flash_attn_prepare_cu_seqlens(
            local.offsets(), True, local.rank, local.size
        )
        return called(
            local, library.llama3_flash_attn_varlen_func, places, heads_k_stride=1, local_k_slice=of_keys,
            group=local.group(),
        )  # fmt: skip

    return seamproof.cp.attend(p, program, q, k, v, dout, deal=seamproof.cp.as_one)
