"""Groups: what the ranks of a recorded call talk through, and what they do together.

A group has `ranks`, its ranks in the world in the group's own order; `rank`, the place of the calling one among them;
and `gather(value)`, which returns the values of all ranks on each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import DeclarationError, OtherRankFailed

T = TypeVar("T")


class Alone:
    """The group of a single rank."""

    ranks, rank = (0,), 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on each of them."""
        return [value]


class TorchGroup:
    """A process group of torch."""

    def __init__(self, dist: Any, group: Any):
        self._dist, self._group = dist, group
        self.ranks, self.rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on each of them."""
        values = [None] * len(self.ranks)
        self._dist.all_gather_object(values, value, group=self._group)
        return values


def group_of(given: Any) -> Any:
    """Returns the group that was given: none, a process group of torch, or an object that is a group already."""
    if given is None:
        return Alone()
    # Whoever has a process group has loaded torch. It is asked for first: torch's own groups have a `gather` too.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and isinstance(given, dist.ProcessGroup):
        return TorchGroup(dist, given)
    missing = [name for name in ("ranks", "rank", "gather") if not hasattr(given, name)]
    if missing:
        raise DeclarationError(
            f"group={given!r} has no {', '.join(missing)}: give a process group of torch that this rank is part of, "
            "or an object with ranks, rank and gather(value)"
        )
    return given


def together(group: Any, work: Callable[[], T]) -> list[T]:
    """Does some work on every rank of a group, and returns the results of all. One that fails makes all ranks raise.

    The errors are gathered with the results: a rank that raised at once would leave the others in a collective.
    """
    results, errors = [], []
    try:
        results.append(work())
    except Exception as error:
        errors.append(error)
    said = group.gather((results, [f"{type(error).__name__}: {error}" for error in errors]))
    if errors:
        # An error knows this frame. If the frame knew the error too, they would keep the group alive behind its end.
        raise errors.pop()
    failed = [f"rank {rank}: {words}" for rank, (_, own) in enumerate(said) for words in own]
    if failed:
        raise OtherRankFailed("; ".join(failed))
    return [value for own, _ in said for value in own]
