"""Answers questions about one subject's large runs until they end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import frames
from ..arrays import Numpy
from ..errors import DeclarationError, OwnFault, ProtocolError
from ..loading import load
from ..problem import Problem
from ..session import COMPILING, LAUNCHED, UPLOADED, Session, describe
from ..subject import Result, Subject, missing_words
from ..worker import serve
from .exact import Exact
from .ops import NumpyOps, ops
from .sums import Block, Sums
from .values import Inputs

RESULTS = ("out", "dq", "dk", "dv")


class LargeSession(Session):
    """A session whose runs are questions: inputs are drawn here, and sums come back in place of tensors."""

    _is_warm = False

    def _answer(self, frame: frames.Frame, subject: Subject) -> tuple[dict[str, int], list[Any]]:
        question, rest = frames.split(frame.body)
        if rest.nbytes:
            raise ProtocolError(f"a question has {rest.nbytes} bytes after its head")
        answer = Answer(question, subject)
        tensors = answer.draw()
        self._phase(frame, UPLOADED)
        if subject.compiles:
            self._phase(frame, COMPILING)
        result = answer.call(tensors)
        self._phase(frame, LAUNCHED)
        if not self._is_warm:
            # Like the kernel's first call, the first look at results loads programs onto the device.
            answer.judge(tensors, result, "warm")
            self._is_warm = True
        head, arrays = answer.judge(tensors, result)
        head["arrays"] = [[name, list(array.shape)] for name, array in arrays.items()]
        numbers = (
            memoryview(np.ascontiguousarray(array, "<f8")).cast("B")
            for array in arrays.values()
            if array.size
        )
        return {}, [frames.headed(head), *numbers]


@contextlib.contextmanager
def own_fault(library: Numpy) -> Iterator[None]:
    """Makes an error of this package one, unless the device has no memory left or is lost."""
    try:
        yield
    except Exception as error:
        if library.out_of_memory(error) or library.lost(error):
            raise
        raise OwnFault(describe(error)) from error


class Answer:
    """The answer to one question in the making, with its times."""

    def __init__(self, question: dict[str, Any], subject: Subject):
        self.question, self.subject, self.library = question, subject, subject.open()
        self.problem = Problem.from_json(question["problem"], self.library)
        self.ops: NumpyOps = ops(self.library)
        self.seconds: dict[str, float] = {}
        # A sum over the bits of each input as it was drawn, and the inputs that hold others after the run.
        self.bits: dict[str, int] = {}
        self.changed: list[str] = []

    def _timed(self, name: str, work: Any) -> Any:
        self.library.finish()
        start = time.perf_counter()
        result = work()
        self.library.finish()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result

    def draw(self) -> dict[str, Any]:
        """Returns the inputs."""
        with own_fault(self.library):
            tensors = self._timed("inputs", lambda: Inputs(self.problem, self.ops, self._padding()).all())
            self.bits = self._bits(tensors)
        return tensors

    def _bits(self, tensors: dict[str, Any]) -> dict[str, int]:
        return {
            name: self.ops.bits(
                self.ops.read(array, "f32" if name == "sink" else self.problem.form(name), name)
            )
            for name, array in tensors.items()
            if array is not None
        }

    def _padding(self) -> float:
        """Returns what rows without a token hold: what would show if a kernel read them."""
        allowed = self.subject.declared["padding"]["inputs"]
        return math.nan if allowed == "anything" else 256.0

    def call(self, tensors: dict[str, Any]) -> Result:
        """Calls the kernel twice, so that the second call is a warm one, and returns the results of that."""
        self._timed("warm", lambda: self._called(tensors))
        self.library.dirty(self.problem.results())
        result = self._timed("kernel", lambda: self._called(tensors))
        with own_fault(self.library):
            after = self._bits(tensors)
        self.changed = [name for name, bits in self.bits.items() if after[name] != bits]
        return result

    def _called(self, tensors: dict[str, Any]) -> Result:
        self.problem = dataclasses.replace(self.problem, guarded=[])
        return self.subject.results(self.problem, tensors)

    def judge(
        self, tensors: dict[str, Any], result: Result, timed: str = "judge"
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the head of the answer, and its arrays. Its time is added to this one."""
        results = self._results(result)
        with own_fault(self.library):
            head, arrays = self._timed(timed, lambda: self._judged(tensors, results))
        return head | {"seconds": self.seconds}, arrays

    def _judged(
        self, tensors: dict[str, Any], results: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        p, ops, question = self.problem, self.ops, self.question
        all_of = {
            name: self._input(name, array) for name, array in tensors.items() if name != "sink"
        } | results
        sinks = {"none": None, "off-by-one": 0.0}.get(p.sink, ops.read(tensors["sink"], "f32", "sink"))
        sums = Sums(p, ops, all_of, sinks, question["floor"], question["weighs_dots"])
        blocks = {side: [Block.of(raw, ops) for raw in question[side]] for side in ("queries", "keys")}
        answers = {"query": [sums.of_queries(block) for block in blocks["queries"]], "key": []}
        if sums.backward:
            answers["key"] = [sums.of_keys(block) for block in blocks["keys"]]
        arrays = {
            f"{side} {name}": np.concatenate([part[name] for part in parts])
            for side, parts in answers.items()
            for name in (parts[0] if parts else {})
        }
        if sums.backward:
            arrays["law"] = sums.laws(question["sequences"])
        head = {"names": sums.names, "no_numbers": self._no_numbers(sums), "damage": p.damage(), "exact": {}}
        head["changed"] = self.changed
        if question["exact"] is not None:
            head["exact"] = Exact(p, ops, sums.tensors, question["exact"]).compared()
        return head, arrays

    def _input(self, name: str, array: Any) -> Any:
        return self.ops.read(array, self.problem.form(name), name)

    def _results(self, result: Result) -> dict[str, Any]:
        """Returns the results as arrays that can be computed with. What is wrong with them is the kernel's fault."""
        names = RESULTS if self.problem.backward else RESULTS[:1]
        found = {name: self._read(name, getattr(result, name)) for name in names} | {"lse": self._lse(result)}
        if self.question["moved"]:
            axes = {name: 1 if name == "lse" else 0 for name, array in found.items() if array is not None}
            found |= {name: self.ops.moved(found[name], axis) for name, axis in axes.items()}
        return found

    def _read(self, name: str, array: Any) -> Any:
        if array is None:
            raise DeclarationError(missing_words(name, self.problem))
        array, shape = self.ops.read(array, self.problem.form(name), name), self.problem.shape(name)
        if tuple(array.shape[1:]) == shape[1:] and array.shape[0] < shape[0]:
            # The kernel returned no slack.
            array = self.ops.lengthened(array, shape[0] - array.shape[0])
        if tuple(array.shape) != shape:
            raise TypeError(f"{name} has shape {list(array.shape)}, not {list(shape)}")
        return array

    def _lse(self, result: Result) -> Any:
        """Returns the LSE as f32 `[heads, rows]` of the library; `None` where the kernel hides it."""
        form, p = self.subject.lse, self.problem
        if result.lse is None:
            if "lse" in self.subject.declared["table"]["statistics"]:
                raise DeclarationError(missing_words("lse", p))
            return None
        is_standard = (form.base, form.order) == ("e", "ht") and tuple(result.lse.shape) == p.shape("lse")
        if is_standard and (form.empty == "-inf" or not p.blind_rows().any()):
            return self.ops.read(result.lse, "f32", "lse")
        values = form.standard(self.library.get(result.lse, "f32", "lse"), p)
        if values.shape != p.shape("lse"):
            raise TypeError(f"lse has shape {list(values.shape)}, not {list(p.shape('lse'))}")
        return self.ops.read(self.library.put(values, "f32"), "f32", "lse")

    def _no_numbers(self, sums: Sums) -> dict[str, list[int]]:
        names = [name for name in (*RESULTS, "lse") if sums.tensors.get(name) is not None]
        sides = {name: "kv" if name in ("dk", "dv") else "q" for name in names}
        real = {side: [each[side] for each in self.question["sequences"]] for side in ("q", "kv")}
        found = {name: sums.no_numbers(name, real[sides[name]]) for name in names}
        return {name: place for name, place in found.items() if place is not None}


def main(arguments: list[str] | None = None) -> int:
    """Serves one subject; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seamproof.large")
    parser.add_argument("target", metavar="FILE[:NAME]")
    given = parser.parse_args(arguments)
    return serve(
        "large", lambda channel: LargeSession(channel, lambda request: load(given.target, {}, request))
    )
