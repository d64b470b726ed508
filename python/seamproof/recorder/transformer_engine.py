"""Recordings of TransformerEngine's `DotProductAttention`, which says itself what it computes.

Nothing of TransformerEngine is imported: a module's attributes and the arguments of its `forward` are read, as version
2.20 names them. Earlier versions have fewer, and mean the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DeclarationError
from .recorder import Recorder, record

ALGORITHMS = {"p2p": "ring", "all_gather": "all-gather", "a2a": "all-to-all"}
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# What a caller says of these.
WORDS = ("pad_between_seqs", "max_seqlen_q", "max_seqlen_kv")


def record_transformer_engine(
    directory: str | Path,
    module: Any,
    *,
    group: Any = None,
    scale: float | None = None,
    padding: Mapping[str, str] | None = None,
    arithmetic: Mapping[str, Any] | None = None,
    name: str = "DotProductAttention of TransformerEngine",
    step: int = 0,
    note: str = "",
) -> Recorder:
    """Returns a context in which the first call of a `DotProductAttention` is recorded, as by `seamproof.record`.

    Mask, window, layout, sink, `cu_seqlens`, what is said of them, and the way of communication come from the module
    and from the call. The group is the module's own; for a2a+p2p, where that is two, give the group of all ranks of
    context parallelism.
    """
    missing = [word for word in ("qkv_format", "attn_mask_type") if not hasattr(module, word)]
    if missing:
        raise DeclarationError(
            f"{type(module).__name__} has no {', '.join(missing)}, so it is no DotProductAttention of "
            "TransformerEngine; record it with seamproof.record"
        )
    scale = scale if scale is not None else _scale(module)
    return record(
        directory,
        module,
        group=_group(module, group),
        scale=scale,
        sink=_sink(module),
        # The gradient of the sink is gathered from the ranks, each of which has its own heads.
        dsink="reduced",
        balance="dual-chunk",
        of_call=functools.partial(_read, module),
        padding=padding,
        arithmetic=arithmetic,
        name=name,
        step=step,
        layer=str(getattr(module, "layer_number", 0)),
        note=note,
    )


def _sink(module: Any) -> Any:
    kind = getattr(module, "softmax_type", "vanilla")
    return module.softmax_offset if kind == "learnable" else {"vanilla": None}.get(kind, kind)


def _scale(module: Any) -> float:
    scale = getattr(getattr(module, "flash_attention", None), "softmax_scale", None)
    if scale is None:
        raise DeclarationError("the module does not tell its softmax_scale: give it as scale=")
    return float(scale)


def _group(module: Any, given: Any) -> Any:
    own = getattr(module, "cp_group", None)
    if given is None and isinstance(own, list | tuple):
        raise DeclarationError(
            "the module has a group for a2a and one for p2p: give the group of all ranks of context parallelism, "
            "as group="
        )
    return own if given is None else given


def _read(module: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the module and the arguments of its call say. A call's word goes before the module's."""

    def of(name: str) -> Any:
        value = call.get(name)
        return getattr(module, name, None) if value is None else value

    layout, mask = of("qkv_format"), _mask_type(of("attn_mask_type"))
    _refuse(module, call, layout, mask)
    is_causal, diagonal = "causal" in mask, of("bottom_right_diagonal")
    is_bottom_right = mask.endswith("bottom_right") if is_causal else diagonal is None or diagonal
    left, right = of("window_size") or (-1, -1)
    # Without a causal mask (−1, 0) is no window.
    right = -1 if is_causal or left < 0 else right
    lengths = {name: call.get(name) for name in (*CU_SEQLENS, *WORDS)} if layout == "thd" else {}
    return {
        "layout": layout,
        "causal": is_causal,
        "align": "bottom-right" if is_bottom_right else "top-left",
        "window": (left, right),
        "algorithm": _algorithm(module),
        **lengths,
    }


def _mask_type(said: str) -> str:
    said = said.replace(",", "_")
    return "padding_causal" if said == "causal_padding" else said


def _algorithm(module: Any) -> Any:
    """Returns the algorithm by its name in a recording. An a2a+p2p one of whose groups has one rank is the other."""
    kind = getattr(module, "cp_comm_type", "p2p")
    if kind != "a2a+p2p":
        return ALGORITHMS[kind]
    of_a2a, of_p2p = (group.size() for group in module.cp_group)
    if of_a2a == 1 or of_p2p == 1:
        return ALGORITHMS["p2p" if of_a2a == 1 else "a2a"]
    return {"hierarchical": {"all_to_all": of_a2a}}


def _refuse(module: Any, call: Mapping[str, Any], layout: str, mask: str) -> None:
    """Refuses what a recording cannot hold, or the judge does not know."""
    wrong = None
    if "cu_seqlens_q" not in call:
        wrong = (
            "the module's forward takes no cu_seqlens_q, so it is not TransformerEngine's own; record it with "
            "seamproof.record and of_call="
        )
    elif call.get("core_attention_bias_type", "no_bias") != "no_bias":
        wrong = f"core_attention_bias_type={call['core_attention_bias_type']!r}: the judge knows no bias"
    elif mask == "arbitrary":
        wrong = "attn_mask_type='arbitrary': the judge knows no masks by element"
    elif "padding" in mask and layout != "thd":
        wrong = f"attn_mask_type={mask!r} with qkv_format={layout!r}: padded lengths are read in thd alone"
    elif call.get("inference_params") is not None:
        wrong = "inference_params are given: keys of a cache are not recorded"
    elif getattr(module, "fp8", False) and getattr(module.fp8_meta.get("recipe"), "fp8_dpa", False):
        wrong = "the attention is in FP8, which the judge does not know"
    if wrong is not None:
        raise DeclarationError(f"{wrong}; nothing is recorded")
