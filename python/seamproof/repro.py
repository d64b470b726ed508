"""Repros: for a finding, a script that shows it with the kernel, numpy and the array library alone."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import reference, source, verdict
from .problem import WINDOW_STYLES, Problem, Side
from .subject import INPUTS, Subject
from .varlen import Varlen

# Arrays up to this size are written as numbers.
LITERAL_MOST = 64
# Inputs of more elements than this make no script that anyone can paste.
ELEMENTS_MOST = 2_000_000
RUN_SECONDS = 120
# Lines of a script's output that say less than the one before them.
_EMPTY_WORDS = ("the call raises an error", "the failure does not show")

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """What a script has to show."""

    what: str
    words: str
    check: str
    tensor: str | None
    bound: float
    problem: Problem
    inputs: Inputs


def digest(case: dict[str, Any]) -> str:
    """Returns hex digits that tell a case from others."""
    kept = {name: value for name, value in case.items() if name != "found"}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()


def same_problem(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two problems of JSON are the same, whichever optional fields are written."""
    names = ("mode", "data_seed")
    return Problem.from_json(one) == Problem.from_json(other) and all(
        one.get(n) == other.get(n) for n in names
    )


def finding_of(finding: dict[str, Any], inputs: Inputs) -> Finding:
    """Returns a finding of a summary, with the inputs of its case."""
    case = finding["case"]
    found = case.get("found", {}).get("finding", {})
    return Finding(
        what=finding["what"],
        words=finding.get("problem", ""),
        check=found.get("check", ""),
        tensor=found.get("tensor"),
        bound=float(found.get("bound") or 0.0),
        problem=Problem.from_json(case["problem"]),
        inputs=inputs,
    )


def write(subject: Subject, finding: Finding, path: Path) -> str:
    """Writes the script of a finding, runs it, and returns what to say about it."""
    if sum(values.size for values in finding.inputs.values()) > ELEMENTS_MOST:
        return "there is none: the inputs of the case are too large for a script"
    problems, scripts = [], []
    for kernel_of in (_embedded, _by_file):
        try:
            kernel = kernel_of(subject)
        except source.NoSource as error:
            problems.append(str(error))
            continue
        scripts.append("".join(_script(subject, finding, kernel)))
        path.write_text(scripts[-1])
        shows, why = _run(path, finding)
        if shows:
            return ""
        problems.append(why)
    if not scripts:
        return f"there is none: {problems[0]}"
    path.write_text(scripts[0])
    return f"it does not show the failure when it runs alone: {problems[-1]}"


def _embedded(subject: Subject) -> source.Kernel:
    functions = [subject.function]
    if source.installed(subject.function):
        return source.importing(subject.function)
    if callable(getattr(subject.call, "backward", None)):
        functions.append(subject.call.backward)
    return source.embedded(functions)


def _by_file(subject: Subject) -> source.Kernel:
    file, path = subject.file(), subject.path()
    if file is None or path is None:
        raise source.NoSource("the kernel is no name of a file")
    return source.from_file(str(Path(file).resolve()), path)


def _run(path: Path, finding: Finding) -> tuple[bool, str]:
    """Runs a script; returns whether it shows the failure, and otherwise its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEAMPROOF")}
    try:
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=RUN_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return finding.check == "timeout", f"it did not end within {RUN_SECONDS} seconds"
    # A crash shows itself: the process is gone.
    shows = done.returncode == 1 and "the failure shows" in done.stdout
    shows |= finding.check == "crash" and done.returncode not in (0, 1)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    told = [line for line in lines if line not in _EMPTY_WORDS]
    return shows, (told or lines or [f"exit code {done.returncode}"])[-1]


def _script(subject: Subject, finding: Finding, kernel: source.Kernel) -> Iterator[str]:
    yield _title(subject, finding)
    future, text = _without_future(kernel.text)
    yield from future
    yield "import base64\nimport sys\nimport traceback\nimport zlib\nfrom types import SimpleNamespace\n\n"
    modules = ["numpy as np", *([] if subject.library_name == "numpy" else [subject.library_name])]
    # The kernel's own lines may import the same.
    yield from (f"import {module}\n" for module in modules if f"import {module}\n" not in text)
    yield f"\n# The kernel.\n\n{text}\n\n# The problem.\n\n"
    yield from _values(finding)
    yield "\n\n# The right answer, from the definition.\n\n\n"
    yield inspect.getsource(reference.reference)
    yield "\n\n# The call.\n\n\n"
    yield from _conversions(subject, finding.problem)
    yield "\n\n"
    yield from _call(subject, finding, kernel)
    yield "\n\n# What is wrong.\n\n"
    yield inspect.getsource(verdict).partition(_CARRIED)[2].lstrip("\n")
    yield _END.format(tensor=finding.tensor, check=finding.check)


_CARRIED = "# --- what a script carries begins here\n"
_END = """

