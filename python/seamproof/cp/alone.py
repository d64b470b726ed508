"""Ranks for a script that has torch, and not this package: what a repro of a context-parallel program carries.

Ranks are threads of the script over torch's own group of threads, which gets messages here, or the processes that
`torchrun` has started. They run in no drawn order and nothing is late: a failure that needs one of these does not show.
Between threads what is received is NaN until it is waited for.
"""

import os
import queue
import threading

# --- what a script carries begins here
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded


class Arrival(dist._Work):
    """The work of a message."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def wait(self, timeout=None):
        self.finish()
        self.finish = lambda: None
        return True

    def is_completed(self):
        return self.wait()


# Messages of one run, by group, ranks and tag.
LINES = {}


class Threads(threaded.ProcessLocalGroup):
    """torch's group of threads, and messages from one of its ranks to another."""

    def line(self, source, to, tag):
        return LINES.setdefault((self.pg_name, source, to, tag), queue.SimpleQueue())

    def send(self, tensors, to, tag=0):
        self.line(self._rank, to, tag).put(tensors[0].detach().clone())
        return Arrival(lambda: None)

    def recv(self, tensors, source, tag=0):
        line, into = self.line(source, self._rank, tag), tensors[0].detach()
        if into.is_floating_point():
            into.fill_(float("nan"))
        return Arrival(lambda: into.copy_(line.get(timeout=30).view(into.shape)))


if not hasattr(dist.Backend, "REPRO"):
    dist.Backend.register_backend(
        "repro", lambda store, rank, size, timeout: Threads(rank, size), devices=["cpu", "cuda"]
    )


def run_ranks(program, size, ranks):
    """Returns `program(rank)` of these ranks of a world: of all of them, or under torchrun of the rank that asks."""
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != size or len(ranks) != size:
            raise SystemExit(f"this group is ranks {ranks} of {size}: start the script without torchrun")
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return {dist.get_rank(): program(dist.get_rank())}
    results, errors, store = {}, [], dist.HashStore()

    def on_rank(rank):
        try:
            dist.init_process_group("repro", rank=rank, world_size=size, store=store)
            results[rank] = program(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            torch._C._distributed_c10d._unregister_all_process_groups()
            vars(threaded.ThreadLocalWorld._world).pop("world", None)

    LINES.clear()
    threaded.ProcessLocalGroup.reset()
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results


def found_of(p, of_rank, ranks, q):
    """Returns the results of each rank of a group, in order."""
    results = run_ranks(of_rank, p.parallel.world, ranks)
    if "RANK" not in os.environ:
        return [results[rank] for rank in ranks]
    (own,) = results.values()
    on_host = {name: None if x is None else x.detach().cpu() for name, x in vars(own).items()}
    gathered = [None] * p.parallel.world
    dist.all_gather_object(gathered, on_host)
    return [type(own)(**of_rank) for of_rank in gathered]
