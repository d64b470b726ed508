"""A world of ranks: threads, each with its own seat, stream and state of `torch.distributed`.

Threads stay from run to run (`threads`); seats, streams and that state are a run's own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from .group import register
from .places import Seat, World, seated
from .threads import thread_of
from .turns import Deadlock, Stopped, Turns

# One world runs at a time: torch's own registers are the process's.
_running = threading.Lock()


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

        ends = [thread_of(rank).start(partial(_guarded, of_rank, rank, world.turns)) for rank in numbers]
        world.turns.begin()
        for end in ends:
            end.wait()
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
    seated(seat)
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        # Backward runs in this thread, whose rank it is.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if began is not None:
            stack.enter_context(torch.cuda.device(torch.device(device)))
            stream = torch.cuda.Stream()
            stream.wait_event(began)
            stack.enter_context(torch.cuda.stream(stream))
        dist.init_process_group("seamproof", rank=seat.rank, world_size=seat.world.size, store=store)
        yield


def _forget() -> None:
    """Takes the run's state of `torch.distributed` and its seat from the calling thread."""
    torch._C._distributed_c10d._unregister_all_process_groups()
    vars(ThreadLocalWorld._world).pop("world", None)
    seated(None)
