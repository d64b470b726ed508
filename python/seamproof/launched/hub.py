"""The hub: a thread of rank 0 through which the processes of one subject talk.

It forwards each request to all ranks, carries the messages of programs without torch, and gathers what the ranks have
answered. Since everything passes here in order, it knows who waits for whom: where every rank that has not ended waits,
none ever stops. Where a rank dies, or nothing comes for too long, it says so in the answer and ends the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ..frames import OPEN, RUN

# Seconds for which ranks may go on after another one has failed.
GRACE = 5
# Seconds within which a rank says where it is.
ANSWER = 2
# Seconds between two looks at the clock.
TICK = 0.5

# What a rank has failed of: a key of `Failed`, and a text.
Failure = tuple[str, str]


@dataclass
class Request:
    """A request under way, and what its ranks do."""

    kind: int
    sequence: int
    last: float = field(default_factory=time.monotonic)
    # Messages that were sent and not received yet, by source and destination.
    mail: dict[tuple[int, int], deque[bytes]] = field(default_factory=dict)
    # From which rank one waits for a message.
    waiting: dict[int, int] = field(default_factory=dict)
    # What ranks that have ended their program gave.
    joined: dict[int, bytes | None] = field(default_factory=dict)
    # Ranks that have answered, and of what they failed.
    answers: dict[int, Failure | None] = field(default_factory=dict)
    failure: Failure | None = None
    # Whether a rank was stopped that had no fault of its own.
    is_cut: bool = False

    def blocked(self) -> set[int]:
        """Returns the ranks that wait for others."""
        return set(self.waiting) | set(self.joined)

    def live(self, size: int) -> list[int]:
        """Returns the ranks that have not answered."""
        return [rank for rank in range(size) if rank not in self.answers]


class Hub:
    """The hub of a subject's processes. `connections` lead to the ranks, in order.

    `exits` says how a rank has ended, in words, where that is known. `crash` answers the request under way with a
    failure, and ends this process. With `is_shared_state` programs have channels of their own, such as NCCL's, which a
    rank that fails alone leaves in disorder.
    """

    def __init__(
        self,
        connections: list[Connection],
        patience: float,
        exits: Callable[[int], str | None],
        crash: Callable[[str], None],
    ):
        self._connections = connections
        self._patience, self._exits, self._crash = patience, exits, crash
        self._request: Request | None = None
        self._is_over = False
        self.is_shared_state = False
        self._handlers: dict[str, Callable[..., None]] = {
            "share": self._share,
            "send": self._send,
            "receive": self._receive,
            "join": self._join,
            "answer": self._answer,
            "end": self._end,
        }
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._connections)

    def _serve(self) -> None:
        while not self._is_over:
            for connection in wait(self._connections, TICK):
                self._read(self._connections.index(connection))
            self._look_at_the_clock()

    def _read(self, rank: int) -> None:
        try:
            word, *more = self._connections[rank].recv()
        except (EOFError, OSError):
            if not self._is_over:
                self._has_died(rank)
            return
        if word != "at":
            self._handlers[word](rank, *more)

    def _tell(self, rank: int, *words: Any) -> None:
        try:
            self._connections[rank].send(words)
        except OSError:
            self._has_died(rank)

    # --- what ranks say

    def _share(self, rank: int, kind: int, sequence: int, body: bytes) -> None:
        self._request = Request(kind, sequence)
        for other in range(self.size):
            if other != rank:
                self._tell(other, "frame", kind, sequence, body)

    def _end(self, rank: int) -> None:
        self._is_over = True
        for other in reversed(range(self.size)):
            self._tell(other, "end")

    def _under_way(self, sequence: int) -> Request | None:
        """Returns the request that a message belongs to, which is seen to go on; `None` where it is over."""
        request = self._request
        if request is None or request.sequence != sequence:
            return None
        request.last = time.monotonic()
        return request

    def _send(self, rank: int, sequence: int, to: int, value: bytes) -> None:
        if (request := self._under_way(sequence)) is None:
            return
        if request.waiting.get(to) == rank:
            del request.waiting[to]
            self._tell(to, "value", sequence, value)
        else:
            request.mail.setdefault((rank, to), deque()).append(value)

    def _receive(self, rank: int, sequence: int, source: int) -> None:
        if (request := self._under_way(sequence)) is None:
            return
        if mail := request.mail.get((source, rank)):
            self._tell(rank, "value", sequence, mail.popleft())
            return
        request.waiting[rank] = source
        self._look_for_a_deadlock(request)

    def _join(self, rank: int, sequence: int, value: bytes | None) -> None:
        if (request := self._under_way(sequence)) is None:
            return
        request.joined[rank] = value
        left = [pair for pair, mail in request.mail.items() if mail]
        if len(request.joined) < self.size:
            self._look_for_a_deadlock(request)
        elif left:
            source, to = min(left)
            words = f"a message from rank {source} to rank {to} was sent, and never received"
            self._fail(request, ("Raised", f"Mismatch: all ranks have ended, but {words}"))
        else:
            values = [request.joined.pop(rank) for rank in range(self.size)]
            for other in range(self.size):
                self._tell(other, "value", sequence, values)

    def _answer(self, rank: int, sequence: int, failure: Failure | None) -> None:
        if (request := self._under_way(sequence)) is None:
            return
        request.answers[rank] = failure
        if failure is not None and not failure[1].startswith("OtherRankFailed: "):
            self._fail(request, failure)
        if request.live(self.size):
            self._look_for_a_deadlock(request)
            return
        self._request = None
        self._tell(0, "verdict", self._verdict(request))

    # --- what follows from it

    def _fail(self, request: Request, failure: Failure) -> None:
        """Takes a failure, the first one being the cause, and stops the ranks that wait."""
        request.failure = request.failure or failure
        self._stop(request)

    def _stop(self, request: Request) -> None:
        words = request.failure[1].splitlines()[0]
        for rank in sorted(request.blocked()):
            is_idle = rank in request.joined and request.joined[rank] is None
            request.is_cut |= not is_idle
            self._tell(rank, "stop", request.sequence, words)
        request.waiting.clear()
        request.joined.clear()

    def _look_for_a_deadlock(self, request: Request) -> None:
        """Stops the ranks where every one that has not answered waits."""
        live = request.live(self.size)
        if not live or not set(live) <= request.blocked():
            return
        if request.failure is None:
            said = [f"rank {rank} {self._waits(request, rank)}" for rank in live]
            head = "Deadlock: every rank that has not ended waits, and none for anything that will come"
            request.failure = ("Raised", listed(head, said))
        self._stop(request)

    def _waits(self, request: Request, rank: int) -> str:
        """Returns what a rank waits for, in words; nothing where it does not wait."""
        if rank in request.waiting:
            return f"waits for a message from rank {request.waiting[rank]}, which does not send it"
        if rank in request.joined:
            return "has ended its program" if request.joined[rank] is not None else "is idle"
        return ""

    def _verdict(self, request: Request) -> Failure | None:
        """Returns of what a request failed that every rank has answered."""
        if request.failure is None:
            return None
        key, text = request.failure
        own = {rank: failure for rank, failure in request.answers.items() if failure == request.failure}
        if own and len(own) < self.size:
            first, *rest = text.split("\n")
            text = "\n".join([f"{first} (on rank {', '.join(map(str, sorted(own)))})", *rest])
        is_left_in_disorder = self.is_shared_state and request.is_cut and key == "Raised"
        return ("Crash" if is_left_in_disorder else key, text)

    def _look_at_the_clock(self) -> None:
        request = self._request
        if request is None or (request.kind == OPEN and request.failure is None):
            return
        patience = self._patience if request.failure is None else GRACE
        waited = time.monotonic() - request.last
        if waited > patience:
            self._crash(self._told(request, f"Hang: nothing came for {waited:.0f} s"))

    def _has_died(self, rank: int) -> None:
        words = f"rank {rank} {self._exit(rank)}"
        if self._request is None:
            self._crash(words)
        else:
            self._request.answers.setdefault(rank, None)
            self._crash(self._told(self._request, f"Died: {words}"))

    def _exit(self, rank: int) -> str:
        """Returns how a rank has ended, in words."""
        end = time.monotonic() + ANSWER
        while (words := self._exits(rank)) is None and time.monotonic() < end:
            time.sleep(TICK / 10)
        return words or "has closed its connection"

    def _told(self, request: Request, head: str) -> str:
        """Returns words, the failure that was there before them, and what each rank does."""
        before = [] if request.failure is None else [request.failure[1]]
        live = request.live(self.size)
        places = self._places(live) if request.kind == RUN else {}
        lines = []
        for rank in live:
            known = [self._waits(request, rank), places.get(rank, "does not answer")]
            lines.append(f"rank {rank} {', and '.join(filter(None, known))}")
        return "\n".join([*before, listed(head, lines)])

    def _places(self, live: list[int]) -> dict[int, str]:
        """Asks ranks where they are."""
        found: dict[int, str] = {}
        for rank in live:
            try:
                self._connections[rank].send(("where",))
            except OSError:
                found[rank] = "is gone"
        end = time.monotonic() + ANSWER
        while (left := end - time.monotonic()) > 0 and len(found) < len(live):
            for connection in wait([self._connections[rank] for rank in live if rank not in found], left):
                rank = self._connections.index(connection)
                try:
                    word, *more = connection.recv()
                except (EOFError, OSError):
                    found[rank] = "is gone"
                    continue
                if word == "at":
                    found[rank] = more[0]
        return found


def listed(head: str, lines: list[str]) -> str:
    """Returns a head and what follows from it, so that it can be read as one line too."""
    return ":\n  ".join([head, ";\n  ".join(lines)]) if lines else head
