"""FlashAttention 3 as vLLM ships it: the forward, with padding between sequences, alone and under context parallelism.

    seamproof run --backend python:vllm_flash_attention_3.py:attention
    seamproof run --backend python:vllm_flash_attention_3.py:all_gather:cp=4

`paged` has its keys and values in pages as well, and is called step by step on a KV cache. `fp8` takes codes of e4m3
with a descale for each sequence and KV head.

`all_gather` gathers keys and values over ranks, which are threads on one device, or processes; `cp` is the largest
number of ranks, 8 without it. The kernel is called as TransformerEngine calls it there
(https://github.com/NVIDIA/TransformerEngine/pull/2829): each chunk of a rank's queries is a step, and no tensor is cut.
Offsets lead to the chunk, `seqused_q` has its real rows, and `seqused_k` the keys up to the last that it sees.

Tried with the extension of vLLM 0.24.0 under torch 2.11.0 on an H200. `$VLLM_FLASH_ATTENTION_3` names the file
`_vllm_fa3_C.abi3.so` where vLLM itself is not installed.
"""

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import seamproof
import seamproof.cp

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
    arrays="torch", device="cuda" if torch.cuda.is_available() else "cpu", formats=["bf16", "fp16"],
    d=seamproof.multiples(8, to=256), d_v=seamproof.multiples(8, to=256), d_equal=True,
    masks=seamproof.bottom_right(windows=True, most=1 << 30),
    layout=seamproof.packed(padding=True, slack=True), softcap=True, backward=False,
    arithmetic={"soft_cap": "approximate"},
    lengths={"no_sequences": False}, lse=seamproof.lse(empty="+inf"), start_seconds=300,
)  # fmt: skip


def call(p, q, k, v, dout=None, sink=None, **more):
    # The table says where keys lie that are in pages, and there are no offsets then.
    places = {"cu_seqlens_k": p.kv.padded_offsets} if p.block_table is None else {"page_table": p.block_table}
    given = {
        "q": q, "k": k, "v": v, "out": p.empty("out"), "cu_seqlens_q": p.q.padded_offsets, **places,
        "seqused_q": p.q.lengths, "seqused_k": p.kv.lengths,
        "max_seqlen_q": p.q.max_length, "max_seqlen_k": p.kv.max_length, **words(p), **more,
    }  # fmt: skip
    return called(given)


def words(p):
    """Returns what all calls of a problem are told."""
    left, right = p.window("fa")
    return {
        "softmax_scale": p.scale, "is_causal": p.causal and p.left is None, "window_size_left": left,
        "window_size_right": right, "softcap": p.softcap or 0.0,
    }  # fmt: skip


attention = declared(name="attention")(call)
# A page that holds whole tiles of keys is loaded by another path than a smaller one.
paged = declared(name="paged", cache=True, pages=[1, 3, 5, 16, 64, 128])(call)


# Its matrix unit's sums of weights and values are promoted to f32 after four steps, and those of q and k are not: eight
# steps with the largest head dimension. The bounds of eight hold for both. Weights are multiplied by 2^8
# (https://github.com/vllm-project/flash-attention, hopper/softmax.h and mainloop_fwd_sm90_tma_gmma_ws.hpp).
@declared(
    name="fp8", formats=["e4m3/sequence-group"],
    d=seamproof.multiples(16, to=256), d_v=seamproof.multiples(16, to=256),
    arithmetic={
        "accumulation": {"wgmma-fp8": {"promoted_after": 8}}, "weights": "before-normalisation",
        "soft_cap": "approximate", "weight_exponent": 8,
    },
)  # fmt: skip
def fp8(p, q, k, v, dout=None, sink=None):
    descales = {f"{name}_descale": p.descales[name][:, :, 0].contiguous() for name in ("q", "k", "v")}
    return call(p, q, k, v, **descales)


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


# --- under context parallelism


@declared(
    masks=seamproof.bottom_right(windows="causal-window", most=1 << 30), padding_inputs="anything",
    layout=seamproof.packed(padding=True, slack=False), lengths={"equal": True, "no_sequences": False},
    table={
        "parallel": {
            "algorithms": ["all-gather"], "balances": ["contiguous", "dual-chunk"], "sub_groups": True,
            "ranks_most": int(seamproof.options().get("cp", 8)),
        },
    },
)  # fmt: skip
def all_gather(p, q, k, v, dout=None, sink=None):
    def program(local):
        group = local.group()
        k, v = (gathered(tensor, local, group) for tensor in (local.k, local.v))
        out = local.q.new_zeros(*local.q.shape[:2], v.shape[2])
        lse = local.q.new_full((local.q.shape[1], len(out)), -torch.inf, dtype=torch.float32)
        for step in steps(local):
            of_step, rows = step.call(local, k, v), step.rows(out.device)
            out[rows], lse[:, rows] = of_step.out[rows], of_step.lse[:, rows]
        return seamproof.Result(out, lse=lse)

    return seamproof.cp.attend(p, program, q, k, v)


def gathered(mine, local, group):
    """Returns the rows of all ranks, in the order of the sequences."""
    of_ranks = mine.new_empty(local.size * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(of_ranks, mine.contiguous(), group=group)
    dealt = np.concatenate(seamproof.cp.by_sequence(local.problem.parallel, local.spans))
    return of_ranks[torch.from_numpy(np.argsort(dealt)).to(mine.device)]


@dataclasses.dataclass(frozen=True)
class Step:
    """One chunk of each sequence: its first row on the rank, its rows, and the numbers of queries and keys in use."""

    first: np.ndarray
    chunks: np.ndarray
    used_q: np.ndarray
    used_k: np.ndarray

    def call(self, local, k, v):
        """Returns the kernel's results for the whole rank, of which the chunks' rows are right."""
        integers = local.problem.library.integers
        offsets = integers([*self.first.tolist(), len(local.q)])
        return called({
            "q": local.q.contiguous(), "k": k, "v": v, "out": local.q.new_empty(*local.q.shape[:2], v.shape[2]),
            "cu_seqlens_q": offsets, "cu_seqlens_k": local.offsets(),
            "seqused_q": integers(self.used_q.tolist()), "seqused_k": integers(self.used_k.tolist()),
            "max_seqlen_q": int(self.chunks.max()), "max_seqlen_k": max(local.spans), **words(local.problem),
        })  # fmt: skip

    def rows(self, device):
        """Returns the rank's rows that the step makes."""
        rows = [first + np.arange(used) for first, used in zip(self.first, self.used_q, strict=True)]
        return torch.from_numpy(np.concatenate(rows)).to(device)


def steps(local):
    """Yields the steps of a rank."""
    p, spans = local.problem, np.array(local.spans)
    lengths, places = np.array([sequence.q.len for sequence in p.sequences]), spans // local.size
    offsets = np.cumsum(places) - places
    numbers = [local.rank]
    if p.parallel.balance == "dual-chunk":
        numbers.append(2 * local.size - 1 - local.rank)
    chunks = places // len(numbers)
    for at, number in enumerate(numbers):
        used_q = np.clip(lengths - number * chunks, 0, chunks)
        # Masks end at the last query and the last key that are used.
        seen = number * chunks + used_q if p.causal else lengths
        yield Step(offsets + at * chunks, chunks, used_q, np.where(used_q > 0, seen, 0))


DEFAULTS = {
    "is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0
}  # fmt: skip
