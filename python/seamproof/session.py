"""The worker's side of the protocol: answers requests about one subject."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from . import frames
from .errors import DeclarationError, OwnFault, ProtocolError, Refused
from .frames import FAILED, OPEN, OUTPUTS, PHASE, READY, RUN, Channel, Frame
from .problem import Problem
from .subject import INPUTS, Subject

RECEIVED, UPLOADED, COMPILING, LAUNCHED, DONE = range(5)
FRAMES_MOST = 20
_OWN = os.path.dirname(__file__) + os.sep


class Session:
    """Answers the requests of one supervisor until they end.

    `load` makes the subject from the body of `Open`. With `strict` an error of the set-up ends the session and reaches
    the caller, instead of being an answer.
    """

    def __init__(
        self,
        channel: Channel,
        load: Callable[[dict[str, Any]], Subject],
        *,
        strict: bool = False,
    ):
        self._channel = channel
        self._load = load
        self._strict = strict
        self.subject: Subject | None = None
        self.runs = 0
        # The last error that the kernel raised, with `strict`.
        self.raised: BaseException | None = None
        # Why the process cannot go on: the key and text of the last `Failed`.
        self.spoilt: tuple[str, str] | None = None

    def serve(self) -> None:
        """Answers until the requests end, or the kernel has spoilt the process."""
        while self.spoilt is None:
            frame = self._channel.read()
            if frame is None:
                return
            if frame.kind == OPEN:
                self._open(frame)
            elif frame.kind == RUN:
                self._run(frame)
            else:
                raise ProtocolError(f"a frame of kind {frame.kind} is no request")

    def _open(self, frame: Frame) -> None:
        try:
            self.subject = self._load(frame.json())
            ready = self.subject.ready()
        except Exception as error:
            if self._strict:
                raise
            self._fail(frame, "Infrastructure", describe(error))
            return
        self._channel.write_json(READY, frame.sequence, ready)

    def _run(self, frame: Frame) -> None:
        if self.subject is None:
            raise ProtocolError("a run was asked for before a subject was opened")
        self._phase(frame, RECEIVED)
        self.runs += 1
        try:
            costs, body = self._answer(frame, self.subject)
        except Refused as refused:
            self._fail(frame, "Refused", refused.row)
        except OwnFault as error:
            if self._strict:
                raise
            self._fail(frame, "Infrastructure", describe(error))
        # A kernel that ends its process must not end a check, which would pass then.
        except (Exception, SystemExit) as error:
            # Whoever calls from Python sees at once what the adapter does wrong.
            if self._strict and isinstance(error, DeclarationError):
                raise
            self._failed(frame, self.subject, error)
        else:
            self._channel.write(PHASE, frame.sequence, bytes([DONE]), frames.to_json(costs) if costs else b"")
            self._channel.write(OUTPUTS, frame.sequence, *body)

    def _answer(self, frame: Frame, subject: Subject) -> tuple[dict[str, int], list[Any]]:
        """Runs what a request asks for, and returns its costs and the body of the answer."""
        raw, numbers = frames.split(frame.body)
        problem = Problem.from_json(raw, subject.open())
        inputs = read_inputs(problem, numbers)
        descales = {name: inputs.pop(DESCALE + name) for name in described(problem)}
        if descales:
            problem = problem.with_descales(descales)
        tensors = subject.put(problem, inputs)
        self._phase(frame, UPLOADED)
        if subject.compiles:
            self._phase(frame, COMPILING)
        answer = subject.run(problem, tensors, launched=lambda: self._phase(frame, LAUNCHED))
        return answer.costs, [frames.headed(answer.head()), *frames.floats(answer.parts())]

    def _failed(self, frame: Frame, subject: Subject, error: BaseException) -> None:
        if self._strict:
            self.raised = error.with_traceback(_theirs(error.__traceback__))
        library = subject.open()
        if library.out_of_memory(error):
            key = "OutOfMemory"
        elif library.lost(error):
            key = "Crash"
        else:
            key = "Raised"
        text = describe(error)
        self._fail(frame, key, text)
        if key != "Raised":
            self.spoilt = (key, text)

    def _fail(self, frame: Frame, key: str, text: str) -> None:
        self._channel.write_json(FAILED, frame.sequence, {key: frames.cut_text(text)})

    def _phase(self, frame: Frame, phase: int) -> None:
        self._channel.write(PHASE, frame.sequence, bytes([phase]))


# Before the name of an input, the name of its descales.
DESCALE = "descale of "


def scaled(problem: Problem) -> list[str]:
    """Returns the inputs that have descales, in the order in which a run sends them."""
    return [name for name in ("q", "k", "v", "dout") if problem.scaling(name)]


def described(problem: Problem) -> list[str]:
    """Returns the inputs and the quantised quantities that have descales, in the order in which a run sends them."""
    return scaled(problem) + problem.given_descales()


def read_inputs(problem: Problem, numbers: memoryview) -> dict[str, np.ndarray]:
    """Returns the inputs of a run, and all descales, as views of its body."""
    shapes = {name: problem.shape(name) for name in INPUTS}
    if not problem.backward:
        shapes["dout"] = (0, *shapes["dout"][1:])
    shapes |= {DESCALE + name: problem.descale_shape(name) for name in described(problem)}
    elements = sum(math.prod(shape) for shape in shapes.values())
    if 4 * elements != numbers.nbytes:
        raise ProtocolError(
            f"a run has {numbers.nbytes} bytes of numbers; its problem asks for {4 * elements}"
        )
    values, at, inputs = np.frombuffer(numbers, "<f4"), 0, {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        inputs[name] = values[at : at + count].reshape(shape)
        at += count
    return inputs


def describe(error: BaseException) -> str:
    """Returns an error's type and message, and the last frames of its traceback that are not of this package."""
    lines = [_headline(error)]
    steps = traceback.extract_tb(error.__traceback__)
    # The frames above the kernel are of this package; those below it may be too, where the kernel calls it.
    while steps and steps[0].filename.startswith(_OWN):
        steps.pop(0)
    for step in steps[-FRAMES_MOST:]:
        lines.append(
            f"  {os.path.basename(step.filename)}:{step.lineno} in {step.name}: {step.line or ''}".rstrip(
                ": "
            )
        )
    return "\n".join(lines)


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the kernel's own frame on."""
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(_OWN):
        kept = kept.tb_next
    return kept or frames


def _headline(error: BaseException) -> str:
    message = str(error).strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
