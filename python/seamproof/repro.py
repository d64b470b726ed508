"""Repros: for a finding, a script that shows it with the kernel, numpy and the array library alone."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import pages, program, reference, segments, source, verdict, views
from .errors import DeclarationError, ProtocolError, SeamproofError
from .frames import Channel, cut_text, split
from .loading import options
from .pages import HOLES
from .problem import WINDOW_STYLES, Problem, Side
from .session import described, read_inputs
from .subject import INPUTS, Subject
from .varlen import Varlen

# Arrays up to this size are written as numbers.
LITERAL_MOST = 64
# Inputs of more elements than this make no script that anyone can paste.
ELEMENTS_MOST = 2_000_000
# Time in which a script is made and shows its failure.
SECONDS = 120
# Least time for a run of a script.
_LEAST_SECONDS = 1
# Lines of a script's output that say less than the one before them.
_EMPTY_WORDS = ("the call raises an error", "the failure does not show")
# A line of every script, by which one is known.
_MARK = "Prints what is wrong, and ends with exit code 1 if the failure shows."

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Made:
    """What became of a finding's script."""

    written: bool
    # Whether it was seen to show the failure.
    shows: bool
    # What makes it doubtful, or why there is none.
    doubt: str | None


@dataclass(frozen=True)
class Limits:
    """How long a script may run, and what ends it."""

    # Time of `time.monotonic`.
    until: float
    # Whether whoever started this process ends its whole group.
    leashed: bool = False


def none(why: str) -> Made:
    """Returns what is said where there is no script, and why."""
    return Made(False, False, cut_text(f"there is none: {why}"))


@dataclass(frozen=True)
class Finding:
    """What a script has to show."""

    what: str
    words: str
    check: str
    tensor: str | None
    bound: float
    # The name of the error that the kernel raised; `None` where it raised none, or ended its process.
    raised: str | None
    problem: Problem
    inputs: Inputs
    # The same with other numbers in the rows that hold no token.
    other: Inputs


def digest(case: dict[str, Any]) -> str:
    """Returns hex digits that tell a case from others."""
    kept = {name: value for name, value in case.items() if name != "found"}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()


def beside(case: Path) -> Path:
    """Returns the place of a stored case's script."""
    return case.with_suffix(".py")


def of_case(case: Path, subject_of: Callable[[dict[str, Any]], Subject], limits: Limits) -> Made:
    """Writes the script of a stored case beside it, and runs it.

    `subject_of` returns the subject for what the case says of it, and is called where a script can be written at all:
    loading one takes long.
    """
    stored = json.loads(case.read_text())
    why = _hopeless(stored)
    if why is not None:
        return none(why)
    path = beside(case)
    if path.is_file() and _MARK not in path.read_text(errors="replace"):
        return none(f"{path} is another file, which stays")
    try:
        subject = subject_of(stored["subject"])
    except source.NoSource as error:
        return none(str(error))
    try:
        finding = _finding(subject, case, stored)
    except SeamproofError as error:
        return none(f"the inputs of the case could not be read back: {error}")
    return _write(subject, finding, path, limits)


def _hopeless(stored: dict[str, Any]) -> str | None:
    """Returns why no script can show what a stored case does, where that is known before one is written."""
    found = stored.get("found") or {}
    if "~" in stored["subject"]["name"].rpartition(":")[2]:
        return "the fault is planted at the call, not in the kernel"
    if found.get("unconfirmed"):
        return "the failure was not seen again"
    if (found.get("finding") or {}).get("what", "").startswith(f"{DeclarationError.__name__}: "):
        return "the adapter breaks its own declaration, of which a script knows nothing"
    if stored.get("before"):
        return f"the failure needs {len(stored['before'])} earlier runs in the same process"
    problem = Problem.from_json(stored["problem"])
    if described(problem):
        return "tensors have descales, which a script's own right answer does not know"
    if problem.sharing:
        return "sequences share keys, which a script's own right answer does not know"
    if sum(math.prod(problem.shape(name)) for name in INPUTS) > ELEMENTS_MOST:
        return "the inputs of the case are too large for a script"
    return None


