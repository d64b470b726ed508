"""Subjects whose ranks are processes: judged as they are, with faults, and with ranks that fail."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from supervisor import FAILED, OUTPUTS, PACKAGE, RUN, Worker, expected, inputs, problem, run_body

from seamproof import Problem, Result, program
from seamproof.errors import DeclarationError, ProgramMissing
from seamproof.launched.opening import narrowed

attending = importlib.import_module("seamproof.cp.attend")
EXAMPLES = Path(__file__).parent.parent / "examples"
RING = EXAMPLES / "numpy_ring.py"
SIZE = 4
# A rank's end is told at once, and a hang after the patience that a test has. Processes start within the rest.
SOON = 60


class Launched(Worker):
    """The worker of a subject with several processes."""

    module = "seamproof.launched"

    def __init__(self, target, *options):
        super().__init__(str(target), "--ranks", str(SIZE), *options)


def ring(ranks, world=SIZE):
    """Returns a problem of a causal ring, and its inputs. Each rank has 2 rows."""
    raw = problem([(2 * len(ranks), 2 * len(ranks))], heads=(2, 1), right=0, backward=True)
    raw["parallel"] = {"algorithm": "ring", "balance": "contiguous", "world": world, "ranks": ranks}
    return raw, inputs(raw)


def asked(target, ranks, *options):
    """Returns the kind of the answer to a ring, its body, and the worker."""
    worker = Launched(target, *options)
    worker.open()
    _, kind, body = worker.ask(RUN, run_body(*ring(ranks)))
    return kind, body.decode(errors="replace"), worker


def gone(worker):
    """Waits for the processes of a worker's group to end: they all hold its standard error."""
    start = time.monotonic()
    worker.process.stderr.read()
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3], [3, 1], [2, 0, 1]])
def test_a_ring_of_processes_is_right(ranks):
    raw, values = ring(ranks)
    kind, _, worker = asked(RING, ranks)
    assert kind == OUTPUTS
    # The same again in the processes that are there: nothing is left of the run before.
    _, kind, body = worker.ask(RUN, run_body(raw, values))
    assert kind == OUTPUTS
    found = np.frombuffer(body[-4 * 4 * 2 * len(ranks) :], "<f4")
    right = expected(raw, values)
    last_rank = right["dv"].reshape(len(ranks), 2, 1, 3)[-1]
    # The last rank's dk and dv are at the end.
    np.testing.assert_allclose(found[-last_rank.size :], last_rank.ravel(), atol=1e-5)
    assert worker.end() == (0, "")


def test_padding_rows_have_what_a_program_returns(monkeypatch):
    def program(local):
        out = np.where(local.rows[0] < 0, 7, 1).astype(np.float32)
        return Result(np.broadcast_to(out[:, None, None], (len(out), 2, 3)), lse=np.broadcast_to(out, (2, len(out))))

    raw = problem([(3, 3), (2, 2)], padding=1, slack=2)
    raw["sequences"][1]["q"]["span"] = raw["sequences"][1]["kv"]["span"] = 2
    raw["parallel"] = {"algorithm": "ring", "balance": "contiguous", "world": 2, "ranks": [0, 1]}
    monkeypatch.setattr(attending, "_found", lambda p, of_rank, ranks, q: [of_rank(rank) for rank in ranks])
    p = Problem.from_json(raw)
    q, k, v = (inputs(raw)[name] for name in ("q", "k", "v"))
    whole = attending.attend(p, program, q, k, v)
    assert whole.out[:6, 0, 0].tolist() == whole.lse[0, :6].tolist() == [1, 1, 1, 7, 1, 1]
    unwritten = p.empty("out")[6:]
    assert whole.out[6:].tobytes() == unwritten.tobytes() and len(unwritten)


def test_arrays_that_cannot_be_written_to_are_refused():
    p = Problem.from_json(problem([(2, 2)]), SimpleNamespace(mutable=False, name="jax"))
    with pytest.raises(DeclarationError, match="declare arrays='numpy' in place of 'jax'"):
        attending.attend(p, lambda local: None, None, None, None)


