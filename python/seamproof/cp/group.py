"""The process group: what `torch.distributed` calls, between threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .places import here
from .wires import parcel_of, poison

Tensors = list[torch.Tensor]
# Returns a rank's results from what every rank has handed over.
Results = Callable[[list[Tensors]], Tensors]


class Arrival(dist._Work):
    """The work of a call: waiting for it delivers its results."""

    def __init__(self, ready: Callable[[], bool], words: Callable[[], str], deliver: Callable[[], None]):
        super().__init__()
        self._ready, self._words, self._deliver = ready, words, deliver
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the other ranks, and delivers."""
        if not self._is_done:
            here().wait(self._ready, self._words)
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the results are there. Asking gives the turn up, and delivers what has come."""
        # A program may poll in place of waiting. Nothing moves while its rank holds the turn, so each question lets the
        # others go on. After a yes the program uses its tensors and never waits, as NCCL allows, so a yes delivers.
        # Gloo ends messages in wait() alone, and polling them hangs there. That is gloo's own way, and not imitated.
        if not self._is_done:
            here().wait()
            if self._ready():
                self._finish()
        return self._is_done

    def is_success(self) -> bool:
        """Whether the results were delivered: what fails raises an error."""
        return self._is_done

    def missing(self) -> str | None:
        """Returns what is still waited for, in words; `None` where nothing is."""
        return None if self._is_done or self._ready() else self._words()

    def _finish(self) -> None:
        with torch.no_grad():
            self._deliver()
        self._is_done = True

    def synchronize(self) -> None:
        """Waits, as `wait`."""
        self.wait()

    def result(self) -> Tensors:
        """Returns nothing: results are in the caller's tensors."""
        return []


