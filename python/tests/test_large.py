"""Large packs: inputs are those of the program, and its bounds hold a right kernel and catch a wrong one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from seamproof import arrays, frames, program
from seamproof.large.ops import ops
from seamproof.large.sums import Sums
from seamproof.large.values import MODES, Inputs, modulo_3, power_at_least, signed
from seamproof.problem import Problem
from seamproof.session import read_inputs

HERE = Path(__file__).parent
KERNELS = HERE / "large_kernels.py"
LIBRARIES = ["numpy", pytest.param("torch", marks=pytest.mark.skipif("not has_torch()"))]
# Sequences of other numbers of keys than of queries, padding, one query, and more keys than a chunk has rows.
LAYOUT = ["--lengths", "70,1x5,0,130x100", "--padded", "80,5,0,140", "--heads", "4/2"]
MASKS = [["--causal", "--bottom-right"], ["--window", "9,3"], []]


def has_torch():
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def found_program():
    try:
        return program.find()
    except program.ProgramMissing:
        pytest.skip("there is no program; name one in $SEAMPROOF")


def ran(*arguments, cwd, **more):
    environment = os.environ | {"SEAMPROOF_PYTHON": sys.executable, "OMP_NUM_THREADS": "2", **more}
    command = [found_program(), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=600)


def numbers(case, tmp_path):
    """Returns the problem of a stored case and its inputs, as the program gives them."""
    output = ran("inputs", str(case), cwd=tmp_path).stdout
    body = memoryview(output)[output.index(b"\n") + 1 :]
    length = int.from_bytes(body[16:24], "little")
    raw, rest = frames.split(body[24 : 24 + length])
    return raw, rest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_inputs_are_those_of_the_program_bit_for_bit(mode, library, tmp_path):
    library = arrays.library(library)("cpu")
    for dim, mask in [("64", MASKS[0]), ("40/24", MASKS[1]), ("64", MASKS[2])]:
        seed = str(2**63 + len(mask))
        form = "fp16" if mask else "f32" if mode == "flat" else "bf16"
        if library.name == "numpy" and form == "bf16":
            form = "fp16"
        words = [*LAYOUT, "--dim", dim, *mask, "--mode", mode, "--format", form, "--data-seed", seed]
        words += ["--sink", "learnable" if mask else "none", "--out", "case.json"]
        # The subject refuses some of them, which are stored all the same.
        ran("try", *words, cwd=tmp_path)
        raw, rest = numbers(tmp_path / "case.json", tmp_path)
        p = Problem.from_json(raw, library)
        assert raw["mode"] == mode
        right, got = read_inputs(p, rest), Inputs(p, ops(library), padding=3.0).all()
        for name, values in right.items():
            found = library.get(got[name], p.form(name), name)
            if name == "sink":
                assert np.array_equal(found, values)
                continue
            real = (p.q if name in ("q", "dout") else p.kv).real()
            assert np.array_equal(found[real], values[real]), f"{name} {mask} {form}"
            assert (found[~real] == 3.0).all()


def test_words_are_not_signed():
    words = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    array = np.array([signed(word) for word in words])
    assert modulo_3(array).tolist() == [word % 3 for word in words]
    assert [power_at_least(x) for x in (1.0, 1.5, 2.0, 0.3)] == [1.0, 2.0, 2.0, 0.5]


def hunt(tmp_path, fault, *more, seed="4"):
    usual = ["--tokens", "400..700", "--products", "50000000", "--rows", "16", "--seed", seed]
    name = f"python:{KERNELS}:attention:fault={fault}"
    output = ran("large", "--backend", name, *usual, *more, cwd=tmp_path)
    return output, output.stdout.decode()


@pytest.mark.skipif("not has_torch()")
def test_a_right_kernel_holds_and_its_canary_is_found(tmp_path):
    output, said = hunt(tmp_path, "none", "--cases", "8")
    assert output.returncode == 0, said + output.stderr.decode()
    assert re.search("^canary    found: .*: exact · ", said, re.M), said
    assert re.search("^canary    found: .*: envelope · ", said, re.M), said
    assert re.search("^[78] packs judged, 0 findings", said, re.M), said
    assert re.search(r"dk [\d.e-]+ .*· [\d.e]+ elements exact", said), said
    # Bounds that nothing comes near to would hold anything.
    largest = {
        name: max(map(float, re.findall(rf"\b{name} ([\d.e-]+)", said))) for name in ("out", "dq", "dk", "dv")
    }
    assert all(0.2 < ratio < 1 for ratio in largest.values()), largest
    assert re.search(r"kernel [\d.]+ ms · judging [\d.]+ ms, [\d.]+ of them there: [\d.]+ times$", said, re.M)


# The finding of each fault.
FAULTS = {
    "last-tile": "lse",
    "off-by-one": "lse · sequence 1",
    "query-block": "dk · sequence 0",
    "lost-head": "dk",
    "wrapped": "lse",
    "scaled-in-place": "q",
    "infinite": "out",
}


def told(fault):
    """Returns the beginning of a fault's finding: by a row that is known bit for bit, or by its bound."""
    return rf"(exact|envelope|structure) · {FAULTS[fault]}[ :,]"


