"""Frames of the worker protocol, version 3: `docs/protocol.md` describes them byte by byte."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ProtocolError

MAGIC = b"SMP"
VERSION = 3
BODY_MOST = 1 << 30
TEXT_MOST = 4096

OPEN, RUN, READY, PHASE, OUTPUTS, FAILED = range(1, 7)

# What precedes the body. The digest of both follows it, so that each piece is hashed as it passes.
_HEAD = struct.Struct("<3sBB3sQQ")
_DIGEST = struct.Struct("<I")
# Large enough to be quick, small enough to be still in the cache when it is hashed.
_CHUNK = 1 << 20

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    """One frame, as it was read."""

    kind: int
    sequence: int
    body: memoryview

    def json(self) -> Any:
        """Returns the body of a frame that is JSON."""
        return json.loads(bytes(self.body))


class Channel:
    """Two unbuffered streams: requests come from one, answers go to the other."""

    def __init__(self, reader: io.RawIOBase, writer: io.RawIOBase):
        self._reader = reader
        self._writer = writer
        for stream in (reader, writer):
            _widen_pipe(stream)

    @classmethod
    def over(cls, reader: int, writer: int) -> Channel:
        """Returns a channel over two file descriptors, which it then owns."""
        return cls(io.FileIO(reader, "r"), io.FileIO(writer, "w"))

    def read(self) -> Frame | None:
        """Returns the next frame; `None` where the other side has closed its end between two frames."""
        head, digest = self._read(_HEAD.size, ends=True)
        if head is None:
            return None
        magic, version, kind, zeros, sequence, length = _HEAD.unpack(head)
        if magic != MAGIC or zeros != b"\0\0\0":
            raise ProtocolError(f"this is no frame: it begins with {bytes(head[:8])!r}")
        if version != VERSION:
            raise ProtocolError(
                f"the program speaks version {version} of the protocol and this package version {VERSION}: "
                "install both from the same wheel"
            )
        if length > BODY_MOST:
            raise ProtocolError(f"a frame of {length} bytes is announced; at most {BODY_MOST} are allowed")
        body, digest = self._read(length, digest)
        if _DIGEST.pack(digest) != self._read(_DIGEST.size)[0]:
            raise ProtocolError("a frame's digest is wrong: bytes were lost or changed on the way")
        return Frame(kind, sequence, body)

    def write(self, kind: int, sequence: int, *parts: Bytes) -> None:
        """Writes a frame whose body is these parts, one after the other; large ones are not joined first."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        length = sum(view.nbytes for view in views)
        if length > BODY_MOST:
            raise ProtocolError(f"the results have {length} bytes; a frame holds at most {BODY_MOST}")
        views.insert(0, memoryview(_HEAD.pack(MAGIC, VERSION, kind, b"\0\0\0", sequence, length)))
        if length < _CHUNK:
            views = [memoryview(b"".join(views))]
        digest = 0
        pieces = [view[at : at + _CHUNK] for view in views for at in range(0, view.nbytes, _CHUNK)]
        for piece in pieces[:-1]:
            digest = zlib.crc32(piece, digest)
            self._write_all(piece)
        digest = zlib.crc32(pieces[-1], digest)
        self._write_all(memoryview(b"".join([pieces[-1], _DIGEST.pack(digest)])))

    def write_json(self, kind: int, sequence: int, value: Any) -> None:
        """Writes a frame whose body is JSON."""
        self.write(kind, sequence, to_json(value))

    def close(self) -> None:
        """Closes both ends."""
        self._reader.close()
        self._writer.close()

    def _read(self, length: int, digest: int = 0, ends: bool = False) -> tuple[memoryview | None, int]:
        # An array of numpy is not filled with zeros first, as a bytearray is.
        into = memoryview(np.empty(length, np.uint8))
        got = 0
        while got < length:
            count = self._reader.readinto(into[got : got + _CHUNK])
            if not count:
                if ends and got == 0:
                    return None, digest
                raise ProtocolError(f"the stream ended after {got} of {length} bytes of a frame")
            digest = zlib.crc32(into[got : got + count], digest)
            got += count
        return into, digest

    def _write_all(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._writer.write(view) :]


def to_json(value: Any) -> bytes:
    """Returns a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def headed(head: Any) -> bytes:
    """Returns the beginning of a body with numbers: the length of its head, and the head as JSON."""
    text = to_json(head)
    return struct.pack("<I", len(text)) + text


def split(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns the head of a body with numbers, and its numbers."""
    if body.nbytes < 4:
        raise ProtocolError(f"a body of {body.nbytes} bytes is too short for the length of its head")
    (length,) = struct.unpack_from("<I", body)
    if length > body.nbytes - 4:
        raise ProtocolError(f"a head of {length} bytes does not fit into a body of {body.nbytes}")
    return json.loads(bytes(body[4 : 4 + length])), body[4 + length :]


def cut_text(text: str) -> str:
    """Returns a text of which the program keeps everything: at most 4096 bytes."""
    data = text.encode()
    if len(data) <= TEXT_MOST:
        return text
    return data[: TEXT_MOST - 4].decode(errors="ignore") + " …"


def floats(parts: Iterable[np.ndarray]) -> list[memoryview]:
    """Returns arrays as the raw little-endian f32 of a body."""
    return [memoryview(np.ascontiguousarray(part, dtype="<f4")).cast("B") for part in parts if part.size]


def _widen_pipe(stream: Any) -> None:
    """Gives a pipe the largest buffer that Linux gives anyone: fewer switches between the two processes."""
    try:
        import fcntl

        fcntl.fcntl(stream.fileno(), getattr(fcntl, "F_SETPIPE_SZ", 1031), _CHUNK)
    except (ImportError, OSError, AttributeError):
        pass  # No pipe, or no Linux: slower, and right all the same.


def duplicated_standard_streams() -> tuple[int, int]:
    """Moves standard input and output to new descriptors, which are returned.

    Whatever prints afterwards prints to standard error, line by line, as whoever looks for a bug wants to see it while
    the kernel runs. Whatever reads finds nothing: only frames may pass on the two streams.
    """
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return reader, writer
