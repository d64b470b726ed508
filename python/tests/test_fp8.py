"""Subjects in FP8: codes and descales reach a kernel as the program sends them, and a wrong reader is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from supervisor import problem
from test_program import load

import seamproof
from seamproof import Problem
from seamproof.declare import declaration
from seamproof.formats import is_unwritten, narrow, widen

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_code_is_its_own_number(form):
    codes = np.arange(256, dtype=np.uint8)
    numbers = widen(codes, form)
    finite = np.isfinite(numbers)
    assert (narrow(numbers[finite], form) == codes[finite]).all()
    assert np.isnan(widen(narrow(np.full(1, np.nan, np.float32), form), form)).all()
    assert numbers[finite].max() == {"e4m3": 448, "e5m2": 57344}[form]
    types = pytest.importorskip("ml_dtypes")
    kind = {"e4m3": types.float8_e4m3fn, "e5m2": types.float8_e5m2}[form]
    assert np.array_equal(codes.view(kind).astype(np.float32), numbers, equal_nan=True)


def test_descales_follow_the_sequences_in_memory():
    raw = problem([(2, 3), (1, 4), (3, 1)], heads=(4, 2))
    # The first listed sequence lies behind the others.
    raw["sequences"] = raw["sequences"][1:] + raw["sequences"][:1]
    for scaling, rows in (
        ("tensor", 1),
        ("head", 1),
        ("sequence-group", 3),
        ("token-head", 6),
        ("block2x2", 4),
    ):
        raw["precision"] |= dict.fromkeys("qkv", f"e4m3/{scaling}")
        p = Problem.from_json(raw)
        heads = {"tensor": 1, "sequence-group": 2}.get(scaling, 4)
        shape = p.descale_shape("q")
        assert shape == (rows, heads, 2 if scaling == "block2x2" else 1) and p.form("q") == "e4m3"
        given = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        got = p.with_descales({"q": given}).descales["q"]
        of_first, of_others = (1, 3), {"sequence-group": 1, "token-head": 2, "block2x2": 1}.get(scaling)
        assert got.shape == shape and of_first
        expected = given if of_others is None else np.concatenate([given[-of_others:], given[:-of_others]])
        assert (got == expected).all(), scaling


MISREAD = {
    "the descale of k forgotten": ("of_q * of_k * codes", "of_q * codes"),
    "the descale of v of the first head": ("(of_v / 256)", "(p.descales['v'][sequence, 0, 0] / 256)"),
    "descales of the first sequence": (
        "p.descales[name][sequence, kv_head, 0]",
        "p.descales[name][0, kv_head, 0]",
    ),
    "weights rounded as they are": ("(256 * weights)", "(weights)"),
    "the factor of the weights in the statistics": ("np.log(total[some])", "np.log(256 * total[some])"),
}


def test_the_example_holds(tmp_path):
    pytest.importorskip("ml_dtypes")
    right = load(tmp_path / "right.py", (EXAMPLES / "numpy_fp8.py").read_text())
    report = seamproof.check(right, cases=150, seed=3)
    assert report.outcome in ("held", "too-little-run") and report.held > 100


@pytest.mark.parametrize("what", MISREAD)
def test_a_wrong_reader_is_found(tmp_path, what):
    pytest.importorskip("ml_dtypes")
    text, (right, wrong) = (EXAMPLES / "numpy_fp8.py").read_text(), MISREAD[what]
    assert text.count(right) == 1
    edited = text.replace(right, wrong)
    if what == "weights rounded as they are":
        edited = edited.replace("(of_v / 256)", "of_v")
    with pytest.raises(AssertionError) as caught:
        seamproof.check(load(tmp_path / "wrong.py", edited), cases=60, seed=1)
    told = dict(line.split(None, 1) for line in str(caught.value).splitlines()[1:5])
    assert json.loads(Path(told["case"]).read_text())["problem"]["precision"]["k"].startswith("e4m3/")


def test_what_a_kernel_quantises_has_given_descales_where_it_says_so():
    raw = problem([(2, 3)], heads=(2, 1))
    raw["precision"] |= {"p": "e4m3/tensor", "out": "e4m3/tensor", "ds": "e5m2", "gradients": "e5m2/tensor"}
    p = Problem.from_json(raw)
    assert p.given_descales() == ["p", "out", "dq", "dk", "dv"]
    assert p.descale_shape("dk") == (1, 1, 1) and p.descale_shape("ds") is None and p.form("ds") == "e5m2"
    p = p.with_descales({name: np.full((1, 1, 1), 1.5, np.float32) for name in p.given_descales()})
    assert p.descales["p"].shape == (1, 1, 1) and p.result_descales == dict.fromkeys(
        ("out", "dq", "dk", "dv"), 1.5
    )


def test_a_declaration_names_the_formats_of_what_is_quantised():
    words = {
        "p": "e4m3/tensor",
        "out": "e4m3/tensor",
        "dout": "e5m2/head",
        "ds": "e5m2",
        "gradients": "e5m2/tensor",
    }
    declared = declaration(formats=["e4m3/tensor"], **words)
    assert declared["table"]["precisions"] == [dict.fromkeys("qkv", "e4m3/tensor") | words]
    for name, word in {"out": "e4m3", "p": "e4m3/head", "gradients": "e4m3/head", "dout": "e4m3"}.items():
        with pytest.raises(seamproof.DeclarationError, match=name):
            declaration(formats=["e4m3/tensor"], **{name: word})


def test_codes_that_were_never_written_are_seen_and_others_are_values():
    pytest.importorskip("ml_dtypes")
    raw = problem([(2, 3)], heads=(1, 1))
    raw["precision"] |= dict.fromkeys(("q", "k", "v", "out"), "e4m3/tensor")
    raw["pass"] = "forward"
    p = Problem.from_json(raw).with_descales({"out": np.full((1, 1, 1), 0.75, np.float32)})
    out = p.empty("out")
    out[0] = 2.0
    amax = {"out": np.full(1, 1.5, np.float32), "p": 1.0}
    subject = seamproof.subject(
        lambda *_, **__: None, formats=["e4m3/tensor"], out="e4m3/tensor", backward=False
    )
    answer = subject.collect(p, seamproof.Result(out, lse=np.zeros(p.shape("lse"), np.float32), amax=amax))
    assert (answer.tensors["out"][0] == 1.5).all() and is_unwritten(answer.tensors["out"][1:]).all()
    assert answer.head()["ranks"][0]["amax"] == ["p", "out"] and answer.parts()[-1].tolist() == [1.0, 1.5]
    for amax in ({"s": 1.0}, {"out": np.zeros(2, np.float32)}):
        with pytest.raises((seamproof.DeclarationError, TypeError)):
            subject.collect(p, seamproof.Result(out, lse=np.zeros(p.shape("lse"), np.float32), amax=amax))


GIVEN = "numpy_fp8_given.py"
MISQUANTISED = {
    "the scale of out forgotten": (
        'quantised.store("out", out), lse',
        'quantised.store("out", out * descale["out"]), lse',
    ),
    "the descale of the weights forgotten": ('weighted * descale["p"] / total', "weighted / total"),
    "a conversion that does not saturate": ("np.clip(values * scale, -largest, largest)", "(values * scale)"),
    "the descale of dS of k": ('dq = ds @ k * descale["ds"]', 'dq = ds @ k * descale["k"]'),
    "the scale of dk in dv": ('quantised.store("dv", dv)', 'quantised.store("dk", dv)'),
    "an amax of the codes": ("self.keep(name, values)\n", "self.keep(name, self.numbers(name, values))\n"),
    "an amax that is lost": ("quantised.amax.get(name, np.float32(0)) for", "np.float32(0) for"),
}


def test_given_scales_hold(tmp_path):
    pytest.importorskip("ml_dtypes")
    right = load(tmp_path / "right.py", (EXAMPLES / GIVEN).read_text())
    report = seamproof.check(right, cases=100, seed=3)
    assert report.outcome in ("held", "too-little-run") and report.held > 65


@pytest.mark.parametrize("what", MISQUANTISED)
def test_a_wrong_quantiser_of_given_scales_is_found(tmp_path, what):
    pytest.importorskip("ml_dtypes")
    text, (right, wrong) = (EXAMPLES / GIVEN).read_text(), MISQUANTISED[what]
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        seamproof.check(load(tmp_path / "wrong.py", text.replace(right, wrong)), cases=40, seed=1)


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_a_nan_stays_one_whatever_its_payload(form):
    # The payloads of the first two do not fit two bits.
    bits = np.array([0x7F810000, 0xFF9F0000, 0x7FC00000], np.uint32)
    codes = narrow(bits.view(np.float32), form)
    assert np.isnan(widen(codes, form)).all()
    assert (codes >> 7).tolist() == [0, 1, 0]


def test_a_format_in_8_bits_names_its_scaling():
    with pytest.raises(seamproof.DeclarationError, match="'e4m3' names no scaling; write 'e4m3/sequence-group'"):
        seamproof.subject(formats=["e4m3"])(lambda p, q, k, v: None)
