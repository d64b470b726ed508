"""Subjects in numpy, torch and JAX: calls, gradients, slack, signatures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from supervisor import expected, inputs, problem

import seamproof
from seamproof import DeclarationError, Problem, loading
from seamproof.arrays import Numpy
from seamproof.errors import NotReady
from seamproof.formats import is_unwritten
from seamproof.subject import RoundTripError
from seamproof.varlen import Signature

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str, subject: str = "attention"):
    """Returns an example's subject."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, subject)


def run(subject, raw, values):
    """Returns a subject's results by name."""
    p = Problem.from_json(raw, subject.open())
    answer = subject.run(p, subject.put(p, values))
    return answer.tensors | {"damage": answer.damage}


def compare(raw, values, got, atol):
    """Holds results against the right answer in all rows that hold tokens."""
    for name, right in expected(raw, values).items():
        if got.get(name) is not None:
            token = ~np.isnan(right)
            np.testing.assert_allclose(got[name][token], right[token], atol=atol, err_msg=name)


MASKS = [
    {},
    {"right": 0},
    {"left": 1, "right": 0},
    {"left": 2, "right": 1, "slack": 1},
    {"slack": 7, "heads": (4, 2)},
]


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_torch_with_gradients(options, form):
    pytest.importorskip("torch")
    subject = load("torch_attention")
    raw = problem([(3, 5), (0, 2), (4, 0), (1, 1), (6, 2)], backward=True, form=form, **options)
    values = inputs(raw)
    got = run(subject, raw, values)
    compare(raw, values, got, 1e-5 if form == "f32" else 0.1)
    if "slack" in options:
        assert is_unwritten(got["out"][-options["slack"] :]).all() and is_unwritten(got["dv"][-1]).all()
    assert got["dsink"].shape == (0,)


def test_torch_with_a_soft_cap():
    pytest.importorskip("torch")
    subject = load("torch_attention")
    assert subject.declared["table"]["softcap"] is True
    raw = problem([(3, 5), (2, 2)], backward=True, softcap=1.5, right=0)
    values = inputs(raw)
    compare(raw, values, run(subject, raw, values), 1e-5)


@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 1, "right": 0}, {"left": 1, "right": 2}])
def test_jax_with_gradients(options):
    pytest.importorskip("jax")
    subject = load("jax_attention")
    raw = problem(
        [(3, 5), (4, 4), (1, 6)], align="top-left", dims=(4, 4), padding=1, slack=2, backward=True, **options
    )
    values = inputs(raw)
    for name in ("q", "k", "v", "dout"):
        values[name] = np.nan_to_num(values[name], nan=1e30)
    got = run(subject, raw, values)
    compare(raw, values, got, 1e-4)
    assert got.get("lse") is None and is_unwritten(got["out"][-2:]).all()


def test_jax_with_gradients_that_the_function_gives():
    pytest.importorskip("jax")

    @seamproof.subject(arrays="jax", device="cpu", formats=["f32"], statistics=[])
    def copies(p, q, k, v, dout=None, sink=None):
        # numpy takes no array that is traced.
        dq = None if dout is None else np.asarray(dout) * 2
        return seamproof.Result(np.asarray(q), dq=dq, dk=np.asarray(k), dv=np.asarray(v))

    raw = problem([(3, 5)], dims=(3, 3), backward=True)
    values = inputs(raw)
    got = run(copies, raw, values)
    np.testing.assert_array_equal(got["out"], values["q"])
    np.testing.assert_array_equal(got["dq"], values["dout"] * 2)


def backward(dout, q, k, v, out, lse, cu_seqlens_q, **more):
    """Returns gradients of a kernel that copies q."""
    return dout * 1, k * 0, v * 0


@seamproof.flash_varlen(backward=backward, lse=False)
def copies(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale):
    """Copies q, without the slack that it was given."""
    return q[: cu_seqlens_q[-1]]


def test_a_kernel_that_gives_its_gradients():
    raw = problem([(3, 5)], dims=(3, 3), slack=2, backward=True)
    values = inputs(raw)
    got = run(copies, raw, values)
    np.testing.assert_array_equal(got["out"][:3], values["q"][:3])
    np.testing.assert_array_equal(got["dq"][:3], values["dout"][:3])
    assert got["out"].shape == (5, 2, 3) and is_unwritten(got["out"][3:]).all() and got.get("lse") is None
    assert copies.declared["table"]["masks"]["forms"] == ["full"]
    assert copies.declared["table"]["statistics"] == []


