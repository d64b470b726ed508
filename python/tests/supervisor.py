"""A supervisor in Python, for tests: asks a worker as the program does, with frames made by hand."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from seamproof.reference import reference

OPEN, RUN, READY, PHASE, OUTPUTS, FAILED = range(1, 7)
PACKAGE = Path(__file__).parent.parent


def frame(kind: int, sequence: int, body: bytes, version: int = 3) -> bytes:
    """Returns a frame, byte by byte as `docs/protocol.md` has it."""
    head = b"SMP" + bytes([version, kind, 0, 0, 0])
    head += sequence.to_bytes(8, "little") + len(body).to_bytes(8, "little")
    return head + body + zlib.crc32(head + body).to_bytes(4, "little")


def split_frame(read: Any) -> tuple[int, int, bytes]:
    """Reads a frame by `read(count)`, and returns its kind, its number and its body."""
    head = read(24)
    assert len(head) == 24 and head[:4] == b"SMP\x03" and head[5:8] == b"\0\0\0"
    sequence, length = struct.unpack("<QQ", head[8:24])
    body = read(length)
    assert zlib.crc32(head + body).to_bytes(4, "little") == read(4)
    return head[4], sequence, body


def problem(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (4, 3),
    form: str = "f32",
    left: int | None = None,
    right: int | None = None,
    align: str = "bottom-right",
    slack: int = 0,
    padding: int = 0,
    backward: bool = False,
    sink: str = "none",
    softcap: float | None = None,
) -> dict[str, Any]:
    """Returns the JSON of a problem of packed sequences."""
    sequences, rows = [], [0, 0]
    for number, pair in enumerate(lengths):
        sides = {}
        for at, (side, length) in enumerate(zip(("q", "kv"), pair, strict=True)):
            sides[side] = {"offset": rows[at], "len": length, "span": length + padding}
            rows[at] += length + padding
        sequences.append({"id": number, **sides})
    mask = {"align": align} | {k: v for k, v in (("left", left), ("right", right)) if v is not None}
    softmax = {"scale": 0.5, "sink": sink} | ({} if softcap is None else {"softcap": softcap})
    formats = ("q", "k", "v", "p", "out", "dout", "ds", "gradients")
    return {
        "sequences": sequences,
        "rows": {"q": rows[0] + slack, "kv": rows[1] + slack},
        "heads": {"q": heads[0], "kv": heads[1]},
        "dims": {"qk": dims[0], "v": dims[1]},
        "mask": mask,
        "softmax": softmax,
        "precision": dict.fromkeys(formats, form),
        "parallel": {"algorithm": "single", "balance": "contiguous", "world": 1, "ranks": [0]},
        "mode": "flat",
        "data_seed": 1,
        "pass": "backward" if backward else "forward",
    }


def over_ranks(
    lengths: list[tuple[int, int]], balance: str | dict[str, Any], ranks: int, multiple: int
) -> dict[str, Any]:
    """Returns the JSON of a problem in segments over a ring, with spans that are multiples of a number."""
    raw, rows = problem(lengths) | {"form": "segments"}, {"q": 0, "kv": 0}
    for sequence in raw["sequences"]:
        for side in rows:
            of = sequence[side]
            of["offset"], of["span"] = rows[side], -(-of["len"] // multiple) * multiple
            rows[side] += of["span"]
    raw["rows"] = rows
    raw["parallel"] = {"algorithm": "ring", "balance": balance, "world": ranks, "ranks": list(range(ranks))}
    return raw


def inputs(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random inputs that are numbers of every format, with NaN in rows that hold no token."""
    draw = np.random.default_rng(seed)
    rows, heads, dims = raw["rows"], raw["heads"], raw["dims"]
    backward = raw["pass"] == "backward"
    shapes = {
        "q": (rows["q"], heads["q"], dims["qk"]),
        "k": (rows["kv"], heads["kv"], dims["qk"]),
        "v": (rows["kv"], heads["kv"], dims["v"]),
        "dout": (rows["q"] if backward else 0, heads["q"], dims["v"]),
        "sink": (heads["q"] if raw["softmax"]["sink"] == "learnable" else 0,),
    }
    values = {name: (draw.integers(-16, 17, shape) / 8).astype(np.float32) for name, shape in shapes.items()}
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv"), ("dout", "q")):
        token = np.zeros(len(values[name]), bool)
        for sequence in raw["sequences"]:
            token[sequence[side]["offset"] :][: sequence[side]["len"]] = True
        values[name][~token] = np.nan
    return values


