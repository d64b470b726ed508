"""The recorder: what it keeps of a call, what it refuses, and that the program judges what it wrote."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import seamproof
from seamproof.errors import (
    DeclarationError,
    DirectoryTaken,
    OtherRankFailed,
    SeamproofError,
)
from seamproof.recorder.groups import Alone


def attention(q, k, v, dout=None, factor=1.0, sink=None):
    """Causal attention on numpy arrays `[rows, heads, lanes]`, as many heads of q as of k; out and the gradients.

    With a sink its gradient comes last, for each row.
    """
    scale = factor * q.shape[2] ** -0.5
    q, k, v = (array.swapaxes(0, 1).astype(np.float64) for array in (q, k, v))
    seen = np.tril(np.ones((q.shape[1], k.shape[1]), bool))
    logits = np.where(seen, scale * q @ k.swapaxes(1, 2), -np.inf)
    column = np.broadcast_to(-np.inf if sink is None else sink[:, None, None], logits[:, :, :1].shape)
    logits = np.concatenate([logits, column], axis=2)
    p = np.exp(logits - logits.max(2, keepdims=True))
    p /= p.sum(2, keepdims=True)
    p, of_sink = p[:, :, :-1], p[:, :, -1:]
    out = p @ v
    packed = [out.swapaxes(0, 1).astype(np.float32)]
    if dout is not None:
        dout = dout.swapaxes(0, 1).astype(np.float64)
        delta = (dout * out).sum(2, keepdims=True)
        ds = p * (dout @ v.swapaxes(1, 2) - delta)
        gradients = (scale * ds @ k, scale * ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout)
        packed += [gradient.swapaxes(0, 1).astype(np.float32) for gradient in gradients]
        packed += [] if sink is None else [(-of_sink * delta)[:, :, 0].astype(np.float32)]
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
    """A group whose ranks are threads of this process. What each raised is in `errors`."""

    def __init__(self, size):
        self.ranks, self._barrier, self._values = tuple(range(size)), threading.Barrier(size), {}
        self._local = threading.local()

    @property
    def rank(self):
        return self._local.rank

    def run(self, work):
        self.errors = [None] * len(self.ranks)

        def on_rank(rank):
            self._local.rank = rank
            try:
                work(rank)
            except Exception as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def gather(self, value):
        self._values[self.rank] = value
        # A rank that waits in vain is the failure of a test, and not its end.
        self._barrier.wait(timeout=60)
        values = [self._values[rank] for rank in self.ranks]
        self._barrier.wait(timeout=60)
        return values


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
    assert group.errors == [None] * ranks
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert not is_late or "dk" in said


def through_gloo(tmp_path, fault):
    """Runs the program of two processes, and returns what each said."""
    pytest.importorskip("torch.distributed")
    program = str(Path(__file__).with_name("gloo_program.py"))
    common = [sys.executable, program, str(tmp_path / "run"), str(tmp_path / "store")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"PYTHONPATH": str(Path(seamproof.__file__).parents[1])}
    both = [subprocess.Popen([*common, rank, fault], **options) for rank in "01"]
    try:
        said = [process.communicate(timeout=100) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize("fault, code", [("none", 0), ("row", 2)])
def test_two_processes_of_torch(tmp_path, judged, fault, code):
    assert through_gloo(tmp_path, fault) == ["recorded", "recorded"]
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert fault != "row" or "rank 1 holds it, in its row 3" in said


@pytest.mark.parametrize(
    "fault, error",
    [("dropout", "DeclarationError: dropout_p is set"), ("disk", "OSError: no space left on device")],
)
def test_an_error_of_one_process_is_raised_in_both(tmp_path, fault, error):
    first, second = through_gloo(tmp_path, fault)
    assert first.startswith(f"OtherRankFailed: rank 1: {error}") and second.startswith(error)
    assert not (tmp_path / "run/recording.json").exists()


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    q, k, v = drawn(4, 1, 8, 3)
    group = Threads(3)

    def rank_of(rank):
        with seamproof.record(tmp_path / "run", group=group) as rec:
            if rank != 1:
                rec(lambda q, k, v: q)(q, k, v)

    group.run(rank_of)
    first, second, third = group.errors
    assert "not called inside" in str(second) and isinstance(second, SeamproofError)
    for other in (first, third):
        assert isinstance(other, OtherRankFailed) and str(other) == f"rank 1: SeamproofError: {second}"


def test_an_error_of_the_program_passes_without_a_collective(tmp_path):
    q, k, v = drawn(4, 1, 8, 3)
    group, calls = Threads(1), []
    gather = group.gather
    group.gather = lambda value: (calls.append(value), gather(value))[1]

    def rank_of(rank):
        with seamproof.record(tmp_path / "run", group=group) as rec:
            calls.clear()
            rec(lambda q, k, v: q)(q, k, v)
            raise ZeroDivisionError

    group.run(rank_of)
    assert isinstance(group.errors[0], ZeroDivisionError) and not calls


@pytest.mark.parametrize("more", [{"dropout_p": 0.1}, {}])
def test_an_error_that_was_caught_keeps_no_group_alive(tmp_path, more):
    class One(Alone):
        pass

    def recorded(group):
        # Without dropout the call is made, and its out is of no layout.
        try:
            with seamproof.record(tmp_path / "run", group=group) as rec:
                rec(lambda q, k, v, dropout_p=0.0: q[0, 0])(*drawn(4, 1, 8, 3), **more)
        except DeclarationError as error:
            return str(error)

    group = One()
    gone = weakref.ref(group)
    gc.disable()
    try:
        assert recorded(group)
        del group
        # A process group that outlives its end aborts the process.
        assert gone() is None
    finally:
        gc.enable()


def test_a_directory_that_holds_something_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank-0000.safetensors").write_text("of yesterday")
    group, entered = Threads(2), []

    def rank_of(rank):
        # The second rank has disks of its own.
        with seamproof.record(tmp_path / ("run" if rank == 0 else "other"), group=group):
            entered.append(rank)

    group.run(rank_of)
    first, second = group.errors
    assert isinstance(first, DirectoryTaken) and "not an empty directory; name a new one" in str(first)
    assert isinstance(second, OtherRankFailed) and "DirectoryTaken" in str(second)
    assert not entered and (tmp_path / "run/rank-0000.safetensors").read_text() == "of yesterday"
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryTaken), seamproof.record(tmp_path / "file"):
        pass


def test_an_empty_directory_is_taken(tmp_path, judged):
    with seamproof.record(tmp_path, causal=True) as rec:
        rec(lambda q, k, v: attention(q, k, v)[0])(*drawn(4, 1, 8, 3))
    assert judged(tmp_path)[0] == 0


def test_what_is_no_group_is_refused(tmp_path):
    for group in (-100, object()):
        with pytest.raises(DeclarationError, match="has no ranks, rank, gather: give a process group"):
            seamproof.record(tmp_path / "run", group=group)


def test_ranks_of_the_local_world(tmp_path, judged):
    dist = pytest.importorskip("torch.distributed")
    import seamproof.cp

    q, k, v = drawn(16, 2, 8, 3)
    out, *_ = attention(q, k, v)

    def rank_of(rank):
        own = np.s_[8 * rank : 8 * rank + 8]
        with seamproof.record(tmp_path / "run", group=dist.group.WORLD, causal=True) as rec:
            rec(lambda *_: out[own])(q[own], k[own], v[own])

    seamproof.cp.run(rank_of, 2)
    got, said = judged(tmp_path / "run")
    assert got == 0, said


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


@pytest.mark.parametrize("wrong", [None, "scale", "mask"])
def test_torchs_own_function_says_what_it_computes(tmp_path, judged, monkeypatch, wrong):
    torch = pytest.importorskip("torch")
    own = torch.nn.functional.scaled_dot_product_attention

    def called(q, k, v, **more):
        edits = {None: {}, "scale": {"scale": 0.4}, "mask": {"is_causal": False}}
        return own(q, k, v, **more | edits[wrong])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    attend = {"is_causal": True, "scale": 0.5, "enable_gqa": True}
    with seamproof.record_torch(tmp_path / "run"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, **attend).square().sum().backward()
    assert torch.nn.functional.scaled_dot_product_attention is called
    got, said = judged(tmp_path / "run")
    assert got == (2 if wrong else 0), said


def test_torchs_own_function_with_a_mask_or_a_dropout_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    for more in ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {"dropout_p": 0.5}):
        with pytest.raises(seamproof.DeclarationError), seamproof.record_torch(tmp_path / "run"):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)


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


def merged_in_bf16(q, k, v, ranks):
    """Causal attention as a ring has it: outs of blocks, and what they are merged into, are stored in bf16."""
    torch = pytest.importorskip("torch")
    rows = len(q) // ranks
    hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None]
    logits = q.shape[2] ** -0.5 * torch.einsum("ihd,jhd->hij", q.float(), k.float())
    logits = logits.masked_fill(hidden, -torch.inf).split(rows, dim=2)
    out, lse = torch.zeros_like(q), torch.full(logits[0].shape[:2], -torch.inf)
    for block, values in zip(logits, v.float().split(rows), strict=True):
        of_block = torch.logsumexp(block, 2)
        weights = torch.nan_to_num(torch.exp(block - of_block[:, :, None]))
        part = torch.einsum("hij,jhd->ihd", weights, values).bfloat16().float()
        both = torch.logaddexp(lse, of_block)
        old, new = (torch.nan_to_num(torch.exp(each - both)).T[:, :, None] for each in (lse, of_block))
        out, lse = (old * out.float() + new * part).bfloat16(), both
    return out


@pytest.mark.parametrize(
    "arithmetic, wrong, code", [(None, False, 0), ({"merge": "f32"}, False, 2), (None, True, 2)]
)
def test_a_ring_that_stores_its_parts_in_bf16_is_right_unless_it_says_otherwise(
    tmp_path, judged, arithmetic, wrong, code
):
    torch = pytest.importorskip("torch")
    ranks, rows = 16, 64
    q, k, v = (torch.from_numpy(array).bfloat16() for array in drawn(rows, 2, 16, 3))
    out, group = merged_in_bf16(q, k, v, ranks), Threads(ranks)
    if wrong:
        out[20] += 1

    def rank_of(rank):
        own = np.s_[rank * rows // ranks : (rank + 1) * rows // ranks]
        options = {"group": group, "causal": True, "arithmetic": arithmetic}
        with seamproof.record(tmp_path / "run", **options) as rec:
            rec(lambda *_: out[own])(q[own], k[own], v[own])

    group.run(rank_of)
    assert group.errors == [None] * ranks
    said = json.loads((tmp_path / "run/recording.json").read_text())["arithmetic"]
    assert (said["merge"], said["wire"]) == ("bf16" if arithmetic is None else "f32", "bf16")
    got, said = judged(tmp_path / "run")
    assert got == code, said


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


def forwards(q, k, v, *more, **named):
    return q


def by_position(q, k, v, dropout_p=0.0, attn_mask=None):
    return q


@pytest.mark.parametrize(
    "function, more, words",
    [
        (by_position, (0.1,), "dropout_p is set: the judge does not know dropout"),
        (by_position, (0.0, np.ones((4, 4))), "attn_mask is set: the judge does not know masks by element"),
        (functools.partial(by_position, dropout_p=0.1), (), "dropout_p is set"),
        (lambda q, k, v, dropout=0.1: q, (), "dropout is set"),
        (
            forwards,
            (0.1,),
            "1 of the call's arguments past q, k and v .* forwards does not .* pass them by name",
        ),
        (np.where, (0.1, 0.2), "2 of the call's arguments past q, k and v"),
        (by_position, (0.0, None), None),
        (forwards, (), None),
    ],
)
def test_arguments_by_position_are_seen(tmp_path, function, more, words):
    arrays = drawn(4, 1, 8, 3)
    called = []

    @functools.wraps(function)
    def call(*arguments, **named):
        called.append(len(arguments))
        return arguments[0]

    if words is None:
        with seamproof.record(tmp_path / "run") as rec:
            rec(call)(*arrays, *more)
        assert (tmp_path / "run/recording.json").exists()
    else:
        with pytest.raises(DeclarationError, match=words), seamproof.record(tmp_path / "run") as rec:
            rec(call)(*arrays, *more)
        assert not (tmp_path / "run").exists()
    assert called, "the program goes on"


def test_arguments_of_a_function_without_a_signature_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with (
        pytest.raises(DeclarationError, match=r"3 of the call's arguments .* pass them by name"),
        seamproof.record(tmp_path / "run", layout="bhsd") as rec,
    ):
        rec(sdpa)(q, k, v, None, 0.1, True)
    with seamproof.record(tmp_path / "run", causal=True, layout="bhsd") as rec:
        rec(sdpa)(q, k, v, is_causal=True)


def test_arguments_of_a_module_by_position_are_seen(tmp_path):
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, attention_mask=None, attn_dropout=0.0):
            return q

    q, k, v = (torch.randn(4, 1, 8) for _ in range(3))
    module = Attention()
    for more, word in [((torch.ones(4, 4),), "attention_mask"), ((None, 0.5), "attn_dropout")]:
        with (
            pytest.raises(DeclarationError, match=f"{word} is set"),
            seamproof.record(tmp_path / "run", module),
        ):
            module(q, k, v, *more)


@pytest.mark.parametrize("form", ["partial", "reduced"])
@pytest.mark.parametrize("wrong, code", [(None, 0), ("dsink", 2), ("sink", 2)])
def test_sinks_of_several_ranks(tmp_path, judged, form, wrong, code):
    rows, ranks = 16, 2
    q, k, v, dout = drawn(rows, 3, 8, 4)
    sink = np.array([-1.0, 0.5, 2.0], np.float32)
    # The attention that forgets its sink has a logit of nearly −∞ in its place.
    forgotten = np.full(3, -1e9)
    out, dq, dk, dv, each = attention(q, k, v, dout, sink=forgotten if wrong == "sink" else sink)
    group = Threads(ranks)

    def rank_of(rank):
        own = np.s_[8 * rank : 8 * rank + 8]
        dsink = (each[:, own] if form == "partial" else each).sum(1)
        with seamproof.record(tmp_path / "run", group=group, causal=True, sink=sink, dsink=form) as rec:
            rec(lambda *_: out[own])(q[own], k[own], v[own])
            dsink = dsink * np.float32(1.01) if wrong == "dsink" else dsink
            rec.gradients(dout=dout[own], dq=dq[own], dk=dk[own], dv=dv[own], dsink=dsink)

    group.run(rank_of)
    assert group.errors == [None] * ranks
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert wrong is None or ("dsink" if wrong == "dsink" else "out") in said


def test_an_off_by_one_sink(tmp_path, judged):
    q, k, v = drawn(8, 2, 8, 3)
    for sink, code in (("off-by-one", 0), (None, 2)):
        with seamproof.record(tmp_path / f"run {sink}", causal=True, sink=sink) as rec:
            rec(lambda *qkv: attention(*qkv, sink=np.zeros(2))[0])(q, k, v)
        got, said = judged(tmp_path / f"run {sink}")
        assert got == code, said


def sunk(q, k, v, sink):
    """Causal attention of torch with a sink, on `[rows, heads, lanes]`."""
    import torch

    logits = q.shape[2] ** -0.5 * torch.einsum("ihd,jhd->hij", q.float(), k.float())
    hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None]
    column = sink.float().reshape(-1, 1, 1).expand(-1, len(q), 1)
    p = torch.cat([logits.masked_fill(hidden, -torch.inf), column], 2).softmax(2)
    return torch.einsum("hij,jhd->ihd", p[:, :, :-1], v.float()).to(q.dtype)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_sink_that_is_an_argument_has_the_gradient_of_one_call(tmp_path, judged, by_name):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(array).requires_grad_() for array in drawn(8, 2, 8, 3))
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    with seamproof.record(tmp_path / "run", causal=True, sink=sink) as rec:
        attend = rec(sunk)
        first = attend(q, k, v, sink=sink) if by_name else attend(q, k, v, sink)
        # A second call in the same graph, and another use of the sink, belong to others.
        (first.square().sum() + attend(q, k, v, sink).sum() + sink.sum()).backward()
    got, said = judged(tmp_path / "run")
    assert got == 0, said
    assert not np.array_equal(stored_tensor(tmp_path / "run", "dsink"), sink.grad)


def test_a_sink_that_is_a_parameter_of_the_module(tmp_path, judged):
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0]))

        def forward(self, q, k, v):
            return sunk(q, k, v, self.sinks)

    module = Attention()
    q, k, v = (torch.from_numpy(array).bfloat16().requires_grad_() for array in drawn(8, 2, 8, 3))
    with seamproof.record(tmp_path / "run", module, causal=True, sink=module.sinks):
        module(q, k, v).square().sum().backward()
        with torch.no_grad():
            module.sinks += 1
    np.testing.assert_array_equal(stored_tensor(tmp_path / "run", "sink"), [0.5, -1.0])
    got, said = judged(tmp_path / "run")
    assert got == 0, said
    assert not module.sinks._backward_hooks, "nothing stays behind"
    with torch.no_grad(), seamproof.record(tmp_path / "forward", module, causal=True, sink=module.sinks):
        module(q, k, v)
    got, said = judged(tmp_path / "forward")
    assert got == 0, said


def test_sinks_that_no_recording_holds_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    with pytest.raises(DeclarationError, match="sink='learnable': give the logits"):
        seamproof.record(tmp_path / "run", sink="learnable")
    q, k, v = (torch.from_numpy(array).bfloat16().requires_grad_() for array in drawn(8, 2, 8, 3))
    for sink, words in [
        (torch.zeros(3), "sink has 3 elements, and q has 2 heads"),
        (torch.zeros(2, dtype=torch.float16), "sink is in float16"),
    ]:
        with (
            pytest.raises(DeclarationError, match=words),
            seamproof.record(tmp_path / "run", sink=sink) as rec,
        ):
            rec(lambda q, k, v: q)(q, k, v)
    for sink, words in [
        (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True), "dsink is in bfloat16"),
        (torch.zeros(2), "dsink did not come: .* on inputs and a sink that all require gradients"),
    ]:
        with pytest.raises(SeamproofError, match=words), seamproof.record(tmp_path / "run", sink=sink) as rec:
            rec(sunk)(q, k, v, sink).square().sum().backward()


@pytest.mark.parametrize("base, code", [("2", 0), ("e", 2)])
def test_an_lse_of_base_2(tmp_path, judged, base, code):
    rows = 64
    # Logits of several hundreds: most of the LSE's bound is roundings of its own size then.
    q, k, v, dout = (
        array * factor for array, factor in zip(drawn(rows, 2, 8, 4), (40, 40, 1, 1), strict=True)
    )
    q, k = (array.astype(np.float32) for array in (q, k))
    out, dq, dk, dv = attention(q, k, v, dout)
    lse = statistics(q, k)
    assert np.abs(lse).max() > 500
    # As a kernel has it: every product and the sum are rounded, to the side that makes the most of them.
    in_base_2 = np.nextafter((lse / np.log(2.0)).astype(np.float32), np.float32(np.inf))
    with seamproof.record(tmp_path / "run", causal=True, lse="ht", lse_base=base) as rec:
        rec(lambda *_: (out, in_base_2))(q, k, v)
        rec.gradients(dout=dout, dq=dq, dk=dk, dv=dv)
    got, said = judged(tmp_path / "run")
    assert got == code, said
    assert json.loads((tmp_path / "run/recording.json").read_text())["lse"]["base"] == base


def test_a_call_that_is_made_again_is_recorded_whole(tmp_path, judged):
    q, k, v = drawn(4, 1, 8, 3)

    def failing(q, k, v):
        raise MemoryError

    with seamproof.record(tmp_path / "run", causal=True) as rec:
        with pytest.raises(MemoryError):
            rec(failing)(k, q, v)
        rec(lambda q, k, v: attention(q, k, v)[0])(q, k, v)
    got, said = judged(tmp_path / "run")
    assert got == 0, said


def statistics(q, k):
    """The LSE of causal attention on numpy arrays `[rows, heads, lanes]`, as `[heads, rows]`."""
    logits = q.shape[2] ** -0.5 * np.einsum("ihd,jhd->hij", q.astype(np.float64), k.astype(np.float64))
    seen = np.tril(np.ones(logits.shape[1:], bool))
    logits = np.where(seen, logits, -np.inf)
    largest = logits.max(2)
    return largest + np.log(np.exp(logits - largest[:, :, None]).sum(2))


@pytest.mark.parametrize("order, axes", [("ht", (0, 1, 2)), ("th", (0, 2, 1))])
def test_the_lse_of_a_batch_in_either_order(tmp_path, judged, order, axes):
    batch, rows, heads = 3, 5, 2
    q, k, v = (array.reshape(batch, rows, heads, 8) for array in drawn(batch * rows, heads, 8, 3))

    def batched(q, k, v):
        out = np.stack([attention(*each)[0] for each in zip(q, k, v, strict=True)])
        lse = np.stack([statistics(*each) for each in zip(q, k, strict=True)]).astype(np.float32)
        return out, lse.transpose(axes)

    with seamproof.record(tmp_path / "run", causal=True, layout="bshd", lse=order) as rec:
        _, lse = rec(batched)(q, k, v)
    got, said = judged(tmp_path / "run")
    assert got == 0, said
    # The same values by hand: sequence after sequence along the rows.
    expected = [lse[b, :, r] if order == "ht" else lse[b, r] for b in range(batch) for r in range(rows)]
    stored = np.array(expected) if order == "th" else np.array(expected).T
    np.testing.assert_array_equal(stored_tensor(tmp_path / "run", "lse"), stored)


def stored_tensor(directory, name):
    """Returns an f32 tensor of the file of rank 0."""
    data = (directory / "rank-0000.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[name]
    start, end = (8 + size + offset for offset in entry["data_offsets"])
    assert entry["dtype"] == "F32"
    return np.frombuffer(data[start:end], "<f4").reshape(entry["shape"])


@pytest.mark.parametrize(
    "order, shape, words",
    [
        ("ht", (4, 1), r"lse has shape \[4, 1\], and lse='ht' is \[heads, rows\], here \[1, 4\]"),
        ("th", (1, 4), r"lse has shape \[1, 4\], and lse='th' is \[rows, heads\], here \[4, 1\]"),
        ("th", (4, 1, 1, 1), r"lse has shape \[4, 1, 1, 1\]"),
    ],
)
def test_an_lse_of_another_shape_is_refused(tmp_path, order, shape, words):
    arrays = drawn(4, 1, 8, 3)
    with (
        pytest.raises(DeclarationError, match=words),
        seamproof.record(tmp_path / "run", lse=order) as rec,
    ):
        rec(lambda q, k, v: (q, np.zeros(shape, np.float32)))(*arrays)


def test_options_from_the_arguments_of_the_call(tmp_path, judged):
    q, k, v = drawn(7, 2, 8, 3)

    def packed(q, k, v, cu_seqlens=None, is_causal=False):
        parts = [slice(*bounds) for bounds in itertools.pairwise(cu_seqlens)]
        return np.concatenate([attention(q[part], k[part], v[part])[0] for part in parts])

    def of_call(call):
        offsets = call["cu_seqlens"]
        return {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "causal": call["is_causal"]}

    with seamproof.record(tmp_path / "run", of_call=of_call) as rec:
        rec(packed)(q, k, v, [0, 3, 7], is_causal=True)
    got, said = judged(tmp_path / "run")
    assert got == 0, said
    for more, words in [
        ({"mask": "causal"}, "of_call returned mask, which no call can say"),
        ({"sink": None}, "of_call returned sink, which no call can say"),
        ({"align": "left"}, "align='left' is none of"),
    ]:
        with (
            pytest.raises(DeclarationError, match=words),
            seamproof.record(tmp_path / "other", of_call=lambda _, more=more: more) as rec,
        ):
            rec(packed)(q, k, v, [0, 3, 7])


def test_unknown_words_of_a_declaration_are_refused(tmp_path):
    for options, words in [
        ({"arithmetic": {"merges": "f32"}}, "arithmetic: 'merges' is none of"),
        ({"padding": {"output": "zero"}}, "padding: 'output' is none of"),
        ({"lse": "bhs"}, "lse='bhs' is none of"),
        ({"layout": "hbd"}, "layout='hbd' is none of"),
        ({"algorithm": "rings"}, "algorithm='rings' is none of 'ring'"),
        ({"algorithm": {"ring": {}}}, "is none of 'ring'"),
        ({"balance": "zigzag"}, "balance='zigzag' is none of 'contiguous', 'dual-chunk'"),
    ]:
        with pytest.raises(DeclarationError, match=words):
            seamproof.record(tmp_path / "run", **options)


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


@pytest.mark.parametrize(
    "given, words",
    [
        ({"scale": float("nan")}, "scale=nan is no positive number"),
        ({"softcap": -1.0}, "softcap=-1.0 is no positive number"),
        ({"window": (3,)}, "no pair of whole numbers"),
        ({"cu_seqlens_q": [], "cu_seqlens_kv": []}, "cu_seqlens_q is empty"),
        ({"cu_seqlens_q": [0, 1.5, 6]}, "cu_seqlens_q has 1.5"),
        ({"cu_seqlens_q": [0, float("nan"), 6]}, "cu_seqlens_q has nan"),
        ({"cu_seqlens_q": [0, 5, 3]}, "cu_seqlens_q has 3 behind 5"),
        ({"cu_seqlens_q": [-1, 5, 6]}, "cu_seqlens_q has -1 behind 0"),
        ({"cu_seqlens_q": [0, 6, 7]}, "ends at 7, and all ranks together have 6 rows"),
    ],
)
def test_what_no_call_can_say_is_refused_before_anything_is_written(tmp_path, given, words):
    q, k, v = (np.zeros((6, 1, 8), np.float32) for _ in range(3))
    whole = {"cu_seqlens_q": [0, 6], "cu_seqlens_kv": [0, 6], **given}
    with pytest.raises(DeclarationError, match=re.escape(words)):
        with seamproof.record(tmp_path / "run", causal=True, **whole) as rec:
            rec(lambda q, k, v: q)(q, k, v)
    assert not (tmp_path / "run").exists()
