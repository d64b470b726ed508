"""FlashAttention-4 as a peer of `seamproof bench attention --peer`: times its passes on one cell after the other.

usage: fa4.py [SITE [FILE]]
  SITE  a folder with the packages torch and flash_attn.cute (flash-attn-4), where they are not installed
  FILE  requests, one JSON line a cell; standard input if not given

A request and its answer are described in src/bench/peer.rs. https://github.com/Dao-AILab/flash-attention
"""

import itertools
import os
import site
import sys
import warnings

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
    site.addsitedir(sys.argv[1])
warnings.filterwarnings("ignore")

import torch
from flash_attn.cute import flash_attn_varlen_func

from timed import milliseconds, repeated, serve, shapes, table


def stored(file):
    return torch.from_file(file, size=os.path.getsize(file) // 2, dtype=torch.bfloat16).cuda()


def forward(request, deterministic=False):
    """A function that launches the forward on q, k and v, and keeps what a backward needs where they ask for gradients."""
    lengths = request["lengths"]
    offsets = table([0, *itertools.accumulate(request["padded"])])
    arguments = dict(
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        seqused_q=table(lengths),
        seqused_k=table(lengths),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        causal=request["causal"],
        window_size=(None, None) if request["window"] is None else (request["window"], 0),
        deterministic=deterministic,
    )

    def launch(q, k, v):
        out = flash_attn_varlen_func(q, k, v, **arguments)
        return out[0] if isinstance(out, tuple) else out

    return launch


def forwards(request):
    """A launch for each set of tensors from N(0, 1), padding too. They ask for gradients, so that the forward keeps its LSE,
    as ours does."""

    def one():
        tensor = lambda shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        tensors = [tensor(shape) for shape in shapes(request)[:3]]
        return lambda: launch(*tensors)

    launch = forward(request)
    return [one() for _ in range(request["sets"])]


def backwards(request):
    """The same of the backward, on the numbers that the request names; each gives dq, dk and dv."""
    blocks = stored(request["backward"]["numbers"]).reshape(4, -1)
    launch = forward(request, request["backward"]["deterministic"])

    def one():
        q, k, v, dout = [repeated(*pair) for pair in zip(blocks, shapes(request))]
        operands = [tensor.requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            out = launch(*operands)
        return lambda: torch.autograd.grad(out, operands, dout, retain_graph=True)

    return [one() for _ in range(request["sets"])]


def difference(request, gradients):
    """How far the gradients are from those that the request names."""
    stop = min(request["backward"]["rows"], sum(request["padded"]))
    ours, worst = stored(request["backward"]["gradients"]), []
    for theirs in gradients:
        theirs = theirs[:stop].float()
        mine, ours = ours[: theirs.numel()].reshape(theirs.shape).float(), ours[theirs.numel() :]
        norm = lambda rows: torch.linalg.vector_norm(rows, dim=(0, 2))
        for start, length in zip(itertools.accumulate(request["padded"], initial=0), request["lengths"]):
            real = slice(start, min(start + length, stop))
            if start < stop:
                worst.append((norm(theirs[real] - mine[real]) / norm(mine[real])).max())
    return torch.stack(worst).max().item()


def measured(request):
    if request.get("backward") is None:
        return {"ms": milliseconds(request, forwards(request))}
    launches = backwards(request)
    return {"difference": difference(request, launches[0]()), "ms": milliseconds(request, launches)}


if __name__ == "__main__":
    serve(measured, sys.argv[2:])
