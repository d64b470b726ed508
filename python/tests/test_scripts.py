"""Scripts of findings: each kind of subject has one that shows its failure, without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from supervisor import problem

import seamproof
from seamproof import program
from seamproof.loading import load_file
from seamproof.reference import reference
from seamproof.verdict import is_wrong, tell_keys

# A reference of the kernel's own, as a script cannot have this package's.
PLAIN = """
def attend(p, q, k, v, dout, sink, scale):
    rows = [(s.q.real_rows(), s.kv.real_rows()) for s in p.sequences]
    return mine(q, k, v, dout, sink, rows, p.mask, scale, p.softcap)

"""
NUMPY = """
@sp.subject(arrays="numpy", formats=["f32"], {declared})
def kernel(p, q, k, v, dout=None, sink=None):
    got = attend(p, q, k, v, dout, sink, p.scale * 1.01)
    lse = got["lse"].astype(np.float32)
{body}
"""
BODIES = {
    "plain": ("", '    return got["out"].astype(np.float32), lse'),
    "th": (
        'lse=sp.lse("2", "th", "+inf")',
        '    return got["out"].astype(np.float32), (lse / np.log(2)).T.astype("f4")',
    ),
    "memory": (
        "",
        "    out, to = p.empty(), p.empty('lse')\n    out[:], to[:] = got['out'], lse\n    return out, to",
    ),
    "sight": (
        "",
        "    blind = np.zeros(p.q.rows, bool)\n"
        "    for at, run in enumerate(p.q.runs):\n"
        "        blind[run.real_rows()] = ~p.visible(at).any(1)\n"
        "    assert (blind == p.blind_rows()).all() and p.form('out') == 'f32'\n"
        "    assert all(p.shift(at) == 0 or p.bottom_right for at in range(len(p.sequences)))\n"
        '    return got["out"].astype(np.float32), lse',
    ),
    "views": (
        "",
        '    assert p.view(q, "q").shape == q.shape\n    return got["out"].astype(np.float32), lse',
    ),
    "sinks": ('sinks=["learnable"]', '    return got["out"].astype(np.float32), lse'),
}
WITH_GRADIENTS = """
    more = {name: got[name].astype(np.float32) for name in ("dq", "dk", "dv")}
    more["dsink"] = got["dsink"].astype(np.float32)
    return sp.Result(got["out"].astype(np.float32), lse, **more)"""


def checked(tmp_path: Path, text: str) -> str:
    """Checks a kernel that is wrong, and returns what the check says."""
    path = tmp_path / "kernels.py"
    path.write_text(text)
    with pytest.raises(AssertionError) as caught:
        seamproof.check(load_file(str(path)).kernel)
    return str(caught.value)


def show(tmp_path: Path, text: str, embedded: bool = True) -> str:
    """Checks a kernel that is wrong, and returns what its script prints."""
    (line,) = [line for line in checked(tmp_path, text).splitlines() if line.startswith("script")]
    assert "does not show" not in line and "there is none" not in line, line
    script = tmp_path / line.split()[2]
    assert ("spec_from_file_location" not in script.read_text()) == embedded
    assert "import seamproof" not in script.read_text() and "from seamproof" not in script.read_text()
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", str(script)],
        capture_output=True,
        text=True,
        env={"PATH": "/nowhere"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def own_reference() -> str:
    """Returns the reference under another name, so that the kernel is a file of its own."""
    text = (Path(seamproof.__file__).parent / "reference.py").read_text()
    return (
        text.replace("def reference", "def mine")
        .replace("keys_seen", "own_keys")
        .replace("key_intervals", "own_intervals")
        .replace("import numpy as np\n", "")
    )


@pytest.mark.parametrize("kind", BODIES)
def test_numpy(fake_program, tmp_path, kind):
    declared, body = BODIES[kind]
    text = "import numpy as np\nimport seamproof as sp\n" + own_reference() + PLAIN
    told = show(tmp_path, text + NUMPY.format(declared=f"backward=False, {declared}".rstrip(", "), body=body))
    assert "lse: " in told and "exact" in told


def test_numpy_with_gradients(fake_program, tmp_path):
    text = "import numpy as np\nimport seamproof as sp\n" + own_reference() + PLAIN
    text += NUMPY.format(declared="statistics=[]", body=WITH_GRADIENTS.replace(", lse,", ", None,"))
    text = text.replace("p.scale * 1.01", "p.scale").replace('got["dq"]', 'got["dq"] * 2')
    text = text.replace('more["dsink"]', 'more["dk"] *= 2\n    more["dsink"]')
    assert "dk: " in show(tmp_path, text)


def test_gradients_of_a_function_in_a_file_that_is_imported(fake_program, tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 2\n" + "import numpy as np\n" + own_reference())
    text = """