def run_body(raw: dict[str, Any], values: dict[str, np.ndarray]) -> bytes:
    """Returns the body of `Run`."""
    text = json.dumps(raw).encode()
    return (
        struct.pack("<I", len(text))
        + text
        + b"".join(array.astype("<f4").tobytes() for array in values.values())
    )


def mask_of(mask: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a mask as the reference takes it."""
    blocks = mask.get("blocks", {})
    bounds = (mask.get("left"), mask.get("right"), mask["align"] == "bottom-right")
    firsts = (mask.get("prefix", 0), mask.get("sink_tokens", 0))
    return (*bounds, blocks.get("documents", ()), blocks.get("chunks"), *firsts)


def expected(raw: dict[str, Any], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the right answer."""
    rows = [
        tuple(slice(s[side]["offset"], s[side]["offset"] + s[side]["len"]) for side in ("q", "kv"))
        for s in raw["sequences"]
    ]
    sink = {"none": None, "off-by-one": np.zeros(raw["heads"]["q"]), "learnable": values["sink"]}
    return reference(
        values["q"],
        values["k"],
        values["v"],
        values["dout"] if raw["pass"] == "backward" else None,
        sink[raw["softmax"]["sink"]],
        rows,
        mask_of(raw["mask"]),
        raw["softmax"]["scale"],
        raw["softmax"].get("softcap"),
    )


class Worker:
    """A worker process, and what it says."""

    module = "seamproof.worker"

    def __init__(self, target: str, *options: str, **environment: str):
        paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, target, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )
        self.sequence = 0

    def ask(self, kind: int, body: bytes) -> tuple[list[int], int, bytes]:
        """Sends a request; returns the phases, and the answer's kind and body."""
        self.sequence += 1
        self.process.stdin.write(frame(kind, self.sequence, body))
        self.process.stdin.flush()
        phases = []
        while True:
            kind, sequence, body = split_frame(self.process.stdout.read)
            assert sequence == self.sequence
            if kind != PHASE:
                return phases, kind, body
            phases.append(body[0])

    def open(self, options: dict[str, str] | None = None) -> dict[str, Any]:
        """Opens the subject; returns what it declares."""
        request = {"name": "python:a.py", "options": options or {}, "device": 0}
        phases, kind, body = self.ask(OPEN, json.dumps(request).encode())
        assert phases == []
        answer = json.loads(body)
        if kind == FAILED:
            raise RuntimeError(answer)
        assert kind == READY
        return answer

    def run(self, raw: dict[str, Any], values: dict[str, np.ndarray]) -> tuple[list[int], dict[str, Any]]:
        """Runs a problem; returns the phases, and the results by name or the failure."""
        phases, kind, body = self.ask(RUN, run_body(raw, values))
        if kind == FAILED:
            return phases, json.loads(body)
        assert kind == OUTPUTS
        return phases, outputs(body)

    def end(self) -> tuple[int, str]:
        """Ends the requests; returns the exit code and what was printed."""
        self.process.stdin.close()
        said = self.process.stderr.read().decode()
        assert self.process.stdout.read() == b""
        return self.process.wait(timeout=20), said


def outputs(body: bytes) -> dict[str, Any]:
    """Returns the results of `Outputs` by name."""
    (length,) = struct.unpack_from("<I", body)
    head = json.loads(body[4 : 4 + length])
    (rank,) = head["ranks"]
    shapes = {name: rank[name] for name in ("out", "lse", "max_logit")} | (rank["gradients"] or {})
    found, at = {"damage": head["damage"]}, 4 + length
    for name, shape in shapes.items():
        if shape is not None:
            count = int(np.prod(shape))
            found[name] = np.frombuffer(body, "<f4", count, at).reshape(shape)
            at += 4 * count
    assert at == len(body)
    return found
