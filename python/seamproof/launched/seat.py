"""A seat: what one process of a subject has of the others."""

from __future__ import annotations

import linecache
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from ..errors import OtherRankFailed

# How a process ends whose hub is gone.
ALONE = 1
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_seat: Seat | None = None


class Seat:
    """The place of a process among those of its subject.

    `pending` returns words about what the process's own library waits for; nothing where it cannot say.
    """

    def __init__(self, rank: int, size: int, connection: Connection):
        self.rank, self.size = rank, size
        self.pending: Callable[[], str] = str
        # Returns the process group of these ranks, where the library has such.
        self.group_of: Callable[[Iterable[int]], Any] = lambda ranks: Group(self, tuple(sorted(ranks)))
        # Is told on every process which ranks a problem is for.
        self.prepare: Callable[[Iterable[int]], Any] = lambda ranks: None
        self.frames: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
        self.verdicts: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()
        self._connection, self._lock = connection, threading.Lock()
        self._request = 0
        self._main = threading.main_thread().ident
        threading.Thread(target=self._listen, daemon=True).start()

    def post(self, word: str, *more: Any) -> None:
        """Tells the hub something: numbers, texts and bytes, as torch's tensors would be handed over in its own way."""
        with self._lock:
            self._connection.send((word, *more))

    def begin(self, request: int) -> None:
        """Begins a request. What is still under way for earlier ones counts no more."""
        self._request = request

    def send(self, value: Any, to: int) -> None:
        """Sends a copy of a value to a rank, and waits for nothing."""
        self.post("send", self._request, to, pickle.dumps(value))

    def receive(self, source: int) -> Any:
        """Returns the next value that a rank sends to this one."""
        self.post("receive", self._request, source)
        return pickle.loads(self._next())

    def join(self, value: Any) -> list[Any]:
        """Returns the values of all processes, once each has given one; an idle process gives `None`."""
        self.post("join", self._request, None if value is None else pickle.dumps(value))
        return [None if given is None else pickle.loads(given) for given in self._next()]

    def _next(self) -> Any:
        while True:
            request, is_value, value = self._inbox.get()
            if request != self._request:
                continue
            if is_value:
                return value
            raise OtherRankFailed(value)

    def _listen(self) -> None:
        """Reads what the hub says, until it is gone. The process is of no use then, whatever it does."""
        try:
            while (heard := self._connection.recv())[0] != "end":
                self._hear(*heard)
        except (EOFError, OSError):
            os._exit(ALONE)
        self.frames.put(None)

    def _hear(self, word: str, *more: Any) -> None:
        if word == "frame":
            self.frames.put(more)
        elif word == "verdict":
            self.verdicts.put(*more)
        elif word == "where":
            self.post("at", self._where())
        else:
            self._inbox.put((more[0], word == "value", more[1]))

    def _where(self) -> str:
        """Returns where the main thread is, in words: the innermost line of the program, not of a library."""
        frame = sys._current_frames().get(self._main)
        try:
            pending = self.pending()
        except Exception as error:
            pending = f"nothing is known of its messages ({type(error).__name__}: {error})"
        return "; ".join(filter(None, [_line(frame), pending]))


class Group:
    """Some of the processes, for programs without torch. Ranks in its methods are the group's own, in their order."""

    def __init__(self, seat: Seat, ranks: tuple[int, ...]):
        self._seat, self.ranks = seat, ranks
        self.rank = ranks.index(seat.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def send(self, value: Any, to: int) -> None:
        """Sends a copy of a value to a rank, and waits for nothing."""
        self._seat.send(value, self.ranks[to])

    def receive(self, source: int) -> Any:
        """Returns the next value that a rank sends to this one."""
        return self._seat.receive(self.ranks[source])

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on each of them."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.send(value, rank)
        return [value if rank == self.rank else self.receive(rank) for rank in range(self.size)]


def here() -> Seat | None:
    """Returns the seat of this process; `None` where it was not launched as one of several."""
    return _seat


def take(seat: Seat) -> None:
    """Makes a seat that of this process."""
    global _seat
    _seat = seat


def _line(frame: FrameType | None) -> str:
    """Returns the innermost frame of a program; that of a library where there is none."""
    innermost = frame
    while frame is not None and ("site-packages" in frame.f_code.co_filename or _is_own(frame)):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"is in {os.path.basename(file)}:{line}, {frame.f_code.co_name}: {text}".rstrip(": ")


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    is_adapter = file.startswith(os.path.join(_OWN, "adapters"))
    return file.startswith((_OWN, os.path.dirname(threading.__file__), "<")) and not is_adapter
