"""Subjects whose ranks are processes: `python -m seamproof.launched` starts one a rank, or `torchrun` does.

    seamproof run --backend "exec:python3 -m seamproof.launched --ranks 4 FILE[:NAME][:OPTION=VALUE,…]"
    seamproof run --backend "exec:torchrun --nproc-per-node 4 -m seamproof.launched FILE[:NAME][:OPTION=VALUE,…]"

Every process loads the subject and is asked everything; rank 0 speaks the protocol. What the processes tell each other
goes through a *hub*, a thread of rank 0. It sees at once where all ranks wait for each other, and where one has died.
Programs of torch have `torch.distributed` for their own messages, and others a `Group`.
"""

from .seat import Group, Seat, here

__all__ = ["Group", "Seat", "here"]
