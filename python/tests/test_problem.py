"""Problems, formats and forms of the LSE."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from supervisor import expected, inputs, over_ranks, problem

from seamproof import DeclarationError, LseForm, Problem, lse
from seamproof.arrays import GUARD, Numpy, library
from seamproof.cp.attend import Local, by_sequence
from seamproof.dealing import Parallel
from seamproof.formats import UNWRITTEN, is_unwritten, narrow, same, unwritten, widen


def test_lengths_and_offsets():
    p = Problem.from_json(problem([(3, 5), (0, 2), (4, 0)], padding=2, slack=3))
    assert p.q.lengths.tolist() == [3, 0, 4] and p.q.lengths.dtype == np.int32
    assert p.q.offsets.tolist() == [0, 3, 3, 7]
    assert p.q.padded_offsets.tolist() == [0, 5, 7, 13]
    assert (p.q.max_length, p.q.max_span, p.q.rows, p.kv.max_length) == (4, 6, 16, 5)
    assert p.q.real().sum() == 7 and p.q.owned().sum() == 13
    assert (p.shape("lse"), p.shape("dv"), p.shape("sink")) == ((2, 16), (13 + 3, 1, 3), (0,))


def test_batched_ids_are_the_golden_ones_of_the_definition():
    lengths = [(2, 1), (3, 1), (2, 1), (3, 2)]

    def given(form, seed):
        raw = problem([]) | {"form": form, "data_seed": seed, "rows": {"q": 12, "kv": 8}}
        raw["sequences"] = [
            {"id": at, "q": packed(3 * at, q), "kv": packed(2 * at, kv)} for at, (q, kv) in enumerate(lengths)
        ]
        return Problem.from_json(raw)

    def packed(offset, length):
        return {"offset": offset, "len": length, "span": length, "step": 1}

    p = given("batched_segments", 0b1111)
    assert p.leading == (2, 2)
    assert p.segment_ids_kv.tolist() == [[[1, 0], [1, 0]], [[1, 0], [1, 1]]]
    assert p.positions_q.tolist() == [0, 1, 2] and p.positions_kv.tolist() == [0, 1]
    assert p.segment_ids_q.tolist() == [[1, 1, 0], [1, 1, 1]]
    p = given("batched_segments", 0b0001)
    assert p.segment_ids_q.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert p.positions_q.tolist() == 2 * [[[0, 1, 0], [0, 1, 2]]]
    p = given("batched_segments", 0)
    assert p.segment_ids_q.tolist() == 2 * [[[1, 1, 0], [1, 1, 1]]]
    assert p.positions_kv.tolist() == [[[0, 0], [0, 0]], [[0, 0], [0, 1]]]
    p = given("misshapen_segments", 0)
    assert (p.segment_ids_q.shape, p.segment_ids_kv.shape) == ((4, 1, 3), (2, 2, 1, 2))
    # Of a prime number of batch rows sizes differ in number.
    three = problem([(3, 2)] * 3) | {"form": "misshapen_segments"}
    p = Problem.from_json(three)
    assert (p.segment_ids_q.shape, p.segment_ids_kv.shape) == ((3, 1, 3), (2, 1, 3))
    assert [len(side) for side in given("unequal_lengths", 0).lengths] == [4, 3]
    assert given("segments", 0).segment_ids_q.tolist() == [1, 1, 0, 2, 2, 2, 3, 3, 0, 4, 4, 4]


def test_segment_ids_and_positions():
    p = Problem.from_json(problem([(3, 1), (0, 2)], padding=1, slack=1))
    assert p.given == "cu_seqlens"
    assert p.segment_ids_q.tolist() == [1, 1, 1, 0, 0, 0] and p.segment_ids_q.dtype == np.int32
    assert p.segment_ids_kv.tolist() == [1, 0, 2, 2, 0, 0]
    assert (p.positions_q.tolist(), p.positions_kv.tolist()) == ([0, 1, 2, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert [lengths.tolist() for lengths in p.lengths] == [[3, 0], [1, 2]]
    assert Problem.from_json(problem([(2, 2)]) | {"form": "lengths"}).given == "lengths"
    q, kv = p.padding_masks
    assert q.shape == (2, 1, 1, 4) and q[:, 0, 0].tolist() == [[False] * 3 + [True], [True] * 4]
    assert kv.dtype == bool and kv[:, 0, 0].tolist() == [[False, True, True], [False, False, True]]


@pytest.mark.parametrize(
    ("balance", "multiple", "expected"),
    [
        (
            "contiguous",
            2,
            [([1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1]), ([1, 1, 1, 1, 2, 0], [4, 5, 6, 7, 2, 0])],
        ),
        (
            "dual-chunk",
            4,
            [([1, 1, 1, 1, 2, 0], [0, 1, 6, 7, 0, 0]), ([1, 1, 1, 1, 2, 2], [2, 3, 4, 5, 1, 2])],
        ),
        (
            {"striped": {"stripe": 1}},
            2,
            [([1, 1, 1, 1, 2, 2], [0, 2, 4, 6, 0, 2]), ([1, 1, 1, 1, 2, 0], [1, 3, 5, 7, 1, 0])],
        ),
    ],
)
def test_ids_and_positions_are_dealt_like_the_tokens(balance, multiple, expected):
    """The arrays are those of `oracle/tests/suite/dealing.rs`."""
    p = Problem.from_json(over_ranks([(8, 1), (3, 1)], balance, 2, multiple))
    given = [p.segments_of(rows) for rows in p.dealt()]
    q = [(of["segment_ids_q"].tolist(), of["positions_q"].tolist()) for of in given]
    assert q == expected
    assert all(
        of["segment_ids_kv"].tolist()[0] in (0, 1) and of["positions_kv"].dtype == np.int32 for of in given
    )
    assert [lengths.tolist() for lengths in p.lengths] == [[8, 3], [1, 1]]
    nobody = p.segments_of((np.array([-1, 0]), np.array([], np.int64)))
    assert nobody["segment_ids_q"].tolist() == [0, 1] and nobody["positions_kv"].tolist() == []


def test_a_program_gets_the_ids_and_positions_of_its_rows():
    """Of all sequences, of one of them, and 0 where one is filled up, whatever the way of dealing."""
    p = Problem.from_json(over_ranks([(8, 8), (3, 3)], "dual-chunk", 2, 4))
    filled = np.array([0, 1, 10, -1, 4, 5])
    q = np.zeros((6, 2, 4), np.float32)
    local = Local(p, 0, [8, 4], q, q, q, None, (filled, filled))
    expected = [([1, 1, 2, 0, 1, 1], [0, 1, 2, 0, 4, 5])] * 2
    expected += [([1, 1, 2, 0], [0, 1, 2, 0]), ([1, 1], [4, 5])]
    parts = [local, local, *local.sequences()]
    for (ids, positions), part, side in zip(expected, parts, ("q", "kv", "q", "kv"), strict=True):
        given = part.segments()
        found = (given[f"segment_ids_{side}"].tolist(), given[f"positions_{side}"].tolist())
        assert found == (ids, positions)


@pytest.mark.parametrize("stripe", [1, 2, 3])
def test_ids_of_a_pack_in_stripes_are_the_reordered_axis(stripe):
    """TransformerEngine reorders the whole axis, and cuts it into equal parts."""
    ranks, lengths = 3, [(5, 5), (18, 18), (1, 1)]
    p = Problem.from_json(over_ranks(lengths, {"striped": {"stripe": stripe}}, ranks, ranks * stripe))
    given = [p.segments_of(rows) for rows in p.dealt()]
    for name in ("segment_ids_q", "positions_q", "segment_ids_kv", "positions_kv"):
        axis = getattr(p, name).reshape(-1, ranks, stripe).swapaxes(0, 1).reshape(ranks, -1)
        assert [of[name].tolist() for of in given] == axis.tolist()


def paged(lengths, size, count, table, **more):
    return problem(lengths, **more) | {"pages": {"size": size, "count": count, "table": table}}


def test_pages_are_a_pool_and_a_block_table():
    # The second page of the first sequence has one row, and a page more that holds none; page 1 is free.
    raw = paged([(1, 3), (0, 0), (1, 2)], 2, 5, [[4, 0, 2], [], [3]], padding=1)
    p = Problem.from_json(raw)
    assert p.block_table.tolist() == [[4, 0, 2], [0, 0, 0], [3, 0, 0]] and p.block_table.dtype == np.int32
    values = inputs(raw)
    given = p.in_pages(values, 7.0)
    for name in ("k", "v"):
        rows, pool = values[name], given[name]
        assert pool.shape == (5, 2, 1, rows.shape[2])
        np.testing.assert_array_equal(pool[4], rows[0:2])
        np.testing.assert_array_equal(pool[0, 0], rows[2])
        np.testing.assert_array_equal(pool[3], rows[5:7])
        # Rows without a key hold what rows without a token hold.
        assert np.isnan(pool[0, 1]).all() and np.isnan(pool[[1, 2]]).all()
    assert given["q"] is values["q"]
    tight = paged([(1, 3)], 2, 2, [[1, 0]])
    assert Problem.from_json(tight).in_pages(inputs(tight), 7.0)["k"][0, 1, 0, 0] == 7.0
    # Sequences are sorted by their rows, and their pages with them.
    raw["sequences"].reverse()
    raw["pages"]["table"].reverse()
    assert Problem.from_json(raw).block_table.tolist() == p.block_table.tolist()
    plain = Problem.from_json(problem([(1, 3)]))
    assert plain.block_table is None and plain.in_pages(values, 7.0) is values
    # No caller has a pool without a page, or a table without a column.
    empty = Problem.from_json(paged([(1, 0)], 2, 0, [[]]))
    assert (empty.block_table.tolist(), empty.pages.count) == ([[0]], 1)


def test_borrowed_keys_lie_with_their_lender():
    raw = problem([(3, 5), (2, 4), (1, 3)], padding=1)
    raw["sharing"] = [{"sequence": 1, "with": 0, "keys": 2}, {"sequence": 2, "with": 0, "keys": 3}]
    p = Problem.from_json(raw)
    assert [p.key_rows(at).tolist() for at in range(3)] == [[0, 1, 2, 3, 4], [0, 1, 8, 9], [0, 1, 2]]
    # A hole is no row of its sequence: 6, 7 and 11 to 13.
    foreign = [6, 7, 11, 12, 13]
    assert np.flatnonzero(~p.kv.owned()).tolist() == foreign
    assert not p.kv.real()[foreign].any() and p.q.owned().all()
    # Sequences are sorted by their rows, and what they share with them.
    raw["sequences"] = [raw["sequences"][0], raw["sequences"][2], raw["sequences"][1]]
    raw["sharing"] = [{"sequence": 1, "with": 0, "keys": 3}, {"sequence": 2, "with": 0, "keys": 2}]
    assert [Problem.from_json(raw).key_rows(at).tolist() for at in range(3)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 8, 9],
        [0, 1, 2],
    ]
    assert Problem.from_json(problem([(1, 2), (2, 2)])).key_rows(1).tolist() == [2, 3]


def test_rows_that_offsets_cannot_say():
    raw = problem([(2, 2), (2, 2)])
    for run, offset in zip((s["q"] for s in raw["sequences"]), (0, 1), strict=True):
        run |= {"offset": offset, "step": 2}
    p = Problem.from_json(raw)
    assert [run.real_rows() for run in p.q.runs] == [slice(0, 4, 2), slice(1, 5, 2)]
    assert p.q.owned().all()
    with pytest.raises(ValueError, match="SBHD"):
        _ = p.q.padded_offsets
    raw = problem([(2, 2), (2, 2)])
    runs = [sequence["kv"] for sequence in raw["sequences"]]
    runs[0]["offset"], runs[1]["offset"] = 2, 0
    with pytest.raises(ValueError, match="order"):
        _ = Problem.from_json(raw).kv.padded_offsets
    raw = problem([(2, 3), (0, 0), (1, 1)])
    raw["sequences"].reverse()
    assert Problem.from_json(raw).kv.padded_offsets.tolist() == [0, 3, 3, 4]


@pytest.mark.parametrize(
    ("left", "right", "windows"),
    [
        (None, None, [(-1, -1), (None, None), (-1, -1), (None, None), None, None]),
        (None, 0, [(-1, 0), (None, 0), (-1, 0), (None, 0), (5, 0), None]),
        (2, 0, [(2, 0), (2, 0), (2, 0), (3, 0), (2, 0), 3]),
        (0, 3, [(0, 3), (0, 3), (0, 3), (1, 3), (0, 3), 1]),
        (2, None, [(2, -1), (2, None), (2, -1), (3, None), (2, 5), 3]),
    ],
)
def test_windows(left, right, windows):
    p = Problem.from_json(problem([(3, 5)], left=left, right=right))
    styles = ("fa", "fa4", "te", "cudnn", "jax", "jax-cudnn")
    assert [p.window(style) for style in styles] == windows
    with pytest.raises(ValueError, match="jaxx"):
        p.window("jaxx")


def sees(mask, at, key, queries, keys):
    """Returns whether a query sees a key, by the rule in its most literal form."""
    left, right, bottom_right, documents, chunks, prefix, sink_tokens = mask
    place = at + (keys - queries if bottom_right else 0)
    borders = list(documents) if chunks is None else range(-20 * chunks, 20 * chunks, chunks)
    together = all((place < border) == (key < border) for border in borders)
    first = max([border for border in borders if 0 <= border <= key], default=0)
    below = right is None or key <= place + right or key < first + prefix
    above = left is None or key >= place - left or key < first + sink_tokens
    return together and below and above


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("blocks", [{}, {"documents": [2, 3]}, {"chunks": 3}, {"chunks": 1}])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("sink_tokens", [0, 1, 3])
def test_documents_chunks_a_prefix_and_sink_tokens(bottom_right, blocks, prefix, sink_tokens):
    for left, right, lengths in itertools.product((None, 1), (None, 0, 2), ((5, 5), (3, 6), (6, 3), (2, 0))):
        bounds = {name: bound for name, bound in (("left", left), ("right", right)) if bound is not None}
        align = "bottom-right" if bottom_right else "top-left"
        mask = bounds | {"align": align, "blocks": blocks, "prefix": prefix, "sink_tokens": sink_tokens}
        p = Problem.from_json(problem([lengths]) | {"mask": mask})
        rule = [[sees(p.mask, i, j, *lengths) for j in range(lengths[1])] for i in range(lengths[0])]
        assert p.visible(0).tolist() == rule
        assert p.blind_rows().tolist() == [not any(row) for row in rule]
        assert p.causal == (right == 0 and prefix == 0)


def test_what_is_visible():
    p = Problem.from_json(problem([(3, 2), (0, 4), (1, 0)], left=1, right=0))
    assert p.visible(0).tolist() == [[False, False], [True, False], [True, True]]
    assert p.blind_rows().tolist() == [True, False, False, True]
    p = Problem.from_json(problem([(3, 2)], left=0, align="top-left"))
    assert p.visible(0).tolist() == [[True, True], [False, True], [False, False]]
    assert p.blind_rows().tolist() == [False, False, True]
    for index in range(3):
        p = Problem.from_json(problem([(5, 3), (2, 6), (4, 4)], left=1, right=1))
        assert (~p.visible(index).any(axis=1) == p.blind_rows()[p.q.runs[index].real_rows()]).all()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_formats_there_and_back(form):
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = widen(codes, form)
    assert is_unwritten(values).sum() == 1 and values.view(np.uint32)[0x7FE5] == UNWRITTEN
    plain = ~np.isnan(values)
    assert (narrow(values, form)[plain] == codes[plain]).all()
    assert np.isnan(widen(narrow(values, form), form)[~plain]).all()


def test_same_bits():
    one = np.array([1.0, -0.0, np.nan], np.float32)
    assert same(one, one.copy())
    assert same(one, np.array([1.0, -0.0, -np.nan], np.float32))
    assert not same(one, np.array([1.0, 0.0, np.nan], np.float32))
    assert not same(one, np.array([1.0, -0.0, 0.0], np.float32))


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("form", ["f32", "bf16", "fp16"])
def test_libraries_change_no_bit(name, form):
    pytest.importorskip(name)
    if form == "bf16" and name == "numpy":
        pytest.importorskip("ml_dtypes")
    arrays = library(name)("cpu")
    if form == "f32":
        values = np.random.default_rng(0).integers(0, 1 << 32, 9000, dtype=np.uint32).view(np.float32)
        values[np.isnan(values)] = np.nan
    else:
        values = widen(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16), form)
    values = values[: len(values) // 30 * 30].reshape(-1, 3, 10)
    assert same(arrays.get(arrays.put(values, form), form, "q"), values)
    if arrays.mutable:
        assert is_unwritten(arrays.get(arrays.unwritten(5, form), form, "out")).all()
    wrong = arrays.put(values, "fp16" if form != "fp16" else "f32")
    with pytest.raises(TypeError, match="out came back as"):
        arrays.get(wrong, form, "out")


def test_guard_bands():
    p = Problem.from_json(problem([(2, 2)]))
    out = p.empty_out()
    assert out.shape == (2, 2, 3) and is_unwritten(out).all() and p.took(out) and not p.took(out.copy())
    assert p.damage() == []
    whole = p.guarded[0][1].whole
    whole[GUARD + 12 + 4 : GUARD + 12 + 6] = 0
    assert p.damage() == [{"tensor": "out", "before": False, "distance": 4, "elements": 2}]
    with pytest.raises(ValueError, match="no tensor"):
        p.empty("output")


def test_padded_rows_of_the_lse_say_nothing():
    p = Problem.from_json(problem([(3, 3), (2, 2)], padding=1))
    values = np.arange(2 * 7, dtype=np.float32).reshape(2, 7)
    padded = np.full((2, 8), np.nan, np.float32)
    padded[:, :7] = values
    assert (lse(multiple=8).standard(padded, p) == values).all()
    assert (lse(order="th", multiple=8).standard(padded.T, p) == values).all()
    with pytest.raises(ValueError, match=r"lse has shape \(2, 7\); rows in multiples of 8 ask for \(2, 8\)"):
        lse(multiple=8).standard(values, p)
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        lse(order="bhs", multiple=8).standard(np.zeros((2, 2, 4), np.float32), p)
    assert lse(order="bhs", multiple=8).standard(np.zeros((2, 2, 8), np.float32), p).shape == (2, 7)
    with pytest.raises(DeclarationError, match="multiple=0"):
        lse(multiple=0)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("order", ["ht", "th", "bhs"])
@pytest.mark.parametrize("empty", ["-inf", "+inf"])
def test_forms_of_the_lse(base, order, empty):
    raw = problem([(3, 5), (4, 1), (0, 2), (2, 0)], right=0)
    p = Problem.from_json(raw)
    right = expected(raw, inputs(raw))["lse"].astype(np.float32)
    returned = right / (np.float32(np.log(2)) if base == "2" else np.float32(1))
    if empty == "+inf":
        returned = np.where(np.isneginf(returned), np.float32(np.inf), returned)
    if order == "th":
        returned = np.ascontiguousarray(returned.T)
    if order == "bhs":
        batch = np.full((4, 2, 32), np.nan, np.float32)
        for index, run in enumerate(p.q.runs):
            batch[index, :, : run.len] = returned[:, run.real_rows()]
        returned = batch
    got = lse(base, order, empty).standard(returned, p)
    assert got.dtype == np.float32 and got.shape == (2, 9)
    np.testing.assert_allclose(got, right, rtol=1e-6)
    if base == "e":
        np.testing.assert_array_equal(got, right)


def test_an_infinity_that_is_no_empty_row_stays():
    p = Problem.from_json(problem([(2, 2)]))
    returned = np.full((2, 2), np.inf, np.float32)
    assert np.isposinf(lse(empty="+inf").standard(returned, p)).all()
    assert is_unwritten(lse(base="2").standard(unwritten((2, 2)), p)).all()
    short = lse().standard(np.zeros((2, 2), np.float32), Problem.from_json(problem([(2, 2)], slack=1)))
    assert is_unwritten(short[:, 2]).all() and (short[:, :2] == 0).all()


def test_words_that_are_not_known():
    for wrong in ({"base": "10"}, {"order": "hht"}, {"empty": "nan"}):
        with pytest.raises(DeclarationError, match="is not known"):
            LseForm(**wrong)
    with pytest.raises(DeclarationError, match="tensorflow"):
        library("tensorflow")
    with pytest.raises(DeclarationError, match="on the CPU"):
        Numpy("cuda")


def test_a_problem_is_the_same_whatever_is_left_out():
    raw = problem([(2, 2)], right=0)
    full = problem([(2, 2)], right=0)
    full["mask"]["left"] = None
    full["softmax"]["softcap"] = None
    full["sequences"][0]["q"]["step"] = 1
    assert Problem.from_json(raw) == Problem.from_json(full)
    assert Problem.from_json(raw) != dataclasses.replace(Problem.from_json(raw), scale=1.0)


@pytest.mark.parametrize("balance", ["contiguous", "dual-chunk"])
def test_of_no_sequence_each_rank_has_no_row(balance):
    dealt = by_sequence(Parallel(algorithm="ring", balance=balance, world=2, ranks=(0, 1)), [])
    assert [len(rows) for rows in dealt] == [0, 0]
    dealt = by_sequence(Parallel(algorithm="ring", world=2, ranks=(0, 1)), [4, 2])
    assert [rows.tolist() for rows in dealt] == [[0, 1, 4], [2, 3, 5]]
