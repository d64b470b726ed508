"""TransformerEngine's `DotProductAttention` of packed sequences (THD), alone and under context parallelism.

    seamproof run --backend python:transformer_engine_packed.py:attention
    seamproof run --backend python:transformer_engine_packed.py:p2p:cp=4

Real lengths are `cu_seqlens`, and `cu_seqlens_padded` says where sequences lie. `attention` takes any lengths without
windows, `windows` as many keys as queries, and `sinks` a sink, with gradients since cuDNN 9.26. `p2p`, `all_gather`,
`all_to_all` and `hierarchical` (a2a+p2p) have rows dealt in two chunks, `all_gather_contiguous` the rows of all
sequences as if they were one; ranks are threads on one device, or processes. `cp` is the largest number of ranks: 8
without it. Where an all-to-all cannot deal the heads, heads of 0 are added. No LSE comes back, and the largest logits
only in the format of out.

`backend` is `fused` (cuDNN), which is taken without it, or `flash`: no other runs, and a problem that it does not take
is refused. The package is loaded without torch.compile, which would compile helpers anew for each shape.

Tried with TransformerEngine 2.20.2, torch 2.11.0, cuDNN 9.19.0 and NCCL 2.28.9 on H100s.
"""

import functools
import logging
import math
import os

import seamproof
import seamproof.cp
import seamproof.launched

OPTIONS = seamproof.options()
BACKEND = OPTIONS.get("backend", "fused")
for name in ("fused", "flash", "unfused"):
    os.environ[f"NVTE_{name.upper()}_ATTN"] = str(int(name == BACKEND))
os.environ.setdefault("NVTE_TORCH_COMPILE", "0")

import torch  # noqa: E402  before the package, which then finds torch's own cuDNN and NCCL
import torch.distributed as dist  # noqa: E402
import transformer_engine  # noqa: E402
import transformer_engine.pytorch as library  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as inner  # noqa: E402

VERSIONS = {
    "transformer-engine": transformer_engine.__version__,
    "cudnn": ".".join(map(str, library.get_cudnn_version())),
    "backend": BACKEND,
}


class Reasons(logging.Handler):
    """Keeps what the package said last of why it does not take a backend."""

    said = "no reason was given"

    def emit(self, record):
        text = record.getMessage()
        if text.startswith(f"Disabling {BACKEND.capitalize()}Attention"):
            self.said = text


REASONS = Reasons()
logging.getLogger("DotProductAttention").addHandler(REASONS)
logging.getLogger("DotProductAttention").propagate = False
inner.attn_log._log_level = logging.DEBUG