shows = verdict(
    call,
    get,
    (q, k, v, dout, sink),
    extra,
    sequences,
    (left, right, bottom_right),
    (scale, softcap),
    ({tensor!r}, {check!r}, bound),
)
print("the failure shows" if shows else "the failure does not show")
sys.exit(1 if shows else 0)
"""


def _title(subject: Subject, finding: Finding) -> str:
    needs = " and ".join(dict.fromkeys(["numpy", subject.library_name]))
    versions = ", ".join(f"{name} {value}" for name, value in subject.ready()["versions"].items())
    what = finding.what.replace("\\", "/").replace('"""', "'''")
    return (
        f'"""{what}\n\n{finding.words}\n\nNeeds {needs} and the kernel. Found with {versions}.\n'
        'Prints what is wrong, and ends with exit code 1 if the failure shows.\n"""\n\n'
    )


def _without_future(text: str) -> tuple[list[str], str]:
    lines = text.splitlines(keepends=True)
    future = [line for line in lines if line.startswith("from __future__")]
    return future, "".join(line for line in lines if line not in future)


def _values(finding: Finding) -> Iterator[str]:
    problem = finding.problem
    packed = [name for name in INPUTS if finding.inputs[name].size > LITERAL_MOST]
    if packed:
        yield (
            "def unpacked(text, shape):\n"
            '    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").reshape(shape).copy()\n\n\n'
        )
    yield "nan, inf = np.nan, np.inf\n"
    for name in INPUTS:
        absent = (name == "dout" and not problem.backward) or (name == "sink" and problem.sink != "learnable")
        yield f"{name} = " + ("None" if absent else literal(finding.inputs[name])) + "\n"
    extra = {"none": "None", "off-by-one": f"np.zeros({problem.heads_q})", "learnable": "sink"}[problem.sink]
    yield f"extra = {extra}  # one more logit for each head\n"
    yield "# Rows of each sequence's queries and keys.\n"
    rows = [f"({_slice(s.q.real_rows())}, {_slice(s.kv.real_rows())})" for s in problem.sequences]
    yield "sequences = [" + ", ".join(rows) + "]\n"
    yield f"left, right, bottom_right = {problem.left}, {problem.right}, {problem.bottom_right}\n"
    yield f"scale, softcap = {problem.scale!r}, {problem.softcap!r}\n"
    yield f"bound = {finding.bound!r}  # the largest error that an honest kernel can show there; 0: none is allowed\n"


def literal(values: np.ndarray) -> str:
    """Returns an f32 array as the Python expression that makes it."""
    if values.size == 0:
        return f"np.zeros({values.shape}, np.float32)"
    if values.size <= LITERAL_MOST:
        return f"np.array({values.astype(float).tolist()}, np.float32)"
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(values, "<f4").tobytes(), 9)).decode()
    lines = "\n".join(f'    "{text[at : at + 100]}"' for at in range(0, len(text), 100))
    return f"unpacked(\n{lines},\n    {values.shape},\n)"


def _slice(rows: slice) -> str:
    step = "" if rows.step == 1 else f", {rows.step}"
    return f"slice({rows.start}, {rows.stop}{step})"


