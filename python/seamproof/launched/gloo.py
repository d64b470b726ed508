"""Messages of a rank to itself over gloo.

NCCL carries such messages where a batch has both ends, and rings use that: a ring of one rank sends to itself. gloo has
no connection of a rank to itself, and fails. What a batch sends to its own rank is copied here, in order.
"""

from __future__ import annotations

from typing import Any


def carry_own_messages() -> None:
    """Makes `torch.distributed.batch_isend_irecv` of this process take messages of a rank to itself."""
    import torch
    import torch.distributed as dist

    between_ranks = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        own = [op for op in p2p_op_list if op.peer == dist.get_rank()]
        sent = [op.tensor for op in own if op.op is dist.isend]
        received = [op.tensor for op in own if op.op is dist.irecv]
        if len(sent) != len(received):
            raise ValueError(
                f"a rank sends {len(sent)} messages to itself in a batch, and receives {len(received)} of them"
            )
        with torch.no_grad():
            for tensor, place in zip(sent, received, strict=True):
                if tensor.shape != place.shape or tensor.dtype != place.dtype:
                    raise ValueError(
                        f"a rank sends itself {tensor.dtype} {list(tensor.shape)}, and receives {place.dtype} "
                        f"{list(place.shape)}"
                    )
                place.copy_(tensor)
        others = [op for op in p2p_op_list if op not in own]
        return between_ranks(others) if others or not own else []

    dist.batch_isend_irecv = batch_isend_irecv
