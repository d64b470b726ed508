"""The worker, asked by a supervisor in Python."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from supervisor import OUTPUTS, PHASE, RUN, Worker, expected, frame, inputs, problem, run_body, split_frame

EXAMPLES = Path(__file__).parent.parent / "examples"
UNWRITTEN = 0x7FE5EA11


def file(tmp_path: Path, text: str) -> str:
    """Writes a subject's file, and returns its path."""
    path = tmp_path / "kernel.py"
    path.write_text("import numpy as np\nimport seamproof\n" + text)
    return str(path)


SUBJECT = "@seamproof.subject(formats=['f32'], arrays='numpy', backward=False)\n"
ZEROS = "    return np.zeros(p.shape('out'), np.float32), np.zeros(p.shape('lse'), np.float32)\n"


def test_the_example_is_right():
    worker = Worker(f"{EXAMPLES / 'numpy_attention.py'}:attention")
    ready = worker.open()
    assert ready["devices"] == 1 and ready["name"] == "" and "numpy" in ready["versions"]
    assert ready["declared"]["table"]["precisions"][0]["p"] == "f32"
    for options in (
        {},
        {"right": 0},
        {"left": 1, "right": 0},
        {"left": 2, "right": 1, "slack": 1},
        {"left": 1, "slack": 5},
        {"heads": (4, 2)},
    ):
        raw = problem([(3, 5), (0, 2), (4, 0), (1, 1), (6, 2)], **options)
        values = inputs(raw)
        phases, got = worker.run(raw, values)
        assert phases == [0, 1, 3, 4]
        right = expected(raw, values)
        tokens = raw["rows"]["q"] - options.get("slack", 0)
        np.testing.assert_allclose(got["out"][:tokens], right["out"][:tokens], atol=1e-6)
        np.testing.assert_allclose(got["lse"][:, :tokens], right["lse"][:, :tokens], atol=1e-6)
        assert (got["out"][tokens:].view(np.uint32) == UNWRITTEN).all()
        assert got["damage"] == []
    assert worker.end() == (0, "")


def test_faults_are_options():
    worker = Worker(f"{EXAMPLES / 'numpy_wrong.py'}:attention")
    worker.open({"fault": "base"})
    raw = problem([(3, 5)])
    values = inputs(raw)
    _, got = worker.run(raw, values)
    np.testing.assert_allclose(got["lse"], expected(raw, values)["lse"] / np.log(2), rtol=1e-5)
    worker.end()


def test_options_that_nobody_asks_for_are_an_error(tmp_path):
    kernel = SUBJECT + "def kernel(p, q, k, v, dout, sink):\n" + ZEROS
    worker = Worker(file(tmp_path, kernel))
    with pytest.raises(RuntimeError, match="asks for no options, so that tile=64 means nothing"):
        worker.open({"tile": "64"})
    worker.end()
    worker = Worker(file(tmp_path, "seamproof.options()\n" + kernel))
    worker.open({"tile": "64"})
    assert worker.end() == (0, "")


def test_an_option_with_a_slip_in_its_name_is_an_error(tmp_path):
    kernel = 'FAULT = seamproof.options().get("fault")\n' + SUBJECT + "def kernel(p, q, k, v, dout, sink):\n" + ZEROS
    worker = Worker(file(tmp_path, kernel))
    with pytest.raises(RuntimeError, match="reads no option 'fautl'; it reads 'fault'"):
        worker.open({"fautl": "late"})
    worker.end()
    for given in ({"fault": "late"}, {"fault": "late", "fautl": "x"}, {"later": "x"}):
        worker = Worker(file(tmp_path, kernel))
        worker.open(given)
        assert worker.end() == (0, "")


def test_an_error_is_told_and_the_worker_goes_on(tmp_path):
    path = file(
        tmp_path,
        SUBJECT
        + "def kernel(p, q, k, v, dout, sink):\n    if p.q.rows == 3:\n        deeper(q)\n"
        + ZEROS
        + "def deeper(q):\n    raise ValueError('no rows of three')\n",
    )
    worker = Worker(path)
    worker.open()
    raw = problem([(3, 5)])
    phases, failed = worker.run(raw, inputs(raw))
    assert phases == [0, 1]
    first, *frames = failed["Raised"].splitlines()
    assert first == "ValueError: no rows of three"
    assert frames[0].strip() == "kernel.py:6 in kernel: deeper(q)"
    assert frames[-1].strip().startswith("kernel.py:9 in deeper")
    raw = problem([(4, 5)])
    assert "out" in worker.run(raw, inputs(raw))[1]
    assert worker.end()[0] == 0


def test_prints_go_to_standard_error(tmp_path):
    flood = "print('x' * 200_000); import os; os.write(1, b'raw\\n'); input_is_empty = not os.read(0, 1)\n"
    path = file(
        tmp_path, flood + SUBJECT + "def kernel(p, q, k, v, dout, sink):\n    print('called')\n" + ZEROS
    )
    worker = Worker(path)
    # Nobody reads standard error until the end, so the flood must be smaller than what a test may leave unread.
    import threading

    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(worker.process.stderr.read()))
    reader.start()
    worker.open()
    raw = problem([(1, 1)])
    assert "out" in worker.run(raw, inputs(raw))[1]
    worker.process.stdin.close()
    reader.join(20)
    assert worker.process.wait(20) == 0
    assert said[0].count(b"x") >= 200_000 and b"raw" in said[0] and b"called" in said[0]


