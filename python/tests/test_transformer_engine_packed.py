"""The adapter of TransformerEngine's packed attention, over a stand-in for the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from supervisor import expected, inputs, problem

torch = pytest.importorskip("torch")

import seamproof  # noqa: E402
from seamproof import Problem  # noqa: E402
from seamproof.loading import load  # noqa: E402

ADAPTER = Path(seamproof.__file__).parent / "adapters" / "transformer_engine_packed.py"
EQUAL = [(3, 3), (0, 0), (9, 9)]
CROSS = [(3, 5), (70, 2), (0, 4), (6, 0)]


@pytest.fixture
def subject(monkeypatch):
    """Returns a function that loads a subject of the adapter over the stand-in."""
    stand_in = pytest.importorskip("transformer_engine_stand_in")
    stand_in.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("FUSED", "FLASH", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "1")
    return lambda name: load(f"{ADAPTER}:{name}", {}, {})


def raw_of(pairs, unit=1, heads=(4, 2), left=None, right=0, align="top-left", **more):
    """Returns a problem whose sequences have padding behind them, up to a multiple of `unit`."""
    raw = problem(pairs, heads=heads, dims=(8, 16), form="bf16", right=right, backward=True)
    offsets = {"q": 0, "kv": 0}
    for sequence in raw["sequences"]:
        for side in offsets:
            span = -(-(sequence[side]["len"] + 2) // unit) * unit
            sequence[side] |= {"offset": offsets[side], "span": span}
            offsets[side] += span
    raw["mask"] |= {"align": align} | ({} if left is None else {"left": left})
    return raw | {"rows": offsets} | more


def parallel(algorithm, size, balance="dual-chunk"):
    return {
        "parallel": {
            "algorithm": algorithm,
            "balance": balance,
            "world": size + 1,
            "ranks": list(range(1, size + 1)),
        }
    }


def compare(subject, raw):
    """Holds results against the right answer. Padding holds numbers, as is declared."""
    values = {name: np.nan_to_num(array, nan=2.0) for name, array in inputs(raw).items()}
    p = Problem.from_json(raw, subject.open())
    answer = subject.run(p, subject.put(p, values))
    for name, right in expected(raw, values).items():
        if answer.tensors.get(name) is not None:
            token = ~np.isnan(right)
            np.testing.assert_allclose(answer.tensors[name][token], right[token], atol=0.15, err_msg=name)


@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("form", ["cu_seqlens", "pad_between_seqs"])
def test_packed_sequences_have_their_own_lengths_and_places(subject, align, right, form):
    compare(subject("attention"), raw_of(CROSS, right=right, align=align, form=form))


@pytest.mark.parametrize("right", [0, 2])
@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_windows_reach_as_far_as_they_say(subject, align, right):
    compare(subject("windows"), raw_of(EQUAL, left=1, right=right, align=align))


def test_no_rows_at_all_are_a_call_like_others(subject):
    raw = raw_of([(0, 0)])
    raw["sequences"][0]["q"]["span"] = raw["sequences"][0]["kv"]["span"] = 0
    compare(subject("attention"), raw | {"rows": {"q": 0, "kv": 0}})


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("p2p", "ring"), ("all_gather", "all-gather"), ("all_to_all", "all-to-all")],
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_each_way_of_communication_gives_the_right_answer(subject, name, algorithm, heads, size):
    raw = raw_of(EQUAL, 2 * size, heads, align="bottom-right", **parallel(algorithm, size))
    compare(subject(name), raw)
    if name != "p2p":
        compare(subject(name), raw | {"mask": raw["mask"] | {"left": 2, "right": 1}})


@pytest.mark.parametrize("width", [1, 2, 4])
def test_an_all_to_all_within_a_ring_gives_the_right_answer(subject, width):
    several = parallel({"hierarchical": {"all_to_all": width}}, 4)
    compare(subject("hierarchical"), raw_of(EQUAL, 8, (3, 3), align="bottom-right", **several))


def test_rows_that_are_cut_as_one_give_the_right_answer(subject):
    several = parallel("all-gather", 3, "contiguous")
    compare(subject("all_gather_contiguous"), raw_of(EQUAL, 3, align="bottom-right", **several))


def test_a_longest_length_of_queries_alone_does_not_refuse_a_window(subject):
    raw = raw_of([(70, 70)], left=1)
    raw["rows"]["q"] = raw["sequences"][0]["q"]["span"] = 200
    compare(subject("windows"), raw)


def test_a_refusal_says_why(subject):
    module = subject("windows")
    p = Problem.from_json(raw_of([(70, 70)], left=1), module.open())
    q, k, v = (torch.zeros(p.shape(name), dtype=torch.bfloat16) for name in "qkv")
    offsets = dict.fromkeys(["cu_seqlens_q", "cu_seqlens_kv"], p.q.offsets)
    offsets |= dict.fromkeys(["cu_seqlens_q_padded", "cu_seqlens_kv_padded"], p.q.padded_offsets)
    given = {
        "attn_mask_type": "padding_causal",
        "window_size": (1, 0),
        "max_seqlen_q": 128,
        "max_seqlen_kv": 64,
    }
    with pytest.raises(seamproof.Refused, match="Disabling FusedAttention as s_q > s_kv"):
        module.scope["called"](p, q, k, v, None, **offsets, **given)


def test_another_backend_than_the_asked_one_is_told(subject, monkeypatch):
    import transformer_engine_stand_in as stand_in

    chosen = stand_in.install(monkeypatch)
    other = subject("attention")
    chosen |= {"use_fused_attention": False, "use_unfused_attention": True}
    with pytest.raises(RuntimeError, match="unfused has run where fused was asked for"):
        compare(other, raw_of(EQUAL))