def test_ranks_that_wait_for_each_other_are_told_and_go_on():
    kind, said, worker = asked(f"{RING}:attention:fault=silent", [0, 1, 2, 3])
    assert kind == FAILED and "Raised" in said and "Deadlock: every rank that has not ended waits" in said
    assert "rank 0 waits for a message from rank 3, which does not send it" in said
    # A ring of one rank sends to itself, and does not fail.
    _, kind, _ = worker.ask(RUN, run_body(*ring([2])))
    assert kind == OUTPUTS
    assert worker.end() == (0, "")


def test_a_rank_that_dies_is_told():
    start = time.monotonic()
    kind, said, worker = asked(f"{RING}:attention:fault=die", [0, 1, 2, 3])
    assert kind == FAILED and "Crash" in said and "Died: rank 3 ended with exit code 7" in said
    assert "rank 0 waits for a message from rank 3, which does not send it" in said
    assert time.monotonic() - start < SOON
    assert worker.process.wait(SOON) == 70
    gone(worker)


def test_a_rank_that_hangs_is_told():
    kind, said, worker = asked(f"{RING}:attention:fault=hang", [0, 2], "--patience", "2")
    assert kind == FAILED and "Crash" in said and "Hang: nothing came for " in said
    assert "rank 0 waits for a message from rank 2, which does not send it" in said
    assert "rank 2 is in numpy_ring.py:" in said and "hang" in said and "rank 1 is idle" in said
    assert worker.process.wait(SOON) == 70
    gone(worker)


KERNEL = """
import numpy as np
import seamproof, seamproof.cp

def program(local):
    if local.rank == 1:
        raise ValueError("no such block")
    local.group().receive(1)

@seamproof.subject(arrays="numpy", formats=["f32"], table={"parallel": {"algorithms": ["ring"], "sub_groups": True}})
def attention(p, q, k, v, dout=None, sink=None):
    return seamproof.cp.attend(p, program, q, k, v, dout)
"""


