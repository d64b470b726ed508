"""A stand-in for TransformerEngine, whose attention needs a GPU: `install` puts it where the package would be.

`DotProductAttention` takes of packed sequences what that of 2.20 takes, holds callers to it, and computes in plain
torch. Under context parallelism it gathers what all ranks have, whatever the way of communication.
"""

from __future__ import annotations

import enum
import itertools
import logging
import sys
import types

import torch
import torch.distributed as dist

ATTENTION_LOG = types.SimpleNamespace(_log_level=logging.WARNING)


class CPLoadBalancingStrategy(enum.Enum):
    DUAL_CHUNK_SWAP = 0
    NO_LOAD_BALANCE = 1


class Gathered(torch.autograd.Function):
    """The rows of all ranks; in the backward each rank gets the sum of what all have for its own."""

    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def placed(padded, size):
    """Returns for each rank the rows that it holds: of each sequence one chunk from its front and one from its back."""
    held = [[torch.arange(0)] for _ in range(size)]
    for first, end in itertools.pairwise(padded):
        assert (end - first) % (2 * size) == 0, f"{end - first} rows are no multiple of {2 * size}"
        chunks = torch.arange(first, end).view(2 * size, -1)
        for rank in range(size):
            held[rank] += [chunks[rank], chunks[2 * size - 1 - rank]]
    return [torch.cat(own) for own in held]


def seen(lengths, places, rows, kind, window, diagonal):
    """Returns which keys each row of queries sees."""
    found = torch.zeros(*rows, dtype=torch.bool)
    (of_q, of_kv), (at_q, at_kv) = ([side.tolist() for side in sides] for sides in (lengths, places))
    bottom_right = kind.endswith("bottom_right") if "causal" in kind else diagonal is None or diagonal
    for n in range(len(of_q) - 1):
        queries, keys = (of[n + 1] - of[n] for of in (of_q, of_kv))
        i, j = torch.arange(queries)[:, None] + (keys - queries if bottom_right else 0), torch.arange(keys)
        left, right = window
        own = torch.ones(queries, keys, dtype=torch.bool)
        own &= j <= i + right if right >= 0 else own
        own &= j >= i - left if left >= 0 else own
        found[at_q[n] : at_q[n] + queries, at_kv[n] : at_kv[n] + keys] = own
    return found


class DotProductAttention(torch.nn.Module):
    def __init__(self, heads, dims, num_gqa_groups, qkv_format, softmax_scale, softmax_type="vanilla"):
        super().__init__()
        assert qkv_format == "thd" and softmax_type in ("vanilla", "off-by-one", "learnable")
        self.heads, self.dims, self.kv_heads, self.scale = heads, dims, num_gqa_groups, softmax_scale
        self.softmax_type, self.group, self.way = softmax_type, None, None
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads)) if softmax_type == "learnable" else None

    def set_context_parallel_group(
        self, group, ranks, stream, way="p2p", load_balancing_strategy=CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
    ):
        assert isinstance(group, list) == (way == "a2a+p2p")
        self.group, self.ranks, self.way, self.strategy = group, ranks, way, load_balancing_strategy

    def forward(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, attn_mask_type,
        window_size, bottom_right_diagonal=None, max_seqlen_q=None, max_seqlen_kv=None, pad_between_seqs=None,
    ):  # fmt: skip
        lengths, places = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        logging.getLogger("DotProductAttention").setLevel(ATTENTION_LOG._log_level)
        assert all(offsets.dtype == torch.int32 for offsets in (*lengths, *places))
        assert all(x.is_contiguous() and x.storage_offset() == 0 and x.numel() for x in (q, k, v))
        assert "padding" in attn_mask_type and (window_size[1] == 0 or "causal" not in attn_mask_type)
        assert q.shape[1:] == (self.heads, self.dims[0]) and v.shape[1:] == (self.kv_heads, self.dims[1])
        refuse(max_seqlen_q, max_seqlen_kv, window_size)
        own, rank, size = torch.arange(len(q)), *self._place()
        if size > 1:
            if self.way != "all_gather":
                assert "bottom_right" not in attn_mask_type
            assert self.ranks[rank] == dist.get_rank() and places[0] is places[1] and lengths[0] is lengths[1]
            is_one = self.strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE
            held = torch.arange(len(q) * size).chunk(size) if is_one else placed(places[0].tolist(), size)
            k, v = (self._gathered(x)[torch.cat(list(held)).argsort()] for x in (k, v))
            own = held[rank]
        rows = (len(q) * size, len(k))
        visible = seen(lengths, places, rows, attn_mask_type, window_size, bottom_right_diagonal)[own]
        k, v = (x.float().repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        logits = self.scale * torch.einsum("ihd,jhd->hij", q.float(), k)
        column = torch.full((self.heads, len(q), 1), 0.0 if self.softmax_type == "off-by-one" else -1e30)
        if self.softmax_offset is not None:
            column = self.softmax_offset[:, None, None].expand(-1, len(q), 1)
        p = torch.cat([logits.masked_fill(~visible, -torch.inf), column], 2).softmax(2)[:, :, :-1]
        return torch.einsum("hij,jhd->ihd", p, v).to(q.dtype).flatten(1)

    def _place(self):
        """Returns the rank among those of context parallelism, and their number."""
        if self.group is None:
            return 0, 1
        if not isinstance(self.group, list):
            if self.way == "a2a":
                self._even(dist.get_world_size(self.group))
            return dist.get_rank(self.group), dist.get_world_size(self.group)
        (of_a2a, width), (of_ring, length) = (
            (dist.get_rank(group), dist.get_world_size(group)) for group in self.group
        )
        self._even(width)
        return of_ring * width + of_a2a, width * length

    def _even(self, ranks):
        for heads in (self.heads, self.kv_heads):
            assert heads % ranks == 0 and heads % 2 == 0, f"{heads} heads over {ranks} ranks"

    def _gathered(self, x):
        for group in self.group if isinstance(self.group, list) else [self.group]:
            x = Gathered.apply(x, group)
        return x


def refuse(most_q, most_kv, window):
    """Refuses what no backend takes, as the package does."""
    if (window[0] >= 0 or window[1] > 0) and most_q is not None and most_q > most_kv:
        logging.getLogger("DotProductAttention").debug("Disabling FusedAttention as s_q > s_kv")
        raise ValueError("No dot product attention backend is available for the provided inputs.")


def install(monkeypatch):
    """Puts the stand-in where the package would be."""
    chosen = {f"use_{name}_attention": name == "fused" for name in ("flash", "fused", "unfused")}
    inner = {"_attention_backends": chosen, "attn_log": ATTENTION_LOG}
    names = {"DotProductAttention": DotProductAttention, "CPLoadBalancingStrategy": CPLoadBalancingStrategy}
    base = "transformer_engine.pytorch.attention.dot_product_attention"
    for name, values in {
        "transformer_engine": {"__version__": "2.20.2"},
        "transformer_engine.pytorch": names | {"get_cudnn_version": lambda: (9, 26, 0)},
        "transformer_engine.pytorch.attention": {},
        base: {},
        f"{base}.dot_product_attention": inner,
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    return chosen
