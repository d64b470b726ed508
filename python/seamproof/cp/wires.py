"""Wires: what ranks send each other, and when it is read, copied and delivered.

A *parcel* is a tensor that a rank hands over. What it holds is read at once or late, as is drawn. A *line* joins the
messages from one rank to another, the first that was sent to the first that is expected. A *meeting* joins what all
ranks of a group hand over in one collective.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from .turns import Mismatch

# The longest delay of a copy on a GPU, in cycles of its clock.
DELAY_MOST = 100_000


class Parcel:
    """A tensor on its way."""

    def __init__(self, tensor: torch.Tensor, late: bool, delay: int):
        self._tensor = tensor.detach()
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._delay = delay
        self._contents: torch.Tensor | None = None
        self._read: torch.cuda.Event | None = None
        if not late:
            self.read()

    def read(self) -> None:
        """Reads the tensor, unless that was done: its rank may change it from now on."""
        if self._contents is not None:
            return
        if self._stream is None:
            self._contents = self._tensor.clone()
            return
        # On the sender's own stream, behind all that it has started there until now.
        with torch.cuda.stream(self._stream):
            self._contents = self._tensor.clone()
            self._read = self._stream.record_event()

    def contents(self) -> torch.Tensor:
        """Returns what was read, for the current stream to use."""
        self.read()
        if self._read is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._read)
            self._contents.record_stream(stream)
            torch.cuda._sleep(self._delay)
        return self._contents


@dataclass
class Slot:
    """A place for a message, and the parcel that will be in it."""

    parcel: Parcel | None = None


@dataclass
class Line:
    """Messages from one rank to another under one tag; they come in the order in which they were sent."""

    sent: deque[tuple[Parcel, Slot]] = field(default_factory=deque)
    expected: deque[Slot] = field(default_factory=deque)

    def send(self, parcel: Parcel) -> Slot:
        """Returns a slot that is full once somebody expects the message."""
        receipt = Slot()
        self.sent.append((parcel, receipt))
        self._join()
        return receipt

    def expect(self) -> Slot:
        """Returns a slot that is full once somebody has sent the message."""
        slot = Slot()
        self.expected.append(slot)
        self._join()
        return slot

    def _join(self) -> None:
        while self.sent and self.expected:
            parcel, receipt = self.sent.popleft()
            receipt.parcel = self.expected.popleft().parcel = parcel


class Meeting:
    """One collective of a group: what every rank hands over."""

    def __init__(self, size: int):
        self._size = size
        self._kind: Hashable = None
        self._left = 0
        self.parcels: dict[int, list[Parcel]] = {}

    def join(self, rank: int, kind: Hashable, words: str, parcels: list[Parcel]) -> None:
        """Hands over a rank's tensors; `kind` and `words` say what it calls."""
        if self.parcels and self._kind[0] != kind:
            other, said = next(iter(self.parcels)), self._kind[1]
            raise Mismatch(f"rank {other} of the group calls {said} where rank {rank} calls {words}")
        self._kind = (kind, words)
        self.parcels[rank] = parcels

    def is_full(self) -> bool:
        """Whether all ranks have come."""
        return len(self.parcels) == self._size

    def leave(self) -> None:
        """Says that a rank has its results; the last one frees what was handed over."""
        self._left += 1
        if self._left == self._size:
            for parcels in self.parcels.values():
                parcels.clear()

    def missing(self) -> list[int]:
        """Returns the group's ranks that have not come."""
        return [rank for rank in range(self._size) if rank not in self.parcels]

    def contents(self) -> list[list[torch.Tensor]]:
        """Returns what each rank has handed over."""
        return [[parcel.contents() for parcel in self.parcels[rank]] for rank in range(self._size)]


def parcel_of(tensor: torch.Tensor, draw: random.Random, early: bool = False) -> Parcel:
    """Returns a tensor as a parcel that is read when is drawn."""
    late = draw.random() < 0.5 and not early
    return Parcel(tensor, late, draw.randrange(DELAY_MOST))


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody can have sent."""
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        value = float("nan")
    else:
        value = True if kind is torch.bool else torch.iinfo(kind).max
    tensor.detach().fill_(value)