def test_an_error_of_a_rank_stops_those_who_wait_for_it(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    kind, said, worker = asked(tmp_path / "kernel.py", [0, 1, 2])
    assert kind == FAILED and "Raised" in said and "ValueError: no such block (on rank 1)" in said
    assert "kernel.py:7 in program" in said
    assert worker.end() == (0, "")


def test_a_file_that_does_not_load_is_told(tmp_path):
    (tmp_path / "kernel.py").write_text("raise ValueError('not today')")
    with pytest.raises(RuntimeError, match="not today"):
        Launched(tmp_path / "kernel.py").open()


def test_all_end_with_their_supervisor():
    worker = Launched(RING)
    worker.open()
    worker.process.kill()
    gone(worker)


def test_a_subject_gets_groups_that_the_processes_can_be():
    def groups(**parallel):
        return narrowed({"table": {"parallel": parallel}}, SIZE)["table"]["parallel"]

    part = {"algorithms": ["single", "ring"], "sub_groups": True}
    assert groups(**part, ranks_most=8) == {**part, "ranks_most": 4, "world_most": 4}
    whole = groups(algorithms=["single", "ring"])
    assert whole == {"algorithms": ["ring"], "ranks_least": 4, "ranks_most": 4, "world_most": 4}
    with pytest.raises(DeclarationError, match="1 to 3 ranks"):
        groups(algorithms=["ring"], ranks_most=3)
    with pytest.raises(DeclarationError, match="no algorithm of several ranks"):
        groups()


def told(command, launcher, target, *more):
    """Returns the exit code and the report of a command of the program on a subject."""
    try:
        path = program.find()
    except ProgramMissing:
        pytest.skip("there is no program; name one in $SEAMPROOF")
    backend = f"exec:{shlex.join([*launcher, str(target)])}"
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [path, command, "--backend", backend, *more],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def judged(tmp_path, launcher, target, cases):
    """Returns the exit code and the report of a campaign."""
    more = ["--cases", str(cases), "--seed", "1", "--scripts", "0", "--out", str(tmp_path / "out")]
    return told("run", launcher, target, *more)


def started(size):
    """Returns the command that starts some processes."""
    return [sys.executable, "-m", "seamproof.launched", "--ranks", str(size)]


STARTED = started(SIZE)


def test_the_judge_holds_a_ring_of_processes_for_right(tmp_path):
    code, said = judged(tmp_path, STARTED, RING, 30)
    assert code in (0, 4) and "failed 0" in said, said[-2000:]


# Of two ranks, a block that is taken for the other's has the positions of a rank's own rows.
BLOCK = "ranks took positions among their own rows"


@pytest.mark.parametrize(("fault", "words"), [("block", BLOCK), ("die", "ended with exit code 7")])
def test_the_judge_finds_the_faults_of_a_ring_of_processes(tmp_path, fault, words):
    code, said = judged(tmp_path, STARTED, f"{RING}:attention:fault={fault}", 5)
    assert code in (2, 3) and words in said, said[-2000:]


def test_torchrun_starts_a_ring_of_torch_over_gloo(tmp_path):
    pytest.importorskip("torch.distributed.run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE)]
    command = [*launcher, "-m", "seamproof.launched"]
    code, said = judged(tmp_path, command, EXAMPLES / "torch_ring.py", 6)
    assert code in (0, 4) and "failed 0" in said, said[-2000:]


TO_ITSELF = """
import torch
import torch.distributed as dist
import seamproof, seamproof.cp

def program(local):
    found, group = torch.zeros(2), local.group()
    # Two messages in order, and a place that is too short in a fault.
    places = [found[:1], found[1:] if seamproof.options().get("fault") is None else torch.zeros(2)]
    sends = [dist.P2POp(dist.isend, torch.tensor([float(n)]), local.problem.parallel.ranks[0], group) for n in (7, 8)]
    takes = [dist.P2POp(dist.irecv, place, local.problem.parallel.ranks[0], group) for place in places]
    for work in dist.batch_isend_irecv([*sends, *takes]):
        work.wait()
    raise ValueError(f"found {found.tolist()}")

@seamproof.subject(arrays="torch", device="cpu", formats=["f32"],
                   table={"parallel": {"algorithms": ["ring"], "sub_groups": True}})
def attention(p, q, k, v, dout=None, sink=None):
    return seamproof.cp.attend(p, program, q, k, v, dout)
"""


def test_a_rank_sends_to_itself_over_gloo(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "kernel.py").write_text(TO_ITSELF)
    _, said, worker = asked(tmp_path / "kernel.py", [2])
    assert "ValueError: found [7.0, 8.0] (on rank 2)" in said
    worker.process.kill()
    _, said, worker = asked(f"{tmp_path / 'kernel.py'}:attention:fault=short", [2])
    assert "a rank sends itself torch.float32 [1], and receives torch.float32 [2]" in said
    worker.process.kill()


# An adapter, the library that it needs, the number of processes, and how the case is dealt to them.
OTHERS = [
    ("torch_context_parallel.py:all_gather", "torch", 2, "ring:2 contiguous"),
    ("torch_context_parallel.py:all_to_all", "torch", 4, "ring:4 dual-chunk"),
    ("ring_flash_attention.py:varlen", "ring_flash_attn", 2, "ring:2 dual-chunk"),
    ("ring_flash_attention.py:varlen", "ring_flash_attn", 4, "ring:4 contiguous"),
    ("ring_flash_attention.py:dense", "ring_flash_attn", 2, "ring:1 contiguous"),
    ("ring_flash_attention.py:llama3", "ring_flash_attn", 2, "all-gather:2 contiguous"),
    ("yunchang_hybrid.py:attention", "yunchang", 2, "all-to-all:2 contiguous"),
    ("yunchang_hybrid.py:attention", "yunchang", 4, "hierarchical:4:2 dual-chunk"),
    ("yunchang_hybrid.py:attention", "yunchang", 4, "ring:4 contiguous"),
]


@pytest.mark.parametrize(("subject", "library", "size", "dealt"), OTHERS)
def test_programs_of_others_are_right_as_processes(subject, library, size, dealt):
    pytest.importorskip("torch")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    target = PACKAGE / "seamproof" / "adapters" / subject
    # Every rank has rows, the sequences have padding, and dq of bf16 has no known defect.
    case = ["--lengths", "13,16", "--padded", "16,16", "--heads", "4", "--dim", "16", "--format", "bf16"]
    group, balance = dealt.split()
    more = [*case, "--causal", "--bottom-right", "--cp", group, "--balance", balance]
    code, said = told("try", started(size), target, *more)
    assert code == 0 and "held" in said and "forward and backward" in said, said[-2000:]
