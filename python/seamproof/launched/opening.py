"""Opening a subject in one of its processes: what it declares there, and what torch has to know."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from collections.abc import Iterable
from typing import Any

from ..errors import DeclarationError, NotHere
from ..loading import load
from ..problem import Problem
from ..subject import Subject
from .gloo import carry_own_messages
from .hub import Hub
from .seat import Seat

# Variable by which torch keeps what NCCL does, and how many calls.
RECORDER, RECORDED = "TORCH_FR_BUFFER_SIZE", "2000"
# Calls of NCCL that are told of a rank that hangs.
TOLD_MOST = 8


class Launched(Subject):
    """A subject whose ranks are processes, which one worker has together."""

    def ready(self) -> dict[str, Any]:
        """Returns the answer to `Open`. A second worker would need as many devices again."""
        return super().ready() | {"devices": 1}


def opened(target: str, seat: Seat, request: dict[str, Any], hub: Hub | None = None) -> Subject:
    """Returns the subject of a request, for this process."""
    place, _, last = target.rpartition(":")
    options = dict(pair.split("=", 1) for pair in last.split(",")) if "=" in last else {}
    local = int(os.environ.get("LOCAL_RANK", seat.rank))
    subject = load(place if options else target, options, request | {"device": local})
    if subject.library_name == "torch":
        _join_torch(seat, subject)
        if hub is not None:
            hub.is_shared_state = True
    fields = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)}
    fields["declared"] = narrowed(subject.declared, seat.size)

    def call(p: Problem, *inputs: Any, **more: Any) -> Any:
        # A smaller world gets idle ranks.
        p = dataclasses.replace(p, parallel=dataclasses.replace(p.parallel, world=seat.size))
        seat.prepare(p.parallel.ranks)
        return subject.call(p, *inputs, **more)

    return Launched(**fields | {"call": call})


def narrowed(declared: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns a declaration with the groups and the worlds that some processes can be.

    A subject that does not take a part of its world is given the whole of it.
    """
    declared = copy.deepcopy(declared)
    parallel = declared["table"].setdefault("parallel", {})
    least, most = parallel.get("ranks_least", 1), parallel.get("ranks_most", size)
    several = [name for name in parallel.get("algorithms", ["single"]) if name != "single"]
    if not several:
        raise DeclarationError("it takes no algorithm of several ranks: declare parallel.algorithms")
    is_whole = not parallel.get("sub_groups", False)
    if size < least or (is_whole and size > most):
        raise DeclarationError(f"it takes {least} to {most} ranks: start as many, and not {size}")
    if is_whole and size > 1:
        parallel |= {"algorithms": several, "ranks_least": size}
    parallel["ranks_most"] = min(most, size)
    parallel["world_most"] = min(parallel.get("world_most", size), size)
    return declared


def _join_torch(seat: Seat, subject: Subject) -> None:
    """Makes this process a rank of `torch.distributed`: over NCCL on GPUs, over gloo on a CPU."""
    import torch
    import torch.distributed as dist

    on_gpu = subject.open().device.type == "cuda"
    if on_gpu and torch.cuda.device_count() < seat.size:
        raise NotHere(
            f"{seat.size} ranks want as many GPUs, and there are {torch.cuda.device_count()}: python:FILE has ranks "
            "that are threads on one"
        )
    if not dist.is_initialized():
        os.environ.setdefault(RECORDER, RECORDED)
        host = "127.0.0.1"
        own = (
            dist.TCPStore(host, 0, seat.size, is_master=True, wait_for_workers=False)
            if seat.rank == 0
            else None
        )
        port = seat.join(own.port if own else 0)[0]
        store = own or dist.TCPStore(host, port, seat.size, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size)
        if not on_gpu:
            carry_own_messages()
    groups: dict[tuple[int, ...], Any] = {tuple(range(seat.size)): dist.group.WORLD}

    def group_of(ranks: Iterable[int]) -> Any:
        # A group of torch has its ranks in their own order, and is made once: NCCL's cost memory.
        ranks = tuple(sorted(ranks))
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))
        return groups[ranks]

    # All processes make a group together, those too that are not in it.
    seat.group_of = seat.prepare = group_of
    if on_gpu:
        seat.pending = _calls_of_nccl


def _calls_of_nccl() -> str:
    """Returns the calls of NCCL that have not ended."""
    from torch._C import _distributed_c10d as c10d

    trace = pickle.loads(c10d._dump_nccl_trace())
    calls = [
        f"{entry['profiling_name']} {entry['state']}"
        for entry in trace.get("entries", [])
        if entry["state"] != "completed"
    ]
    return f"NCCL: {', '.join(calls[:TOLD_MOST])}" if calls else ""
