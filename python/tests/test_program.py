"""The examples under the real program, where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import supervisor
from test_check import example

import seamproof
from seamproof import program
from seamproof.declare import GIVEN
from seamproof.loading import load_file

try:
    program.find()
except seamproof.ProgramMissing:
    pytest.skip("there is no program; name one in $SEAMPROOF", allow_module_level=True)

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::seamproof.TooLittleRun")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Lets cases and scripts go to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEAMPROOF_PYTHON", sys.executable)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_right_kernel_holds(monkeypatch, isolate):
    if isolate:
        monkeypatch.chdir(EXAMPLES)
    report = seamproof.check(example("numpy_attention", monkeypatch), cases=60, isolate=isolate)
    assert report.cases == 60 and report.outcome in ("held", "too-little-run")


@pytest.mark.parametrize("fault", ["window", "alignment", "group", "offsets", "base", "overflow"])
def test_every_fault_is_found_and_shown(monkeypatch, fault):
    with pytest.raises(AssertionError) as caught:
        seamproof.check(example("numpy_wrong", monkeypatch, fault), cases=100, seed=1)
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert "does not show" not in told["script"]
    done = subprocess.run([sys.executable, *told["script"].split()[1:]], capture_output=True, text=True)
    assert done.returncode == 1 and "the failure shows" in done.stdout
    case = json.loads(Path(told["case"]).read_text())
    with pytest.raises(AssertionError):
        seamproof.check(example("numpy_wrong", monkeypatch, fault), replay=told["case"])
    assert seamproof.check(example("numpy_wrong", monkeypatch, "none"), replay=told["case"]).outcome == "held"
    assert case["subject"]["name"].startswith("python:")


def test_a_fault_is_an_option_of_the_name(tmp_path):
    name = f"python:{EXAMPLES / 'numpy_wrong.py'}:attention:fault=base"
    command = [program.find(), "run", "--backend", name, "--cases", "10", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr


SELF_ATTENTION = """
import numpy as np
import seamproof
from seamproof.reference import reference

LAYOUT = seamproof.packed(padding=True, gaps=True, slack=True, first_offset=True, equal=EQUAL)

@seamproof.subject(arrays="numpy", formats=["f32"], backward=False, lengths={"equal": True}, layout=LAYOUT)
def attention(p, q, k, v, dout=None, sink=None):
    rows = [run.real_rows() for run in p.q.runs]
    got = reference(q, k, v, dout, sink, list(zip(rows, rows)), p.mask, p.scale, p.softcap)
    return got["out"].astype(np.float32), got["lse"].astype(np.float32)
