"""A world of ranks: threads, each with its own seat, stream and state of `torch.distributed`."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from .turns import Deadlock, Stopped, Turns
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
# One world runs at a time: torch's own registers are the process's.
_running = threading.Lock()


def here() -> Seat:
    """Returns the seat of the calling thread."""
    seat = getattr(_seats, "seat", None)
    if seat is None:
        raise RuntimeError(
            "a group of seamproof.cp was called by a thread that is no rank: run backward in the thread of the rank"
        )
    return seat


def run(
    program: Callable[[int], Any],
    ranks: int,
    *,
    seed: int = 0,
    device: str = "cpu",
    present: Iterable[int] | None = None,
) -> list[Any]:
    """Runs `program(rank)` on every rank of a world of `ranks`, and returns their results by rank.

    In it `torch.distributed` is initialised with this world. `seed` draws the order of turns and the delays. `present`
    are the ranks that run, in a world of which the others stay idle; results are theirs, in that order. The first
    error of a rank is raised, and a `Deadlock` where ranks wait in vain.
    """
    # The group calls this module.
    from .group import register

    register()
    numbers = list(range(ranks) if present is None else present)
    world = World(ranks, Turns(numbers, seed))
    results: dict[int, Any] = {}
    with _running, _state_of_threads():
        store = dist.HashStore()
        began = torch.cuda.current_stream().record_event() if device.startswith("cuda") else None

        def of_rank(rank: int) -> None:
            with _rank_of(Seat(rank, world), store, device, began):
                results[rank] = program(rank)

        threads = [
            threading.Thread(target=_guarded, args=(of_rank, rank, world.turns), daemon=True)
            for rank in numbers
        ]
        for thread in threads:
            thread.start()
        world.turns.begin()
        for thread in threads:
            thread.join()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    left = world.unfinished()
    if world.turns.error is None and left is not None:
        raise Deadlock(f"all ranks have ended, but {left}")
    if world.turns.error is not None:
        raise world.turns.error
    return [results[rank] for rank in numbers]


def _guarded(of_rank: Callable[[int], None], rank: int, turns: Turns) -> None:
    """Runs a rank between its first turn and its last."""
    try:
        turns.take(rank)
        of_rank(rank)
    except Stopped:
        turns.end()
    except BaseException as error:
        if sys.version_info >= (3, 11):
            error.add_note(f"on rank {rank}")
        turns.end(error)
    else:
        turns.end()


@contextlib.contextmanager
def _state_of_threads() -> Iterator[None]:
    """Gives each thread a `torch.distributed` of its own."""
    isolated = torch._C._distributed_c10d._set_thread_isolation_mode
    before, c10d._world = c10d._world, ThreadLocalWorld()
    isolated(True)
    try:
        yield
    finally:
        isolated(False)
        c10d._world = before


@contextlib.contextmanager
def _rank_of(seat: Seat, store: dist.Store, device: str, began: Any) -> Iterator[None]:
    """Makes the calling thread a rank."""
    _seats.seat = seat
    with contextlib.ExitStack() as stack:
        # Backward runs in this thread, whose rank it is.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if began is not None:
            stack.enter_context(torch.cuda.device(torch.device(device)))
            stream = torch.cuda.Stream()
            stream.wait_event(began)
            stack.enter_context(torch.cuda.stream(stream))
        dist.init_process_group("seamproof", rank=seat.rank, world_size=seat.world.size, store=store)
        yield
