"""Recordings of torch's `scaled_dot_product_attention`, which says itself what it computes.

torch's own context parallelism has it too: inside of `context_parallel` a program calls the same function, with the
rank's own rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .recorder import Recorder, record


@contextlib.contextmanager
def record_torch(
    directory: str | Path,
    *,
    group: Any = None,
    balance: str = "contiguous",
    algorithm: str = "ring",
    padding: Mapping[str, str] | None = None,
    arithmetic: Mapping[str, Any] | None = None,
    name: str = "scaled_dot_product_attention of torch",
    step: int = 0,
    layer: str = "0",
    note: str = "",
) -> Iterator[Recorder]:
    """Records the first call of `torch.nn.functional.scaled_dot_product_attention`, as `seamproof.record` does.

    Mask and scale come from the call. Whoever has imported the function by its own name before is not seen: then it is
    `rec(scaled_dot_product_attention)` of `seamproof.record`. torch's load balancing deals rows as `dual-chunk`.
    """
    import torch.nn.functional as functional

    own = functional.scaled_dot_product_attention
    recorder = record(
        directory,
        group=group,
        layout="bhsd",
        align="top-left",
        balance=balance,
        algorithm=algorithm,
        of_call=_read,
        padding=padding,
        arithmetic=arithmetic,
        name=name,
        step=step,
        layer=layer,
        note=note,
    )
    with recorder:
        functional.scaled_dot_product_attention = recorder(_named(own))
        try:
            yield recorder
        finally:
            functional.scaled_dot_product_attention = own


def _named(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the names of its parameters, which torch's own does not tell."""

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        return own(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    return scaled_dot_product_attention


def _read(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"causal": bool(call["is_causal"]), "scale": call["scale"]}