def test_sinks_and_max_logit():
    @seamproof.subject(arrays="numpy", formats=["f32"], sinks=["learnable"], statistics=["lse", "max_logit"])
    def kernel(p, q, k, v, dout, sink):
        right = expected(p.raw, {"q": q, "k": k, "v": v, "dout": dout, "sink": sink})
        return seamproof.Result(**{name: array.astype(np.float32) for name, array in right.items()})

    raw = problem([(3, 5), (1, 0)], sink="learnable", backward=True)
    values = inputs(raw)
    got = run(kernel, raw, values)
    compare(raw, values, got, 1e-5)
    assert got["dsink"].shape == (2,) and got["max_logit"].shape == (2,)


def test_defaults_follow_the_signature():
    def plain(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
        pass

    def rich(
        q,
        k,
        v,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        scale,
        is_causal,
        window_size=(None, None),
        softcap,
        s_aux,
    ):
        pass

    table = seamproof.flash_varlen(plain).declared["table"]
    wide = seamproof.flash_varlen(plain, table={"masks": {"window_most": 7}}).declared["table"]
    assert wide["masks"] == {**table["masks"], "window_most": 7}
    assert table["masks"] == {
        "forms": ["full", "causal"], "alignments": ["bottom-right"], "window_most": 2**30
    }  # fmt: skip
    assert table["softcap"] is False and table["sinks"] == ["none"] and table["backward"] is False
    assert table["layout"] == {
        "padding": False, "gaps": False, "first_offset": False, "slack": True, "steps": False
    }  # fmt: skip
    assert seamproof.packed(slack=True, equal=True) == {**table["layout"], "equal": True}
    assert [precision["q"] for precision in table["precisions"]] == ["f32"]
    subject = seamproof.flash_varlen(arrays="numpy", backward=False, arguments={"extra": 1})(rich)
    assert (
        subject.declared["table"]["sinks"] == ["none", "learnable"] and subject.declared["table"]["softcap"]
    )
    p = Problem.from_json(problem([(3, 5), (1, 1)], left=2, right=0))
    arguments = subject.call.arguments(p)
    assert arguments["cu_seq_q"].tolist() == [0, 3, 4] and arguments["cu_seq_k"].tolist() == [0, 5, 6]
    assert (arguments["is_causal"], arguments["window_size"], arguments["max_q"]) == (True, (2, 0), 3)
    assert arguments["extra"] == 1 and "softcap" not in arguments
    assert subject.call.arguments(Problem.from_json(problem([(3, 5)], right=0)))["window_size"] == (
        None,
        None,
    )


def test_signatures_that_are_none():
    with pytest.raises(DeclarationError, match="no argument cu_seqlens_q, cu_seqlens_k, softmax_scale"):
        seamproof.flash_varlen(lambda q, k, v: None)
    assert Signature.of(lambda q, k, v, **more: None).has("causal")
    with pytest.raises(DeclarationError, match="learnable_sink"):
        seamproof.flash_varlen(sinks=["learnable"])(lambda q, k, v, **more: None)


def test_padding_goes_with_seqused():
    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, softmax_scale):
        pass

    subject = seamproof.flash_varlen(seqused=True)(kernel)
    assert subject.declared["table"]["layout"]["padding"] is True
    arguments = subject.call.arguments(Problem.from_json(problem([(3, 5), (1, 1)], padding=2)))
    assert arguments["cu_seqlens_q"].tolist() == [0, 5, 8] and arguments["seqused_q"].tolist() == [3, 1]
    assert arguments["max_seqlen_q"] == 3, "the largest real length, not the largest span"

    def either(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, seqused_q=None, seqused_k=None):
        pass

    with pytest.raises(DeclarationError, match="must not take"):
        seamproof.flash_varlen(either).call.arguments(Problem.from_json(problem([(3, 5)], padding=2)))
    with pytest.raises(DeclarationError, match="asks for seqused_q, seqused_k, .*seqused=True"):
        seamproof.flash_varlen(kernel)