def _finding(subject: Subject, case: Path, stored: dict[str, Any]) -> Finding:
    """Returns the finding of a stored case, whose inputs the program draws again."""
    command = [program.find(), "inputs", str(case)]
    if subject.declared["padding"]["inputs"] == "finite":
        command.append("--finite")
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise ProtocolError(done.stderr.decode(errors="replace").strip())
    head, _, rest = done.stdout.partition(b"\n")
    words, problem = json.loads(head), Problem.from_json(stored["problem"])
    channel, runs = Channel(io.BytesIO(rest), io.BytesIO()), []
    while (frame := channel.read()) is not None:
        runs.append(read_inputs(problem, split(frame.body)[1]))
    found = (stored.get("found") or {}).get("finding", {})
    inputs, other = runs
    return Finding(
        what=words["finding"],
        words=words["problem"],
        check=found.get("check", ""),
        tensor=found.get("tensor"),
        bound=float(found.get("bound") or 0.0),
        raised=_raised(found),
        problem=problem,
        inputs=inputs,
        other=other,
    )


def _raised(found: dict[str, Any]) -> str | None:
    """Returns the name of the error that a finding of a crash begins with."""
    name = re.match(r"([A-Za-z_]\w*): ", found.get("what", "")) if found.get("check") == "crash" else None
    return name and name[1]


def _write(subject: Subject, finding: Finding, path: Path, limits: Limits) -> Made:
    """Writes the first script that shows the failure, or else the first that runs to its end, or else the first."""
    tried, without = [], []
    ways = [_embedded, *([] if finding.problem.parallel.is_single else [_whole]), _by_file]
    for kernel_of in ways:
        try:
            kernel = kernel_of(subject)
        except source.NoSource as error:
            without.append(str(error))
            continue
        text = "".join(_script(subject, finding, kernel))
        both = source.bound_again(kernel.text, text)
        if both is not None:
            without.append(f"the kernel and the script both define `{both}`")
            continue
        is_dealt = not (finding.problem.parallel.is_single or isinstance(subject.call, Varlen))
        if is_dealt and not (kernel.imports_file or kernel.has_ranks):
            without.append("the kernel deals rows to ranks by other means of this package than `attend`")
            continue
        path.write_text(text)
        shows, ends, why = _run(path, finding, limits)
        if shows:
            before = without + [why for *_, why in tried]
            return Made(True, True, _told(_BY_FILE, before[0]) if kernel_of is _by_file else None)
        tried.append((not ends, text, why))
    if not tried:
        return none(without[0])
    _, text, why = min(tried, key=lambda script: script[0])
    path.write_text(text)
    return Made(True, False, _told(_NOT_SHOWN, why))


def _told(doubt: str, why: str) -> str:
    return cut_text(": ".join(filter(None, [doubt, why])))


_NOT_SHOWN = "it does not show the failure when it runs alone"
_BY_FILE = "it imports the kernel's file, because the kernel's source does not work alone"
_IDENTITY = "an identity compares the runs of two problems, and it makes those of one"


def _embedded(subject: Subject) -> source.Kernel:
    functions = [subject.function]
    if source.installed(subject.function):
        return source.importing(subject.function)
    if callable(getattr(subject.call, "backward", None)):
        functions.append(subject.call.backward)
    return source.embedded(functions, options())


def _whole(subject: Subject) -> source.Kernel:
    file, path, others = _place(subject)
    return source.whole(file, path, others, options())


def _by_file(subject: Subject) -> source.Kernel:
    file, path, others = _place(subject)
    return source.from_file(str(file), path, others, options())


def _place(subject: Subject) -> tuple[Path, str, list[str]]:
    """Returns the file of a kernel, its name there, and what else a script calls by its name."""
    file, path = subject.file(), subject.path()
    if file is None or path is None:
        raise source.NoSource("the kernel is no name of a file")
    backward = getattr(subject.call, "backward", None)
    named = getattr(backward, "__name__", "")
    if callable(backward) and not named.isidentifier():
        raise source.NoSource("the backward has no name that a script can call")
    return Path(file).resolve(), path, [named] if callable(backward) else []


