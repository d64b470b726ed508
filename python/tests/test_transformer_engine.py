"""Recordings of TransformerEngine's attention, of a stand-in: TransformerEngine itself needs a GPU."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from transformer_engine_stand_in import Gathered  # noqa: E402

import seamproof  # noqa: E402
import seamproof.cp  # noqa: E402
from seamproof.errors import DeclarationError  # noqa: E402

HEADS, LANES = 2, 16
# Real lengths, and where the rows of each sequence lie; behind the last are two rows of slack for each rank.
LENGTHS, PADDED, SLACK = [0, 5, 5, 17], [0, 8, 8, 24], 2


class Shared(torch.autograd.Function):
    """A value that all ranks have; its gradient is summed over them."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def placed(padded, rows, size):
    """Returns for each rank the rows that it holds: of each sequence one chunk from its front and one from its back."""
    held = [[] for _ in range(size)]
    for first, end in itertools.pairwise(padded):
        chunks = torch.arange(first, end).chunk(2 * size) if end > first else [torch.arange(0)] * 2 * size
        for rank in range(size):
            held[rank] += [chunks[rank], chunks[2 * size - 1 - rank]]
    slack = torch.arange(padded[-1], rows).chunk(size)
    return [torch.cat([*own, slack[rank]]) for rank, own in enumerate(held)]


class DotProductAttention(torch.nn.Module):
    """Has the attributes and the `forward` of TransformerEngine's, version 2.20, and computes in f32 on the CPU."""

    def __init__(
        self,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=None,
        bottom_right_diagonal=None,
        attention_dropout=0.0,
        cp_group=None,
        cp_comm_type="p2p",
        softmax_scale=LANES**-0.5,
        softmax_type="vanilla",
        fault=None,
    ):
        super().__init__()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.attention_dropout, self.layer_number = attention_dropout, 4
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.softmax_type, self.softmax_offset = softmax_type, None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.tensor([0.5, -1.0]))
        self.flash_attention = SimpleNamespace(softmax_scale=softmax_scale)
        self.fp8, self.fp8_meta, self.fault = False, {}, fault

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=False,
        num_splits=1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
    ):
        q, k, v = query_layer, key_layer, value_layer
        if (qkv_format or self.qkv_format) != "thd":
            return torch.zeros(*q.shape[:-2], HEADS * LANES) * q.sum()
        size = 1 if self.cp_group is None else dist.get_world_size(self.cp_group)
        rank = 0 if self.cp_group is None else dist.get_rank(self.cp_group)
        real = cu_seqlens_q.tolist()
        padded = real if cu_seqlens_q_padded is None else cu_seqlens_q_padded.tolist()
        held = placed(padded, len(q) * size, size)
        if size > 1:
            order = torch.cat(held).argsort()
            k, v = (Gathered.apply(x, self.cp_group)[order] for x in (k, v))
        seen = self._seen(real, padded, len(k), attn_mask_type or self.attn_mask_type)[held[rank]]
        logits = self.flash_attention.softmax_scale * torch.einsum("ihd,jhd->hij", q.float(), k.float())
        logits = logits.masked_fill(~seen, -torch.inf)
        column = torch.full((HEADS, len(q), 1), 0.0 if self.softmax_type == "off-by-one" else -1e30)
        if self.softmax_type == "learnable":
            sink = self.softmax_offset if size == 1 else Shared.apply(self.softmax_offset, self.cp_group)
            column = sink[:, None, None].expand(-1, len(q), 1)
        p = torch.cat([logits, column], 2).softmax(2)[:, :, :-1]
        return torch.einsum("hij,jhd->ihd", p, v.float()).to(q.dtype).flatten(1)

    def _seen(self, real, padded, rows, mask):
        left, right = self.window_size or (-1, -1)
        seen = torch.zeros(rows, rows, dtype=torch.bool)
        for index, first in enumerate(padded[:-1]):
            length = real[index + 1] - real[index]
            if self.fault == "padding":
                length = padded[index + 1] - first
            i, j = torch.arange(length)[:, None], torch.arange(length)
            own = (j <= i) if "causal" in mask else torch.ones(length, length, dtype=torch.bool)
            own = own & (j >= i - left) if left >= 0 else own
            own = own & (j <= i + right) if left >= 0 and "causal" not in mask else own
            seen[first : first + length, first : first + length] = own
        return seen