def test_pages_are_given_as_each_signature_has_them():
    def third(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, softmax_scale):
        pass

    def second(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, softmax_scale):
        pass

    raw = problem([(3, 5), (1, 1)]) | {"pages": {"size": 3, "count": 3, "table": [[2, 0], [1]]}}
    p = Problem.from_json(raw)
    subject = seamproof.flash_varlen(pages=[3], seqused=True, backward=False)(third)
    assert subject.declared["table"]["pages"] == [3]
    arguments = subject.call.arguments(p)
    assert arguments["cu_seqlens_k"] is None and arguments["seqused_k"].tolist() == [5, 1]
    assert arguments["page_table"].tolist() == [[2, 0], [1, 0]]
    assert arguments["cu_seqlens_q"].tolist() == [0, 3, 4]
    arguments = seamproof.flash_varlen(pages=[3])(second).call.arguments(p)
    assert arguments["cu_seqlens_k"].tolist() == [0, 5, 6] and arguments["block_table"].shape == (2, 2)
    plain = subject.call.arguments(Problem.from_json(problem([(3, 5), (1, 1)])))
    assert plain["cu_seqlens_k"].tolist() == [0, 5, 6] and "page_table" not in plain
    with pytest.raises(DeclarationError, match="page_table or block_table"):
        seamproof.flash_varlen(pages=[3])(lambda q, k, v, **more: None)


@pytest.mark.parametrize("padding", [0, 2])
def test_attention_in_pages(padding):
    raw = problem([(3, 5), (0, 0), (2, 4), (1, 1)], right=0, padding=padding, heads=(4, 2))
    values = inputs(raw)
    pages = {"size": 3, "count": 7, "table": [[6, 0], [], [4, 2], [1, 3]]}
    got = run(load("numpy_paged"), raw | {"pages": pages}, values)
    compare(raw, values, got, 1e-5)
    assert got["damage"] == []
    np.testing.assert_array_equal(got["lse"], run(load("numpy_paged"), raw, values)["lse"])


def test_a_pool_that_is_written_is_noticed():
    @seamproof.subject(arrays="numpy", formats=["f32"], backward=False, statistics=[], pages=[2])
    def writes(p, q, k, v, dout=None, sink=None):
        k[1, 1, 0, 2] += 1
        return np.zeros(p.shape("out"), np.float32)

    raw = problem([(1, 3)]) | {"pages": {"size": 2, "count": 2, "table": [[0, 1]]}}
    values = inputs(raw)
    (damage,) = run(writes, raw, values)["damage"]
    assert damage == {"tensor": "k", "first": [3, 0, 2], "elements": 1}


def test_padded_offsets_beside_real_ones():
    """TransformerEngine's calling form: real and padded offsets, and the caller's word where it is said."""
    subject = load("numpy_padded", "attention_te")
    assert subject.declared["table"]["forms"] == ["cu_seqlens", "pad_between_seqs", "no_pad_between_seqs"]
    raw = problem([(3, 5), (1, 1)], padding=2)
    for form, word in {"cu_seqlens": None, "pad_between_seqs": True, "no_pad_between_seqs": False}.items():
        p = Problem.from_json({**raw, "form": form})
        arguments = subject.call.arguments(p)
        assert (p.pad_between_seqs, arguments["pad_between_seqs"]) == (word, word)
    assert arguments["cu_seqlens_q"].tolist() == [0, 3, 4]
    assert arguments["cu_seqlens_q_padded"].tolist() == [0, 5, 8]
    assert arguments["cu_seqlens_kv"].tolist() == [0, 5, 6]
    assert arguments["cu_seqlens_kv_padded"].tolist() == p.kv.padded_offsets.tolist()
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_kv"]) == (3, 5), "of real tokens, of each side"
    assert "seqused_q" not in arguments

    def one_side(q, k, v, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, softmax_scale):
        pass

    with pytest.raises(DeclarationError, match="one side alone"):
        seamproof.flash_varlen(seqused=True)(one_side)


@pytest.mark.parametrize("name", ["attention", "attention_te"])
def test_padded_calls_and_their_gradients(name):
    raw = problem([(3, 5), (0, 0), (4, 2)], padding=2, slack=1, right=0, backward=True)
    values = inputs(raw)
    compare(raw, values, run(load("numpy_padded", name), raw, values), 1e-5)


def test_a_largest_length_that_is_too_small_is_an_error():
    def kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale):
        pass

    p = Problem.from_json(problem([(3, 5), (4, 1)]))

    def given(**arguments):
        return seamproof.flash_varlen(arrays="numpy", arguments=arguments)(kernel).call.arguments(p)

    assert (given()["max_q"], given()["max_k"]) == (4, 5)
    assert given(max_q=64)["max_q"] == 64
    with pytest.raises(seamproof.MaximumTooSmall, match="max_q=3 is too small: sequence 1 has 4 tokens"):
        given(max_q=3)
    with pytest.raises(seamproof.MaximumTooSmall, match="max_k=4 is too small: sequence 0 has 5 tokens"):
        given(max_k=4)


