"""The adapter of vLLM's FlashAttention 3, over a stand-in for the operator, which needs a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from supervisor import expected, inputs, problem

torch = pytest.importorskip("torch")

import seamproof  # noqa: E402
from seamproof import Problem  # noqa: E402
from seamproof.loading import load  # noqa: E402

ADAPTER = Path(seamproof.__file__).parent / "adapters" / "vllm_flash_attention_3.py"
# The arguments of the operator that vLLM registers.
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def forward(*arguments):
    """Computes what the operator does. Masks end at the last used row of each side, and unused rows are NaN."""
    given = dict(zip(NAMES, arguments, strict=True))
    q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    out.fill_(torch.nan)
    sides = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    tables = [given[name] for name in sides]
    assert (
        all(table.dtype == torch.int32 for table in tables) and len({len(table) for table in tables[2:]}) == 1
    )
    assert len(tables[0]) == len(tables[1]) == len(tables[2]) + 1
    right = 0 if given["is_causal"] else given["window_size_right"]
    for at_q, at_k, queries, keys in zip(*(table.tolist() for table in tables), strict=False):
        assert queries <= given["max_seqlen_q"] and keys <= given["max_seqlen_k"]
        own, of = slice(at_q, at_q + queries), slice(at_k, at_k + keys)
        group = q.shape[1] // k.shape[1]
        keys_of, values = (x[of].float().repeat_interleave(group, 1) for x in (k, v))
        logits = given["softmax_scale"] * torch.einsum("ihd,jhd->hij", q[own].float(), keys_of)
        if given["softcap"]:
            logits = given["softcap"] * torch.tanh(logits / given["softcap"])
        i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if right >= 0:
            hidden |= j > i + right
        if given["window_size_left"] >= 0:
            hidden |= j < i - given["window_size_left"]
        logits = logits.masked_fill(hidden, -torch.inf)
        seen = ~hidden.all(1)
        weights = torch.where(seen[:, None], logits.softmax(2), 0.0)
        out[own] = torch.einsum("hij,jhd->ihd", weights, values).to(out.dtype)
        lse[:, own] = torch.where(seen, logits.logsumexp(2), torch.inf)
    return [out, lse]


NAMES = [part.split()[-1] for part in SCHEMA[SCHEMA.index("(") + 1 : SCHEMA.rindex(")")].split(", ")]


@functools.cache
def library():
    """Registers the stand-in, once in a process."""
    of_vllm = torch.library.Library("_vllm_fa3_C", "DEF")
    of_vllm.define(SCHEMA)
    of_vllm.impl("fwd", forward, "CPU")
    return of_vllm


@pytest.fixture
def subject(monkeypatch, tmp_path):
    """Returns a function that loads a subject of the adapter, or of one with other words, over the stand-in."""
    library()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("VLLM_FLASH_ATTENTION_3", "stand-in")

    def loaded(name, *edit):
        if not edit:
            return load(f"{ADAPTER}:{name}", {}, {})
        words, others = edit
        text = ADAPTER.read_text()
        assert text.count(words) == 1, words
        path = tmp_path / "edited.py"
        path.write_text(text.replace(words, others))
        return load(f"{path}:{name}", {}, {})

    return loaded


def raw_of(lengths, unit=1, right=0, left=None, softcap=None, **more):
    """Returns a problem whose sequences have padding behind them, up to a multiple of `unit`."""
    pairs = [(length, length) for length in lengths]
    raw = problem(pairs, heads=(4, 2), dims=(8, 8), form="bf16", right=right, left=left, softcap=softcap)
    offset = 0
    for sequence in raw["sequences"]:
        span = -(-(sequence["q"]["len"] + 2) // unit) * unit
        for side in ("q", "kv"):
            sequence[side] |= {"offset": offset, "span": span}
        offset += span
    return raw | {"rows": {"q": offset, "kv": offset}} | more


def gathered(size, balance, lengths=(3, 0, 9, 1, 24), **more):
    """Returns a problem of an all-gather whose ranks are some of the world."""
    parallel = {
        "algorithm": "all-gather",
        "balance": balance,
        "world": size + 1,
        "ranks": list(range(1, size + 1)),
    }
    return raw_of(lengths, size * (2 if balance == "dual-chunk" else 1), **more) | {"parallel": parallel}


def wrong(subject, raw):
    """Returns the results that are not the right answer. Padding holds numbers, as is declared."""
    values = {name: np.nan_to_num(array, nan=2.0) for name, array in inputs(raw).items()}
    p = Problem.from_json(raw, subject.open())
    answer = subject.run(p, subject.put(p, values))
    right = {name: array for name, array in expected(raw, values).items() if name in ("out", "lse")}
    assert all(answer.tensors[name] is not None for name in right)
    near = {
        name: np.allclose(answer.tensors[name][~np.isnan(array)], array[~np.isnan(array)], atol=0.05)
        for name, array in right.items()
    }
    return [name for name, is_near in near.items() if not is_near]


MASKS = [{"right": 0}, {"right": None}, {"right": 0, "left": 3}, {"right": 0, "softcap": 2.0}]


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_have_their_own_lengths_and_places(subject, mask):
    assert not wrong(subject("attention"), raw_of([3, 0, 9], **mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", ["contiguous", "dual-chunk"])
def test_an_all_gather_gives_the_right_answer(subject, balance, size, mask):
    assert not wrong(subject("all_gather"), gathered(size, balance, **mask))


def test_a_pack_without_tokens_is_taken(subject):
    assert not wrong(subject("all_gather"), gathered(2, "dual-chunk", lengths=(0, 0)))


@pytest.mark.parametrize(
    ("words", "others"),
    [
        # The mask ends at the sequence's last key, not at the last that the chunk sees.
        ("seen = number * chunks + used_q if p.causal else lengths", "seen = lengths"),
        # Padding counts as keys.
        ("if p.causal else lengths\n", "if p.causal else spans\n"),
        # The second chunk is the first of the rank after.
        ("2 * local.size - 1 - local.rank", "local.size + local.rank"),
        # Offsets lead to the first chunk in both steps.
        ("Step(offsets + at * chunks,", "Step(offsets,"),
        # The rows of all ranks stay in the order of the ranks.
        ("of_ranks[torch.from_numpy(np.argsort(dealt)).to(mine.device)]", "of_ranks"),
        # Each step overwrites all rows of the other.
        (
            "out[rows], lse[:, rows] = of_step.out[rows], of_step.lse[:, rows]",
            "out, lse = of_step.out, of_step.lse",
        ),
        # Padding within the chunk counts as queries, which moves the diagonal.
        ("integers(self.used_q.tolist())", "integers(self.chunks.tolist())"),
    ],
)
def test_a_wrong_all_gather_is_seen(subject, words, others):
    masks = [{"right": 0}, {"right": None}]
    other = subject("all_gather", words, others)
    assert any(wrong(other, gathered(2, "dual-chunk", **mask)) for mask in masks)