def _run(path: Path, finding: Finding, limits: Limits) -> tuple[bool, bool, str]:
    """Runs a script; returns whether it shows the failure, whether it came to its end, and what it says of that."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEAMPROOF")}
    seconds = limits.until - time.monotonic()
    # A script that is ended before it calls the kernel says nothing about a hang.
    if seconds < _LEAST_SECONDS:
        return False, False, "no time was left to run it"
    try:
        command = [sys.executable, str(path)]
        code, said, complained = program.run_in_group(command, environment, seconds, limits.leashed)
    except subprocess.TimeoutExpired:
        return finding.check == "timeout", False, f"it did not end within {seconds:.0f} seconds"
    if code == 0:
        lines = said.strip().splitlines()
        raised = [error for error, then in itertools.pairwise(lines) if then == verdict.RAISES]
        words = [f"the call raises {error}" for error in raised] or [_IDENTITY] * (
            finding.check == "identity"
        )
        return False, True, words[0] if words else ""
    # A crash shows itself: the process is gone.
    shows = code == 1 and "the failure shows" in said
    shows |= finding.check == "crash" and code != 1
    lines = (complained.strip() or said.strip()).splitlines()
    told = [line for line in lines if line not in _EMPTY_WORDS]
    return shows, False, (told or [f"exit code {code}"])[-1]


def _script(subject: Subject, finding: Finding, kernel: source.Kernel) -> Iterator[str]:
    yield _title(subject, finding, kernel)
    future, text = _without_future(kernel.text)
    yield from future
    yield "import base64\nimport sys\nimport traceback\nimport zlib\nfrom types import SimpleNamespace\n\n"
    modules = ["numpy as np", *([] if subject.library_name == "numpy" else [subject.library_name])]
    # The kernel's own lines may import the same.
    yield from (f"import {module}\n" for module in modules if f"import {module}\n" not in text)
    yield f"\n# The kernel.\n\n{text}\n\n# The problem.\n\n"
    yield from _values(subject, finding)
    yield "\n\n# The right answer, from the definition.\n\n\n"
    yield inspect.getsource(reference.key_intervals) + "\n\n"
    yield inspect.getsource(reference.keys_seen) + "\n\n"
    yield inspect.getsource(reference.reference)
    yield "\n\n# The call.\n\n\n"
    if ".view(" in text or kernel.imports_file:
        yield inspect.getsource(views.laid_out) + "\n\n"
    if finding.problem.pages is not None:
        yield inspect.getsource(pages.pooled) + "\n\n"
    yield from _conversions(subject, finding.problem)
    yield "\n\n"
    yield from _call(subject, finding, kernel)
    yield "\n\n# What is wrong.\n\n"
    yield inspect.getsource(verdict).partition(_CARRIED)[2].lstrip("\n")
    yield _END.format(tensor=finding.tensor, check=finding.check, raised=finding.raised)


_CARRIED = "# --- what a script carries begins here\n"
_END = """

shows = verdict(
    call,
    get,
    (q, k, v, dout, sink),
    other,
    extra,
    (sequences, owned, padding),
    mask,
    (scale, softcap),
    ({tensor!r}, {check!r}, bound, {raised!r}),
)
print("the failure shows" if shows else "the failure does not show")
sys.exit(1 if shows else 0)
"""


def _title(subject: Subject, finding: Finding, kernel: source.Kernel) -> str:
    needs = " and ".join(dict.fromkeys(["numpy", subject.library_name]))
    versions = ", ".join(f"{name} {value}" for name, value in subject.ready()["versions"].items())
    what = finding.what.replace("\\", "/").replace('"""', "'''")
    parallel = finding.problem.parallel
    is_plain = parallel.is_single or kernel.imports_file
    ranks = "" if is_plain else _RANKS.format(parallel.world)
    return (
        f'"""{what}\n\n{finding.words}\n\nNeeds {needs} and the kernel. Found with {versions}.\n'
        f'{ranks}{_MARK}\n"""\n\n'
    )


_RANKS = (
    "Ranks are threads, or processes under `torchrun --nproc-per-node {}`. They run in no drawn order, and nothing is\n"
    "delayed. What threads receive is NaN until they wait for it.\n"
)


def _without_future(text: str) -> tuple[list[str], str]:
    lines = text.splitlines(keepends=True)
    future = [line for line in lines if line.startswith("from __future__")]
    return future, "".join(line for line in lines if line not in future)


# Checks whose failure may show where rows that hold no token have other numbers.
_OF_PADDING = ("poison", "identity", "structure")


