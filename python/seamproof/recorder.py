"""The recorder: keeps one call of attention inside of a program, on each rank, and writes it as a recorded run.

```python
with seamproof.record("run", model.layers[3].attention, group=cp_group, causal=True, balance="dual-chunk"):
    loss = step(batch)                              # forward and backward, as always
```

Then `seamproof judge-recording run` judges it, on any machine. A *group* is what the ranks of context parallelism talk
through: a process group of torch, or an object with `ranks`, `rank`, `broadcast(value)` and `gather(value)`.
"""

from __future__ import annotations

import functools
import platform
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import recording
from .errors import DeclarationError, SeamproofError

LAYOUTS = ("thd", "bshd", "sbhd", "bhsd")
INPUTS = ("q", "k", "v")
# Arguments and attributes of attention that the judge does not know, by the word for them.
OUTSIDE = {
    "dropout": ("dropout", "dropout_p", "attention_dropout", "attn_dropout"),
    "an additive bias": ("bias", "attn_bias", "attn_mask", "core_attention_bias", "attention_bias"),
    "ALiBi": ("alibi_slopes", "alibi"),
}


class Alone:
    """The group of a single rank."""

    ranks, rank = (0,), 0

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on each of them."""
        return [value]


class TorchGroup:
    """A process group of torch."""

    def __init__(self, group: Any):
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.ranks, self.rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the group's first rank."""
        values = [value]
        self._dist.broadcast_object_list(values, src=self.ranks[0], group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on each of them."""
        values = [None] * len(self.ranks)
        self._dist.all_gather_object(values, value, group=self._group)
        return values


class Recorder:
    """A recording in the making; `seamproof.record` makes one."""

    def __init__(self, directory: str | Path, attention: Any, group: Any, given: Mapping[str, Any]):
        self._directory, self._attention, self._given = Path(directory), attention, given
        has_ranks = group is None or hasattr(group, "gather")
        self._group = (group or Alone()) if has_ranks else TorchGroup(group)
        self._tensors: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._is_taken = False

    def __enter__(self) -> Recorder:
        if hasattr(self._attention, "register_forward_pre_hook"):
            module = self._attention
            _check_attributes(module)
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            self._hooks = [before, module.register_forward_hook(lambda _, __, result: self._after(result))]
        elif self._attention is not None:
            raise DeclarationError(
                "attention is no module of torch; call it inside as rec(function)(q, k, v)"
            )
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._write()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `function`, and whose first call is recorded. q, k and v come first."""

        @functools.wraps(function, updated=())
        def recorded(*arguments: Any, **named: Any) -> Any:
            if self._is_taken:
                return function(*arguments, **named)
            arguments, named = self._before(function, arguments, named)
            return self._after(function(*arguments, **named))

        return recorded

    def gradients(self, *, dout: Any, dq: Any, dk: Any, dv: Any) -> None:
        """Gives the gradients of the recorded call, for a library that has no hooks for them."""
        self._tensors |= {"dout": dout, "dq": dq, "dk": dk, "dv": dv}

    def _before(
        self, _: Any, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """Keeps the inputs, and returns the arguments with inputs whose gradients are those of this call alone."""
        if self._is_taken:
            return tuple(arguments), named
        _check_arguments(named)
        if len(arguments) < len(INPUTS):
            raise DeclarationError("pass q, k and v as the first three arguments of the recorded call")
        self._is_taken = True
        inputs = [self._hooked(name, value) for name, value in zip(INPUTS, arguments, strict=False)]
        self._inputs = inputs
        return (*inputs, *arguments[len(INPUTS) :]), named

    def _hooked(self, name: str, value: Any) -> Any:
        self._tensors[name] = _copy(value)
        if not getattr(value, "requires_grad", False):
            return value
        alias = value.view_as(value)
        self._hook(f"d{name}", alias)
        return alias

    def _hook(self, name: str, tensor: Any) -> None:
        def keep(gradient: Any) -> None:
            self._tensors.setdefault(name, _copy(gradient))

        tensor.register_hook(keep)

    def _after(self, result: Any) -> Any:
        """Keeps the results of the call, and returns them."""
        if "out" in self._tensors:
            return result
        for name, value in zip(INPUTS, self._inputs, strict=True):
            if recording.codes(value) != recording.codes(self._tensors[name]):
                raise SeamproofError(f"the attention changed its input {name}, which no recording can hold")
        out, *rest = result if isinstance(result, tuple | list) else (result,)
        self._tensors["out"] = _copy(out)
        if self._given["lse"] is not None:
            if not rest:
                raise DeclarationError(
                    "lse names an order of axes, but the attention returned no second result"
                )
            self._tensors["lse"] = _copy(rest[0])
        if getattr(out, "requires_grad", False):
            self._hook("dout", out)
        return result

    def _write(self) -> None:
        """Writes this rank's file, and on the group's first rank the manifest."""
        self._check_complete()
        given, group = (
            {**self._given, "batch": _batch(self._tensors["q"], self._given["layout"])},
            self._group,
        )
        tensors = {name: _packed(name, value, given) for name, value in self._tensors.items()}
        run = group.broadcast(str(uuid.uuid4()) if group.rank == 0 else None)
        self._directory.mkdir(parents=True, exist_ok=True)
        metadata = {
            "recording": 1,
            "run": run,
            "group_rank": group.rank,
            "group_size": len(group.ranks),
            "world_rank": group.ranks[group.rank],
            "step": given["step"],
            "layer": given["layer"],
        }
        name = f"rank-{group.rank:04}.safetensors"
        digest = recording.write_rank(self._directory / name, tensors, metadata)
        entry = {"file": name, "blake2b": digest, "world_rank": group.ranks[group.rank]}
        entries = group.gather(entry)
        if group.rank == 0:
            manifest = _manifest(run, entries, _problem(tensors, group, given), given)
            recording.write_manifest(self._directory, manifest)
        group.gather(None)

    def _check_complete(self) -> None:
        if "out" not in self._tensors:
            raise SeamproofError(
                "the attention was not called inside of the with block: nothing was recorded"
            )
        names = [name for name in ("dout", "dq", "dk", "dv") if name in self._tensors]
        if names and len(names) < 4:
            missing = {"dout", "dq", "dk", "dv"} - set(names)
            raise SeamproofError(
                f"{', '.join(sorted(missing))} did not come: run the backward inside of the with block, "
                "on inputs that all require gradients"
            )


def record(
    directory: str | Path,
    attention: Any = None,
    *,
    group: Any = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: str = "bottom-right",
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "thd",
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    algorithm: str = "ring",
    balance: str = "contiguous",
    lse: str | None = None,
    lse_base: str = "e",
    lse_empty: str = "unspecified",
    padding: Mapping[str, str] | None = None,
    arithmetic: Mapping[str, Any] | None = None,
    name: str = "attention",
    step: int = 0,
    layer: str = "0",
    note: str = "",
    dropout: float = 0.0,
    bias: Any = None,
    alibi: Any = None,
) -> Recorder:
    """Returns a context in which one call of attention is recorded into a new directory, forward and backward.

    The call is the first one of `attention`, a module of torch, or of `rec(function)`. Its first three arguments are
    this rank's q, k and v, in `layout`. All ranks of the group must enter the context. The `cu_seqlens` are those of
    all ranks together: where sequences begin and end, and with `_padded` where their rows do. Without them each row of
    a batch is one sequence. `lse` is the order of axes, `"ht"` or `"th"`, of a second result that is the LSE.
    """
    given = {key: value for key, value in locals().items() if key not in ("directory", "attention", "group")}
    _check_arguments({"dropout": dropout, "bias": bias, "alibi": alibi})
    if layout not in LAYOUTS:
        raise DeclarationError(f"layout={layout!r} is none of {', '.join(LAYOUTS)}")
    return Recorder(directory, attention, group, given)


def _check_arguments(named: Mapping[str, Any]) -> None:
    for word, names in OUTSIDE.items():
        for name in names:
            value = named.get(name)
            if value is not None and not (isinstance(value, bool | int | float) and not value):
                raise DeclarationError(
                    f"{name} is set: the judge does not know {word}, so nothing is recorded; turn it off"
                )


def _check_attributes(module: Any) -> None:
    """Refuses a module that is set up to drop weights."""
    if getattr(module, "training", False):
        for name in OUTSIDE["dropout"]:
            value = getattr(module, name, None)
            rate = getattr(value, "p", value)
            if isinstance(rate, int | float):
                _check_arguments({name: rate})


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if hasattr(value, "detach") else value.copy()


def _packed(name: str, value: Any, given: Mapping[str, Any]) -> Any:
    """Returns a tensor as `[rows, heads, lanes]`, and an LSE with its axes in the order that was named."""
    layout = given["layout"]
    if name == "lse":
        if value.ndim == 3:
            value = value.swapaxes(0, 1).reshape(value.shape[1], -1)
        return value
    if value.ndim != len(layout):
        raise DeclarationError(f"{name} has {value.ndim} axes, and layout={layout!r} has {len(layout)}")
    if layout == "sbhd":
        value = value.swapaxes(0, 1)
    if layout == "bhsd":
        value = value.swapaxes(1, 2)
    return value.reshape(-1, *value.shape[-2:])


def _batch(q: Any, layout: str) -> int:
    """Returns the number of sequences of a batch; packed rows are one, unless `cu_seqlens` say more."""
    return q.shape[layout.index("b")] if "b" in layout else 1


def _sequences(rows: list[int], ranks: int, batch: int, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the sequences of all ranks together, which have so many rows on each rank."""
    sides = []
    for side, local in zip(("q", "kv"), rows, strict=True):
        real, owned = given[f"cu_seqlens_{side}"], given[f"cu_seqlens_{side}_padded"]
        if real is None:
            length = local * ranks // batch
            real = range(0, length * batch + 1, length) if length else [0] * (batch + 1)
        real = [int(offset) for offset in real]
        owned = real if owned is None else [int(offset) for offset in owned]
        if len(real) != len(owned):
            raise DeclarationError(f"cu_seqlens_{side} and cu_seqlens_{side}_padded have different lengths")
        bounds = zip(real, real[1:], owned, owned[1:], strict=False)
        sides.append([{"offset": first, "len": b - a, "span": last - first} for a, b, first, last in bounds])
    if len(sides[0]) != len(sides[1]):
        raise DeclarationError("cu_seqlens_q and cu_seqlens_kv have different lengths")
    return [{"id": index, "q": q, "kv": kv} for index, (q, kv) in enumerate(zip(*sides, strict=True))]


def _problem(tensors: Mapping[str, Any], group: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    q, k, v = (tensors[name] for name in INPUTS)
    ranks, forms = (
        len(group.ranks),
        {name: recording.format_of(value, name) for name, value in tensors.items()},
    )
    if len({forms[name] for name in ("dq", "dk", "dv") if name in forms}) > 1:
        raise DeclarationError("dq, dk and dv have different formats; a recording holds one")
    rows = [len(q), len(k)]
    left, right = (bound if bound >= 0 else None for bound in given["window"])
    mask = {"left": left, "right": 0 if given["causal"] else right, "align": given["align"]}
    scale = given["scale"] if given["scale"] is not None else q.shape[-1] ** -0.5
    softmax = {"scale": scale, "softcap": given["softcap"], "sink": "none"}
    form = forms["q"]
    return {
        "sequences": _sequences(rows, ranks, given["batch"], given),
        "rows": {"q": rows[0] * ranks, "kv": rows[1] * ranks},
        "heads": {"q": q.shape[1], "kv": k.shape[1]},
        "dims": {"qk": q.shape[2], "v": v.shape[2]},
        "mask": {key: value for key, value in mask.items() if value is not None},
        "softmax": {key: value for key, value in softmax.items() if value is not None},
        "precision": {
            **{name: forms[name] for name in (*INPUTS, "out")},
            **{"p": form, "ds": form, "dout": forms.get("dout", form), "gradients": forms.get("dq", form)},
        },
        "parallel": {
            "algorithm": given["algorithm"] if ranks > 1 else "single",
            "balance": given["balance"] if ranks > 1 else "contiguous",
            "world": max(group.ranks) + 1,
            "ranks": list(group.ranks),
        },
        "pass": "backward" if "dq" in tensors else "forward",
    }


def _manifest(
    run: str, entries: list[Any], problem: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    arithmetic = {"accumulation": "unknown", "tile": None, "merge": "f32", "wire": None}
    return {
        "seamproof_recording": 1,
        "run": run,
        "subject": {"name": given["name"], "versions": _versions()},
        "problem": problem,
        "placement": "rule",
        "padding": {"inputs": "anything", "outputs": "unspecified", **(given["padding"] or {})},
        "lse": {"base": given["lse_base"], "order": given["lse"] or "ht", "empty": given["lse_empty"]},
        "dsink": "partial",
        "arithmetic": {**arithmetic, **(given["arithmetic"] or {})},
        "scales": [],
        "ranks": entries,
        "note": given["note"],
    }


def _versions() -> dict[str, str]:
    libraries = {name: sys.modules[name] for name in ("numpy", "torch") if name in sys.modules}
    found = {name: str(library.__version__) for name, library in libraries.items()}
    return {"python": platform.python_version(), **found}