import numpy as np, seamproof, beside

def masked(q, k, v, starts_q, starts_k, scale, dout=None):
    rows = [(slice(a, b), slice(c, d)) for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:])]
    return beside.mine(q, k, v, dout, None, rows, (None, None, True, (), None, 0, 0), scale, None)

def grads(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    got = masked(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, dout)
    return [beside.FACTOR * got[name].astype(np.float32) for name in ("dq", "dk", "dv")]

@seamproof.flash_varlen(arrays="numpy", formats=["f32"], backward=grads, lse=False)
def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    return masked(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)["out"].astype(np.float32)
"""
    assert "does not show" not in checked(tmp_path, text)
    (script,) = Path("seamproof.findings").glob("*.py")
    assert "grads = _module.grads" in script.read_text()


def test_gradients_of_a_function_without_a_name_leave_no_script(fake_program, tmp_path):
    text = """
import functools
import numpy as np
import seamproof

def zeros(dout, q, k, v, out, lse, wrong=1.0, **_):
    return np.full_like(q, wrong), np.full_like(k, wrong), np.full_like(v, wrong)

@seamproof.flash_varlen(arrays="numpy", formats=["f32"], lse=False, backward=functools.partial(zeros, wrong=3.0))
def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    return np.zeros((*q.shape[:2], v.shape[2]), np.float32)
"""
    assert "there is none" in checked(tmp_path, text)


VARLEN = """
def helper(x):
    return x * FACTOR

FACTOR = 1.0 + 2**-6

@seamproof.flash_varlen(arrays={library!r}, device="cpu", formats=["f32"], lse=False)
def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal=False, window_size=(-1, -1)):
    return helper(attention.function(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, softmax_scale, causal, window_size)[0])
"""


def test_torch_with_gradients(fake_program, tmp_path):
    pytest.importorskip("torch")
    example = (Path(__file__).parent.parent / "examples/torch_attention.py").read_text()
    text = example.partition("@seamproof")[0] + "def attention(" + example.partition("def attention(")[2]
    text = text.partition("def test_attention")[0]
    told = show(tmp_path, text + VARLEN.format(library="torch").replace("attention.function", "attention"))
    assert "out: " in told


JAX = """
import jax
import jax.numpy as jnp
import seamproof

@seamproof.flash_varlen(arrays="jax", device="cpu", formats=["f32"], lse=False)
def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal=False):
    return jnp.tanh(q[..., :1] * v.sum() * softmax_scale) * jnp.ones(v.shape[-1])
"""


def test_jax_with_gradients(fake_program, tmp_path):
    pytest.importorskip("jax")
    assert "out: " in show(tmp_path, JAX)


def test_an_error(fake_program, tmp_path):
    text = "import seamproof as sp\n@sp.subject(arrays='numpy', formats=['f32'], backward=False)\n"
    told = show(tmp_path, text + "def kernel(p, q, k, v, dout, sink):\n    raise KeyError('lost')\n")
    assert "KeyError: 'lost'" in told


def test_a_kernel_that_needs_its_neighbours(fake_program, tmp_path):
    (tmp_path / "neighbour.py").write_text("WRONG = 3\n")
    text = "import numpy as np\nimport seamproof\nfrom neighbour import WRONG\n"
    text += "@seamproof.flash_varlen(arrays='numpy', lse=False, backward=False)\n"
    text += "def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):\n"
    text += "    return np.full((*q.shape[:2], v.shape[2]), WRONG, np.float32)\n"
    assert "does not show" not in checked(tmp_path, text)
    (script,) = Path("seamproof.findings").glob("*.py")
    assert "spec_from_file_location" in script.read_text()


def test_a_kernel_whose_names_are_the_scripts_own(fake_program, tmp_path):
    """Its file is imported, so that neither function takes the other's place."""
    text = "import numpy as np\nimport seamproof\n"
    text += "def verdict(shape):\n    return np.full(shape, 3, np.float32)\n\n"
    text += "@seamproof.flash_varlen(arrays='numpy', lse=False, backward=False)\n"
    text += "def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):\n"
    text += "    return verdict((*q.shape[:2], v.shape[2]))\n"
    assert "does not show" not in checked(tmp_path, text)
    (script,) = Path("seamproof.findings").glob("*.py")
    assert "spec_from_file_location" in script.read_text()


