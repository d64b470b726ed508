"""Frames against bytes that are written out by hand."""

from __future__ import annotations

import os
import threading
import zlib

import numpy as np
import pytest
from supervisor import frame, split_frame

from seamproof import frames
from seamproof.errors import ProtocolError

# `Ready` of request 7 with the body `{}`.
READY = (
    "534d5003"  # SMP, version 3
    "03000000"  # kind 3, zeros
    "0700000000000000"  # request 7
    "0200000000000000"  # two bytes
    "7b7d"
    "DIGEST"
)


def pipe() -> tuple[frames.Channel, int]:
    """Returns a channel that writes into a pipe, and the pipe's other end."""
    reader, writer = os.pipe()
    return frames.Channel.over(os.open(os.devnull, os.O_RDONLY), writer), reader


def channel_of(data: bytes) -> frames.Channel:
    """Returns a channel that reads these bytes."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return frames.Channel.over(reader, os.open(os.devnull, os.O_WRONLY))


def test_a_frame_byte_by_byte():
    digest = zlib.crc32(bytes.fromhex(READY.partition("DIGEST")[0])).to_bytes(4, "little").hex()
    channel, reader = pipe()
    channel.write_json(frames.READY, 7, {})
    assert os.read(reader, 100).hex() == READY.replace("DIGEST", digest)


def test_frames_are_read_back():
    channel = channel_of(frame(1, 1, b'{"a": 1}') + frame(2, 2, b""))
    first, second = channel.read(), channel.read()
    assert (first.kind, first.sequence, first.json()) == (1, 1, {"a": 1})
    assert (second.kind, second.sequence, bytes(second.body)) == (2, 2, b"")
    assert channel.read() is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(1, 1, b"{}", version=1), "version 1"),
        (b"X" * 28, "no frame"),
        (frame(1, 1, b"{}")[:20], "ended after 20 of 24"),
        (frame(1, 1, b"{}")[:25], "ended after 1 of 2"),
        (frame(1, 1, b"{}")[:-1], "ended after 3 of 4"),
        (frame(1, 1, b"{}")[:25] + b"]" + frame(1, 1, b"{}")[26:], "digest"),
        (b"SMP\x03\x01\0\0\0" + bytes(8) + (1 << 40).to_bytes(8, "little") + bytes(32), "announced"),
    ],
)
def test_what_is_no_frame(data, words):
    with pytest.raises(ProtocolError, match=words):
        channel_of(data).read()


def test_bodies_with_numbers():
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = frames.headed({"a": [2, 3]}) + b"".join(frames.floats([numbers, numbers[:0], numbers.T]))
    head, rest = frames.split(memoryview(body))
    assert head == {"a": [2, 3]}
    assert bytes(rest) == numbers.tobytes() + numbers.T.copy().tobytes()
    for wrong in (b"", b"\x09\0\0\0{}"):
        with pytest.raises(ProtocolError):
            frames.split(memoryview(wrong))


def test_a_large_body_is_not_copied():
    channel, reader = pipe()
    numbers = np.ones(3_000_000, np.float32)
    got = []

    def read() -> None:
        with os.fdopen(reader, "rb") as file:
            got.append(split_frame(file.read))

    thread = threading.Thread(target=read)
    thread.start()
    channel.write(frames.OUTPUTS, 1, frames.headed({}), *frames.floats([numbers]))
    thread.join()
    assert got[0][2][6:] == numbers.tobytes()


def test_long_texts_are_cut():
    assert frames.cut_text("short") == "short"
    cut = frames.cut_text("é" * 4000)
    assert len(cut.encode()) <= 4096 and cut.endswith(" …")