def called(p, q, k, v, dout, sink=None, unit=1, prepare=None, **arguments):
    """Returns the results of a call, gradients too where they are asked for. KV heads become a multiple of `unit`."""
    heads, kv_heads, group = q.shape[1], k.shape[1], q.shape[1] // k.shape[1]
    most = -(-kv_heads // unit) * unit
    leaves = [widened(q, most * group), widened(k, most), widened(v, most)]
    for leaf in leaves:
        leaf.requires_grad_(dout is not None)
    module = library.DotProductAttention(
        most * group, (k.shape[2], v.shape[2]), num_gqa_groups=most, qkv_format="thd", softmax_scale=p.scale,
        softmax_type="vanilla" if p.sink == "none" else p.sink,
    ).train(dout is not None)  # fmt: skip
    if sink is not None:
        module.softmax_offset.data.copy_(sink)
        leaves.append(module.softmax_offset)
    if prepare is not None:
        prepare(module)
    try:
        flat = module(*leaves[:3], **arguments)
    except ValueError as error:
        if "backend is available" not in str(error):
            raise
        raise seamproof.Refused(REASONS.said[:300]) from error
    check_backend()
    out = flat.view(len(leaves[0]), most * group, v.shape[2])[: len(q), :heads]
    result = seamproof.Result(out)
    if dout is not None:
        dq, dk, dv, *of_sink = torch.autograd.grad(out, leaves, dout)
        result.dq = dq[: len(q), :heads]
        result.dk, result.dv = dk[: len(k), :kv_heads], dv[: len(k), :kv_heads]
        result.dsink = of_sink[0] if of_sink else None
    return result


def widened(tensor, heads):
    """Returns a copy with as many heads, and at least one row: what is added is 0.

    The module looks where in its memory a tensor begins, and one without rows has no address.
    """
    more = (0, 0, 0, heads - tensor.shape[1], 0, int(not len(tensor)))
    return torch.nn.functional.pad(tensor.detach(), more).clone()


def check_backend():
    """Raises where another backend has run than was asked for. The package keeps its last choice in a register."""
    chosen = inner._attention_backends
    if not chosen[f"use_{BACKEND}_attention"]:
        used = [name for name in ("flash", "fused", "unfused") if chosen[f"use_{name}_attention"]]
        raise RuntimeError(f"{', '.join(used) or 'no backend'} has run where {BACKEND} was asked for")


def mask_of(p, bottom_right):
    """Returns the mask as arguments of the call."""
    kind = "padding" if p.right != 0 else "padding_causal"
    if kind == "padding_causal" and bottom_right:
        kind += "_bottom_right"
    return {"attn_mask_type": kind, "window_size": p.window("te")}


def up(rows):
    """Returns a longest length that serves many problems, as the package itself rounds it up where none is given."""
    return max(64, -(-rows // 64) * 64)


def alone(p, q, k, v, dout, sink=None):
    most_q, most_kv = up(p.q.max_span), up(p.kv.max_span)
    if p.left is not None or p.right not in (None, 0) or (p.causal and p.bottom_right):
        # Such masks are refused where the longest queries are longer than the longest keys. The longest lengths are
        # bounds, and callers have one for both sides.
        most_q = most_kv = max(most_q, most_kv)
    return called(
        p, q, k, v, dout, sink, cu_seqlens_q=p.q.offsets, cu_seqlens_kv=p.kv.offsets,
        cu_seqlens_q_padded=p.q.padded_offsets, cu_seqlens_kv_padded=p.kv.padded_offsets,
        max_seqlen_q=most_q, max_seqlen_kv=most_kv, pad_between_seqs=p.pad_between_seqs,
        bottom_right_diagonal=p.bottom_right, **mask_of(p, p.bottom_right),
    )  # fmt: skip


declared = functools.partial(
    seamproof.subject, arrays="torch", device="cuda" if torch.cuda.is_available() else "cpu",
    formats=["bf16", "fp16"], d=seamproof.multiples(8, to=256), d_v=seamproof.multiples(8, to=256), statistics=[],
    layout=seamproof.packed(padding=True, slack=True, gaps=True), arithmetic={"delta": "stored-out"},
    start_seconds=300, versions=VERSIONS,
)  # fmt: skip
WINDOWS = ["causal-window", "two-sided"]


@declared(
    masks=seamproof.both_alignments(windows=False), lengths={"no_sequences": False},
    forms=["cu_seqlens", "pad_between_seqs", "no_pad_between_seqs"],
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    return alone(p, q, k, v, dout)


@declared(
    masks=seamproof.both_alignments(windows=WINDOWS, most=1 << 30), lengths={"no_sequences": False, "equal": True}
)  # fmt: skip
def windows(p, q, k, v, dout=None, sink=None):
    return alone(p, q, k, v, dout)


# cuDNN's backward of packed rows takes a sink since 9.26.
@declared(
    masks=seamproof.both_alignments(windows=False), lengths={"no_sequences": False},
    sinks=["none", "off-by-one", "learnable"], backward=library.get_cudnn_version() >= (9, 26, 0),
)  # fmt: skip
def sinks(p, q, k, v, dout=None, sink=None):
    return alone(p, q, k, v, dout, sink if p.sink == "learnable" else None)


# --- under context parallelism


def parallel(p, way, q, k, v, dout, deal=seamproof.cp.by_sequence, **more):
    """Returns the results of a way of communication. The module is told lengths and places of whole sequences."""
    real, ranks = p.q.offsets, sorted(p.parallel.ranks)
    # An all-to-all deals heads to its ranks, and takes an even number alone.
    width = {"a2a": p.parallel.size, "a2a+p2p": p.parallel.all_to_all}.get(way)
    unit = math.lcm(2, width) if width else 1

    def program(local):
        # One tensor for both sides, as callers give it: some ways demand the very same.
        padded = local.offsets()

        def prepare(module):
            group = hierarchy(ranks, local.rank, width) if way == "a2a+p2p" else local.group()
            stream = torch.cuda.Stream() if local.q.is_cuda else None
            module.set_context_parallel_group(group, ranks, stream, way, **more)

        return called(
            p, local.q, local.k, local.v, local.dout, unit=unit, prepare=prepare, cu_seqlens_q=real,
            cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
            **mask_of(p, bottom_right=False),
        )  # fmt: skip

    result = seamproof.cp.attend(p, program, q, k, v, dout, deal=deal)
    result.lse = None
    return result


def of_all_to_alls(ranks, width):
    """Returns the ranks of each all-to-all, which are neighbours."""
    return [ranks[first : first + width] for first in range(0, len(ranks), width)]


def of_rings(ranks, width):
    """Returns the ranks of each ring, one of each all-to-all."""
    return [ranks[first::width] for first in range(width)]


def prepare_hierarchy(ranks, width):
    """Makes the groups of a hierarchy, where ranks are processes: all of them make each, and idle ones too.

    The ranks of a group cannot make it alone. torch then names it after the number of groups that a rank is in
    (`_hash_ranks_to_str`), and ranks that differ in that wait for each other under different names for ever.
    """
    seat = seamproof.launched.here()
    for group in [*of_all_to_alls(ranks, width), *of_rings(ranks, width)] if seat else []:
        seat.prepare(group)


def hierarchy(ranks, rank, width):
    """Returns the groups of a rank: that of its all-to-all and that of its ring."""
    return [
        group_of(of_all_to_alls(ranks, width)[rank // width]),
        group_of(of_rings(ranks, width)[rank % width]),
    ]


def group_of(ranks):
    """Returns the group of some ranks. As threads of a world that begins, all ranks are in as many groups."""
    seat = seamproof.launched.here()
    return seat.group_of(ranks) if seat else dist.new_group(ranks, use_local_synchronization=True)


def declared_parallel(algorithm, windows=(), balance="dual-chunk", **more):
    table = {
        "lengths": {"equal": True, "no_sequences": False},
        "parallel": {
            "algorithms": ["single", algorithm], "balances": [balance], "sub_groups": True,
            "ranks_most": int(OPTIONS.get("cp", 8)),
        },
    }  # fmt: skip
    given = {"masks": seamproof.bottom_right(windows=windows or False, most=1 << 30)} | more
    return declared(
        **given, layout=seamproof.packed(padding=True, slack=False), padding_inputs="anything", table=table
    )


# Outs of the steps of a ring are weighted and added up in their own format, and gradients too.
MERGED = {"merge": "io", "wire": "io"}


@declared_parallel("ring", partials=MERGED)
def p2p(p, q, k, v, dout=None, sink=None):
    return parallel(p, "p2p", q, k, v, dout)


@declared_parallel("all-gather", windows=WINDOWS, partials={"wire": "io"})
def all_gather(p, q, k, v, dout=None, sink=None):
    return parallel(p, "all_gather", q, k, v, dout)


@declared_parallel("all-to-all", windows=WINDOWS)
def all_to_all(p, q, k, v, dout=None, sink=None):
    return parallel(p, "a2a", q, k, v, dout)


@declared_parallel("hierarchical", partials=MERGED)
def hierarchical(p, q, k, v, dout=None, sink=None):
    prepare_hierarchy(sorted(p.parallel.ranks), p.parallel.all_to_all)
    return parallel(p, "a2a+p2p", q, k, v, dout)


@declared_parallel(
    "all-gather", balance="contiguous", masks={"forms": ["causal"]}, partials={"wire": "io"}
)  # fmt: skip
def all_gather_contiguous(p, q, k, v, dout=None, sink=None):
    strategy = library.CPLoadBalancingStrategy.NO_LOAD_BALANCE
    return parallel(
        p, "all_gather", q, k, v, dout, deal=seamproof.cp.as_one, load_balancing_strategy=strategy
    )
