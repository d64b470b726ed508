"""The manifest of a recorded call: its problem, and what its caller says of it."""

from __future__ import annotations

import itertools
import math
import numbers
import platform
import sys
from collections.abc import Mapping
from typing import Any

from .. import recording
from ..errors import DeclarationError, MaximumTooSmall, PaddingDenied
from ..formats import UNIT
from .call import INPUTS

GRADIENTS = ("dq", "dk", "dv")
LAYOUTS = ("thd", "bshd", "sbhd", "bhsd")
LSE_AXES = {"ht": "[heads, rows]", "th": "[rows, heads]"}
CHOICES = {
    "layout": LAYOUTS,
    "align": ("top-left", "bottom-right"),
    "lse": (None, *LSE_AXES),
    "lse_base": ("e", "2"),
    "lse_empty": ("-inf", "+inf", "unspecified"),
    "dsink": ("partial", "reduced"),
}
# Of the fields of `problem.parallel` that a caller chooses, their words, and the one that has fields of its own.
PARALLEL = {
    "algorithm": (("ring", "all-gather", "all-to-all", "single"), "hierarchical"),
    "balance": (("contiguous", "dual-chunk"), "striped"),
}
# Options that are needed before the call.
BEFORE = ("sink", "of_call", "dropout", "bias", "alibi")
PADDING = ("inputs", "outputs")
ARITHMETIC = (
    "accumulation",
    "tile",
    "merge",
    "merge_by",
    "wire",
    "weights",
    "delta",
    "group_sums",
    "soft_cap",
    "ds_weights",
)


def check_declared(given: Mapping[str, Any]) -> None:
    """Refuses words of a declaration that are not known."""
    for field, known in CHOICES.items():
        if given[field] not in known:
            raise DeclarationError(f"{field}={given[field]!r} is none of {', '.join(map(repr, known))}")
    for field, (words, with_fields) in PARALLEL.items():
        value = given[field]
        has_fields = isinstance(value, Mapping) and list(value) == [with_fields]
        if not has_fields and value not in words:
            known = ", ".join(map(repr, words))
            raise DeclarationError(f"{field}={value!r} is none of {known}, and no {{{with_fields!r}: …}}")
    for field in ("scale", "softcap"):
        value = given[field]
        if value is not None and not (_is_number(value) and math.isfinite(value) and value > 0):
            raise DeclarationError(f"{field}={value!r} is no positive number; leave it out if there is none")
    window = given["window"]
    is_pair = isinstance(window, tuple | list) and len(window) == 2
    if not is_pair or not all(isinstance(bound, numbers.Integral) for bound in window):
        raise DeclarationError(f"window={window!r} is no pair of whole numbers; -1 is no bound")
    if isinstance(given["sink"], str) and given["sink"] != "off-by-one":
        raise DeclarationError(f"sink={given['sink']!r}: give the logits, one a head, or 'off-by-one'")
    for field, known in (("arithmetic", ARITHMETIC), ("padding", PADDING)):
        for name in given[field] or {}:
            if name not in known:
                raise DeclarationError(f"{field}: {name!r} is none of {', '.join(known)}")