class Group(dist.ProcessGroup):
    """A group of ranks that are threads. Ranks in its methods are the group's own."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._calls = 0

    # --- what torch asks of a group

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """Returns the rank that calls."""
        return self._rank

    @property
    def pg_name(self) -> str:
        """Name of the group, the same on each of its ranks."""
        return c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """Name of the group, the same on each of its ranks."""
        return self.pg_name

    def _get_backend(self, device: torch.device) -> Group:
        """Returns what works on a device: the group itself."""
        return self

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return BACKEND

    def __repr__(self) -> str:
        return f"Group(rank {self._rank} of {self._size})"

    # --- messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Arrival:
        """Sends a tensor."""
        seat = here()
        seat.wait()
        parcel = parcel_of(tensors[0], seat.turns.random)
        receipt = seat.world.line(self.pg_name, self._rank, dst, tag).send(parcel)
        words = f"sends {_shape(tensors[0])} to rank {self._of_world()[dst]}, which does not receive it"
        return Arrival(lambda: receipt.parcel is not None, lambda: words, parcel.read)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Arrival:
        """Receives a tensor."""
        seat = here()
        seat.wait()
        (tensor,) = tensors
        poison(tensor)
        slot = seat.world.line(self.pg_name, src, self._rank, tag).expect()
        words = f"receives {_shape(tensor)} from rank {self._of_world()[src]}, which does not send it"

        def deliver() -> None:
            _fill(tensor, slot.parcel.contents())

        return Arrival(lambda: slot.parcel is not None, lambda: words, deliver)

    # --- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Arrival:
        """Reduces tensors over all ranks."""
        reduce = self._reduction(opts)

        def results(all_ranks: list[Tensors]) -> Tensors:
            return [reduce(list(of_all)) for of_all in zip(*all_ranks, strict=True)]

        return self._meet("all_reduce", tensors, tensors, results)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Arrival:
        """Reduces tensors over all ranks."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Arrival:
        """Copies a rank's tensors to all."""
        root = opts.rootRank
        is_root = self._rank == root
        given, filled = (tensors, []) if is_root else ([], tensors)
        return self._meet("broadcast", given, filled, lambda of: [] if is_root else of[root], root=root)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Arrival:
        """Gathers a tensor of each rank on all ranks."""
        return self._meet("all_gather", inputs, outputs[0], lambda of: [given for (given,) in of])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Arrival:
        """Gathers a tensor of each rank in one on all ranks."""
        parts = list(output.detach().view(-1).chunk(self._size))
        return self._meet(
            "all_gather_into_tensor", [given], parts, lambda of: [part.reshape(-1) for (part,) in of]
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Arrival:
        """Reduces tensors over all ranks, one for each rank."""
        return self._reduce_scatter("reduce_scatter", outputs[0], inputs[0], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Arrival:
        """Reduces a tensor over all ranks, a part for each rank."""
        parts = list(given.contiguous().view(-1).chunk(self._size))
        return self._reduce_scatter("reduce_scatter_tensor", output, parts, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Arrival:
        """Sends each rank a tensor of its own."""
        return self._meet("all_to_all", inputs, outputs, lambda of: [given[self._rank] for given in of])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Arrival:
        """Sends each rank a part of a tensor."""
        return self.alltoall(self._split(output.detach(), output_sizes), self._split(given, input_sizes))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Arrival:
        """Sends each rank one of a rank's tensors."""
        root = opts.rootRank
        given = inputs[0] if self._rank == root else []
        return self._meet("scatter", given, outputs, lambda of: [of[root][self._rank]], root=root)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Arrival:
        """Gathers a tensor of each rank on one."""
        root = opts.rootRank
        filled = outputs[0] if self._rank == root else []
        return self._meet("gather", inputs, filled, lambda of: [given for (given,) in of], root=root)

    def barrier(self, opts: Any = None) -> Arrival:
        """Waits for all ranks."""
        return self._meet("barrier", [], [], lambda of: [])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Arrival:
        """Gathers several tensors, each in one."""
        return _together(map(self.all_gather_single, outputs, inputs))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Arrival:
        """Reduces several tensors, a part of each for each rank."""
        pairs = zip(outputs, inputs, strict=True)
        return _together(self.reduce_scatter_single(output, given, opts) for output, given in pairs)

    # The names that these have in older versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- how

    def _meet(
        self, kind: str, given: Tensors, filled: Tensors, results: Results, root: int | None = None
    ) -> Arrival:
        seat = here()
        seat.wait()
        self._calls += 1
        number, name, of_world = self._calls, self.pg_name, self._of_world()
        meeting = seat.world.meeting(name, number, self._size)
        shared = {tensor.untyped_storage().data_ptr() for tensor in filled}
        parcels = [
            parcel_of(tensor, seat.turns.random, tensor.untyped_storage().data_ptr() in shared)
            for tensor in given
        ]
        words = kind if root is None else f"{kind} from rank {root}"
        meeting.join(self._rank, (kind, root), f"{words} as call {number} of group {name!r}", parcels)
        for tensor in filled:
            poison(tensor)

        def deliver() -> None:
            for tensor, result in zip(filled, results(meeting.contents()) if filled else [], strict=True):
                _fill(tensor, result)
            for parcel in parcels:
                parcel.read()
            meeting.leave()

        def waits() -> str:
            missing = ", ".join(str(of_world[rank]) for rank in meeting.missing())
            return f"is in {words}, call {number} of group {name!r}, without rank {missing}"

        return Arrival(meeting.is_full, waits, deliver)

    def _reduce_scatter(self, kind: str, output: torch.Tensor, inputs: Tensors, opts: Any) -> Arrival:
        reduce = self._reduction(opts)

        def results(all_ranks: list[Tensors]) -> Tensors:
            return [reduce([given[self._rank] for given in all_ranks]).view_as(output)]

        return self._meet(kind, inputs, [output], results)

    def _reduction(self, opts: Any) -> Callable[[Tensors], torch.Tensor]:
        """Returns the sum over ranks, or another reduction: one rank after the other, in the tensors' own format."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        name = str(getattr(operation, "op", operation)).rpartition(".")[2]
        if name not in REDUCTIONS:
            raise NotImplementedError(f"{name} is no reduction of this group; use {', '.join(REDUCTIONS)}")
        # All ranks add up in the same order, which differs from call to call.
        first = self._calls % self._size

        def reduce(tensors: Tensors) -> torch.Tensor:
            total, *others = tensors[first:] + tensors[:first]
            for other in others:
                total = REDUCTIONS[name](total, other)
            return total / self._size if name == "AVG" else total

        return reduce

    def _split(self, tensor: torch.Tensor, sizes: list[int] | None) -> Tensors:
        if not sizes:
            sizes = [tensor.shape[0] // self._size] * self._size
        return list(tensor.split(list(sizes)))

    def _of_world(self) -> list[int]:
        """Returns the group's ranks as ranks of the world. Only the rank itself can ask torch for them."""
        return dist.get_process_group_ranks(self)


BACKEND = "seamproof"
REDUCTIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _together(works: Iterable[Arrival]) -> Arrival:
    """Returns several works as one."""
    works = list(works)

    def missing() -> list[str]:
        return [words for words in (work.missing() for work in works) if words is not None]

    def deliver() -> None:
        for work in works:
            work.wait()

    return Arrival(lambda: not missing(), lambda: "; ".join(missing()), deliver)


def _fill(tensor: torch.Tensor, contents: torch.Tensor) -> None:
    if tensor.numel() != contents.numel() or tensor.dtype != contents.dtype:
        raise RuntimeError(
            f"{_shape(contents)} was sent, where {_shape(tensor)} is expected: the ranks' tensors differ"
        )
    tensor.detach().copy_(contents.view(tensor.shape))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _create(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(rank, size)


def register() -> None:
    """Makes the backend known to torch, once."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
