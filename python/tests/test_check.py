"""`seamproof.check` against a program that stands in for the real one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import seamproof
from seamproof import checking, program

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch, fault: str = "none"):
    """Returns an example's subject."""
    monkeypatch.setenv("SEAMPROOF_FAULT", fault)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention


def test_a_right_kernel_holds(fake_program, monkeypatch):
    report = seamproof.check(example("numpy_attention", monkeypatch), seed=7, profile="seams", cases=9)
    assert (report.outcome, report.cases, report.held, report.seed) == ("held", 3, 3, "7")
    options = report.raw["options"]
    assert options["--profile"] == "seams" and options["--cases"] == "9" and "--budget" not in options
    assert seamproof.check(example("numpy_attention", monkeypatch)).raw["options"]["--budget"] == "20s"
    assert (
        seamproof.check(example("numpy_attention", monkeypatch), budget=1.5).raw["options"]["--budget"]
        == "1500ms"
    )


@pytest.mark.parametrize("fault", ["window", "base"])
def test_a_finding_is_an_assertion_with_all_that_one_needs(fake_program, monkeypatch, tmp_path, fault):
    with pytest.raises(AssertionError) as caught:
        seamproof.check(example("numpy_wrong", monkeypatch, fault))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("attention: envelope · ")
    told = {line.split()[0]: line.split(None, 1)[1] for line in lines[1:] if not line.startswith(" ")}
    # Further findings have a case and a command each.
    others = [line.split()[-1] for line in lines if line.startswith("    replay  ")]
    assert len({*others, told["case"]}) == len(others) + 1 and all(Path(other).is_file() for other in others)
    case = json.loads(Path(told["case"]).read_text())
    assert case["found"]["finding"]["check"] == "envelope"
    assert told["replay"].endswith(f"replay {told['case']}")
    assert told["script"] == f"{program.python()} {Path(told['case']).with_suffix('.py')}"
    text = Path(told["script"].split()[1]).read_text()
    assert "import seamproof" not in text and "def reference" in text and "def attention" in text
    done = subprocess.run([sys.executable, told["script"].split()[1]], capture_output=True, text=True)
    assert done.returncode == 1 and "the failure shows" in done.stdout and "got" in done.stdout, done.stdout


def test_a_finding_is_replayed(fake_program, monkeypatch):
    wrong = example("numpy_wrong", monkeypatch, "base")
    with pytest.raises(AssertionError, match="case ") as caught:
        seamproof.check(wrong)
    (case,) = [line.split()[1] for line in str(caught.value).splitlines() if line.startswith("case ")]
    with pytest.raises(AssertionError, match="lse is wrong"):
        seamproof.check(wrong, replay=case)
    assert seamproof.check(example("numpy_attention", monkeypatch), replay=case).outcome == "held"


def test_an_error_of_the_kernel_is_the_cause(fake_program):
    @seamproof.flash_varlen(backward=False)
    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        raise IndexError("one too far")

    with pytest.raises(AssertionError, match="IndexError: one too far") as caught:
        seamproof.check(attention)
    assert isinstance(caught.value.__cause__, IndexError)
    assert "there is none: the kernel is defined inside a function" in str(caught.value)
    assert "--seamproof-replay" in str(caught.value)


def test_a_result_that_is_not_declared_ends_the_check(fake_program):
    @seamproof.subject(formats=["f32"], arrays="numpy", backward=False)
    def attention(p, q, k, v, dout, sink):
        return np.zeros(p.shape("out"), np.float32)

    with pytest.raises(seamproof.DeclarationError, match="no lse came back"):
        seamproof.check(attention)


def test_too_little_run_warns_or_fails(fake_program, monkeypatch):
    monkeypatch.setenv("FAKE", "too-little-run")
    right = example("numpy_attention", monkeypatch)
    with pytest.warns(seamproof.TooLittleRun, match="too few windows"):
        seamproof.check(right)
    with pytest.raises(AssertionError, match="too few windows"):
        seamproof.check(right, strict=True)


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("canary-missed", seamproof.CannotJudge, "void"),
        ("internal", seamproof.CannotJudge, "trouble"),
        ("input", seamproof.DeclarationError, "does not understand"),
        ("usage", seamproof.WrongSetting, "^unexpected argument"),
    ],
)
def test_what_says_nothing_is_an_error(fake_program, monkeypatch, mode, error, words):
    monkeypatch.setenv("FAKE", mode)
    with pytest.raises(error, match=words):
        seamproof.check(example("numpy_attention", monkeypatch))


