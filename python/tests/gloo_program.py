"""One of two processes that compute causal attention together, through gloo, and record it.

    python gloo_program.py DIR STORE RANK FAULT

FAULT is `none`, or what is wrong on rank 1: `row`, a row of its out; `dropout`, a dropout that is turned on; `disk`, no
room for its file. What the recorder says of it is printed.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import seamproof
from seamproof import recording

RANKS, ROWS, HEADS, LANES = 2, 8, 2, 16


class Gathered(torch.autograd.Function):
    """The rows of all ranks; in the backward each rank gets the sum of what all have for its own."""

    @staticmethod
    def forward(ctx, mine):
        parts = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(RANKS)[dist.get_rank()]


def attention(q, k, v, dropout_p=0.0, wrong=False):
    k, v = Gathered.apply(k), Gathered.apply(v)
    row = dist.get_rank() * ROWS + torch.arange(ROWS)
    logits = LANES**-0.5 * torch.einsum("ihd,jhd->hij", q, k)
    logits = logits.masked_fill(torch.arange(RANKS * ROWS) > row[:, None], -torch.inf)
    out = torch.einsum("hij,jhd->ihd", logits.softmax(2), v)
    return out + 0.01 * (torch.arange(ROWS) == 3)[:, None, None] if wrong else out


def main(directory, store, rank, fault):
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    fault = fault if rank == 1 else "none"
    torch.manual_seed(rank)
    q, k, v = (torch.randn(ROWS, HEADS, LANES, requires_grad=True) for _ in range(3))
    try:
        with seamproof.record(
            directory, group=dist.group.WORLD, causal=True, algorithm="all-gather", name="two processes"
        ) as rec:
            # By position, as callers do.
            rate = 0.1 if fault == "dropout" else 0.0
            rec(attention)(q, k, v, rate, fault == "row").square().sum().backward()
            if fault == "disk":
                recording.write_rank = no_room
        print("recorded")
    except (seamproof.SeamproofError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def no_room(*_):
    raise OSError("no space left on device")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