def test_sequences_in_another_order_of_memory():
    raw = problem([(3, 5), (0, 0), (2, 1)])
    raw["sequences"].reverse()
    values = inputs(raw)
    compare(raw, values, run(load("numpy_attention"), raw, values), 1e-5)


def test_latent_heads():
    raw = problem([(3, 5), (1, 9)], heads=(4, 1), dims=(576, 512), right=0)
    values = inputs(raw)
    compare(raw, values, run(load("numpy_attention"), raw, values), 1e-5)

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
        pass

    dims = seamproof.flash_varlen(kernel, d=[576], d_v=[512]).declared["table"]["dims"]
    assert dims == {"equal": False, "qk": [576], "v": [512]}


def test_declarations():
    declared = seamproof.subject(
        formats=["bf16"], p="f32", ds="fp16", d=seamproof.multiples(8, to=128), d_v=64, groups=[1, 4],
        promises=["rows_alone"], arithmetic={"accumulation": "f32-serial"}, start_seconds=300, arrays="torch",
        table={"lengths": {"most": 9}, "softcap": True},
    )(copies.function).declared  # fmt: skip
    table = declared["table"]
    assert table["precisions"] == [
        {"q": "bf16", "k": "bf16", "v": "bf16", "out": "bf16", "dout": "bf16", "p": "f32", "ds": "fp16",
         "gradients": "bf16"}
    ]  # fmt: skip
    assert table["dims"] == {"equal": False, "qk": {"from": 8, "to": 128, "multiple": 8}, "v": [64]}
    assert (
        table["heads"] == {"groups": [1, 4]} and table["lengths"] == {"most": 9} and table["softcap"] is True
    )
    assert declared["promises"] == {"rows_alone": True} and declared["start_seconds"] == 300
    assert declared["padding"] == {"inputs": "finite", "outputs": "unspecified"}
    for wrong in (
        {"formats": ["bf17"]},
        {"forms": ["thd"]},
        {"promises": ["fast"]},
        {"padding_inputs": "zero"},
        {"arithmetic": {"x": 1}},
    ):
        with pytest.raises(DeclarationError, match="is not known"):
            seamproof.subject(arrays="numpy", **wrong)(copies.function)
    with pytest.raises(DeclarationError, match="use 'left-window'"):
        seamproof.bottom_right(windows="left")


def test_results_that_are_wrong_in_kind():
    raw = problem([(2, 2)], dims=(3, 3), backward=True)

    def subject_of(result):
        return seamproof.subject(arrays="numpy", formats=["f32"])(lambda p, q, k, v, dout, sink: result)

    lse = np.zeros((2, 2), np.float32)
    out = np.zeros((2, 2, 3), np.float32)
    for result, error, words in [
        (None, DeclarationError, "returned None"),
        ((), DeclarationError, "empty tuple"),
        ((out, lse), DeclarationError, "no dq came back"),
        (
            seamproof.Result(out, lse, grads=seamproof.autograd),
            DeclarationError,
            "no automatic differentiation",
        ),
        ((out.astype(np.float16), lse), TypeError, "out came back as float16"),
        ((np.broadcast_to(out, (2**40, *out.shape)), lse), TypeError, r"out has shape \[1099511627776, 2, 2, 3\]"),
    ]:
        with pytest.raises(error, match=words):
            run(subject_of(result), raw, inputs(raw))


def test_a_backward_is_not_called_on_a_forward_that_is_none():
    raw = problem([(2, 2)], backward=True)
    values = inputs(raw)
    lse = np.zeros((raw["heads"]["q"], 2), np.float32)

    def subject_of(out, lse=lse, gradients=(1, 2)):
        def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
            return out(q, v), lse

        return seamproof.flash_varlen(
            arrays="numpy", formats=["f32"], backward=lambda *a, **b: gradients
        )(forward)

    def right(q, v):
        return np.zeros((*q.shape[:2], v.shape[2]), np.float32)

    for subject, error, words in [
        (subject_of(lambda q, v: right(q, v).reshape(len(q), -1)), TypeError, r"out has shape \[2, .*not called"),
        (subject_of(lambda q, v: None), TypeError, "out is a NoneType"),
        (subject_of(right, lse=None), DeclarationError, "no lse came back"),
        (subject_of(right), TypeError, "the backward returned 2 values; return dq, dk, dv"),
        (subject_of(right, gradients=lse), TypeError, "the backward returned one value"),
    ]:
        with pytest.raises(error, match=words):
            run(subject, raw, values)