def _values(subject: Subject, finding: Finding) -> Iterator[str]:
    problem = finding.problem
    packed = [name for name in INPUTS if finding.inputs[name].size > LITERAL_MOST]
    if packed:
        yield (
            "def unpacked(text, shape):\n"
            '    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4").reshape(shape).copy()\n\n\n'
        )
    yield "nan, inf = np.nan, np.inf\n"
    sides = [problem.q.real().all(), problem.kv.real().all()]
    yield from (f"{name} = {_input(finding, name, finding.inputs)}\n" for name in INPUTS)
    if finding.check in _OF_PADDING and not all(sides):
        yield "# The same with other numbers in rows that hold no token.\nother = (\n"
        yield from (f"    {_input(finding, name, finding.other)},\n" for name in INPUTS)
        yield ")\n"
    else:
        yield "other = None\n"
    extra = {"none": "None", "off-by-one": f"np.zeros({problem.heads_q})", "learnable": "sink"}[problem.sink]
    yield f"extra = {extra}  # one more logit for each head\n"
    yield "# Rows of each sequence's queries and keys.\n"
    rows = [f"({_slice(s.q.real_rows())}, {_slice(s.kv.real_rows())})" for s in problem.sequences]
    yield "sequences = [" + ", ".join(rows) + "]\n"
    owned = [f"({_slice(s.q.owned_rows())}, {_slice(s.kv.owned_rows())})" for s in problem.sequences]
    yield "owned = " + (
        "sequences" if owned == rows else "[" + ", ".join(owned) + "]  # their padding included"
    )
    contract = subject.declared["padding"]["outputs"]
    yield f"\npadding = {contract!r}  # what the results hold there\n"
    yield "# Bounds of the keys that a query sees, bottom-right or not, documents, chunks, prefix, sink tokens.\n"
    yield f"mask = {problem.mask}\n"
    yield f"scale, softcap = {problem.scale!r}, {problem.softcap!r}\n"
    yield f"bound = {finding.bound!r}  # the largest error that an honest kernel can show there; 0: none is allowed\n"


def _input(finding: Finding, name: str, inputs: Inputs) -> str:
    problem = finding.problem
    absent = (name == "dout" and not problem.backward) or (name == "sink" and problem.sink != "learnable")
    return "None" if absent else literal(inputs[name])


def literal(values: np.ndarray) -> str:
    """Returns an f32 array as the Python expression that makes it."""
    if values.size == 0:
        return f"np.zeros({values.shape}, np.float32)"
    if values.size <= LITERAL_MOST:
        # NaN of any kind may lie in rows that hold no token.
        with np.errstate(invalid="ignore"):
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
    yield from _in_pages(subject, problem)
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
    yield from body(subject, finding, kernel, leaves)
    if watches:
        yield "    watch(given, {" + ", ".join(f'"{name}": get({name})' for name in watched) + "})\n"
    yield "    got = {name: get(x) for name, x in got.items() if x is not None}\n"
    yield from _lse_lines(subject, problem)
    yield "    return got\n"


def _in_pages(subject: Subject, problem: Problem) -> Iterator[str]:
    """Yields the line that puts keys and values into pages."""
    of = problem.pages
    if of is not None:
        rows = "[" + ", ".join(_slice(run.real_rows()) for run in problem.kv.runs) + "]"
        hole = f"float('{HOLES[subject.declared['padding']['inputs']]}')".replace("'", '"')
        yield f"    pages = ({rows}, {of.size}, {of.count}, {of.table}, {hole})\n"
        yield "    k, v = pooled(k, *pages), pooled(v, *pages)\n"


def _varlen_call(subject: Subject, finding: Finding, kernel: source.Kernel, leaves: str) -> Iterator[str]:
    call, problem = subject.call, finding.problem
    lists = {word: f"ints({numbers})" for word, numbers in call.lists(problem).items()}
    values = call.values(problem) | lists
    words = {word: lists.get(word, repr(values[word])) for word in call.signature.names if word in values}
    if "sink" in leaves:
        words["sink"] = "sink"
    arguments = [f"{call.signature.names[word]}={text}" for word, text in words.items()]
    arguments += [f"{word}={value!r}" for word, value in call.more.items()]
    joined = ", ".join(arguments)
    yield f"    arguments = dict({joined})\n"
    made = f"{kernel.name}(q, k, v, **arguments)"
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


def _subject_call(subject: Subject, finding: Finding, kernel: source.Kernel, leaves: str) -> Iterator[str]:
    problem = finding.problem
    yield from _namespace(subject, problem, kernel)
    more = ("dout" if problem.backward else "None") + ", " + ("sink" if "sink" in leaves else "None")
    made = f"{kernel.name}(p, q, k, v, {more})"
    if problem.backward and subject.library_name in ("torch", "jax"):
        yield from _differentiated(subject, made, leaves)
    else:
        yield f"    got = fields({made})\n"
    yield '    got.pop("grads", None)\n'