@pytest.mark.parametrize(
    "imports",
    [
        "import numpy as np, seamproof, math",
        "import numpy as np, seamproof.loading, math, seamproof",
        "import numpy as np, math; import seamproof",
        "import seamproof; from math import pi; import numpy as np, math",
    ],
)
def test_imports_beside_that_of_the_package_stay(fake_program, tmp_path, imports):
    text = f"{imports}\n"
    text += "@seamproof.flash_varlen(arrays='numpy', lse=False, backward=False)\n"
    text += "def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):\n"
    text += f"    wrong = {'pi' if 'pi' in imports else 'math.pi'}\n"
    text += "    return np.full((*q.shape[:2], v.shape[2]), wrong, np.float32)\n"
    assert "3.14159" in show(tmp_path, text)


def test_functions_without_a_name_that_can_be_imported():
    import functools

    from seamproof import source

    assert source.importing(json.dumps).text == "from json import dumps\n"
    for function in (functools.partial(json.dumps), lambda: None):
        with pytest.raises(source.NoSource, match="no name"):
            source.importing(function)


# Kernels with one fault each, which a check of its own finds.
KINDS = """
import numpy as np
import seamproof as sp

DECLARED = dict(arrays="numpy", formats=["f32"], backward=False, layout=sp.packed(slack=True))

def plain(p, q, k, v, far=0):
    out, lse = np.zeros(p.shape("out"), np.float32), np.full(p.shape("lse"), -np.inf, np.float32)
    for s in p.sequences:
        for head in range(p.heads_q):
            keys = slice(s.kv.offset, s.kv.offset + s.kv.len + far)
            logits = p.scale * q[s.q.real_rows(), head] @ k[keys, head // p.group].T
            logits[:, s.kv.len :] = -np.inf
            weights = np.exp(logits)
            total = weights.sum(1, keepdims=True)
            out[s.q.real_rows(), head] = weights / total @ v[keys, head // p.group]
            lse[head, s.q.real_rows()] = np.log(total[:, 0])
    return out, lse

@sp.subject(**DECLARED, padding_inputs="anything")
def poison(p, q, k, v, dout=None, sink=None):
    return plain(p, q, k, v, far=1)

@sp.subject(**DECLARED)
def structure(p, q, k, v, dout=None, sink=None):
    out, lse = plain(p, q, k, v)
    to = p.empty()
    to[:] = out
    return to, lse

@sp.subject(**DECLARED)
def capability(p, q, k, v, dout=None, sink=None):
    raise sp.Refused("lengths")

@sp.subject(**DECLARED)
def identity(p, q, k, v, dout=None, sink=None):
    return plain(p, q, k, v)

@sp.subject(**DECLARED)
def lost(p, q, k, v, dout=None, sink=None):
    import os
    os._exit(9)

@sp.subject(**DECLARED)
def raising(p, q, k, v, dout=None, sink=None):
    if p.parallel.is_single:
        raise ValueError("no rows")

@sp.subject(**DECLARED)
def hang(p, q, k, v, dout=None, sink=None):
    import os, time
    with open("calls", "w") as calls:
        calls.write(f"{os.getpid()}\\n")
    time.sleep(600)

print("printed by the file")
"""
SHOWN = {
    "poison": "out changes where rows that hold no token change, in row 0: nan and ",
    "structure": "out: 12 elements were written in rows that no sequence owns",
    "capability": "the call raises an error",
    "crash": "",
}


def stored(name: str, check: str, folder: Path, **more) -> Path:
    """Stores a case of a subject among the kinds, in which that check broke."""
    path = folder / "kinds.py"
    path.write_text(KINDS)
    found = {"finding": {"check": check, "tensor": "out" if check == "poison" else None, "what": "words"}}
    case = {"version": 1, "subject": {"name": f"python:{path}:{name}"}, "found": found} | more
    case["problem"] = problem([(2, 3)], heads=(2, 1), dims=(4, 3), slack=2)
    file = folder / f"case-{name}.json"
    file.write_text(json.dumps(case))
    return file


