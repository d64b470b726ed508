"""TransformerEngine's all-gather of packed sequences: a window that is open to the right shows other keys.

    torchrun --standalone --nproc-per-node 2 te-all-gather-window.py

A rank's exit code is 2 where the defect shows, and torchrun's is 1; both are 0 where it does not.
"""

import os
import sys

os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
REAL, PADDED, HEADS, DIM = [2, 37, 64], [4, 40, 64], 2, 64  # a multiple of 4 each: two chunks a rank
WINDOW = (0, 8)


def ends(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def own(tensor):
    """Returns this rank's rows: chunks `rank` and `2·size − 1 − rank` of each sequence."""
    parts = (part.chunk(2 * size) for part in tensor.split(PADDED))
    return torch.cat([torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for chunks in parts])


draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(sum(PADDED), HEADS, DIM, generator=draw).bfloat16() for _ in range(3))
exact, real, start = torch.zeros(q.shape), torch.zeros(len(q), dtype=torch.bool), 0
for length, padded in zip(REAL, PADDED, strict=True):
    at = slice(start, start + length)
    logits = torch.einsum("qhd,khd->hqk", q[at].double(), k[at].double()) / DIM**0.5
    distance = torch.arange(length) - torch.arange(length)[:, None]
    logits[:, (distance < -WINDOW[0]) | (distance > WINDOW[1])] = -torch.inf
    exact[at] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[at].double()).float()
    real[at], start = True, start + padded

module = te.DotProductAttention(HEADS, DIM, qkv_format="thd")
module.set_context_parallel_group(dist.group.WORLD, list(range(size)), torch.cuda.Stream(), "all_gather")
out = module(
    *(own(tensor).cuda() for tensor in (q, k, v)), attn_mask_type="padding", window_size=WINDOW,
    cu_seqlens_q=ends(REAL), cu_seqlens_kv=ends(REAL),
    cu_seqlens_q_padded=(padded := ends(PADDED)), cu_seqlens_kv_padded=padded,
    max_seqlen_q=64, max_seqlen_kv=64, pad_between_seqs=True,
)  # fmt: skip
errors = (out.view(-1, HEADS, DIM).float().cpu() - own(exact)).abs().amax((1, 2))
wrong = torch.tensor([int((errors[own(real)] > 0.1).sum()), int(own(real).sum())], device="cuda")
dist.all_reduce(wrong)
if rank == 0:
    print(f"{wrong[0]} of {wrong[1]} rows are off by more than 0.1; values are about 1")
dist.destroy_process_group()
sys.exit(2 if wrong[0] else 0)