def _conversions(subject: Subject, problem: Problem) -> Iterator[str]:
    """Yields `put`, `put_f32`, `ints` and `get`: from arrays of f32 to the kernel's, and back."""
    form, kind = problem.format, subject.library_name
    if kind == "torch":
        device = str(subject.open().device)
        dtype = {"f32": "float32", "bf16": "bfloat16", "fp16": "float16"}[form]
        yield f"def put(x):\n    return torch.from_numpy(x).to(torch.{dtype}).to({device!r})\n\n\n"
        yield f"def put_f32(x):\n    return torch.from_numpy(x).to({device!r})\n\n\n"
        yield f"def ints(x):\n    return torch.tensor(x, dtype=torch.int32, device={device!r})\n\n\n"
        yield "def get(x):\n    return x.detach().double().cpu().numpy()\n"
        return
    module = {"numpy": "np", "jax": "jax.numpy", "cupy": "cupy"}[kind]
    dtype = {"f32": "np.float32", "fp16": "np.float16", "bf16": "jax.numpy.bfloat16"}[form]
    if form == "bf16" and kind == "numpy":
        dtype = '__import__("ml_dtypes").bfloat16'
    yield f"def put(x):\n    return {module}.asarray(x).astype({dtype})\n\n\n"
    yield f"def put_f32(x):\n    return {module}.asarray(x)\n\n\n"
    yield f"def ints(x):\n    return {module}.asarray(x, np.int32)\n\n\n"
    get = "cupy.asnumpy(x)" if kind == "cupy" else "np.asarray(x)"
    yield f"def get(x):\n    return {get}.astype(np.float64)\n"


def _call(subject: Subject, finding: Finding, kernel: source.Kernel) -> Iterator[str]:
    problem = finding.problem
    learnable = problem.sink == "learnable"
    yield "def call(q, k, v, dout, sink):\n"
    yield "    q, k, v = put(q), put(k), put(v)\n"
    if learnable:
        yield "    sink = put_f32(sink)\n"
    leaves = "q, k, v, sink" if learnable else "q, k, v"
    if problem.backward:
        yield "    dout = put(dout)\n"
    watched = [*leaves.split(", "), *(["dout"] if problem.backward else [])]
    watches = finding.check == "structure" and finding.tensor in watched
    if watches:
        yield "    given = {" + ", ".join(f'"{name}": get({name})' for name in watched) + "}\n"
    if problem.backward and subject.library_name == "torch":
        yield f"    {leaves} = (x.requires_grad_() for x in ({leaves}))\n"
    body = _varlen_call if isinstance(subject.call, Varlen) else _subject_call
    yield from body(subject, finding, kernel.name, leaves)
    if watches:
        yield "    watch(given, {" + ", ".join(f'"{name}": get({name})' for name in watched) + "})\n"
    yield "    got = {name: get(x) for name, x in got.items() if x is not None}\n"
    yield from _lse_lines(subject, problem)
    yield "    return got\n"


def _varlen_call(subject: Subject, finding: Finding, name: str, leaves: str) -> Iterator[str]:
    call, problem = subject.call, finding.problem
    lists = {
        f"cu_seqlens_{to}": f"ints({call.offsets(problem, side)})" for to, side in (("q", "q"), ("k", "kv"))
    }
    if call.seqused:
        lists |= {
            f"seqused_{to}": f"ints({[run.len for run in side.runs]})"
            for to, side in (("q", problem.q), ("k", problem.kv))
        }
    values = call.values(problem, None, None)
    words = {word: lists.get(word, repr(values.get(word))) for word in call.signature.names if word in values}
    if "sink" in leaves:
        words["sink"] = "sink"
    arguments = [f"{call.signature.names[word]}={text}" for word, text in words.items()]
    arguments += [f"{word}={value!r}" for word, value in call.more.items()]
    joined = ", ".join(arguments)
    yield f"    arguments = dict({joined})\n"
    made = f"{name}(q, k, v, **arguments)"
    if problem.backward and call.backward is True:
        yield from _differentiated(subject, made, leaves)
        return
    yield f"    got = fields({made})\n"
    if problem.backward:
        back = call.backward.__name__
        yield f'    gradients = {back}(dout, q, k, v, got["out"], got.get("lse"), **arguments)\n'
        yield '    got["dq"], got["dk"], got["dv"] = gradients[:3]\n'