def test_failures_of_the_search_for_the_canary_are_told_where_the_campaign_shows_none(tmp_path):
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "case-00000000.json").write_text('{"version": 1}')
    own = {"finding": {"check": "crash", "what": "it died"}, "problem": "1 sequence", "name": "case-00000000"}
    said = [
        {"event": "start", "seed": "0x1"},
        {"event": "canary", "finding": None, "own": [own], "not_told": "the subject fails by itself"},
        {"event": "summary", "cases": 3, "held": 3, "void": "the canary was not told", "infrastructure": []},
    ]
    report = checking._report_of_events("mine", said, tmp_path, SimpleNamespace(returncode=5, stdout=""))
    assert (report.outcome, report.trouble) == ("canary-missed", ["the canary was not told"])
    assert report.findings == [
        {"what": "crash: it died", "problem": "1 sequence", "minimal": False, "case": {"version": 1}}
    ]
    # A campaign that fails shows its own findings, and any other held.
    said[2].pop("void")
    assert not checking._report_of_events(
        "mine", said, tmp_path, SimpleNamespace(returncode=0, stdout="")
    ).findings


def test_narrowing(fake_program, monkeypatch):
    right = example("numpy_attention", monkeypatch)
    narrowed = right.narrowed({"masks": "window", "d": 64, "rows_most": 100}).declared["table"]
    assert narrowed["masks"]["forms"] == ["left-window", "right-window", "causal-window", "two-sided"]
    assert narrowed["dims"]["qk"] == [64] and narrowed["lengths"]["rows_most"] == 100
    with pytest.raises(seamproof.DeclarationError, match="cannot be narrowed by 'mask'"):
        seamproof.check(right, mask="window")
    with pytest.raises(seamproof.DeclarationError, match="none of"):
        seamproof.check(right, formats=["bf16"])


def test_a_subject_in_python_takes_no_regions():
    with pytest.raises(seamproof.DeclarationError, match=r"table\.parallel\.regions"):
        seamproof.subject(arrays="numpy", formats=["f32"], table={"parallel": {"regions": True}})(lambda q: q)


def test_no_program(monkeypatch, tmp_path):
    monkeypatch.setenv("SEAMPROOF", str(tmp_path / "nothing"))
    with pytest.raises(seamproof.ProgramMissing, match="nothing"):
        seamproof.check(example("numpy_attention", monkeypatch))


def test_a_lost_device_ends_checks_on_it(fake_program, monkeypatch):
    monkeypatch.setattr(checking, "lost", "RuntimeError: CUDA error")
    right = example("numpy_attention", monkeypatch)
    assert seamproof.check(right).outcome == "held"  # The CPU is as well as before.
    monkeypatch.setattr(checking, "_on_cpu", lambda subject: False)
    with pytest.raises(seamproof.DeviceLost, match="CUDA error"):
        seamproof.check(right)


PLUGIN_TEST = """
import sys
sys.path.insert(0, {examples!r})
import pytest
from numpy_attention import attention
from numpy_wrong import attention as wrong
import seamproof

def test_direct():
    seamproof.check(attention)

@pytest.mark.seamproof(cases=5, masks="window")
def test_marker(seamproof):
    report = seamproof.check(attention, seed=3)
    assert report.raw["options"]["--cases"] == "5"
    assert report.raw["options"].get("--budget") == {budget!r}

def test_wrong(seamproof):
    seamproof.check(wrong)
"""


@pytest.mark.parametrize("budget", [None, "5s"])
def test_the_plugin(fake_program, pytester, monkeypatch, budget):
    monkeypatch.setenv("SEAMPROOF_FAULT", "base")
    pytester.makepyfile(PLUGIN_TEST.format(examples=str(EXAMPLES), budget=budget))
    # Where the wheel is installed, pytest finds the plugin by itself.
    named = [] if entry_points(group="pytest11", name="seamproof") else ["-p", "seamproof.pytest_plugin"]
    arguments = named + ([f"--seamproof-budget={budget}"] if budget else [])
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: attention: envelope*", "*replay *", "*script *python*"])
    case = next(Path(pytester.path).glob("seamproof.findings/*.json"))
    again = pytester.runpytest_subprocess(*named, f"--seamproof-replay={case}", "-k", "wrong")
    again.assert_outcomes(failed=1)
    # The other tests check another file's subject.
    again = pytester.runpytest_subprocess(*named, f"--seamproof-replay={case}")
    again.assert_outcomes(failed=1, skipped=2)
