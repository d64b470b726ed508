"""Channels: what the session of each process reads requests from, and writes answers to."""

from __future__ import annotations

import json
import os
import sys
import threading

from ..frames import FAILED, PHASE, Bytes, Channel, Frame, cut_text, to_json
from ..session import DONE
from ..worker import SPOILT
from .hub import Failure
from .seat import Seat

# Failures after which a process cannot go on.
SPOILING = ("Crash", "OutOfMemory")


class LeadChannel(Channel):
    """The channel of rank 0, to the supervisor. What comes is shared with all ranks; what goes waits for them."""

    seat: Seat

    def __init__(self, reader: int, writer: int):
        super().__init__(os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "wb", buffering=0))
        self._lock = threading.Lock()
        self._sequence: int | None = None
        self._done: tuple[Bytes, ...] = ()

    def read(self) -> Frame | None:
        """Returns the next request, which all ranks get."""
        frame = super().read()
        if frame is None:
            self.seat.post("end")
            # The others must have heard it before this process is gone.
            return self.seat.frames.get()
        self._sequence = frame.sequence
        self.seat.begin(frame.sequence)
        self.seat.post("share", frame.kind, frame.sequence, bytes(frame.body))
        return frame

    def write(self, kind: int, sequence: int, *parts: Bytes) -> None:
        """Writes a phase, or an answer once all ranks have answered: a failure where one of them failed."""
        if kind == PHASE:
            if bytes(parts[0]) == bytes([DONE]):
                self._done = parts
            else:
                self._put(kind, sequence, *parts)
            return
        self.seat.post("answer", sequence, _failure(kind, *parts))
        failure = self.seat.verdicts.get()
        if failure is not None:
            self._put(FAILED, sequence, _said(failure))
            if failure[0] in SPOILING:
                os._exit(SPOILT)
            return
        if self._done:
            self._put(PHASE, sequence, *self._done)
            self._done = ()
        self._put(kind, sequence, *parts)
        self._sequence = None

    def crash(self, text: str) -> None:
        """Answers the request under way with a failure, from whatever thread, and ends this process."""
        if self._sequence is None:
            print(f"seamproof.launched: {text}", file=sys.stderr, flush=True)
        else:
            self._put(FAILED, self._sequence, _said(("Crash", text)))
        os._exit(SPOILT)

    def _put(self, kind: int, sequence: int, *parts: Bytes) -> None:
        with self._lock:
            super().write(kind, sequence, *parts)


class RankChannel:
    """The channel of any other rank, to the hub. Only whether it failed, and of what, goes back."""

    def __init__(self, seat: Seat):
        self._seat = seat

    def read(self) -> Frame | None:
        """Returns the next request."""
        request = self._seat.frames.get()
        if request is None:
            return None
        kind, sequence, body = request
        self._seat.begin(sequence)
        return Frame(kind, sequence, memoryview(body))

    def write(self, kind: int, sequence: int, *parts: Bytes) -> None:
        """Tells the hub that this rank has answered."""
        if kind != PHASE:
            self._seat.post("answer", sequence, _failure(kind, *parts))

    def write_json(self, kind: int, sequence: int, value: object) -> None:
        """Writes an answer whose body is JSON."""
        self.write(kind, sequence, to_json(value))


def _failure(kind: int, *parts: Bytes) -> Failure | None:
    """Returns what an answer failed of; `None` where it did not."""
    if kind != FAILED:
        return None
    ((key, text),) = json.loads(b"".join(parts)).items()
    return key, text


def _said(failure: Failure) -> bytes:
    key, text = failure
    return to_json({key: cut_text(text)})
