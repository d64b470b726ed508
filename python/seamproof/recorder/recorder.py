"""One call of attention, from its inputs to the files of its recording."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import recording
from ..errors import DeclarationError, DirectoryTaken, SeamproofError
from .call import INPUTS, by_name, check_arguments, check_attributes
from .groups import group_of, together
from .manifest import GRADIENTS, check_declared, is_learnable, manifest_of, packed, problem_of, with_call

T = TypeVar("T")


class Recorder:
    """A recording in the making; `seamproof.record` makes one.

    What it refuses, it says at the end of the with block, on all ranks of the group. The call goes on meanwhile: an
    error in its midst would leave the other ranks waiting in the attention's own collectives. An error of the program
    itself passes at once, and the recorder then calls no collective: the other ranks may be in one of the program's.
    """

    def __init__(self, directory: str | Path, attention: Any, group: Any, given: Mapping[str, Any]):
        self._directory, self._attention, self._given = Path(directory), attention, given
        self._group = group_of(group)
        self._tensors: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._is_sink_inside = False
        self._errors: list[Exception] = []

    def __enter__(self) -> Recorder:
        together(self._group, self._check)
        if self._attention is not None:
            before = self._attention.register_forward_pre_hook(self._before, with_kwargs=True)
            after = self._attention.register_forward_hook(lambda _, __, result: self._after(result))
            self._hooks = [before, after]
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
            arguments, named = self._before(function, arguments, named)
            return self._after(function(*arguments, **named))

        return recorded

    def gradients(self, *, dout: Any, dq: Any, dk: Any, dv: Any, dsink: Any = None) -> None:
        """Gives the gradients of the recorded call, for a library that has no hooks for them."""
        given = {"dout": dout, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
        self._tensors |= {name: value for name, value in given.items() if value is not None}

    def _check(self) -> None:
        """Refuses what can be refused before the call."""
        taken = self._directory
        if taken.exists() and not (taken.is_dir() and not any(taken.iterdir())):
            raise DirectoryTaken(
                f"{taken} is not an empty directory; name a new one, or an empty one, for the recording"
            )
        if self._attention is None:
            return
        if not hasattr(self._attention, "register_forward_pre_hook"):
            raise DeclarationError(
                "attention is no module of torch; call it inside as rec(function)(q, k, v)"
            )
        check_attributes(self._attention)

    def _kept(self, work: Callable[[], T], otherwise: T) -> T:
        """Does some of the recorder's work inside of the call. The first error is kept for the end of the block."""
        try:
            return work()
        except Exception as error:
            self._errors = self._errors or [error]
            return otherwise

    def _before(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Keeps the inputs, and returns the arguments with inputs whose gradients are those of this call alone."""
        given = tuple(arguments), named
        if "out" in self._tensors or self._errors:
            return given
        # A call that raised has left its inputs, and the program tries once more.
        self._tensors.clear()
        return self._kept(lambda: self._keep_inputs(function, *given), given)

    def _keep_inputs(
        self, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        self._call = by_name(function, arguments, named)
        check_arguments(self._call)
        self._inputs = [self._hooked(name, value) for name, value in zip(INPUTS, arguments, strict=False)]
        more, named = self._with_sink(arguments[len(INPUTS) :], named)
        return (*self._inputs, *more), named

    def _with_sink(self, more: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Keeps the sink, and returns the arguments with one whose gradient is that of this call alone."""
        sink = self._given["sink"]
        if not is_learnable(sink):
            return more, named
        alias = self._hooked("sink", sink)
        self._is_sink_inside = not any(value is sink for value in (*more, *named.values()))
        own = [alias if value is sink else value for value in more]
        return tuple(own), {name: alias if value is sink else value for name, value in named.items()}

    def _hooked(self, name: str, value: Any) -> Any:
        """Keeps an input, and returns it under another name, whose gradient is kept too."""
        self._tensors[name] = _copy(value)
        if not getattr(value, "requires_grad", False):
            return value
        alias = value.view_as(value)
        self._hook(f"d{name}", alias)
        return alias

    def _hook(self, name: str, tensor: Any) -> None:
        """Keeps the first gradient of a tensor, unless no gradients are recorded now."""

        def keep(gradient: Any) -> None:
            if name not in self._tensors:
                self._kept(lambda: self._tensors.update({name: _copy(gradient)}), None)

        if getattr(tensor, "requires_grad", False):
            self._hooks.append(tensor.register_hook(keep))

    def _after(self, result: Any) -> Any:
        """Keeps the results of the call, and returns them."""
        if "out" not in self._tensors and not self._errors:
            self._kept(lambda: self._keep_results(result), None)
        return result

    def _keep_results(self, result: Any) -> None:
        for name, value in zip(INPUTS, self._inputs, strict=True):
            if recording.codes(value) != recording.codes(self._tensors[name]):
                raise SeamproofError(f"the attention changed its input {name}, which no recording can hold")
        self._given = with_call(self._given, self._call)
        out, *rest = result if isinstance(result, tuple | list) else (result,)
        if self._given["lse"] is not None:
            if not rest or rest[0] is None:
                raise DeclarationError(
                    "lse names an order of axes, but the attention returned no second result"
                )
            self._tensors["lse"] = _copy(rest[0])
        self._tensors["out"] = _copy(out)
        self._hook("dout", out)
        if getattr(out, "requires_grad", False) and self._is_sink_inside:
            # A parameter's gradient is that of a whole backward pass.
            self._hook("dsink", self._given["sink"])

    def _write(self) -> None:
        """Writes this rank's file, and on the group's first rank the manifest. All ranks come to the end, or none."""
        group = self._group
        run, *_ = together(group, self._complete)
        entries = together(group, lambda: self._write_rank(run))
        together(group, lambda: self._write_manifest(run, entries))

    def _complete(self) -> str:
        """Brings tensors and problem into their final form, and returns an id for the run."""
        if self._errors:
            raise self._errors.pop()
        if "out" not in self._tensors:
            raise SeamproofError(
                "the attention was not called inside of the with block: nothing was recorded"
            )
        learnable = is_learnable(self._given["sink"])
        backward = ("dout", *GRADIENTS, *(["dsink"] if learnable else []))
        missing = [name for name in backward if name not in self._tensors]
        if 0 < len(missing) < len(backward):
            raise SeamproofError(
                f"{', '.join(missing)} did not come: run the backward inside of the with block, "
                f"on inputs {'and a sink ' if learnable else ''}that all require gradients"
            )
        self._given = {**self._given, "batch": _batch(self._tensors["q"], self._given["layout"])}
        self._tensors = packed(self._tensors, self._given)
        self._problem = problem_of(self._tensors, self._group.ranks, self._given)
        return str(uuid.uuid4())

    def _write_rank(self, run: str) -> dict[str, Any]:
        """Writes this rank's file, and returns its entry in the manifest."""
        group = self._group
        world_rank, name = group.ranks[group.rank], f"rank-{group.rank:04}.safetensors"
        metadata = {
            "recording": 1,
            "run": run,
            "group_rank": group.rank,
            "group_size": len(group.ranks),
            "world_rank": world_rank,
            "step": self._given["step"],
            "layer": self._given["layer"],
        }
        self._directory.mkdir(parents=True, exist_ok=True)
        digest = recording.write_rank(self._directory / name, self._tensors, metadata)
        return {"file": name, "blake2b": digest, "world_rank": world_rank}

    def _write_manifest(self, run: str, entries: list[Any]) -> None:
        if self._group.rank == 0:
            manifest = manifest_of(run, entries, self._problem, self._given)
            recording.write_manifest(self._directory, manifest)


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
    sink: Any = None,
    dsink: str = "partial",
    layout: str = "thd",
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_kv_padded: Any = None,
    pad_between_seqs: bool | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
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
    of_call: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    dropout: float = 0.0,
    bias: Any = None,
    alibi: Any = None,
) -> Recorder:
    """Returns a context in which one call of attention is recorded into a new directory, forward and backward.

    The call is the first one of `attention`, a module of torch, or of `rec(function)`. Its first three arguments are
    this rank's q, k and v, in `layout`. All ranks of the group must enter the context.

    The `cu_seqlens` are those of all ranks together: where sequences begin and end, and with `_padded` where their
    rows do. Without them each row of a batch is one sequence. `pad_between_seqs` and `max_seqlen` are what the caller
    says of them; where they contradict the offsets, nothing is recorded (`PaddingDenied`, `MaximumTooSmall`). `lse` is
    the order of axes, `"ht"` or `"th"`, of a second result that is the LSE; in a batch the sequences may be an axis
    before these. `sink` is `"off-by-one"`, or has the logits of a learnable sink: an argument of the call, or a
    parameter of the module. `arithmetic` has fields of the manifest; what is left out is not known, and has the widest
    bounds. `of_call` returns more of these options from the arguments of the call, which it gets by name.
    """
    given = {key: value for key, value in locals().items() if key not in ("directory", "attention", "group")}
    check_arguments({"dropout": dropout, "bias": bias, "alibi": alibi})
    check_declared(given)
    return Recorder(directory, attention, group, given)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if hasattr(value, "detach") else value.copy()


def _batch(q: Any, layout: str) -> int:
    """Returns the number of sequences of a batch; packed rows are one, unless `cu_seqlens` say more."""
    return q.shape[layout.index("b")] if "b" in layout else 1
