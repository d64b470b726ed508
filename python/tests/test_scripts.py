"""Scripts of findings: each kind of subject has one that shows its failure, without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import seamproof
from seamproof.loading import load_file

# A reference of the kernel's own, as a script cannot have this package's.
PLAIN = """
def attend(p, q, k, v, dout, sink, scale):
    rows = [(s.q.real_rows(), s.kv.real_rows()) for s in p.sequences]
    return mine(q, k, v, dout, sink, rows, p.left, p.right, p.bottom_right, scale, p.softcap)

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
    "sinks": ('sinks=["learnable"]', '    return got["out"].astype(np.float32), lse'),
}
WITH_GRADIENTS = """
    more = {name: got[name].astype(np.float32) for name in ("dq", "dk", "dv")}
    more["dsink"] = got["dsink"].astype(np.float32)
    return sp.Result(got["out"].astype(np.float32), lse, **more)"""


def show(tmp_path: Path, text: str, embedded: bool = True) -> str:
    """Checks a kernel that is wrong, and returns what its script prints."""
    path = tmp_path / "kernels.py"
    path.write_text(text)
    with pytest.raises(AssertionError) as caught:
        seamproof.check(load_file(str(path)).kernel)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("script")]
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
    return text.replace("def reference", "def mine").replace("import numpy as np\n", "")


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
    path = tmp_path / "kernels.py"
    path.write_text(text)
    with pytest.raises(AssertionError) as caught:
        seamproof.check(load_file(str(path)).kernel)
    assert "does not show" not in str(caught.value)
    (script,) = Path("seamproof.findings").glob("*.py")
    assert "spec_from_file_location" in script.read_text()


def test_functions_without_a_name_that_can_be_imported():
    import functools

    from seamproof import source

    assert source.importing(json.dumps).text == "from json import dumps\n"
    for function in (functools.partial(json.dumps), lambda: None):
        with pytest.raises(source.NoSource, match="no name"):
            source.importing(function)