def _differentiated(subject: Subject, made: str, leaves: str) -> Iterator[str]:
    """Yields a call and the gradients that the library finds, where the kernel does not give its own."""
    names = ", ".join(f'got["d{leaf}"]' for leaf in leaves.split(", "))
    if subject.library_name == "torch":
        yield f"    got = fields({made})\n    if got.get('dq') is None:\n".replace("'", '"')
        yield f'        {names} = torch.autograd.grad(got["out"], ({leaves}), dout[: len(got["out"])])\n'
        return
    yield f"    def forward({leaves}):\n        got = fields({made})\n"
    yield '        return got.pop("out"), {name: x for name, x in got.items() if name != "grads"}\n\n'
    yield f"    out, pullback, got = jax.vjp(forward, {leaves}, has_aux=True)\n"
    yield '    got["out"] = out\n    if got.get("dq") is None:\n'
    yield f"        {names} = pullback(dout[: len(out)])\n"


def _subject_call(subject: Subject, finding: Finding, name: str, leaves: str) -> Iterator[str]:
    problem = finding.problem
    yield from _namespace(subject, problem)
    more = ("dout" if problem.backward else "None") + ", " + ("sink" if "sink" in leaves else "None")
    made = f"{name}(p, q, k, v, {more})"
    if problem.backward and subject.library_name in ("torch", "jax"):
        yield from _differentiated(subject, made, leaves)
    else:
        yield f"    got = fields({made})\n"
    yield '    got.pop("grads", None)\n'


def _namespace(subject: Subject, problem: Problem) -> Iterator[str]:
    """Yields `p`: what the adapter may ask of its problem, as plain values."""

    def side(of: Side) -> str:
        try:
            padded = f"ints({of.padded})"
        except ValueError:
            padded = "None"
        lengths = [run.len for run in of.runs]
        runs = ", ".join(
            f"SimpleNamespace(offset={r.offset}, len={r.len}, span={r.span}, step={r.step}, end={r.end}, "
            f"real_rows=lambda: {_slice(r.real_rows())})"
            for r in of.runs
        )
        return (
            f"SimpleNamespace(lengths=ints({lengths}), offsets=ints({np.cumsum([0, *lengths]).tolist()}), "
            f"padded_offsets={padded}, max_length={of.max_length}, max_span={of.max_span}, rows={of.rows}, "
            f"runs=[{runs}])"
        )

    windows = {style: problem.window(style) for style in WINDOW_STYLES}
    yield f"    p = SimpleNamespace(q={side(problem.q)}, kv={side(problem.kv)})\n"
    yield f"    p.window = lambda style: {windows}[style]\n"
    shapes = {name: problem.shape(name) for name in ("out", "lse", "dq", "dk", "dv")}
    yield "    runs = zip(p.q.runs, p.kv.runs)\n"
    yield "    p.sequences = [SimpleNamespace(q=of_q, kv=of_kv) for of_q, of_kv in runs]\n"
    for name in (*_PLAIN, *_DERIVED):
        yield f"    p.{name} = {getattr(problem, name)!r}\n"
    yield f"    p.shape = lambda name: {shapes}[name]\n"
    if subject.library_name != "jax":
        yield '    p.empty = lambda name="out": guarded(p.shape(name), name, put_f32 if name == "lse" else put)\n'
        yield "    p.empty_out = p.empty\n"


_PLAIN = (
    "heads_q",
    "heads_kv",
    "dim_qk",
    "dim_v",
    "left",
    "right",
    "align",
    "scale",
    "softcap",
    "sink",
    "backward",
)
_DERIVED = ("causal", "bottom_right", "group", "format")


def _lse_lines(subject: Subject, problem: Problem) -> Iterator[str]:
    form = subject.lse
    if form.order == "th":
        yield '    got["lse"] = got["lse"].T\n'
    if form.order == "bhs":
        yield f"    by_sequence, got['lse'] = got['lse'], np.full({problem.shape('lse')}, np.nan)\n".replace(
            "'", '"'
        )
        yield "    for index, (rows, _) in enumerate(sequences):\n"
        yield '        got["lse"][:, rows] = by_sequence[index, :, : len(range(rows.stop)[rows])]\n'
    if form.base == "2":
        yield '    got["lse"] = got["lse"] * np.log(2)  # the kernel returns it to base 2\n'
    if form.empty == "+inf":
        yield '    got["lse"] = np.where(got["lse"] == np.inf, -np.inf, got["lse"])  # a row without keys\n'
