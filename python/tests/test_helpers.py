"""The helpers of packed rows: their definition against the program's own values, and the comparison with a library."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from seamproof import helpers
from seamproof.helpers import __main__ as held

try:
    import torch
except ImportError:
    torch = None

CASES = json.loads((Path(__file__).parent / "helpers.json").read_text())
HEADS, DIM = 2, 2


def array(case, name, *shape):
    return np.array(case[name], np.float32).reshape(shape)


def tensor(case, name):
    return array(case, name, -1, HEADS, DIM)


def statistic(case, name):
    return array(case, name, HEADS, -1)


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_program(case):
    cu, size = np.array(case["cu"]), case["size"]
    for rank, rows in enumerate(case["partition"]):
        assert helpers.get_partitioned_indices(cu * size, size, rank).tolist() == rows
    assert helpers.rank_order(cu * size, size).tolist() == case["rank_order"]
    x = np.arange(case["rows"] * HEADS * DIM, dtype=np.float32).reshape(-1, HEADS, DIM)
    for half, rows in enumerate(case["halves"]):
        assert helpers.half_rows(cu, half).tolist() == rows
        assert (helpers.read_half_tensor(x, cu, half) == x[rows]).all()
        both = np.stack([x, -x])
        assert (helpers.read_half_tensor(both, cu, half) == both[:, rows]).all()
    copied = helpers.copy_valid_tokens(-x, x, cu, np.array(case["real"]))
    want = -x
    want[case["valid"]] = x[case["valid"]]
    assert (copied == want).all()
    blocks = helpers.convert_thd_to_bshd(x, cu, case["positions"])
    pairs = np.array(case["blocks"], int).reshape(-1, 2)
    flat = blocks.reshape(-1, HEADS, DIM)
    assert (flat[pairs[:, 1]] == x[pairs[:, 0]]).all() and np.delete(flat, pairs[:, 1], 0).sum() == 0
    back = helpers.convert_bshd_to_thd(blocks, cu, case["rows"])
    assert (back[: cu[-1]] == x[: cu[-1]]).all() and not back[cu[-1] :].any()


@pytest.mark.parametrize("case", CASES)
def test_merges_are_those_of_the_program(case):
    cu, rows = np.array(case["cu"]), case["rows"]
    lse, step = statistic(case, "lse"), statistic(case, "lse_step")
    merged = helpers.second_half_lse_correction(lse, step, cu)
    np.testing.assert_allclose(merged, statistic(case, "lse_merged"), rtol=3e-7, atol=3e-7)
    half = helpers.read_second_half_lse(merged, cu, rows // 2 + 3)
    assert (half[:, : cu[-1] // 2] == merged[:, case["halves"][1]]).all() and not half[:, cu[-1] // 2 :].any()
    for name, second in (("whole", False), ("second", True)):
        given = [statistic(case, f"{name}_{of}") for of in ("old_lse", "lse", "step_lse")]
        out, step = tensor(case, f"{name}_out"), tensor(case, f"{name}_step")
        got, size = helpers.out_correction(out, step, *given, cu, second)
        np.testing.assert_allclose(got, tensor(case, f"{name}_merged"), atol=1e-6)
        assert (size >= np.abs(got) * (size > 0) - 1e-12).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("first", "second"), helpers.UPDATES)
def test_gradients_are_those_of_the_program(case, first, second):
    cu, total = np.array(case["cu"]), case["rows"]
    draw = [((np.arange(rows * HEADS * DIM) * 37 + seed * 11) % 64 / 16 - 2) for rows, seed in
            ((total, 7), (-(-total // 2) if {"none", "zero"} & {first, second} else total, 8))]  # fmt: skip
    grad, step = (values.astype(np.float32).reshape(-1, HEADS, DIM) for values in draw)
    got = helpers.grad_correction(grad, step, cu, first, second)
    assert (got == tensor(case, f"{first} {second}")).all()
    pair = helpers.grad_correction(np.stack([grad, -grad]), np.stack([step, -step]), cu, first, second)
    assert (pair == np.stack([got, -got])).all()


# --- the comparison


class Library:
    """A library of TransformerEngine's functions on a CPU, row by row. `fault` names one that is wrong."""

    def __init__(self, fault=None):
        self.fault = fault

    @staticmethod
    def sequences(cu):
        return enumerate(itertools.pairwise(cu.tolist()))

    def thd_get_partitioned_indices(self, cu, total, size, rank):
        rows = []
        for _, (first, end) in self.sequences(cu):
            chunk = (end - first) // (2 * size)
            second = size + rank if self.fault == "chunk" else 2 * size - 1 - rank
            rows += [first + number * chunk + i for number in (rank, second) for i in range(chunk)]
        assert len(rows) == total // size
        return torch.tensor(rows, dtype=torch.int32)

    def _order(self, cu, size, total):
        ranks = [self.thd_get_partitioned_indices(cu, total, size, rank) for rank in range(size)]
        return torch.cat(ranks).long()

    def thd_sequence_order_to_cp_rank_order(self, x, cu, size, total):
        return x[self._order(cu, size, total)]

    def thd_cp_rank_order_to_sequence_order(self, x, cu, size, total):
        if self.fault == "gather for scatter":
            return x[self._order(cu, size, total)]
        out = torch.empty_like(x)
        out[self._order(cu, size, total)] = x
        return out

    def thd_copy_valid_tokens_from_per_split_to_rank_local(self, out, x, places, real):
        for number, (first, end) in self.sequences(places):
            used = end - first if self.fault == "padding" else int(real[number + 1] - real[number])
            out[first : first + used] = x[first : first + used]

    def thd_read_half_tensor(self, x, cu, half):
        rows = x if x.dim() == 4 else x[None]
        found = torch.full((len(rows), rows.shape[1] // 2, *rows.shape[2:]), math.nan, dtype=x.dtype)
        for _, (first, end) in self.sequences(cu):
            count = (end - first) // 2
            at = first + half * count
            found[:, first // 2 : first // 2 + count] = rows[:, at : at + count]
        return found if x.dim() == 4 else found[0]

    def _halves(self, lse, step, cu, packed):
        """Yields views of the second half of each sequence of an LSE, and of its rows in a step's."""
        for number, (first, end) in self.sequences(cu):
            count = (end - first) // 2
            whole = lse if packed else lse[number]
            half = step if packed else step[number]
            at, of_step = (first if packed else 0), (first // 2 if packed else 0)
            moved = 0 if self.fault == "first half" else count
            yield whole[:, at + moved : at + moved + count], half[:, of_step : of_step + count]

    def thd_second_half_lse_correction(self, lse, step, cu, packed):
        for whole, half in self._halves(lse, step, cu, packed):
            largest, smallest = torch.maximum(whole, half), torch.minimum(whole, half)
            whole.copy_(largest + torch.log1p(torch.exp(smallest - largest)))

    def thd_read_second_half_lse(self, lse, cu, packed, width):
        step = torch.zeros(*lse.shape[:-1], width)
        for whole, half in self._halves(lse, step, cu, packed):
            half.copy_(whole)
        return step

    def thd_out_correction(self, out, step, old, lse, step_lse, cu, second, packed):
        for number, (first, end) in self.sequences(cu):
            count = (end - first) // (1 + second)
            at, of_step = first + second * count, first // (1 + second)
            rows, of_rows = slice(at, at + count), slice(of_step, of_step + count)
            if packed:
                at_lse, of_lse, whole, of_old, half = rows, of_rows, lse, old, step_lse
            else:
                at_lse, of_lse = slice(second * count, second * count + count), slice(count)
                whole, of_old, half = lse[number], old[number], step_lse[number]
            keep = torch.exp(of_old[:, at_lse] - whole[:, at_lse]).T[..., None]
            share = torch.exp(half[:, of_lse] - whole[:, at_lse]).T[..., None]
            keep = 1.0 if self.fault == "known total" else keep
            out[rows] = (out[rows].float() * keep + step[of_rows].float() * share).to(out.dtype)

    def thd_grad_correction(self, grad, step, cu, first, second):
        rows, of_step = (x if x.dim() == 4 else x[None] for x in (grad, step))
        is_half = bool({"none", "zero"} & {first, second})
        for _, (begin, end) in self.sequences(cu):
            count = (end - begin) // 2
            for number, word in enumerate((first, second)):
                own = rows[:, begin + number * count : begin + (number + 1) * count]
                at = begin // 2 if is_half else begin + number * count
                of = of_step[:, at : at + count]
                if word == "add" and self.fault != "copy for add":
                    own += of
                elif word in ("add", "copy"):
                    own.copy_(of)
                elif word == "zero":
                    own.zero_()

    def convert_thd_to_bshd(self, x, cu, count, positions):
        blocks = torch.zeros(count, positions, *x.shape[1:], dtype=x.dtype)
        for number, (first, end) in self.sequences(cu):
            blocks[number, : end - first] = x[first:end]
        return blocks

    def convert_bshd_to_thd(self, blocks, cu, rows):
        x = torch.zeros(rows, *blocks.shape[2:], dtype=blocks.dtype)
        for number, (first, end) in self.sequences(cu):
            if self.fault == "one row short":
                end = max(end - 1, first)
            x[first:end] = blocks[number, : end - first]
        return x


@pytest.fixture
def beside():
    """Returns a function that holds a library to the definition on a CPU."""
    if torch is None:
        pytest.skip("torch is not installed")
    return lambda library: (held.beside(library, torch, "cpu", 12, 1), len(held.CHECKS))


def test_a_right_library_holds(beside, capsys):
    code, checks = beside(Library())
    said = capsys.readouterr().out
    assert code == 0 and said.count(", 0 differ") == checks == 11, said


@pytest.mark.parametrize(
    ("fault", "functions"),
    [
        ("chunk", {"thd_get_partitioned_indices", "thd_sequence_order_to_cp_rank_order",
                   "thd_cp_rank_order_to_sequence_order"}),
        ("gather for scatter", {"thd_cp_rank_order_to_sequence_order"}),
        ("padding", {"thd_copy_valid_tokens_from_per_split_to_rank_local"}),
        ("first half", {"thd_second_half_lse_correction", "thd_read_second_half_lse"}),
        ("known total", {"thd_out_correction"}),
        ("copy for add", {"thd_grad_correction"}),
        ("one row short", {"convert_bshd_to_thd"}),
    ],
)  # fmt: skip
def test_a_wrong_library_is_found(beside, capsys, fault, functions):
    code, _ = beside(Library(fault))
    said = capsys.readouterr().out.splitlines()
    wrong = {line.split()[0] for line in said if "packs, " in line and ", 0 differ" not in line}
    assert code == 2 and wrong == functions, said


def test_a_function_that_is_not_there_is_named(beside, capsys):
    class Older:
        def __getattr__(self, name):
            if name.startswith("thd_copy_valid"):
                raise AttributeError(name)
            return getattr(Library(), name)

    code, _ = beside(Older())
    assert code == 0 and "thd_copy_valid" in capsys.readouterr().out.split(" is not in this version")[0]


def test_a_machine_without_the_library_is_told(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert held.main([]) == 1 and "not installed" in capsys.readouterr().err
