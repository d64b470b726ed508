"""Context-parallel programs of torch on one device: `torch.distributed` between threads.

`run` starts a *world*: each rank is a thread of this process, on a GPU with a stream of its own. Within it
`torch.distributed` works as between processes: groups and parts of groups, collectives, messages, device meshes,
`torch.autograd`. What a program sends is copied.

- *Turns.* One rank computes at a time. Its turn ends where it calls a group or waits, and the next one is drawn from
  the seed: the same seed gives the same order again.
- *Delays.* What is sent is read when it is sent, or as late as somebody waits for it, as is drawn. A program that
  changes it meanwhile sends something else.
- *Poison.* What is received is NaN until the program waits for it (the largest number, where there is no NaN).
- *Deadlock.* Where every rank waits, nobody ever stops waiting. `Deadlock` says who waits for whom.

`attend` runs such a program for a problem of the judge: it deals the rows to the ranks and puts them together again.

```python
def program(rank):
    mine = torch.full((4,), float(rank))
    torch.distributed.all_reduce(mine)
    return mine

sums = seamproof.cp.run(program, ranks=4, seed=7)
```
"""

from typing import Any

from .attend import Local, as_one, attend, by_sequence
from .turns import Deadlock, Mismatch


def __getattr__(name: str) -> Any:
    """Returns `run`, which loads torch: `attend` works without it where ranks are processes."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .world import run

    return run


__all__ = ["Deadlock", "Local", "Mismatch", "as_one", "attend", "by_sequence", "run"]
