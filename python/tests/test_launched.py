"""Subjects whose ranks are processes: judged as they are, with faults, and with ranks that fail."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from supervisor import FAILED, OUTPUTS, PACKAGE, RUN, Worker, expected, inputs, problem, run_body

from seamproof import Problem, program
from seamproof.errors import DeclarationError, ProgramMissing
from seamproof.launched.opening import narrowed, seated

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


def test_a_world_is_as_large_as_the_processes_are():
    def ranks(given, world):
        return seated(Problem.from_json(ring(given, world)[0]), SIZE).parallel

    assert (ranks([2, 0], 3).world, ranks([2, 0], 3).ranks) == (4, (2, 0))
    cut = ranks([6, 1, 5], 7)
    assert (
        cut.world == 4
        and sorted(cut.ranks) in ([0, 2, 3], [1, 2, 3])
        and cut.ranks[1] < cut.ranks[2] < cut.ranks[0]
    )


def test_a_subject_gets_groups_that_the_processes_can_be():
    def groups(**parallel):
        return narrowed({"table": {"parallel": parallel}}, SIZE)["table"]["parallel"]

    part = {"algorithms": ["single", "ring"], "sub_groups": True}
    assert groups(**part, ranks_most=8) == {**part, "ranks_most": 4}
    whole = groups(algorithms=["single", "ring"])
    assert whole == {"algorithms": ["ring"], "ranks_least": 4, "ranks_most": 4}
    with pytest.raises(DeclarationError, match="1 to 3 ranks"):
        groups(algorithms=["ring"], ranks_most=3)
    with pytest.raises(DeclarationError, match="no algorithm of several ranks"):
        groups()


def judged(tmp_path, launcher, target, cases):
    """Returns the exit code and the report of a campaign."""
    try:
        path = program.find()
    except ProgramMissing:
        pytest.skip("there is no program; name one in $SEAMPROOF")
    command = [*launcher, str(target)]
    more = ["--cases", str(cases), "--seed", "1", "--scripts", "0", "--out", str(tmp_path / "out")]
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [path, "run", "--backend", f"exec:{shlex.join(command)}", *more],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


STARTED = [sys.executable, "-m", "seamproof.launched", "--ranks", str(SIZE)]


def test_the_judge_holds_a_ring_of_processes_for_right(tmp_path):
    code, said = judged(tmp_path, STARTED, RING, 30)
    assert code in (0, 4) and "failed 0" in said, said[-2000:]


@pytest.mark.parametrize(("fault", "words"), [("block", "saw hidden key"), ("die", "ended with exit code 7")])
def test_the_judge_finds_the_faults_of_a_ring_of_processes(tmp_path, fault, words):
    code, said = judged(tmp_path, STARTED, f"{RING}:attention:fault={fault}", 5)
    assert code in (2, 3) and words in said, said[-2000:]


def test_torchrun_starts_a_ring_of_torch_over_gloo(tmp_path):
    pytest.importorskip("torch.distributed.run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE)]
    command = [*launcher, "-m", "seamproof.launched"]
    code, said = judged(tmp_path, command, EXAMPLES / "torch_ring.py", 6)
    assert code in (0, 4) and "failed 0" in said, said[-2000:]