"""


def test_one_cu_seqlens_says_both_sides_where_they_lie_alike(tmp_path):
    alike = load(tmp_path / "alike.py", SELF_ATTENTION.replace("EQUAL", "True"))
    report = seamproof.check(alike, cases=100, seed=1)
    assert report.outcome in ("held", "too-little-run") and report.held > 50
    apart = load(tmp_path / "apart.py", SELF_ATTENTION.replace("EQUAL", "False"))
    with pytest.raises(AssertionError):
        seamproof.check(apart, cases=100, seed=1)


def _environment() -> dict[str, str]:
    from seamproof.checking import worker_environment

    return worker_environment({})


@pytest.mark.parametrize("form", GIVEN)
def test_each_form_is_read_and_a_wrong_reader_is_found(tmp_path, form):
    text = (EXAMPLES / "numpy_forms.py").read_text()
    right = load(tmp_path / "right.py", text)
    narrow = {"table": {"forms": [form]}}
    report = seamproof.check(right, cases=40, seed=1, **narrow)
    assert report.outcome in ("held", "too-little-run") and report.held > 20
    # The ids of keys are taken for those of queries.
    wrong = text.replace("ids[:, None] == key_ids[None, :]", "key_ids[None, :] != 0")
    with pytest.raises(AssertionError) as caught:
        seamproof.check(load(tmp_path / "wrong.py", wrong), cases=60, seed=1, **narrow)
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert "does not show" not in told["script"]
    assert json.loads(Path(told["case"]).read_text())["problem"].get("form", "cu_seqlens") == form
    assert form == "cu_seqlens" or f"given as {form}" in told["on"]


def test_padding_masks_are_read_and_one_turned_round_is_found(tmp_path):
    text = (EXAMPLES / "numpy_forms.py").read_text()
    text = text.replace('by_masks if seamproof.options().get("batch") == "masks" else by_lengths', "by_masks")
    narrow = {"table": {"forms": ["lengths"]}}
    report = seamproof.check(load(tmp_path / "right.py", text), cases=40, seed=1, **narrow)
    assert report.outcome in ("held", "too-little-run") and report.held > 20
    wrong = text.replace("~mask[:", "mask[:")
    assert wrong != text
    with pytest.raises(AssertionError):
        seamproof.check(load(tmp_path / "wrong.py", wrong), cases=60, seed=1, **narrow)


# Wrong readers of ids under leading dimensions, by what they do: an edit of the reader's text.
MISBATCHED = {
    "dimensions flattened in the opposite order": (
        "np.broadcast_to(array, shape).reshape(count, -1)",
        "np.moveaxis(np.broadcast_to(array, shape), -1, 0).reshape(shape[-1], count, order='F').T",
    ),
    "an array without dimensions taken for the first batch row alone": (
        "np.broadcast_to(array, shape).reshape(count, -1)",
        "np.resize(np.append(array, np.zeros(count * shape[-1] - array.size, int)), (count, shape[-1]))",
    ),
    "repeated element by element": (
        "np.broadcast_to(array, shape).reshape(count, -1)",
        "np.repeat(array.reshape(-1), math.prod(shape) // max(array.size, 1)).reshape(count, -1)",
    ),
    "equal ids of two batch rows are one segment": ("ids * count + batch_row", "ids + 0 * batch_row"),
}


@pytest.mark.parametrize("what", MISBATCHED)
def test_a_wrong_reader_of_batched_ids_is_found_and_shrunk(tmp_path, what):
    text, (right, wrong) = (EXAMPLES / "numpy_forms.py").read_text(), MISBATCHED[what]
    assert text.count(right) == 1
    with pytest.raises(AssertionError) as caught:
        narrow = {"table": {"forms": ["cu_seqlens", "batched_segments"]}}
        seamproof.check(
            load(tmp_path / "wrong.py", text.replace(right, wrong)), cases=150, seed=1, **narrow
        )
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert "does not show" not in told["script"] and "given as batched_segments" in told["on"]
    done = subprocess.run([sys.executable, *told["script"].split()[1:]], capture_output=True, text=True)
    assert done.returncode == 1 and "the failure shows" in done.stdout
    small = json.loads(Path(told["case"]).read_text())["problem"]
    assert len(small["sequences"]) <= 4 and small["rows"]["q"] <= 8, small


# Contradictions: how many sequences of one row each have one, and what a subject reads that overlooks it.
CONTRADICTIONS = {
    "misshapen_segments": (4, "[p.segment_ids_q.reshape(-1), p.segment_ids_kv.reshape(-1)]"),
    "unequal_lengths": (2, "list(zip(*p.lengths, strict=False))"),
}


@pytest.mark.parametrize("form", CONTRADICTIONS)
@pytest.mark.parametrize("answer", ["refuses", "overlooks", "fails"])
def test_a_contradiction_must_be_refused(tmp_path, form, answer):
    """An obscure error is no refusal, and neither is an answer."""
    count, reads = CONTRADICTIONS[form]
    said = {
        "refuses": "raise seamproof.Refused('forms')",
        "overlooks": reads,
        "fails": "raise TypeError('cannot reshape an array')",
    }[answer]
    declared = "arrays='numpy', formats=['f32'], backward=False, refuses=True, forms=['segments', 'lengths']"
    text = f"""import numpy as np

import seamproof


@seamproof.subject({declared})
def attention(p, q, k, v, dout=None, sink=None):
    if p.given == {form!r}:
        {said}
    return np.zeros(p.shape("out"), np.float32), np.zeros(p.shape("lse"), np.float32)
