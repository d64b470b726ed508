"""torch's context parallelism for scaled_dot_product_attention, its ranks being threads on one device, or processes.

    seamproof run --backend python:torch_context_parallel.py:all_to_all:cp=4

`all_gather` and `all_to_all` are the ways in which keys and values go round. Rows that are dealt in two chunks are
torch's load balancing. Sequences are filled up with 0 to a length that the ranks can share. `cp` is the largest number
of ranks, 8 without it; `kernel=efficient` takes the memory-efficient kernels in place of FlashAttention's. The ring is
called as the dispatcher of DTensors calls it, which does not know the CPU's kernels: there it runs on plain torch.

Tried with torch 2.11.0 and 2.15.0 on a CPU.
"""

import flash_attn_shim
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as library

import seamproof
import seamproof.cp

aten = torch.ops.aten
KERNEL = seamproof.options().get("kernel", "flash")
# How outs are said to be merged. torch subtracts; `merge_by=weights` shows what that loses.
MERGE_BY = seamproof.options().get("merge_by", "difference")
ON_GPU = torch.cuda.is_available()
# Sequences of `[batch, heads, rows, dim]`.
ROWS = 2


def plain_forward(query, key, value, is_causal, scale):
    """Returns out and lse of plain torch."""
    first = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out, lse = flash_attn_shim.forward(*first, scale, is_causal)
    return out.transpose(0, 1)[None], lse[None]


def plain_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale):
    """Returns the gradients of plain torch."""
    first = [tensor[0].transpose(0, 1) for tensor in (grad_out, query, key, value, out)]
    gradients = flash_attn_shim.backward(*first, logsumexp[0], scale, is_causal)
    return tuple(gradient.transpose(0, 1)[None].to(query.dtype) for gradient in gradients)


def forward(group, q, k, v, scale):
    """Returns out, lse, and what the backward wants to know besides."""
    if not ON_GPU:
        given = {"op": plain_forward}
    elif KERNEL == "flash":
        given = {"op": aten._scaled_dot_product_flash_attention, "dropout_p": 0.0}
    else:
        given = {"op": aten._scaled_dot_product_efficient_attention, "dropout_p": 0.0}
        given |= {"attn_bias": None, "compute_log_sumexp": True}
    return library._templated_ring_attention(
        group, ROWS, query=q, key=k, value=v, is_causal=True, scale=scale, **given
    )


def backward(group, dout, q, k, v, out, lse, rest, scale):
    """Returns dq, dk and dv."""
    if not ON_GPU:
        given = {"op": plain_backward, "grad_out_name": "grad_out"}
    elif KERNEL == "flash":
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        given = dict(zip(names, rest, strict=False)) | {"dropout_p": 0.0, "grad_out_name": "grad_out"}
        given["op"] = aten._scaled_dot_product_flash_attention_backward.default
    else:
        given = dict(zip(("philox_seed", "philox_offset"), rest, strict=True))
        given |= {"dropout_p": 0.0, "attn_bias": None, "grad_input_mask": (True, True, True, False)}
        given |= {"op": aten._scaled_dot_product_efficient_attention_backward.default}
        given["grad_out_name"] = "grad_out_"
    dq, dk, dv, *_ = library._templated_ring_attention_backward(
        group, ROWS, grad_out=dout, query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True,
        scale=scale, **given,
    )  # fmt: skip
    return dq, dk, dv


def of_sequence(local, group):
    """Returns the ring's results for the rank's rows of one sequence."""
    q, k, v = (tensor.transpose(0, 1)[None].contiguous() for tensor in (local.q, local.k, local.v))
    scale = local.problem.scale
    out, lse, *rest = forward(group, q, k, v, scale)
    # The memory-efficient kernels fill the LSE up to a multiple of 32 rows.
    result = seamproof.Result(out[0].transpose(0, 1), lse=lse[0, :, : len(local.q)])
    if local.dout is not None:
        dout = local.dout.transpose(0, 1)[None].contiguous()
        gradients = backward(group, dout, q, k, v, out, lse, rest, scale)
        result.dq, result.dk, result.dv = (gradient[0].transpose(0, 1) for gradient in gradients)
    return result


def attend(p, q, k, v, dout, method):
    library._cp_options.rotate_method = method
    library._cp_options.enable_load_balance = p.parallel.balance == "dual-chunk"

    def program(local):
        group = local.group()
        with torch.no_grad():
            return local.joined([of_sequence(part, group) for part in local.sequences()])

    return seamproof.cp.attend(p, program, q, k, v, dout)


declared = seamproof.subject(
    arrays="torch", device="cuda" if ON_GPU else "cpu", formats=["bf16", "fp16"],
    d=seamproof.multiples(8, to=128), d_v=seamproof.multiples(8, to=128), d_equal=True, groups=[1],
    masks=seamproof.bottom_right(windows=False), layout=seamproof.packed(padding=True, slack=False),
    padding_inputs="anything", partials={"merge": "io", "merge_by": MERGE_BY, "wire": "io"}, start_seconds=300,
    table={
        "masks": {"forms": ["causal"]}, "lengths": {"equal": True, "no_sequences": False},
        "parallel": {
            "algorithms": ["ring"], "balances": ["contiguous", "dual-chunk"], "sub_groups": True,
            "ranks_most": int(seamproof.options().get("cp", 8)),
        },
    },
)  # fmt: skip


@declared
def all_gather(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout, library._RotateMethod.ALL_GATHER)


@declared
def all_to_all(p, q, k, v, dout=None, sink=None):
    return attend(p, q, k, v, dout, library._RotateMethod.ALL_TO_ALL)