def _namespace(subject: Subject, problem: Problem, kernel: source.Kernel) -> Iterator[str]:
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
            f"SimpleNamespace(lengths=ints({lengths}), offsets=ints({of.sums}), "
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
    if problem.parallel.is_single:
        yield '    p.parallel = SimpleNamespace(algorithm="single", size=1, world=1, ranks=(0,), is_single=True)\n'
    else:
        if kernel.imports_file:
            # The file imports this package, whose ranks they are.
            yield "    from seamproof.dealing import Parallel\n\n"
        yield "    p.library = SimpleNamespace(integers=ints)\n"
        yield f"    p.parallel = Parallel.from_json({problem.raw['parallel']!r})\n"
        yield from _dealt(problem)
        yield f"    p.raw = {{'data_seed': {problem.raw['data_seed']}}}\n".replace("'", '"')
    yield f"    p.shape = lambda name: {shapes}[name]\n"
    table = "None" if problem.pages is None else f"ints({problem.pages.block_table()})"
    yield f"    p.block_table = {table}\n"
    forms = {name: problem.form(name) for name in (*INPUTS, "out", "lse", "dq", "dk", "dv")}
    yield f"    p.form = lambda name: {forms}[name]\n"
    if subject.declared["table"].get("forms", ["cu_seqlens"]) != ["cu_seqlens"]:
        yield from _given(problem)
    yield from _sight(problem)
    kinds = {name: views.kind_of(problem.raw["data_seed"], name) for name in ("q", "k", "v", "dout")}
    yield f"    p.view = lambda array, name: laid_out(array, {kinds}[name])\n"
    if subject.library_name != "jax":
        yield '    p.empty = lambda name="out": guarded(p.shape(name), name, put_f32 if name == "lse" else put)\n'
        yield "    p.empty_out = p.empty\n"


def _dealt(problem: Problem) -> Iterator[str]:
    """Yields what a problem says of the rows that its ranks hold."""
    try:
        dealt = [[rows.tolist() for rows in of_rank] for of_rank in problem.dealt() or ()]
    except DeclarationError:  # rows that cannot be dealt as they lie
        return
    yield f"    p.dealt = lambda: [tuple(np.array(rows, int) for rows in of_rank) for of_rank in {dealt}]\n"
    whole = segments.flat(problem.sequences, (problem.q.rows, problem.kv.rows))
    yield f"    signs = {{ {', '.join(f'{name!r}: {whole[name].tolist()}' for name in segments.NAMES)} }}\n"
    yield "    p.segments_of = lambda rows: {\n"
    yield '        name: ints(np.append(of, 0)[rows[name.endswith("_kv")]].tolist()) for name, of in signs.items()\n'
    yield "    }\n"


def _sight(problem: Problem) -> Iterator[str]:
    """Yields what a problem says of which keys its queries see."""
    yield f"    p.shift = lambda at: {[problem.shift(at) for at in range(len(problem.sequences))]}[at]\n"
    yield "\n    def visible(at):\n        of = p.sequences[at]\n"
    yield "        return keys_seen(of.q.len, of.kv.len, *mask)\n\n"
    yield "    p.visible = visible\n"
    yield f"    p.blind_rows = lambda: np.isin(np.arange(p.q.rows), {np.flatnonzero(problem.blind_rows()).tolist()})\n"


def _given(problem: Problem) -> Iterator[str]:
    """Yields what a problem in another form than offsets says of its sequences."""
    yield _FLAT
    if problem.given in ("batched_segments", "misshapen_segments"):
        yield f"    p.leading = {problem.leading}\n"
        for name in segments.NAMES:
            yield f"    p.{name} = ints({getattr(problem, name).tolist()})\n"


_FLAT = """\
    for name in ("q", "kv"):
        of = getattr(p, name)
        ids, at = np.zeros((2, of.rows), int)
        for number, run in enumerate(of.runs, 1):
            ids[run.real_rows()], at[run.real_rows()] = number, np.arange(run.len)
        setattr(p, "segment_ids_" + name, ints(ids.tolist()))
        setattr(p, "positions_" + name, ints(at.tolist()))
    p.lengths = (p.q.lengths, p.kv.lengths)
"""
_PLAIN = (
    "heads_q",
    "heads_kv",
    "dim_qk",
    "dim_v",
    "left",
    "right",
    "documents",
    "chunks",
    "prefix",
    "sink_tokens",
    "align",
    "scale",
    "softcap",
    "sink",
    "backward",
    "given",
)
_DERIVED = ("mask", "causal", "bottom_right", "group", "format", "pad_between_seqs")


def _lse_lines(subject: Subject, problem: Problem) -> Iterator[str]:
    form = subject.lse
    if form.order == "th":
        yield '    got["lse"] = got["lse"].T\n'
    if form.order != "bhs" and form.multiple > 1:
        yield f'    got["lse"] = got["lse"][:, : {problem.q.rows}]  # rows are padded to a multiple\n'
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
