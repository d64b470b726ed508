"""A ring of ranks in plain torch, which are threads on one device; forward alone.

seamproof run --backend python:python/examples/torch_ring.py:attention:cp=4

With `fault=wait`, `fault=block` or `fault=peer` it has a fault to be found: keys are used before they have come, a
block is taken for that of another rank, a rank of the group is taken for one of the world.
"""

import torch
import torch.distributed as dist

import seamproof
import seamproof.cp

FAULT = seamproof.options().get("fault")


def exchange(tensor, group):
    """Returns what the rank before has, and the works to wait for."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peers = [(rank + 1) % size, (rank - 1) % size]
    if FAULT != "peer":
        peers = [dist.get_global_rank(group, peer) for peer in peers]
    received = torch.empty_like(tensor)
    calls = [
        dist.P2POp(function, what, peer, group=group)
        for function, what, peer in zip((dist.isend, dist.irecv), (tensor, received), peers, strict=True)
    ]
    return received, dist.batch_isend_irecv(calls)


def ring(local, group):
    """Returns out and lse of the rank's rows of one sequence, whose parts lie one after the other."""
    rows, size = len(local.q), local.size
    queries = local.rank * rows + torch.arange(rows)
    q, keys_and_values = local.q.float().transpose(0, 1), torch.stack([local.k, local.v])
    top = torch.full((local.problem.heads_q, rows, 1), -torch.inf)
    total, sums = torch.zeros_like(top), torch.zeros_like(q)
    for step in range(size):
        received, works = exchange(keys_and_values, group) if step + 1 < size else (None, [])
        block = (local.rank - step + (FAULT == "block" and step > 0)) % size
        keys = block * rows + torch.arange(rows)
        k, v = keys_and_values.float().repeat_interleave(local.problem.group, 2).transpose(1, 2)
        logits = local.problem.scale * (q @ k.transpose(1, 2))
        logits = logits.masked_fill(keys > queries[:, None], -torch.inf)
        higher = torch.maximum(top, logits.amax(2, keepdim=True))
        weights, shrunk = torch.exp(logits - higher), torch.exp(top - higher)
        total, sums, top = (
            total * shrunk + weights.sum(2, keepdim=True),
            sums * shrunk + weights @ v,
            higher,
        )
        if FAULT != "wait":
            for work in works:
                work.wait()
        keys_and_values = received
    out = (sums / total).transpose(0, 1).to(local.q.dtype)
    return seamproof.Result(out, lse=(top + total.log())[..., 0])


@seamproof.subject(
    arrays="torch", device="cpu", formats=["bf16"], p="f32", ds="f32", backward=False, d=[8, 16, 32],
    d_v=[8, 16, 32], d_equal=True, padding_inputs="anything",
    layout=seamproof.packed(padding=True, slack=False), masks=seamproof.bottom_right(windows=False),
    table={
        "masks": {"forms": ["causal"]}, "lengths": {"equal": True, "no_sequences": False},
        "parallel": {
            "algorithms": ["ring"], "balances": ["contiguous"], "sub_groups": True,
            "ranks_most": int(seamproof.options().get("cp", 4)),
        },
    },
)  # fmt: skip
def attention(p, q, k, v, dout=None, sink=None):
    def program(local):
        group = local.group()
        return local.joined([ring(part, group) for part in local.sequences()])

    return seamproof.cp.attend(p, program, q, k, v)