def made(case: Path, seconds: int = 60) -> dict:
    """Has the script of a stored case made, as the program does, and returns what is said of it."""
    command = [sys.executable, "-m", "seamproof.script", "--limit", str(seconds), "--", str(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "printed" not in done.stdout, done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["written"] else 1), done.stderr
    assert answer["written"] or f"{case}: {answer['doubt']}\n" in done.stderr, done.stderr
    return answer


@pytest.mark.parametrize("check", SHOWN)
def test_a_stored_case(fake_program, tmp_path, check):
    case = stored("lost" if check == "crash" else check, check, tmp_path)
    assert made(case) == {"written": True, "shows": True, "doubt": None}
    script = case.with_suffix(".py")
    assert "import seamproof" not in script.read_text()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == (9 if check == "crash" else 1) and SHOWN[check] in done.stdout, done.stdout


@pytest.mark.parametrize(("name", "shows"), [("ValueError", True), ("TypeError", False)])
def test_another_error_is_not_the_failure(fake_program, tmp_path, name, shows):
    case = stored("raising", "crash", tmp_path)
    text = case.read_text()
    case.write_text(text.replace('"words"', f'"{name}: no rows"'))
    assert made(case)["shows"] is shows


def test_an_identity_is_in_doubt(fake_program, tmp_path):
    answer = made(stored("identity", "identity", tmp_path))
    assert answer["written"] and not answer["shows"]
    assert "an identity compares the runs of two problems" in answer["doubt"]


def test_the_time_of_a_script_that_hangs_has_the_subjects_load_in_it(fake_program, tmp_path):
    case = stored("hang", "timeout", tmp_path)
    file = tmp_path / "kinds.py"
    file.write_text(file.read_text() + "import time\ntime.sleep(1)\n")
    start = time.monotonic()
    assert made(case, 6) == {"written": True, "shows": True, "doubt": None}
    assert time.monotonic() - start < 9


def test_a_long_reason_is_cut(fake_program, tmp_path):
    case = stored("poison", "poison", tmp_path)
    (tmp_path / "kinds.py").write_text("raise RuntimeError('x' * 100_000)\n")
    assert 4000 < len(made(case)["doubt"]) <= 4096


def test_a_script_that_imports_the_kernels_file_is_in_doubt(fake_program, tmp_path):
    case = stored("poison", "poison", tmp_path)
    file = tmp_path / "kinds.py"
    # The script has a variable of this name.
    file.write_text(file.read_text().replace("def plain(", "def bound(").replace("plain(p,", "bound(p,"))
    answer = made(case)
    assert answer["written"] and answer["shows"]
    assert answer["doubt"].startswith("it imports the kernel's file, because ")


ASKING = """import numpy as np
import seamproof
from seamproof import options

GIVEN = seamproof.options()
WRONG = 3.0
if options():
    WRONG = float(GIVEN["wrong"])

@seamproof.flash_varlen(arrays="numpy", formats=["f32"], lse=False, backward=False)
def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    return np.full((*q.shape[:2], v.shape[2]), WRONG, np.float32)
"""


@pytest.mark.parametrize(("given", "got"), [({}, "3.0"), ({"wrong": "4.5"}, "4.5")])
def test_a_file_that_asks_for_options(fake_program, tmp_path, given, got):
    case, file = stored("kernel", "envelope", tmp_path), tmp_path / "kinds.py"
    file.write_text(ASKING)
    raw = json.loads(case.read_text())
    raw["subject"]["options"] = given
    raw["found"]["finding"]["tensor"] = "out"
    case.write_text(json.dumps(raw))
    assert made(case) == {"written": True, "shows": True, "doubt": None}
    script = case.with_suffix(".py")
    assert "import seamproof" not in script.read_text() and "from seamproof" not in script.read_text()
    command = [sys.executable, "-I", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert done.returncode == 1 and f"got    {got}\n" in done.stdout, done.stdout + done.stderr


OF_RANKS = """
@sp.subject(**DECLARED, table={"parallel": {"algorithms": ["ring"], "balances": ["contiguous"], "ranks_most": 2}})
def ranks(p, q, k, v, dout=None, sink=None):
    # What a class Parallel says.
    raise KeyError(f"{p.parallel.world} ranks")
"""


def test_ranks_that_a_script_cannot_carry(fake_program, tmp_path):
    case, file = stored("ranks", "capability", tmp_path), tmp_path / "kinds.py"
    file.write_text(file.read_text() + OF_RANKS)
    parallel = {"algorithm": "ring", "balance": "contiguous", "world": 2, "ranks": [0, 1]}
    even = problem([(4, 4)], heads=(2, 1), dims=(4, 3)) | {"parallel": parallel}
    case.write_text(json.dumps(json.loads(case.read_text()) | {"problem": even}))
    assert made(case)["shows"]
    done = subprocess.run([sys.executable, str(case.with_suffix(".py"))], capture_output=True, text=True)
    assert "KeyError: '2 ranks'" in done.stdout, done.stdout + done.stderr


def is_there(process: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done) -> None:
    """Waits until something is true."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < 20
        time.sleep(0.05)


HOLDS_ITS_PIPES = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"]).pid, file=sys.stderr)
print("x" * 200_000 + "end")
"""


def test_a_command_is_not_waited_for_longer_than_it_runs():
    start = time.monotonic()
    code, said, process = program.run_in_group([sys.executable, "-c", HOLDS_ITS_PIPES], dict(os.environ), 60)
    assert time.monotonic() - start < 20
    assert code == 0 and said.endswith("xend\n") and len(said) == 64 << 10
    if Path("/proc/self").exists():
        wait_until(lambda: not is_there(int(process)))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
def test_a_leashed_script_ends_with_whoever_started_it(fake_program, tmp_path):
    case = stored("hang", "timeout", tmp_path)
    command = [sys.executable, "-m", "seamproof.script", "--leashed", "--limit", "60", "--", str(case)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    calls = tmp_path / "calls"
    wait_until(lambda: calls.exists() and calls.read_text().endswith("\n"))
    script = int(calls.read_text())
    assert is_there(script) and script != writer.pid
    writer.stdin.close()
    wait_until(lambda: not is_there(script))
    assert writer.wait(10) == -9 and writer.stdout.read() == b""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"subject": {"name": "python:kinds.py:poison~call-scale-off"}}, "planted at the call"),
        ({"subject": {"name": "emulated"}}, "in no Python file"),
        (
            {"subject": {"name": "exec:python3 -m seamproof.launched --ranks 2 ring.py"}},
            "seamproof shrink CASE.json --backend python:FILE --out OTHER.json",
        ),
        ({"subject": {"name": "python:none.py:poison"}}, "there is no file none.py"),
        ({"before": [{}, {}]}, "needs 2 earlier runs"),
        ({"found": {"unconfirmed": "seen once"}}, "not seen again"),
        (
            {"found": {"finding": {"what": "DeclarationError: the function returned None"}}},
            "breaks its own declaration",
        ),
    ],
)
def test_why_there_is_no_script(fake_program, tmp_path, more, why):
    answer = made(stored("poison", "poison", tmp_path, **more))
    assert not answer["written"] and answer["doubt"].startswith("there is none: ") and why in answer["doubt"]


