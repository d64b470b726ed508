"""What ranks of one run share, and the seat of the thread that is a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .turns import Turns
from .wires import Line, Meeting


@dataclass
class World:
    """What the ranks of one run share."""

    size: int
    turns: Turns
    lines: dict[tuple[Any, ...], Line] = field(default_factory=dict)
    meetings: dict[tuple[str, int], Meeting] = field(default_factory=dict)

    def line(self, group: str, source: int, to: int, tag: int) -> Line:
        """Returns the line from one rank of a group to another."""
        return self.lines.setdefault((group, source, to, tag), Line())

    def meeting(self, group: str, number: int, size: int) -> Meeting:
        """Returns a group's collective by its number."""
        return self.meetings.setdefault((group, number), Meeting(size))

    def unfinished(self) -> str | None:
        """Returns words about what somebody still expects, where all ranks have ended."""
        for (group, source, to, _), line in self.lines.items():
            if line.sent or line.expected:
                what = "sent, and never received" if line.sent else "received, and never sent"
                return f"a message from rank {source} to rank {to} of group {group!r} was {what}"
        for (group, number), meeting in self.meetings.items():
            if not meeting.is_full():
                missing = ", ".join(map(str, meeting.missing()))
                return f"call {number} of group {group!r} was never made by its rank {missing}"
        return None


@dataclass(frozen=True)
class Seat:
    """A rank's place in its world."""

    rank: int
    world: World

    @property
    def turns(self) -> Turns:
        """The world's turns."""
        return self.world.turns

    def wait(self, ready: Callable[[], bool] = lambda: True, words: Callable[[], str] = lambda: "") -> None:
        """Gives the turn up until a condition holds."""
        self.turns.wait(self.rank, ready, words)


_seats = threading.local()


def seated(seat: Seat | None) -> None:
    """Makes the calling thread a rank, or none."""
    _seats.seat = seat


def here() -> Seat:
    """Returns the seat of the calling thread."""
    seat = getattr(_seats, "seat", None)
    if seat is None:
        raise RuntimeError(
            "a group of seamproof.cp was called by a thread that is no rank: run backward in the thread of the rank"
        )
    return seat
