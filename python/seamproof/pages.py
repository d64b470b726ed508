"""Keys and values in pages: the pool that a kernel is given, and the table that says which pages a sequence owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Number in rows that hold no key, by what a subject allows there: the judge's own large one where it must be finite.
HOLES = {"anything": float("nan"), "finite": 256.0}


@dataclass(frozen=True)
class Pages:
    """Pages of keys and values: position p of a sequence lies in row `p % size` of entry `p // size` of its pages."""

    size: int
    count: int
    # Pages of each sequence, in order of positions.
    table: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, raw: dict[str, Any] | None, order: list[int]) -> Pages | None:
        """Returns the pages of a problem's JSON, for its sequences in this order. A pool has one page at least."""
        if raw is None:
            return None
        return cls(raw["size"], max(raw["count"], 1), tuple(tuple(raw["table"][at]) for at in order))

    def block_table(self) -> list[list[int]]:
        """Returns as many entries for each sequence, one at least: those that name no page are 0."""
        width = max((len(pages) for pages in self.table), default=0) or 1
        return [[*pages, *[0] * (width - len(pages))] for pages in self.table]


# --- what a script carries begins here


def pooled(array, rows, size, count, table, hole):
    """Returns keys or values `[rows, heads, lanes]` in pages: `[pages, size, heads, lanes]`.

    `rows` are the rows of each sequence's tokens. A row of the pool without one holds the number that rows without a
    token hold, or `hole` where there are none.
    """
    token = np.zeros(len(array), bool)
    for of_sequence in rows:
        token[of_sequence] = True
    fill = hole if token.all() else array[~token][0, 0, 0]
    pool = np.full((count * size, *array.shape[1:]), fill, np.float32)
    for of_sequence, pages in zip(rows, table):  # noqa: B905
        keys = array[of_sequence]
        at = np.arange(len(keys))
        pool[np.asarray(pages, int)[at // size] * size + at % size] = keys
    return pool.reshape(count, size, *array.shape[1:])