def test_another_file_of_the_name_stays(fake_program, tmp_path):
    case = stored("poison", "poison", tmp_path)
    case.with_suffix(".py").write_text("mine = 1\n")
    assert "which stays" in made(case)["doubt"]
    assert case.with_suffix(".py").read_text() == "mine = 1\n"


def test_a_number_in_place_of_an_infinity_is_wrong(capsys):
    got, exact = np.array([[0.0, 1.0]]), np.array([[-np.inf, 1.0]])
    assert is_wrong("lse", got, exact, "exact", 0.0, lambda row, head: None)
    assert "1 of 2 elements are wrong" in capsys.readouterr().out
    assert not is_wrong("lse", exact, exact, "exact", 0.0, lambda row, head: None)


def test_the_keys_that_a_row_saw_are_told(capsys):
    draw = np.random.default_rng(1)
    q, k, v = (draw.normal(size=shape) for shape in ((4, 2, 8), (6, 1, 8), (6, 1, 5)))
    sequences, mask, softmax = [(slice(0, 4), slice(1, 6))], (None, 0, True, (), None, 0, 0), (0.5, 3.0)
    for right, sees in ((1, "k[1:4]"), (-1, "k[1:2]")):
        wrong = reference(q, k, v, None, None, sequences, (None, right, *mask[2:]), *softmax)
        tell_keys(0, 1, wrong, (q, k, v), None, sequences, mask, softmax)
        assert capsys.readouterr().out == f"  as if it saw {sees}, where it must see k[1:3]\n"
    tell_keys(0, 1, {name: x * 2 for name, x in wrong.items()}, (q, k, v), None, sequences, mask, softmax)
    assert capsys.readouterr().out == ""
