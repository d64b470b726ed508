"""Subjects: a function that calls a kernel, with what it declares."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import arrays
from .copies import Copies
from .declare import declaration, narrowed
from .errors import DeclarationError, NotReady, OwnFault
from .formats import is_unwritten, same, unwritten
from .lse import LseForm
from .pages import HOLES
from .problem import QUANTISED, Problem

# Says that gradients come from the library's automatic differentiation.
autograd = "autograd"

INPUTS = ("q", "k", "v", "dout", "sink")
# Runs of a process whose inputs are read back. What is wrong with a format shows in each of them.
ROUND_TRIPS = 64
GRADIENTS = ("dq", "dk", "dv", "dsink")
# Elements that any result may have, and how many times those of the problem's largest one, as statistics may be padded.
RESULT_ELEMENTS = 1 << 28
RESULT_TIMES = 16
# Before the name of a quantity, the name of its largest magnitude among results.
AMAX = "amax of "


@dataclass
class Result:
    """What a kernel returned for one problem.

    Give `dq`, `dk`, `dv` (and `dsink`, where the sink is learnable) in a backward, or `grads=seamproof.autograd` where
    the function can be differentiated by torch or JAX.
    """

    out: Any
    lse: Any = None
    max_logit: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dsink: Any = None
    grads: str | None = None
    # The largest magnitudes of what was quantised, by name, as `docs/fp8.md` defines them: `{"p": …, "out": …}`, each a
    # number or an array with one element, f32.
    amax: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """The results of one run, as f32 of numpy."""

    tensors: dict[str, np.ndarray | None]
    backward: bool
    damage: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, int] = field(default_factory=dict)
    # Which rows of the results each rank has, where there are several ranks.
    dealt: list[tuple[np.ndarray, np.ndarray]] | None = None
    # The largest magnitudes that were returned, in the protocol's order; each rank tells all of them.
    amax: dict[str, np.float32] = field(default_factory=dict)

    def head(self) -> dict[str, Any]:
        """Returns the shapes, as the protocol writes them."""

        def shapes(rank: dict[str, np.ndarray | None]) -> dict[str, Any]:
            of = {name: None if tensor is None else list(tensor.shape) for name, tensor in rank.items()}
            gradients = {name: of.get(name) for name in GRADIENTS} if self.backward else None
            amax = {"amax": list(self.amax)} if self.amax else {}
            return (
                {name: of.get(name) for name in ("out", "lse", "max_logit")} | {"gradients": gradients} | amax
            )

        return {"ranks": [shapes(rank) for rank in self.ranks()], "damage": self.damage}

    def parts(self) -> list[np.ndarray]:
        """Returns the arrays in the protocol's order."""
        names = ("out", "lse", "max_logit", *(GRADIENTS if self.backward else ()))
        amax = np.array(list(self.amax.values()), np.float32)
        found = (tensor for rank in self.ranks() for tensor in (*map(rank.get, names), amax))
        return [tensor for tensor in found if tensor is not None]

    def ranks(self) -> list[dict[str, np.ndarray | None]]:
        """Returns the results of each rank, in the rank's own rows."""
        if self.dealt is None:
            return [self.tensors]
        return [self._of_rank(number, *rows) for number, rows in enumerate(self.dealt)]

    def _of_rank(self, number: int, q: np.ndarray, kv: np.ndarray) -> dict[str, np.ndarray | None]:
        places = {"out": (q, 0), "lse": (q, 1), "dq": (q, 0), "dk": (kv, 0), "dv": (kv, 0)}
        taken = {
            name: _taken(tensor, *places[name]) if name in places and tensor is not None else tensor
            for name, tensor in self.tensors.items()
        }
        if number and taken.get("dsink") is not None:
            # What the ranks have of it is added up.
            taken["dsink"] = np.zeros_like(taken["dsink"])
        return taken


class RoundTripError(OwnFault):
    """Inputs that did not survive the way into the subject's format and back."""


