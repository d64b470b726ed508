"""Ids and positions against the descriptor that they come from: `SequenceDescriptor` of TransformerEngine's JAX API.

Needs JAX, on any device, and the Python files of `transformer_engine`. Its compiled part is not needed: the descriptor
only compares names that this part defines, which a stand-in has too.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from supervisor import over_ranks, problem

from seamproof import Problem

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
core = pytest.importorskip("jax.extend.core")
batching = pytest.importorskip("jax.interpreters.batching")

ENUMERATIONS = ("NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_QKV_Layout", "NVTE_QKV_Format", "NVTE_Softmax_Type")


class Names(type):
    """A class whose every attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def stand_in() -> types.ModuleType:
    """Returns a module with the names that the compiled part defines."""
    module = types.ModuleType("transformer_engine_jax")
    for name in ENUMERATIONS:
        setattr(module, name, Names(name, (), {}))
    formats = ("THD", "SBHD", "BSHD")
    module.nvte_get_qkv_format = lambda layout: f"NVTE_{next(name for name in formats if name in layout)}"
    return module


@pytest.fixture(scope="module")
def attention():
    package = importlib.util.find_spec("transformer_engine")
    places = package.submodule_search_locations if package else []
    files = [Path(place, "jax", "attention.py") for place in places or []]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip("no module transformer_engine with its folder jax")
    parent = types.ModuleType("descriptor")
    parent.__path__ = []
    extensions = types.ModuleType("descriptor.cpp_extensions")
    parent.cpp_extensions = extensions
    modules = {"transformer_engine_jax": stand_in(), "descriptor": parent, extensions.__name__: extensions}
    spec = importlib.util.spec_from_file_location("descriptor.attention", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (modules | {spec.name: module}).items():
            patch.setitem(sys.modules, name, value)
        spec.loader.exec_module(module)
        yield module


def drawn(seed: int, **more) -> Problem:
    """Returns a batch of packed rows, given as batched ids. Gaps between sequences hold no token. Rows of a batch are
    often alike, so that ids or positions may lack dimensions."""
    batch_rows, alike = (1, 2, 4, 6)[seed % 4], seed % 3 > 0
    rows = {"q": 12, "kv": 9}
    sequences = []
    for batch_row in range(batch_rows):
        draw = random.Random(f"{seed}, {0 if alike else batch_row}")
        ends = dict.fromkeys(rows, 0)
        for _ in range(draw.randint(1, 3)):
            sides = {}
            for side, count in rows.items():
                first, length = ends[side] + draw.randint(0, 1), draw.randint(1, 2)
                offset = batch_row * count + first
                sides[side] = {"offset": offset, "len": length, "span": length, "step": 1}
                ends[side] = first + length
            sequences.append({"id": len(sequences), **sides})
    raw = problem([]) | {"form": "batched_segments", "data_seed": seed // 12, "sequences": sequences} | more
    return Problem.from_json(raw | {"rows": {side: count * batch_rows for side, count in rows.items()}})


def described(p: Problem) -> list[tuple[list[int], list[int]]]:
    """Returns the lengths and first rows of each batch row's sequences, of q and then of kv."""
    count = math.prod(p.leading)
    answer = []
    for side, runs in ((p.q, p.q.runs), (p.kv, p.kv.runs)):
        size = side.rows // count
        for batch_row in range(count):
            here = [run for run in runs if run.offset // size == batch_row]
            answer.append(([run.len for run in here], [run.offset % size for run in here]))
    return answer


def arrays(p: Problem, side: str):
    """Returns ids and positions with a batch dimension, which that descriptor needs, and without extra ones of both."""
    ids, positions = (np.asarray(getattr(p, f"{name}_{side}")) for name in ("segment_ids", "positions"))
    batch = np.broadcast_shapes(ids.shape, positions.shape)[-2:-1] or (1,)
    whole = [
        array if array.ndim > 1 else np.broadcast_to(array, (*batch, array.shape[-1]))
        for array in (ids, positions)
    ]
    if whole[0].ndim == whole[1].ndim:
        whole = [array.reshape(-1, array.shape[-1]) for array in whole]
    return [jnp.asarray(array) for array in whole]


def asked(attention, p: Problem, layout: str, bound: int, mask: str = "PADDING_MASK", window=None):
    (ids_q, positions_q), (ids_kv, positions_kv) = arrays(p, "q"), arrays(p, "kv")
    descriptor = attention.SequenceDescriptor.from_segment_ids_and_pos(
        (ids_q, ids_kv), (positions_q, positions_kv)
    )
    kind = (getattr(attention.AttnMaskType, mask), getattr(attention.QKVLayout, layout), window, bound)
    return descriptor.get_seqlens_and_offsets(*kind)


def said(lengths, offsets) -> list[tuple[list[int], list[int]]]:
    """Returns the descriptor's answer as `described` has it. Places that no sequence has hold 0 and -1."""
    got = []
    for side in (0, 1):
        whole = [np.asarray(array[side]).reshape(-1, array[side].shape[-1]) for array in (lengths, offsets)]
        for length, offset in zip(*whole, strict=True):
            used = int((length > 0).sum())
            assert (length[used:] == 0).all() and (offset[used:] == -1).all()
            got.append((length[:used].tolist(), offset[:used].tolist()))
    return got


def test_batched_ids_say_what_the_descriptor_makes_of_them(attention):
    """It refuses some that are broadcast here: ids of fewer dimensions than positions, and one side batched alone."""
    equal = refused = batched = 0
    for seed in range(12 * 16):
        p = drawn(seed)
        try:
            lengths, offsets = asked(attention, p, "THD_THD_THD", 4)
        except (AssertionError, ValueError):
            refused += 1
            continue
        assert said(lengths, offsets) == described(p), f"seed {seed}"
        equal += 1
        batched += all(
            ids.ndim > positions.ndim for ids, positions in (arrays(p, side) for side in ("q", "kv"))
        )
    assert equal > 60 and refused > 20 and batched > 3, (equal, refused, batched)


def test_a_batch_has_the_lengths_that_the_descriptor_counts(attention):
    raw = problem([(3, 2), (1, 4), (4, 1)]) | {"rows": {"q": 12, "kv": 12}, "form": "lengths"}
    for at, sequence in enumerate(raw["sequences"]):
        for side in ("q", "kv"):
            sequence[side] |= {"offset": 4 * at, "span": 4}
    p = Problem.from_json(raw)
    ids = [
        jnp.asarray([[int(row < length) for row in range(4)] for length in lengths.tolist()])
        for lengths in p.lengths
    ]
    descriptor = attention.SequenceDescriptor.from_segment_ids_and_pos(tuple(ids), tuple(ids))
    kind = (attention.AttnMaskType.PADDING_MASK, attention.QKVLayout.BSHD_BSHD_BSHD, None, 1)
    lengths, _ = descriptor.get_seqlens_and_offsets(*kind)
    assert [side.reshape(-1).tolist() for side in lengths] == [side.tolist() for side in p.lengths]


# Kinds of masks of the descriptor, and the mask that each one is here.
MASKS = {
    "PADDING_MASK": {"align": "top-left"},
    "PADDING_CAUSAL_MASK": {"align": "top-left", "right": 0},
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": {"align": "bottom-right", "right": 0},
}


def seen(p: Problem) -> list[tuple[list[int], list[int]]]:
    """Returns what `described` does, of the queries that see a key and of the keys that a query sees alone."""
    count = math.prod(p.leading)
    answer = [([], []) for _ in range(2 * count)]
    for at, sequence in enumerate(p.sequences):
        visible = p.visible(at)
        for side, (run, rows) in enumerate(((sequence.q, p.q.rows), (sequence.kv, p.kv.rows))):
            [used] = np.nonzero(visible.any(axis=1 - side))
            lengths, offsets = answer[side * count + run.offset // (rows // count)]
            if used.size:
                lengths.append(used.size)
                offsets.append((run.offset + int(used[0])) % (rows // count))
    return answer


@pytest.mark.parametrize("mask", MASKS)
def test_lengths_follow_the_kind_of_mask_and_no_maximum(attention, mask):
    """Rows that the mask leaves without a partner are not counted. A window alone changes no length."""
    cut = equal = 0
    for seed in range(0, 12 * 16, 13):
        p = drawn(seed, mask=MASKS[mask])
        try:
            answers = [
                said(*asked(attention, p, "THD_THD_THD", bound, mask, window))
                for bound, window in ((3, None), (6, None), (6, (1, 0)))
            ]
        except (AssertionError, ValueError):
            continue
        want = seen(p)
        assert answers == 3 * [want], f"seed {seed}"
        equal += 1
        cut += want != described(p)
    assert equal > 3 and (cut > 1 or mask == "PADDING_MASK"), (equal, cut)


def test_ids_under_vmap_beside_positions_of_one_batch(attention):
    """The report: a primitive, whose batching rule passes its arguments through, is given ids with a dimension more
    than positions that were made outside of `vmap`."""
    kind = (attention.AttnMaskType.PADDING_MASK, attention.QKVLayout.THD_THD_THD, None, 4)
    shapes = []

    def call(ids_q, ids_kv, positions_q, positions_kv):
        shapes.append((ids_q.shape, positions_q.shape))
        make = attention.SequenceDescriptor.from_segment_ids_and_pos
        lengths, offsets = make((ids_q, ids_kv), (positions_q, positions_kv)).get_seqlens_and_offsets(*kind)
        return [*lengths, *offsets]

    primitive = core.Primitive("descriptor")
    primitive.multiple_results = True
    primitive.def_impl(call)
    batching.primitive_batchers[primitive] = lambda given, dims: (primitive.bind(*given), [0] * 4)
    # Two sequences begin in rows 0 and 3, whatever their lengths are, so that positions are the same for all.
    positions = [jnp.asarray([[0, 1, 2, 0, 1, 2]]), jnp.asarray([[0, 1, 2, 0, 1]])]
    lengths = [((3, 3), (3, 2)), ((1, 2), (3, 1)), ((2, 1), (1, 1))]
    ids = [np.zeros((len(lengths), 1, rows), np.int32) for rows in (6, 5)]
    for at, sides in enumerate(lengths):
        for array, (first, second) in zip(ids, sides, strict=True):
            array[at, 0, :first], array[at, 0, 3 : 3 + second] = 1, 2
    got = jax.vmap(lambda q, kv: primitive.bind(q, kv, *positions))(*map(jnp.asarray, ids))
    assert shapes == [((3, 1, 6), (1, 6))]
    for side in (0, 1):
        assert got[side][:, 0, :2].tolist() == [list(sides[side]) for sides in lengths]
        assert got[2 + side][:, 0, :2].tolist() == len(lengths) * [[0, 3]]


def test_positions_are_asked_for(attention):
    """The report's call with ids alone: since then the descriptor makes no positions, and says so."""
    ids = jnp.asarray([[1, 1, 2, 0]])
    with pytest.raises(ValueError, match="segment_pos is now required"):
        attention.SequenceDescriptor.from_segment_ids_and_pos((ids, ids))


@pytest.fixture(scope="module")
def reordering():
    """The functions that reorder an axis for ranks, by name, out of a file that otherwise calls the compiled part."""
    package = importlib.util.find_spec("transformer_engine")
    places = package.submodule_search_locations if package else []
    files = [Path(place, "jax", "cpp_extensions", "attention.py") for place in places or []]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip("no module transformer_engine with its folder jax")
    names = ("reorder_causal_dual_chunk_swap", "reorder_causal_striped")
    nodes = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) in names]
    scope = {"jnp": jnp}
    exec(compile(ast.Module(nodes, []), str(file), "exec"), scope)
    return [scope[name] for name in names]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stripe", [None, 1, 3])
def test_ranks_are_dealt_the_reordered_axis_in_equal_parts(reordering, ranks, stripe):
    """A batch of which each sequence is a batch row, in two chunks, and a pack in stripes."""
    in_chunks, in_stripes = reordering
    if stripe is None:
        span, batch_rows = 6 * ranks, 3
        raw = over_ranks(
            [(span, span), (span - 1, 1 + span - 2 * ranks), (span, span)], "dual-chunk", ranks, span
        )
    else:
        span, batch_rows = ranks * stripe, 1
        raw = over_ranks(
            [(span + 1, 1), (3 * span, span), (1, 2 * span)], {"striped": {"stripe": stripe}}, ranks, span
        )
    p = Problem.from_json(raw)
    given = [p.segments_of(rows) for rows in p.dealt()]
    for name in ("segment_ids_q", "segment_ids_kv", "positions_q", "positions_kv"):
        axis = jnp.asarray(getattr(p, name)).reshape(batch_rows, -1)
        axis = (
            in_chunks(axis, ranks, 1, False) if stripe is None else in_stripes(axis, ranks, 1, False, stripe)
        )
        parts = np.split(np.asarray(axis), ranks, axis=1)
        assert [of[name].tolist() for of in given] == [part.ravel().tolist() for part in parts]
