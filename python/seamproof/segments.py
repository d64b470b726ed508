"""Segment ids and positions under leading dimensions, as `vmap` of `vmap` gives them to a kernel.

The last dimension of an array goes along the rows of a batch row; each index of the dimensions before it is one batch
row. An array that lacks some of the first dimensions is repeated along them, as numpy broadcasts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .problem import Sequence

# The arrays of a problem, in the order of the bits that say which of them lack dimensions.
NAMES = ("segment_ids_q", "positions_q", "segment_ids_kv", "positions_kv")


def flat(sequences: Iterable[Sequence], rows: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns ids that count the sequences from 1, and positions, of rows of q and of kv; 0 where there is no token."""
    return _written(((number, sequence) for number, sequence in enumerate(sequences, 1)), rows)


def batched(sequences: tuple[Sequence, ...], rows: tuple[int, int], lacking: int) -> dict[str, np.ndarray]:
    """Returns ids that count the sequences of a batch row from 1, and positions, under several leading dimensions.

    These are the prime factors of the number of batch rows. An array whose bit of `lacking` is set lacks the first
    dimensions along which it repeats, as far as it can be broadcast again.
    """
    count = batch_rows(sequences, rows)
    dims = factors(count)
    whole = {name: array.reshape(*dims, -1) for name, array in _in_batch_rows(sequences, rows, count).items()}
    arrays = dict(whole)
    for index, name in enumerate(NAMES):
        if lacking >> index & 1:
            ids = whole[NAMES[index // 2 * 2]]
            counts = ids > 0 if name.startswith("positions") else np.ones(ids.shape, bool)
            arrays[name] = _without_repeats(whole[name], counts)

    def dimensions(side: int) -> int:
        return max(arrays[name].ndim for name in NAMES[2 * side : 2 * side + 2]) - 1

    for side in (0, 1):
        own, other = dimensions(side), dimensions(1 - side)
        # A side is broadcast from a batch dimension at most, and to all dimensions of the other.
        if own < len(dims) and (own > 1 or other < len(dims)):
            arrays[NAMES[2 * side]] = whole[NAMES[2 * side]]
    return arrays


def misshapen(sequences: tuple[Sequence, ...], rows: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns a contradiction: extra dimensions (n) of q and others of kv, before a batch of one row.

    Those of kv are (a, n / a) where n is a product, and (m), another number, where it is a prime.
    """
    count = batch_rows(sequences, rows)
    first = factors(count)[0]
    others = (m for m in range(2, rows[1] + 1) if m != count and rows[1] % m == 0)
    extra = {"q": (count,), "kv": (first, count // first) if first < count else (next(others),)}
    arrays = _in_batch_rows(sequences, rows, count)
    return {name: array.reshape(*extra[name.rpartition("_")[2]], 1, -1) for name, array in arrays.items()}


def batch_rows(sequences: tuple[Sequence, ...], rows: tuple[int, int]) -> int:
    """Returns the largest number of batch rows of which no sequence lies in two, at most one for each sequence."""

    def fits(count: int) -> bool:
        whole = all(side % count == 0 for side in rows)
        return whole and all(len(set(_ends(sequence, rows, count))) < 2 for sequence in sequences)

    return next(filter(fits, range(len(sequences), 1, -1)), 1)


def factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a number, the smallest first; none of 1."""
    first = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return () if first is None else (first, *factors(number // first))


def _ends(sequence: Sequence, rows: tuple[int, int], count: int) -> Iterable[int]:
    """Yields the batch rows of a sequence's first and last real row on each side."""
    for run, side in zip((sequence.q, sequence.kv), rows, strict=True):
        for position in (0, run.len - 1) if run.len else ():
            yield (run.offset + run.step * position) // (side // count)


def _in_batch_rows(
    sequences: tuple[Sequence, ...], rows: tuple[int, int], count: int
) -> dict[str, np.ndarray]:
    numbers = [0] * count

    def numbered() -> Iterable[tuple[int, Sequence]]:
        for sequence in sequences:
            for batch_row in list(_ends(sequence, rows, count))[:1]:
                numbers[batch_row] += 1
                yield numbers[batch_row], sequence

    return _written(numbered(), rows)


def _written(numbered: Iterable[tuple[int, Sequence]], rows: tuple[int, int]) -> dict[str, np.ndarray]:
    arrays = {name: np.zeros(rows[index // 2], np.int32) for index, name in enumerate(NAMES)}
    for number, sequence in numbered:
        for side, run in (("q", sequence.q), ("kv", sequence.kv)):
            arrays[f"segment_ids_{side}"][run.real_rows()] = number
            arrays[f"positions_{side}"][run.real_rows()] = np.arange(run.len)
    return arrays


def _without_repeats(array: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns an array without as many of its first dimensions as it repeats along; others than `counts` may differ."""
    for kept in range(1, array.ndim):
        shape = array.shape[-kept:]
        size = math.prod(shape)
        values = np.where(counts, array, 0).reshape(array.size // max(size, 1), size)
        marked = counts.reshape(values.shape)
        one = values.max(axis=0, initial=0)
        if (values == np.where(marked, one, 0)).all():
            return one.reshape(shape)
    return array
