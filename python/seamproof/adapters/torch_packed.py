"""torch's attention for packed sequences: FlashAttention 2's kernels, the memory-efficient ones, and flex_attention.

    seamproof run --backend python:torch_packed.py:varlen

Tried with torch 2.11.0 on an H100 and an H200. `varlen` is `torch.nn.attention.varlen.varlen_attn`, `flash` the
operators beneath it, `efficient` those of the memory-efficient attention, `flex` is `flex_attention` with a mask of
documents.
"""

import inspect

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import seamproof

aten = torch.ops.aten
# Grouped heads have to be asked for in newer versions, and cannot be in older ones.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

PACKED = {
    "arrays": "torch", "device": "cuda", "formats": ["bf16", "fp16"], "d": seamproof.multiples(8, to=256),
    "d_v": seamproof.multiples(8, to=256), "d_equal": True, "layout": seamproof.packed(slack=True),
    "masks": seamproof.bottom_right(windows=True, most=1 << 30), "start_seconds": 300,
}  # fmt: skip
# The operators of the backward are given the stored out, which they need for D alone.
STORED = {"arithmetic": {"delta": "stored-out"}}


def cut_out(p, q, k, v):
    """Returns inputs as callers have them, who cut them out of other tensors."""
    return p.view(q, "q"), p.view(k, "k"), p.view(v, "v")


@seamproof.subject(**PACKED, **STORED, lengths={"no_sequences": False}, lse=seamproof.lse(empty="+inf"))
def varlen(p, q, k, v, dout=None, sink=None):
    q, k, v = cut_out(p, q, k, v)
    out, lse = varlen_attn(
        q, k, v, p.q.padded_offsets, p.kv.padded_offsets, p.q.max_length, p.kv.max_length,
        return_aux=AuxRequest(lse=True), scale=p.scale, window_size=p.window("fa"), **GROUPED,
    )  # fmt: skip
    return seamproof.Result(out, lse=lse, grads=seamproof.autograd)


@seamproof.subject(**PACKED, **STORED, lengths={"no_sequences": False}, lse=seamproof.lse(empty="+inf"))
def flash(p, q, k, v, dout=None, sink=None):
    q, k, v = cut_out(p, q, k, v)
    left, right = p.window("fa")
    # The operator has no grouped heads in its own signature, its kernels do.
    ends = (p.q.padded_offsets, p.kv.padded_offsets, p.q.max_length, p.kv.max_length)
    window = {"scale": p.scale, "window_size_left": left, "window_size_right": right}
    with torch.no_grad():
        out, lse, state, unused, _ = aten._flash_attention_forward(
            q, k, v, *ends, 0.0, False, False, **window
        )
        if dout is None:
            return seamproof.Result(out, lse=lse)
        dq, dk, dv = aten._flash_attention_backward(
            dout, q, k, v, out, lse, *ends, 0.0, False, state, unused, **window
        )
    return seamproof.Result(out, lse=lse, dq=dq, dk=dk, dv=dv)


EFFICIENT = PACKED | {
    "d_equal": False, "groups": [1], "formats": ["bf16", "fp16", "f32"],
    "masks": seamproof.both_alignments(windows=False),
}  # fmt: skip


@seamproof.subject(
    **EFFICIENT, lengths={"no_sequences": False, "empty_q": False}, lse=seamproof.lse(order="bhs")
)
def efficient(p, q, k, v, dout=None, sink=None):
    ends = (p.q.padded_offsets, p.kv.padded_offsets, p.q.max_length, p.kv.max_length)
    mask = 0 if not p.causal else 2 if p.bottom_right else 1
    q, k, v = (rows.unsqueeze(0) for rows in (q, k, v))
    with torch.no_grad():
        out, lse, seed, offset, most_q, most_kv = aten._efficient_attention_forward(
            q, k, v, None, *ends, 0.0, mask, True, scale=p.scale
        )
        result = seamproof.Result(out[0], lse=lse)
        if dout is not None:
            dq, dk, dv, _ = aten._efficient_attention_backward(
                dout.unsqueeze(0), q, k, v, None, out, *ends[:2], most_q, most_kv, lse, 0.0, seed, offset, mask,
                False, scale=p.scale,
            )  # fmt: skip
            result.dq, result.dk, result.dv = dq[0], dk[0], dv[0]
    return result