def test_numbers_of_another_format_are_noticed():
    raw = problem([(2, 2)], form="fp16")
    values = inputs(raw)
    values["q"][0, 0, 0] = 1 + 2**-15
    subject = seamproof.subject(arrays="numpy", formats=["fp16"], backward=False)(lambda *a, **b: None)
    with pytest.raises(RoundTripError, match="q changes on its way into fp16"):
        run(subject, raw, values)


def test_what_was_not_written_is_seen():
    torch = pytest.importorskip("torch")

    @seamproof.subject(arrays="torch", formats=["bf16"], device="cpu", backward=False)
    def kernel(p, q, k, v, dout, sink):
        out = p.empty()
        out[1:] = 1
        return out, torch.zeros(p.shape("lse"))

    raw = problem([(3, 3)], form="bf16", slack=1)
    got = run(kernel, raw, inputs(raw))
    assert is_unwritten(got["out"][0]).all() and (got["out"][1:] == 1).all()
    assert is_unwritten(got["lse"][:, 3]).all()


@pytest.mark.parametrize(("library", "form"), [("numpy", "f32"), ("numpy", "fp16"), ("torch", "bf16")])
def test_an_input_that_the_kernel_writes_into_is_told(library, form):
    pytest.importorskip(library)

    @seamproof.subject(arrays=library, formats=[form], backward=False, statistics=[])
    def kernel(p, q, k, v, dout, sink):
        v[1, 0, 2] = 7
        v[3, 0, 0] = 7
        return v[: p.q.rows]

    raw = problem([(2, 4)], heads=(1, 1), form=form)
    got = run(kernel, raw, inputs(raw))
    assert got["damage"] == [{"tensor": "v", "first": [1, 0, 2], "elements": 2}]


def test_inputs_that_hold_nan_and_stay_are_no_damage():
    subject = load("numpy_attention")
    raw = problem([(2, 4)], slack=1)
    assert run(subject, raw, inputs(raw))["damage"] == []


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_copies_of_torch_hold_what_the_arrays_hold(form):
    torch = pytest.importorskip("torch")

    @seamproof.subject(arrays="torch", formats=[form], device="cpu", backward=False)
    def kernel(p, q, k, v, dout, sink):
        dtype = p.library.dtype(form)
        # Every other lane of a larger tensor, and a transposed one of f64.
        out = torch.arange(4 * 2 * 6).reshape(4, 2, 6).to(dtype)[:, :, ::2]
        return out, torch.arange(8, dtype=torch.float64).reshape(4, 2).T

    raw = problem([(4, 2)], dims=(3, 3), form=form)
    plain = run(kernel, raw, inputs(raw))
    # As on a device, where results are read from copies.
    library = kernel.open()
    library.asynchronous, library.finish = True, lambda: None
    copied = run(kernel, raw, inputs(raw))
    for name in ("out", "lse"):
        np.testing.assert_array_equal(plain[name], copied[name])
    assert copied["out"][0, 0].tolist() == [0, 2, 4] and copied["lse"][0].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_results_of_torch_without_elements_are_read_as_on_a_device(lengths):
    torch = pytest.importorskip("torch")

    @seamproof.subject(arrays="torch", formats=["bf16"], device="cpu", backward=False)
    def kernel(p, q, k, v, dout, sink):
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])

    library = kernel.open()
    library.asynchronous, library.finish = True, lambda: None
    raw = problem([lengths], dims=(3, 3), form="bf16")
    got = run(kernel, raw, inputs(raw))
    assert got["out"].shape == (0, 2, 3) and got["lse"].shape == (2, 0)


def test_inputs_of_torch_that_move_as_one_are_right_and_apart():
    torch = pytest.importorskip("torch")
    from seamproof.arrays import ALIGNMENT, Torch

    library = Torch("cpu")
    library.asynchronous = True  # as on a GPU
    rng = np.random.default_rng(1)
    values = {
        "q": (rng.integers(-9, 9, (5, 3, 7)).astype(np.float32), "bf16"),
        "k": (rng.standard_normal((4, 3)).astype(np.float32), "f32"),
        "v": (rng.integers(-9, 9, (256,)).astype(np.float32), "fp16"),
        "sink": (np.zeros(0, np.float32), "f32"),
    }
    put = library.put_all(values)
    first = put["q"].data_ptr()
    for name, (array, form) in values.items():
        assert put[name].dtype == library.dtype(form)
        assert not array.size or (put[name].data_ptr() - first) % ALIGNMENT == 0
        np.testing.assert_array_equal(library.get(put[name], form, name), array)
    # Behind an input, numbers are none.
    q = put["q"]
    behind = torch.as_strided(q, (64,), (1,), q.storage_offset() + q.numel())
    assert behind.isnan().all()


