"""Problems of the judge for context-parallel programs: rows are dealt to ranks, and results put together again.

A *program* gets what one rank has (`Local`) and returns a `Result` with out, lse and gradients of the rank's own rows.
Rows of padding are dealt too, as a caller deals them who fills sequences up to what the ranks can share; their dout is
0, as under a loss that leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..dealing import Parallel
from ..problem import Problem
from ..subject import Result
from .world import run


@dataclass(frozen=True)
class Local:
    """What one rank has of a problem.

    `q`, `k`, `v` and `dout` are the rank's rows `[rows, heads, dim]`, one sequence behind the other; `dout` is `None` in
    a forward. `spans_q` and `spans_kv` are the rank's rows of each sequence. `rank` is its place in the group, whose
    world ranks are `problem.parallel.ranks`.
    """

    problem: Problem
    rank: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    spans_q: list[int]
    spans_kv: list[int]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.problem.parallel.size

    def group(self) -> Any:
        """Returns the group as a process group: the world's own, where it is the whole world."""
        parallel = self.problem.parallel
        if parallel.world == parallel.size and parallel.ranks == tuple(range(parallel.size)):
            return torch.distributed.group.WORLD
        return torch.distributed.new_group(list(parallel.ranks))

    def offsets(self, side: str = "q") -> torch.Tensor:
        """Returns where the sequences of a side begin in the rank's rows, and where the last ends, as `cu_seqlens`."""
        spans = self.spans_q if side == "q" else self.spans_kv
        return torch.tensor([0, *spans], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.q.device)

    def sequences(self) -> list[Local]:
        """Returns the rank's part of each sequence that has rows, as problems of one sequence."""
        found, at_q, at_kv = [], 0, 0
        for span_q, span_kv in zip(self.spans_q, self.spans_kv, strict=True):
            q, kv = slice(at_q, at_q + span_q), slice(at_kv, at_kv + span_kv)
            dout = None if self.dout is None else self.dout[q]
            part = Local(
                self.problem, self.rank, self.q[q], self.k[kv], self.v[kv], dout, [span_q], [span_kv]
            )
            found += [part] if span_q and span_kv else []
            at_q, at_kv = at_q + span_q, at_kv + span_kv
        return found


Program = Callable[[Local], Result]


def attend(
    p: Problem,
    program: Program,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None = None,
    parallel: Parallel | None = None,
) -> Result:
    """Returns the results of a context-parallel program, in the rows of the problem.

    The order of the ranks is drawn from the problem's seed. `parallel` deals the rows in another way than the problem
    says, for a program that needs its own.
    """
    parallel = parallel or p.parallel
    rows_q, rows_kv = (
        [rows[rows >= 0] for rows in parallel.dealt(side.runs, side.rows)] for side in (p.q, p.kv)
    )
    if dout is not None:
        real = torch.from_numpy(p.q.real()).to(dout.device)
        dout = torch.where(real[:, None, None], dout, torch.zeros_like(dout))
    index_q, index_kv = (
        [torch.from_numpy(rows).to(q.device) for rows in side] for side in (rows_q, rows_kv)
    )
    ordered = [sorted(side.runs, key=lambda run: (run.offset, run.span)) for side in (p.q, p.kv)]
    spans_q, spans_kv = ([run.span // parallel.size for run in runs] for runs in ordered)

    def of_rank(world_rank: int) -> Result:
        rank = parallel.ranks.index(world_rank)
        of_q, of_kv = index_q[rank], index_kv[rank]
        part = None if dout is None else dout[of_q]
        return program(Local(p, rank, q[of_q], k[of_kv], v[of_kv], part, spans_q, spans_kv))

    device = str(q.device)
    seed = p.raw["data_seed"]
    found = run(of_rank, parallel.world, seed=seed, device=device, present=parallel.ranks)
    return _whole(p, found, index_q, index_kv)


def _whole(
    p: Problem, found: list[Result], index_q: list[torch.Tensor], index_kv: list[torch.Tensor]
) -> Result:
    """Returns results of all ranks in the rows of the problem."""
    places = {"out": (index_q, 0), "lse": (index_q, 1), "dq": (index_q, 0), "dk": (index_kv, 0)}
    places["dv"] = places["dk"]
    whole = Result(None)
    for name, (index, axis) in places.items():
        parts = [getattr(result, name) for result in found]
        if any(part is None for part in parts):
            continue
        into = p.empty(name)
        for part, rows in zip(parts, index, strict=True):
            into.index_copy_(axis, rows, _checked(name, part, rows, axis).to(into.dtype))
        setattr(whole, name, into)
    return whole


def _checked(name: str, part: torch.Tensor, rows: torch.Tensor, axis: int) -> torch.Tensor:
    if part.shape[axis] != len(rows):
        raise RuntimeError(
            f"{name} of a rank has shape {list(part.shape)}, where its dimension {axis} has {len(rows)} rows"
        )
    return part.detach()