def test_memory_and_refusals(tmp_path):
    body = "    if p.causal:\n        raise seamproof.Refused('softcap')\n    raise MemoryError('no room')\n"
    worker = Worker(file(tmp_path, SUBJECT + "def kernel(p, q, k, v, dout, sink):\n" + body))
    worker.open()
    raw = problem([(1, 1)], right=0)
    assert worker.run(raw, inputs(raw))[1] == {"Refused": "softcap"}
    raw = problem([(1, 1)])
    assert worker.run(raw, inputs(raw))[1]["OutOfMemory"].startswith("MemoryError: no room")
    assert worker.process.wait(20) == 70


def test_a_hung_kernel_does_not_outlive_the_supervisor(tmp_path):
    body = "    import time\n    time.sleep(600)\n"
    worker = Worker(file(tmp_path, SUBJECT + "def kernel(p, q, k, v, dout, sink):\n" + body))
    worker.open()
    raw = problem([(1, 1)])
    worker.process.stdin.write(frame(RUN, 2, run_body(raw, inputs(raw))))
    worker.process.stdin.close()
    assert worker.process.wait(30) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", "ZeroDivisionError"),
        ("", "has no subject"),
        ("@seamproof.subject(formats=['f32'], versions=['numpy'])\ndef one(p):\n    pass\n", "give names and versions"),
        (SUBJECT + "def one(p):\n    pass\n" + SUBJECT + "def two(p):\n    pass\n", "one, two"),
    ],
)
def test_a_subject_that_cannot_be_opened(tmp_path, text, words):
    worker = Worker(file(tmp_path, text))
    with pytest.raises(RuntimeError, match=words):
        worker.open()
    assert worker.end()[0] == 0


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of Unix")
def test_a_worker_says_where_it_is_when_it_is_asked(tmp_path):
    kernel = (
        "def kernel(p, q, k, v, dout, sink):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    worker = Worker(file(tmp_path, SUBJECT + kernel + ZEROS))
    worker.open()
    raw = problem([(3, 5)])
    assert worker.run(raw, inputs(raw))[0][-1] == 4
    code, said = worker.end()
    assert code == 0 and "most recent call first" in said and "in kernel" in said


def test_a_kernel_that_exits_is_told_and_the_worker_goes_on(tmp_path):
    kernel = "def kernel(p, q, k, v, dout, sink):\n    if p.q.rows == 3:\n        raise SystemExit(0)\n"
    worker = Worker(file(tmp_path, SUBJECT + kernel + ZEROS))
    worker.open()
    raw = problem([(3, 5)])
    assert worker.run(raw, inputs(raw))[1]["Raised"].startswith("SystemExit: 0")
    raw = problem([(2, 5)])
    assert worker.run(raw, inputs(raw))[0][-1] == 4, "the worker goes on"


def test_a_declaration_that_is_not_kept(tmp_path):
    worker = Worker(file(tmp_path, SUBJECT + "def kernel(p, q, k, v, dout, sink):\n    return q\n"))
    worker.open()
    raw = problem([(1, 1)], dims=(3, 3))
    failed = worker.run(raw, inputs(raw))[1]
    assert failed["Raised"].startswith("DeclarationError: no lse came back"), failed
    worker.end()


def test_another_version_is_one_line(tmp_path):
    worker = Worker(file(tmp_path, ""))
    worker.process.stdin.write(frame(1, 1, b"{}", version=2))
    code, said = worker.end()
    assert code == 1 and "version 3" in said and "version 2" in said and len(said.splitlines()) == 1


def test_a_changed_byte_is_noticed(tmp_path):
    worker = Worker(file(tmp_path, ""))
    worker.process.stdin.write(frame(1, 1, b"{}").replace(b"{}", b"[]"))
    code, said = worker.end()
    assert code == 1 and "digest" in said


def test_guards_and_what_was_not_written(tmp_path):
    body = """
    out, lse = p.empty_out(), p.empty("lse")
    out[1:] = 0
    lse[:] = 0
    out.base[1024 - 3] = 1  # three elements before the tensor
    return out, lse
"""
    worker = Worker(file(tmp_path, SUBJECT + "def kernel(p, q, k, v, dout, sink):" + body))
    worker.open()
    raw = problem([(2, 2)], slack=1)
    _, got = worker.run(raw, inputs(raw))
    assert got["damage"] == [{"tensor": "out", "before": True, "distance": 2, "elements": 1}]
    assert (got["out"][0].view(np.uint32) == UNWRITTEN).all()
    # A row of slack that the kernel wrote in memory of ours is told; the judge says what it is.
    assert (got["out"][2] == 0).all()
    worker.end()


def test_a_hundred_megabytes_pass(tmp_path):
    text = (
        SUBJECT
        + "def kernel(p, q, k, v, dout, sink):\n    return q[:, :, :1], np.zeros(p.shape('lse'), np.float32)\n"
    )
    worker = Worker(file(tmp_path, text))
    worker.open()
    raw = problem([(100_000, 1)], heads=(1, 1), dims=(256, 1))
    values = inputs(raw)
    raw_small = problem([(1, 1)], heads=(1, 1), dims=(256, 1))
    worker.run(raw_small, inputs(raw_small))
    whole = frame(RUN, worker.sequence + 1, run_body(raw, values))
    worker.sequence += 1
    start = time.perf_counter()
    worker.process.stdin.write(whole)
    worker.process.stdin.flush()
    # The first phase says that the body has arrived and that its digest is right.
    kinds = [split_frame(worker.process.stdout.read)[0]]
    arrived = time.perf_counter() - start
    while kinds[-1] == PHASE:
        kinds.append(split_frame(worker.process.stdout.read)[0])
    # For whoever measures, with `pytest -s`: an idle machine needs at most 0.3 s one way.
    whole_run = time.perf_counter() - start
    print(f"{len(whole) / 1e6:.0f} MB one way in {arrived:.2f} s; the run in {whole_run:.2f} s")
    assert kinds[0] == PHASE and kinds[-1] == OUTPUTS
    worker.end()
