"""Turns: which of several threads computes.

One rank at a time holds the *turn*. It gives it up where it waits, until a condition holds. Only the holder changes
anything that ranks share, so conditions need no lock, and a seed says everything about the order. Where no condition
holds, none ever will: that is a deadlock, found without a clock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Deadlock(RuntimeError):
    """Ranks that wait for each other, or for a rank that has ended."""


class Mismatch(RuntimeError):
    """Calls of several ranks that belong together and do not go together."""


class Stopped(Exception):
    """The end of a rank because another one has failed."""


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for, as a condition and in words."""

    ready: Callable[[], bool]
    words: Callable[[], str]


class Turns:
    """The turn of some ranks, and their common fate: the first error ends all."""

    def __init__(self, ranks: Iterable[int], seed: int):
        self.random = random.Random(seed)
        self.error: BaseException | None = None
        # Ranks in the order of their turns.
        self.order: list[int] = []
        started = Waiting(lambda: True, lambda: "has not begun")
        self._waiting = dict.fromkeys(ranks, started)
        self._gates = {rank: threading.Semaphore(0) for rank in self._waiting}

    def begin(self) -> None:
        """Gives the first turn, from outside."""
        self._give()

    def take(self, rank: int) -> None:
        """Waits for the turn that a rank was promised."""
        self._gates[rank].acquire()
        if self.error is not None:
            raise Stopped

    def wait(
        self, rank: int, ready: Callable[[], bool] = lambda: True, words: Callable[[], str] = lambda: ""
    ) -> None:
        """Gives the turn up until a condition holds and the rank is drawn."""
        self._waiting[rank] = Waiting(ready, words)
        self._give()
        self.take(rank)

    def end(self, error: BaseException | None = None) -> None:
        """Gives the turn up for good; an error ends the other ranks too."""
        self.error = self.error or error
        self._give()

    def _give(self) -> None:
        able = [rank for rank, waiting in self._waiting.items() if self.error or waiting.ready()]
        if not able and self._waiting:
            self.error = Deadlock(self._deadlock())
            able = list(self._waiting)
        if able:
            rank = self.random.choice(sorted(able))
            del self._waiting[rank]
            self.order.append(rank)
            self._gates[rank].release()

    def _deadlock(self) -> str:
        lines = [f"rank {rank} {waiting.words()}" for rank, waiting in sorted(self._waiting.items())]
        ended = sorted(set(self._gates) - set(self._waiting))
        if ended:
            lines.append(f"ended: rank {', '.join(map(str, ended))}")
        return "\n  ".join(
            ["every rank that has not ended waits, and none for anything that will come:", *lines]
        )
