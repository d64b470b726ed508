"""Dealing: which rank of a context-parallel group holds which rows.

A group of `size` ranks deals the *span* of each sequence, its real rows and its padding alike, on the side of the
queries as on that of the keys. All ranks get equally many rows of it, one sequence behind the other, or side by side
(SBHD) where they lie so in the whole tensor. The *balance* says which:

| balance | the span is cut into | rank r holds, one after the other |
|---|---|---|
| `contiguous` | `size` parts | part r |
| `dual-chunk` | `2·size` chunks | chunk r, chunk `2·size − 1 − r` |
| `striped` | stripes of some rows | stripes r, r + size, r + 2·size, … |

Of rows that no sequence owns, each rank has as many as the others. The program that judges has the same map.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DeclarationError

if TYPE_CHECKING:
    from .runs import Run

BALANCES = ("contiguous", "dual-chunk", "striped")


@dataclass(frozen=True)
class Parallel:
    """Context parallelism of a problem: its algorithm, how rows are dealt, and the ranks of the group.

    `all_to_all` are the ranks of one all-to-all of a hierarchical group, `stripe` the rows of one stripe. `ranks` are
    the group's ranks in a world of `world` ranks, in the group's order.
    """

    algorithm: str = "single"
    all_to_all: int = 1
    balance: str = "contiguous"
    stripe: int = 1
    world: int = 1
    ranks: tuple[int, ...] = (0,)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Parallel:
        """Returns the `parallel` of a case file's problem."""
        algorithm, of_algorithm = _named(raw["algorithm"])
        balance, of_balance = _named(raw["balance"])
        return cls(
            algorithm=algorithm,
            all_to_all=of_algorithm.get("all_to_all", 1),
            balance=balance,
            stripe=of_balance.get("stripe", 1),
            world=raw["world"],
            ranks=tuple(raw["ranks"]),
        )

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_single(self) -> bool:
        """Whether the problem is a plain call on one rank."""
        return self.algorithm == "single"

    def positions(self, span: int) -> np.ndarray:
        """Returns the positions of a sequence that each rank holds: `[ranks, span / ranks]`."""
        cuts = {
            "contiguous": self.size,
            "dual-chunk": 2 * self.size,
            "striped": self.size * self.stripe,
        }
        if span % cuts[self.balance]:
            raise DeclarationError(
                f"a span of {span} rows is no multiple of {cuts[self.balance]}, as {self.balance} rows of "
                f"{self.size} ranks are"
            )
        rows = np.arange(span)
        if self.balance == "contiguous":
            return rows.reshape(self.size, -1)
        if self.balance == "striped":
            stripes = rows.reshape(-1, self.size, self.stripe)
            return stripes.transpose(1, 0, 2).reshape(self.size, -1)
        chunks = rows.reshape(2 * self.size, -1)
        return np.concatenate([chunks[: self.size], chunks[: self.size - 1 : -1]], axis=1)

    def dealt(self, runs: Items[Run], rows: int) -> list[np.ndarray]:
        """Returns for each rank which row of the whole tensor each of its rows is: −1 where no sequence owns it."""
        pieces: list[list[np.ndarray]] = [[] for _ in self.ranks]

        def free(count: int) -> None:
            for piece in pieces:
                piece.append(np.full(count // self.size, -1))

        lanes = _Lanes.of(runs, rows)
        end = 0
        for offset, span in sorted((lanes.apart(run), run.span) for run in runs):
            free(max(offset - end, 0))
            for piece, positions in zip(pieces, self.positions(span), strict=True):
                piece.append(offset + positions)
            end = max(end, offset + span)
        free(max(rows, lanes.end) - end)
        return [lanes.beside(np.concatenate(piece).astype(np.int64), self.size) for piece in pieces]


@dataclass(frozen=True)
class _Lanes:
    """Rows side by side (SBHD): `step` of them for each of `height` positions, from row `first`. With a step of 1 rows
    follow each other."""

    first: int
    step: int
    height: int

    @classmethod
    def of(cls, runs: Items[Run], rows: int) -> _Lanes:
        """Returns the lanes of one side."""
        runs = [run for run in runs if run.span]
        steps = {run.step for run in runs}
        if steps <= {1}:
            return cls(0, 1, 0)
        first, step = min(run.offset for run in runs), max(steps)
        if len(steps) > 1 or step > rows or any(run.offset >= first + step for run in runs):
            raise DeclarationError(
                "rows of a sequence lie apart, and not side by side with those of the others (SBHD), so they cannot "
                "be dealt to ranks"
            )
        return cls(first, step, max(run.span for run in runs))

    @property
    def end(self) -> int:
        """Returns one past the last row of any lane."""
        return self.first + self.step * self.height

    def apart(self, run: Run) -> int:
        """Returns the first row of a run if each lane followed the one before."""
        if self.step == 1:
            return run.offset
        return self.first + ((run.offset - self.first) * self.height if run.span else 0)

    def beside(self, dealt: np.ndarray, ranks: int) -> np.ndarray:
        """Returns the rows of a rank side by side, given those that it would have if lanes followed each other."""
        if self.step == 1 or not self.height:
            return dealt
        inside = (dealt >= self.first) & (dealt < self.end)
        lane, position = np.divmod(dealt - self.first, self.height)
        dealt = np.where(inside, self.first + lane + self.step * position, dealt)
        first, height = self.first // ranks, self.height // ranks
        block = dealt[first : first + self.step * height].reshape(self.step, height)
        return np.concatenate([dealt[:first], block.T.ravel(), dealt[first + block.size :]])


def _named(value: str | dict[str, dict[str, int]]) -> tuple[str, dict[str, int]]:
    """Returns a word of JSON, and what belongs to it."""
    if isinstance(value, str):
        return value, {}
    ((name, more),) = value.items()
    return name, more
