"""Ids under `jax.vmap`: what a program says by ids alone arrives as the problems here say it, and is read so.

An attention that is one operation of JAX (a *primitive*) has no dimension of its own for `vmap`: its batching rule
passes its arguments through. Ids then have one dimension more, and positions that do not depend on them have none.

Needs JAX, on any device.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from supervisor import problem

from seamproof import Problem, segments

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
core = pytest.importorskip("jax.extend.core")
batching = pytest.importorskip("jax.interpreters.batching")

FORMS = Path(__file__).parents[1] / "examples" / "numpy_forms.py"
Q_ROWS, KV_ROWS = 5, 4


def read(ids_q, positions_q, ids_kv, positions_kv):
    """Returns which rows of kv each row of q sees under a causal mask, as the example of a reader has it."""
    spec = importlib.util.spec_from_file_location("numpy_forms", FORMS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    leading = np.broadcast_shapes(*(array.shape[:-1] for array in (ids_q, positions_q, ids_kv, positions_kv)))
    rows = [int(np.prod(leading)) * array.shape[-1] for array in (ids_q, ids_kv)]
    p = SimpleNamespace(
        leading=leading,
        q=SimpleNamespace(rows=rows[0]),
        kv=SimpleNamespace(rows=rows[1]),
        segment_ids_q=ids_q,
        positions_q=positions_q,
        segment_ids_kv=ids_kv,
        positions_kv=positions_kv,
    )
    (ids, at), (key_ids, key_at) = module.by_batched_segments(p)
    same = (ids[:, None] == key_ids[None, :]) & (ids != 0)[:, None]
    return same & (key_at[None, :] <= at[:, None])


def strictly(*arrays):
    """Reads nothing but ids and positions of one shape."""
    assert arrays[0].shape == arrays[1].shape and arrays[2].shape == arrays[3].shape
    return read(*arrays)


def program(reader, seen):
    """Returns a program that is given ids alone and calls a reader as a primitive, which keeps what it has seen."""
    primitive = core.Primitive("attention")

    def call(*arrays):
        arrays = [np.asarray(array) for array in arrays]
        seen.append(arrays)
        return jnp.asarray(reader(*arrays))

    def batched(arrays, dims):
        assert set(dims) <= {0, None}, "the first dimension or none"
        return primitive.bind(*arrays), 0

    primitive.def_impl(call)
    batching.primitive_batchers[primitive] = batched

    def forward(ids_q, ids_kv):
        # One segment a row, which begins at the first one: positions are the same for all ids.
        positions_q, positions_kv = (jnp.arange(ids.shape[-1]) for ids in (ids_q, ids_kv))
        return primitive.bind(ids_q, positions_q, ids_kv, positions_kv)

    return forward


def given(lengths, lacking):
    """Returns a problem of batch rows of one sequence each, given as ids and positions."""
    raw = problem([]) | {"form": "batched_segments", "data_seed": lacking}
    raw["rows"] = {"q": Q_ROWS * len(lengths), "kv": KV_ROWS * len(lengths)}

    def run(at, rows, length):
        return {"offset": at * rows, "len": length, "span": length, "step": 1}

    raw["sequences"] = [
        {"id": at, "q": run(at, Q_ROWS, q), "kv": run(at, KV_ROWS, kv)} for at, (q, kv) in enumerate(lengths)
    ]
    return Problem.from_json(raw)


POSITIONS_LACK = 0b1010
BATCHES = {
    (2,): [(5, 4), (3, 2)],
    (3,): [(2, 4), (5, 1), (1, 3)],
    # vmap of vmap.
    (2, 2): [(5, 4), (3, 2), (1, 4), (4, 1)],
}


def stacked(p, leading):
    ids = np.zeros((len(p.sequences), Q_ROWS), np.int32), np.zeros((len(p.sequences), KV_ROWS), np.int32)
    for at, sequence in enumerate(p.sequences):
        for array, run in zip(ids, (sequence.q, sequence.kv), strict=True):
            array[at, : run.len] = 1
    return [jnp.asarray(array.reshape(*leading, -1)) for array in ids]


def under_vmap(forward, depth):
    for _ in range(depth):
        forward = jax.vmap(forward)
    return forward


@pytest.mark.parametrize("leading", BATCHES)
def test_ids_alone_under_vmap_are_what_a_problem_gives(leading):
    p, seen = given(BATCHES[leading], POSITIONS_LACK), []
    got = np.asarray(under_vmap(program(read, seen), len(leading))(*stacked(p, leading)))
    assert p.leading == leading
    [arrays] = seen
    for array, name in zip(arrays, segments.NAMES, strict=True):
        assert array.shape == getattr(p, name).shape, name
        np.testing.assert_array_equal(array, getattr(p, name), name)
    # Each of them by itself, and nothing beyond it.
    alone = [np.tri(run.q.len, run.kv.len, dtype=bool) for run in p.sequences]
    whole = np.zeros_like(got)
    for at, triangle in enumerate(alone):
        (rows, keys), (q, kv) = triangle.shape, (at * Q_ROWS, at * KV_ROWS)
        whole[q : q + rows, kv : kv + keys] = triangle
    np.testing.assert_array_equal(got, whole)


def test_a_reader_that_asks_for_equal_shapes_fails_under_vmap_alone():
    p = given(BATCHES[2,], POSITIONS_LACK)
    ids = stacked(p, (2,))
    forward = program(strictly, [])
    np.testing.assert_array_equal(forward(*(array[0] for array in ids)), np.tri(Q_ROWS, KV_ROWS, dtype=bool))
    with pytest.raises(AssertionError):
        jax.vmap(forward)(*ids)


def test_one_side_alone_may_be_batched():
    q, kv = stacked(given(BATCHES[2,], POSITIONS_LACK), (2,))
    got = jax.vmap(program(read, []), in_axes=(0, None))(q, kv[0])
    np.testing.assert_array_equal(
        got[Q_ROWS:, KV_ROWS:], [*np.tri(3, KV_ROWS, dtype=bool), *np.zeros((2, KV_ROWS), bool)]
    )