def with_call(given: Mapping[str, Any], call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options with those that the caller takes from the arguments of the call."""
    if given["of_call"] is None:
        return given
    more = given["of_call"](call)
    unknown = [name for name in more if name not in given or name in BEFORE]
    if unknown:
        raise DeclarationError(f"of_call returned {', '.join(unknown)}, which no call can say")
    check_declared({**given, **more})
    return {**given, **more}


def is_learnable(sink: Any) -> bool:
    """Whether what the caller says of a sink are its logits."""
    return sink is not None and not isinstance(sink, str)


def packed(tensors: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's tensors as its file has them: packed rows, and an LSE with its axes as they were named."""
    layout = given["layout"]
    others = ("lse", "sink", "dsink")
    heads = tensors["q"].shape[layout.index("h")] if tensors["q"].ndim == len(layout) else 1
    rows = {name: _rows(name, value, layout, heads) for name, value in tensors.items() if name not in others}
    if "lse" in tensors:
        rows["lse"] = _lse(tensors["lse"], given["lse"], rows["q"].shape)
    for name in ("sink", "dsink"):
        if name in tensors:
            rows[name] = _of_heads(name, tensors[name], rows["q"])
    return rows


def _rows(name: str, value: Any, layout: str, heads: int) -> Any:
    """Returns a tensor as `[rows, heads, lanes]`. An out may have heads and lanes in one axis, and its gradient too."""
    is_joined = name in ("out", "dout") and layout.endswith("hd") and value.ndim == len(layout) - 1
    if is_joined and value.shape[-1] % heads == 0:
        value = value.reshape(*value.shape[:-1], heads, value.shape[-1] // heads)
    if value.ndim != len(layout):
        raise DeclarationError(f"{name} has {value.ndim} axes, and layout={layout!r} has {len(layout)}")
    if layout == "sbhd":
        value = value.swapaxes(0, 1)
    if layout == "bhsd":
        value = value.swapaxes(1, 2)
    return value.reshape(-1, *value.shape[-2:])


def _lse(value: Any, order: str, shape_of_q: Any) -> Any:
    """Returns an LSE of two axes in their order. The sequences of a batch may lie along an axis before them."""
    if value.ndim == 3 and order == "ht":
        value = value.swapaxes(0, 1)
        value = value.reshape(value.shape[0], -1)
    elif value.ndim == 3:
        value = value.reshape(-1, value.shape[2])
    rows, heads, _ = shape_of_q
    expected = [heads, rows] if order == "ht" else [rows, heads]
    if list(value.shape) != expected:
        raise DeclarationError(
            f"lse has shape {list(value.shape)}, and lse={order!r} is {LSE_AXES[order]}, here {expected}; a batch may "
            "have an axis before them"
        )
    return _in_f32("lse", value)


def _of_heads(name: str, value: Any, q: Any) -> Any:
    """Returns a sink or its gradient, one number a head. A sink may be in the format of q too."""
    value = value.reshape(-1)
    if len(value) != q.shape[1]:
        raise DeclarationError(f"{name} has {len(value)} elements, and q has {q.shape[1]} heads")
    is_as_q = name == "sink" and recording.type_of(value) == recording.type_of(q)
    return value if is_as_q else _in_f32(name, value)


def _in_f32(name: str, value: Any) -> Any:
    if recording.type_of(value) != "float32":
        raise DeclarationError(f"{name} is in {recording.type_of(value)}; a recording holds it in float32")
    return value


def problem_of(
    tensors: Mapping[str, Any], ranks: tuple[int, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the problem of all ranks together, from the packed tensors of one."""
    q, k, v = (tensors[name] for name in INPUTS)
    rows = [len(q), len(k)]
    left, right = (bound if bound >= 0 else None for bound in given["window"])
    mask = {"left": left, "right": 0 if given["causal"] else right, "align": given["align"]}
    scale = given["scale"] if given["scale"] is not None else q.shape[-1] ** -0.5
    sink = "learnable" if is_learnable(given["sink"]) else given["sink"] or "none"
    softmax = {"scale": scale, "softcap": given["softcap"], "sink": sink}
    return {
        "sequences": _sequences(rows, len(ranks), given),
        "rows": {"q": rows[0] * len(ranks), "kv": rows[1] * len(ranks)},
        "heads": {"q": q.shape[1], "kv": k.shape[1]},
        "dims": {"qk": q.shape[2], "v": v.shape[2]},
        "mask": {key: value for key, value in mask.items() if value is not None},
        "softmax": {key: value for key, value in softmax.items() if value is not None},
        "precision": _precision(tensors),
        "parallel": {
            "algorithm": given["algorithm"] if len(ranks) > 1 else "single",
            "balance": given["balance"] if len(ranks) > 1 else "contiguous",
            "world": max(ranks) + 1,
            "ranks": list(ranks),
        },
        "pass": "backward" if "dq" in tensors else "forward",
    }


def _precision(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Returns the formats of all quantities. P and dS, which no file holds, count as rounded to that of q."""
    names = [name for name in (*INPUTS, "out", "dout", *GRADIENTS) if name in tensors]
    forms = {name: recording.format_of(tensors[name], name) for name in names}
    if len({forms[name] for name in GRADIENTS if name in forms}) > 1:
        raise DeclarationError("dq, dk and dv have different formats; a recording holds one")
    form = forms["q"]
    return {
        **{name: forms[name] for name in (*INPUTS, "out")},
        **{"p": form, "ds": form, "dout": forms.get("dout", form), "gradients": forms.get("dq", form)},
    }


def _sequences(rows: list[int], ranks: int, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the sequences of all ranks together, which have so many rows on each rank."""
    sides = []
    for side, local in zip(("q", "kv"), rows, strict=True):
        real, owned = given[f"cu_seqlens_{side}"], given[f"cu_seqlens_{side}_padded"]
        if real is None:
            length = local * ranks // max(given["batch"], 1)
            real = [length * index for index in range(given["batch"] + 1)]
        real = _offsets(f"cu_seqlens_{side}", real, local * ranks)
        owned = real if owned is None else _offsets(f"cu_seqlens_{side}_padded", owned, local * ranks)
        if len(real) != len(owned):
            raise DeclarationError(f"cu_seqlens_{side} and cu_seqlens_{side}_padded have different lengths")
        _check_words(side, real, owned, given)
        bounds = zip(real, real[1:], owned, owned[1:], strict=False)
        sides.append([{"offset": first, "len": b - a, "span": last - first} for a, b, first, last in bounds])
    if len(sides[0]) != len(sides[1]):
        raise DeclarationError("cu_seqlens_q and cu_seqlens_kv have different lengths")
    return [{"id": index, "q": q, "kv": kv} for index, (q, kv) in enumerate(zip(*sides, strict=True))]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _offsets(name: str, given: Any, rows: int) -> list[int]:
    """Returns offsets of sequences in so many rows, all ranks together."""
    given = given.tolist() if hasattr(given, "tolist") else list(given)
    broken = [offset for offset in given if not _is_number(offset) or offset != offset or offset % 1 != 0]
    if broken:
        raise DeclarationError(f"{name} has {broken[0]!r}, which is no whole number")
    offsets = [int(offset) for offset in given]
    if not offsets:
        raise DeclarationError(f"{name} is empty; it begins with where the first sequence does, and ends with an end")
    for before, after in itertools.pairwise([0, *offsets]):
        if after < before:
            raise DeclarationError(f"{name} has {after} behind {before}; offsets do not fall")
    if offsets[-1] > rows:
        raise DeclarationError(f"{name} ends at {offsets[-1]}, and all ranks together have {rows} rows")
    return offsets


def _check_words(side: str, real: list[int], owned: list[int], given: Mapping[str, Any]) -> None:
    """Refuses what the caller says of padding and of largest lengths where the offsets of a side say otherwise."""
    lengths = [end - first for first, end in itertools.pairwise(real)]
    MaximumTooSmall.check(f"max_seqlen_{side}", given[f"max_seqlen_{side}"], lengths)
    apart = [index for index, (a, b) in enumerate(zip(real, owned, strict=True)) if a != b]
    if given["pad_between_seqs"] is False and apart:
        raise PaddingDenied(side, max(apart[0] - 1, 0), real[apart[0]], owned[apart[0]])


def manifest_of(
    run: str, entries: list[Any], problem: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the manifest, given the entries of the ranks' files."""
    return {
        "seamproof_recording": 1,
        "run": run,
        "subject": {"name": given["name"], "versions": _versions()},
        "problem": problem,
        "placement": "rule",
        "padding": {"inputs": "anything", "outputs": "unspecified", **(given["padding"] or {})},
        "lse": {"base": given["lse_base"], "order": given["lse"] or "ht", "empty": given["lse_empty"]},
        "dsink": given["dsink"],
        "arithmetic": {**_unknown_arithmetic(problem), **(given["arithmetic"] or {})},
        "scales": [],
        "ranks": entries,
        "note": given["note"],
    }


def _unknown_arithmetic(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weakest arithmetic. Several ranks may store what they join in the coarsest format of the call, and
    merge outs by differences.
    """
    unknown = {"accumulation": "unknown", "tile": None, "merge": "f32", "wire": None}
    if len(problem["parallel"]["ranks"]) == 1:
        return unknown
    precision = problem["precision"]
    merge, wire = (
        max((precision[name] for name in (*INPUTS, result)), key=UNIT.__getitem__)
        for result in ("out", "gradients")
    )
    return {**unknown, "merge": merge, "merge_by": "difference", "wire": wire}


def _versions() -> dict[str, str]:
    libraries = {name: sys.modules.get(name) for name in ("numpy", "torch", "transformer_engine")}
    found = {
        name: str(library.__version__)
        for name, library in libraries.items()
        if hasattr(library, "__version__")
    }
    return {"python": platform.python_version(), **found}