def step(path, module, size, call=None, **options):
    """Records one forward and backward of a rank, on rows that all ranks draw alike."""
    rank = 0 if size == 1 else dist.get_rank()
    torch.manual_seed(3)
    rows = PADDED[-1] + SLACK * size
    whole = [torch.randn(rows, HEADS, LANES).bfloat16() for _ in range(4)]
    own = placed(PADDED, rows, size)[rank]
    q, k, v, dout = (x[own] for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    real, padded = (torch.tensor(offsets, dtype=torch.int32) for offsets in (LENGTHS, PADDED))
    lengths = {"cu_seqlens_q": real, "cu_seqlens_kv": real}
    lengths |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    with seamproof.record_transformer_engine(path, module, **options):
        out = module(q, k, v, **lengths, **(call or {}))
        # A loss leaves rows out that hold no token.
        positions = [
            torch.arange(a, a + m - n) for a, n, m in zip(PADDED, LENGTHS, LENGTHS[1:], strict=False)
        ]
        is_token = torch.isin(own, torch.cat(positions))
        (out * dout.flatten(1))[is_token].float().sum().backward()


def manifest(path):
    return json.loads((path / "recording.json").read_text())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "kind, options, code",
    [
        ("p2p", {}, 0),
        ("p2p", {"fault": "padding", "attn_mask_type": "padding"}, 2),
        ("all_gather", {"attn_mask_type": "padding,causal", "window_size": (3, 0)}, 0),
        ("all_gather", {"attn_mask_type": "padding", "window_size": (2, 1)}, 0),
        ("a2a", {"softmax_type": "learnable"}, 0),
        ("a2a", {"softmax_type": "off-by-one", "attn_mask_type": "padding"}, 0),
    ],
)
def test_a_call_in_thd(tmp_path, judged, size, kind, options, code):
    def of_rank(rank):
        group = dist.group.WORLD if size > 1 else None
        step(tmp_path / "run", DotProductAttention(cp_group=group, cp_comm_type=kind, **options), size)

    if size == 1:
        of_rank(0)
    else:
        seamproof.cp.run(of_rank, size)
    got, said = judged(tmp_path / "run")
    assert got == code, said
    problem = manifest(tmp_path / "run")["problem"]
    assert [sequence["q"] for sequence in problem["sequences"]] == [
        {"offset": 0, "len": 5, "span": 8},
        {"offset": 8, "len": 0, "span": 0},
        {"offset": 8, "len": 12, "span": 16},
    ]
    algorithm = {"p2p": "ring", "all_gather": "all-gather", "a2a": "all-to-all"}[kind]
    assert problem["parallel"]["algorithm"] == (algorithm if size > 1 else "single")
    assert problem["pass"] == "backward" and problem["softmax"]["scale"] == 0.25


@pytest.mark.parametrize(
    "said, error, words",
    [
        ({"pad_between_seqs": True, "max_seqlen_q": 12, "max_seqlen_kv": 16}, None, ""),
        ({"pad_between_seqs": False}, seamproof.PaddingDenied, "ends at row 8 of q and not at 5"),
        (
            {"max_seqlen_q": 11},
            seamproof.MaximumTooSmall,
            "max_seqlen_q=11 is too small: sequence 2 has 12 tokens",
        ),
        (
            {"max_seqlen_kv": 0},
            seamproof.MaximumTooSmall,
            "max_seqlen_kv=0 is too small: sequence 0 has 5 tokens",
        ),
    ],
)
def test_what_a_caller_says_of_offsets_must_be_true(tmp_path, said, error, words):
    if error is None:
        step(tmp_path / "run", DotProductAttention(), 1, said)
        assert manifest(tmp_path / "run")["problem"]["sequences"][2]["q"]["len"] == 12
        return
    with pytest.raises(error, match=words):
        step(tmp_path / "run", DotProductAttention(), 1, said)
    assert not (tmp_path / "run" / "recording.json").exists()


def read(module, call=None, shape=(4, HEADS, LANES)):
    """Returns the options that are read from a call of q, k and v of this shape."""
    tensors = [torch.zeros(shape) for _ in range(3)]
    recorder = seamproof.record_transformer_engine("nowhere", module)
    with torch.no_grad():
        arguments, named = recorder._before(module, tensors, call or {})
        recorder._after(module(*arguments, **named))
    for error in recorder._errors:
        raise error
    return recorder._given


