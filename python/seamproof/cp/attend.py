"""Problems of the judge for context-parallel programs: rows are dealt to ranks, and results put together again.

A *program* gets what one rank has (`Local`) and returns a `Result` with out, lse and gradients of the rank's own rows.
Each sequence is *filled up* behind its last token to a length that the ranks can share, as callers do. What is filled
up is 0 in every input, and in dout as under a loss that leaves it out. What a program returns there goes to the
problem's padding rows, as far as there are some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import launched
from ..dealing import Parallel
from ..errors import DeclarationError
from ..problem import Problem, Run
from ..subject import Result


@dataclass(frozen=True)
class Local:
    """What one rank has of a problem, in arrays of torch or, where ranks are processes, of numpy.

    `q`, `k`, `v` and `dout` are the rank's rows `[rows, heads, dim]`, one sequence behind the other; `dout` is `None`
    in a forward. `spans` are the rows of each sequence that all ranks have together. `rank` is the rank in its group.
    `rows` are the rows of the problem that the rank has of q, and of k and v; −1 where a sequence is filled up.
    """

    problem: Problem
    rank: int
    spans: list[int]
    q: Any
    k: Any
    v: Any
    dout: Any | None
    rows: tuple[np.ndarray, np.ndarray]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.problem.parallel.size

    def group(self) -> Any:
        """Returns the group, which may be a part of the world: one of torch, or a `launched.Group` without torch."""
        parallel, seat = self.problem.parallel, launched.here()
        if seat is not None:
            return seat.group_of(parallel.ranks)
        import torch.distributed as dist

        is_whole = parallel.world == parallel.size
        return dist.group.WORLD if is_whole else dist.new_group(sorted(parallel.ranks))

    def offsets(self, share: int = 1) -> Any:
        """Returns where sequences begin and the last ends, as `cu_seqlens`, in one of `share` equal shares of them."""
        ends = np.cumsum([0, *(span // share for span in self.spans)])
        return self.problem.library.integers(ends.tolist())

    def segments(self) -> dict[str, Any]:
        """Returns ids and positions of the rank's rows, by the names that `Problem` has for those of all rows.

        They are dealt like the rows, and 0 where a sequence is filled up. Positions are those in the whole sequence.
        """
        return self.problem.segments_of(self.rows)

    def sequences(self) -> list[Local]:
        """Returns the rank's rows of each sequence that has any, as problems of one sequence."""
        found, at = [], 0
        for span in self.spans:
            own = slice(at, at + span // self.size)
            dout = None if self.dout is None else self.dout[own]
            rows = (self.rows[0][own], self.rows[1][own])
            part = replace(
                self, spans=[span], q=self.q[own], k=self.k[own], v=self.v[own], dout=dout, rows=rows
            )
            found += [part] if span else []
            at = own.stop
        return found

    def joined(self, parts: list[Result]) -> Result:
        """Returns the results of `sequences`, of which there is at least one, as those of all the rank's rows."""
        whole = Result(None)
        for name, (_, axis) in PLACES.items():
            found = [getattr(part, name) for part in parts]
            if found and all(part is not None for part in found):
                setattr(whole, name, _joined(found, axis))
        return whole


# The side whose rows a result has, 0 for that of queries, and the dimension that they are.
PLACES = {"out": (0, 0), "lse": (0, 1), "dq": (0, 0), "dk": (1, 0), "dv": (1, 0)}

Program = Callable[[Local], Result]
# Returns for each rank which of the rows of all filled-up sequences it has.
Deal = Callable[[Parallel, list[int]], list[np.ndarray]]


def by_sequence(parallel: Parallel, spans: list[int]) -> list[np.ndarray]:
    """Returns the rows of each rank, where each sequence is dealt as the problem says."""
    starts = np.cumsum([0, *spans])[:-1]
    dealt = [start + parallel.positions(span) for start, span in zip(starts, spans, strict=True)]
    return list(np.concatenate([np.zeros((parallel.size, 0), np.int64), *dealt], axis=1))


def as_one(parallel: Parallel, spans: list[int]) -> list[np.ndarray]:
    """Returns the rows of each rank, where the rows of all sequences are cut as if they were one."""
    return np.split(np.arange(sum(spans)), parallel.size)


def attend(
    p: Problem,
    program: Program,
    q: Any,
    k: Any,
    v: Any,
    dout: Any | None = None,
    deal: Deal = by_sequence,
) -> Result:
    """Returns the results of a context-parallel program, in the rows of the problem.

    Sequences must have as many keys as queries. Ranks are threads, in an order that is drawn from the problem's seed,
    or the processes that `seamproof.launched` has started. A problem without rows is not given to the program, as
    nothing of its results could be wrong.
    """
    if not p.library.mutable:
        raise DeclarationError(
            f"attend deals arrays of numpy and torch: declare arrays='numpy' in place of {p.library.name!r}, and make "
            "arrays of your own of what a rank has; it may return them"
        )
    spans = [max(sequence.q.span, sequence.kv.span) for sequence in p.sequences]
    sides = [_rows(p, side, spans, "len") for side in ("q", "kv")]
    places = [_rows(p, side, spans, "span") for side in ("q", "kv")]
    if not sum(spans):
        return Result(*(p.empty(name) for name in ("out", "lse")), None, *map(p.empty, ("dq", "dk", "dv")))
    deals = deal(p.parallel, spans)
    dealt = [[side[rows] for side in sides] for rows in deals]
    # A group of torch has its ranks in their own order.
    ranks = sorted(p.parallel.ranks)

    def of_rank(world_rank: int) -> Result:
        rank = ranks.index(world_rank)
        of_q, of_kv = dealt[rank]
        part = None if dout is None else _taken(dout, of_q)
        taken = (_taken(q, of_q), _taken(k, of_kv), _taken(v, of_kv))
        return program(Local(p, rank, spans, *taken, part, (of_q, of_kv)))

    return _whole(p, _found(p, of_rank, ranks, q), [[side[rows] for side in places] for rows in deals])


def _found(p: Problem, of_rank: Callable[[int], Result], ranks: list[int], q: Any) -> list[Result]:
    """Returns the results of each rank."""
    seat = launched.here()
    if seat is None:
        if isinstance(q, np.ndarray):
            raise DeclarationError(
                "ranks of a program in numpy are processes: --backend 'exec:python3 -m seamproof.launched --ranks N …'"
            )
        from .world import run

        return run(of_rank, p.parallel.world, seed=p.raw["data_seed"], device=str(q.device), present=ranks)
    own = None
    if seat.rank in ranks:
        result = of_rank(seat.rank)
        own = {name: _on_host(getattr(result, name)) for name in PLACES}
    return [Result(**found) for found in seat.join(own) if found is not None]


def _on_host(array: Any) -> Any:
    """Returns an array of torch on the CPU, and any other, of JAX for instance, as one of numpy."""
    if array is None or isinstance(array, np.ndarray):
        return array
    return array.detach().cpu() if hasattr(array, "detach") else np.asarray(array)


def _joined(parts: list[Any], axis: int) -> Any:
    """Returns arrays of numpy or torch one behind the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    import torch

    return torch.cat(parts, axis)


def _rows(p: Problem, side: str, spans: list[int], taken: str) -> np.ndarray:
    """Returns which rows of a side the filled-up sequences have, one behind the other: −1 where they are filled up.

    `taken` is `len` for real rows alone, and `span` for padding rows too.
    """
    rows = [np.zeros(0, np.int64)]
    for sequence, span in zip(p.sequences, spans, strict=True):
        of: Run = getattr(sequence, side)
        if of.step != 1 or sequence.q.len != sequence.kv.len:
            raise DeclarationError(
                f"sequence {sequence.id} has {sequence.q.len} queries, {sequence.kv.len} keys and step {of.step}: "
                "attend needs as many keys as queries and rows that follow each other; declare "
                'lengths={"equal": True} and a packed layout'
            )
        count = getattr(of, taken)
        rows += [of.offset + np.arange(count), np.full(span - count, -1)]
    return np.concatenate(rows)


def _taken(tensor: Any, rows: np.ndarray) -> Any:
    """Returns rows of an input, and 0 for −1."""
    if not len(tensor):
        return _zeros(tensor, len(rows))
    taken = tensor[_indices(tensor, rows)]
    taken[_indices(tensor, np.flatnonzero(rows < 0))] = 0
    return taken


def _zeros(tensor: Any, rows: int) -> Any:
    """Returns rows of 0."""
    shape = (rows, *tensor.shape[1:])
    return np.zeros(shape, tensor.dtype) if isinstance(tensor, np.ndarray) else tensor.new_zeros(shape)


def _indices(tensor: Any, rows: np.ndarray) -> Any:
    """Returns row numbers as what indexes an array."""
    if isinstance(tensor, np.ndarray):
        return rows
    import torch

    return torch.from_numpy(rows).to(tensor.device)


def _whole(p: Problem, found: list[Result], dealt: list[list[np.ndarray]]) -> Result:
    """Returns results of all ranks in the rows of the problem."""
    whole = Result(None)
    for name, (side, axis) in PLACES.items():
        parts = [getattr(result, name) for result in found]
        if any(part is None for part in parts):
            continue
        into = p.empty(name)
        for part, of_rank in zip(parts, dealt, strict=True):
            rows = of_rank[side]
            placed = np.flatnonzero(rows >= 0)
            _check(name, part, into, len(rows), axis)
            before = (slice(None),) * axis
            into[(*before, _indices(into, rows[placed]))] = _moved(part, into)[(*before, _indices(into, placed))]
        setattr(whole, name, into)
    return whole


def _moved(part: Any, into: Any) -> Any:
    """Returns a rank's result where the whole is."""
    return part if isinstance(part, np.ndarray) else part.detach().to(into.device)


def _check(name: str, part: Any, into: Any, rows: int, axis: int) -> None:
    """Raises where a rank's result is none of its rows, or in another format."""
    shape = list(into.shape)
    shape[axis] = rows
    if list(part.shape) != shape or part.dtype != into.dtype:
        raise TypeError(
            f"{name} of a rank is {part.dtype} {list(part.shape)}, not {into.dtype} {shape}: return the rank's own rows"
        )