@dataclass
class Subject:
    """A function under test. It can still be called as before."""

    function: Callable[..., Any]
    call: Callable[..., Result]
    name: str
    library_name: str
    device: str | None
    declared: dict[str, Any]
    lse: LseForm
    compiles: bool
    versions: dict[str, str] = field(default_factory=dict)
    # The names of the file that declares the subject.
    scope: dict[str, Any] = field(default_factory=dict, repr=False)
    _library: arrays.Numpy | None = field(default=None, repr=False)
    _puts: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        # Attributes of the function are not taken over: they could hide the fields above.
        functools.update_wrapper(self, self.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def narrowed(self, narrowing: dict[str, Any]) -> Subject:
        """Returns the subject with a declaration that takes less; see `declare.narrowed`."""
        return dataclasses.replace(self, declared=narrowed(self.declared, narrowing)) if narrowing else self

    def file(self) -> str | None:
        """Returns the file that declares the subject."""
        return self.scope.get("__file__")

    def path(self) -> str | None:
        """Returns the subject's name in its file; `None` where another process cannot find it there."""
        ours = (
            name for name, value in list(self.scope.items()) if isinstance(value, Subject) and self._is(value)
        )
        return next(ours, None)

    def _is(self, other: Subject) -> bool:
        return other.function is self.function and other.name == self.name

    def open(self, ordinal: int = 0) -> arrays.Numpy:
        """Opens the array library and its device, once."""
        if self._library is None:
            self._library = arrays.library(self.library_name)(self.device, ordinal)
            for precision in self.declared["table"]["precisions"]:
                for element in set(precision.values()):
                    self._library.dtype(element.partition("/")[0])
        return self._library

    def ready(self) -> dict[str, Any]:
        """Returns the answer to `Open`."""
        library = self.open()
        return {
            "devices": library.devices(),
            "name": library.device_name(),
            "versions": library.versions() | self.versions,
            "declared": self.declared,
        }

    def put(self, problem: Problem, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns inputs as the library's arrays, k and v in the problem's pages.

        The first ones of a process are held against their f32 bits.
        """
        library = self.open()
        self._puts += 1
        inputs = problem.in_pages(inputs, HOLES[self.declared["padding"]["inputs"]])
        tensors = library.put_all({name: (values, problem.form(name)) for name, values in inputs.items()})
        for name, values in inputs.items() if self._puts <= ROUND_TRIPS else ():
            form = problem.form(name)
            if not same(library.get(tensors[name], form, name), values):
                raise RoundTripError(
                    f"{name} changes on its way into {form} and back: the program sent numbers of another format, "
                    f"or {library.name} reads {form} wrongly"
                )
        return tensors

    def run(
        self, problem: Problem, tensors: dict[str, Any], launched: Callable[[], None] = lambda: None
    ) -> Answer:
        """Calls the kernel, and returns its results as f32."""
        library = self.open()
        inputs = tensors if library.mutable else {}
        given = library.copies(inputs)
        library.dirty(problem.results())
        library.begin()
        result = self.results(problem, tensors)
        launched()
        costs = library.costs()
        if "peak_bytes" in costs:
            costs["peak_bytes"] -= sum(copy.nbytes for copy in given.arrays.values())
        # The results as a caller finds them who waits for the current stream alone.
        named = vars(result) | {AMAX + name: amax for name, amax in (result.amax or {}).items()}
        results = {name: array for name, array in named.items() if library.is_array(array)}
        _hold_sizes(problem, results)
        results = results if library.asynchronous else {}
        early = library.copies(results)
        library.finish()
        late, now, bands = map(library.copies, (results, inputs, problem.bands()))
        pairs = [(early, late), (given, now), (bands, problem.intact_bands())]
        (read,), (is_late, is_changed, is_damaged) = library.fetched([early], pairs)
        answer = self.collect(problem, result, read)
        if is_late:
            raise NotReady(early.differing(late))
        damage = problem.damage(bands.arrays) if is_damaged else []
        damage += self._changed(problem, given, now) if is_changed else []
        return dataclasses.replace(answer, damage=damage, costs=costs)

    def results(self, problem: Problem, tensors: dict[str, Any]) -> Result:
        """Calls the kernel, and returns what it returned, with gradients also where the library makes them."""
        library = self.open()
        leaves = [tensors[name] for name in ("q", "k", "v")]
        learnable = problem.sink == "learnable"
        if learnable:
            leaves.append(tensors["sink"])
        dout = tensors["dout"] if problem.backward else None

        def call(*leaves: Any) -> Result:
            return as_result(
                self.call(problem, *leaves[:3], dout=dout, sink=leaves[3] if learnable else None)
            )

        if not problem.backward:
            return call(*leaves)
        result, pullback = library.record(call, leaves)
        if result.grads != autograd:
            return result
        names = GRADIENTS if learnable else GRADIENTS[:3]
        depends = any(sequence.q.len and sequence.kv.len for sequence in problem.sequences)
        return dataclasses.replace(result, **dict(zip(names, pullback(dout, depends), strict=True)))

    def _changed(self, problem: Problem, given: Copies, now: Copies) -> list[dict[str, Any]]:
        """Returns the inputs that the kernel changed, as the protocol writes them."""
        library = self.open()
        found = []
        for name in given.differing(now):
            after, before = (library.get(of.arrays[name], problem.form(name), name) for of in (now, given))
            if name != "sink":
                # Rows of a pool are counted through its pages.
                after, before = (of.reshape(-1, *of.shape[-2:]) for of in (after, before))
            places = np.argwhere(after.view(np.uint32) != before.view(np.uint32))
            # Two NaN of 16 bits may be one of f32.
            if len(places):
                found.append({"tensor": name, "first": places[0].tolist(), "elements": len(places)})
        return found

    def collect(
        self, problem: Problem, result: Result, copies: Mapping[str, Any] = types.MappingProxyType({})
    ) -> Answer:
        """Returns a kernel's results in the forms of the protocol, read from copies where there are some."""
        names = ["out", "max_logit", *(GRADIENTS if problem.backward else ())]
        tensors = {name: self._read(problem, name, getattr(result, name), copies) for name in names}
        if problem.backward and problem.sink != "learnable":
            tensors["dsink"] = np.zeros(0, np.float32)
        if result.lse is not None:
            values = self.open().get(copies.get("lse", result.lse), "f32", "lse")
            tensors["lse"] = self.lse.standard(values, problem)
            if not problem.took(result.lse):
                tensors["lse"] = _without_foreign(tensors["lse"], problem.q.owned(), axis=1)
        for name in self._missing(problem, tensors):
            raise DeclarationError(missing_words(name, problem))
        dealt = problem.dealt()
        for name in ("out", "lse", "dq", "dk", "dv") if dealt else ():
            _hold_shape(name, tensors.get(name), problem.shape(name))
        return Answer(tensors, problem.backward, dealt=dealt, amax=self._amaxes(result, copies))

    def _amaxes(self, result: Result, copies: Mapping[str, Any]) -> dict[str, np.float32]:
        """Returns the largest magnitudes that a kernel returned, in the protocol's order."""
        told = dict(result.amax or {})
        found = {}
        for name in (name for name in QUANTISED if name in told):
            value = told.pop(name)
            if self.open().is_array(value):
                value = self.open().get(copies.get(AMAX + name, value), "f32", f"the amax of {name}")
            if np.size(value) != 1:
                raise TypeError(f"the amax of {name} has {np.size(value)} elements; return one number")
            found[name] = np.float32(np.reshape(value, -1)[0])
        if told:
            raise DeclarationError(
                f"there is no amax of {', '.join(told)}; use {', '.join(QUANTISED)} as names"
            )
        return found

    def _missing(self, problem: Problem, tensors: dict[str, Any]) -> list[str]:
        wanted = ["out", *self.declared["table"]["statistics"], *(GRADIENTS if problem.backward else ())]
        return [name for name in wanted if tensors.get(name) is None]

    def _read(self, problem: Problem, name: str, array: Any, copies: Mapping[str, Any]) -> np.ndarray | None:
        if array is None:
            return None
        values = self.open().get(copies.get(name, array), problem.form(name), name)
        if name in ("max_logit", "dsink"):
            return values
        side = problem.q if name in ("out", "dq") else problem.kv
        values = _whole(_descaled(values, problem.result_descales.get(name)), problem.shape(name))
        return values if problem.took(array) else _without_foreign(values, side.owned(), axis=0)


def subject(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    arrays: str | None = None,
    device: str | None = None,
    lse: LseForm | None = None,
    compiles: bool | None = None,
    versions: dict[str, str] | None = None,
    statistics: Iterable[str] = ("lse",),
    **declared: Any,
) -> Any:
    """Declares a function as a subject: `@seamproof.subject(formats=["bf16"], …)`.

    The function is called as `function(p, q, k, v, dout=None, sink=None)`: `p` is the `Problem`, the others are arrays
    `[rows, heads, dim]` of the library `arrays` (`"numpy"`, `"torch"`, `"jax"`, `"cupy"`) on `device`. In a problem
    with pages, k and v are pools `[pages, size, heads, dim]`, which `p.block_table` reads. It returns a `Result`, or
    out alone, or `(out, lse)`. All other arguments are those of `declare.declaration`.
    """
    scope = sys._getframe(1).f_globals
    if versions is not None and not isinstance(versions, dict):
        raise DeclarationError(
            f'versions is {versions!r}: give names and versions, as in {{"flash-attn": "2.8.3"}}'
        )

    def declare(function: Callable[..., Any]) -> Subject:
        library = arrays or of_scope(function, scope)
        return Subject(
            function=function,
            call=function,
            name=name or getattr(function, "__name__", "kernel"),
            library_name=library,
            device=device,
            declared=declaration(statistics=statistics, **declared),
            lse=lse or LseForm(),
            compiles=library != "numpy" if compiles is None else compiles,
            versions=versions or {},
            scope=scope,
        )

    return declare if function is None else declare(function)


def of_scope(function: Callable[..., Any], scope: dict[str, Any]) -> str:
    """Returns the array library that a function's file imports, or the file that declares it."""
    found = arrays.of_function(function)
    return found if found != "numpy" else arrays.of_names(scope)


def as_result(returned: Any) -> Result:
    """Returns what a function returned as a `Result`."""
    if isinstance(returned, Result):
        return returned
    if isinstance(returned, (tuple, list)):
        if not returned:
            raise DeclarationError(
                "the function returned an empty tuple; return out, or (out, lse), or a Result"
            )
        return Result(returned[0], *returned[1:2])
    if returned is None:
        raise DeclarationError("the function returned None; return out, or (out, lse), or a Result")
    return Result(returned)


def _descaled(codes: np.ndarray, descale: np.float32 | None) -> np.ndarray:
    """Returns the values that codes stand for, rounded to f32. What was never written stays as it is."""
    if descale is None:
        return codes
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(is_unwritten(codes), codes, codes * descale)


def _whole(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns results with the rows of slack that the kernel did not return."""
    if values.ndim != len(shape) or values.shape[1:] != shape[1:] or values.shape[0] >= shape[0]:
        return values
    whole = unwritten(shape)
    whole[: values.shape[0]] = values
    return whole


def _hold_sizes(problem: Problem, results: Mapping[str, Any]) -> None:
    """Raises where a result is so large that no problem of this size has it; a view may, which no copy could hold."""
    largest = max(RESULT_ELEMENTS, RESULT_TIMES * max(elements for elements, _ in problem.results()))
    for name, array in results.items():
        if math.prod(array.shape) > largest:
            raise TypeError(f"{name} has shape {list(array.shape)}: more elements than any result of the problem")


def _hold_shape(name: str, values: np.ndarray | None, shape: tuple[int, ...]) -> None:
    """Raises where a result cannot be dealt to ranks."""
    if values is not None and values.shape != shape:
        raise TypeError(
            f"{name} has shape {list(values.shape)}, not {list(shape)}: return the rows of all ranks, "
            "in the order of the problem"
        )


def _taken(values: np.ndarray, rows: np.ndarray, axis: int) -> np.ndarray:
    """Returns rows of a result, and unwritten ones for −1."""
    if values.shape[axis] == 0:
        return unwritten((*values.shape[:axis], len(rows), *values.shape[axis + 1 :]))
    taken = values.take(rows, axis)
    taken[(slice(None),) * axis + (rows < 0,)] = unwritten((1,))[0]
    return np.ascontiguousarray(taken)


def _without_foreign(values: np.ndarray, owned: np.ndarray, axis: int) -> np.ndarray:
    """Returns results of a kernel that allocates them itself, without the rows that no sequence owns.

    Such a kernel has to put something there, so those rows say nothing.
    """
    if owned.all() or values.ndim <= axis or values.shape[axis] != owned.size:
        return values
    values = values.copy()
    values[(slice(None),) * axis + (~owned,)] = unwritten((1,))[0]
    return values


def missing_words(name: str, problem: Problem) -> str:
    """Returns what is wrong where a result did not come back."""
    if name == "lse":
        none = "statistics=[], or lse=False in flash_varlen"
        return f"no lse came back: return (out, lse), or declare that there is none: {none}"
    if name in GRADIENTS:
        return f"no {name} came back in a backward: return it, or grads=seamproof.autograd, or declare backward=False"
    return f"no {name} came back, though it is declared"