@pytest.mark.parametrize(
    "module, call, expected",
    [
        ({"attn_mask_type": "causal"}, {}, (True, "top-left", (-1, -1))),
        ({"attn_mask_type": "causal_bottom_right"}, {}, (True, "bottom-right", (-1, -1))),
        ({"attn_mask_type": "causal"}, {"attn_mask_type": "no_mask"}, (False, "bottom-right", (-1, -1))),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, {}, (False, "bottom-right", (-1, -1))),
        ({"attn_mask_type": "no_mask", "window_size": (4, 2)}, {}, (False, "bottom-right", (4, 2))),
        ({"attn_mask_type": "no_mask", "bottom_right_diagonal": False}, {}, (False, "top-left", (-1, -1))),
        (
            {"attn_mask_type": "causal", "window_size": (4, 0)},
            {"window_size": (7, 0)},
            (True, "top-left", (7, -1)),
        ),
    ],
)
def test_masks_as_they_are_written_there(module, call, expected):
    given = read(DotProductAttention(qkv_format="bshd", **module), call, (2, 4, HEADS, LANES))
    assert (given["causal"], given["align"], given["window"]) == expected
    assert given["layout"] == "bshd" and given["cu_seqlens_q"] is None and given["layer"] == "4"


def test_the_format_of_the_call_goes_before_the_module():
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    call = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "qkv_format": "thd"}
    assert read(DotProductAttention(qkv_format="sbhd"), call)["layout"] == "thd"


@pytest.mark.parametrize(
    "sizes, algorithm",
    [((2, 2), {"hierarchical": {"all_to_all": 2}}), ((1, 4), "ring"), ((4, 1), "all-to-all")],
)
def test_two_groups_need_the_one_of_all(sizes, algorithm):
    groups = [SimpleNamespace(size=lambda size=size: size) for size in sizes]
    module = DotProductAttention(cp_group=groups, cp_comm_type="a2a+p2p", qkv_format="bshd")
    with pytest.raises(DeclarationError, match="give the group of all ranks of context parallelism"):
        seamproof.record_transformer_engine("nowhere", module)
    from seamproof.recorder.transformer_engine import _algorithm

    assert _algorithm(module) == algorithm


@pytest.mark.parametrize(
    "module, call, words",
    [
        ({}, {"core_attention_bias_type": "alibi"}, "core_attention_bias_type='alibi'"),
        ({}, {"core_attention_bias": torch.zeros(1)}, "core_attention_bias is set"),
        ({}, {"alibi_slopes": torch.ones(2)}, "alibi_slopes is set"),
        ({}, {"score_mod": abs}, "score_mod is set"),
        ({}, {"attention_mask": torch.zeros(1)}, "attention_mask is set"),
        ({"attn_mask_type": "arbitrary"}, {}, "masks by element"),
        ({"attn_mask_type": "padding"}, {}, "padded lengths are read in thd alone"),
        ({"attn_mask_type": "no_mask"}, {"inference_params": object()}, "keys of a cache"),
    ],
)
def test_what_no_recording_holds_is_refused(module, call, words):
    attention = DotProductAttention(qkv_format="bshd", **{"attn_mask_type": "causal", **module})
    with pytest.raises(DeclarationError, match=words):
        read(attention, call, (2, 4, HEADS, LANES))


def test_attention_in_fp8_is_refused():
    module = DotProductAttention(qkv_format="bshd", attn_mask_type="causal")
    module.fp8, module.fp8_meta = True, {"recipe": SimpleNamespace(fp8_dpa=False)}
    read(module, shape=(2, 4, HEADS, LANES))
    module.fp8_meta["recipe"].fp8_dpa = True
    with pytest.raises(DeclarationError, match="in FP8"):
        read(module, shape=(2, 4, HEADS, LANES))


def test_dropout_of_the_module_is_refused(tmp_path):
    module = DotProductAttention(attention_dropout=0.1)
    with (
        pytest.raises(DeclarationError, match="attention_dropout is set"),
        seamproof.record_transformer_engine(tmp_path / "run", module),
    ):
        pass


def test_a_module_around_it_with_other_arguments_is_refused():
    class Around(DotProductAttention):
        def forward(self, query, key, value, attention_mask=None, packed_seq_params=None):
            return super().forward(query, key, value)

    with pytest.raises(DeclarationError, match="forward takes no cu_seqlens_q"):
        read(Around(qkv_format="bshd", attn_mask_type="causal"), shape=(2, 4, HEADS, LANES))


def test_another_module_is_refused():
    with pytest.raises(DeclarationError, match="no DotProductAttention of TransformerEngine"):
        seamproof.record_transformer_engine("nowhere", torch.nn.Linear(2, 2))
    module = DotProductAttention()
    del module.flash_attention
    with pytest.raises(DeclarationError, match="does not tell its softmax_scale: give it as scale="):
        seamproof.record_transformer_engine("nowhere", module)