"""
    subject = load(tmp_path / "subject.py", text)
    problem = supervisor.problem([(1, 1)] * count) | {"form": form}
    case = {"version": 1, "schedule_seed": 0, "inputs": "generated", "problem": problem}
    case["subject"] = {"name": "python:subject.py:attention"}
    (tmp_path / "case.json").write_text(json.dumps(case))
    if answer == "refuses":
        report = seamproof.check(subject, replay=tmp_path / "case.json")
        assert report.raw["refused"] == {"forms": 1} and not report.findings
    else:
        why = {"overlooks": "ran what its table refuses", "fails": "cannot reshape an array"}[answer]
        with pytest.raises(AssertionError, match=why):
            seamproof.check(subject, replay=tmp_path / "case.json")


@pytest.mark.parametrize("order", ["ht", "bhs"])
def test_padded_rows_of_the_lse_are_read_and_a_wrong_stride_is_found(tmp_path, order):
    text = (EXAMPLES / "numpy_attention.py").read_text()
    text = text.replace(
        "backward=False)", f"backward=False, lse=seamproof.lse(order={order!r}, multiple=16))"
    )
    by_head = """\
    padded = np.full((q.shape[1], -(-len(q) // 16) * 16), np.nan, np.float32)
    padded[:, : len(q)] = lse
    return out, padded
"""
    by_sequence = """\
    shape = (len(cu_seqlens_q) - 1, q.shape[1], -(-int(max_seqlen_q) // 16) * 16)
    padded = np.full(shape, np.nan, np.float32)
    for row, (first, end) in zip(padded, zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True), strict=True):
        row[:, : end - first] = lse[:, first:end]
    return out, padded
"""
    text = text.replace("    return out, lse\n", by_head if order == "ht" else by_sequence)
    assert seamproof.check(load(tmp_path / "right.py", text), cases=40, seed=1).outcome in (
        "held",
        "too-little-run",
    )
    # Heads follow each other without padding, in the memory of a padded tensor.
    wrong = {
        "padded[:, : len(q)] = lse": "padded.reshape(-1)[: lse.size] = lse.reshape(-1)",
        "row[:, : end - first] = lse[:, first:end]": (
            "row.reshape(-1)[: lse[:, first:end].size] = lse[:, first:end].reshape(-1)"
        ),
    }
    for right, other in wrong.items():
        text = text.replace(right, other)
    with pytest.raises(AssertionError, match="lse"):
        seamproof.check(load(tmp_path / "wrong.py", text), cases=60, seed=1)


# Wrong kernels in the calling forms with padding, by what they do: the subject, an edit of its text, and which of its
# places is edited (one in each pass).
MISREAD = {
    "the largest number of queries for keys": (
        "attention",
        "np.arange(most_k)[:lk]",
        "np.arange(most_q)[:lk]",
        [0],
    ),
    "a largest length that is too small": (
        "attention",
        "np.arange(most_q)[:lq]",
        "np.arange(most_q - 1)[:lq]",
        [0],
    ),
    "padded lengths in the backward": ("attention", "seqused_k, max", "np.diff(cu_seqlens_k), max", [0]),
    "lengths of queries for keys in the backward": ("attention", "seqused_k, max", "seqused_q, max", [0]),
    "lengths of queries for keys": ("attention", "seqused_k, max", "seqused_q, max", [1]),
    "q alone looked at": ("attention_te", " and np.array_equal(real_kv, padded_kv)", "", [0]),
    "padding of the last sequence not looked at": (
        "attention_te",
        "not (np.array_equal(real_q, padded_q) and np.array_equal(real_kv, padded_kv))",
        "real_q[:-1].tolist() != padded_q[:-1].tolist()",
        [0],
    ),
    "the word dropped": (
        "attention_te",
        "is_padded(pad_between_seqs,",
        "is_padded(pad_between_seqs and False,",
        [0, 1],
    ),
    "the word lost in the backward": (
        "attention_te",
        "is_padded(pad_between_seqs,",
        "is_padded(pad_between_seqs and False,",
        [0],
    ),
}


def edited(text, before, after, places):
    parts = text.split(before)
    assert len(parts) - 1 > max(places), before
    joined = [after if place in places else before for place in range(len(parts) - 1)]
    return parts[0] + "".join(word + part for word, part in zip(joined, parts[1:], strict=True))


@pytest.mark.parametrize("name", ["attention", "attention_te"])
def test_calls_with_padding_are_right(name):
    report = seamproof.check(getattr(load_file(str(EXAMPLES / "numpy_padded.py")), name), cases=60, seed=1)
    assert report.outcome in ("held", "too-little-run") and report.held > 30


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what", MISREAD)
def test_a_wrong_reader_of_padding_or_maxima_is_found(tmp_path, what):
    name, *edit = MISREAD[what]
    path = tmp_path / "wrong.py"
    path.write_text(edited((EXAMPLES / "numpy_padded.py").read_text(), *edit))
    with pytest.raises(AssertionError) as caught:
        seamproof.check(getattr(load_file(str(path)), name), cases=150, seed=1)
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert "does not show" not in told["script"]
    problem = json.loads(Path(told["case"]).read_text())["problem"]
    assert len(problem["sequences"]) <= 2
    assert ("backward" in what) <= (problem["pass"] == "backward")


CACHED = """
import numpy as np
import seamproof

@seamproof.subject(
    arrays="numpy", formats=["f32"], masks=seamproof.bottom_right(), backward=False, cache=True,
    layout=seamproof.packed(padding=True, gaps=True),
)
def attention(p, q, k, v, dout=None, sink=None):
    with open(CALLS, "a") as file:
        print(list(map(int, p.q.lengths)), list(map(int, p.kv.lengths)), file=file)
    out = np.zeros(p.shape("out"), np.float32)
    lse = np.full(p.shape("lse"), -np.inf, np.float32)
    for number in range(len(p.q.lengths)):
        sequence, queries = p.kv.padded_offsets[number], p.q.padded_offsets[number]
        for i in range(p.q.lengths[number]):
            seen = i + p.kv.lengths[number] - p.q.lengths[number] + 1
            for head in range(p.heads_q):
                keys = slice(sequence, sequence + seen), head // p.group
                logits = p.scale * (k[keys] @ q[queries + i, head])
                weights = np.exp(logits - logits.max())
                out[queries + i, head] = weights @ v[keys] / weights.sum()
                lse[head, queries + i] = logits.max() + np.log(weights.sum())
    return out, lse
"""


def test_a_case_in_steps_is_a_call_for_each_step(tmp_path):
    stored = EXAMPLES.parents[1] / "corpus/regressions/te-3063-cache-in-steps.json"
    case = json.loads(stored.read_text())
    case["problem"]["precision"] = dict.fromkeys(case["problem"]["precision"], "f32")
    (tmp_path / "case.json").write_text(json.dumps(case))
    calls = tmp_path / "calls.txt"
    right = CACHED.replace("CALLS", repr(str(calls)))

    def replay(text):
        (tmp_path / "kernel.py").write_text(text)
        name = f"python:{tmp_path / 'kernel.py'}:attention"
        command = [program.find(), "replay", str(tmp_path / "case.json"), "--backend", name]
        return subprocess.run(command, env=_environment(), capture_output=True, text=True)

    done = replay(right)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = ["[61, 61, 2] [61, 101, 2]", "[1, 1] [62, 102]", "[1, 1] [63, 103]", "[1, 1] [64, 104]"]
    # A sentinel comes first.
    assert "\n".join(steps) in calls.read_text()
    # In decoding, causal is taken from the top-left corner.
    done = replay(right.replace("+ p.kv.lengths[number] - p.q.lengths[number] + 1", "+ 1"))
    assert done.returncode == 2, done.stdout + done.stderr


def test_pages_are_read_through_the_table():
    right = load_file(str(EXAMPLES / "numpy_paged.py")).attention
    report = seamproof.check(right, cases=300, seed=1)
    assert report.outcome in ("held", "too-little-run") and report.held > 150


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", ["table", "length"])
def test_a_wrong_reader_of_pages_is_found_and_shown(monkeypatch, fault):
    with pytest.raises(AssertionError) as caught:
        seamproof.check(example("numpy_paged", monkeypatch, fault), cases=300, seed=1)
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert "does not show" not in told["script"]
    assert "pooled(k, *pages)" in Path(told["script"].split()[1]).read_text()
    problem = json.loads(Path(told["case"]).read_text())["problem"]
    assert problem["pages"]["count"] <= 3 and len(problem["sequences"]) <= 2


def load(path, text):
    path.write_text(text)
    return load_file(str(path)).attention
