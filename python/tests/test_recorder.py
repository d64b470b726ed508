"""The recorder: what it keeps of a call, what it refuses, and that the program judges what it wrote."""

from __future__ import annotations

import json
import runpy
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import seamproof
from seamproof import program
from seamproof.errors import DeclarationError, ProgramMissing, SeamproofError


@pytest.fixture
def judged():
    """Judges a recording with the real program, and returns the exit code and what was said."""
    try:
        path = program.find()
    except ProgramMissing as missing:
        pytest.skip(str(missing))

    def judge(directory):
        done = subprocess.run([path, "judge-recording", str(directory)], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return judge


def attention(q, k, v, dout=None, factor=1.0):
    """Causal attention on numpy arrays `[rows, heads, lanes]`, as many heads of q as of k; out and the gradients."""
    scale = factor * q.shape[2] ** -0.5
    q, k, v = (array.swapaxes(0, 1).astype(np.float64) for array in (q, k, v))
    seen = np.tril(np.ones((q.shape[1], k.shape[1]), bool))
    logits = np.where(seen, scale * q @ k.swapaxes(1, 2), -np.inf)
    p = np.exp(logits - logits.max(2, keepdims=True))
    p /= p.sum(2, keepdims=True)
    out = p @ v
    packed = [out.swapaxes(0, 1).astype(np.float32)]
    if dout is not None:
        dout = dout.swapaxes(0, 1).astype(np.float64)
        ds = p * (dout @ v.swapaxes(1, 2) - (dout * out).sum(2, keepdims=True))
        gradients = (scale * ds @ k, scale * ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout)
        packed += [gradient.swapaxes(0, 1).astype(np.float32) for gradient in gradients]
    return packed


def drawn(rows, heads, lanes, count):
    generator = np.random.default_rng(5)
    return [generator.standard_normal((rows, heads, lanes)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("factor, code", [(1.0, 0), (1.25, 2)])
def test_a_function_on_numpy(tmp_path, judged, factor, code):
    q, k, v = drawn(24, 2, 8, 3)
    with seamproof.record(tmp_path / "run", causal=True, note="in a test") as rec:
        out = rec(lambda q, k, v: attention(q, k, v, factor=factor)[0])(q, k, v)
    assert out.shape == q.shape
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "rank-0000.safetensors",
        "recording.json",
    ]
    got, said = judged(tmp_path / "run")
    assert got == code, said


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, size):
        self.ranks, self._barrier, self._values = tuple(range(size)), threading.Barrier(size), {}
        self._local = threading.local()

    @property
    def rank(self):
        return self._local.rank

    def run(self, work):
        def on_rank(rank):
            self._local.rank = rank
            work(rank)

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        values = [self._values[rank] for rank in self.ranks]
        self._barrier.wait()
        return values

    def broadcast(self, value):
        return self.gather(value)[0]


@pytest.mark.parametrize("is_late, code", [(False, 0), (True, 2)])
def test_four_ranks_that_are_threads(tmp_path, judged, is_late, code):
    rows, ranks = 32, 4
    q, k, v, dout = drawn(rows, 2, 8, 4)
    out, dq, dk, dv = attention(q, k, v, dout)
    chunks = np.arange(rows).reshape(2 * ranks, -1)
    group = Threads(ranks)

    def rank_of(rank):
        own = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])
        sent = np.roll(dk[own], 1, 0) if is_late and rank == 2 else dk[own]
        options = {"causal": True, "balance": "dual-chunk", "algorithm": "ring"}
        with seamproof.record(tmp_path / "run", group=group, **options) as rec:
            rec(lambda *_: out[own])(q[own], k[own], v[own])
            rec.gradients(dout=dout[own], dq=dq[own], dk=sent, dv=dv[own])

    group.run(rank_of)
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert not is_late or "dk" in said


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_a_module_of_torch_in_a_batch(tmp_path, judged, form):
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    module = Attention()
    shape = (2, 3, 16, 8)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, form), requires_grad=True) for _ in range(3))
    with seamproof.record(tmp_path / "run", module, causal=True, align="top-left", layout="bhsd"):
        # Further uses of q and a second call belong to others.
        (module(q, k, v).float().square().sum() + q.float().sum()).backward()
        module(q, k, v)
    manifest = json.loads((tmp_path / "run/recording.json").read_text())
    assert manifest["problem"]["pass"] == "backward" and len(manifest["problem"]["sequences"]) == 2
    got, said = judged(tmp_path / "run")
    assert got == 0, said


def test_packed_sequences_with_padding(tmp_path, judged):
    q, k, v = drawn(16, 1, 8, 3)
    parts = [slice(0, 6), slice(8, 11)]

    def packed(q, k, v):
        out = np.full_like(q, np.nan)
        for part in parts:
            out[part] = attention(q[part], k[part], v[part])[0]
        return out

    lengths = {f"cu_seqlens_{side}": [0, 6, 9] for side in ("q", "kv")}
    rows = {f"cu_seqlens_{side}_padded": [0, 8, 16] for side in ("q", "kv")}
    with seamproof.record(tmp_path / "run", causal=True, **lengths, **rows) as rec:
        rec(packed)(q, k, v)
    got, said = judged(tmp_path / "run")
    assert got == 0, said


def test_what_the_judge_does_not_know_is_refused(tmp_path):
    for name, value in [("dropout", 0.1), ("bias", np.zeros(1)), ("alibi", [0.5])]:
        with pytest.raises(DeclarationError, match=f"{name} is set.*turn it off"):
            seamproof.record(tmp_path / "run", **{name: value})
    q, k, v = drawn(4, 1, 8, 3)
    with (
        pytest.raises(DeclarationError, match="dropout_p is set: the judge does not know dropout"),
        seamproof.record(tmp_path / "run") as rec,
    ):
        rec(lambda q, k, v, dropout_p: q)(q, k, v, dropout_p=0.5)
    assert not (tmp_path / "run").exists()


def test_a_recording_that_is_not_whole_is_not_written(tmp_path):
    with pytest.raises(SeamproofError, match="not called inside"), seamproof.record(tmp_path / "run"):
        pass

    def overwriting(q, k, v):
        q[0] = 0
        return q

    q, k, v = drawn(4, 1, 8, 3)
    with (
        pytest.raises(SeamproofError, match="changed its input q"),
        seamproof.record(tmp_path / "run") as rec,
    ):
        rec(overwriting)(q, k, v)
    with pytest.raises(ZeroDivisionError), seamproof.record(tmp_path / "run") as rec:
        rec(lambda q, k, v: q)(q, k, v)
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()


def test_a_backward_that_did_not_run_is_missed(tmp_path):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(4, 1, 8, requires_grad=grad) for grad in (True, True, False))
    with (
        pytest.raises(SeamproofError, match="dv did not come"),
        seamproof.record(tmp_path / "run") as rec,
    ):
        (rec(lambda q, k, v: q + k + v)(q, k, v)).sum().backward()


def test_a_module_with_dropout_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.attention_dropout = torch.nn.Dropout(0.1)
    with (
        pytest.raises(DeclarationError, match="attention_dropout"),
        seamproof.record(tmp_path / "run", module),
    ):
        pass


@pytest.mark.parametrize("late, code", [(None, 0), (5, 2)])
def test_the_ring_of_the_page_about_a_wrong_gradient(tmp_path, judged, late, code):
    example = Path(__file__).parent.parent / "examples/recorded_ring.py"
    runpy.run_path(str(example))["main"](tmp_path / "run", late)
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert late is None or f"rank {late} holds it" in said