def rows_of(side, rows, none):
    """Returns the sequence of each row, or `none`, and its place in it."""
    of = torch.full((rows,), none, dtype=torch.int32)
    at = torch.zeros(rows, dtype=torch.int64)
    for index, run in enumerate(side.runs):
        of[run.real_rows()] = index
        at[run.real_rows()] = torch.arange(run.len)
    return of, at


def block_of(p, places):
    """Returns the number of the document or chunk of each place, and the block's first key."""
    if p.chunks is not None:
        number = torch.div(places, p.chunks, rounding_mode="floor")
        return number, number * p.chunks
    borders = torch.tensor([0, *p.documents])
    number = (torch.searchsorted(borders, places, right=True) - 1).clamp(min=0)
    return number, borders[number]


def documents(p, q_rows, kv_rows):
    """Returns a mask of flex_attention: which row of q sees which row of k."""
    of_q, at_q = rows_of(p.q, q_rows, -1)
    of_kv, at_kv = rows_of(p.kv, kv_rows, -2)
    for index, run in enumerate(p.q.runs):
        at_q[run.real_rows()] += p.shift(index)
    bounds = [FAR if bound is None else bound for bound in (p.left, p.right)]
    # Numbers would be compiled in, each of their values anew.
    left, right = torch.tensor(bounds, device="cuda")
    blocks = [block_of(p, at) for at in (at_q, at_kv)]
    of_q, at_q, of_kv, at_kv = (each.to("cuda") for each in (of_q, at_q, of_kv, at_kv))
    (in_q, _), (in_kv, first) = ([each.to("cuda") for each in block] for block in blocks)
    in_prefix = at_kv < first + torch.tensor(p.prefix, device="cuda")
    is_sink = at_kv < first + torch.tensor(p.sink_tokens, device="cuda")

    def seen(batch, head, row, key):
        distance = at_kv[key] - at_q[row]
        together = (of_q[row] == of_kv[key]) & (in_q[row] == in_kv[key])
        above = (distance >= -left) | is_sink[key]
        return together & above & ((distance <= right) | in_prefix[key])

    return seen


def scaled(p):
    """Returns a score_mod that scales logits. An argument `scale` would be compiled in, each of its values anew."""
    scale = torch.tensor(p.scale, device="cuda")

    def times(score, batch, head, row, key):
        return score * scale

    return times


def up(rows):
    """Returns a power of two, and 512 at least: every shape is compiled."""
    return max(512, 1 << (rows - 1).bit_length()) if rows else 512


def filled(tensor, rows):
    return (
        torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, rows - tensor.shape[0])).transpose(0, 1).unsqueeze(0)
    )


FAR = 1 << 40
compiled = torch.compile(flex_attention, dynamic=False)
torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 1024


@seamproof.subject(
    arrays="torch", device="cuda", formats=["bf16", "fp16"], d=[16, 64, 128], d_v=[16, 64, 128], d_equal=True,
    layout=seamproof.packed(padding=True, gaps=True, slack=True, first_offset=True), groups=[1, 2], heads_most=4,
    lengths={"no_sequences": False}, start_seconds=300,
    masks=seamproof.both_alignments(kinds=("documents", "chunks", "prefix", "sink-tokens")),
)  # fmt: skip
def flex(p, q, k, v, dout=None, sink=None):
    q_rows, kv_rows = up(p.q.rows), up(p.kv.rows)
    mask = create_block_mask(documents(p, q_rows, kv_rows), None, None, q_rows, kv_rows, device="cuda")
    q, k, v = filled(q, q_rows), filled(k, kv_rows), filled(v, kv_rows)
    out, lse = compiled(q, k, v, scaled(p), mask, scale=1.0, enable_gqa=p.group > 1, return_lse=True)
    out = out[0].transpose(0, 1)[: p.q.rows]
    return seamproof.Result(out, lse=lse[0, :, : p.q.rows], grads=seamproof.autograd)
