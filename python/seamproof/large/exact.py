"""Every row of a large run in the modes `pairs` and `routing`, whose right results are known bit for bit.

A query gives each of its one or two active keys the weight 1/n, and no other key any (`judge/src/exact`). So out, dq, and
what a query adds to dk and dv are made of one or two keys: the exact answer costs as much as reading the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..formats import UNIT
from ..problem import Problem
from .ops import NumpyOps
from .values import BIAS, PAYLOAD, Inputs, Plan

# The exponent of the smallest normal number of each format.
LEAST = {"bf16": -126, "fp16": -14, "f32": -126}


@dataclass
class Tally:
    """Elements of one tensor that were compared, and the one that is furthest off in the first piece with a wrong one."""

    compared: int = 0
    failed: int = 0
    place: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, ops: NumpyOps, got: Any, exact: Any, most: Any, asked: Any, rows: int, heads: int) -> None:
        """Compares elements `[rows, heads, …]`, of which the first lies in this row and head of the tensor."""
        error = abs(got - exact)
        wrong = asked & ~(error <= most)
        self.compared += int(asked.sum())
        failed = int(wrong.sum())
        if failed and not self.failed:
            error = ops.where(ops.isnan(error), ops.zeros(1) + np.inf, ops.f64(error))
            error = ops.host(ops.where(wrong, error, ops.zeros(1) - 1))
            at = np.unravel_index(int(error.argmax()), error.shape)
            self.place = [int(at[0]) + rows, int(at[1]) + heads, *(int(each) for each in at[2:])]
            self.values = [float(ops.host(each[at])) for each in (got, exact)]
        self.failed += failed

    def told(self) -> dict[str, Any]:
        """Returns the tally as the program reads it. A value that is no number of JSON is a text."""
        values = [value if np.isfinite(value) else str(value) for value in self.values]
        return {"compared": self.compared, "failed": self.failed, "place": self.place, "values": values}


@dataclass(frozen=True)
class Given:
    """What some queries of some heads give to their keys, `[queries, heads]`: two keys each, the second of weight 0 or ½."""

    keys: tuple[Any, Any]
    weights: tuple[Any, Any]
    sees: Any


class Exact:
    """The comparison of one run with the exact results of its mode.

    `known` says which results are exact, how far an LSE of one key and of two may be off, and how many units of a sum
    can be held exactly.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, ops: NumpyOps, tensors: dict[str, Any], known: dict[str, Any]
    ):
        self.p, self.inputs, self.ops, self.tensors, self.known = problem, inputs, ops, tensors, known
        names = ["lse"] if tensors.get("lse") is not None else []
        names += ["out"] if known["out"] else []
        names += ["dv"] if known["dv"] else []
        names += ["dk", "dq"] if known["gradients"] else []
        self.tallies = {name: Tally() for name in names}

    def compared(self) -> dict[str, Any]:
        """Compares every row, and returns the tallies."""
        for index in range(len(self.p.sequences)):
            if not self.p.sequences[index].q.len or not self.p.sequences[index].kv.len:
                continue
            plan = Plan(self.inputs, index)
            for heads in self._head_pieces(plan):
                self._heads(plan, heads)
        return {name: tally.told() for name, tally in self.tallies.items()}

    def _width(self) -> int:
        return max(self.p.dim_qk, self.p.dim_v)

    def _head_pieces(self, plan: Plan) -> Iterator[slice]:
        size = max(1, self.ops.most // max(1, plan.sequence.kv.len * self._width()))
        for start in range(0, self.p.heads_kv, size):
            yield slice(start, min(self.p.heads_kv, start + size))

    def _heads(self, plan: Plan, heads: slice) -> None:
        """Compares a sequence's rows of a few KV heads and their query heads."""
        ops, p, count = self.ops, self.p, heads.stop - heads.start
        keys = plan.sequence.kv.len * count
        sums = {}
        if "dv" in self.tallies:
            sums["dv"], sums["weights"] = ops.zeros(keys, p.dim_v), ops.zeros(keys)
        if "dk" in self.tallies:
            sums["dk"], sums["ds"] = ops.zeros(keys, p.dim_qk), ops.zeros(keys)
        size = max(1, ops.most // 8 // (count * p.group * self._width()))
        for start in range(0, plan.sequence.q.len, size):
            positions = np.arange(start, min(plan.sequence.q.len, start + size))
            self._queries(plan, heads, positions, sums)
        if "dv" in sums:
            self._keys(plan, heads, "dv", sums["dv"], sums["weights"][:, None] + ops.zeros(1, p.dim_v), 0.5)
        if "dk" in sums:
            # The largest magnitude of a query's lanes, in units of the amplitude.
            lanes = np.where(plan.kinds == BIAS, abs(plan.steps - plan.lanes), plan.kinds != PAYLOAD)
            units = sums["ds"][:, None] * ops.f64(ops.integers(lanes))
            unit = p.scale * plan.amplitude
            self._keys(plan, heads, "dk", sums["dk"], units * unit, unit / 4)

    def given(self, plan: Plan, positions: Any, heads: slice) -> Given:
        """Returns what queries give to the keys that they choose and see."""
        ops, group = self.ops, self.p.group
        of = slice(heads.start * group, heads.stop * group)
        groups, sees = (each[:, of] for each in plan.chosen(positions))
        first, end = (each[:, None] for each in plan.visible(positions))
        if plan.pairs:
            offsets = plan.offsets[ops.integers(range(self.p.heads_q))[of] // group]
            low = 2 * groups - offsets
            one = ops.where(low > first, low, first + low * 0)
            other = ops.where(low + 1 < end - 1, low + 1, end - 1 + low * 0)
        else:
            one = other = groups
        zero = groups * 0
        one, other = ops.where(sees, one, zero), ops.where(sees, other, zero)
        both = ops.f32(one != other)
        weight = ops.f32(sees)
        return Given((one, other), (weight * (1 - both / 2), weight * both / 2), sees)

    def _rows(self, name: str, plan: Plan, positions: np.ndarray, heads: slice) -> Any:
        """Returns query-side rows of a few KV heads, `[queries, heads, …]`."""
        group, offset = self.p.group, plan.sequence.q.offset
        rows = slice(offset + int(positions[0]), offset + int(positions[-1]) + 1)
        of = slice(heads.start * group, heads.stop * group)
        return self.tensors["lse"][of, rows].T if name == "lse" else self.tensors[name][rows, of]

    def _queries(self, plan: Plan, heads: slice, positions: np.ndarray, sums: dict[str, Any]) -> None:
        ops, p, group = self.ops, self.p, self.p.group
        count, kv = heads.stop - heads.start, plan.sequence.kv
        given = self.given(plan, ops.integers(positions), heads)
        row = plan.sequence.q.offset + int(positions[0])
        first = heads.start * group

        def tally(name: str, exact: Any, most: Any, asked: Any) -> None:
            got = self._rows(name, plan, positions, heads)
            self.tallies[name].add(ops, ops.f64(got), ops.f64(exact), most, asked, row, first)

        if "lse" in self.tallies:
            two = given.weights[1] > 0
            logit = p.scale * plan.amplitude * plan.steps
            exact = ops.where(two, ops.zeros(1) + logit + np.log(2.0), ops.zeros(1) + logit)
            most = ops.where(two, ops.zeros(1) + self.known["lse"][1], ops.zeros(1) + self.known["lse"][0])
            tally("lse", exact, most, given.sees)
        # The KV head of each query head, in this piece.
        of = ops.integers(np.arange(count * group) // group)

        def keys(name: str) -> tuple[Any, Any]:
            flat = self.tensors[name][kv.offset : kv.offset + kv.len, heads]
            flat = flat.reshape(-1, flat.shape[-1])
            return tuple(ops.f32(flat[key * count + of]) for key in given.keys)

        values, weights = keys("v"), [weight[..., None] for weight in given.weights]
        every = given.sees | ~given.sees
        if "out" in self.tallies:
            exact = weights[0] * values[0] + weights[1] * values[1]
            tally("out", exact, ops.zeros(1), every[..., None] | (exact != exact))
        if not sums:
            return
        dout = ops.f32(self._rows("dout", plan, positions, heads))
        places = [(key * count + of).reshape(-1) for key in given.keys]
        for place, weight in zip(places, given.weights, strict=True):
            ops.add_at(sums["dv"], place, ops.f64(dout * weight[..., None]).reshape(-1, p.dim_v))
            ops.add_at(sums["weights"], place, ops.f64(weight).reshape(-1))
        if "dk" not in sums:
            return
        dots = [(dout * value).sum(-1) for value in values]
        d = given.weights[0] * dots[0] + given.weights[1] * dots[1]
        ds = [weight * (dot - d) for weight, dot in zip(given.weights, dots, strict=True)]
        k, q = keys("k"), ops.f64(self._rows("q", plan, positions, heads))
        exact = p.scale * ops.f64(ds[0][..., None] * k[0] + ds[1][..., None] * k[1])
        tally("dq", exact, self._half_spacing(exact), every[..., None] | (exact != exact))
        for place, each in zip(places, ds, strict=True):
            ops.add_at(sums["dk"], place, (p.scale * ops.f64(each)[..., None] * q).reshape(-1, p.dim_qk))
            ops.add_at(sums["ds"], place, ops.f64(abs(each)).reshape(-1))

    def _keys(self, plan: Plan, heads: slice, name: str, exact: Any, magnitudes: Any, unit: float) -> None:
        """Compares a gradient of keys where its terms add up to few enough units."""
        kv, count = plan.sequence.kv, heads.stop - heads.start
        got = self.ops.f64(self.tensors[name][kv.offset : kv.offset + kv.len, heads])
        shape = (kv.len, count, exact.shape[-1])
        asked = (magnitudes < self.known["units"] * unit).reshape(shape)
        exact = exact.reshape(shape)
        self.tallies[name].add(
            self.ops, got, exact, self._half_spacing(exact), asked, kv.offset, heads.start
        )

    def _half_spacing(self, exact: Any) -> Any:
        """Returns the most that rounding to the gradients' format changes numbers."""
        form = self.p.precision["gradients"]
        exponents = self.ops.exponents(exact).clip(LEAST[form])
        return UNIT[form] * self.ops.powers(exponents)