@pytest.mark.skipif("not has_torch()")
def test_a_small_number_where_a_sum_is_zero_is_not_exact(tmp_path):
    output, said = hunt(tmp_path, "residue", "--cases", "1", "--shrink", "0s", seed="10")
    assert output.returncode == 2, said + output.stderr.decode()
    # Most sums are zero.
    found = re.search(r"^  finding exact · dk · .*; (\d+) of (\d+) elements wrong$", said, re.M)
    assert found and 2 * int(found[1]) > int(found[2]), said


@pytest.mark.skipif("not has_torch()")
def test_results_may_lack_slack_and_be_read_only(tmp_path):
    output, said = hunt(tmp_path, "bare", "--cases", "6")
    assert output.returncode == 0, said + output.stderr.decode()


def test_a_tensor_full_of_no_numbers_is_told_by_its_first_element():
    library = arrays.library("numpy")("cpu")
    wrong = np.full((3, 2, 4), np.nan)
    wrong[0, 0, :2] = 0
    sums = types.SimpleNamespace(tensors={"out": wrong, "lse": wrong[..., 0]}, ops=ops(library))
    assert Sums.no_numbers(sums, "out", [[0, 2]]) == [14, 0, 0, 2]
    assert Sums.no_numbers(sums, "lse", [[1, 2]]) == [3, 0, 1]


@pytest.mark.skipif("not has_torch()")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path):
    output, said = hunt(tmp_path, fault, "--cases", "4", "--shrink", "0s")
    assert output.returncode == 2, said + output.stderr.decode()
    assert re.search(f"^  finding {told(fault)}", said, re.M), said


@pytest.mark.skipif("not has_torch()")
@pytest.mark.parametrize("fault", ["off-by-one", "lost-head"])
def test_a_finding_is_made_small_for_the_ordinary_judge(fault, tmp_path):
    _, said = hunt(tmp_path, fault, "--cases", "1")
    # The ordinary judge shows it again, in a case of few rows.
    replay = re.search(r"^  replay  .* replay (\S+)$", said, re.M)
    assert replay, said
    again = ran("replay", replay[1], cwd=tmp_path)
    assert again.returncode == 2, again.stdout
    assert re.search(f"· {told(fault)}", again.stdout.decode()), again.stdout
    # And the pack as it was drawn shows it here.
    stored = re.search(r"^  again   .* --replay (\S+)$", said, re.M)
    name = f"python:{KERNELS}:attention:fault={fault}"
    assert f" --backend {name} " in stored[0], "the subject has its options"
    again = ran(
        "large", "--backend", name, "--replay", stored[1], "--shrink", "0s", "--out", "again", cwd=tmp_path
    )
    assert again.returncode == 2 and re.search(told(fault), again.stdout.decode()), again.stdout


RAISING = """
import seamproof
@seamproof.subject(arrays="numpy", formats=["f32"], backward=False)
def raises(p, q, k, v, dout=None, sink=None):
    raise ValueError("no such shape")
@seamproof.subject(arrays="numpy", formats=["f32"], backward=False)
def shapes(p, q, k, v, dout=None, sink=None):
    return q[..., :-1], p.empty("lse")
@seamproof.subject(arrays="numpy", formats=["f32"], backward=False)
def dies(p, q, k, v, dout=None, sink=None):
    import os
    os._exit(7)
@seamproof.subject(arrays="numpy", formats=["f32"], backward=False, d=[64], d_v=[64])
def forgets(p, q, k, v, dout=None, sink=None):
    out, lse = p.empty("out"), p.empty("lse")
    lse[:] = 0
    return out, lse
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", 3, "crash: ValueError: no such shape"),
        ("shapes", 3, "crash: TypeError: out has shape"),
        ("dies", 3, "crash: exit code 7 after uploaded: and again alone in a fresh worker"),
        ("forgets", 2, "envelope · out · sequence 0, head 0, row 0, lane 0: a result is no number"),
    ],
)
def test_a_run_without_results_is_a_finding(name, code, words, tmp_path):
    (tmp_path / "kernel.py").write_text(RAISING)
    usual = ["--tokens", "200", "--products", "100000000", "--seed", "1", "--cases", "1"]
    output = ran("large", "--backend", f"python:kernel.py:{name}", *usual, cwd=tmp_path)
    said = output.stdout.decode()
    assert output.returncode == code and words in said, said + output.stderr.decode()


def test_what_cannot_be_asked_is_an_error(tmp_path):
    (tmp_path / "kernel.py").write_text(RAISING)
    output = ran("large", "--backend", "nothing", cwd=tmp_path)
    assert output.returncode == 1 and b"python:FILE" in output.stderr
    ran("try", "--lengths", "5", "--mode", "staircase", "--out", "case.json", cwd=tmp_path)
    output = ran("large", "--backend", "python:kernel.py:raises", "--replay", "case.json", cwd=tmp_path)
    assert output.returncode == 1 and b"use `seamproof replay`" in output.stderr