class Streams(Numpy):
    """numpy as if on a device: what a kernel starts on a stream of its own is done when the device is idle."""

    asynchronous = True

    def __init__(self):
        super().__init__()
        self.started = []

    def finish(self):
        while self.started:
            self.started.pop()()


def on_a_stream(waits):
    """Returns a kernel that fills its results on a stream of its own, for which it waits or does not."""

    @seamproof.subject(arrays="numpy", formats=["f32"], backward=False)
    def kernel(p, q, k, v, dout, sink):
        out, lse = p.empty(), p.empty("lse")
        library = kernel.open()
        library.started += [lambda: out.fill(1), lambda: lse.fill(2)]
        if waits:
            library.finish()
        return out, lse

    kernel._library = Streams()
    return kernel


def test_results_of_a_stream_that_nobody_waits_for_are_told():
    raw = problem([(2, 4)])
    assert (run(on_a_stream(True), raw, inputs(raw))["out"] == 1).all()
    subject = on_a_stream(False)
    with pytest.raises(
        NotReady, match=r"caller's stream had ended \(out, lse\): the kernel works on a stream"
    ):
        run(subject, raw, inputs(raw))
    assert not subject.open().started, "nothing leaks into the next run"


def test_a_late_error_of_the_device_belongs_to_its_run():
    subject = on_a_stream(False)

    def fails():
        raise RuntimeError("an illegal memory access")

    subject._library.started.append(fails)
    raw = problem([(2, 4)])
    with pytest.raises(RuntimeError, match="illegal"):
        run(subject, raw, inputs(raw))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_views_hold_the_same_elements_laid_out_in_each_way(library):
    from seamproof.views import KINDS, kind_of, laid_out

    rows = np.random.default_rng(2).standard_normal((5, 3, 4)).astype(np.float32)
    alike = np.repeat(rows[:1], 5, axis=0)
    if library == "torch":
        torch = pytest.importorskip("torch")
        rows, alike = torch.from_numpy(rows), torch.from_numpy(alike)
    strides = set()
    for kind in KINDS:
        for array in (rows, alike, rows[:0]):
            view = laid_out(array, kind)
            np.testing.assert_array_equal(np.asarray(view), np.asarray(array))
        view = laid_out(alike, kind)
        strides.add(tuple(view.stride()) if library == "torch" else view.strides)
    assert len(strides) == len(KINDS), strides
    assert {kind_of(seed, "q") for seed in range(60)} == set(KINDS)


def test_gradients_flow_through_a_view():
    torch = pytest.importorskip("torch")
    from seamproof.views import KINDS, laid_out

    for kind in KINDS:
        leaf = torch.ones(4, 2, 3, requires_grad=True)
        (laid_out(leaf, kind) * 2).sum().backward()
        assert leaf.grad.eq(2).all(), kind


def test_a_library_that_is_not_installed_is_told_apart_from_a_fault(tmp_path):
    from seamproof.loading import load as load_target
    from seamproof.session import describe

    file = tmp_path / "lacking.py"
    for text, is_lacking in (("import a_library_that_is_nowhere", True), ("1 / 0", False), ("import", False)):
        file.write_text(text)
        with pytest.raises(Exception) as caught:
            load_target(str(file), {}, {})
        assert describe(caught.value).startswith("NotHere: not here: ") == is_lacking, text


@pytest.mark.parametrize("fault", [None, "order", "late", "ids"])
def test_a_ring_of_ranks_in_jax(fault):
    pytest.importorskip("jax")
    raw = problem([(8, 8), (4, 4)], heads=(2, 1), dims=(8, 8), right=0, padding=4, backward=True)
    raw["parallel"] = {"algorithm": "ring", "balance": "dual-chunk", "world": 2, "ranks": [0, 1]}
    loading.give({} if fault is None else {"fault": fault})
    values, subject = inputs(raw), load("jax_ring")
    loading.give({})
    got = run(subject, raw, values)
    if fault is None:
        compare(raw, values, got, 1e-5)
        return
    with pytest.raises(AssertionError):
        compare(raw, values, got, 1e-5)
