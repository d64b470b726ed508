"""yunchang's `LongContextAttention`, Ulysses × ring, its ranks being threads on one device, or processes.

    seamproof run --backend python:yunchang_hybrid.py:attention:cp=4

The all-to-all is as wide as the problem's: the whole group, a part of it, or one rank, which leaves a ring. Rows that
are dealt in two chunks are the zigzag ring. Sequences are filled up with 0 to a length that the ranks can share. `cp`
is the largest number of ranks: 8 without it. The layer returns no LSE.

Tried with yunchang 0.6.4 and torch 2.11.0 and 2.15.0 on a CPU, with the functions of `flash_attn_shim.py`.
"""

import flash_attn_shim
import numpy as np
import torch

import seamproof
import seamproof.cp
import seamproof.launched

flash_attn_shim.install()

import yunchang as library  # noqa: E402
from yunchang.globals import PROCESS_GROUP  # noqa: E402

VERSIONS = {"yunchang": library.__version__}
# How outs are said to be merged. The rings subtract; `merge_by=weights` shows what that loses.
MERGE_BY = seamproof.options().get("merge_by", "difference")
IMPLEMENTATIONS = {"contiguous": "basic", "dual-chunk": "zigzag"}


def width(parallel):
    """Returns the ranks of one all-to-all."""
    return {"ring": 1, "all-to-all": parallel.size}.get(parallel.algorithm, parallel.all_to_all)


def deal(parallel, spans):
    """Returns the rows of each rank: a ring's rank has its part of a sequence, and its all-to-all cuts that part."""
    ulysses = width(parallel)
    ring = parallel.size // ulysses
    dealt, start = [np.zeros((parallel.size, 0), np.int64)], 0
    for span in spans:
        rows = start + np.arange(span)
        if parallel.balance == "dual-chunk":
            chunks = rows.reshape(2 * ring, -1)
            rows = np.concatenate([chunks[:ring], chunks[: ring - 1 : -1]], axis=1)
        dealt.append(rows.reshape(parallel.size, -1))
        start += span
    return list(np.concatenate(dealt, axis=1))


# The groups of an all-to-all and of a ring, by the width of the former. Those of processes stay, as NCCL's cost memory;
# those of threads end with their world.
GROUPS = {}


def join(local):
    """Makes the groups of a problem those that the layer takes: it reads a register of the process."""
    ulysses = width(local.problem.parallel)
    if ulysses in GROUPS:
        PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = GROUPS[ulysses]
        return
    library.set_seq_parallel_pg(ulysses, local.size // ulysses, local.rank, local.size)
    if seamproof.launched.here() is not None:
        GROUPS[ulysses] = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


def of_sequence(local, layer):
    leaves = [
        tensor.detach().requires_grad_(local.dout is not None) for tensor in (local.q, local.k, local.v)
    ]
    q, k, v = (leaf[None] for leaf in leaves)
    out = layer(q, k, v, softmax_scale=local.problem.scale, causal=True)[0]
    result = seamproof.Result(out)
    if local.dout is not None:
        result.dq, result.dk, result.dv = torch.autograd.grad(out, leaves, local.dout)
    return result


@seamproof.subject(
    arrays="torch", device="cuda" if torch.cuda.is_available() else "cpu", formats=["bf16", "fp16"],
    d=seamproof.multiples(8, to=128), d_v=seamproof.multiples(8, to=128), d_equal=True, groups=[1],
    masks=seamproof.bottom_right(windows=False), layout=seamproof.packed(padding=True, slack=False),
    padding_inputs="anything", statistics=[], versions=VERSIONS,
    partials={"merge": "io", "merge_by": MERGE_BY, "wire": "io"}, start_seconds=300,
    table={
        "masks": {"forms": ["causal"]}, "lengths": {"equal": True, "no_sequences": False},
        "parallel": {
            "algorithms": ["ring", "all-to-all", "hierarchical"], "balances": ["contiguous", "dual-chunk"],
            "ranks_most": int(seamproof.options().get("cp", 8)),
        },
    },
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    parallel = p.parallel

    def program(local):
        # Between this and the layer no other rank may change the register.
        join(local)
        layer = library.LongContextAttention(ring_impl_type=IMPLEMENTATIONS[parallel.balance])
        return local.joined([of_sequence(part, layer) for part in local.sequences()])

    result = seamproof.cp.attend(p, program, q, k, v, dout, deal=deal)
    result.lse = None
    return result
