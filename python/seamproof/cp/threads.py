"""Threads that stay: libraries keep things for each thread, and what is made for a thread that ends may be lost.

TransformerEngine makes a handle of cuDNN for each thread that calls it and never gives it back, so that a new thread
for every rank of every run fills the GPU's memory. A rank has the thread of its number in all runs of a process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable


class RankThread:
    """A thread that does one piece of work after the other."""

    def __init__(self, rank: int):
        self._work: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"rank {rank}", daemon=True).start()

    def start(self, work: Callable[[], None]) -> threading.Event:
        """Begins work that raises nothing, and returns the event of its end."""
        ended = threading.Event()
        self._work.put((work, ended))
        return ended

    def _run(self) -> None:
        while True:
            work, ended = self._work.get()
            try:
                work()
            finally:
                # What the work holds is let go before whoever waits goes on.
                del work
                ended.set()
                del ended


_threads: dict[int, RankThread] = {}
# A forked process has none of them.
os.register_at_fork(after_in_child=_threads.clear)


def thread_of(rank: int) -> RankThread:
    """Returns the thread of a rank, which begins where there is none."""
    if rank not in _threads:
        _threads[rank] = RankThread(rank)
    return _threads[rank]
